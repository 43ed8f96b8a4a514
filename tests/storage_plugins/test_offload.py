"""Payloads apart from the timeline: written before the row and deleted after it, read by nothing but what hands them
out, checked against their checksum; one that is gone or damaged is an error on its message alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from timeline.model import MAX_PAYLOAD_BYTES, Operation, Status, Topic
from timeline.storage_plugins import make_store
from timeline.storage_plugins.asks import READ_AGAIN_MS
from timeline.storage_plugins.conformance import CHECKS, run_check
from timeline.storage_plugins.conformance.trial import T0, Trial, named, statuses
from timeline.storage_plugins.contract import StoreError, StoreUnavailable, StoreUnknown, Swept
from timeline.storage_plugins.memory import MemoryStore
from timeline.storage_plugins.offload import (
    SHARDS,
    PayloadGone,
    PayloadStore,
    PayloadsUnavailable,
    Place,
    place_of_name,
    topic_folder,
)
from timeline.storage_plugins.offload import store as offload_store
from timeline.storage_plugins.offload.store import OffloadingStore

pytestmark = pytest.mark.slow

FAR = 4_000_000_000_000
LARGE = bytes(range(256)) * 20


class Kept(PayloadStore):
    """A place that counts, and fails when told to."""

    durable = True
    described = "a dictionary"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.fails: set[str] = set()

    def _called(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.fails:
            raise PayloadsUnavailable(f"no {name} today")

    async def open(self) -> None: ...
    async def claim(self, cluster_uid: str) -> None: ...
    async def in_place(self) -> bool:
        return True

    async def close(self) -> None: ...
    async def check(self) -> None:
        self._called("check")

    async def write(self, name: str, data: bytes) -> None:
        self._called("write")
        self.files[name] = data

    async def read(self, name: str) -> bytes:
        self._called("read")
        if name not in self.files:
            raise PayloadGone(name)
        return self.files[name]

    async def delete(self, names: Sequence[str]) -> None:
        self._called("delete")
        for name in names:
            self.files.pop(name, None)

    async def names(self, folder: str) -> list[str]:
        self._called("names")
        return [name for name in self.files if name.startswith(f"{folder}/")]

    async def delete_folder(self, folder: str) -> None:
        self._called("delete_folder")
        await self.delete(await self.names(folder))


@asynccontextmanager
async def offloading(**more: Any) -> AsyncIterator[tuple[Trial, Kept, OffloadingStore]]:
    place = Kept()
    async with Trial(lambda: OffloadingStore(MemoryStore(), place, 1_024, **more)) as trial:
        assert isinstance(trial.store, OffloadingStore)
        yield trial, place, trial.store


async def flushed(trial: Trial, store: OffloadingStore) -> None:
    await store._orphans.flush()


@pytest.mark.parametrize("name", CHECKS)
async def test_conformance_in_memory(name: str) -> None:
    (await run_check(name, lambda: OffloadingStore(MemoryStore(), Kept(), 1_024))).raise_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
async def test_conformance_in_files(tmp_path: Path, name: str) -> None:
    url = f"sqlite:///{tmp_path}/a.db?payloads=file://{tmp_path}/payloads&payload_offload_bytes=1024"
    (await run_check(name, lambda: make_store(url))).raise_failed()


async def test_only_what_is_large_lies_apart() -> None:
    async with offloading() as (trial, place, store):
        topic = await trial.topic()
        await trial.stored(topic, [b"large", b"small", b"just"], payload=[LARGE, b"small", b"x" * 1_024])
        assert list(place.files.values()) == [LARGE]
        inside = await store.inner.scan(topic, T0, _by([b"large"]), b"", 10, True)
        assert inside.rows.payloads is not None and len(inside.rows.payloads[0]) < 40
        assert inside.rows.payload_bytes.tolist() == [len(LARGE)]
        rows = (await trial.lease(topic)).rows
        assert rows.payloads is not None
        assert dict(zip(rows.ids, rows.payloads, strict=True)) == {
            b"large": LARGE,
            b"small": b"small",
            b"just": b"x" * 1_024,
        }


def _by(ids: list[bytes]) -> Any:
    from timeline.columns import Ragged
    from timeline.storage_plugins.contract import ScanFilter

    return ScanFilter(ids=Ragged.of(ids))


async def test_nothing_but_a_delivery_reads_payloads() -> None:
    async with offloading() as (trial, place, _):
        topic = await trial.topic(max_deliveries=2)
        await trial.stored(topic, named(20), [T0 + at for at in range(20)], payload=LARGE, tag=b"t")
        await trial.stored(topic, [b"expired"], T0 + 1, payload=LARGE, expires_ms=T0 + 2)
        await trial.mutate(topic, Operation.MOVE, named(20)[10:], T0 + 500)
        await trial.mutate(topic, Operation.CANCEL, named(20)[15:16])
        await trial.by_tag(topic, Operation.MOVE, b"t", by_ms=1, dry_run=True)
        await trial.scan(topic)
        await trial.store.sweep(topic, T0, 100)
        assert place.calls["read"] == 0
        rows = (await trial.lease(topic, 3, now_ms=T0 + 9)).rows
        assert place.calls["read"] == 3 == len(rows)
        more = await trial.settle(topic, Operation.EXTEND, rows, now_ms=T0 + 9, time_ms=T0 + 90_000)
        back = await trial.settle(topic, Operation.RELEASE, rows, now_ms=T0 + 9, time_ms=T0 + 10)
        assert set(statuses(more) + statuses(back)) == {Status.OK}
        again = (await trial.lease(topic, 100, now_ms=T0 + 10)).rows
        await trial.settle(topic, [Operation.ACK, Operation.BURY] * 5, again, now_ms=T0 + 10)
        assert place.calls["read"] == 3 + 10 and place.calls["write"] == 21


async def test_an_ack_deletes_after_its_answer() -> None:
    async with offloading() as (trial, place, store):
        topic = await trial.topic()
        await trial.stored(topic, named(3), payload=LARGE)
        rows = (await trial.lease(topic)).rows
        answers = await trial.settle(topic, Operation.ACK, rows.take(np.arange(2)))
        assert statuses(answers) == [Status.OK] * 2 and len(place.files) == 3, "deleted before the answer"
        await flushed(trial, store)
        assert len(place.files) == 1
        place.fails = {"delete"}
        await trial.settle(topic, Operation.ACK, rows.take(np.array([2])))
        await flushed(trial, store)
        assert len(place.files) == 1, "a deletion that failed is left to a sweep"


async def test_what_waits_for_a_place_that_is_silent_is_bounded_and_then_left_to_a_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Silent(Kept):
        silent = asyncio.Event()

        async def delete(self, names: Sequence[str]) -> None:
            await self.silent.wait()
            await super().delete(names)

    monkeypatch.setattr(offload_store, "MOST_DOOMED", 5)
    monkeypatch.setattr(offload_store, "DELETED_AT_ONCE", 2)
    place = Silent()
    place.fails = {"delete"}
    deleting = offload_store.Orphans(place, 1_000)
    deleting.delete_later(["first"])
    await asyncio.sleep(0)
    for at in range(20):
        deleting.delete_later([f"{at}", f"{at} too"])
    assert len(deleting._doomed) == 5
    place.silent.set()
    await deleting.flush()
    assert place.calls["delete"] == 1 and not deleting._doomed
    place.fails = set()
    deleting.delete_later(["last"])
    await deleting.flush()
    assert place.calls["delete"] == 2


async def test_a_refused_put_harms_nobodys_payload() -> None:
    async with offloading() as (trial, place, store):
        topic = await trial.topic()
        puts = trial.puts([b"a"], payload=LARGE)
        await trial.store.put(topic, T0, puts)
        other = await trial.put(topic, [b"a"], payload=LARGE + b"other")
        again = await trial.store.put(topic, T0, puts)
        assert (statuses(other), statuses(again), again.repeat.tolist()) == ([Status.EXISTS], [Status.DUPLICATE], [1])
        await flushed(trial, store)
        assert (await trial.row(topic, b"a"))["payloads"] == LARGE
        assert sorted(map(len, place.files.values())) == [len(LARGE)] * 2, "the other's payload was to be deleted"
        await _swept(trial, topic, T0)
        assert await _swept(trial, topic, T0 + 3_600_000) == 1 == len(place.files)
        assert (await trial.row(topic, b"a"))["payloads"] == LARGE


async def _swept(trial: Trial, topic: Any, now_ms: int) -> int:
    """A sweep through all shares of the files."""
    return sum([(await trial.store.sweep(topic, now_ms, 100)).orphans for _ in range(SHARDS)])


async def test_a_payload_that_was_replaced_is_swept_and_the_new_one_stays() -> None:
    async with offloading(grace_ms=1_000) as (trial, place, _):
        topic = await trial.topic()
        await trial.stored(topic, [b"a"], FAR, payload=LARGE)
        (old,) = place.files
        assert statuses(await trial.put(topic, [b"a"], FAR, payload=LARGE[::-1], replace=True)) == [Status.OK]
        assert len(place.files) == 2  # written before its row, while the other one still had its own
        assert [await _swept(trial, topic, now_ms) for now_ms in (T0, T0 + 1_000)] == [0, 1]
        assert old not in place.files and list(place.files.values()) == [LARGE[::-1]]
        assert (await trial.row(topic, b"a"))["payloads"] == LARGE[::-1]


async def test_orphans_are_swept_after_a_grace() -> None:
    async with offloading(grace_ms=1_000) as (trial, place, _):
        topic = await trial.topic(remember_ms=50)
        await trial.stored(topic, [*named(5), b"long" * 60], T0 + 500, payload=LARGE, expires_ms=T0 + 900)
        await trial.mutate(topic, Operation.CANCEL, named(5)[:2])
        assert (await _swept(trial, topic, T0), len(place.files)) == (0, 6)
        assert (await _swept(trial, topic, T0 + 999), len(place.files)) == (0, 6)
        assert (await _swept(trial, topic, T0 + 1_000), len(place.files)) == (2, 4), (
            "what was cancelled, and expired not"
        )
        assert (await _swept(trial, topic, T0 + 2_000), len(place.files)) == (4, 0)


async def test_a_put_under_way_is_no_orphan() -> None:
    """Its payload is seen without a row, then it has one, then that is gone: the grace begins anew."""
    async with offloading(grace_ms=1_000) as (trial, place, store):
        topic = await trial.topic()
        puts = trial.puts([b"a"], payload=LARGE)
        nonce = b"12345678"
        place_of_a = Place(b"a", int(puts.birth[0]), nonce)
        await place.write(place_of_a.name(topic.uid), LARGE)
        assert await _swept(trial, topic, T0) == 0
        puts.payload_bytes, puts.payloads = puts.payloads.sizes, type(puts.payloads).of([place_of_a.pointer])
        await store.inner.put(topic, T0, puts)
        assert await _swept(trial, topic, T0 + 5_000) == 0
        await trial.mutate(topic, Operation.CANCEL, [b"a"])
        assert (await _swept(trial, topic, T0 + 6_000), len(place.files)) == (0, 1)
        assert (await _swept(trial, topic, T0 + 7_000), len(place.files)) == (1, 0)


async def test_what_is_gone_or_damaged_is_told_of_its_message_alone() -> None:
    async with offloading() as (trial, place, _):
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(4), payload=LARGE)
        names = {_id(name): name for name in place.files}
        del place.files[names[named(4)[0]]]
        place.files[names[named(4)[1]]] = LARGE[:-1] + b"?"
        place.files[names[named(4)[2]]] = LARGE[:-1]
        leased = await trial.lease(topic)
        assert leased.rows.ids.tolist() == named(4) and leased.damaged == (0,)
        assert leased.rows.payloads is not None and leased.rows.payloads.tolist() == [b"", b"", b"", LARGE]
        assert set(leased.rows.payload_bytes.tolist()) == {len(LARGE)}


def _id(name: str) -> bytes:
    place = place_of_name(name)
    assert place is not None
    return place.id


async def test_what_cannot_be_read_now_goes_back_unseen_and_rests() -> None:
    async with offloading() as (trial, place, _):
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, [b"large", b"small"], payload=[LARGE, b"s"])
        place.fails = {"read"}
        leased = await trial.lease(topic)
        assert leased.rows.ids.tolist() == [b"small"] and len(leased.grant) == 1
        rows = await trial.scan(topic, ids=trial.puts([b"large"]).ids)
        assert (rows.deliveries.tolist(), rows.holders.tolist()) == ([0], [b""])
        assert (rows.due_ms.tolist(), rows.scheduled_ms.tolist()) == ([T0 + READ_AGAIN_MS], [T0])
        with pytest.raises(StoreUnavailable, match="no read today"):
            await trial.everything(topic)
        place.fails = set()
        again = await trial.lease(topic, now_ms=T0 + READ_AGAIN_MS)
        assert again.rows.payloads is not None and again.rows.payloads.tolist() == [LARGE]


async def test_what_expires_soon_rests_no_longer_than_it_lives() -> None:
    async with offloading() as (trial, place, _):
        topic = await trial.topic(buckets=1)
        expires = [0, T0 + 500, T0 + READ_AGAIN_MS, T0 + 90_000]
        await trial.stored(topic, named(4), payload=LARGE, expires_ms=expires)
        place.fails = {"read"}
        assert not len((await trial.lease(topic)).rows)
        place.fails = set()
        dues = [(await trial.row(topic, id))["due_ms"] for id in named(4)]
        assert dues == [T0 + READ_AGAIN_MS, T0 + 499, T0 + READ_AGAIN_MS - 1, T0 + READ_AGAIN_MS]


async def test_a_lease_says_when_what_could_not_be_read_has_rested() -> None:
    async with offloading() as (trial, place, _):
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, named(2), payload=LARGE, expires_ms=[0, T0 + 2_000])
        place.fails = {"read"}
        await trial.lease(topic, wanted=0, next_due_ms=T0 + 1_999)
        await trial.stored(topic, [b"sooner"], T0 + 1_000)
        await trial.lease(topic, now_ms=T0 + 500, wanted=0, next_due_ms=T0 + 1_000)


async def test_what_cannot_be_handed_back_keeps_nobody_waiting() -> None:
    class Deaf(MemoryStore):
        async def settle(self, *_: Any) -> Any:
            raise StoreUnavailable("not now")

    place = Kept()
    async with Trial(lambda: OffloadingStore(Deaf(), place, 1_024)) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, [b"large", b"small"], payload=[LARGE, b"s"])
        place.fails = {"read"}
        assert (await trial.lease(topic, lease_ms=50)).rows.ids.tolist() == [b"small"]
        place.fails = set()
        assert (await trial.lease(topic, now_ms=T0 + 51)).rows.ids.tolist() == [b"large", b"small"]


async def test_a_slow_place_keeps_others_no_longer_than_half_a_lease() -> None:
    class Slow(Kept):
        async def read(self, name: str) -> bytes:
            self._called("read")
            await asyncio.Event().wait()
            return b""

    place = Slow()
    async with Trial(lambda: OffloadingStore(MemoryStore(), place, 1_024)) as trial:
        topic = await trial.topic(buckets=1)
        await trial.stored(topic, [b"large", b"small"], payload=[LARGE, b"s"])
        leased = await trial.lease(topic, lease_ms=40)
        assert leased.rows.ids.tolist() == [b"small"] and place.calls["read"] == 1
        assert (await trial.scan(topic, ids=trial.puts([b"large"]).ids)).due_ms.tolist() == [T0 + READ_AGAIN_MS]


async def test_a_flood_of_orphans_is_swept_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_store, "MOST_SUSPECTS", 3)
    async with offloading(grace_ms=1_000) as (trial, place, _):
        topic = await trial.topic()
        await trial.stored(topic, named(8), FAR, payload=LARGE)
        await trial.mutate(topic, Operation.CANCEL, named(8))
        swept = [await _swept(trial, topic, T0 + 1_000 * at) for at in range(9)]
        assert (swept[0], sum(swept), len(place.files)) == (0, 8, 0)


def _shard(name: str) -> int:
    return int(name.split("/")[1], 16)


async def _orphaned(trial: Trial, topic: Topic, ids: list[bytes]) -> None:
    """Cancel messages, whose payloads stay."""
    await trial.stored(topic, ids, FAR, payload=LARGE)
    await trial.mutate(topic, Operation.CANCEL, ids)


async def _orphans_leave(trial: Trial, topic: Topic, now_ms: int) -> None:
    """Assert that new orphans are deleted after their grace of 1 s. Those before them have left in the first round."""
    await _orphaned(trial, topic, [b"new", b"newer"])
    swept = [await _swept(trial, topic, now_ms + 1_000 * at) for at in range(4)]
    assert sum(swept) == 2, "orphans wait for suspects that are long gone"


@pytest.mark.parametrize("late", [False, True])
async def test_files_that_somebody_else_deleted_are_no_suspects(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """Another broker's sweep deleted them, or (`late`) a deletion in the background."""
    monkeypatch.setattr(offload_store, "MOST_SUSPECTS", 3)
    async with offloading(grace_ms=1_000) as (trial, place, store):
        topic = await trial.topic()
        await _orphaned(trial, topic, named(3))
        assert await _swept(trial, topic, T0) == 0
        if late:
            store._orphans.delete_later(list(place.files))
            await flushed(trial, store)
        else:
            place.files.clear()
        await _orphans_leave(trial, topic, T0 + 1_000)


@pytest.mark.parametrize("by", ["this broker", "another broker", "this broker during a look"])
async def test_files_of_a_dropped_topic_are_no_suspects(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    monkeypatch.setattr(offload_store, "MOST_SUSPECTS", 3)
    async with offloading(grace_ms=1_000) as (trial, place, store):
        dropped, topic = await trial.topic(), await trial.topic()
        await _orphaned(trial, dropped, named(3))
        if by == "this broker during a look":
            listed = place.names

            async def names(folder: str) -> list[str]:
                found = await listed(folder)
                if found and await store.inner.topics() != [topic]:
                    await store.drop_topic(dropped)
                return found

            monkeypatch.setattr(place, "names", names)
            store._orphans._shards[dropped.uid] = _shard(min(place.files))
            await store.sweep(dropped, T0, 100)
        else:
            assert await _swept(trial, dropped, T0) == 0
            await (store if by == "this broker" else store.inner).drop_topic(dropped)
        if by == "another broker":
            assert await store.topics() == [topic]
        assert not store._orphans._suspects and store._orphans._suspected == 0
        await _orphans_leave(trial, topic, T0)


@pytest.mark.parametrize("call", ["names", "delete"])
async def test_files_that_cannot_be_swept_keep_no_room_from_others(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    class Stuck(Kept):
        stuck = "nowhere"

        async def names(self, folder: str) -> list[str]:
            if call == "names" and folder.startswith(self.stuck):
                raise PayloadsUnavailable("no access")
            return await super().names(folder)

        async def delete(self, names: Sequence[str]) -> None:
            if call == "delete" and any(name.startswith(self.stuck) for name in names):
                raise PayloadsUnavailable("no access")
            await super().delete(names)

    monkeypatch.setattr(offload_store, "MOST_SUSPECTS", 3)
    place = Stuck()
    async with Trial(lambda: OffloadingStore(MemoryStore(), place, 1_024, grace_ms=1_000)) as trial:
        stuck, topic = await trial.topic(), await trial.topic()
        await _orphaned(trial, stuck, named(3))
        assert await _swept(trial, stuck, T0) == 0
        place.stuck = topic_folder(stuck.uid)
        assert await _swept(trial, stuck, T0 + 1_000) == 0
        await _orphans_leave(trial, topic, T0 + 1_000)
        place.stuck = "nowhere"
        assert sum([await _swept(trial, stuck, T0 + 10_000 + 1_000 * at) for at in range(2)]) == 3


async def test_a_flood_of_orphans_waits_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suspects that there is room for keep it until their grace is over."""
    monkeypatch.setattr(offload_store, "MOST_SUSPECTS", 3)
    async with offloading(grace_ms=5_000) as (trial, place, store):
        topic = await trial.topic()
        for at in range(5):
            await _orphaned(trial, topic, [b"%d of %d" % (one, at) for one in range(9)])
            assert await _swept(trial, topic, T0 + 1_000 * at) == 0
            assert sum(map(len, store._orphans._suspects.values())) == store._orphans._suspected == 3
        assert (await _swept(trial, topic, T0 + 5_000), len(place.files)) == (3, 42)


async def test_a_suspect_keeps_its_room_from_newer_files_of_its_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_store, "MOST_SUSPECTS", 1)
    async with offloading(grace_ms=2_000) as (trial, place, _):
        topic = await trial.topic()
        shards: dict[int, bytes] = {}
        both = next(
            (shards[at], id) for id in named(SHARDS + 1) if shards.setdefault(at := crc32(id) % SHARDS, id) != id
        )
        await _orphaned(trial, topic, [both[0]])
        assert await _swept(trial, topic, T0) == 0
        (old,) = place.files
        await _orphaned(trial, topic, [both[1]])
        place.files[old] = place.files.pop(old)  # listed last from now on
        assert [await _swept(trial, topic, T0 + 1_000 * at) for at in (1, 2)] == [0, 1]
        assert old not in place.files and len(place.files) == 1


async def test_a_sweep_stands_though_its_look_for_orphans_fails(caplog: pytest.LogCaptureFixture) -> None:
    class Tired(MemoryStore):
        tired: StoreError | None = None

        async def scan(self, *call: Any) -> Any:
            if self.tired is not None:
                raise self.tired
            return await super().scan(*call)

    inner, place = Tired(), Kept()
    async with Trial(lambda: OffloadingStore(inner, place, 1_024, grace_ms=0)) as trial:
        topic = await trial.topic()
        await _orphaned(trial, topic, [b"orphan"])
        (shard,) = [_shard(name) for name in place.files]
        assert isinstance(trial.store, OffloadingStore)
        for tired in (StoreUnavailable("not now"), StoreUnknown("the answer was lost")):
            await trial.stored(topic, named(2), T0 + 5, expires_ms=T0 + 9)
            trial.store._orphans._shards[topic.uid] = shard
            inner.tired = tired
            assert await trial.store.sweep(topic, T0 + 10, 100) == Swept(expired=2)
            inner.tired = None
            assert f"payloads of {topic.name} could not be swept: {tired.reason}" in caplog.text
        assert len(place.files) == 1 and await _swept(trial, topic, T0 + 10) == 1


async def test_a_store_that_takes_little_gives_more_away() -> None:
    class Small(MemoryStore):
        capabilities = dataclasses.replace(MemoryStore.capabilities, payload_limit_bytes=2_000)

    place = Kept()
    async with Trial(lambda: OffloadingStore(Small(), place, 10_000)) as trial:
        topic = await trial.topic()
        assert trial.store.capabilities.payload_limit_bytes == MAX_PAYLOAD_BYTES
        await trial.stored(topic, [b"a", b"b"], payload=[b"x" * 2_000, b"x" * 2_001])
        assert [len(data) for data in place.files.values()] == [2_001]


async def test_what_cannot_be_written_is_unavailable_by_itself() -> None:
    async with offloading() as (trial, place, _):
        topic = await trial.topic()
        place.fails = {"write"}
        answers = await trial.put(topic, [b"a", b"large", b"b"], payload=[b"a", LARGE, b"b"])
        assert statuses(answers) == [Status.OK, Status.UNAVAILABLE, Status.OK]
        assert answers.details == {1: "no write today"} and answers.version.tolist() == [1, 0, 1]
        assert sorted(await trial.everything(topic)) == [b"a", b"b"]


async def test_a_put_that_the_store_lost_leaves_its_payload_to_the_sweep() -> None:
    class Lost(MemoryStore):
        async def put(self, *_: Any) -> Any:
            raise StoreUnknown("the answer was lost")

    place = Kept()
    async with Trial(lambda: OffloadingStore(Lost(), place, 1_024)) as trial:
        topic = await trial.topic()
        with pytest.raises(StoreUnknown):
            await trial.put(topic, [b"a"], payload=LARGE)
        assert len(place.files) == 1


async def test_a_message_whose_outcome_is_unknown_keeps_its_payload() -> None:
    """The store lost the answer of a part of the batch, and that part stands."""

    class Half(MemoryStore):
        async def put(self, *call: Any) -> Any:
            answers = await super().put(*call)
            answers.status[0], answers.version[0] = Status.UNKNOWN.code, 0
            return answers

    place = Kept()
    async with Trial(lambda: OffloadingStore(Half(), place, 1_024)) as trial:
        topic = await trial.topic()
        assert statuses(await trial.put(topic, [b"a", b"b"], payload=LARGE)) == [Status.UNKNOWN, Status.OK]
        assert isinstance(trial.store, OffloadingStore)
        await flushed(trial, trial.store)
        leased = await trial.lease(topic)
        assert leased.damaged == () and leased.rows.payloads is not None
        assert leased.rows.payloads.tolist() == [LARGE, LARGE]


async def test_dropping_a_topic_deletes_its_payloads() -> None:
    async with offloading() as (trial, place, _):
        topic, other = await trial.topic(), await trial.topic()
        await trial.stored(topic, named(3), payload=LARGE)
        await trial.stored(other, named(2), payload=LARGE)
        await trial.store.drop_topic(topic)
        assert len(place.files) == 2


async def test_a_drop_whose_answer_was_lost_deletes_the_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeat of it finds no topic."""
    async with offloading() as (trial, place, _):
        topic = await trial.topic()
        await trial.stored(topic, named(3), payload=LARGE)
        assert isinstance(trial.store, OffloadingStore)
        inner = trial.store.inner
        drop_topic = inner.drop_topic

        async def losing(asked: Topic) -> bool:
            await drop_topic(asked)
            raise StoreUnknown("the answer was lost")

        with monkeypatch.context() as patched:
            patched.setattr(inner, "drop_topic", losing)
            with pytest.raises(StoreUnknown):
                await trial.store.drop_topic(topic)
        assert not place.files
