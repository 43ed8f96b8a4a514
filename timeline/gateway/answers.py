"""Bounds the memory of all answers together: of those that are made, and of those that wait for their readers.

An answer that may be large takes room before anything of it is read from a broker. It gives the room back once it is
written to its connection. From then on, what its caller has not read is counted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from timeline.errors import Throttled

ANSWERS_BYTES = 128 * 1024 * 1024
"""All answers together. Beyond it, callers that read nothing for `LOOK_S` are disconnected."""
LARGEST_BYTES = ANSWERS_BYTES * 3 // 4
"""The most that one answer is counted for, so that it finds room beside others that are read."""
SMALL_ROOM_BYTES = 32 * 1024 * 1024
ROOMS = ((256 * 1024, 2 * SMALL_ROOM_BYTES), (4 * 1024 * 1024, SMALL_ROOM_BYTES), (ANSWERS_BYTES, 0))
"""Answers of up to so many bytes, and their room on top. They do not wait behind larger ones."""
WEIGHT = 4
"""How much memory an answer may take while it is made, as a multiple of what it tells: as it came from the broker, as
objects, and as JSON."""
ROW_BYTES = 512
"""What is counted for a message beside its payload and its headers."""
WAIT_S = 5.0
"""How long an answer waits for room."""
LOOK_S = 1.0
"""How long a reader may take nothing before it counts as one that reads nothing."""
ADVICE = "read answers as they come, ask for fewer at once or with a smaller limit, and wait"


class Reader(Protocol):
    """A connection whose caller has not read all that was written. `unread_bytes`: how much of it."""

    @property
    def unread_bytes(self) -> int: ...
    def has_read(self) -> bool: ...
    def has_begun(self) -> bool: ...
    def abort(self) -> None: ...


class AnswerBudget:
    """The bytes of all answers of a process. `made_bytes`: of those that are made."""

    def __init__(self, most: int = ANSWERS_BYTES) -> None:
        self._most, self.made_bytes = most, 0
        self._unread: dict[Reader, None] = {}
        self._queues: tuple[deque[tuple[int, asyncio.Future[None]]], ...] = tuple(deque() for _ in ROOMS)
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def unread_bytes(self) -> int:
        """What callers have not read yet."""
        return sum(each.unread_bytes for each in self._unread)

    def take(self, size: int, first: bool = False) -> bool:
        """Take room at once. Return whether there was some, and nobody waits for it. `first`: for an answer that is in
        memory already, which has the room on top, and goes before those that wait."""
        kind = _kind(size)
        room = max(ROOMS[kind][1], SMALL_ROOM_BYTES if first else 0)
        if not self._fits(size, room) or (self._queues[kind] and not first):
            return False
        self.made_bytes += size
        return True

    async def wait(self, size: int) -> None:
        """Take room when it is there, in the order of those that wait. Raise Throttled."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[_kind(size)].append((size, turn))
        self._look()
        try:
            async with asyncio.timeout(WAIT_S):
                await turn
        except BaseException as ended:
            if turn.done() and not turn.cancelled():
                self.give_back(size)  # its turn came as its wait ended
            turn.cancel()
            self._grant()  # those behind it may be smaller
            if isinstance(ended, TimeoutError):
                raise full() from None
            raise

    def give_back(self, size: int) -> None:
        """Free room."""
        self.made_bytes -= size
        self._grant()

    def _fits(self, size: int, room: int) -> bool:
        return self.made_bytes + self.unread_bytes + size <= self._most + room

    def _grant(self) -> None:
        for queue, (_, room) in zip(self._queues, ROOMS, strict=True):
            while queue:
                size, turn = queue[0]
                if not turn.done():
                    if not self._fits(size, room):
                        break
                    self.made_bytes += size
                    turn.set_result(None)
                queue.popleft()

    def unread(self, one: Reader) -> None:
        """Note that a connection has an answer whose reader is slow. If all are too large, those that read nothing
        since the last look are disconnected, the oldest first."""
        self._unread[one] = None
        self._look(one)

    def read(self, one: Reader) -> None:
        """Note that the answers of a connection were read, or that it is closed."""
        if one in self._unread:
            del self._unread[one]
            self._grant()

    def _look(self, newest: Reader | None = None) -> None:
        """Disconnect those that read nothing, until what there is and what is waited for has room. Beyond the room on
        top, those that have not begun to read go at once."""
        self._grant()
        left = self.unread_bytes
        wanted = self.made_bytes + max((queue[0][0] for queue in self._queues if queue), default=0)
        for each in [one for one in self._unread if one is not newest] if left + wanted > self._most else ():
            too_much = left > self._most + SMALL_ROOM_BYTES and not each.has_begun()
            if left + wanted > self._most and (too_much or not each.has_read()):
                left -= each.unread_bytes
                self._unread.pop(each, None)
                each.abort()
        self._grant()
        if (left + wanted > self._most or any(self._queues)) and self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        self._look()


class AnswerRoom:
    """The room of one answer."""

    def __init__(self, budget: AnswerBudget) -> None:
        self._budget, self._held_bytes = budget, 0

    def take(self, told_bytes: int, first: bool = False) -> bool:
        """Take room at once for an answer that tells so many bytes. Return whether there was some. `first`: it goes
        before those that wait."""
        size = _counted(told_bytes)
        taken = self._budget.take(size, first)
        self._held_bytes += size if taken else 0
        return taken

    def take_largest(self) -> bool:
        """Take room at once for an answer of any size. Return whether there was as much. If not, ask brokers for its
        size first."""
        return self.take(LARGEST_BYTES)

    def keep(self, told_bytes: int) -> None:
        """Free all but the room of an answer that tells so many bytes."""
        given = self._held_bytes - _counted(told_bytes)
        if given > 0:
            self._held_bytes -= given
            self._budget.give_back(given)

    async def wait(self, told_bytes: int) -> bool:
        """Take room when it is there. Raise Throttled. Return True."""
        size = _counted(told_bytes)
        await self._budget.wait(size)
        self._held_bytes += size
        return True

    def give_back(self) -> None:
        """Free it."""
        if self._held_bytes:
            held, self._held_bytes = self._held_bytes, 0
            self._budget.give_back(held)


def _kind(size: int) -> int:
    return next(at for at, (most, _) in enumerate(ROOMS) if size <= most)


def _counted(told_bytes: int) -> int:
    return min(told_bytes * WEIGHT, LARGEST_BYTES)


def full() -> Throttled:
    """Return the refusal of an answer for which there is no room."""
    return Throttled("the gateway has no room for another answer", retry_after_ms=1_000, advice=ADVICE)
