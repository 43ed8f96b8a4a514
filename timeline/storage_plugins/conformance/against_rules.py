"""Random operations, seeded, against the plainest model of the rules: every answer and every row is compared."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.model import Operation, Status
from timeline.storage_plugins.conformance.mirror import Mirror
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import PLENTY, T0, Trial, walked
from timeline.storage_plugins.contract import Grant, Mutations, Puts, Settles, TagMutation, TagStep

HOLDERS = (b"worker-1", b"worker-2", b"Worker-2")
GROUPS = (b"default", b"default", b"ops")
TAGS = (b"", b"spring", b"Spring")
IDS = [f"{prefix}{number}".encode() for number in range(9) for prefix in ("a", "A", "á", "a ")]


class _Walk:
    """One random walk: a store's topic and its mirror side by side."""

    def __init__(self, trial: Trial, mirror: Mirror, seed: int) -> None:
        self.trial, self.mirror, self.topic = trial, mirror, mirror.topic
        self.rng = random.Random(seed)
        self.now_ms = T0
        self.tokens: list[tuple[bytes, int, int, bytes]] = []
        self.repeatable: list[Settles | Mutations | Puts] = []

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
        """Dues around now, on a grid so that they tie."""
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
        self.repeatable.append(puts)
        self.mirror.put(self.now_ms, puts, await self.trial.store.put(self.topic, self.now_ms, puts))

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
        self.mirror.lease(now_ms, due_before_ms, buckets, grants, leased, left, overdue_ms)
        rows = leased.rows
        self.tokens += zip(
            rows.ids.tolist(), rows.birth.tolist(), rows.version.tolist(), rows.holders.tolist(), strict=True
        )

    async def settle(self) -> None:
        """Tokens handed out recently, most still good, some made stale or another's."""
        rng = self.rng
        chosen = rng.choices(self.tokens[-30:], k=rng.randint(0, 8)) if self.tokens else []
        count = len(chosen)
        operations = [Operation.ACK] * 2 + [Operation.EXTEND, Operation.RELEASE, Operation.BURY, Operation.REGRANT]
        one = rng.choice(operations)
        settles = Settles(
            ids=Ragged.of([token[0] for token in chosen]),
            birth=np.array([token[1] + (rng.random() < 0.05) for token in chosen], dtype=np.uint64),
            version=np.array([token[2] + (rng.random() < 0.05) for token in chosen], dtype=np.int64),
            holders=Ragged.of([token[3] if rng.random() < 0.9 else rng.choice(HOLDERS) for token in chosen]),
            operation=np.array([one if rng.random() < 0.6 else rng.choice(operations) for _ in chosen], dtype=np.uint8),
            time_ms=self.times(count),
            op=self.trial.numbers(count),
            unseen=self.bools(count, 0.3),
            reasons=Ragged.of([rng.choice((b"", b"no gate")) for _ in chosen]),
        )
        self.repeatable.append(settles)
        self.mirror.settle(self.now_ms, settles, await self.trial.store.settle(self.topic, self.now_ms, settles))

    async def mutate(self) -> None:
        rng = self.rng
        ids = self.some(8)
        count = len(ids)
        operations = [Operation.MOVE] * 3 + [Operation.CANCEL] * 2 + [Operation.REVIVE, Operation.PURGE]
        mutations = Mutations(
            operation=rng.choice(operations),
            ids=Ragged.of(ids),
            groups=Ragged.of([rng.choice(GROUPS) for _ in ids]),
            due_ms=self.times(count),
            if_version=np.array([rng.choice((0, 0, 0, 1, 2)) for _ in ids], dtype=np.int64),
            leased=self.bools(count, 0.3),
            op=self.trial.numbers(count),
        )
        self.repeatable.append(mutations)
        self.mirror.mutate(self.now_ms, mutations, await self.trial.store.mutate(self.topic, self.now_ms, mutations))

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
        counts: dict[Status, int] = {}

        async def chunk(cursor: bytes) -> TagStep:
            return await self.trial.store.mutate_tag(self.topic, self.now_ms, mutation, cursor, rng.randint(1, 9))

        async for step in walked(chunk):
            for code, count in step.counts.items():
                if count:
                    counts[Status.of(code)] = counts.get(Status.of(code), 0) + count
        self.mirror.mutate_tag(self.now_ms, mutation, counts)

    async def again(self) -> None:
        """An earlier call once more, word for word."""
        if not self.repeatable:
            return
        call = self.rng.choice(self.repeatable[-12:])
        store, topic, now_ms = self.trial.store, self.topic, self.now_ms
        if isinstance(call, Puts):
            self.mirror.put(now_ms, call, await store.put(topic, now_ms, call))
        elif isinstance(call, Settles):
            self.mirror.settle(now_ms, call, await store.settle(topic, now_ms, call))
        else:
            self.mirror.mutate(now_ms, call, await store.mutate(topic, now_ms, call))

    async def sweep(self) -> None:
        self.mirror.sweep(self.now_ms, await self.trial.store.sweep(self.topic, self.now_ms, 100_000))

    async def compare(self) -> None:
        self.mirror.expect_everything(await self.trial.everything(self.topic, now_ms=self.now_ms))


async def walk(trial: Trial, seed: int, steps: int, **settings: Any) -> None:
    """A random walk on a fresh topic."""
    topic = await trial.topic(buckets=4, **settings)
    await _Walk(trial, Mirror(topic), seed).run(steps)


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
