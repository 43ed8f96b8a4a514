"""Whether a topic in one store is the same as in another: every field that a copy takes over, message by message."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from timeline.columns import Bools, Int64
from timeline.model import Rows, State, Topic, bucket_of, payload_sums
from timeline.storage_plugins.contract import ScanFilter, Store

PAGE = 1_000
LIVING = frozenset((State.WAITING, State.AVAILABLE, State.LEASED))
DEAD = frozenset((State.DEAD,))
MOST_TOLD = 1_000
"""So many messages that could not be copied, or differ, are named; all are counted."""

Said = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Side:
    """What one store has of the topic: messages, bytes of payloads, and a checksum over every field that goes over."""

    messages: int
    payload_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Compared:
    """Both sides, how many messages differ, and of some of them what differs."""

    source: Side
    target: Side
    differing: int
    reasons: dict[bytes, str]

    @property
    def same(self) -> bool:
        return self.source == self.target and not self.differing


class _Record(NamedTuple):
    """A message as it goes over. `sound`: its payload is what its checksum says; True where it was not read."""

    bucket: int
    id: bytes
    birth: int
    due_ms: int
    expires_ms: int
    payload_sum: int
    payload_bytes: int
    group: bytes
    tag: bytes
    dead: bytes
    died_ms: int
    sound: bool = True

    @property
    def place(self) -> tuple[int, bytes]:
        return self.bucket, self.id


async def compare(
    source: Store, topic: Topic, target: Store, into: Topic, now_ms: int, said: Said = lambda _: None
) -> Compared:
    """Walks `topic` of `source` and `into` of `target` at once. Payloads of the target are read back and compared with
    their checksums. What is expired by `now_ms` is left out on both sides. `said` is told of every message."""
    sides = (_Tally(), _Tally())
    differing, reasons = 0, dict[bytes, str]()
    left, right = _records(source, topic, now_ms, False), _records(target, into, now_ms, True)
    ours, theirs = await anext(left, None), await anext(right, None)
    while ours is not None or theirs is not None:
        mine = ours if theirs is None or (ours is not None and ours.place <= theirs.place) else None
        other = theirs if ours is None or (theirs is not None and theirs.place <= ours.place) else None
        for record, tally in zip((mine, other), sides, strict=True):
            if record is not None:
                tally.add(record)
        why = _difference(mine, other)
        if why:
            differing += 1
            found = mine or other
            if found is not None and len(reasons) < MOST_TOLD:
                reasons[found.id] = why
        ours = await anext(left, None) if mine is not None else ours
        theirs = await anext(right, None) if other is not None else theirs
        said(1)
    return Compared(sides[0].side, sides[1].side, differing, reasons)


class _Tally:
    """Counts and sums what one side has."""

    def __init__(self) -> None:
        self._messages = self._bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, record: _Record) -> None:
        self._messages += 1
        self._bytes += record.payload_bytes
        self._digest.update(repr(tuple(record)).encode())

    @property
    def side(self) -> Side:
        return Side(self._messages, self._bytes, self._digest.hexdigest())


async def _records(store: Store, topic: Topic, now_ms: int, payload: bool) -> AsyncIterator[_Record]:
    """Every message of the topic as it goes over, by (bucket, id)."""
    cursor: bytes | None = b""
    while cursor is not None:
        page = await store.scan(topic, now_ms, ScanFilter(LIVING | DEAD), cursor, PAGE, payload)
        rows = page.rows.take(~expired_of(page.rows, now_ms))
        sound = np.ones(len(rows), dtype=np.bool_)
        if payload and len(rows):
            assert rows.payloads is not None
            sound = payload_sums(rows.payloads, rows.headers) == rows.payload_sum
        columns = (rows.birth, dues_of(rows), rows.expires_ms, rows.payload_sum, rows.payload_bytes)
        texts = (rows.groups, rows.tags, rows.dead)
        fields = zip(*(column.tolist() for column in (*columns, *texts, rows.died_ms, sound)), strict=True)
        for id, values in zip(rows.ids.tolist(), fields, strict=True):
            yield _Record(bucket_of(id, topic.settings.buckets), id, *values)
        cursor = page.cursor


def _difference(mine: _Record | None, other: _Record | None) -> str:
    """What differs between a message of the source and that of the target, in words; empty: nothing."""
    if mine is None or other is None:
        return "only in the source" if other is None else "only in the target"
    if mine == other:
        return ""
    if not other.sound:
        return "its payload in the target is not what its checksum is of"
    names = [name for name, ours, theirs in zip(_Record._fields, mine, other, strict=True) if ours != theirs]
    return f"{', '.join(names)} differ"


def expired_of(rows: Rows, now_ms: int) -> Bools:
    """Which are expired: past their expiry, not dead, and not under a live lease."""
    held = (rows.holders.sizes > 0) & (rows.due_ms > now_ms)
    expired: Bools = (rows.expires_ms > 0) & (rows.expires_ms <= now_ms) & (rows.died_ms == 0) & ~held
    return expired


def dues_of(rows: Rows) -> Int64:
    """When each is due in the target: as scheduled; at its lease's end where somebody has it, or had it to the end."""
    held = (rows.holders.sizes > 0) & (rows.died_ms == 0)
    return np.where(held, rows.due_ms, rows.scheduled_ms)
