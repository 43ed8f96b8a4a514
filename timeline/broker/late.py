"""Why a delivery was late: what hindered a topic's dealing and when, and the ring of late deliveries."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from timeline.columns import Bools, Int64, Ragged, UInt8
from timeline.wire.frames import Cause, LateList

SPANS_KEPT = 256
FLICKER_MS = 1


class Hindrances:
    """The latest spans in which something kept a topic's dealer from dealing. One cause at a time."""

    def __init__(self, started_ms: int) -> None:
        self._spans: deque[tuple[int, int, Cause]] = deque(maxlen=SPANS_KEPT)
        self._cause: Cause | None = None
        self._since_ms = started_ms
        self._started_ms = started_ms

    def now(self, cause: Cause | None, now_ms: int) -> None:
        """From now on dealing is hindered by `cause`; None: by nothing."""
        if cause is self._cause:
            return
        if self._cause is not None:
            self.span(self._cause, self._since_ms, now_ms)
        self._cause, self._since_ms = cause, now_ms

    def span(self, cause: Cause, since_ms: int, until_ms: int) -> None:
        """A hindrance that is over. What only flickered counts as one span, so that many do not push out the past."""
        if until_ms <= since_ms:
            return
        if self._spans:
            before_ms, last_ms, last = self._spans[-1]
            if last is cause and 0 <= since_ms - last_ms <= FLICKER_MS:
                self._spans[-1] = (before_ms, until_ms, cause)
                return
        self._spans.append((since_ms, until_ms, cause))

    def why(self, due_ms: Int64, pushed_ms: int) -> UInt8:
        """For each due, the cause that covered most of due..pushed."""
        spans = [*self._spans]
        if self._cause is not None:
            spans.append((self._since_ms, pushed_ms, self._cause))
        first_ms = int(due_ms.min())
        if first_ms < self._started_ms:
            spans.append((first_ms, self._started_ms, Cause.BROKER_DOWN))
        covered: dict[Cause, Int64] = {}
        for since_ms, until_ms, cause in spans:
            if until_ms > first_ms:
                overlap = np.maximum(min(until_ms, pushed_ms) - np.maximum(due_ms, since_ms), 0)
                covered[cause] = covered[cause] + overlap if cause in covered else overlap
        causes = np.full(len(due_ms), Cause.UNEXPLAINED, dtype=np.uint8)
        most = np.zeros(len(due_ms), dtype=np.int64)
        for cause, overlap in covered.items():
            causes[overlap > most] = cause
            most = np.maximum(most, overlap)
        return causes


@dataclass(slots=True)
class _Batch:
    topic: str
    consumer: bytes
    ids: Ragged
    due_ms: Int64
    cause: UInt8
    delivered_ms: int


class LateRing:
    """Late deliveries, newest last, at most `kept` of them; those forgotten are counted."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._batches: deque[_Batch] = deque()
        self._held = 0
        self.dropped = 0

    def add(self, topic: str, consumer: bytes, ids: Ragged, due_ms: Int64, cause: UInt8, delivered_ms: int) -> None:
        """Remembers a batch of late deliveries pushed together to one consumer."""
        over = len(ids) - self._kept
        if over > 0:
            self.dropped += over
            ids, due_ms, cause = ids[over:], due_ms[over:], cause[over:]
        self._batches.append(_Batch(topic, consumer, ids.compact(), due_ms, cause, delivered_ms))
        self._held += len(ids)
        while self._held > self._kept:
            gone = self._batches.popleft()
            self._held -= len(gone.ids)
            self.dropped += len(gone.ids)

    def since(self, since_ms: int, topic: str, id: bytes, limit: int, now_ms: int) -> LateList:
        """The newest `limit` delivered at or after `since_ms`, of `topic` and `id` where given."""
        chosen: list[tuple[bytes, bytes, bytes, int, int, int]] = []
        for batch in reversed(self._batches):
            if batch.delivered_ms < since_ms or len(chosen) >= limit:
                break
            if topic and batch.topic != topic:
                continue
            ids = batch.ids.tolist()
            for at in range(len(ids) - 1, -1, -1):
                if (not id or ids[at] == id) and len(chosen) < limit:
                    due_ms, cause = int(batch.due_ms[at]), int(batch.cause[at])
                    chosen.append((batch.topic.encode(), ids[at], batch.consumer, due_ms, batch.delivered_ms, cause))
        chosen.reverse()
        topics, ids_, consumers, due, delivered, cause_ = zip(*chosen, strict=True) if chosen else ((),) * 6
        return LateList(
            topics=Ragged.of(list(topics)),
            ids=Ragged.of(list(ids_)),
            consumers=Ragged.of(list(consumers)),
            due_ms=np.array(due, dtype=np.int64),
            delivered_ms=np.array(delivered, dtype=np.int64),
            cause=np.array(cause_, dtype=np.uint8),
            dropped=self.dropped,
            now_ms=now_ms,
        )


def causes(hindrances: Hindrances, due_ms: Int64, pushed_ms: int, produced_late: Bools, ran_out: Bools) -> UInt8:
    """The cause of each late delivery: redelivered, produced late, or what hindered the dealer at its time."""
    answer = hindrances.why(due_ms, pushed_ms)
    answer[produced_late] = Cause.PRODUCED_LATE
    answer[ran_out] = Cause.LEASE_RAN_OUT
    return answer
