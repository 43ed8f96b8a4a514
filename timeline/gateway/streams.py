"""Event streams: deliveries as server-sent events, as many at once as their reader has credit for.

A delivery uses credit until its receipt is settled through this gateway, or its lease ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Set

import msgspec

from timeline.clock import Clock
from timeline.driver.consume.pull import PulledDelivery
from timeline.driver.times import Duration
from timeline.errors import Invalid, TimelineError
from timeline.gateway.problems import ClientGone, problem_of
from timeline.gateway.requests import ApiRequest, too_crowded, while_connected
from timeline.gateway.service import HttpGateway, serving
from timeline.gateway.values import leased_message
from timeline.model import check_topic_name

ALIVE_S = 15.0
"""How long a stream is silent at most. A comment then shows that it lives."""
CROWDED_S = 1.0
"""How long a stream rests while callers leave too much unread."""
MAX_CREDIT = 1_000
EVENT_STREAM = "text/event-stream"


class EventStream:
    """One open stream. `credit`: how many deliveries its reader may have at once."""

    def __init__(self, credit: int) -> None:
        if not 1 <= credit <= MAX_CREDIT:
            raise Invalid(f"credit must be a whole number from 1 to {MAX_CREDIT}, not {credit}")
        self._credit = credit
        self._until_ms: dict[str, float] = {}
        """By receipt: when its lease ends (monotonic)."""
        self._freed = asyncio.Event()
        self._clock = Clock()

    def settled(self, receipts: Set[str]) -> None:
        """Free the credit of these receipts, if they are of this stream."""
        for receipt in self._until_ms.keys() & receipts:
            del self._until_ms[receipt]
            self._freed.set()

    def extended(self, receipts: Set[str], until_ms: float) -> None:
        """Note that the leases of these receipts last until then (monotonic) at least, if they are of this stream."""
        for receipt in self._until_ms.keys() & receipts:
            self._until_ms[receipt] = max(self._until_ms[receipt], until_ms)

    def given(self, one: PulledDelivery) -> None:
        """Take credit for a delivery."""
        self._until_ms[one.receipt] = self._clock.monotonic_ms() + one.lease_left_ms

    async def room(self) -> int:
        """Return how much credit there is. Wait for some, at most for `ALIVE_S`."""
        if not self._left():
            self._freed.clear()
            soonest_s = (min(self._until_ms.values()) - self._clock.monotonic_ms()) / 1000.0
            try:
                await asyncio.wait_for(self._freed.wait(), min(ALIVE_S, max(0.05, soonest_s)))
            except TimeoutError:
                pass  # a lease may have ended
        return self._left()

    def _left(self) -> int:
        now_ms = self._clock.monotonic_ms()
        for receipt in [receipt for receipt, until_ms in self._until_ms.items() if until_ms <= now_ms]:
            del self._until_ms[receipt]
        return self._credit - len(self._until_ms)


async def events(
    request: ApiRequest, gateway: HttpGateway, topic: str, credit: int, lease: Duration | None
) -> AsyncGenerator[bytes, None]:
    """Yield the events of one stream until its reader leaves, or the gateway ends. Raise the error of the first call;
    a later one is the last event."""
    stream = EventStream(credit)
    begun = False
    async with serving(request) as client:
        gateway.streams.add(stream)
        gateway.metrics.streams.inc()

        async def give_back(taken: list[PulledDelivery]) -> None:
            if taken:
                await client.timeline.settle([one.receipt for one in taken], "return")

        async def come(wait_s: float) -> list[PulledDelivery]:
            room = await stream.room()
            await request.drained()
            if gateway.answers.crowded():
                await asyncio.sleep(CROWDED_S)
                return []
            return await client.timeline.take(topic, room, wait_s, lease=lease) if room else []

        async def part(wait_s: float) -> bytes:
            taken = await while_connected(request, come(wait_s), gateway.ending, give_back) or []
            if taken and gateway.answers.crowded():  # meanwhile
                await give_back(taken)
                return b""
            return _encoded(taken, stream)

        try:
            # What is due already, after a comment, so that the reader learns at once that the stream is open.
            check_topic_name(topic)
            if gateway.answers.crowded():
                raise too_crowded()
            yield b": open\n\n" + await part(0)
            begun = True
            while not gateway.stopping.is_set():
                yield await part(ALIVE_S) or b": alive\n\n"
        except ClientGone:
            return
        except TimelineError as error:
            if not begun:
                raise
            yield b"event: problem\ndata: " + msgspec.json.encode(problem_of(error)) + b"\n\n"
        finally:
            gateway.streams.discard(stream)
            gateway.metrics.streams.dec()


def _encoded(taken: list[PulledDelivery], stream: EventStream) -> bytes:
    parts = []
    for one in taken:
        stream.given(one)
        parts.append(b"event: message\ndata: " + _line(one) + b"\n\n")
    return b"".join(parts)


def _line(one: PulledDelivery) -> bytes:
    """Return a delivery as one line: a payload that is JSON stays as it was written, and may have several."""
    return msgspec.json.encode(leased_message(one)).translate(None, b"\r\n")
