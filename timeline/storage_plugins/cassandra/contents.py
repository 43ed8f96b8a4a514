"""Contents that lie apart from their messages: written before them, read for a delivery, deleted after them.

Small content lies in the message's own row, see `CassandraRow.content`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from timeline.storage_plugins.cassandra.rows import CassandraRow, signed
from timeline.storage_plugins.cassandra.session import CassandraSession, Statement, WriteUnknown
from timeline.storage_plugins.cassandra.statements import part_of
from timeline.storage_plugins.contract import StoreError, StoreUnavailable

BATCH_ROWS = 200
BATCH_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Content:
    """The place of a content, and the content itself if it is known."""

    bucket: int
    id: bytes
    birth: int
    attempt: int
    size_bytes: int
    payload: bytes = b""
    headers: bytes = b""

    @classmethod
    def of(cls, bucket: int, stored: CassandraRow) -> Content:
        return cls(bucket, stored.id, stored.message.birth, stored.attempt, stored.content_bytes)

    @property
    def place(self) -> tuple[int, int]:
        return self.bucket, part_of(self.size_bytes, self.attempt)


def _batches(contents: Iterable[Content]) -> Iterator[tuple[tuple[int, int], list[Content]]]:
    """Yield contents by partition, few and small enough for one request."""
    by_place: dict[tuple[int, int], list[Content]] = defaultdict(list)
    for content in contents:
        by_place[content.place].append(content)
    for place, those in by_place.items():
        batch: list[Content] = []
        left = BATCH_BYTES
        for content in those:
            if batch and (len(batch) == BATCH_ROWS or content.size_bytes > left):
                yield place, batch
                batch, left = [], BATCH_BYTES
            batch.append(content)
            left -= content.size_bytes
        yield place, batch


class Contents:
    """The contents of all topics."""

    def __init__(self, connected: CassandraSession) -> None:
        self._connected = connected
        self._deleting: set[asyncio.Task[None]] = set()

    async def write(self, topic: int, now_ms: int, contents: Sequence[Content]) -> None:
        """Write contents. After a failure nothing has happened: what was written is an orphan, and swept."""
        batches: list[list[Statement]] = []
        for (bucket, part), those in _batches(contents):
            place = (topic, bucket, part)
            batches.append(
                [
                    ("content_store", (*place, c.id, signed(c.birth), c.attempt, now_ms, c.payload, c.headers))
                    for c in those
                ]
            )
        done = await asyncio.gather(*map(self._connected.write, batches), return_exceptions=True)
        for result in done:
            if isinstance(result, WriteUnknown):
                raise StoreUnavailable(f"the content could not be stored: {result}") from result
            if isinstance(result, BaseException):
                raise result

    async def read(self, topic: int, wanted: Sequence[tuple[int, CassandraRow]]) -> list[tuple[bytes, bytes] | None]:
        """Return (payload, headers) of each (bucket, message), in order; None if it is gone. Content beside its message
        came with it."""
        apart = [Content.of(bucket, stored) for bucket, stored in wanted if not stored.inline]
        requests = [
            self._connected.read("content_find", topic, *place, [content.id for content in batch])
            for place, batch in _batches(apart)
        ]
        found: dict[tuple[bytes, int, int], tuple[bytes, bytes]] = {}
        for rows in await asyncio.gather(*requests):
            found.update({(row.id, row.birth, row.attempt): (row.payload, row.headers) for row in rows})
        return [_content(stored, found) for _, stored in wanted]

    def delete(self, topic: int, contents: Iterable[Content]) -> None:
        """Delete contents in the background. Contents that cannot be deleted are orphans, and are swept."""
        batches: list[list[Statement]] = [
            [("content_remove", (topic, *place, c.id, signed(c.birth), c.attempt)) for c in those]
            for place, those in _batches(contents)
        ]
        if batches:
            task = asyncio.get_running_loop().create_task(self._delete(batches))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(self, batches: list[list[Statement]]) -> None:
        done = await asyncio.gather(*map(self._connected.write, batches), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException) and not isinstance(result, (WriteUnknown, StoreError)):
                raise result

    async def finish(self) -> None:
        """Wait until all deletions are done."""
        while self._deleting:
            await asyncio.gather(*self._deleting)


def _content(
    stored: CassandraRow, found: dict[tuple[bytes, int, int], tuple[bytes, bytes]]
) -> tuple[bytes, bytes] | None:
    if not stored.inline:
        return found.get((stored.id, signed(stored.message.birth), stored.attempt))
    return stored.content if stored.content_bytes else (b"", b"")
