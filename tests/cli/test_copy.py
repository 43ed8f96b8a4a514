"""`timeline copy`: a topic with payloads, tags, expiries and dead letters from one store into another, proven, and gone
on with after it broke off."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import TIMELINE, Call, plain_environment
from timeline.model import Operation, State, Topic, encode_headers
from timeline.storage_plugins import open_store
from timeline.storage_plugins.conformance.trial import T0, Trial, by_id, named
from timeline.storage_plugins.contract import ScanFilter, Store, StoreRefused, StoreUnavailable
from timeline.storage_plugins.copying import TopicCopy, topic_of
from timeline.storage_plugins.memory import MemoryStore
from timeline.storage_plugins.offload import SHARDS
from timeline.storage_plugins.offload.files import PayloadFiles
from timeline.storage_plugins.offload.store import OffloadingStore
from timeline.storage_plugins.sqlite import SqliteStore

FAR = 4_000_000_000_000
KEPT = (
    "birth",
    "groups",
    "tags",
    "payload_sum",
    "payload_bytes",
    "payloads",
    "headers",
    "expires_ms",
    "dead",
    "died_ms",
)


async def furnished(trial: Trial, count: int = 2_500) -> Topic:
    """A topic with messages of all kinds, some large, and dead letters; nothing of it leased or expired."""
    topic = await trial.topic(buckets=8, max_payload_bytes=4 << 20, max_deliveries=3)
    headers = encode_headers({"gate": "é"})
    ids = named(count)
    payloads = [b"%d" % at * (at % 50) for at in range(count)]
    tags = [b"spring" if at % 2 else b"" for at in range(count)]
    groups = [b"ops" if at % 3 else b"default" for at in range(count)]
    due_ms = [T0 + at % 700 for at in range(count)]
    expires = [FAR if at % 5 == 0 else 0 for at in range(count)]
    more: dict[str, Any] = {"payload": payloads, "headers": headers, "tag": tags, "group": groups}
    await trial.stored(topic, ids, due_ms, expires_ms=expires, **more)
    await trial.stored(topic, [b"large", b"larger"], T0 + 900_000, payload=[b"l" * 300_000, b"L" * 2_000_000])
    leased = (await trial.lease(topic, 40, now_ms=T0 + 29)).rows
    reason = [f"reason {at}".encode() for at in range(len(leased))]
    await trial.settle(topic, Operation.BURY, leased, now_ms=T0 + 39, reason=reason)
    ran_out = (await trial.lease(topic, 5, now_ms=T0 + 40, lease_ms=5)).rows
    assert (len(leased), len(ran_out)) == (min(40, count // 2), 5)
    return topic


async def everything(store: Store, topic: Topic, now_ms: int = T0 + 100) -> dict[bytes, dict[str, Any]]:
    found: dict[bytes, dict[str, Any]] = {}
    cursor: bytes | None = b""
    while cursor is not None:
        page = await store.scan(topic, now_ms, ScanFilter(frozenset(set(State) - {State.ABSENT})), cursor, 1_000, True)
        found |= by_id(page.rows)
        cursor = page.cursor
    return found


Make = Callable[[Path], Store]
MAKE: dict[str, Make] = {
    "memory": lambda _: MemoryStore(),
    "sqlite": lambda folder: SqliteStore(f"sqlite:///{folder}/b.db"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
async def test_everything_goes_over(tmp_path: Path, kind: str) -> None:
    target = MAKE[kind](tmp_path)
    await target.open()
    async with Trial(MemoryStore) as trial:
        topic = await furnished(trial)
        copying = TopicCopy(trial.store, target, topic, lambda: T0 + 100)
        await copying.prepare()
        said: list[int] = []
        done = await copying.run(said.append)
        assert (done.copied, done.there, done.dead, done.failed) == (2_502, 0, 40, 0) and sum(said) == 2_502
        compared = await copying.compare()
        assert compared.same and compared.source.messages == 2_502 and compared.source.payload_bytes > 2_300_000
        assert (await topic_of(target, topic.name)).settings.paused
        await copying.finish()
        into = await topic_of(target, topic.name)
        assert into.settings == topic.settings
        before, after = await everything(trial.store, topic), await everything(target, into)
        assert before.keys() == after.keys()
        for id, row in before.items():
            assert {name: row[name] for name in KEPT} == {name: after[id][name] for name in KEPT}
            assert after[id]["scheduled_ms"] == (
                row["due_ms"] if row["holders"] and not row["dead"] else row["scheduled_ms"]
            )
            assert after[id]["due_ms"] == after[id]["scheduled_ms"] or row["dead"]
    await target.close()


class Breaks(MemoryStore):
    """Breaks off at the `after`-th put or settle."""

    after = 0

    async def _counted(self) -> None:
        self.after -= 1
        if self.after == 0:
            raise StoreUnavailable("the cable was pulled")

    async def put(self, *arguments: Any) -> Any:
        await self._counted()
        return await super().put(*arguments)

    async def settle(self, *arguments: Any) -> Any:
        await self._counted()
        return await super().settle(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
async def test_what_broke_off_goes_on(after: int) -> None:
    target = Breaks()
    await target.open()
    async with Trial(MemoryStore) as trial:
        topic = await furnished(trial)
        target.after = after
        copying = TopicCopy(trial.store, target, topic, lambda: T0 + 100)
        await copying.prepare()
        with pytest.raises(StoreUnavailable):
            await copying.run()
        first = copying.done.copied
        again = TopicCopy(trial.store, target, topic, lambda: T0 + 100)
        await again.prepare()
        done = await again.run()
        assert done.failed == 0 and done.copied + done.there == 2_502 and done.there >= first
        assert (await again.compare()).same


async def test_dead_letters_go_over_whatever_their_times() -> None:
    """One that would have expired by the time another was due, some that died together, some that a copy leased before
    it broke off."""
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic = await trial.topic(buckets=2)
        await trial.stored(topic, [b"early", b"late"], [T0 + 1, T0 + 500], expires_ms=[T0 + 50, 0])
        await trial.stored(topic, named(9), [T0 + 600 + at for at in range(9)])
        for now_ms, died_ms in ((T0 + 1, T0 + 2), (T0 + 500, T0 + 501), (T0 + 700, T0 + 701)):
            leased = (await trial.lease(topic, now_ms=now_ms)).rows
            reason = [b"of " + id for id in leased.ids.tolist()]
            await trial.settle(topic, Operation.BURY, leased, now_ms=died_ms, reason=reason)
        copying = TopicCopy(trial.store, other.store, topic, lambda: T0 + 1_000)
        await copying.prepare()
        into = await topic_of(other.store, topic.name)
        rows = await trial.scan(topic, states={State.DEAD}, now_ms=T0 + 1_000, payload=True)
        settle, other.store.settle = other.store.settle, _refused  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await copying.run()
        other.store.settle = settle  # type: ignore[method-assign]
        assert {row["holders"] for row in (await everything(other.store, into)).values()} == {b"timeline-copy"}
        again = TopicCopy(trial.store, other.store, topic, lambda: T0 + 1_000)
        await again.prepare()
        done = await again.run()
        assert (len(rows), done.dead, done.failed, done.reasons) == (11, 11, 0, {})
        assert (await again.compare()).same


async def _refused(*_: Any) -> Any:
    raise StoreUnavailable("the cable was pulled")


async def test_what_differs_is_named() -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic = await furnished(trial, 60)
        copying = TopicCopy(trial.store, other.store, topic, lambda: T0 + 100)
        await copying.prepare()
        await copying.run()
        into = await topic_of(other.store, topic.name)
        rows = await everything(other.store, into)
        moved, gone = sorted(id for id, row in rows.items() if not row["dead"] and row["groups"] == b"default")[:2]
        await other.mutate(into, Operation.MOVE, [moved], T0 + 5_000)
        await other.mutate(into, Operation.CANCEL, [gone])
        await other.put(into, [b"new"], T0 + 5_000)
        compared = await copying.compare()
        assert not compared.same and compared.differing == 3
        assert compared.reasons == {moved: "due_ms differ", gone: "only in the source", b"new": "only in the target"}


async def test_another_message_under_an_id_stays() -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic = await trial.topic()
        await trial.stored(topic, [b"a", b"b"], FAR, payload=[b"ours", b"same"])
        copying = TopicCopy(trial.store, other.store, topic, lambda: T0)
        await copying.prepare()
        into = await topic_of(other.store, topic.name)
        other._counter += 1_000
        await other.stored(into, [b"a"], FAR, payload=b"theirs")
        done = await copying.run()
        assert (done.copied, done.reasons) == (1, {b"a": "another message has this id there"})
        assert (await everything(other.store, into))[b"a"]["payloads"] == b"theirs"


async def test_a_damaged_payload_is_an_error_of_its_message() -> None:
    class Damaged(MemoryStore):
        async def scan(self, *arguments: Any) -> Any:
            page = await super().scan(*arguments)
            if page.rows.payloads is not None:
                page.rows.payloads = type(page.rows.payloads).of([b"x" * size for size in page.rows.payload_bytes])
            return page

    async with Trial(Damaged) as trial, Trial(MemoryStore) as other:
        topic = await trial.topic()
        await trial.stored(topic, [b"a", b"b"], FAR, payload=[b"abc", b"xxx"])
        copying = TopicCopy(trial.store, other.store, topic, lambda: T0)
        await copying.prepare()
        done = await copying.run()
        assert (done.copied, done.reasons) == (1, {b"a": "its payload is gone or damaged in the source"})


async def test_a_source_that_is_not_told_where_payloads_lie_is_told_apart() -> None:
    inner = MemoryStore()
    async with Trial(lambda: OffloadingStore(inner, PayloadFiles("memory://copying"), 1_024)) as trial:
        topic = await trial.topic()
        await trial.stored(topic, [b"a", b"b"], FAR, payload=[b"x" * 2_000, b"small"])
        async with Trial(MemoryStore) as other:
            copying = TopicCopy(inner, other.store, topic, lambda: T0)
            await copying.prepare()
            done = await copying.run()
            assert (done.copied, list(done.reasons)) == (1, [b"a"]) and "?payloads=" in done.reasons[b"a"]
            again = TopicCopy(trial.store, other.store, topic, lambda: T0)
            await again.prepare()
            assert (await again.run()).copied == 1 and (await again.compare()).same


@pytest.mark.slow
async def test_two_stores_with_one_place_for_payloads_are_not_in_each_others_way(tmp_path: Path) -> None:
    """Neither the source's sweep nor its drop takes a payload from the target."""

    def store() -> OffloadingStore:
        return OffloadingStore(MemoryStore(), PayloadFiles(f"file://{tmp_path}"), 1_024, grace_ms=1_000)

    async with Trial(store) as trial, Trial(store) as other:
        topic = await trial.topic()
        await trial.stored(topic, named(3), FAR, payload=b"x" * 2_000)
        copying = TopicCopy(trial.store, other.store, topic, lambda: T0)
        await copying.prepare()
        assert (await copying.run()).copied == 3
        into = await topic_of(other.store, topic.name)
        for now_ms in (T0, T0 + 1_000):
            assert sum([(await trial.store.sweep(topic, now_ms, 100)).orphans for _ in range(SHARDS)]) == 0
        await trial.store.drop_topic(topic)
        rows = await everything(other.store, into)
        assert [row["payloads"] for row in rows.values()] == [b"x" * 2_000] * 3


# ── the command ──


async def _file_of(path: Path, count: int = 300) -> Topic:
    store = SqliteStore(f"sqlite:///{path}")
    trial = Trial(lambda: store)
    await store.open()
    topic = await trial.store.create_topic(trial.record(buckets=4))
    for start in range(0, count, 10_000):
        await trial.stored(topic, named(count)[start : start + 10_000], FAR, payload=b"payload")
    await store.close()
    return topic


@pytest.mark.slow
async def test_the_command(tmp_path: Path, call: Call) -> None:
    topic = await _file_of(tmp_path / "a.db")
    source, target = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    done = await _called(call, "copy", source, target, "--topic", topic.name, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert (told["ok"], told["copied"], told["there"], told["differing"]) == (True, 300, 0, 0)
    assert told["source"] == told["target"] and told["source"]["messages"] == 300
    again = await _called(call, "copy", source, target, "--topic", topic.name)
    assert again.code == 0 and f"{topic.name} is there already, whole: 300 messages" in again.out
    again = await _called(call, "copy", source, target, "--topic", topic.name, "--json")
    assert (again.code, again.json[0]["ok"], again.json[0]["copied"], again.json[0]["there"]) == (0, True, 0, 300)
    for arguments, code, says in (
        ((source, source, "--topic", topic.name), 4, "in use|one and the same"),
        ((source, target, "--topic", "nosuch"), 4, "has no topic 'nosuch'"),
        ((source, target), 2, "--topic NAME"),
        ((source, "postgrsql://x", "--topic", "a"), 2, "no storage plugin"),
        ((f"sqlite:///{tmp_path}/ab.db", target, "--topic", "a"), 4, f"there is no file {tmp_path}/ab.db"),
        ((f"sqlite:///{tmp_path}/ab.db?payloads=memory://a", target, "--topic", "a"), 4, "there is no file"),
    ):
        refused = await _called(call, "copy", *arguments)
        assert refused.code == code and any(word in refused.err for word in says.split("|")), refused.err
    assert not list(tmp_path.glob("ab.db*"))


@pytest.mark.slow
async def test_several_topics_are_run_again_and_one_that_is_refused_keeps_none_from_it(
    tmp_path: Path, call: Call
) -> None:
    source, target = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    store = await open_store(source)
    trial = Trial(lambda: store)
    topics = [await trial.store.create_topic(trial.record(buckets=2)) for _ in range(3)]
    for topic in topics:
        await trial.stored(topic, named(3), FAR, payload=b"payload")
    await store.close()
    first, second, third = (topic.name for topic in topics)
    for name in (first, second):
        assert (await _called(call, "copy", source, target, "--topic", name)).code == 0
    store = await open_store(target)
    await Trial(lambda: store).mutate(await topic_of(store, second), Operation.CANCEL, named(1))
    await store.close()
    every = [part for name in (first, second, third) for part in ("--topic", name)]
    again = await _called(call, "copy", source, target, *every, "--json")
    assert again.code == 4 and f"the topic {second!r} of the target is live, and not what the source has" in again.err
    assert [(told["topic"], told["copied"], told["there"]) for told in again.json] == [(first, 0, 3), (third, 3, 0)]


async def test_what_brokers_may_be_serving_is_refused_unless_it_is_paused_or_said_to_be_live() -> None:
    class Shared(MemoryStore):
        capabilities = replace(MemoryStore.capabilities, shared=True)

    async with Trial(Shared) as trial, Trial(MemoryStore) as other:
        topic = await trial.topic()
        await trial.stored(topic, named(3), FAR)
        with pytest.raises(StoreRefused, match=f"not paused.*'timeline topic pause {topic.name}'.*--live"):
            await TopicCopy(trial.store, other.store, topic, lambda: T0).prepare()
        assert await other.store.topics() == []
        await TopicCopy(trial.store, other.store, _paused(topic), lambda: T0).prepare()
        copying = TopicCopy(trial.store, other.store, topic, lambda: T0, live=True)
        await copying.prepare()
        assert (await copying.run()).copied == 3


@pytest.mark.slow
async def test_the_command_names_what_failed(tmp_path: Path, call: Call) -> None:
    topic = await _file_of(tmp_path / "a.db", 3)
    source, target = f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db"
    store = await open_store(target)
    trial = Trial(lambda: store)
    trial._counter = 1 << 50
    into = await store.create_topic(_paused(topic))
    await trial.stored(into, named(1), FAR, payload=b"other")
    await store.close()
    failed = await _called(call, "copy", source, target, "--topic", topic.name)
    assert failed.code == 1 and "another message has this id there" in failed.out and "stays paused" in failed.out


def _paused(topic: Topic) -> Topic:
    return replace(topic, settings=replace(topic.settings, paused=True))


async def test_leased_messages_are_refused_or_copied_as_due_later(tmp_path: Path) -> None:
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic = await trial.topic()
        await trial.stored(topic, named(3))
        await trial.lease(topic, 1, lease_ms=50_000)
        with pytest.raises(Exception, match=r"1 messages of .* are leased"):
            await TopicCopy(trial.store, other.store, topic, lambda: T0).prepare()
        copying = TopicCopy(trial.store, other.store, topic, lambda: T0, leased=True)
        await copying.prepare()
        assert (await copying.run()).copied == 3 and (await copying.compare()).same
        rows = await everything(other.store, await topic_of(other.store, topic.name))
        assert sorted(row["due_ms"] for row in rows.values()) == [T0, T0, T0 + 50_000]


@pytest.mark.parametrize("now_ms", [T0 + 10, T0 + 900], ids=["before its expiry", "after its expiry"])
async def test_a_message_whose_lease_outlives_its_expiry_is_left_behind(now_ms: int) -> None:
    """In the target it would be due at its lease's end, when it has expired. So it does not keep the copy unfinished. A
    lease that ends before the expiry is copied."""
    async with Trial(MemoryStore) as trial, Trial(MemoryStore) as other:
        topic = await trial.topic()
        await trial.stored(topic, named(4), T0, expires_ms=[T0 + 500, T0 + 1_000, T0 + 1_001, 0])
        assert len((await trial.lease(topic, 4, lease_ms=1_000)).rows) == 4
        copying = TopicCopy(trial.store, other.store, topic, lambda: now_ms, leased=True)
        await copying.prepare()
        done = await copying.run()
        assert (done.copied, done.expired, done.failed) == (2, 2, 0), done.reasons
        assert (await copying.compare()).same
        rows = await everything(other.store, await topic_of(other.store, topic.name))
        assert sorted(row["expires_ms"] for row in rows.values()) == [0, T0 + 1_001]


@pytest.mark.prove
@pytest.mark.slow
@pytest.mark.processes
async def test_killed_in_the_middle_it_goes_on(tmp_path: Path, call: Call) -> None:
    """kill -9 once its progress shows that it is under way: the same command copies the rest, and nothing twice."""
    count = 40_000
    topic = await _file_of(tmp_path / "a.db", count)
    command = ("copy", f"sqlite:///{tmp_path}/a.db", f"sqlite:///{tmp_path}/b.db", "--topic", topic.name)
    ours, theirs = pty.openpty()
    with subprocess.Popen([*TIMELINE, *command], stderr=theirs, env=plain_environment()) as process:
        os.close(theirs)
        shown = ""
        while not (under_way := re.search(rf"copied of {topic.name} ([1-9][\d,]*) of {count:,}  [\d,]+/s", shown)):
            shown += os.read(ours, 4_096).decode()
        process.kill()
    os.close(ours)
    done = await _called(call, *command, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["ok"] and told["copied"] + told["there"] == count == told["target"]["messages"]
    assert told["copied"] > 0 and told["there"] >= int(under_way[1].replace(",", ""))


async def _called(call: Call, *arguments: str) -> Any:
    """The command in a thread: it runs an event loop of its own."""
    import asyncio

    return await asyncio.to_thread(call, *arguments)
