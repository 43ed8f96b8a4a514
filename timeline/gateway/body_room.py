"""Bounds the bytes of all bodies that are in memory at once, from their first part to the end of their calls.

A caller that sends slowly gives way to others when there is no room left. So half a body cannot keep everybody out.
"""

from __future__ import annotations

import asyncio

from timeline.errors import Throttled

BODIES_BYTES = 160 * 1024 * 1024
"""All bodies together."""
SMALL_BYTES = 64 * 1024
SMALL_ROOM_BYTES = 32 * 1024 * 1024
"""Room on top, for bodies of up to `SMALL_BYTES` alone."""
SLOW_BYTES_PER_S = 64 * 1024
WINDOW_S = 2.0
"""How long a body is watched before it counts as slow."""
TOO_SLOW = "the body came too slowly while the gateway had no room for others"


class BodyBudget:
    """The room that is left for all bodies."""

    def __init__(self, most: int = BODIES_BYTES) -> None:
        self.left = most
        self.rooms: dict[BodyRoom, None] = {}

    def free_slow(self, wanted: int) -> None:
        """Take the room of callers that send slowly, the largest first, until there is as much as is wanted."""
        slow = sorted((room for room in self.rooms if room.slow), key=lambda room: room.held_bytes, reverse=True)
        for room in slow:
            if self.left >= wanted:
                return
            room.lose()


class BodyRoom:
    """The room of one body. `timer`: ends the wait for its next part; None while nobody waits."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held_bytes = 0
        self.timer: asyncio.Timeout | None = None
        self.lost = False
        self._since_s = asyncio.get_running_loop().time()
        self._recent_bytes = 0
        self._was_slow = False

    def take(self, count: int) -> None:
        """Reserve bytes. Raise Throttled if they are not free."""
        least = -SMALL_ROOM_BYTES if self.held_bytes + count <= SMALL_BYTES else 0
        if self._budget.left - count < least:
            self._budget.free_slow(count + least)
        if self.lost or self._budget.left - count < least:
            raise Throttled("the gateway holds as many bodies as it may", retry_after_ms=1_000)
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._since_s + WINDOW_S:
            self._was_slow = self._falls_short(now_s)
            self._since_s, self._recent_bytes = now_s, 0
        self._recent_bytes += count
        self._budget.left -= count
        self.held_bytes += count
        self._budget.rooms[self] = None

    def give_back(self, count: int | None = None) -> None:
        """Free bytes that are no longer kept. Default: all."""
        given = self.held_bytes if count is None else min(count, self.held_bytes)
        self._budget.left += given
        self.held_bytes -= given
        if not self.held_bytes:
            self._budget.rooms.pop(self, None)

    @property
    def slow(self) -> bool:
        """Whether its caller sends slowly, and is waited for now."""
        now_s = asyncio.get_running_loop().time()
        watched = now_s >= self._since_s + WINDOW_S
        return self.timer is not None and (self._falls_short(now_s) if watched else self._was_slow)

    def _falls_short(self, now_s: float) -> bool:
        return self._recent_bytes < SLOW_BYTES_PER_S * (now_s - self._since_s)

    def lose(self) -> None:
        """Give way: the wait for the next part ends."""
        self.lost = True
        self.give_back()
        if self.timer is not None:
            self.timer.reschedule(asyncio.get_running_loop().time())
