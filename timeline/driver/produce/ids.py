"""Ids, births and operation ids: UUIDv7 texts, and random 64-bit numbers that are never 0."""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np

from timeline.clock import Clock
from timeline.columns import Ragged, UInt64

_COUNTER_BITS = 12


class Randomness(Protocol):
    """What the driver needs of a `random.Random`. By default `random.SystemRandom`: a forked child does not repeat
    what its parent draws."""

    def getrandbits(self, k: int, /) -> int: ...
    def random(self) -> float: ...
    def randbytes(self, n: int) -> bytes: ...


class ConsumerId:
    """What a consumer is called: as asked, or, where nobody asked, by a name that is made, and in a forked child made
    anew: under its parent's, the two would supersede each other."""

    def __init__(self, asked: str | None, ids: Ids) -> None:
        self._asked, self._ids = asked, ids
        self._pid, self._made = 0, ""

    @property
    def text(self) -> str:
        """What it is in this process."""
        if self._asked is not None:
            return self._asked
        if self._pid != os.getpid():
            self._made = f"consumer-{self._ids.make().decode()}"
            self._pid = os.getpid()  # last: another thread that sees it takes what was made
        return self._made


class Ids:
    """Makes ids that sort by time of making: UUIDs of version 7 (RFC 9562), 48 bits of milliseconds, then 12 bits that
    count within the millisecond, then 62 random bits. More than fit into a millisecond run ahead into the next."""

    def __init__(self, clock: Clock, random: Randomness) -> None:
        self._clock = clock
        self._random = random
        self._last = 0

    def make(self) -> bytes:
        """One new id, 36 bytes of text."""
        return self.make_many(1)[0]

    def make_many(self, count: int) -> list[bytes]:
        """`count` new ids in ascending order."""
        first = max(self._last + 1, self._clock.now_ms() << _COUNTER_BITS | self._random.getrandbits(_COUNTER_BITS - 1))
        self._last = first + count - 1
        random = self._random.randbytes(8 * count).hex()
        made: list[bytes] = []
        for at in range(count):
            stamp = f"{first + at:015x}"
            tail = random[16 * at : 16 * at + 16]
            variant = "89ab"[int(tail[0], 16) & 3]
            made.append(f"{stamp[:8]}-{stamp[8:12]}-7{stamp[12:]}-{variant}{tail[1:4]}-{tail[4:]}".encode())
        return made

    def make_column(self, count: int) -> Ragged:
        """`count` new ids as a column."""
        return Ragged.of(self.make_many(count))

    def number(self) -> int:
        """A random number of 64 bits, never 0: a birth, an operation's or a session's id."""
        return self._random.getrandbits(64) or 1

    def numbers(self, count: int) -> UInt64:
        """`count` of them as a column."""
        drawn = np.frombuffer(self._random.randbytes(8 * count), dtype="<u8").astype(np.uint64)
        drawn[drawn == 0] = 1
        return drawn
