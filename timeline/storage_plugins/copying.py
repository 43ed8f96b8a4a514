"""Copy a topic with its payloads from one store into another of any kind, and prove that both have the same.

Ids, births, due times, groups, tags, expiries, payloads, headers and dead letters are copied. Versions and deliveries
start again, so no token of the old store counts in the new one. Messages that the target has already are not read
again: a copy that broke off continues. The target's topic is paused until the copy is proven.

The topic's recurring schedules go over last: see `copying_schedules`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from timeline.columns import Bools, Int64, Ragged
from timeline.model import Operation, Rows, State, Status, Topic, TopicSettings, bucket_of, payload_sums
from timeline.schedules.specification import INTERNAL_PREFIX
from timeline.storage_plugins.asks import LIVING, pages
from timeline.storage_plugins.contract import Grant, Puts, ScanFilter, Settles, Store, StoreRefused, TopicConflict
from timeline.storage_plugins.copying_schedules import ScheduleCopy
from timeline.storage_plugins.offload import is_pointer
from timeline.storage_plugins.records import same_settings

PAGE = 1_000
DEAD = frozenset((State.DEAD,))
MOST_TOLD = 1_000
"""At most this many messages that failed or differ are named. All are counted."""

Said = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Side:
    """One store's part of a comparison: messages, bytes of payloads, and a checksum over every copied field."""

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


_GOES_OVER = {field.name for field in Puts.columns} - {"ids", "payloads", "headers"}
COMPARED = tuple(field.name for field in Rows.columns if field.name in _GOES_OVER or field.name in ("dead", "died_ms"))
"""The fields that must be equal in both stores. The checksum stands for payload and headers."""


class _Record(NamedTuple):
    """A message as it is copied. `sound`: its payload fits its checksum; True if it was not read."""

    bucket: int
    id: bytes
    payload_bytes: int
    values: tuple[int | bytes, ...]
    """As in COMPARED."""
    sound: bool

    @property
    def place(self) -> tuple[int, bytes]:
        return self.bucket, self.id


async def compare(
    source: Store, topic: Topic, target: Store, into: Topic, now_ms: int, said: Said = lambda _: None
) -> Compared:
    """Walk `topic` of `source` and `into` of `target` at once. Payloads of the target are read back and compared with
    their checksums. Messages that a copy leaves behind at `now_ms` are left out on both sides. `said` is called for
    every message."""
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
    """Yield every message of the topic as it is copied, by (bucket, id)."""
    where = ScanFilter(LIVING | DEAD)
    async for page in pages(lambda cursor: store.scan(topic, now_ms, where, cursor, PAGE, payload)):
        rows = page.take(~left_behind(page, now_ms))
        sound = np.ones(len(rows), dtype=np.bool_)
        if payload and len(rows):
            assert rows.payloads is not None
            sound = payload_sums(rows.payloads, rows.headers) == rows.payload_sum
        rows.due_ms = dues_of(rows)
        values = zip(*(getattr(rows, name).tolist() for name in COMPARED), strict=True)
        fields = zip(rows.ids.tolist(), rows.payload_bytes.tolist(), values, sound.tolist(), strict=True)
        for id, *rest in fields:
            yield _Record(bucket_of(id, topic.settings.buckets), id, *rest)


def _difference(mine: _Record | None, other: _Record | None) -> str:
    """Return in words how a message of the source and that of the target differ; empty: not at all."""
    if mine is None or other is None:
        return "only in the source" if other is None else "only in the target"
    if mine == other:
        return ""
    if not other.sound:
        return "its payload in the target is not what its checksum is of"
    names = [name for name, ours, theirs in zip(COMPARED, mine.values, other.values, strict=True) if ours != theirs]
    return f"{', '.join(names)} differ"


def dues_of(rows: Rows) -> Int64:
    """Return when each message is due in the target: as scheduled; at its lease's end if it is or was leased."""
    held = (rows.holders.sizes > 0) & (rows.died_ms == 0)
    return np.where(held, rows.due_ms, rows.scheduled_ms)


def left_behind(rows: Rows, now_ms: int) -> Bools:
    """Return which messages are not copied: those that are expired, and those that would be due in the target only at
    or after their expiry, because their lease lasts that long. They could never be delivered there."""
    too_late: Bools = (rows.expires_ms > 0) & (rows.expires_ms <= dues_of(rows)) & (rows.died_ms == 0)
    return rows.expired(now_ms) | too_late


PAGES_AT_ONCE = 4
HOLDER = b"timeline-copy"
MOST_LEASES = 1_000
GONE = "its payload is gone or damaged in the source"


@dataclass(slots=True)
class Copied:
    """The result of a copy. `copied`: messages. `there`: messages that the target had already. `dead`: dead letters
    among both. `expired`: messages that stay behind, see `left_behind`. `schedules`: that the target has now. `failed`:
    how many messages and schedules could not be copied. `reasons`: id → why."""

    copied: int = 0
    there: int = 0
    dead: int = 0
    expired: int = 0
    schedules: int = 0
    failed: int = 0
    reasons: dict[bytes, str] = field(default_factory=dict)

    def fail(self, id: bytes, why: str) -> None:
        self.failed += 1
        if len(self.reasons) < MOST_TOLD:
            self.reasons[id] = why


class TopicCopy:
    """One topic's copy from `source` to `target`, both open.

    `leased`: also copy leased messages, as due at the end of their lease. `live`: copy out of a topic that brokers may
    be serving. `now_ms`: returns the time. `said` is called for every finished message.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        topic: Topic,
        now_ms: Callable[[], int],
        *,
        leased: bool = False,
        live: bool = False,
    ) -> None:
        self.source, self.target, self.topic, self.leased, self.live = source, target, topic, leased, live
        self._now_ms = now_ms
        self._schedules = ScheduleCopy(source, target, topic.name, now_ms)
        self.total = 0
        self.done = Copied()
        self.whole: Compared | None = None
        """Once it is prepared: what was compared when the target's topic is live and has all of it, so that nothing is
        left to do; None when there is."""
        self._fresh = False
        """Whether the target's topic was made by this very copy: then nothing can be there yet."""

    async def prepare(self, said: Said = lambda _: None) -> None:
        """Count the source's messages and create the topic in the target, paused. If an earlier copy was finished, and
        its topic is live, set `whole`. `said` is called for every message counted.

        Raise StoreRefused when brokers may be serving the source's topic (unless `live`), or when messages of the
        source are leased (unless `leased`). Raise it also when the target's topic is live and differs, or has other
        schedules. Raise TopicConflict when its settings differ, Invalid when the target cannot hold its kind.
        """
        name = self.topic.name
        if name.startswith(INTERNAL_PREFIX):
            raise StoreRefused(f"{name} is an internal topic. Copy your own: their recurring schedules go with them")
        if self.source.capabilities.shared and not self.topic.settings.paused and not self.live:
            raise StoreRefused(
                f"the topic {name!r} of the source is not paused, and brokers may be serving it: both sides would "
                f"deliver what is copied. Pause it first ('timeline topic pause {name}'), or give --live when no "
                "broker serves it"
            )
        # A topic of its own: payloads that lie apart, and what a store notes of a dropped topic, go by the topic's uid.
        # Under the source's, dropping it there, or its sweep, would delete the target's payloads at a common place.
        uid = 1 + secrets.randbits(62)
        self.target.capabilities.check_kind(self.topic.settings)
        await self._schedules.prepare()
        asked = dataclasses.replace(self.topic, uid=uid, revision=1, settings=_paused(self.topic.settings))
        standing = next((topic for topic in await self.target.topics() if topic.name == name), None)
        if standing is not None and not standing.settings.paused:
            self._into, self.whole = standing, await self._finished(standing, asked, said)
            return
        await self._count(said)
        if standing is None:
            self._into, self._fresh = await self.target.create_topic(asked), True
            return
        self._into = same_settings(standing, asked)

    async def _finished(self, standing: Topic, asked: Topic, said: Said) -> Compared:
        """Return the comparison with a target whose topic is live. Raise StoreRefused if it differs from the source."""
        if _paused(standing.settings) == asked.settings:
            compared = await compare(self.source, self.topic, self.target, standing, self._now_ms(), said)
            if compared.same:
                return compared
        raise StoreRefused(
            f"the topic {standing.name!r} of the target is live, and not what the source has: what was delivered there "
            "would be copied again. Drop it, or, when a copy into it is to go on, pause it first"
        )

    async def _count(self, said: Said) -> None:
        now_ms, leased, where = self._now_ms(), 0, ScanFilter(LIVING | DEAD)
        async for rows in pages(lambda cursor: self.source.scan(self.topic, now_ms, where, cursor, PAGE, False)):
            leased += int(((rows.holders.sizes > 0) & (rows.due_ms > now_ms) & (rows.died_ms == 0)).sum())
            self.total += len(rows)
            said(len(rows))
        if leased and not self.leased:
            raise StoreRefused(
                f"{leased:,} messages of {self.topic.name!r} are leased: pause the topic and wait until their "
                "consumers are done, or copy them as due at the end of their leases (--leased)"
            )

    async def run(self, said: Said = lambda _: None) -> Copied:
        """Copy what is not there yet. Store errors end it; the next call continues."""
        # Dead letters first, a page at a time: what is put there is leased, and nothing else should be.
        await self._walk(DEAD, 1, said)
        await self._walk(LIVING, PAGES_AT_ONCE, said)
        return self.done

    async def _walk(self, states: frozenset[State], at_once: int, said: Said) -> None:
        """Copy messages in `states`, with up to `at_once` pages under way."""
        under_way: set[asyncio.Task[int]] = set()
        cursor: bytes | None = b""
        try:
            while cursor is not None or under_way:
                if cursor is not None and len(under_way) < at_once:
                    where, payload = ScanFilter(states), self._fresh
                    page = await self.source.scan(self.topic, self._now_ms(), where, cursor, PAGE, payload)
                    cursor = page.cursor
                    under_way.add(asyncio.create_task(self._copy(page.rows, states is DEAD)))
                    continue
                done, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    said(task.result())
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _copy(self, rows: Rows, dead: bool) -> int:
        """Copy those of a page that are not in the target. Return how many the page has."""
        count = len(rows)
        expired = left_behind(rows, self._now_ms())
        self.done.expired += int(expired.sum())
        rows = rows.take(~expired)
        if self._fresh:
            await self._put(rows, dead)
        elif len(rows):
            await self._copy_missing(rows, dead)
        return count

    async def _copy_missing(self, rows: Rows, dead: bool) -> None:
        there = await self._standing(rows.ids)
        births = zip(rows.ids.tolist(), rows.birth.tolist(), strict=True)
        known = np.array([there.get(id) == (birth, dead) for id, birth in births], dtype=np.bool_)
        self.done.there += int(known.sum())
        self.done.dead += int(known.sum()) if dead else 0
        if known.all():
            return
        where = ScanFilter(DEAD if dead else LIVING, ids=rows.take(~known).ids)
        async for missing in pages(
            lambda cursor: self.source.scan(self.topic, self._now_ms(), where, cursor, PAGE, True)
        ):
            await self._put(missing, dead)

    async def _standing(self, ids: Ragged) -> dict[bytes, tuple[int, bool]]:
        """Return those of these ids that the target has: birth, and whether it is dead."""
        found: dict[bytes, tuple[int, bool]] = {}
        where = ScanFilter(LIVING | DEAD, ids=ids)
        async for rows in pages(
            lambda cursor: self.target.scan(self._into, self._now_ms(), where, cursor, PAGE, False)
        ):
            marks = zip(rows.birth.tolist(), (rows.died_ms > 0).tolist(), strict=True)
            found.update(zip(rows.ids.tolist(), marks, strict=True))
        return found

    async def _put(self, rows: Rows, dead: bool) -> None:
        rows = rows.take(self._sound(rows))
        if not len(rows):
            return
        assert rows.payloads is not None and rows.headers is not None
        puts = Puts.of(rows, due_ms=dues_of(rows), payload_bytes=None)
        now_ms = self._now_ms()
        if dead and (expires_ms := rows.expires_ms[rows.expires_ms > 0]).size:
            now_ms = min(now_ms, int(expires_ms.min()) - 1)  # a dead letter outlives its expiry, a put does not
        answers = await self.target.put(self._into, now_ms, puts)
        stored = np.zeros(len(rows), dtype=np.bool_)
        for at, id in enumerate(rows.ids.tolist()):
            status = Status.of(int(answers.status[at]))
            stored[at] = status is Status.OK or (bool(answers.repeat[at]) and not answers.settled[at])
            if not stored[at]:
                why = "another message has this id there" if status is Status.EXISTS else f"the target answers {status}"
                self.done.fail(id, "it was settled there before" if answers.settled[at] else why)
        kept = rows.take(stored)
        if dead and len(kept):
            kept = await self._bury(kept)
            self.done.dead += len(kept)
        self.done.copied += len(kept)

    def _sound(self, rows: Rows) -> Bools:
        """Return which rows have a payload that fits its checksum and the target."""
        assert rows.payloads is not None
        limit = self.target.capabilities.payload_limit_bytes
        right: Bools = (payload_sums(rows.payloads, rows.headers) == rows.payload_sum) & (
            rows.payloads.sizes == rows.payload_bytes
        )
        fits: Bools = rows.payload_bytes <= limit
        for at in np.flatnonzero(~(right & fits)).tolist():
            why = f"its payload has {int(rows.payload_bytes[at]):,} bytes, of which the target takes {limit:,}"
            if not right[at]:
                apart = is_pointer(rows.payloads[at])
                why = "its payload lies apart: say where in the source's URL, ?payloads=" if apart else GONE
            self.done.fail(rows.ids[at], why)
        return right & fits

    async def _bury(self, rows: Rows) -> Rows:
        """Bury what was just put, in the only way there is: leased, then buried as of its time. Return the buried rows.
        Other messages that come with a lease go back as unseen."""
        open_ended = dataclasses.replace(self._into.settings, max_deliveries=0, redelivery_backoff_ms=0)
        into = dataclasses.replace(self._into, settings=open_ended)
        wanted = {id: at for at, id in enumerate(rows.ids.tolist())}
        buckets = sorted({bucket_of(id, open_ended.buckets) for id in wanted})
        found = (await self.target.scan(self._into, self._now_ms(), ScanFilter(ids=rows.ids), b"", PAGE, False)).rows
        # A copy that broke off may have leased some already: these are ours.
        leased = found.take(np.array([holder == HOLDER for holder in found.holders.tolist()], dtype=np.bool_))
        others: list[Rows] = []
        for _ in range(MOST_LEASES):
            mine = np.array([id in wanted for id in leased.ids.tolist()], dtype=np.bool_)
            others.append(leased.take(~mine))
            leased = leased.take(mine)
            await self._bury_as(into, leased, rows, [wanted.pop(id) for id in leased.ids.tolist()])
            if not wanted:
                break
            # Ahead of its time, as of the first millisecond there is, when nothing has expired yet.
            grant = Grant(HOLDER, PAGE, 1, 1 << 40)
            leased = (await self.target.lease_due(into, buckets, 1, int(rows.scheduled_ms.max()), [grant])).rows
            if not len(leased):
                break
        for part in others:
            if len(part):
                await self._settle(into, Operation.RELEASE, part, 0, Ragged.repeat(b"", len(part)))
        for id in wanted:
            self.done.fail(id, "it could not be buried there: run the copy again")
        left = set(wanted.values())
        return rows.take(np.array([at for at in range(len(rows)) if at not in left], dtype=np.intp))

    async def _bury_as(self, into: Topic, leased: Rows, rows: Rows, places: list[int]) -> None:
        """Bury `leased` like the dead letters at `places` of `rows`, in one call per millisecond of death."""
        died = rows.take(np.array(places, dtype=np.intp))
        calls = []
        for died_ms in np.unique(died.died_ms).tolist():
            these = died.died_ms == died_ms
            calls.append(self._settle(into, Operation.BURY, leased.take(these), died_ms, died.dead.take(these)))
        await asyncio.gather(*calls)

    async def _settle(self, into: Topic, operation: Operation, rows: Rows, now_ms: int, reasons: Ragged) -> None:
        op = rows.birth | np.uint64(1)
        settles = Settles.of(rows, operation=operation, time_ms=rows.scheduled_ms, op=op, unseen=True, reasons=reasons)
        await self.target.settle(into, now_ms, settles)

    async def compare(self, said: Said = lambda _: None) -> Compared:
        """Return whether both sides are the same, and where not."""
        return await compare(self.source, self.topic, self.target, self._into, self._now_ms(), said)

    async def copy_schedules(self) -> None:
        """Copy the topic's schedules, once the target has its messages."""
        for name, why in (await self._schedules.run()).items():
            self.done.fail(f"schedule {name}".encode(), why)
        self.done.schedules = self._schedules.copied + self._schedules.there

    async def finish(self) -> None:
        """Resume the target's topic, unless the source's is paused."""
        settings = dataclasses.replace(self._into.settings, paused=self.topic.settings.paused)
        if settings != self._into.settings:
            self._into = await self.target.update_topic(dataclasses.replace(self._into, settings=settings))


async def topic_of(store: Store, name: str) -> Topic:
    """Return the topic called `name`. Raise StoreRefused when there is none, naming those that there are."""
    topics = await store.topics()
    found = next((topic for topic in topics if topic.name == name), None)
    if found is None:
        there = ", ".join(topic.name for topic in topics[:20]) or "none"
        raise StoreRefused(f"the source has no topic {name!r}; its topics: {there}")
    return found


def _paused(settings: TopicSettings) -> TopicSettings:
    return dataclasses.replace(settings, paused=True)


__all__ = ["Compared", "Copied", "TopicConflict", "TopicCopy", "topic_of"]
