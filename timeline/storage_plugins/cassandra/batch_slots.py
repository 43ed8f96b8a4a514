"""Which of the buckets that have something to change sends its batch next.

A conditional batch costs a node about as much as FEW messages in it. So of smaller ones only some are under way at
once, and what is asked of a bucket that waits for its turn goes along. With all of them at once, as many as there are
buckets would be sent one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from timeline.storage_plugins.cassandra.bucket import Bucket

SPREAD = 32
"""Buckets that change at once by batches with FEW messages or more."""
FEW = 16
SPREAD_OF_FEW = 4
"""Buckets that change at once by smaller batches."""
FAIR = 4
"""A bucket of which a lease is asked goes ahead of others, but one turn of so many is the first one's in line: a
message that is leased late is late, and one that is put or acknowledged late is not."""


class CooperativeYield:
    """Work that takes a while, one piece in each round of the event loop, so that what is due goes out between them."""

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Goes on in a later round of the event loop, in which nobody else does who asked."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        if not self._line:
            loop.call_soon(self._next, loop)
        self._line.append(mine)
        await mine

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._line:
            first = self._line.popleft()
            if not first.done():  # Whoever was cancelled is passed over.
                first.set_result(None)
                break
        if self._line:
            loop.call_soon(self._next, loop)


class BatchSlots:
    """The buckets of one process that wait to change, and how many do. Of those in line it knows which have enough for
    a large batch, and of which a lease is asked: some may have thousands of buckets."""

    def __init__(self) -> None:
        self._line: dict[Bucket, asyncio.Future[bool]] = {}  # in the order they came; whether it is a small turn
        self._large: dict[Bucket, None] = {}
        self._leasing: dict[Bucket, None] = {}
        self._under_way = {True: 0, False: 0}
        self._given = 0

    @asynccontextmanager
    async def slot(self, bucket: Bucket) -> AsyncIterator[None]:
        """Waits until it is the bucket's turn, whose lock the caller holds, and keeps the turn while the body runs.
        Who is cancelled leaves the line, and the turn to others."""
        given: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._line[bucket] = given
        self.asked(bucket)
        try:
            small = await given
        except BaseException:
            self._leave(bucket)
            if given.done() and not given.cancelled():
                self._end(given.result())
            raise
        try:
            yield
        finally:
            self._end(small)

    @asynccontextmanager
    async def lease_of(self, bucket: Bucket) -> AsyncIterator[None]:
        """Meanwhile a lease waits for the bucket: what holds it up goes ahead of others."""
        bucket.leases += 1
        self.asked(bucket)
        try:
            yield
        finally:
            bucket.leases -= 1

    def asked(self, bucket: Bucket) -> None:
        """More was asked of a bucket, which may be in line: with enough of it, it waits no longer for a small turn."""
        if bucket in self._line:
            if bucket.asked >= FEW:
                self._large[bucket] = None
            if bucket.leases:
                self._leasing[bucket] = None
            self._give()

    def _end(self, small: bool) -> None:
        self._under_way[small] -= 1
        self._give()

    def _give(self) -> None:
        """Gives what turns there are."""
        while self._large and self._under_way[False] < SPREAD:
            self._let(next(iter(self._large)), small=False)
        while self._line and self._under_way[True] < SPREAD_OF_FEW:
            self._given += 1
            urgent = self._given % FAIR != 0 and self._leasing
            self._let(next(iter(urgent or self._line)), small=True)

    def _let(self, bucket: Bucket, small: bool) -> None:
        given = self._line[bucket]
        self._leave(bucket)
        if not given.done():
            self._under_way[small] += 1
            given.set_result(small)

    def _leave(self, bucket: Bucket) -> None:
        for line in (self._line, self._large, self._leasing):
            line.pop(bucket, None)
