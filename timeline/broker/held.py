"""Leased ahead of its time: what the dealer holds until each message's due."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from timeline.broker.parcel import Parcel
from timeline.broker.roster import Consumer
from timeline.columns import Indexes


@dataclass(slots=True)
class _Waiting:
    """A parcel, the places of its rows by due, and how many of them are still held."""

    consumer: Consumer
    parcel: Parcel
    order: Indexes
    left: int


class Held:
    """Parcels leased before they are due, given out at each due time, never before. What a parcel has at a time is one
    entry, so that a hot instant costs no more than its first message."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, int]] = []
        self._parcels: dict[int, _Waiting] = {}
        self._count = 0

    def __len__(self) -> int:
        """Messages held."""
        return sum(waiting.left for waiting in self._parcels.values())

    def add(self, consumer: Consumer, parcel: Parcel) -> None:
        """Holds `parcel` for `consumer`."""
        self._count += 1
        order = np.argsort(parcel.was_due_ms, kind="stable")
        due_ms = parcel.was_due_ms[order]
        self._parcels[self._count] = _Waiting(consumer, parcel, order, len(parcel))
        starts = np.flatnonzero(np.diff(due_ms, prepend=due_ms[:1] - 1))
        stops = np.append(starts[1:], len(order))
        for due, start, stop in zip(due_ms[starts].tolist(), starts.tolist(), stops.tolist(), strict=True):
            heapq.heappush(self._heap, (due, self._count, start, stop))

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
        mine = {key for key, waiting in self._parcels.items() if waiting.consumer is consumer}
        picked: dict[int, list[Indexes]] = defaultdict(list)
        kept = []
        for entry in self._heap:
            if entry[1] in mine:
                picked[entry[1]].append(self._parcels[entry[1]].order[entry[2] : entry[3]])
            else:
                kept.append(entry)
        heapq.heapify(kept)
        self._heap = kept
        return [self._parcels.pop(key).parcel.take(np.sort(np.concatenate(parts))) for key, parts in picked.items()]

    def _pop(self, until_ms: float) -> list[tuple[Consumer, Parcel]]:
        picked: dict[int, list[Indexes]] = defaultdict(list)
        while self._heap and self._heap[0][0] <= until_ms:
            _, key, start, stop = heapq.heappop(self._heap)
            picked[key].append(self._parcels[key].order[start:stop])
        answer = []
        for key, parts in picked.items():
            waiting = self._parcels[key]
            indexes = np.concatenate(parts)
            waiting.left -= len(indexes)
            if not waiting.left:
                del self._parcels[key]
            whole = len(indexes) == len(waiting.parcel)
            answer.append((waiting.consumer, waiting.parcel if whole else waiting.parcel.take(indexes)))
        return answer
