"""Leases: what is due of some buckets, by (due, id) within each, dealt over the grants.

Both timelines of a bucket are known, or read from their floors. Below a floor a timeline is empty, so that no tombstone
of an acknowledged message is read again. Each change moves the floors to where the timelines begin. A lease chooses
from what is known, without waiting for a change of the bucket under way. It then asks the bucket as every call does,
and is judged again on the state that the batch changes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, deal, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins.asks import give_back
from timeline.storage_plugins.cassandra.bucket import AT_ONCE, NOWHERE_MS, Bucket, Changed, Head, Place, TimelinePrefix
from timeline.storage_plugins.cassandra.changes import (
    FEW,
    BatchPart,
    DecidedMessages,
    Dropped,
    StoreContext,
    partly,
    settle,
    settled_on,
)
from timeline.storage_plugins.cassandra.rows import CassandraRow, rows_of
from timeline.storage_plugins.cassandra.statements import FREE, HELD
from timeline.storage_plugins.contract import Grant, LeasedRows, StoreUnavailable

KINDS = (FREE, HELD)
ROUNDS = 50
"""How often a call looks again because there is more than it read at once, or its choice was gone."""


@dataclass(slots=True)
class BucketWindow:
    """The due messages of a bucket by (due, id), judged. `more`: there may be others."""

    bucket: Bucket
    more: bool = False
    eligible: list[CassandraRow] = field(default_factory=list)
    expired: list[CassandraRow] = field(default_factory=list)
    spent: list[CassandraRow] = field(default_factory=list)


@dataclass(slots=True)
class LeaseCall:
    """The arguments of a `lease_due`."""

    context: StoreContext
    topic: Topic
    now_ms: int
    due_before_ms: int
    overdue_ms: int

    def due_by(self, kind: int) -> int:
        """Return until which due a timeline is read."""
        if kind == HELD:
            return self.now_ms - max(self.topic.settings.redelivery_backoff_ms, self.overdue_ms)
        return self.now_ms - self.overdue_ms if self.overdue_ms > 0 else max(self.now_ms, self.due_before_ms)

    def glance(self, bucket: Bucket, limit: int) -> BucketWindow | None:
        """Return what is due, at most `limit` of each timeline, by what is known; None if that does not suffice."""
        prefixes = [bucket.reached(kind, limit + 1, self.due_by(kind)) for kind in KINDS]
        known = [prefix for prefix in prefixes if prefix is not None]
        if len(known) < len(KINDS):
            return None
        ids, more = self._first(known, limit)
        if not all(id in bucket.messages for id in ids):
            return None
        return self._judged(BucketWindow(bucket, more), [bucket.messages[id] for id in ids])

    async def look(self, bucket: Bucket, limit: int) -> BucketWindow:
        """Return the same, and read what is not known. The caller holds the bucket's lock. Raise Changed."""
        partition = self.context.partition
        prefixes = [await partition.reach(bucket, kind, limit + 1, self.due_by(kind)) for kind in KINDS]
        ids, more = self._first(prefixes, limit)
        missing = [id for id in ids if id not in bucket.messages]
        found = await partition.find(bucket, missing, whole=True) if missing else {}
        if len(found) < len(missing):
            bucket.forget()
            raise Changed
        stored = [found[id] if id in found else bucket.messages[id] for id in ids]
        bucket.keep(found.values())
        return self._judged(BucketWindow(bucket, more), stored)

    def _first(self, prefixes: Sequence[TimelinePrefix], limit: int) -> tuple[list[bytes], bool]:
        """Return the ids of what is due on both timelines, in order, and whether there is more."""
        due: list[Place] = []
        bound: Place = (NOWHERE_MS, b"")
        for kind, prefix in zip(KINDS, prefixes, strict=True):
            by_ms = self.due_by(kind)
            first = [place for place in prefix.entries[: limit + 1] if place[0] <= by_ms]
            if len(first) > limit:
                # Of a timeline that was cut off, the other one must not run ahead.
                bound = min(bound, first.pop())
            due += first
        return [id for at, id in sorted(due) if (at, id) < bound], bound[0] < NOWHERE_MS

    def _judged(self, window: BucketWindow, found: Sequence[CassandraRow]) -> BucketWindow:
        lists = {Status.OK: window.eligible, Status.EXPIRED: window.expired, Status.DEAD: window.spent}
        for stored in found:
            if (verdict := self.verdict(stored)) is not None:
                lists[verdict].append(stored)
        return window

    def verdict(self, stored: CassandraRow) -> Status | None:
        """Return what to do with a message: lease (OK), remove (EXPIRED), bury (DEAD), or nothing."""
        message = stored.message
        if message.due_ms > self.due_by(HELD if message.holder else FREE):
            return None
        ask = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=0 if self.overdue_ms else self.due_before_ms)
        status = decide(message, ask, self.now_ms, self.topic.settings).status
        if status is Status.DEAD and (message.died_ms or message.due_ms > self.now_ms):
            return None
        return status if status in (Status.OK, Status.EXPIRED, Status.DEAD) else None


@dataclass(slots=True)
class LeasePlan:
    """The choice of a bucket, and what became of it.

    `chosen`: by id the grant, and the birth, as another life may be larger than the grant has bytes. `removes`: remove
    expired messages, and bury those delivered too often. `leased`: (before, after, grant) each. Messages that others
    took since the choice are dealt again in the next round."""

    call: LeaseCall
    grants: Sequence[Grant]
    chosen: dict[bytes, tuple[int, int]]
    removes: bool
    leased: list[tuple[CassandraRow, CassandraRow, int]] = field(default_factory=list)
    expired: int = 0
    buried: list[CassandraRow] = field(default_factory=list)

    def done(self) -> bool:
        """Return whether anything was changed."""
        return bool(self.leased or self.expired or self.buried)

    def lost(self) -> bool:
        """Return whether something that was chosen was not leased."""
        return len(self.leased) < len(self.chosen)

    def decided(self, found: dict[bytes, CassandraRow]) -> DecidedMessages:
        """Judge again what was found, as it stands now, and note what becomes of it."""
        call = self.call
        standing = DecidedMessages(call.topic, call.now_ms, found)
        self.leased, self.expired, self.buried = [], 0, []
        for id, stored in found.items():
            verdict = call.verdict(stored)
            if verdict is Status.OK:
                grant, birth = self.chosen.get(id, (-1, 0))
                if grant >= 0 and birth == stored.message.birth:
                    after = _leased(call, stored, self.grants[grant])
                    standing.set(after)
                    self.leased.append((stored, after, grant))
            elif verdict is Status.EXPIRED and self.removes:
                standing.remove(stored)
                self.expired += 1
            elif verdict is Status.DEAD and self.removes:
                self.buried.append(_buried(call, stored))
                standing.set(self.buried[-1])
        return standing


@dataclass(slots=True)
class LeaseProgress:
    """The messages that a call leased so far."""

    stored: list[tuple[int, CassandraRow]] = field(default_factory=list)
    before: list[CassandraRow] = field(default_factory=list)
    grant: list[int] = field(default_factory=list)
    expired: int = 0
    buried: list[CassandraRow] = field(default_factory=list)

    def done(self) -> bool:
        """Return whether anything was changed."""
        return bool(self.stored or self.expired or self.buried)

    def add(self, number: int, plan: LeasePlan) -> None:
        """Add what was leased of bucket `number`."""
        for before, after, grant in plan.leased:
            self.before.append(before)
            self.stored.append((number, after))
            self.grant.append(grant)
        self.expired += plan.expired
        self.buried += plan.buried

    def sort(self) -> None:
        """Sort by due over all buckets."""
        before = self.before
        order = sorted(range(len(before)), key=lambda at: (before[at].message.due_ms, before[at].id))
        self.before = [before[at] for at in order]
        self.stored = [self.stored[at] for at in order]
        self.grant = [self.grant[at] for at in order]


async def lease_due(call: LeaseCall, buckets: Sequence[int] | None, grants: Sequence[Grant]) -> LeasedRows:
    """`Store.lease_due`."""
    context, topic, result = call.context, call.topic, LeaseProgress()
    count = topic.settings.buckets
    numbers = sorted({at for at in (range(count) if buckets is None else buckets) if 0 <= at < count})
    # If nothing is due by a bucket's head, nothing else of it needs to be known.
    heads, stands = await asyncio.gather(context.partition.heads(topic.uid, numbers), context.stands(topic))
    if not stands:
        return LeasedRows.empty()
    times = {at: _idle_until(call, head) for at, head in heads.items()}
    known = context.buckets.of(topic.uid, [at for at, time in times.items() if time is None])
    with partly(result.done):
        times |= await _lease_rounds(call, known, heads, list(grants), result)
    next_ms = min((time for time in times.values() if time is not None and time < NOWHERE_MS), default=None)
    result.sort()
    contents, unread = await context.contents.readable(topic.uid, result.stored)
    if unread:
        trouble = next(iter(unread.values()))
        given_back = rows_of([result.stored[at][1] for at in unread])
        rested_ms = await give_back(partial(settle, context), topic, call.now_ms, given_back, trouble.detail)
        next_ms = rested_ms if next_ms is None else min(next_ms, rested_ms)
        with partly(result.done):
            if len(unread) == len(result.stored):
                raise trouble
    leased = LeasedRows(
        rows=rows_of([stored for _, stored in result.stored], [pair or (b"", b"") for pair in contents]),
        grant=np.array(result.grant, dtype=np.uint32),
        was_due_ms=np.array([old.message.due_ms for old in result.before], dtype=np.int64),
        prior_holders=Ragged.of([old.message.holder for old in result.before]),
        next_due_ms=None if call.overdue_ms > 0 else next_ms,
        expired=result.expired,
        buried=rows_of(result.buried),
        damaged=tuple(at for at, pair in enumerate(contents) if pair is None),
    )
    if not unread:
        return leased
    return leased.take(np.array([at for at in range(len(contents)) if at not in unread], dtype=np.intp))


async def _lease_rounds(
    call: LeaseCall, buckets: list[Bucket], heads: dict[int, Head], grants: list[Grant], result: LeaseProgress
) -> dict[int, int | None]:
    """Look and lease until the grants are used up or nothing more is due. Return when to look again, by bucket.
    `heads`: as they were read since the call began."""
    left, further = buckets, 1
    times: dict[int, int | None] = {}
    for _ in range(ROUNDS):
        if not left:
            return times
        wanted = sum(grant.count for grant in grants)
        limit = min(wanted, AT_ONCE, max(8, 2 * wanted // max(1, len(left)))) * further if wanted else 1
        windows = await _seen(call, left, heads, limit)
        chosen = _dealt(windows, grants)
        plans = [LeasePlan(call, grants, part, removes=wanted > 0) for part in chosen]
        ends = await asyncio.gather(*map(_drawn, windows, plans), return_exceptions=True)
        for window, plan in zip(windows, plans, strict=True):
            result.add(window.bucket.number, plan)
        if failed := [end for end in ends if end is not None]:
            worst = next((error for error in failed if not isinstance(error, StoreUnavailable)), None)
            if worst is not None or not result.done():
                raise worst or failed[0]
            break  # nothing happened in those; what was leased of others is answered
        grants = _left(grants, plans)
        if any(window.more and not plan.done() for window, plan in zip(windows, plans, strict=True)):
            further *= 2  # what is neither leased nor removed must not hide what comes after it
        lost = any(plan.lost() for plan in plans)
        full = not lost and sum(map(len, chosen)) < sum(len(window.eligible) for window in windows)
        for bucket in left:
            times[bucket.number] = _next_ms(call, bucket)
            if bucket.head is not None and bucket.current(heads[bucket.number]):
                heads[bucket.number] = bucket.head
        goes_on = not full and any(grant.count > 0 for grant in grants)
        left = [
            window.bucket
            for window in windows
            if (next_ms := times[window.bucket.number]) is None
            or (goes_on and (lost or window.more or _came_since(call, result, next_ms)))
        ]
    return times | {bucket.number: call.now_ms for bucket in left}


def _came_since(call: LeaseCall, result: LeaseProgress, next_ms: int) -> bool:
    """Return whether something is due by now though nothing was found. An answer of nothing would mean that no grant
    has room for it."""
    return not result.done() and not call.overdue_ms and next_ms <= call.now_ms


def _idle_until(call: LeaseCall, head: Head) -> int | None:
    """Return until when nothing of a bucket is due, by its floors; None if something may be."""
    if any(head.floor(kind) <= call.due_by(kind) for kind in KINDS):
        return None
    return min(head.floor(FREE), head.floor(HELD) + call.topic.settings.redelivery_backoff_ms)


def _dealt(windows: Sequence[BucketWindow], grants: Sequence[Grant]) -> list[dict[bytes, tuple[int, int]]]:
    """Return for each window which ids go to which grant, and their births: the earliest first, over all windows."""
    eligible = [(s.message.due_ms, s.id, at, s) for at, window in enumerate(windows) for s in window.eligible]
    eligible.sort(key=lambda one: one[:3])
    turns = deal(grants, np.array([one[3].size_bytes for one in eligible], dtype=np.int64)).tolist()
    chosen: list[dict[bytes, tuple[int, int]]] = [{} for _ in windows]
    for (_, id, at, stored), grant in zip(eligible, turns, strict=False):
        chosen[at][id] = grant, stored.message.birth
    return chosen


async def _seen(
    call: LeaseCall, buckets: Sequence[Bucket], heads: Mapping[int, Head], limit: int
) -> list[BucketWindow]:
    """Return what is due of each bucket, as of the read of its head or later."""
    windows: list[BucketWindow | None] = []
    since_yield = 0
    for bucket in buckets:
        if since_yield >= FEW:
            await call.context.cooperative.take()
            since_yield = 0
        window = call.glance(bucket, limit) if bucket.current(heads[bucket.number]) else None
        since_yield += len(window.eligible) if window is not None else 0
        windows.append(window)

    async def read(bucket: Bucket) -> BucketWindow:
        async with call.context.slots.lease_of(bucket), bucket.lock:
            if not bucket.current(heads[bucket.number]):
                # What was read before this waited would undo what others have learnt meanwhile.
                await call.context.partition.confirm([bucket])
            return await settled_on(bucket, lambda: call.look(bucket, limit), locked=True)

    unknown = [bucket for bucket, window in zip(buckets, windows, strict=True) if window is None]
    found = iter(await asyncio.gather(*map(read, unknown)))
    return [next(found) if window is None else window for window in windows]


async def _drawn(window: BucketWindow, plan: LeasePlan) -> None:
    """Ask the bucket for what was chosen of it and what is to go, and add to `plan` what became of it."""
    call = plan.call
    gone = window.expired + window.spent if plan.removes else []
    ids = [*plan.chosen, *(stored.id for stored in gone)]
    for start in range(0, len(ids), AT_ONCE):
        some = LeasePlan(call, plan.grants, plan.chosen, plan.removes)
        part = BatchPart(call.context, call.topic, ids[start : start + AT_ONCE], some.decided, whole=True, leases=True)
        try:
            await part.done(window.bucket)
        except Dropped:
            return
        plan.leased += some.leased
        plan.expired += some.expired
        plan.buried += some.buried


def _left(grants: Sequence[Grant], plans: Sequence[LeasePlan]) -> list[Grant]:
    """Return what is left of the grants."""
    counts, sizes = Counter[int](), Counter[int]()
    for plan in plans:
        for before, _, at in plan.leased:
            counts[at] += 1
            sizes[at] += before.size_bytes
    return [grant.less(counts[at], sizes[at]) for at, grant in enumerate(grants)]


def _leased(call: LeaseCall, stored: CassandraRow, grant: Grant) -> CassandraRow:
    ask = Ask(
        Operation.LEASE,
        time_ms=grant.lease_ms,
        holder=grant.holder,
        due_before_ms=0 if call.overdue_ms else call.due_before_ms,
    )
    message = decide(stored.message, ask, call.now_ms, call.topic.settings).message
    assert message is not None
    return dataclasses.replace(stored, message=message)


def _buried(call: LeaseCall, stored: CassandraRow) -> CassandraRow:
    return dataclasses.replace(
        stored, message=dataclasses.replace(stored.message, dead=DELIVERED_OUT, died_ms=max(1, call.now_ms))
    )


def _next_ms(call: LeaseCall, bucket: Bucket) -> int | None:
    """Return when something of a bucket may be leasable next, by what is known of its timelines; None if unknown."""
    if not all(kind in bucket.prefixes for kind in KINDS):
        return None
    backoff_ms = call.topic.settings.redelivery_backoff_ms
    free, held = (bucket.prefixes[kind].floor for kind in KINDS)
    return min(free, held + backoff_ms if held < NOWHERE_MS else held)
