"""Leases: what is due of some buckets, by (due, id) within each, dealt over the grants.

Both timelines of a bucket are known, or read from their floors: below these nothing lies, and so no trace of what was
acknowledged is read again. Each change moves the floors to where the timelines begin. A bucket of which nothing is
leased is confirmed by its head alone, all such buckets by one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, deal, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Operation, Rows, Status, Topic
from timeline.storage_plugins.cassandra.bucket import NOWHERE_MS, Bucket, Changed, Head, Place
from timeline.storage_plugins.cassandra.desk import Desk, Standing, contents_of, partly, settled_on
from timeline.storage_plugins.cassandra.partition import AT_ONCE
from timeline.storage_plugins.cassandra.rows import Stored, rows_of
from timeline.storage_plugins.cassandra.statements import FREE, HELD
from timeline.storage_plugins.contract import Grant, Leased, StoreUnavailable

ROUNDS = 50
"""Times one call looks again because there is more than it read at once."""


@dataclass(slots=True)
class Window:
    """What one look into a bucket found: what is due by (due, id), judged. `more`: whether that was not all. `leased`:
    what was chosen of it, as it stands then."""

    bucket: Bucket
    eligible: list[Stored] = field(default_factory=list)
    expired: list[Stored] = field(default_factory=list)
    spent: list[Stored] = field(default_factory=list)
    found: dict[bytes, Stored] = field(default_factory=dict)
    leased: list[Stored] = field(default_factory=list)
    more: bool = False


@dataclass(slots=True)
class Call:
    """The arguments of a `lease_due`."""

    desk: Desk
    topic: Topic
    now_ms: int
    due_before_ms: int
    overdue_ms: int

    def due_by(self, kind: int) -> int:
        """Until which due a timeline is looked at."""
        if kind == HELD:
            return self.now_ms - max(self.topic.settings.redelivery_backoff_ms, self.overdue_ms)
        return self.now_ms - self.overdue_ms if self.overdue_ms > 0 else max(self.now_ms, self.due_before_ms)

    async def look(self, bucket: Bucket, limit: int) -> Window:
        """What is due, at most `limit` of each timeline. Raises Changed."""
        partition, window = self.desk.partition, Window(bucket)
        due: list[Place] = []
        bound: Place = (NOWHERE_MS, b"")
        for kind in (FREE, HELD):
            by_ms = self.due_by(kind)
            stretch = await partition.reach(bucket, kind, limit + 1, by_ms)
            first = [place for place in stretch.entries[: limit + 1] if place[0] <= by_ms]
            if len(first) > limit:
                # Beyond the end of a timeline that was cut off, the other one must not run ahead of it.
                bound = min(bound, first.pop())
                window.more = True
            due += first
        due = sorted(place for place in due if place < bound)
        missing = [id for _, id in due if id not in bucket.messages]
        found = await partition.find(bucket, missing, whole=True) if missing else {}
        if len(found) < len(missing):
            bucket.forget()
            raise Changed
        bucket.keep(found.values())
        for _, id in due:
            window.found[id] = found[id] if id in found else bucket.messages[id]
            self._judge(window, window.found[id])
        return window

    def _judge(self, window: Window, stored: Stored) -> None:
        message = stored.message
        ask = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=0 if self.overdue_ms else self.due_before_ms)
        status = decide(message, ask, self.now_ms, self.topic.settings).status
        if status is Status.OK:
            window.eligible.append(stored)
        elif status is Status.EXPIRED:
            window.expired.append(stored)
        elif status is Status.DEAD and message.due_ms <= self.now_ms:
            window.spent.append(stored)


@dataclass(slots=True)
class Harvest:
    """What a call leased so far."""

    stored: list[tuple[int, Stored]] = field(default_factory=list)
    before: list[Stored] = field(default_factory=list)
    grant: list[int] = field(default_factory=list)
    expired: int = 0
    buried: list[Stored] = field(default_factory=list)

    def done(self) -> bool:
        """Whether anything was changed."""
        return bool(self.stored or self.expired or self.buried)

    def sort(self) -> None:
        """By what was due first, over all buckets."""
        before = self.before
        order = sorted(range(len(before)), key=lambda at: (before[at].message.due_ms, before[at].id))
        self.before = [before[at] for at in order]
        self.stored = [self.stored[at] for at in order]
        self.grant = [self.grant[at] for at in order]


async def lease_due(
    desk: Desk,
    topic: Topic,
    buckets: Sequence[int] | None,
    now_ms: int,
    due_before_ms: int,
    grants: Sequence[Grant],
    overdue_ms: int,
) -> Leased:
    """`Store.lease_due`: nothing of a topic that was dropped."""
    count = topic.settings.buckets
    numbers = sorted({at for at in (range(count) if buckets is None else buckets) if 0 <= at < count})
    call, harvest = Call(desk, topic, now_ms, due_before_ms, overdue_ms), Harvest()
    # Where nothing is due by a bucket's own word, nothing needs to be locked, and what changes it need not wait.
    heads, stands = await asyncio.gather(desk.partition.heads(topic.uid, numbers), desk.stands(topic))
    if not stands:
        return empty()
    times = [_idle_until(call, head) for head in heads.values()]
    known = desk.buckets.of(topic.uid, [at for at, time in zip(heads, times, strict=True) if time is None])
    async with contextlib.AsyncExitStack() as stack:
        for bucket in known:
            await stack.enter_async_context(bucket.lock)
        with partly(harvest.done):
            times.append(await _harvest(call, known, list(grants), harvest) if known else None)
    next_ms = min((time for time in times if time is not None and time < NOWHERE_MS), default=None)
    harvest.sort()
    with partly(harvest.done):
        contents = await desk.contents.read(topic.uid, harvest.stored)
    rows = rows_of([stored for _, stored in harvest.stored], [pair or (b"", b"") for pair in contents])
    return Leased(
        rows=rows,
        grant=np.array(harvest.grant, dtype=np.uint32),
        was_due_ms=np.array([old.message.due_ms for old in harvest.before], dtype=np.int64),
        prior_holders=Ragged.of([old.message.holder for old in harvest.before]),
        next_due_ms=None if overdue_ms > 0 else next_ms,
        expired=harvest.expired,
        buried=rows_of(harvest.buried),
        damaged=tuple(at for at, pair in enumerate(contents) if pair is None),
    )


async def _harvest(call: Call, buckets: list[Bucket], grants: list[Grant], harvest: Harvest) -> int | None:
    """Looks and leases until the grants are used up or nothing more is due; answers when to look again."""
    left, further = buckets, 1
    await call.desk.partition.confirm([bucket for bucket in left if bucket.head is None])
    for _ in range(ROUNDS):
        wanted = sum(grant.count for grant in grants)
        limit = min(wanted, AT_ONCE, max(8, 2 * wanted // max(1, len(left)))) * further if wanted else 1
        windows = await asyncio.gather(*(_seen(call, bucket, limit) for bucket in left))
        chosen = _dealt(windows, grants)
        done = await asyncio.gather(
            *(_lease(call, window, part, grants, wanted > 0) for window, part in zip(windows, chosen, strict=True)),
            return_exceptions=True,
        )
        again: list[Bucket] = []
        for window, result, part in zip(windows, done, chosen, strict=True):
            if isinstance(result, Changed):
                again.append(window.bucket)
            elif result is True:
                harvest.expired += len(window.expired)
                grants = _take(call, harvest, window, part, grants)
        failed = [result for result in done if isinstance(result, BaseException) and not isinstance(result, Changed)]
        if failed:
            raise next((error for error in failed if not isinstance(error, StoreUnavailable)), failed[0])
        idle = [window for window, result in zip(windows, done, strict=True) if result is False]
        if any(window.more for window in idle):
            further *= 2  # What is neither leased nor removed must not hide what comes after it.
        unchanged = [window.bucket for window in idle]
        again += await call.desk.partition.confirm(unchanged)
        full = sum(map(len, chosen)) < sum(len(window.eligible) for window in windows)
        again += [
            window.bucket
            for window, part in zip(windows, chosen, strict=True)
            if wanted and not full and window.more and window.bucket not in again
        ]
        if not again:
            break
        left = again
    else:
        return call.now_ms
    return min((at for bucket in buckets if (at := _next_ms(call, bucket)) is not None), default=None)


def _idle_until(call: Call, head: Head) -> int | None:
    """Until when nothing of a bucket is due, by its floors; None where something may be."""
    if any(head.floor(kind) <= call.due_by(kind) for kind in (FREE, HELD)):
        return None
    return min(head.floor(FREE), head.floor(HELD) + call.topic.settings.redelivery_backoff_ms)


def _dealt(windows: Sequence[Window], grants: Sequence[Grant]) -> list[list[tuple[Stored, int]]]:
    """For each window what of it goes to which grant: the earliest first, over all of them."""
    eligible = [(s.message.due_ms, s.id, at, s) for at, window in enumerate(windows) for s in window.eligible]
    eligible.sort(key=lambda one: one[:3])
    turns = deal(grants, np.array([one[3].size_bytes for one in eligible], dtype=np.int64)).tolist()
    chosen: list[list[tuple[Stored, int]]] = [[] for _ in windows]
    for (_, _, at, stored), turn in zip(eligible, turns, strict=False):
        chosen[at].append((stored, turn))
    return chosen


async def _seen(call: Call, bucket: Bucket, limit: int) -> Window:
    return await settled_on(bucket, lambda: call.look(bucket, limit), locked=True)


def _take(
    call: Call, harvest: Harvest, window: Window, part: list[tuple[Stored, int]], grants: list[Grant]
) -> list[Grant]:
    """Notes what was leased of a bucket, and answers what is left of the grants."""
    counts, sizes = Counter[int](), Counter[int]()
    for (stored, turn), leased in zip(part, window.leased, strict=True):
        harvest.before.append(stored)
        harvest.stored.append((window.bucket.number, leased))
        harvest.grant.append(turn)
        counts[turn] += 1
        sizes[turn] += stored.size_bytes
    harvest.buried += [_buried(call, stored) for stored in window.spent]
    return [
        dataclasses.replace(
            grant,
            count=grant.count - counts[turn],
            max_bytes=grant.max_bytes - sizes[turn],
            alone=grant.alone and not counts[turn],
        )
        for turn, grant in enumerate(grants)
    ]


def _leased(call: Call, stored: Stored, grant: Grant) -> Stored:
    ask = Ask(
        Operation.LEASE,
        time_ms=grant.lease_ms,
        holder=grant.holder,
        due_before_ms=0 if call.overdue_ms else call.due_before_ms,
    )
    message = decide(stored.message, ask, call.now_ms, call.topic.settings).message
    assert message is not None
    return dataclasses.replace(stored, message=message)


def _buried(call: Call, stored: Stored) -> Stored:
    return dataclasses.replace(
        stored, message=dataclasses.replace(stored.message, dead=DELIVERED_OUT, died_ms=max(1, call.now_ms))
    )


async def _lease(
    call: Call, window: Window, part: list[tuple[Stored, int]], grants: Sequence[Grant], removes: bool
) -> bool:
    """Writes the leases of a bucket, and, where it `removes`, what of it expired or was delivered out. False: there was
    nothing to write. Raises Changed."""
    standing, bucket = Standing(call.topic, call.now_ms, window.found), window.bucket
    window.leased = [_leased(call, stored, grants[turn]) for stored, turn in part]
    for stored in window.leased:
        standing.set(stored)
    for stored in window.expired if removes else ():
        standing.remove(stored)
    for stored in window.spent if removes else ():
        standing.set(_buried(call, stored))
    pairs = standing.pairs()
    if not pairs:
        return False
    await call.desk.partition.change(bucket, pairs)
    call.desk.contents.delete(call.topic.uid, contents_of(bucket, standing.gone))
    return True


def _next_ms(call: Call, bucket: Bucket) -> int | None:
    """When something of the bucket may be leasable next, by what is known of its timelines."""
    times: list[int] = []
    for kind, stretch in bucket.stretches.items():
        if stretch.floor < NOWHERE_MS:
            times.append(stretch.floor + (call.topic.settings.redelivery_backoff_ms if kind == HELD else 0))
    return min(times, default=None)


def empty() -> Leased:
    """What a topic that is gone answers."""
    none = np.zeros(0, dtype=np.int64)
    return Leased(Rows.empty(payload=True), none.astype(np.uint32), none, Ragged.of([]), None)
