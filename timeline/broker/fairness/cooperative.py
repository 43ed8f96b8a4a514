"""Pace: how a broker goes through thousands of consumers, streams or topics without holding up what is due."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

AT_ONCE = 100
"""So many are looked at between two pauses, or a little more: 0.1 to 0.3 ms."""
PAUSE_S = 0.001
"""Not a turn of the event loop: a message takes several, and would be late by what is done in each of them."""
SHARE = 0.05
"""Of its time that each look at the store may take: after one that took 10 ms, the next begins 190 ms later."""
EMPTY_COUNTED = 50
"""Topics without messages that one round counts, in turn."""
EMPTY_SWEPT = 10
"""The same of a sweep, which finds there what is remembered no longer, and dead letters past their retention."""


async def rest(took_ms: float) -> None:
    """Returns when a look that took so long has had no more than its share of the time."""
    await asyncio.sleep(took_ms / 1000.0 * (1.0 / SHARE - 1.0))


class TopicRounds:
    """Topics, by uid, that a broker looks at again and again. Each round has those that may have messages, and
    `at_once` of the others in turn, which may have got messages through another broker. So ten thousand empty topics
    cost no more than fifty."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._stocked: dict[int, None] = {}
        self._empty: OrderedDict[int, None] = OrderedDict()

    def add(self, uid: int, empty: bool) -> None:
        """A topic that was not looked at yet. `empty`: it is taken for empty all the same."""
        if empty:
            self._empty[uid] = None
        else:
            self._stocked[uid] = None

    def remove(self, uid: int) -> None:
        """The topic was dropped."""
        self._stocked.pop(uid, None)
        self._empty.pop(uid, None)

    def begin(self) -> list[int]:
        """The topics of the next round."""
        turn = [self._empty.popitem(last=False)[0] for _ in range(min(self._at_once, len(self._empty)))]
        self._empty.update(dict.fromkeys(turn))
        return [*self._stocked, *turn]

    def empty(self, uid: int) -> None:
        """The topic is taken for empty from now on. To be called before the look at it: what happens to it during the
        look makes it `used` again."""
        if uid in self._stocked:
            del self._stocked[uid]
            self._empty[uid] = None

    def used(self, uid: int) -> bool:
        """The topic may have messages; whether it was taken for empty."""
        if uid not in self._empty:
            return False
        del self._empty[uid]
        self._stocked[uid] = None
        return True

    def is_empty(self, uid: int) -> bool:
        """Whether the topic is taken for empty."""
        return uid in self._empty

    def restart(self) -> None:
        """The next round has every topic: what was known of some may be known to nobody now."""
        self._stocked.update(self._empty)
        self._empty.clear()


class CooperativePace:
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
