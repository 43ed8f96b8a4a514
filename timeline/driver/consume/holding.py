"""A holder: it leases due messages in bulk for another system, such as a micro-batch of a stream, and settles them in
bulk. `scan_pages(holder=…)` finds them again.

Unlike a consumer it has no buffer, no extensions and no reconnects. After a broken stream, begin again under the same
holder: it still has its leases."""

from __future__ import annotations

import asyncio
from typing import Self

import numpy as np

from timeline.columns import Ragged
from timeline.driver.tasks import Closing, end
from timeline.driver.transport.channel import REFUSALS, ClientContext, Deadline, OpenedStream, refusal, send_within
from timeline.errors import Superseded, TimelineError, Unavailable
from timeline.model import LeavingReason, Operation, Rows, Status
from timeline.wire import (
    Credit,
    Deliver,
    Frame,
    Hello,
    Leaving,
    Settle,
    Settled,
    TransportError,
    UnknownFrame,
    Welcome,
    decode,
    encode,
)

CREDIT_BYTES = 1 << 30
FRAME_SETTLES = 10_000
PARTING_S = 1.0
_NONE = Ragged.of([])


class Holding(Closing):
    """One stream of `holder` on `topic`. Made by `Timeline.holding`; use it with `async with`.

    It takes the holder over: another stream under the same name ends, and raises Superseded.
    """

    def __init__(self, context: ClientContext, topic: str, holder: str, lease_ms: int) -> None:
        self.topic, self.holder = topic, holder
        self._context, self._lease_ms = context, lease_ms
        self._arrived: asyncio.Queue[Frame | TimelineError] = asyncio.Queue()
        self._opened: OpenedStream | None = None
        self._reader: asyncio.Task[None] | None = None
        self._requests = 0
        self._epoch = context.epoch
        self.welcome: Welcome | None = None

    async def __aenter__(self) -> Self:
        context = self._context
        context.check()
        self._epoch = context.epoch
        self._opened = await context.channel.open("Consume", Deadline.after(context.clock, context.timeout_ms))
        self._reader = asyncio.get_running_loop().create_task(self._read(self._opened), name=f"holding {self.topic}")
        try:
            await self._send(self._hello())
            frame = await self._next(context.timeout_ms)
            if not isinstance(frame, Welcome):
                raise Unavailable("the broker did not welcome the holder in time")
        except BaseException:
            await self.aclose()
            raise
        self.welcome = frame
        return self

    def _hello(self) -> Hello:
        return Hello(
            topic=self.topic,
            consumer=self.holder,
            session=self._context.ids.number(),
            lease_ms=self._lease_ms,
            credit_messages=0,
            credit_bytes=0,
            ids=_NONE,
            birth=np.zeros(0, dtype=np.uint64),
            version=np.zeros(0, dtype=np.int64),
        )

    async def aclose(self) -> None:
        """End the stream. Leased messages stay leased until their leases end."""
        if self._epoch != self._context.epoch or self._context.elsewhere:
            self._context.leave_behind(self._opened, self._reader)
            self._opened = self._reader = None
        if self._opened is not None:
            self._opened.stream.cancel()
        if self._reader is not None:
            reader, self._reader = self._reader, None
            await end(reader)

    async def lease(self, most: int, first_ms: float, more_ms: float) -> int:
        """Lease up to `most` due messages, and return how many. Wait `first_ms` for the first, and `more_ms` after each
        part for the next. Afterwards nothing more is on its way to this holder.

        Raise Superseded or Unavailable. Messages that came before are leased all the same.
        """
        await self._send(Credit(most, CREDIT_BYTES))
        count, wait_ms = 0, first_ms
        while count < most and (frame := await self._next(wait_ms)) is not None:
            if isinstance(frame, Deliver):
                count, wait_ms = count + len(frame.ids), more_ms
        await self._send(Leaving(LeavingReason.DRAINING, "the holder takes nothing more"))
        while (frame := await self._next(self._context.timeout_ms)) is not None:
            if isinstance(frame, Deliver):
                count += len(frame.ids)
            elif isinstance(frame, Leaving):
                return count
        raise Unavailable("the broker does not say that it has sent everything")

    async def settle(
        self, operation: Operation, rows: Rows, time_ms: int = 0, reason: bytes = b""
    ) -> dict[Status, int]:
        """ACK, EXTEND (to `time_ms` from now) or BURY the messages `rows` of this holder. Return how many got each
        status.

        Nothing is repeated. Calling it again is harmless."""
        counts: dict[Status, int] = {}
        for start in range(0, len(rows), FRAME_SETTLES):
            part = rows.slice(start, start + FRAME_SETTLES)
            self._requests += 1
            frame = Settle.of(
                part,
                request=self._requests,
                operation=operation,
                time_ms=time_ms,
                op=self._context.ids.numbers(len(part)),
                reasons=reason or None,
            )
            await self._send(frame)
            answer = await self._answer()
            codes, many = np.unique(answer.answers.status, return_counts=True)
            for code, number in zip(codes.tolist(), many.tolist(), strict=True):
                counts[Status.of(code)] = counts.get(Status.of(code), 0) + number
        return counts

    async def _answer(self) -> Settled:
        while (frame := await self._next(self._context.timeout_ms)) is not None:
            if isinstance(frame, Settled) and frame.request == self._requests:
                return frame
        raise Unavailable("the broker does not answer a settle")

    async def _send(self, frame: Frame) -> None:
        assert self._opened is not None
        deadline = self._context.deadline(None)
        try:
            silent = f"the broker took nothing for {self._context.timeout_ms / 1000.0:g} s"
            await send_within(self._opened.stream, encode(frame), lambda: deadline.left_ms, silent)
        except TransportError as fault:
            raise await self._last_word(fault) from fault

    async def _last_word(self, fault: TransportError) -> TimelineError:
        """Return why a stream takes nothing more. The broker's last frame may be unread."""
        assert self._opened is not None
        if self._reader is not None:
            await asyncio.wait({self._reader}, timeout=PARTING_S)
        while not self._arrived.empty():
            frame = self._arrived.get_nowait()
            if isinstance(frame, Leaving) and frame.reason is LeavingReason.SUPERSEDED:
                return Superseded(frame.text)
        return Unavailable(f"the stream to {self._opened.address} broke off: {fault.reason}")

    async def _next(self, wait_ms: float) -> Frame | None:
        """Return the next frame within `wait_ms`, or None. Send heartbeats meanwhile."""
        clock = self._context.clock
        until_ms = clock.monotonic_ms() + wait_ms
        while True:
            left_ms = until_ms - clock.monotonic_ms()
            beat_ms = self.welcome.heartbeat_ms / 2 if self.welcome is not None else left_ms
            try:
                frame = await asyncio.wait_for(self._arrived.get(), max(0.0, min(left_ms, beat_ms)) / 1000.0)
            except TimeoutError:
                if left_ms <= beat_ms:
                    return None
                await self._send(Credit())
                continue
            if isinstance(frame, TimelineError):
                raise frame
            if isinstance(frame, Leaving) and frame.reason is LeavingReason.SUPERSEDED:
                raise Superseded(frame.text)
            return frame

    async def _read(self, opened: OpenedStream) -> None:
        """Collect frames; at the end, the reason of the end."""
        over: TimelineError = Unavailable(f"the stream to {opened.address} ended")
        try:
            while (data := await opened.stream.receive()) is not None:
                try:
                    self._arrived.put_nowait(decode(data))
                except UnknownFrame:
                    continue  # of a newer minor version
        except TransportError as fault:
            over = refusal(fault) if fault.fault in REFUSALS else Unavailable(fault.reason)
        except TimelineError as bad:
            over = bad
        self._arrived.put_nowait(over)
