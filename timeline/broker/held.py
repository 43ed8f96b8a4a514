"""Leased ahead of its time: what the dealer holds until each message's due."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict

import numpy as np

from timeline.broker.parcel import Parcel
from timeline.broker.roster import Consumer


class Held:
    """Parcels leased before they are due, given out message by message at the due time, never before."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._parcels: dict[int, tuple[Consumer, Parcel, int]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, consumer: Consumer, parcel: Parcel) -> None:
        """Holds `parcel` for `consumer`."""
        self._count += 1
        self._parcels[self._count] = (consumer, parcel, len(parcel))
        for index, due_ms in enumerate(parcel.was_due_ms.tolist()):
            heapq.heappush(self._heap, (due_ms, self._count, index))

    def next_due_ms(self) -> int | None:
        """When the earliest is due."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> list[tuple[Consumer, Parcel]]:
        """What is due by `now_ms`; held no more."""
        return self._pop(now_ms)

    def everything(self) -> list[tuple[Consumer, Parcel]]:
        """All of it; held no more."""
        return self._pop(math.inf)

    def of(self, consumer: Consumer) -> list[Parcel]:
        """All that is held for `consumer`; held no more."""
        mine = {key for key, (owner, _, _) in self._parcels.items() if owner is consumer}
        picked: dict[int, list[int]] = defaultdict(list)
        kept = []
        for entry in self._heap:
            if entry[1] in mine:
                picked[entry[1]].append(entry[2])
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept
        return [self._parcels.pop(key)[1].take(np.array(sorted(rows), dtype=np.intp)) for key, rows in picked.items()]

    def _pop(self, until_ms: float) -> list[tuple[Consumer, Parcel]]:
        picked: dict[int, list[int]] = defaultdict(list)
        while self._heap and self._heap[0][0] <= until_ms:
            _, key, index = heapq.heappop(self._heap)
            picked[key].append(index)
        answer = []
        for key, indexes in picked.items():
            consumer, parcel, left = self._parcels[key]
            if left == len(indexes):
                del self._parcels[key]
            else:
                self._parcels[key] = (consumer, parcel, left - len(indexes))
            whole = len(indexes) == len(parcel)
            answer.append((consumer, parcel if whole else parcel.take(np.array(indexes, dtype=np.intp))))
        return answer
