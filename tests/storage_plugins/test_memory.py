"""The memory store's own parts: agendas under many changes, names, slots, and what only it promises."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from timeline.columns import Bools, Indexes, Ragged, UInt32
from timeline.model import Operation, Topic, TopicSettings
from timeline.storage_plugins.conformance.trial import PLENTY, T0, Trial, named
from timeline.storage_plugins.contract import Capabilities, Grant, ScanFilter, StoreUnavailable, TopicConflict
from timeline.storage_plugins.memory import MemoryStore, rows
from timeline.storage_plugins.memory.rows import UNKNOWN, Agenda, Names, Objects, by_id, only_item, pack, same, slots_of


class Diary:
    """An agenda beside the plainest thing that does the same: a time by slot."""

    def __init__(self, slots: int) -> None:
        self.ids = np.array([f"{(at * 7919) % slots:05}".encode() for at in range(slots)], dtype=np.object_)
        self.stamps = np.zeros(slots, dtype=np.uint32)
        self.plain: dict[int, int] = {}
        self.agenda = Agenda(self._is_valid, lambda: len(self.plain), self._ids_of)

    def _is_valid(self, slots: Indexes, stamps: UInt32) -> Bools:
        valid: Bools = self.stamps[slots] == stamps
        return valid

    def _ids_of(self, slots: Indexes) -> Objects:
        return self.ids[slots]

    def set(self, slots: list[int], times: list[int]) -> None:
        where = np.array(slots, dtype=np.intp)
        self.stamps[where] += np.uint32(1)
        self.agenda.add(np.array(times, dtype=np.int64), pack(where, self.stamps[where]))
        self.plain.update(zip(slots, times, strict=True))

    def drop(self, slots: list[int]) -> None:
        self.stamps[np.array(slots, dtype=np.intp)] += np.uint32(1)
        for slot in slots:
            self.plain.pop(slot, None)

    def take(self, until_ms: int, count: int) -> None:
        due = [slot for slot, time in self.plain.items() if time <= until_ms]
        wanted = sorted(due, key=lambda slot: (self.plain[slot], self.ids[slot]))[:count]
        times, keys = self.agenda.take(until_ms, count)
        assert slots_of(keys).tolist() == wanted
        assert times.tolist() == [self.plain.pop(slot) for slot in wanted]

    def look(self, after_ms: int, accept: set[int]) -> None:
        times = [time for time in self.plain.values() if time > after_ms]
        assert self.agenda.first(after_ms) == min(times, default=None)
        accepted = [time for slot, time in self.plain.items() if time > after_ms and slot in accept]
        found = self.agenda.first(after_ms, lambda slots: np.isin(slots, list(accept)))
        assert found == min(accepted, default=None)
        edges = np.array([0, after_ms, after_ms + 7, after_ms + 7, 1_000_000], dtype=np.int64)
        edges.sort()
        counts = [
            sum(low <= time < high for time in self.plain.values())
            for low, high in zip(edges.tolist(), edges.tolist()[1:], strict=False)
        ]
        assert self.agenda.count_between(edges).tolist() == counts
        assert sorted(self.agenda.slots().tolist()) == sorted(self.plain)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), small=st.booleans())
@settings(max_examples=60)
def test_agenda_does_what_a_sorted_list_does(seed: int, small: bool) -> None:
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(rows, "FRESH", 4)
            patch.setattr(rows, "MERGE_MAX", 16)
            patch.setattr(rows, "MANY_RUNS", 5)
            patch.setattr(rows, "SLICE", 2)
        diary, rising = Diary(60), rng.random() < 0.5
        for step in range(60):
            slots = rng.sample(range(60), rng.randint(1, 20))
            spread = rng.choice((3, 100)) + 3 * step * rising
            choice = rng.random()
            if choice < 0.5:  # a backlog comes in the order of time
                diary.set(slots, [rng.randint(3 * step * rising, spread) for _ in slots])
            elif choice < 0.65:
                diary.drop(slots)
            elif choice < 0.9:
                diary.take(rng.randint(0, spread), rng.choice((1, 3, 60)))
            else:
                diary.look(rng.randint(-1, spread), set(slots))
        diary.look(-1, set(range(60)))
        diary.take(1_000, 1_000)
        assert diary.agenda.first() is None


@pytest.mark.slow
def test_agenda_drops_stale_entries_where_they_dominate() -> None:
    diary = Diary(1_000)
    rng = random.Random(1)
    for _ in range(300):
        diary.set(list(range(1_000)), [rng.randint(0, 10**9) for _ in range(1_000)])
    assert len(diary.agenda) < 2 * 1_000 + 10 * rows.FRESH


def test_ids_that_share_a_beginning_are_ordered_by_their_end() -> None:
    ids = [b"departure-0000007", b"departure-0000001", b"departure", b"departure-", b"departur", b"a" * 9, b"\xc3\xa9"]
    times = np.zeros(len(ids), dtype=np.int64)
    order = by_id(times, np.array(ids, dtype=np.object_))
    assert [ids[at] for at in order] == sorted(ids)
    times[1] = -1
    assert by_id(times, np.array(ids, dtype=np.object_))[0] == 1


def test_names_keep_their_numbers_until_nobody_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "KEEP", 4)
    table = Names()
    first = table.numbers(Ragged.of([b"a", b"b", b"a", b""]))
    assert first[0] == first[2] != first[1] and first[3] == 0
    assert table.numbers(Ragged.of([b"c"] * 3)).tolist() == [3, 3, 3]
    assert table.crowded(0)
    table.keep_only(first)
    assert table.column(first) == Ragged.of([b"a", b"b", b"a", b""])
    assert table.known(Ragged.of([b"c", b"b"])).tolist() == [UNKNOWN, first[1]]
    assert table.known(Ragged.of([b"c", b"c"])).tolist() == [UNKNOWN, UNKNOWN]
    assert table.number(b"d") == 3, "the number of a forgotten name is given again"


@pytest.mark.parametrize(
    ("items", "only"),
    [([b"ab"] * 3, b"ab"), ([b""] * 3, b""), ([b"a", b"aaa"], None), ([b"ab", b"ba"], None), ([b"x"], b"x")],
)
def test_a_column_that_says_one_thing(items: list[bytes], only: bytes | None) -> None:
    assert only_item(Ragged.of(items)) == only
    assert only_item(Ragged.of([b"?", *items])[1:]) == only
    if only is not None:
        assert same(only, len(items)) == Ragged.of(items)


def test_capabilities_are_as_declared() -> None:
    assert MemoryStore.capabilities == Capabilities(
        durable=False,
        survives_failover=False,
        shared=False,
        payload_limit_bytes=64 * 1024 * 1024,
        own_clock=False,
        exact_counts=True,
        every_kind=True,
    )


async def test_cluster_uid_is_given_or_drawn() -> None:
    assert (await MemoryStore(cluster_uid="ab" * 16).open()).cluster_uid == "ab" * 16
    assert (await MemoryStore().open()).cluster_uid != (await MemoryStore().open()).cluster_uid


async def test_a_store_that_is_not_open_is_unavailable() -> None:
    store = MemoryStore()
    topic = Topic("a", 1, TopicSettings())
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.create_topic(topic)
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.scan(topic, 0, ScanFilter(), b"", 1, False)


async def test_what_is_fixed_of_a_topic_cannot_be_updated() -> None:
    async with Trial(MemoryStore) as trial:
        topic = await trial.topic(buckets=4)
        other = Topic(topic.name, topic.uid, TopicSettings(buckets=8), topic.revision)
        with pytest.raises(TopicConflict, match=r"buckets of topic .* is fixed"):
            await trial.store.update_topic(other)


@pytest.mark.slow
async def test_order_holds_over_all_buckets_and_many_runs() -> None:
    """30,000 messages put, moved and leased in parts come by (due, id) over all buckets."""
    rng = random.Random(3)
    async with Trial(MemoryStore) as trial:
        topic = await trial.topic()
        ids = named(30_000)
        dues = {id: T0 + rng.randint(0, 5_000) for id in ids}
        rng.shuffle(ids)
        for start in range(0, len(ids), 700):
            part = ids[start : start + 700]
            await trial.stored(topic, part, [dues[id] for id in part])
            moved = rng.sample(ids[: start + 1], min(start + 1, 50))
            dues.update((id, T0 + rng.randint(0, 5_000)) for id in moved)
            await trial.mutate(topic, Operation.MOVE, moved, [dues[id] for id in moved])
        wanted = sorted(ids, key=lambda id: (dues[id], id))
        came: list[bytes] = []
        while len(came) < len(ids):
            part = (await trial.lease(topic, rng.choice((10, 997, 4_000)), now_ms=T0 + 5_000)).rows.ids.tolist()
            assert part
            came += part
        assert came == wanted


async def test_slots_and_names_are_used_again() -> None:
    """A long run of puts and acks under ever new holders, groups and tags keeps the store small."""
    async with Trial(MemoryStore) as trial:
        topic = await trial.topic()
        for turn in range(60):
            now_ms = T0 + turn
            ids = named(100, f"turn-{turn}")
            tags = [f"{turn}-{at}".encode() for at in range(100)]
            await trial.stored(topic, ids, now_ms, now_ms=now_ms, tag=tags, group=f"g{turn}".encode())
            leased = await trial.lease(topic, now_ms=now_ms, holder=f"w{turn}".encode())
            assert sorted(leased.rows.ids.tolist()) == ids
            assert sorted(leased.rows.tags.tolist()) == sorted(tags)
            await trial.settle(topic, Operation.ACK, leased.rows, now_ms=now_ms)
        held = trial.store._rows[topic.uid]  # type: ignore[attr-defined]
        assert len(held.kinds) <= 1_024
        assert not held.index and not held.tagged
        assert len(held.tags._numbers) <= 2 * rows.KEEP


async def test_an_emptied_topic_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_SHRINK_ABOVE", 4_000)
    async with Trial(MemoryStore) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(5_000))
        held = trial.store._rows[topic.uid]  # type: ignore[attr-defined]
        assert len(held.kinds) >= 5_000
        leased = await trial.lease(topic)
        await trial.settle(topic, Operation.ACK, leased.rows)
        assert len(held.kinds) < 5_000
        await trial.stored(topic, named(10))
        assert len((await trial.lease(topic)).rows) == 10
        assert (await trial.lease(topic, now_ms=T0 + 29_999)).next_due_ms == T0 + 30_000


async def test_a_large_backlog_is_leased_in_small_parts() -> None:
    """With 20,000 due and a credit of 1 each lease takes the next one, whatever is put in between."""
    async with Trial(MemoryStore) as trial:
        topic = await trial.topic()
        await trial.stored(topic, named(20_000, "a"), T0 - 5)
        for at in range(50):
            await trial.stored(topic, [f"b-{at:03}".encode()], T0 - 5 if at % 2 else T0 - 6)
            leased = await trial.store.lease_due(topic, None, T0, 0, [Grant(b"w", 1, 1_000, PLENTY)])
            early = at % 2 == 0
            assert leased.rows.ids[0].startswith(b"b" if early else b"a")
            assert leased.next_due_ms == T0 - 5
