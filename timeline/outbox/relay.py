"""The relay: it takes the rows that wait in the outbox, sends them by the ordinary driver, and settles them.

A message keeps the id that `add` gave it. If a relay dies between sending and settling, the next one sends the same
message again: the broker answers DUPLICATE, and the row is done. After the message was delivered and settled, that
holds as long as the topic remembers ids.
"""

from __future__ import annotations

import asyncio
import random as randomness
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from sqlalchemy.exc import DBAPIError

import timeline
from timeline.clock import Clock
from timeline.config import check_address, joined
from timeline.driver.consume.handlers import Backoff
from timeline.errors import Closed, Invalid, TimelineError, TooLarge
from timeline.metrics import Declaration, counter, counters, gauge
from timeline.model import Status
from timeline.outbox.database import Outbox, OutboxCounts, OutboxRow, reason_of

BATCH = 1_000
EVERY_MS = 200.0
COUNT_EVERY_MS = 5_000.0
WAITING = Backoff(first="200ms", factor=2, cap="5s")
NOT_NOW = (Status.UNAVAILABLE, Status.UNKNOWN, Status.THROTTLED, Status.NOT_FOUND)
"""Answers after which the message waits. NOT_FOUND: there is no such topic yet."""
OF_A_CLIENT = (Status.FORBIDDEN, Status.INVALID)
"""Answers that a message may get because its client has lost its rights, or speaks another version. Such rows are sent
once more after a call that concerns no row."""
ADVICE: dict[str, str] = {
    Status.EXISTS: "the id is taken by another message: give each an id of its own; 'outbox purge' deletes this one"
}
"""Remedies for rejected rows, where the driver's own advice names arguments that a row does not have."""

T = TypeVar("T")


class RelayObserver(Protocol):
    """Receives what the relay does."""

    def sent(self, topic: str, status: Status, count: int) -> None:
        """Note that `count` messages of `topic` are on their timeline: OK, or DUPLICATE (they were before)."""

    def refused(self, row: OutboxRow, status: Status, reason: str) -> None:
        """Note that a row was rejected."""

    def trouble(self, reason: str) -> None:
        """Note what stops the relay now, each time that it changes; empty: nothing does."""

    def warned(self, sentence: str) -> None:
        """Note a warning for the owner."""

    def counted(self, waiting: OutboxCounts, oldest_s: float) -> None:
        """Note how many rows there are, and how long the oldest one has waited."""


@dataclass
class _Answer:
    """The rows that were taken: sent, or refused with a reason. `left`: how many wait on."""

    sent: list[int] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    left: int = 0


@dataclass
class _Hold:
    """A topic that is left alone for a while. `count`: failed attempts in a row."""

    count: int = 0
    until_ms: float = 0.0
    reason: str = ""


class OutboxRelay:
    """Sends the rows of `outbox` through `tl` until `stop`. `every_ms`: how often it looks when nothing waits.
    `batch`: how many rows it takes at once."""

    def __init__(
        self,
        outbox: Outbox,
        tl: timeline.Timeline,
        audience: RelayObserver,
        every_ms: float = EVERY_MS,
        batch: int = BATCH,
    ) -> None:
        self._outbox, self._tl, self._audience = outbox, tl, audience
        self._every_ms, self._batch = every_ms, batch
        self._clock = Clock()
        self._random = randomness.SystemRandom()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._holds: dict[str, _Hold] = {}
        self._producers: dict[tuple[str, str], timeline.Producer] = {}
        self._looked_at: set[str] = set()
        self._failures = 0
        self._told = ""
        self._counted_ms = float("-inf")
        self._once = False
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Settle the rows in hand, then end."""
        self._stopping.set()

    async def run(self, once: bool = False) -> bool:
        """Relay until `stop`. `once`: return when nothing waits any more, and raise what the database or the broker
        (Unavailable) failed with. Return whether nothing waits."""
        self._once = once
        try:
            while not self._stopping.is_set():
                try:
                    idle = await self._round()
                except DBAPIError as trouble:
                    await self._asked(self._outbox.let_go)
                    if once:
                        raise self._outbox.explained(trouble) from trouble
                    self._failures += 1
                    self._tell(f"the database at {self._outbox.shown} cannot be asked: {reason_of(trouble)}")
                    await self._wait(float(WAITING.delay_ms(self._failures, self._random)))
                    continue
                self._failures = 0
                self._tell_of_holds()
                if once and idle:
                    self._raise_holds()
                    return True
                if idle:
                    await self._wait(self._every_ms)
            return False
        finally:
            await self._asked(self._outbox.close)
            self._thread.shutdown()

    async def _round(self) -> bool:
        """Take, send and settle once; return whether there was nothing to send."""
        if not await self._asked(self._outbox.hold):
            if self._once:
                raise timeline.Unavailable("another relay has this outbox: SQLite takes one at a time")
            self._audience.warned("another relay has this outbox: waiting until it ends")
            while not await self._asked(self._outbox.hold):
                await self._wait(self._every_ms)
                if self._stopping.is_set():
                    return True
        now_ms = self._clock.monotonic_ms()
        held = [topic for topic, hold in self._holds.items() if hold.until_ms > now_ms]
        rows = await self._asked(lambda: self._outbox.take(self._batch, held))
        if rows:
            answer = await self._send(rows)
            await self._asked(lambda: self._outbox.settle(answer.sent, answer.refused))
        else:
            self._holds = {topic: self._holds[topic] for topic in held}  # the other topics have no waiting rows
        await self._count()
        return not rows

    async def _count(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._counted_ms < COUNT_EVERY_MS:
            return
        self._counted_ms = now_ms
        found = await self._asked(self._outbox.waiting)
        oldest_s = max(0.0, (self._clock.now_ms() - found.oldest_ms) / 1000) if found.oldest_ms else 0.0
        self._audience.counted(found, oldest_s)

    # ── sending ──

    async def _send(self, rows: Sequence[OutboxRow]) -> _Answer:
        answer = _Answer()
        groups: dict[tuple[str, str], list[tuple[OutboxRow, timeline.Message]]] = {}
        for row in rows:
            try:
                message = row.message()
            except (Invalid, TooLarge) as bad:
                self._refuse(answer, row, Status(bad.code), bad.reason)
            else:
                groups.setdefault((row.topic, row.grp), []).append((row, message))
        await asyncio.gather(*(self._send_group(answer, *key, some) for key, some in groups.items()))
        return answer

    async def _send_group(
        self, answer: _Answer, topic: str, group: str, some: list[tuple[OutboxRow, timeline.Message]]
    ) -> None:
        try:
            producer = self._producer(topic, group)
            await self._look_at(topic)
            receipts = list(await producer.produce_many([message for _, message in some]))
        except Invalid as bad:
            if len(some) == 1:
                self._refuse(answer, some[0][0], Status.INVALID, bad.reason)
                return
            for one in some:  # one of them is invalid, not all
                await self._send_group(answer, topic, group, [one])
            return
        except (timeline.Unavailable, timeline.Unknown, timeline.Throttled, timeline.NotFound, Closed) as trouble:
            answer.left += len(some)
            self._hold(topic, trouble.reason or trouble.advice, trouble.retry_after_ms)
            return
        not_now = NOT_NOW if await self._is_served(producer, some, receipts) else (*NOT_NOW, *OF_A_CLIENT)
        self._settle(answer, topic, [row for row, _ in some], receipts, not_now)

    async def _is_served(
        self,
        producer: timeline.Producer,
        some: list[tuple[OutboxRow, timeline.Message]],
        receipts: list[timeline.Receipt],
    ) -> bool:
        """Send again what may have been refused for this client, and note the new receipts. Return False if a call that
        concerns no row is refused, too."""
        refused = [at for at, receipt in enumerate(receipts) if receipt.status in OF_A_CLIENT]
        if not refused:
            return True
        try:
            await self._topics()
            again = await producer.produce_many([some[at][1] for at in refused])
        except timeline.TimelineError:
            return False
        for at, receipt in zip(refused, again, strict=True):
            receipts[at] = receipt
        return True

    def _settle(
        self,
        answer: _Answer,
        topic: str,
        rows: list[OutboxRow],
        receipts: list[timeline.Receipt],
        not_now: Sequence[Status],
    ) -> None:
        done: Counter[Status] = Counter()
        waits: list[timeline.Receipt] = []
        for row, receipt in zip(rows, receipts, strict=True):
            if receipt.ok:
                answer.sent.append(row.seq)
                done[receipt.status] += 1
            elif receipt.status in not_now:
                waits.append(receipt)
            else:
                self._refuse(answer, row, receipt.status, _reason(receipt))
        for status, count in done.items():
            self._audience.sent(topic, status, count)
        if waits:
            answer.left += len(waits)
            longest = max(receipt.retry_after_ms for receipt in waits)
            self._hold(topic, f"{topic}: {waits[0].status}: {_reason(waits[0])}", longest)
        else:
            self._holds.pop(topic, None)

    def _refuse(self, answer: _Answer, row: OutboxRow, status: Status, reason: str) -> None:
        answer.refused[row.seq] = f"{status}: {reason}"
        self._audience.refused(row, status, reason)

    def _producer(self, topic: str, group: str) -> timeline.Producer:
        made = self._producers.get((topic, group))
        if made is None:
            made = self._producers[topic, group] = self._tl.producer(topic, group=group)
        return made

    async def _topics(self) -> list[timeline.Topic]:
        """Return the broker's topics. Raise Unavailable if this client is refused: no row is to blame."""
        try:
            return await self._tl.topics()
        except (Invalid, timeline.Forbidden) as refused:
            raise timeline.Unavailable(refused.reason) from refused

    async def _look_at(self, topic: str) -> None:
        """Warn once about a topic that does not remember settled ids: a relay that dies may send a message twice."""
        if topic in self._looked_at:
            return
        record = next((one for one in await self._topics() if one.name == topic), None)
        if record is None:
            raise timeline.NotFound(f"there is no topic {topic!r}; its messages wait until there is")
        self._looked_at.add(topic)
        if not record.settings.remember_ms:
            self._audience.warned(
                f"Topic {topic} does not remember ids. A message that was settled just before a relay dies may be sent "
                f"again. Run 'timeline topic update {topic} --remember 1d'."
            )

    # ── waiting ──

    def _hold(self, topic: str, reason: str, least_ms: int) -> None:
        hold = self._holds.setdefault(topic, _Hold())
        hold.count += 1
        wait_ms = max(WAITING.delay_ms(hold.count, self._random), least_ms)
        hold.until_ms = float("inf") if self._once else self._clock.monotonic_ms() + wait_ms
        hold.reason = reason

    def _tell_of_holds(self) -> None:
        self._tell(next((hold.reason for hold in self._holds.values()), ""))

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            self._audience.trouble(reason)

    def _raise_holds(self) -> None:
        if self._holds:
            raise timeline.Unavailable("; ".join(sorted({hold.reason for hold in self._holds.values()})))

    async def _wait(self, wait_ms: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), wait_ms / 1000)
        except TimeoutError:
            pass  # not stopped: the next round

    def _asked(self, call: Callable[[], T]) -> Awaitable[T]:
        """Call the database in its thread."""
        return asyncio.get_running_loop().run_in_executor(self._thread, call)


def _reason(receipt: timeline.Receipt) -> str:
    try:
        receipt.raise_failed()
    except TimelineError as error:
        return error.reason or ADVICE.get(receipt.status, error.advice)
    raise AssertionError(f"{receipt} has not failed")


CATALOG: dict[str, Declaration] = {
    "timeline_relay_sent_total": counter(
        "Messages of the outbox that are on their timeline, by status: OK, or DUPLICATE (they were before)",
        "topic",
        "status",
    ),
    "timeline_relay_refused_total": counter("Messages that were rejected, by status", "topic", "status"),
    "timeline_relay_waiting": gauge("Messages that wait in the outbox"),
    "timeline_relay_set_aside": gauge("Messages that were rejected and nobody has dealt with"),
    "timeline_relay_oldest_seconds": gauge("How long the message that waits longest has waited"),
    "timeline_relay_trouble": gauge("1 while the database, a broker or a topic keeps messages waiting"),
}
MOST_TOPICS = 200
"""The most topics with a label of their own. The rest are summed under the label `…`."""


class RelayMetrics:
    """The metrics of one relay, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._topics: set[str] = set()
        self._counters = counters(CATALOG, self.registry)
        self._gauges = {
            name: Gauge(name, declared.help, registry=self.registry)
            for name, declared in CATALOG.items()
            if declared.kind == "gauge"
        }

    def serve(self, listen: str) -> tuple[str, Callable[[], None]]:
        """Open `listen` ("host:port"); return its address and a function that closes it. Raise OSError, with the
        address as its `filename`, if the port is taken."""
        host, port = check_address("metrics", listen, free_port=True, otherwise='or "off"')
        try:
            server, _ = start_http_server(port, addr=host or "0.0.0.0", registry=self.registry)
        except OSError as taken:
            raise OSError(taken.errno, taken.strerror, listen) from taken

        def close() -> None:
            server.shutdown()
            server.server_close()

        return joined(host, server.server_port), close

    def sent(self, topic: str, status: str, count: int) -> None:
        self._counters["timeline_relay_sent_total"].labels(self._label(topic), status).inc(count)

    def refused(self, topic: str, status: str) -> None:
        self._counters["timeline_relay_refused_total"].labels(self._label(topic), status).inc()

    def trouble(self, some: bool) -> None:
        self._gauges["timeline_relay_trouble"].set(float(some))

    def counted(self, found: OutboxCounts, oldest_s: float) -> None:
        self._gauges["timeline_relay_waiting"].set(found.waiting)
        self._gauges["timeline_relay_set_aside"].set(found.set_aside)
        self._gauges["timeline_relay_oldest_seconds"].set(oldest_s)

    def _label(self, topic: str) -> str:
        if topic in self._topics or len(self._topics) < MOST_TOPICS:
            self._topics.add(topic)
            return topic
        return "…"
