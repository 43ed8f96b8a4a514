"""Walks over (bucket, id): scans, what a holder has, and the ids of a tag, all resumable by a cursor.

A cursor is the bucket, the walk's number (4 bytes each, big endian) and the last id seen in the bucket. A bucket alone
starts a walk there. The sorted ids of a walk's bucket are kept for its next page. If they are gone, or a page is
repeated, they are sorted again. They are kept by the walk's number: a later walk never sees what is older than it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from timeline.columns import Bools, Indexes, Int64
from timeline.model import Rows, State
from timeline.storage_plugins.contract import Page, ScanFilter
from timeline.storage_plugins.memory.rows import DEAD, FREE, HELD, TopicRows, records_of

PAGE_BYTES = 1024 * 1024
LOOKED_AT = 4_000_000
"""A page ends after a look at this number of rows, even if it is empty: other calls wait meanwhile."""
WALKS = 16

Fits = Callable[[list[bytes]], int]
"""Return how many of these ids, the next ones of a page, still fit."""


def place_of(bucket: int, id: bytes) -> bytes:
    return bucket.to_bytes(2, "big") + id


def cursor_at(number: bytes, bucket: int, last: bytes) -> bytes:
    return bucket.to_bytes(4, "big") + number + last


class Walks:
    """The walks under way on a topic."""

    def __init__(self) -> None:
        self._started = 0
        self._going: dict[bytes, list[bytes]] = {}

    def step(
        self,
        rows: TopicRows,
        cursor: bytes,
        limit: int,
        among: Callable[[Indexes], Bools] | set[int],
        fits: Fits = len,
    ) -> tuple[list[bytes], bytes | None]:
        """Return the ids after `cursor`, at most `limit` and as many as `fits`, and where to go on (None: at the end).
        `among`: the slots to walk, or which of a bucket's rows."""
        number, bucket, last = self._place(cursor)
        limit = max(1, limit)
        found: list[bytes] = []
        looked_at = 0
        while bucket < rows.buckets:
            waiting = self._going.pop(cursor_at(number, bucket, last), None)
            if waiting is None:
                slots, looked_at = _in_bucket(rows, bucket, among), looked_at + _cost(rows, among)
                waiting = sorted((id for id in rows.ids[slots].tolist() if id > last), reverse=True)
            taken = waiting[-(limit - len(found)) :][::-1]
            taken = taken[: max(fits(taken), 0 if found else 1)]
            if taken:
                del waiting[-len(taken) :]
                found += taken
                last = taken[-1]
            if waiting:
                after = cursor_at(number, bucket, last)
                self._keep(after, waiting)
                return found, after
            bucket, last = bucket + 1, b""
            if bucket < rows.buckets and (len(found) == limit or looked_at > LOOKED_AT):
                return found, cursor_at(number, bucket, last)
        return found, None

    def _place(self, cursor: bytes) -> tuple[bytes, int, bytes]:
        bucket = int.from_bytes(cursor[:4], "big")
        if len(cursor) > 4:
            return cursor[4:8], bucket, cursor[8:]
        self._started = (self._started + 1) % 2**32
        return self._started.to_bytes(4, "big"), bucket, b""

    def _keep(self, after: bytes, waiting: list[bytes]) -> None:
        self._going[after] = waiting
        while len(self._going) > WALKS:
            del self._going[next(iter(self._going))]


def _in_bucket(rows: TopicRows, bucket: int, among: Callable[[Indexes], Bools] | set[int]) -> Indexes:
    if isinstance(among, set):
        chosen = np.fromiter(among, dtype=np.intp, count=len(among))
        there: Indexes = chosen[rows.bucket[chosen] == bucket]
        return there
    slots = rows.in_bucket(bucket)
    return slots[among(slots)]


def _cost(rows: TopicRows, among: Callable[[Indexes], Bools] | set[int]) -> int:
    """Return how many rows are looked at to find those of a bucket."""
    return 8 * len(among) if isinstance(among, set) else len(rows.index)


def _fitting(rows: TopicRows) -> Fits:
    """Return a `Fits` for pages that end near PAGE_BYTES of payloads and headers."""
    left = PAGE_BYTES

    def fits(ids: list[bytes]) -> int:
        nonlocal left
        slots = np.array(rows.index.find(ids), dtype=np.intp)
        sizes = rows.sizes(records_of(rows.words.take(np.maximum(slots, 0), axis=0)))
        sizes = np.cumsum(np.where(slots < 0, 0, sizes))
        count = int(np.searchsorted(sizes, left, "right"))
        left -= int(sizes[count - 1]) if count else 0
        return count

    return fits


def matches(rows: TopicRows, where: ScanFilter, now_ms: int) -> Callable[[Indexes], Bools]:
    """Return which rows a scan returns."""
    states = where.states or frozenset((State.WAITING, State.AVAILABLE, State.LEASED))
    tag = rows.tags.find(where.tag)

    def match(slots: Indexes) -> Bools:
        kinds, records = rows.kinds[slots], rows.records
        due_ms: Int64 = records["due_ms"][slots]
        ahead = due_ms > now_ms
        wanted = np.zeros(len(slots), dtype=np.bool_)
        for state, those in (
            (State.WAITING, (kinds == FREE) & ahead),
            (State.LEASED, (kinds == HELD) & ahead),
            (State.AVAILABLE, ((kinds == FREE) | (kinds == HELD)) & ~ahead),
            (State.DEAD, kinds == DEAD),
        ):
            if state in states:
                wanted |= those
        if where.tag:
            wanted &= False if tag is None else records["tag"][slots] == tag
        wanted &= due_ms >= where.due_from_ms
        if where.due_to_ms:
            wanted &= due_ms < where.due_to_ms
        return wanted

    return match


def scan(
    rows: TopicRows, walks: Walks, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
) -> Page:
    """See `contract.Store.scan`."""
    match = matches(rows, where, now_ms)
    if where.ids is not None:
        slots = _slots(rows, list(dict.fromkeys(where.ids.tolist())))
        return _page_of_few(rows, slots[match(slots)], cursor, limit, payload)
    tag = rows.tags.find(where.tag) if where.tag else None
    among = rows.tagged.get(tag, set()) if tag is not None else match
    ids, after = walks.step(rows, cursor, limit, among, _fitting(rows) if payload else len)
    slots = _slots(rows, ids)
    return _page(rows, slots[match(slots)], payload, after)


def held_by(rows: TopicRows, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
    """See `contract.Store.held_by`."""
    number = rows.holders.find(holder) if holder else None
    if number is None:
        return Page(Rows.empty(payload=True), None)
    slots = rows.held.slots()
    slots = slots[(rows.records["holder"][slots] == number) & (rows.records["due_ms"][slots] > now_ms)]
    return _page_of_few(rows, slots, cursor, limit, True)


def _page_of_few(rows: TopicRows, slots: Indexes, cursor: bytes, limit: int, payload: bool) -> Page:
    """Return a page of few rows, which are sorted for each page. The cursor is the place of the last one."""
    places = map(place_of, rows.bucket[slots].tolist(), rows.ids[slots].tolist())
    ordered = sorted((place, slot) for place, slot in zip(places, slots.tolist(), strict=True) if place > cursor)
    ids = [place[2:] for place, _ in ordered[: max(1, limit)]]
    count = max(1, _fitting(rows)(ids)) if ids and payload else len(ids)
    page = np.array([slot for _, slot in ordered[:count]], dtype=np.intp)
    return _page(rows, page, payload, ordered[count - 1][0] if count < len(ordered) else None)


def _slots(rows: TopicRows, ids: list[bytes]) -> Indexes:
    found = [slot for slot in rows.index.find(ids) if slot >= 0]
    return np.array(found, dtype=np.intp)


def _page(rows: TopicRows, slots: Indexes, payload: bool, after: bytes | None) -> Page:
    return Page(rows.rows(slots, rows.words.take(slots, axis=0), payload), after)


__all__ = ["Walks", "held_by", "scan"]
