"""Leases: one script finds, deals and writes. On a cluster they are dealt here, and written by compare-and-set.

A lease does not wait for replicas, whatever `wait_replicas` says. Its rows would have to be thrown away when a replica
is slow. The message would then count one more delivery that nobody received, and be buried after some of them.

A failover may therefore lose leases. The message then stands as before its lease and is delivered once more. The settle
of the lost lease answers FENCED: another version or another holder stands. The same consumer may lease the message
again. Then both of its deliveries carry the same token, and the settle of either counts. That consumer has received the
message. Removals and burials on the way do not wait either. If they are lost, the next lease meets the same message and
repeats them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from timeline.columns import Int64, Ragged, UInt32
from timeline.leases import Ask, deal, decide
from timeline.model import DELIVERED_OUT, Operation, Rows, Status
from timeline.storage_plugins.contract import Grant, LeasedRows, StoreError, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.errors import gravest
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.changes import BucketKeys, Items, left_of
from timeline.storage_plugins.redis.records import HEAD_BYTES, HELD, bytes_of, heads_of, rows_of, unpack

MOST_REMOVED = 10_000
"""Expired and delivered-out messages that one call removes before it stops looking further."""
SPARE = 8
"""Messages read of each bucket beyond its even share."""
MOST_PER_BUCKET = 3_000


@dataclass(slots=True)
class Candidates:
    """Messages that may be leased, by (due, id), and their values."""

    ids: list[bytes]
    values: list[bytes]
    more: bool


@dataclass(slots=True)
class _Taken:
    """The messages that a call leased so far (rows as they were, contents, turns), removed and buried."""

    rows: list[Rows] = field(default_factory=list)
    turns: list[UInt32] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    count: int = 0
    expired: int = 0
    buried: list[Rows] = field(default_factory=list)

    def add(self, ids: list[bytes], values: list[bytes], contents: list[bytes | None], turns: UInt32) -> Rows:
        """Add messages that were leased. Return their rows as they were."""
        self.missing += [self.count + at for at, content in enumerate(contents) if content is None]
        whole = [content or b"" for content in contents] if None in contents else cast(list[bytes], contents)
        rows = rows_of(ids, values, whole)
        self.rows.append(rows)
        self.turns.append(turns)
        self.count += len(ids)
        return rows

    def leased(self, grants: Sequence[Grant], now_ms: int) -> LeasedRows:
        """Return the answer, with rows as they are now."""
        if not self.count:
            leased = LeasedRows.empty()
        else:
            rows, turns = Rows.concat(self.rows), np.concatenate(self.turns)
            was_due_ms, prior = rows.due_ms, rows.holders
            lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
            rows.due_ms = np.maximum(was_due_ms, now_ms) + lease_ms[turns]
            rows.version = rows.version + 1
            rows.deliveries = rows.deliveries + np.uint32(1)
            if len(grants) == 1:
                rows.holders = Ragged.repeat(grants[0].holder, self.count)
            else:
                rows.holders = Ragged.of([grants[turn].holder for turn in turns.tolist()])
            leased = LeasedRows(rows, turns, was_due_ms, prior, None, damaged=tuple(self.missing))
        leased.expired, leased.buried = self.expired, Rows.concat(self.buried)
        return leased


async def lease_due(
    keys: BucketKeys,
    buckets: Sequence[int] | None,
    now_ms: int,
    due_before_ms: int,
    grants: Sequence[Grant],
    overdue_ms: int,
) -> LeasedRows:
    """`Store.lease_due`: by one script if all buckets are on one server, else dealt here."""
    search = _Search(keys, buckets, now_ms, due_before_ms, overdue_ms)
    taken = _Taken()
    left = [dataclasses.replace(grant, count=max(0, grant.count)) for grant in grants]
    next_due_ms: int | None = None
    try:
        if keys.server.cluster:
            await _lease_apart(search, left, taken)
            next_due_ms = None if overdue_ms else await search.next_lease_ms()
        else:
            next_due_ms = await _lease_at_once(search, left, taken, tell_next=not overdue_ms)
    except StoreError:
        if not (taken.count or taken.expired or taken.buried):
            raise
        next_due_ms = now_ms  # what was done is answered; the caller looks again, and meets the failure
    leased = taken.leased(grants, now_ms)
    leased.next_due_ms = next_due_ms
    return leased


async def _lease_at_once(search: _Search, left: list[Grant], taken: _Taken, tell_next: bool) -> int | None:
    """Run the script that finds, deals and writes, again while it meets what must be removed first or had its fill.
    Return when to look again."""
    turn, removed = 1, 0
    while True:
        answer, odd, odds, more, turn, free, held = await search.lease(left, turn, tell_next)
        if answer:
            ids, values, turns = ([item for part in answer for item in part[at]] for at in range(3))
            contents = await search.contents(answer)
            dealt = np.array(turns, dtype=np.uint32) if len(left) > 1 else np.zeros(len(ids), dtype=np.uint32)
            rows = taken.add(ids, values, contents, dealt)
            assert rows.headers is not None
            left = _left(left, dealt, rows.payload_bytes.astype(np.int64) + rows.headers.sizes)
        if odd:
            removed += len(odd)
            await search.sort_out(Candidates(odd, odds, False), taken)
        if not (odd or (more and answer)) or removed >= MOST_REMOVED or not any(grant.count for grant in left):
            break
    if odd and tell_next:
        return await search.next_lease_ms()
    return min(search.times(free, held), default=None)


async def _lease_apart(search: _Search, left: list[Grant], taken: _Taken) -> None:
    """Read what is due of all buckets, deal it, and write it by compare-and-set."""
    removed = 0
    while any(grant.count for grant in left) and removed < MOST_REMOVED:
        found = await search.first(sum(grant.count for grant in left))
        if not found.ids:
            break
        plain = await search.sort_out(found, taken)
        removed += len(found.ids) - len(plain)
        if not plain:
            if not found.more and removed == 0:
                break
            continue
        values = [found.values[at] for at in plain]
        heads = heads_of(values)
        sizes = heads["payload_bytes"].astype(np.int64) + heads["headers_bytes"]
        turns = deal(left, sizes)
        if not len(turns):
            break
        ids = [found.ids[at] for at in plain[: len(turns)]]
        won = await search.take(ids, values[: len(turns)], turns, left, sizes, taken)
        left = _left(left, turns[won], sizes[won])
        if len(turns) < len(plain) or (not found.more and len(won) == len(turns)):
            break


def _left(grants: list[Grant], turns: UInt32, sizes: Int64) -> list[Grant]:
    """Return what the grants still allow."""
    counts = np.bincount(turns, minlength=len(grants)).tolist()
    spent = np.bincount(turns, weights=sizes, minlength=len(grants)).astype(np.int64).tolist()
    return [grant.less(count, used) for grant, count, used in zip(grants, counts, spent, strict=True)]


class _Search:
    """Reads what is due, leases what may be leased, and removes or buries the rest."""

    def __init__(
        self, keys: BucketKeys, buckets: Sequence[int] | None, now_ms: int, due_before_ms: int, overdue_ms: int
    ) -> None:
        self._keys, self._buckets, self._now_ms = keys, buckets, now_ms
        self._due_before_ms = due_before_ms
        settings = keys.topic.settings
        self._count = len(set(buckets)) if buckets is not None else settings.buckets
        self._free_until_ms = now_ms - overdue_ms if overdue_ms else max(now_ms, due_before_ms)
        self._held_until_ms = now_ms - max(settings.redelivery_backoff_ms, overdue_ms)
        self._per_bucket = 0
        self._passed: set[bytes] = set()

    async def lease(self, grants: Sequence[Grant], turn: int, tell_next: bool) -> list[Any]:
        """Return the answer of `scripts.LEASE`."""
        groups = self._keys.groups(self._buckets)
        if not groups:
            return [[], [], [], 0, turn, b"", b""]
        args: list[Any] = [self._now_ms, self._free_until_ms, self._held_until_ms]
        args += [self._keys.topic.settings.max_deliveries, int(tell_next), turn]
        for grant in grants:
            args += [grant.holder, grant.count, grant.lease_ms, grant.max_bytes, int(grant.alone)]
        keys = [self._keys.base(bucket) for bucket in groups[0]]
        answer: list[Any] = await self._keys.server.run(scripts.LEASE, keys, args, waits=False)
        return answer

    async def contents(self, answer: list[Any]) -> list[bytes | None]:
        """Return payloads and headers of leased messages; large ones are read here."""
        keys = [self._keys.base(bucket) for bucket in self._keys.groups(self._buckets)[0]]
        asked = [(keys[part[4]], (b"HMGET", keys[part[4]] + b":p", *part[0])) for part in answer if not part[3]]
        if not asked:
            return [content for part in answer for content in part[3]]
        try:
            told = iter(await self._keys.server.at_each(asked))
        except StoreUnavailable as error:
            raise StoreUnknown(f"leased, but the payloads did not come: {error.reason}") from error
        return [content for part in answer for content in (part[3] or next(told))]

    async def first(self, wanted: int) -> Candidates:
        """Return the first of what is due, up to `wanted`, as far as the reads of each bucket reach."""
        wanted += len(self._passed)
        even = -(-wanted // max(1, self._count)) + SPARE
        while True:
            per = self._per_bucket = min(max(even, 2 * self._per_bucket), min(wanted, MOST_PER_BUCKET))
            found = await self._read(wanted, per)
            if found.ids or not found.more or per == MOST_PER_BUCKET:
                return found
            wanted *= 2

    async def _read(self, wanted: int, per: int) -> Candidates:
        """Return the first `per` of each bucket, merged, without those passed over before."""
        bounds = (b":f", self._free_until_ms, b":h", self._held_until_ms)
        ids: list[bytes] = []
        values: list[bytes] = []
        edges: list[int] = []
        for _, answer in await self._keys.each(scripts.RANGE, self._buckets, per, *bounds):
            for listed, packed in answer:
                ids += listed
                values += packed
                if len(listed) == per:
                    edges.append(_due_of(packed[-1]))
        if self._passed:
            kept = [at for at, id in enumerate(ids) if id not in self._passed]
            ids, values = [ids[at] for at in kept], [values[at] for at in kept]
        if not ids:
            return Candidates([], [], bool(edges))
        due_ms = heads_of(values)["due_ms"]
        order = self._order(ids, due_ms)
        if edges:
            # Beyond the last one read of a bucket there may be earlier ones of that bucket: they are not passed over.
            order = order[: int(np.searchsorted(due_ms[order], min(edges), "right"))]
        more = bool(edges) or len(order) > wanted
        order = order[:wanted]
        return Candidates([ids[at] for at in order], [values[at] for at in order], more)

    @staticmethod
    def _order(ids: list[bytes], due_ms: Int64) -> Any:
        """Return their order by (due, id)."""
        rank = np.zeros(len(ids), dtype=np.int64)
        rank[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
        return np.lexsort((rank, due_ms))

    async def sort_out(self, found: Candidates, taken: _Taken) -> list[int]:
        """Return which may be leased. Remove the expired, and bury those delivered too often."""
        heads, now_ms, settings = heads_of(found.values), self._now_ms, self._keys.topic.settings
        plain = (heads["expires_ms"] == 0) | (heads["expires_ms"] > now_ms)
        if settings.max_deliveries:
            plain &= heads["deliveries"] < settings.max_deliveries
        if plain.all():
            return list(range(len(found.ids)))
        items = Items()
        buries: list[bool] = []
        allowed = np.flatnonzero(plain).tolist()
        for at in np.flatnonzero(~plain).tolist():
            stored = unpack(found.values[at])
            lease = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=self._due_before_ms)
            decision = decide(stored.message, lease, now_ms, settings)
            ask = lease
            if decision.status is Status.DEAD:
                message = stored.message
                ask = Ask(
                    Operation.BURY, birth=message.birth, version=message.version, holder=message.holder,
                    reason=DELIVERED_OUT,
                )  # fmt: skip
                decision = decide(message, ask, now_ms, settings)
            elif decision.status is Status.OK:
                allowed.append(at)
                continue
            new = left_of(stored, ask, decision, now_ms, settings)
            if new is None:
                # Neither to lease nor to bury: delivered too often, and ahead of its time. It stays in the way.
                self._passed.add(found.ids[at])
            else:
                items.add(found.ids[at], found.values[at], new)
                buries.append(ask is not lease)
        outcome = await self._keys.change(items, waits=False)
        done = [at for at in range(len(items)) if at not in outcome.stands and at not in outcome.failed]
        buried = [at for at in done if buries[at]]
        taken.expired += len(done) - len(buried)
        if buried:
            taken.buried.append(rows_of([items.ids[at] for at in buried], [items.new[at] for at in buried]))
        if outcome.failed:
            raise gravest(outcome.failed.values())
        return sorted(allowed)

    async def take(
        self,
        ids: list[bytes],
        values: list[bytes],
        turns: UInt32,
        grants: Sequence[Grant],
        sizes: Int64,
        taken: _Taken,
    ) -> Any:
        """Lease those that still stand as they were read. Return which were leased."""
        old = heads_of(values)
        heads = old.copy()
        lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
        heads["due_ms"] = np.maximum(old["due_ms"], self._now_ms) + lease_ms[turns]
        heads["version"] += 1
        heads["deliveries"] += 1
        heads["kind"] = HELD
        heads["holder_size"] = np.array([len(grant.holder) for grant in grants], dtype=np.uint8)[turns]
        marks = zip(values, turns.tolist(), bytes_of(heads), old["holder_size"].tolist(), strict=True)
        new = [head + value[HEAD_BYTES : len(value) - size] + grants[turn].holder for value, turn, head, size in marks]
        items = Items(ids, values, new, [b""] * len(ids), sizes.tolist())
        outcome = await self._keys.change(items, want=True, waits=False)
        won = [at for at in range(len(ids)) if at not in outcome.stands and at in outcome.contents]
        if outcome.gone:
            won = []
        if not won:
            if outcome.failed:
                raise gravest(outcome.failed.values())
            return np.zeros(0, dtype=np.intp)
        taken.add(
            [ids[at] for at in won],
            [values[at] for at in won],
            [outcome.contents[at] for at in won],
            turns[won],
        )
        return np.array(won, dtype=np.intp)

    async def next_lease_ms(self) -> int | None:
        """Return the earliest time at which more may become leasable."""
        answers = await self._keys.each(scripts.SOONEST, self._buckets, b"-inf")
        return min((time for _, (free, held) in answers for time in self.times(free, held)), default=None)

    def times(self, free: bytes, held: bytes) -> list[int]:
        """Return when the first of the free and of the held may be leased; b"" is none."""
        times = [int(float(free))] if free else []
        return times + ([int(float(held)) + self._keys.topic.settings.redelivery_backoff_ms] if held else [])


def _due_of(value: bytes) -> int:
    return int.from_bytes(value[8:16], "little", signed=True)
