"""Random operations, seeded, on a store and on the reference store: every answer and every row is compared.

A lease may choose among buckets, and a store may remove expired messages when it meets them. There the reference store
says what is allowed, and then follows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from timeline.leases import Ask, Decision, decide
from timeline.leases.table import DELIVERED_OUT, is_expired
from timeline.model import Answers, Operation, Rows, Status, Topic, bucket_of, decode_headers
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import (
    PLENTY,
    T0,
    Call,
    StoreViolation,
    Trial,
    batch_of,
    by_id,
    expect,
    expect_equal,
    named_call,
    sent,
    tag_counts,
)
from timeline.storage_plugins.contract import Grant, LeasedRows, Settles, TagMutation
from timeline.storage_plugins.reference import ReferenceRow, ReferenceStore

HOLDERS = (b"worker-1", b"worker-2", b"Worker-2")
GROUPS = (b"default", b"default", b"ops")
TAGS = (b"", b"spring", b"Spring")
IDS = [f"{prefix}{number}".encode() for number in range(9) for prefix in ("a", "A", "á", "a ")]


class _Walk:
    """One random walk: a topic in a store and in the reference store, side by side."""

    def __init__(self, trial: Trial, topic: Topic, reference: ReferenceStore, seed: int) -> None:
        self.trial, self.topic, self.reference = trial, topic, reference
        self.rng = random.Random(seed)
        self.now_ms = T0
        self.tokens: list[tuple[bytes, int, int, bytes]] = []
        self.repeatable: list[Call] = []

    async def run(self, steps: int) -> None:
        moves = (
            *((self.put, 5), (self.lease, 6), (self.settle, 6), (self.mutate, 6)),
            *((self.mutate_tag, 2), (self.again, 3), (self.sweep, 1), (self.compare, 1)),
        )
        weights = [weight for _, weight in moves]
        for _ in range(steps):
            self.now_ms += self.rng.choice((0, 0, 10, 50, 200, 1000))
            await self.rng.choices([move for move, _ in moves], weights)[0]()
        await self.compare()

    def some(self, most: int = 12) -> list[bytes]:
        return self.rng.choices(IDS, k=self.rng.randint(0, most))

    def times(self, count: int) -> Any:
        """Return due times around now, on a grid so that they tie."""
        return np.array([self.now_ms + 10 * self.rng.randint(-20, 60) for _ in range(count)], dtype=np.int64)

    def bools(self, count: int, share: float) -> Any:
        return np.array([self.rng.random() < share for _ in range(count)], dtype=np.bool_)

    async def put(self) -> None:
        ids = self.some()
        count = len(ids)
        due_ms = self.times(count)
        ahead = np.array([10 * self.rng.randint(0, 80) for _ in ids], dtype=np.int64)
        if_exists = [self.rng.choice(("", "", "", "", "move", "move", "replace", "replace")) for _ in ids]
        puts = self.trial.puts(
            ids,
            due_ms,
            expires_ms=np.where(self.bools(count, 0.3), due_ms + ahead, 0),
            group=[self.rng.choice(GROUPS) for _ in ids],
            tag=[self.rng.choice(TAGS) for _ in ids],
            payload=[bytes([self.rng.randint(0, 3)]) * self.rng.randint(0, 40) for _ in ids],
            headers=[self.rng.choice((b"", b"\x01\x00k\x01\x00v")) for _ in ids],
            move=[one == "move" for one in if_exists],
            replace=[one == "replace" for one in if_exists],
        )
        await self.send(puts, new=True)

    async def lease(self) -> None:
        rng = self.rng
        most = rng.choice((1, 3, 100))
        max_bytes = PLENTY if rng.random() < 0.8 else 60
        grants = [
            Grant(holder, rng.randint(0, most), 10 * rng.randint(1, 60), max_bytes, rng.random() < 0.5)
            for holder in rng.sample(HOLDERS, rng.randint(0, 3))
        ]
        count = self.topic.settings.buckets
        buckets = None if rng.random() < 0.7 else sorted(rng.sample(range(count), rng.randint(0, count)))
        due_before_ms = self.now_ms + 10 * rng.choice((-5, 0, 5, 20))
        overdue_ms = rng.choice((0, 0, 0, 100))
        store, now_ms = self.trial.store, self.now_ms
        leased = await store.lease_due(self.topic, buckets, now_ms, due_before_ms, grants, overdue_ms)
        left = set(await self.trial.everything(self.topic, now_ms=now_ms))
        expected = _ExpectedLease(self.reference, self.topic, now_ms, buckets, due_before_ms, overdue_ms)
        expected.compare(grants, leased, left)
        rows = leased.rows
        self.tokens += zip(
            rows.ids.tolist(), rows.birth.tolist(), rows.version.tolist(), rows.holders.tolist(), strict=True
        )

    async def settle(self) -> None:
        """Settle with tokens handed out recently, most of them still good, some stale or another holder's."""
        rng = self.rng
        chosen = rng.choices(self.tokens[-30:], k=rng.randint(0, 8)) if self.tokens else []
        count = len(chosen)
        operations = [Operation.ACK] * 2 + [Operation.EXTEND, Operation.RELEASE, Operation.BURY, Operation.REGRANT]
        one = rng.choice(operations)
        settles = batch_of(
            Settles,
            count,
            ids=[token[0] for token in chosen],
            birth=[token[1] + (rng.random() < 0.05) for token in chosen],
            version=[token[2] + (rng.random() < 0.05) for token in chosen],
            holders=[token[3] if rng.random() < 0.9 else rng.choice(HOLDERS) for token in chosen],
            operation=[one if rng.random() < 0.6 else rng.choice(operations) for _ in chosen],
            time_ms=self.times(count),
            op=self.trial.numbers(count),
            unseen=self.bools(count, 0.3),
            reasons=[rng.choice((b"", b"no gate")) for _ in chosen],
        )
        await self.send(settles, new=True)

    async def mutate(self) -> None:
        rng = self.rng
        ids = self.some(8)
        operations = [Operation.MOVE] * 3 + [Operation.CANCEL] * 2 + [Operation.REVIVE, Operation.PURGE]
        mutations = self.trial.mutations(
            rng.choice(operations),
            ids,
            groups=[rng.choice(GROUPS) for _ in ids],
            due_ms=self.times(len(ids)),
            if_version=[rng.choice((0, 0, 0, 1, 2)) for _ in ids],
            leased=self.bools(len(ids), 0.3),
        )
        await self.send(mutations, new=True)

    async def mutate_tag(self) -> None:
        rng = self.rng
        by_time = rng.random() < 0.5
        mutation = TagMutation(
            operation=rng.choice((Operation.MOVE, Operation.MOVE, Operation.CANCEL)),
            tag=rng.choice(TAGS[1:]),
            group=rng.choice(GROUPS),
            started_ms=self.now_ms - rng.choice((0, 0, 100)),
            op=self.trial.number(),
            due_ms=int(self.times(1)[0]) if by_time else 0,
            by_ms=0 if by_time else 10 * rng.randint(-20, 60),
            latest_ms=self.now_ms + 10 * rng.choice((20, 500)),
            leased=rng.random() < 0.3,
            dry_run=rng.random() < 0.3,
        )
        limit = rng.randint(1, 9)
        found = await tag_counts(self.trial.store, self.topic, self.now_ms, mutation, limit)
        wanted = await tag_counts(self.reference, self.topic, self.now_ms, mutation, 1_000)
        expect_equal(found, wanted, "counts of a tag operation")

    async def again(self) -> None:
        """Send an earlier call once more, word for word."""
        if self.repeatable:
            await self.send(self.rng.choice(self.repeatable[-12:]))

    async def send(self, call: Call, new: bool = False) -> None:
        """Send a call to both stores; the answers must be the same. `new`: it may be repeated later."""
        if new:
            self.repeatable.append(call)
        answers = [await sent(store, self.topic, self.now_ms, call) for store in (self.trial.store, self.reference)]
        _compare(call, *answers)

    async def sweep(self) -> None:
        """Sweep both, of a topic whose remembered ids are all within their time."""
        stores = (self.trial.store, self.reference)
        swept, wanted = [await store.sweep(self.topic, self.now_ms, 100_000) for store in stores]
        expect_equal(
            (swept.expired, swept.dead_purged),
            (wanted.expired, wanted.dead_purged),
            "(expired, dead letters) that a sweep removed",
        )

    async def compare(self) -> None:
        rows = await self.trial.everything(self.topic, now_ms=self.now_ms)
        standing = self.reference.rows(self.topic)
        wanted = {id for id, row in standing.items() if not row.message.remembered}
        expect(
            rows.keys() == wanted, f"missing: {sorted(wanted - rows.keys())}; too many: {sorted(rows.keys() - wanted)}"
        )
        for id, row in rows.items():
            _expect_row(standing[id], row)


class _ExpectedLease:
    """The leases that are allowed on a topic as the reference store has it."""

    def __init__(
        self,
        reference: ReferenceStore,
        topic: Topic,
        now_ms: int,
        buckets: Sequence[int] | None,
        due_before_ms: int,
        overdue_ms: int,
    ) -> None:
        self.reference, self.topic, self.now_ms, self.buckets = reference, topic, now_ms, buckets
        self.overdue_ms, self.due_before_ms = overdue_ms, 0 if overdue_ms else due_before_ms
        here = reference.in_order(topic, buckets)
        if overdue_ms:
            here = [row for row in here if row.message.due_ms <= now_ms - overdue_ms]
        self.decided = {row.id: decide(row.message, self._ask(b"?", 1), now_ms, topic.settings) for row in here}
        """By id, in the order in which the topic's kind leases."""

    def _ask(self, holder: bytes, lease_ms: int) -> Ask:
        return Ask(Operation.LEASE, time_ms=lease_ms, holder=holder, due_before_ms=self.due_before_ms)

    def compare(self, grants: Sequence[Grant], leased: LeasedRows, left: set[bytes]) -> None:
        """Raise StoreViolation where `leased` is not allowed; else do the same in the reference store. `left`: the ids
        that the store still has after the call, which tells whose expiry was met."""
        standing, now_ms = self.reference.rows(self.topic), self.now_ms
        eligible = [id for id, decision in self.decided.items() if decision.status is Status.OK]
        rows = by_id(leased.rows)
        expect(rows.keys() <= set(eligible), f"leased, though not eligible: {sorted(rows.keys() - set(eligible))}")
        wanted = sum(grant.count for grant in grants)
        plenty = all(grant.max_bytes >= 1 << 30 for grant in grants)
        if plenty:
            expect_equal(len(rows), min(wanted, len(eligible)), "number of messages leased")
        self._expect_order(leased.rows, eligible)
        for at, id in enumerate(leased.rows.ids.tolist()):
            before, grant = standing[id].message, grants[int(leased.grant[at])]
            expect_equal(int(leased.was_due_ms[at]), before.due_ms, f"was_due_ms of {id!r}")
            expect_equal(leased.prior_holders[at], before.holder, f"prior holder of {id!r}")
            self.reference.decide(self.topic, id, self._ask(grant.holder, grant.lease_ms), now_ms)
            _expect_row(standing[id], rows[id])
        met_all = plenty and len(rows) < wanted
        self._bury(leased.buried, met_all)
        self._expire(leased.expired, left, met_all)
        if not self.overdue_ms:
            there = self.reference.in_order(self.topic, self.buckets)
            sound = [row for row in there if not is_expired(row.message, now_ms)]
            allowed = {
                min((self.reference.leasable_ms(self.topic, row) for row in some), default=None)
                for some in (there, sound)
            }
            expect(leased.next_due_ms in allowed, f"next_due_ms is {leased.next_due_ms}, where {allowed} is allowed")

    def _expect_order(self, rows: Rows, eligible: list[bytes]) -> None:
        """Expect within each bucket the first of the eligible messages."""
        count = self.topic.settings.buckets
        came: dict[int, list[bytes]] = {}
        for id in rows.ids.tolist():
            came.setdefault(bucket_of(id, count), []).append(id)
        for bucket, ids in came.items():
            first = [id for id in eligible if bucket_of(id, count) == bucket][: len(ids)]
            expect_equal(ids, first, f"order by (due, id) of what was leased from bucket {bucket}")

    def _bury(self, buried: Rows, met_all: bool) -> None:
        standing = self.reference.rows(self.topic)
        spent = {id for id, decision in self.decided.items() if self._is_spent(decision)}
        rows = by_id(buried)
        expect(rows.keys() <= spent, f"buried, though not delivered out: {sorted(rows.keys() - spent)}")
        if met_all:
            expect_equal(sorted(rows), sorted(spent), "what was delivered max_deliveries times and is buried instead")
        for id, row in rows.items():
            dead = replace(standing[id].message, dead=DELIVERED_OUT, died_ms=max(1, self.now_ms))
            standing[id].message = dead
            _expect_row(standing[id], row)

    def _is_spent(self, decision: Decision) -> bool:
        message = decision.message
        return decision.status is Status.DEAD and message is not None and message.due_ms <= self.now_ms

    def _expire(self, count: int, left: set[bytes], met_all: bool) -> None:
        standing = self.reference.rows(self.topic)
        expired = {id for id, decision in self.decided.items() if decision.status is Status.EXPIRED}
        gone = expired - left
        expect_equal(count, len(gone), "number of expired messages that a lease met")
        if met_all:
            due = {id for id in expired if standing[id].message.due_ms <= self.now_ms}
            expect(due <= gone, f"met, expired and not removed: {sorted(due - gone)}")
        for id in gone:
            self.reference.remove(self.topic, standing[id], self.now_ms)


def _expect_row(standing: ReferenceRow, row: dict[str, Any]) -> None:
    """Expect `row` to say what stands. Headers are compared as dictionaries."""
    wanted = standing.named()
    for name, value in row.items():
        if name == "headers":
            expect_equal(decode_headers(value), decode_headers(wanted[name]), f"headers of {standing.id!r}")
        else:
            expect_equal(value, wanted[name], f"{name} of {standing.id!r}")


_COMPARED = ("status", "version", "due_ms", "settled", "late", "repeat")


def _compare(call: Call, found: Answers, wanted: Answers) -> None:
    expect_equal(len(found), len(wanted), f"number of answers to a {named_call(call)}")
    answers = [
        [(Status.of(status), *rest) for status, *rest in zip(*columns, strict=True)]
        for columns in ([getattr(one, column).tolist() for column in _COMPARED] for one in (found, wanted))
    ]
    for at, (answer, must) in enumerate(zip(*answers, strict=True)):
        if answer != must:
            said = f"(status, version, due, settled, late, repeat) of {named_call(call, at)} {call.ids[at]!r}"
            raise StoreViolation(f"{said}: {answer} where {must} must be")
    expect_equal(found.displaced, wanted.displaced, "what puts displaced")


async def walk(trial: Trial, seed: int, steps: int, **settings: Any) -> None:
    """Walk at random on a fresh topic."""
    topic = await trial.topic(buckets=4, **settings)
    reference = ReferenceStore()
    await reference.open()
    await reference.create_topic(topic)
    await _Walk(trial, topic, reference, seed).run(steps)


@check()
async def check_rules_on_a_plain_topic(trial: Trial) -> None:
    """Every answer and every row is what the operation table says, over random operations and their repeats."""
    for seed in range(4):
        await walk(trial, seed, 150)


@check()
async def check_rules_on_a_topic_that_remembers(trial: Trial) -> None:
    """On a topic that remembers settled ids, every answer and every row is what the operation table says."""
    for seed in range(100, 104):
        await walk(trial, seed, 150, remember_ms=1_000_000_000)


@check()
async def check_rules_with_backoff_and_few_deliveries(trial: Trial) -> None:
    """With a redelivery backoff and a limit of deliveries, every answer and row is what the operation table says."""
    for seed in range(200, 204):
        await walk(trial, seed, 150, redelivery_backoff_ms=103, max_deliveries=2, dead_retention_ms=2_003)


__all__ = ["walk"]
