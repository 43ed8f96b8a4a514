"""Workers of one machine as members of each other, through the supervisor's registry: without any process."""

from __future__ import annotations

import asyncio
import json

import pytest

from timeline.sync import JoinState, Member, MembershipChange, MembershipRefused
from timeline.sync.workers import SILENT_MS, Message, WorkerMembership, WorkerRegistry

CLUSTER = "c" * 32
TOPIC = 5


class Machine:
    """A supervisor's registry and its workers, with lines of JSON between them as pipes would carry them."""

    def __init__(self) -> None:
        self.registry, self.now_ms = WorkerRegistry(), 0.0
        self.workers: dict[str, WorkerMembership] = {}
        self.changes: dict[str, list[MembershipChange]] = {}
        self.cut: set[str] = set()

    def add(self, name: str) -> WorkerMembership:
        self.changes[name] = []
        made = self.workers[name] = WorkerMembership(lambda message: self._up(name, message))
        made.on_change(self.changes[name].append)
        return made

    async def joined(self, name: str, cluster: str = CLUSTER) -> WorkerMembership:
        made = self.add(name)
        await made.start(Member(name, f"{name}:1", "v"), cluster)
        return made

    def _up(self, name: str, message: Message) -> None:
        if name in self.cut:
            return
        told, news = self.registry.hear(name, json.loads(json.dumps(message)), self.now_ms)
        if told is None and news:
            self.tell_all()
        elif told is not None and news:
            for other, worker in self.workers.items():
                if other != name:
                    worker.hear(told)
        elif told is not None:
            self.workers[name].hear(told)

    def tell_all(self) -> None:
        state = json.dumps(self.registry.state)
        for worker in self.workers.values():
            worker.hear(json.loads(state))

    def end(self, name: str) -> None:
        del self.workers[name]
        if self.registry.gone(name):
            self.tell_all()


async def test_they_know_each_other_and_deal_every_bucket_once() -> None:
    machine = Machine()
    a, b = await machine.joined("w-1"), await machine.joined("w-2")
    assert [member.name for member in a.members()] == [member.name for member in b.members()] == ["w-1", "w-2"]
    assert a.state.join_state is b.state.join_state is JoinState.JOINED
    assert a.buckets(TOPIC, 64) == ()
    assert a.owner(TOPIC, 3, 64) is None
    a.host(TOPIC, "t", [b"one"])
    assert a.buckets(TOPIC, 64) is None  # it hosts all there is, as it knows at once
    b.host(TOPIC, "t", [b"two", b"three"])
    await asyncio.sleep(0)
    assert dict(a.hosting(TOPIC)) == dict(b.hosting(TOPIC)) == {"w-1": 1, "w-2": 2}
    mine, theirs = a.buckets(TOPIC, 64), b.buckets(TOPIC, 64)
    assert mine is not None and theirs is not None
    assert sorted([*mine, *theirs]) == list(range(64))
    assert len(mine) < len(theirs)
    for bucket in range(64):
        owner = a.owner(TOPIC, bucket, 64)
        assert owner == b.owner(TOPIC, bucket, 64) == Member(*("w-1", "w-1:1", "v") if bucket in mine else
                                                             ("w-2", "w-2:1", "v"))  # fmt: skip
    machine.end("w-2")
    assert a.buckets(TOPIC, 64) is None
    assert [member.name for member in a.members()] == ["w-1"]
    assert MembershipChange.MEMBERS in machine.changes["w-1"]


async def test_what_is_said_several_times_in_a_moment_is_told_once() -> None:
    machine = Machine()
    a, _ = await machine.joined("w-1"), await machine.joined("w-2")
    machine.changes["w-2"].clear()
    for consumers in ([b"1"], [b"1", b"2"], [], [b"1"], [b"1"]):
        a.host(TOPIC, "t", consumers)
    await asyncio.sleep(0)
    assert machine.changes["w-2"] == [MembershipChange.MEMBERS]
    a.host(TOPIC, "t", [])
    await asyncio.sleep(0)
    assert dict(machine.workers["w-2"].hosting(TOPIC)) == {}


async def test_changed_topics_are_told_to_the_others() -> None:
    machine = Machine()
    a, _ = await machine.joined("w-1"), await machine.joined("w-2")
    for seen in machine.changes.values():
        seen.clear()
    a.topics_changed()
    assert machine.changes == {"w-1": [], "w-2": [MembershipChange.TOPICS]}


async def test_who_says_nothing_deals_nothing_until_it_says_something() -> None:
    machine = Machine()
    a, b = await machine.joined("w-1"), await machine.joined("w-2")
    for worker in (a, b):
        worker.host(TOPIC, "t", [b"c"])
    await asyncio.sleep(0)
    machine.now_ms = SILENT_MS + 1
    machine.cut.add("w-2")
    machine._up("w-1", {"say": "beat"})
    assert machine.registry.fall_silent(machine.now_ms) == ["w-2"]
    assert machine.registry.fall_silent(machine.now_ms) == []
    machine.tell_all()
    assert a.buckets(TOPIC, 64) is None
    machine.cut.clear()
    machine._up("w-2", {"say": "beat"})
    assert len(a.buckets(TOPIC, 64) or ()) + len(b.buckets(TOPIC, 64) or ()) == 64


async def test_one_with_another_store_is_refused() -> None:
    machine = Machine()
    await machine.joined("w-1")
    with pytest.raises(MembershipRefused, match="another store"):
        await machine.joined("w-2", cluster="d" * 32)
    assert [member.name for member in machine.workers["w-1"].members()] == ["w-1"]


async def test_what_is_said_to_all_is_no_answer_to_who_asks_to_join() -> None:
    """The others' news may come before the answer: whoever took them for it would be a cluster of its own."""
    machine = Machine()
    await machine.joined("w-1")
    machine.cut.add("w-2")
    worker = machine.add("w-2")
    starting = asyncio.ensure_future(worker.start(Member("w-2", "w-2:1"), "d" * 32))
    await asyncio.sleep(0)
    machine.tell_all()
    await asyncio.sleep(0)
    assert worker.state.join_state is JoinState.JOINING and not starting.done()
    machine.cut.clear()
    machine._up("w-2", {"say": "join", "cluster": "d" * 32, "name": "w-2", "address": "w-2:1", "version": ""})
    with pytest.raises(MembershipRefused, match="another store"):
        await starting


async def test_once_all_have_ended_they_may_begin_on_another_store() -> None:
    machine = Machine()
    await machine.joined("w-1")
    machine.end("w-1")
    again = await machine.joined("w-1", cluster="d" * 32)
    assert again.state.join_state is JoinState.JOINED
    with pytest.raises(MembershipRefused, match="another store"):
        await machine.joined("w-2")


async def test_joining_waits_for_the_supervisor_and_its_end_freezes_what_is_believed() -> None:
    machine = Machine()
    other = await machine.joined("w-1")
    machine.cut.add("w-2")
    worker = machine.add("w-2")
    starting = asyncio.ensure_future(worker.start(Member("w-2", "w-2:1"), CLUSTER))
    await asyncio.sleep(0)
    assert worker.state.join_state is JoinState.JOINING and "supervisor" in worker.state.reason
    machine.cut.clear()
    machine._up("w-2", {"say": "join", "cluster": CLUSTER, "name": "w-2", "address": "w-2:1", "version": ""})
    await starting
    other.host(TOPIC, "t", [b"c"])
    await asyncio.sleep(0)
    worker.lost()
    assert worker.state.join_state is JoinState.FROZEN and "gone" in worker.state.reason
    assert [member.name for member in worker.members()] == ["w-1", "w-2"]
    assert machine.changes["w-2"][-1] is MembershipChange.JOIN_STATE
    await worker.stop()
    await worker.stop()
    assert worker.state.join_state is JoinState.APART
    assert [member.name for member in other.members()] == ["w-1"]


async def test_one_that_begins_again_under_its_name_hosts_nothing_at_first() -> None:
    machine = Machine()
    a, b = await machine.joined("w-1"), await machine.joined("w-2")
    b.host(TOPIC, "t", [b"c"])
    await asyncio.sleep(0)
    machine.end("w-2")
    again = await machine.joined("w-2")
    assert dict(a.hosting(TOPIC)) == dict(again.hosting(TOPIC)) == {}
