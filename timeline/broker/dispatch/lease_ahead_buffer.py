"""Leased ahead of its time: what the dealer holds until each message's due."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.dispatch.roster import ConnectedConsumer
from timeline.model import MAX_TIME_MS


@dataclass(slots=True)
class _Waiting:
    """A batch in order of its dues; what lies before `at` is held no more."""

    consumer: ConnectedConsumer
    batch: LeasedBatch
    at: int = 0

    def rest(self) -> LeasedBatch:
        """What is still held."""
        return self.batch.slice(self.at, len(self.batch))


class LeaseAheadBuffer:
    """Batches leased before they are due, given out at each due time, never before. A batch is put in order once; what
    it has at a time is then a part of it that shares its columns."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """When the next of each batch is due, and its number."""
        self._batches: dict[int, _Waiting] = {}
        self._count = 0

    def __len__(self) -> int:
        """Messages held."""
        return sum(len(waiting.batch) - waiting.at for waiting in self._batches.values())

    def add(self, consumer: ConnectedConsumer, batch: LeasedBatch) -> None:
        """Holds `batch`, which is not empty, for `consumer`."""
        due_ms = batch.was_due_ms
        if (due_ms[1:] < due_ms[:-1]).any():
            batch = batch.take(np.argsort(due_ms, kind="stable"))
        self._count += 1
        self._batches[self._count] = _Waiting(consumer, batch)
        heapq.heappush(self._heap, (int(batch.was_due_ms[0]), self._count))

    def next_due_ms(self) -> int | None:
        """When the earliest is due."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> list[tuple[ConnectedConsumer, LeasedBatch]]:
        """What is due by `now_ms`; held no more."""
        given = []
        while self._heap and self._heap[0][0] <= now_ms:
            _, number = self._heap[0]
            waiting = self._batches[number]
            due_ms = waiting.batch.was_due_ms
            start, waiting.at = waiting.at, int(due_ms.searchsorted(now_ms, side="right"))
            given.append((waiting.consumer, waiting.batch.slice(start, waiting.at)))
            if waiting.at < len(due_ms):
                heapq.heapreplace(self._heap, (int(due_ms[waiting.at]), number))
            else:
                heapq.heappop(self._heap)
                del self._batches[number]
        return given

    def everything(self) -> list[tuple[ConnectedConsumer, LeasedBatch]]:
        """All of it; held no more."""
        return self.due(MAX_TIME_MS)

    def of(self, consumer: ConnectedConsumer) -> list[LeasedBatch]:
        """All that is held for `consumer`; held no more."""
        mine = {number for number, waiting in self._batches.items() if waiting.consumer is consumer}
        if mine:
            self._heap = [entry for entry in self._heap if entry[1] not in mine]
            heapq.heapify(self._heap)
        return [self._batches.pop(number).rest() for number in sorted(mine)]
