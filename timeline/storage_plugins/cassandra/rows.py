"""A message as its row in a bucket, and its index entries; and contents that lie apart from their messages.

Small content lies in the message's own row, see `CassandraRow.content`. Contents apart are written before their
messages, read for a delivery, and deleted after them.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Message
from timeline.model import ROW_DTYPES, Rows
from timeline.storage_plugins.cassandra.session import CassandraSession, Statement, WriteUnknown
from timeline.storage_plugins.cassandra.statements import DEAD, EXPIRES, FREE, HELD, INLINE_BYTES, KEPT, TAG, part_of
from timeline.storage_plugins.contract import StoreError, StoreUnavailable
from timeline.storage_plugins.versions import LaterNumbers

Entry = tuple[int, int, bytes]
"""The place of a row in its bucket: (kind, at, id)."""

_FIELDS = struct.Struct("<B3Q9q4I4H")
"""A message but for its id: the layout's number, the numbers that `CassandraRow.fields` lists, the lengths of four
strings. The strings follow, then the later numbers."""
_LAYOUT = 1
_OWN = ("put_ms", "payload_bytes")
_RULED = (
    "birth", "last_op", "payload_sum", "version", "due_ms", "scheduled_ms", "asked_ms", "expires_ms", "died_ms",
    "deliveries",
)  # fmt: skip
"""Numbers of `Rows` that a `CassandraRow` has itself, and those that its message has."""
LATER = LaterNumbers((*_OWN, *_RULED))


def signed(number: int) -> int:
    """Return an unsigned 64-bit number as the signed one with the same bits."""
    return number - (1 << 64) if number >= 1 << 63 else number


def tag_key(tag: bytes, id: bytes) -> bytes:
    """Return the key in the tag index: tags by length, then bytes, then ids."""
    return bytes((len(tag),)) + tag + id


@dataclass(frozen=True, slots=True)
class CassandraRow:
    """A message for the rules, and what they do not look at. `settled_ms`: when, where only the id is remembered.
    `payload_bytes`: as its producer sees it; `content_bytes`: what lies here. `attempt`: of the put that stored it.
    `later`: its later numbers. `content`: (payload, headers) where they lie beside the message and are known here."""

    id: bytes
    message: Message
    put_ms: int
    payload_bytes: int
    headers_bytes: int
    content_bytes: int
    attempt: int
    tag: bytes = b""
    settled_ms: int = 0
    content: tuple[bytes, bytes] | None = None
    later: bytes = b""

    @classmethod
    def of(cls, row: Any, whole: bool = False) -> CassandraRow:
        """Return the message of a row of `find` or `walk`. `whole`: the statement reads content."""
        packed: bytes = row.fields
        numbers = _FIELDS.unpack_from(packed)
        strings: list[bytes] = []
        start = _FIELDS.size
        for size in numbers[17:]:
            strings.append(packed[start : start + size])
            start += size
        _, birth, last_op, payload_sum, version, due_ms, scheduled_ms, asked_ms, expires_ms, died_ms = numbers[:10]
        put_ms, settled_ms, attempt, deliveries, payload_bytes, headers_bytes, content_bytes = numbers[10:17]
        group, holder, tag, dead = strings
        message = Message(
            birth=birth, version=version, due_ms=due_ms, scheduled_ms=scheduled_ms, asked_ms=asked_ms, holder=holder,
            deliveries=deliveries, last_op=last_op, group=group, expires_ms=expires_ms, payload_sum=payload_sum,
            died_ms=died_ms, dead=dead, remembered=settled_ms != 0,
        )  # fmt: skip
        sizes = (payload_bytes, headers_bytes, content_bytes)
        content = (row.payload, row.headers) if whole and row.payload is not None else None
        return cls(row.id, message, put_ms, *sizes, attempt, tag, settled_ms, content, packed[start:])

    @property
    def size_bytes(self) -> int:
        """Return what it counts in a grant."""
        return self.payload_bytes + self.headers_bytes

    @property
    def inline(self) -> bool:
        """Return whether its content lies beside it."""
        return self.content_bytes <= INLINE_BYTES

    @property
    def whole(self) -> bool:
        """Return whether all that lies in its row is known."""
        return self.content is not None or not self.inline or not self.content_bytes

    def settled(self, last_op: int, now_ms: int) -> CassandraRow:
        """Return what is left of it on a topic that remembers."""
        old = self.message
        left = Message(old.birth, old.version, last_op=last_op, payload_sum=old.payload_sum, group=b"", remembered=True)
        return replace(self, message=left, tag=b"", settled_ms=max(1, now_ms), content_bytes=0, content=None, later=b"")

    def fields(self) -> bytes:
        """Return everything but its id, packed."""
        message = self.message
        strings = (message.group, message.holder, self.tag, message.dead)
        numbers = (
            _LAYOUT,
            *(message.birth, message.last_op, message.payload_sum, message.version, message.due_ms),
            *(message.scheduled_ms, message.asked_ms, message.expires_ms, message.died_ms),
            *(self.put_ms, self.settled_ms, self.attempt),
            *(message.deliveries, self.payload_bytes, self.headers_bytes, self.content_bytes),
        )
        return b"".join((_FIELDS.pack(*numbers, *map(len, strings)), *strings, self.later))

    def entries(self) -> set[Entry]:
        """Return its index entries."""
        message, id = self.message, self.id
        if message.remembered:
            return {(KEPT, self.settled_ms, id)}
        found: set[Entry] = {(TAG, 0, tag_key(self.tag, id))} if self.tag else set()
        if message.died_ms:
            found.add((DEAD, message.died_ms, id))
            return found
        found.add((HELD if message.holder else FREE, message.due_ms, id))
        if message.expires_ms:
            found.add((EXPIRES, message.expires_ms, id))
        return found


def rows_of(stored: Sequence[CassandraRow], contents: Iterable[tuple[bytes, bytes]] | None = None) -> Rows:
    """Return messages as columns, with their contents where they came along."""
    messages = [one.message for one in stored]
    columns = LATER.columns([one.later for one in stored])
    for names, source in ((_OWN, stored), (_RULED, messages)):
        for name in names:
            columns[name] = np.fromiter(map(attrgetter(name), source), dtype=ROW_DTYPES[name], count=len(stored))
    if contents is not None:
        pairs = list(contents)
        columns["payloads"] = Ragged.of([payload for payload, _ in pairs])
        columns["headers"] = Ragged.of([headers for _, headers in pairs])
    return Rows(
        ids=Ragged.of([one.id for one in stored]),
        groups=Ragged.of([message.group for message in messages]),
        holders=Ragged.of([message.holder for message in messages]),
        tags=Ragged.of([one.tag for one in stored]),
        dead=Ragged.of([message.dead for message in messages]),
        **columns,
    )


# ── contents apart ──

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
        """Return (payload, headers) of each (bucket, message), in order; None if it is gone. Raise StoreUnavailable."""
        contents, unread = await self.readable(topic, wanted)
        if unread:
            raise next(iter(unread.values()))
        return contents

    async def readable(
        self, topic: int, wanted: Sequence[tuple[int, CassandraRow]]
    ) -> tuple[list[tuple[bytes, bytes] | None], dict[int, StoreUnavailable]]:
        """Return the same, and the errors of contents that could not be read, by index. These are None in the list.
        Content beside its message came with it."""
        apart = {at: Content.of(*one) for at, one in enumerate(wanted) if not one[1].inline}
        batches = list(_batches(apart.values()))
        requests = (
            self._connected.read("content_find", topic, *place, [content.id for content in batch])
            for place, batch in batches
        )
        found: dict[tuple[bytes, int, int], tuple[bytes, bytes]] = {}
        failed: dict[Content, StoreUnavailable] = {}
        for (_, batch), rows in zip(batches, await asyncio.gather(*requests, return_exceptions=True), strict=True):
            if isinstance(rows, StoreUnavailable):
                failed |= dict.fromkeys(batch, rows)
            elif isinstance(rows, BaseException):
                raise rows
            else:
                found.update({(row.id, row.birth, row.attempt): (row.payload, row.headers) for row in rows})
        unread = {at: failed[content] for at, content in apart.items() if content in failed}
        return [_content(stored, found) for _, stored in wanted], unread

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
