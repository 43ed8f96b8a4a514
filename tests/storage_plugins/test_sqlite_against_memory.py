"""The SQLite store and the plain form of the memory store, which decides everything by the table of rules, are given
the same calls and must say the same: random operations on few ids, with batches that name one id several times."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from timeline.columns import Ragged
from timeline.model import Answers, Operation, Rows, State, Topic, TopicSettings, payload_sums
from timeline.storage_plugins.contract import (
    Grant,
    LeasedRows,
    Mutations,
    Puts,
    ScanFilter,
    Settles,
    Store,
    TagMutation,
)
from timeline.storage_plugins.memory import MemoryStore
from timeline.storage_plugins.sqlite import SqliteStore

pytestmark = pytest.mark.slow

START_MS = 1_700_000_000_000
GROUPS = (b"default", b"ops")
HOLDERS = (b"w1", b"w2", b"w3")
TAGS = (b"", b"spring", b"autumn")

SETTINGS = {
    "plain": TopicSettings(buckets=4, max_deliveries=0),
    "buries": TopicSettings(buckets=4, max_deliveries=2, redelivery_backoff_ms=300),
    "remembers": TopicSettings(buckets=3, remember_ms=50_000, max_deliveries=3, dead_retention_ms=4_000),
}


def _numbers(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.int64)


def _words(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.uint64)


class Calls:
    """Random calls, and tokens out of what was leased."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_ms = START_MS
        self.tokens: list[tuple[bytes, int, int, bytes]] = []
        self.ops: list[int] = []

    def id(self) -> bytes:
        return b"id-%02d" % self.random.randrange(30)

    def word(self) -> int:
        return self.random.randrange(1, 1 << 64)

    def due(self) -> int:
        return self.now_ms + self.random.randrange(-500, 3_000)

    def op(self) -> int:
        if self.ops and self.random.random() < 0.3:
            return self.random.choice(self.ops[-20:])
        self.ops.append(self.word())
        return self.ops[-1]

    def puts(self) -> Puts:
        count = self.random.randrange(1, 20)
        payloads = Ragged.of([b"p%d" % self.random.randrange(3) for _ in range(count)])
        headers = Ragged.of([self.random.choice((b"", b"\x01\0a\x01\0b")) for _ in range(count)])
        due = [self.due() for _ in range(count)]
        if_exists = self.random.choices(("", "", "move", "replace"), k=count)
        return Puts.filled(
            count,
            ids=Ragged.of([self.id() for _ in range(count)]),
            birth=_words([self.op() for _ in range(count)]),
            due_ms=_numbers(due),
            expires_ms=_numbers([self.random.choice((0, 0, at + self.random.randrange(-10, 3_000))) for at in due]),
            groups=Ragged.of(self.random.choices(GROUPS, k=count)),
            tags=Ragged.of(self.random.choices(TAGS, k=count)),
            payload_sum=payload_sums(payloads, headers),
            payloads=payloads,
            headers=headers,
            move=np.array([one == "move" for one in if_exists]),
            replace=np.array([one == "replace" for one in if_exists]),
        )

    def grants(self) -> list[Grant]:
        return [
            Grant(holder, self.random.randrange(6), self.random.randrange(100, 2_000), self.random.choice((5, 10_000)))
            for holder in self.random.sample(HOLDERS, self.random.randrange(4))
        ]

    def settles(self) -> Settles:
        count = self.random.randrange(1, 12)
        chosen = [
            self.random.choice(self.tokens[-60:])
            if self.tokens and self.random.random() < 0.9
            else (self.id(), self.word(), 1, HOLDERS[0])
            for _ in range(count)
        ]
        if self.random.random() < 0.5:  # Distinct ids: what the fast way takes.
            chosen = list({id: token for token in chosen for id in token[:1]}.values())
            count = len(chosen)
        operations = [
            Operation.ACK,
            Operation.ACK,
            Operation.EXTEND,
            Operation.RELEASE,
            Operation.BURY,
            Operation.REGRANT,
        ]
        return Settles(
            ids=Ragged.of([token[0] for token in chosen]),
            birth=_words([token[1] for token in chosen]),
            version=_numbers([token[2] for token in chosen]),
            holders=Ragged.of([self.random.choice((token[3], token[3], HOLDERS[0])) for token in chosen]),
            operation=np.array(self.random.choices(operations, k=count), dtype=np.uint8),
            time_ms=_numbers([self.due() for _ in range(count)]),
            op=_words([self.op() for _ in range(count)]),
            unseen=np.array([self.random.random() < 0.3 for _ in range(count)]),
            reasons=Ragged.of([self.random.choice((b"", b"why not")) for _ in range(count)]),
        )

    def mutations(self) -> Mutations:
        count = self.random.randrange(1, 10)
        return Mutations(
            operation=self.random.choice((Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE)),
            ids=Ragged.of([self.id() for _ in range(count)]),
            groups=Ragged.of(self.random.choices(GROUPS, k=count)),
            due_ms=_numbers([self.due() for _ in range(count)]),
            if_version=_numbers([self.random.choice((0, 0, 0, 1, 2)) for _ in range(count)]),
            leased=np.array([self.random.random() < 0.3 for _ in range(count)]),
            op=_words([self.op() for _ in range(count)]),
        )

    def tag_mutation(self) -> TagMutation:
        by_ms = self.random.choice((0, 0, 700))
        return TagMutation(
            operation=self.random.choice((Operation.MOVE, Operation.CANCEL)),
            tag=self.random.choice(TAGS[1:]),
            group=self.random.choice(GROUPS),
            started_ms=self.now_ms - self.random.choice((0, 400)),
            op=self.op(),
            due_ms=0 if by_ms else self.due(),
            by_ms=by_ms,
            latest_ms=self.now_ms + self.random.choice((800, 10_000)),
            leased=self.random.random() < 0.3,
            dry_run=self.random.random() < 0.3,
        )


def plain(value: Any) -> Any:
    """Anything a store answers as plain Python values, so that a difference shows itself."""
    if isinstance(value, np.ndarray | Ragged):
        return value.tolist()
    if isinstance(value, Rows | LeasedRows | Answers):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        for told_as_one_likes in ("details", "commit_seq"):
            fields.pop(told_as_one_likes, None)
        return fields
    return value


def by_id(rows: Rows) -> list[tuple[Any, ...]]:
    columns = [plain(getattr(rows, field.name)) for field in dataclasses.fields(rows)]
    columns = [column if column is not None else [None] * len(rows) for column in columns]
    return sorted(zip(*columns, strict=True))


async def all_rows(store: Store, topic: Topic, now_ms: int, where: ScanFilter, limit: int) -> list[tuple[Any, ...]]:
    cursor, parts = b"", []
    while True:
        page = await store.scan(topic, now_ms, where, cursor, limit, payload=True)
        parts.append(page.rows)
        if page.cursor is None:
            return by_id(Rows.concat(parts))
        cursor = page.cursor


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("seed", (*range(6), 14, 15))
async def test_same_answers(tmp_path: Path, kind: str, seed: int) -> None:
    calls = Calls(seed)
    pair: tuple[Store, Store] = (MemoryStore(fast=False), SqliteStore(f"sqlite:///{tmp_path}/a.db"))
    topic = Topic("t", 2**63 - 1 - seed, SETTINGS[kind])
    for store in pair:
        await store.open()
        await store.create_topic(topic)
    answered = set()
    for step in range(150):
        calls.now_ms += calls.random.choice((0, 1, 50, 400))
        now_ms = calls.now_ms
        what = calls.random.choices(
            ("put", "lease", "settle", "mutate", "tag", "read", "sweep"), (4, 5, 5, 3, 1, 1, 1)
        )[0]
        said: list[Any] = []
        if what == "put":
            puts = calls.puts()
            said = [plain(await store.put(topic, now_ms, puts)) for store in pair]
        elif what == "lease":
            grants = calls.grants()
            buckets = calls.random.choice((None, None, [0, 2], [1]))
            before_ms = calls.random.choice((0, now_ms + 400))
            leases = [await store.lease_due(topic, buckets, now_ms, before_ms, grants) for store in pair]
            rows = leases[0].rows
            tokens = zip(rows.ids, rows.birth.tolist(), rows.version.tolist(), rows.holders, strict=True)
            calls.tokens += tokens
            said = [{**plain(lease), "buried": by_id(lease.buried)} for lease in leases]
        elif what == "settle":
            settles = calls.settles()
            said = [plain(await store.settle(topic, now_ms, settles)) for store in pair]
        elif what == "mutate":
            mutations = calls.mutations()
            said = [plain(await store.mutate(topic, now_ms, mutations)) for store in pair]
        elif what == "tag":
            mutation = calls.tag_mutation()
            steps = [await store.mutate_tag(topic, now_ms, mutation, b"", 100) for store in pair]
            said = [(one.counts, one.cursor is None, one.earliest_due_ms) for one in steps]
        elif what == "sweep":
            sweeps = [await store.sweep(topic, now_ms, 1_000) for store in pair]
            said = [(one.expired, one.forgotten, one.dead_purged) for one in sweeps]
        else:
            edges = _numbers([now_ms - 500, now_ms, now_ms + 300, now_ms + 3_000])
            after_ms, holder = calls.due(), calls.random.choice(HOLDERS)
            where = ScanFilter(
                states=frozenset(calls.random.sample(sorted(set(State) - {State.ABSENT, State.SETTLED}), 2)),
                tag=calls.random.choice(TAGS),
                due_from_ms=calls.random.choice((0, calls.due())),
                due_to_ms=calls.random.choice((0, calls.due())),
            )
            chosen = dataclasses.replace(where, ids=Ragged.of([calls.id() for _ in range(5)]))
            for store in pair:
                said.append(
                    (
                        (await store.count_due(topic, edges)).tolist(),
                        await store.next_due(topic, None, after_ms),
                        by_id((await store.held_by(topic, now_ms, holder, b"", 100)).rows),
                        await all_rows(store, topic, now_ms, where, limit=3),
                        by_id((await store.scan(topic, now_ms, chosen, b"", 100, False)).rows),
                        await all_rows(store, topic, now_ms, chosen, limit=2),
                    )
                )
        assert said[0] == said[1], f"step {step}: {what}"
        answered.add(what)
        every = ScanFilter(states=frozenset(State))
        if step % 10 == 0:
            dumps = [await all_rows(store, topic, now_ms, every, limit=7) for store in pair]
            assert dumps[0] == dumps[1], f"after step {step}: {what}"
    assert len(answered) == 7
    for store in pair:
        await store.close()
