"""Each delivery, as it is noted: its lateness and the cause, and its trace."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from timeline import tracing
from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.journal.events import Journal
from timeline.broker.limits import Limits
from timeline.columns import ColumnBatch, Int64, Ragged, UInt8
from timeline.errors import Invalid
from timeline.kinds import kind_of
from timeline.metrics import Metrics
from timeline.model import MAX_BATCH, Answers, LateCause, Status, Topic, decode_headers

SPANS_KEPT = 256
PART_ROWS = 1_000
"""Late deliveries that are read without a pause."""
FLICKER_MS = 20
COMING_BACK_MS = 5_000
"""A restarted broker has its consumers back by then. Until then, messages wait for the broker."""
_NO_CAUSES = np.zeros(0, dtype=np.uint8)


class Spans:
    """The latest spans of time, each from and until, in which something hindered."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, int]] = deque(maxlen=SPANS_KEPT)

    def add(self, since_ms: int, until_ms: int) -> None:
        """Add a span that is over. Flickers are joined, so that they do not push out the past."""
        if until_ms <= since_ms:
            return
        if self._kept and since_ms - self._kept[-1][1] <= FLICKER_MS:
            first_ms, last_ms = self._kept.pop()
            since_ms, until_ms = min(first_ms, since_ms), max(last_ms, until_ms)
        self._kept.append((since_ms, until_ms))

    def __reversed__(self) -> Iterator[tuple[int, int]]:
        return reversed(self._kept)


class LatenessCauses:
    """Causes that kept a topic's dealer from dealing, and when: the latest spans of each. Spans of two causes may
    overlap.

    `store`: when the store was slow. All topics of a broker share it, because a slow call of one holds up the others.
    """

    def __init__(self, started_ms: int, store: Spans | None = None) -> None:
        self._spans: dict[LateCause, Spans] = {LateCause.STORE_SLOW: Spans() if store is None else store}
        self._cause: LateCause | None = None
        self._since_ms = started_ms
        self.started_ms = started_ms
        self._back_ms: int | None = None

    def now(self, cause: LateCause | None, now_ms: int) -> None:
        """From now on dealing is hindered by `cause`. None: by nothing."""
        if self._back_ms is None and cause is not LateCause.NO_CONSUMER:
            self._back_ms = min(now_ms, self.started_ms + COMING_BACK_MS)
        if cause is self._cause:
            return
        if self._cause is not None:
            self.span(self._cause, self._since_ms, now_ms)
        self._cause, self._since_ms = cause, now_ms

    def jumped(self, before_ms: int, after_ms: int) -> None:
        """The clock went from `before_ms` to `after_ms` in no time. Nothing else can have hindered in between."""
        if self._cause is not None:
            self.span(self._cause, self._since_ms, before_ms)
        self._since_ms = after_ms
        self.span(LateCause.CLOCK, before_ms, after_ms)

    def span(self, cause: LateCause, since_ms: int, until_ms: int) -> None:
        """Add a hindrance that is over."""
        spans = self._spans.get(cause)
        if spans is None:
            spans = self._spans[cause] = Spans()
        spans.add(since_ms, until_ms)

    def _latest(self, cause: LateCause, until_ms: int) -> Iterator[tuple[int, int]]:
        """Yield the spans of `cause` up to now, newest first."""
        if cause is self._cause:
            yield self._since_ms, until_ms
        yield from reversed(self._spans.get(cause, ()))

    def why(self, due_ms: Int64, pushed_ms: int) -> tuple[UInt8, Int64]:
        """Return for each due time the cause that covered most of due..pushed, and how much. Of two equal ones, the
        first in the order of `LateCause`."""
        causes = np.full(len(due_ms), LateCause.UNEXPLAINED, dtype=np.uint8)
        most = np.zeros(len(due_ms), dtype=np.int64)
        first_ms = int(due_ms.min())
        for cause in sorted({*self._spans, *([] if self._cause is None else [self._cause])}):
            covered = np.zeros(len(due_ms), dtype=np.int64)
            for since_ms, until_ms in self._latest(cause, pushed_ms):
                if until_ms <= first_ms:
                    break
                covered += np.maximum(min(until_ms, pushed_ms) - np.maximum(due_ms, since_ms), 0)
            causes[covered > most] = cause
            most = np.maximum(most, covered)
        if first_ms < self.started_ms:
            back_ms = min(pushed_ms, self.started_ms + COMING_BACK_MS if self._back_ms is None else self._back_ms)
            down = (due_ms < self.started_ms) & (back_ms - due_ms >= most)
            causes[down], most[down] = LateCause.BROKER_DOWN, back_ms - due_ms[down]
        return causes, most

    def still(self, due_ms: int, now_ms: int) -> LateCause:
        """Return why a message that came due at `due_ms` is not delivered yet.

        That is the present cause, even if another one kept it for longer; else the past one.
        """
        back = due_ms >= self.started_ms or self._back_ms is not None or now_ms >= self.started_ms + COMING_BACK_MS
        if back and self._cause is not None:
            return self._cause
        causes, _ = self.why(np.array([due_ms], dtype=np.int64), now_ms)
        return LateCause(int(causes[0]))


class TopicLateness:
    """One topic's lateness, for the histogram. Late deliveries go into the ring, with their cause.

    `delivered`: pushed since the topic is dealt here. `redelivered`: those of them leased again after a lease ran out.
    """

    def __init__(
        self,
        causes: LatenessCauses,
        ring: LateRing,
        metrics: Metrics,
        limits: Limits,
        traces: Traces,
        journal: Journal | None = None,
    ) -> None:
        self.causes = causes
        self._ring, self._metrics, self._limits = ring, metrics, limits
        self._traces, self._journal = traces, journal
        self.delivered = self.redelivered = 0

    def note(self, topic: Topic, consumer: bytes, batch: LeasedBatch, sent_ms: int) -> None:
        """`batch` is on the wire since `sent_ms`."""
        rows, name = batch.rows, self._metrics.topic(topic.name)
        self._metrics.count("timeline_deliveries_total", name, by=len(batch))
        due_ms = kind_of(topic.settings).late_from(batch.was_due_ms, rows.scheduled_ms, batch.again)
        late_ms = sent_ms - due_ms
        first_ms = late_ms[~batch.again]
        self.delivered += len(late_ms)
        self.redelivered += len(late_ms) - len(first_ms)
        if len(first_ms):
            self._metrics.lateness.observe(name, np.maximum(first_ms, 0) / 1000.0)
        late, cause = np.flatnonzero(late_ms > self._limits.late_ms), _NO_CAUSES
        if len(late):
            cause = self._causes(batch.take(late), due_ms[late], sent_ms)
            self._ring.add(topic.uid, consumer, rows.ids.take(late), due_ms[late], cause, sent_ms)
        if self._journal is not None:
            self._journal.delivered(topic, consumer, rows, batch.again, sent_ms, late_ms, late, cause)
        self._traces.delivered(topic.name, consumer, batch, sent_ms)

    def _causes(self, batch: LeasedBatch, due_ms: Int64, sent_ms: int) -> UInt8:
        """Return the cause of each: what took more than half of the delay, else what hindered the dealer most."""
        late_ms = sent_ms - due_ms
        cause, covered_ms = self.causes.why(due_ms, sent_ms)
        if batch.stranded:  # what kept another broker from dealing it is not known here
            cause[:] = LateCause.NO_BROKER
        held_up = (cause == LateCause.STORE_SLOW) & (2 * covered_ms > late_ms)
        # Dealt, and not taken by a consumer that does not read: it gave credit that it had no room for.
        cause[2 * (sent_ms - np.maximum(batch.leased_ms, due_ms)) > late_ms] = LateCause.NO_CREDIT
        # Asked for when its put was stored, which may have waited for the store.
        cause[(2 * (batch.rows.asked_ms - due_ms) > late_ms) & ~held_up] = LateCause.PRODUCED_LATE
        cause[batch.again] = LateCause.LEASE_RAN_OUT
        return cause


@dataclass(slots=True)
class LateRows(ColumnBatch):
    """Late deliveries, newest last. With no consumer: a due message, not delivered by `delivered_ms`, which is now."""

    topics: Ragged
    ids: Ragged
    consumers: Ragged
    due_ms: Int64
    delivered_ms: Int64
    cause: UInt8


class LateRing:
    """Late deliveries, at most `kept` of them. Forgotten ones are counted."""

    def __init__(self, kept: int) -> None:
        self._kept, self._added = kept, 0
        self._ids, self._consumers = (np.full(kept, b"", dtype=object) for _ in range(2))
        self._uids, self._due_ms, self._delivered_ms = (np.zeros(kept, dtype=np.int64) for _ in range(3))
        self._cause = np.zeros(kept, dtype=np.uint8)

    @property
    def dropped(self) -> int:
        """How many were forgotten."""
        return max(0, self._added - self._kept)

    def add(self, topic_uid: int, consumer: bytes, ids: Ragged, due_ms: Int64, cause: UInt8, delivered_ms: int) -> None:
        """Add a batch of late deliveries pushed together to one consumer."""
        last = min(len(ids), self._kept)
        self._added += len(ids)
        at = np.arange(self._added - last, self._added) % self._kept
        self._uids[at], self._delivered_ms[at] = topic_uid, delivered_ms
        self._due_ms[at], self._cause[at] = due_ms[-last:], cause[-last:]
        self._ids[at], self._consumers[at] = ids.tolist()[-last:], consumer

    def since(
        self, since_ms: int, topics: Mapping[int, str], id: bytes = b"", limit: int = MAX_BATCH
    ) -> Iterator[LateRows]:
        """Yield the newest `limit` delivered at or after `since_ms`, newest last, on `topics`, and of `id` if given.
        They come in parts, so that deliveries may go on between two of them. What is forgotten meanwhile is left out.

        `topics`: names by uid. A dropped topic has no name any more, though another topic may have it now.
        """
        chosen = np.arange(self.dropped, self._added)
        at = chosen % self._kept
        chosen = chosen[(self._delivered_ms[at] >= since_ms) & np.isin(self._uids[at], [*topics])]
        if id:
            chosen = chosen[self._ids[chosen % self._kept] == id]
        chosen = chosen[max(0, len(chosen) - limit) :]
        for begin in range(0, len(chosen), PART_ROWS):
            at = chosen[begin : begin + PART_ROWS]
            at = at[at >= self.dropped] % self._kept
            uids, which = np.unique(self._uids[at], return_inverse=True)
            names = np.array([topics[uid].encode() for uid in uids.tolist()], dtype=object)
            yield LateRows(
                topics=Ragged.of(names[which].tolist()),
                ids=Ragged.of(self._ids[at].tolist()),
                consumers=Ragged.of(self._consumers[at].tolist()),
                due_ms=self._due_ms[at],
                delivered_ms=self._delivered_ms[at],
                cause=self._cause[at],
            )


MOST = 64
"""Most spans of one frame: a trace of a batch shows how it went, not each of its thousands."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-([0-9a-f]{2})")


class Traces:
    """Spans of the broker called `broker`, for messages with a sampled trace. The broker's process must have set up
    OpenTelemetry (`opentelemetry-instrument timeline serve`). Without headers or a tracer it costs next to nothing."""

    def __init__(self, broker: str) -> None:
        self._broker = broker

    def stored(
        self, topic: str, ids: Ragged, headers: Ragged, answers: Answers, begin_ms: float, end_ms: float
    ) -> None:
        """A frame of puts came in at `begin_ms` and was answered at `end_ms`."""
        for by, at, context in self._traced(headers):
            about = self._about(topic, ids[at]) | {"timeline.status": Status.of(int(answers.status[at])).value}
            tracing.passed(by, f"store {topic}", context, begin_ms, end_ms, about)

    def delivered(self, topic: str, consumer: bytes, batch: LeasedBatch, sent_ms: int) -> None:
        """`batch` is on the wire since `sent_ms`. Each span lasts from its due time, as long as it was late."""
        rows = batch.rows
        for by, at, context in self._traced(rows.headers):
            due_ms = min(int(batch.was_due_ms[at]), sent_ms)
            about = self._about(topic, rows.ids[at]) | {
                "messaging.consumer.group.name": consumer.decode("utf-8", "replace"),
                "timeline.deliveries": int(rows.deliveries[at]),
                "timeline.lateness_ms": sent_ms - due_ms,
            }
            tracing.passed(by, f"deliver {topic}", context, due_ms, sent_ms, about)

    def _traced(self, headers: Ragged | None) -> list[tuple[Any, int, dict[str, str]]]:
        """Return (tracer, place, trace context) of messages whose trace is recorded."""
        if headers is None or not headers.nbytes or (by := tracing.tracer()) is None:
            return []
        listed = headers.tolist()
        found = []
        for at in np.flatnonzero([tracing.TRACEPARENT in each for each in listed]).tolist():
            try:
                context = decode_headers(listed[at])
            except Invalid:
                continue  # of a put, which is answered so
            if _sampled(context.get("traceparent", "")):
                found.append((by, at, context))
                if len(found) == MOST:
                    break
        return found

    def _about(self, topic: str, id: bytes) -> dict[str, Any]:
        return {
            "messaging.destination.name": topic,
            "messaging.message.id": id.decode("utf-8", "replace"),
            "timeline.broker": self._broker,
        }


def _sampled(traceparent: str) -> bool:
    """Return whether the trace is recorded where it began."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return found is not None and bool(int(found[1], 16) & 1)
