"""Leased ahead of its time: what the dealer holds until each message's due."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from timeline.broker.dispatch.leased_batch import Parcel
from timeline.broker.dispatch.roster import Consumer
from timeline.model import MAX_TIME_MS


@dataclass(slots=True)
class _Waiting:
    """A parcel in order of its dues; what lies before `at` is held no more."""

    consumer: Consumer
    parcel: Parcel
    at: int = 0

    def rest(self) -> Parcel:
        """What is still held."""
        return self.parcel.part(self.at, len(self.parcel))


class Held:
    """Parcels leased before they are due, given out at each due time, never before. A parcel is put in order once; what
    it has at a time is then a part of it that shares its columns."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        """When the next of each parcel is due, and its number."""
        self._parcels: dict[int, _Waiting] = {}
        self._count = 0

    def __len__(self) -> int:
        """Messages held."""
        return sum(len(waiting.parcel) - waiting.at for waiting in self._parcels.values())

    def add(self, consumer: Consumer, parcel: Parcel) -> None:
        """Holds `parcel`, which is not empty, for `consumer`."""
        due_ms = parcel.was_due_ms
        if (due_ms[1:] < due_ms[:-1]).any():
            parcel = parcel.take(np.argsort(due_ms, kind="stable"))
        self._count += 1
        self._parcels[self._count] = _Waiting(consumer, parcel)
        heapq.heappush(self._heap, (int(parcel.was_due_ms[0]), self._count))

    def next_due_ms(self) -> int | None:
        """When the earliest is due."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> list[tuple[Consumer, Parcel]]:
        """What is due by `now_ms`; held no more."""
        given = []
        while self._heap and self._heap[0][0] <= now_ms:
            _, number = self._heap[0]
            waiting = self._parcels[number]
            due_ms = waiting.parcel.was_due_ms
            start, waiting.at = waiting.at, int(due_ms.searchsorted(now_ms, side="right"))
            given.append((waiting.consumer, waiting.parcel.part(start, waiting.at)))
            if waiting.at < len(due_ms):
                heapq.heapreplace(self._heap, (int(due_ms[waiting.at]), number))
            else:
                heapq.heappop(self._heap)
                del self._parcels[number]
        return given

    def everything(self) -> list[tuple[Consumer, Parcel]]:
        """All of it; held no more."""
        return self.due(MAX_TIME_MS)

    def of(self, consumer: Consumer) -> list[Parcel]:
        """All that is held for `consumer`; held no more."""
        mine = {number for number, waiting in self._parcels.items() if waiting.consumer is consumer}
        if mine:
            self._heap = [entry for entry in self._heap if entry[1] not in mine]
            heapq.heapify(self._heap)
        return [self._parcels.pop(number).rest() for number in sorted(mine)]
