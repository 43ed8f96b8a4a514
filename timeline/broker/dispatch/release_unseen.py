"""What a broker settles for itself: leases that nobody's code has seen go back, what is damaged is buried."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np

from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.lanes.settling import Settling
from timeline.broker.tasks import Tasks, Underway
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins.contract import Settles

TRIES = 5
FIRST_WAIT_MS = 20.0
WAIT_FACTOR = 3.0
UNSURE = (Status.UNAVAILABLE.code, Status.UNKNOWN.code, Status.THROTTLED.code)


class HandBack:
    """A topic's hand-backs and burials. `settled` is set while none is under way: whoever must see their effect waits
    for it. A call counts from when it is made, not from when its task starts."""

    def __init__(
        self, settling: Settling, tasks: Tasks, random_bits: Callable[[int], int], topic: Callable[[], Topic]
    ) -> None:
        self._settling, self._tasks, self._random_bits, self._topic = settling, tasks, random_bits, topic
        self._under_way = Underway()
        self.settled = self._under_way.none

    def unseen(self, batches: list[LeasedBatch]) -> None:
        """Returns leases that no person's code has seen."""
        for batch in batches:
            if len(batch):
                self._begin(batch.unseen(self._random_bits), "handing back")

    def bury(self, batch: LeasedBatch, reason: bytes) -> None:
        """Makes dead letters of what cannot be delivered."""
        self._begin(batch.settles(Operation.BURY, self._random_bits, reason=reason), "burying")

    def _begin(self, settles: Settles, why: str) -> None:
        self._under_way.begin()
        self._tasks.spawn(self._settle(settles), why)

    async def _settle(self, settles: Settles) -> None:
        """Tries again while the outcome is not known, since operation ids make that harmless. What cannot be settled
        runs out by its lease."""
        try:
            wait_ms = FIRST_WAIT_MS
            for left in reversed(range(TRIES)):
                answers = await self._settling.settle(self._topic(), settles)
                if not left or not np.isin(answers.status, UNSURE).any():
                    break
                await asyncio.sleep(wait_ms / 1000.0)
                wait_ms *= WAIT_FACTOR
        finally:
            self._under_way.end()
