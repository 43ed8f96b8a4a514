"""Pace: how a broker goes through thousands of consumers or streams without holding up what is due."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 100
"""So many are looked at between two pauses, or a little more: 0.1 to 0.3 ms."""
PAUSE_S = 0.001
"""Not a turn of the event loop: a message takes several, and would be late by what is done in each of them."""


class Pace:
    """Of one look at all of something."""

    def __init__(self) -> None:
        self._done = 0

    def some(self, all_: Iterable[T]) -> Iterator[list[T]]:
        """What there is now, as many as may be looked at at once: after a pause some of it may be gone."""
        left = list(all_)
        return (left[start : start + AT_ONCE] for start in range(0, len(left), AT_ONCE))

    async def did(self, count: int) -> None:
        """So many more were looked at: it is time for a pause, or not yet."""
        self._done += count
        if self._done >= AT_ONCE:
            self._done = 0
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(PAUSE_S)
