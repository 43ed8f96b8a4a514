"""Hints to other brokers: they gather, they are bounded, and who does not answer costs nobody anything."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from tests.broker.machines import Lasting, Register, Registered
from timeline.broker.cluster import BrokerPeers, ClusterHints, MembershipLog
from timeline.broker.fairness import LoopScheduler
from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.broker.runtime import Runtime, Tasks
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.metrics import Metrics
from timeline.model import Topic, TopicSettings
from timeline.sync import Member
from timeline.wire import Fault, Hint, Hinted, TransportError, decode_as, encode

B2, B3 = Member("b2", "b2:9000"), Member("b3", "b3:9000")


class Way:
    """A way to a broker that hears, or does not, when the test lets it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.heard: list[dict[int, int]] = []
        self.deaf = self.closed = False
        self.busy = 0
        self.let = asyncio.Event()
        self.let.set()
        self.asked = asyncio.Event()

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        hint = decode_as(frame, Hint)
        assert (method, hint.broker) == ("Hint", "b1") and timeout_s > 0
        self.asked.set()
        await self.let.wait()
        if self.busy:
            self.busy -= 1
            raise TransportError(Fault.OVERLOADED, "too much to do")
        if self.deaf:
            raise TransportError(Fault.BROKEN, "nobody there")
        self.heard.append(dict(zip(hint.topic_uid.tolist(), hint.due_ms.tolist(), strict=True)))
        return encode(Hinted(len(hint.topic_uid)))

    async def close(self) -> None:
        self.closed = True


def runtime(limits: Limits, metrics: Metrics, tasks: Tasks) -> Runtime:
    clock = Clock()
    return Runtime(clock, limits, metrics, tasks, LoopScheduler(clock.monotonic_ms))


class Scene:
    def __init__(self, waiting: int = 10) -> None:
        self.ways: dict[str, Way] = {}
        self.metrics = Metrics()
        self.tasks = Tasks(lambda name, error: None)
        limits = Limits(hints_waiting=waiting, hint_pace_ms=0, hint_rest_ms=0, throttle_ms=0)
        self.runtime = runtime(limits, self.metrics, self.tasks)
        self.peers = BrokerPeers(self.runtime, "b1", self._make)

    def _make(self, address: str) -> Way:
        way = self.ways[address] = Way(address)
        return way

    def counted(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("timeline_hints_total", {"outcome": outcome}) or 0.0

    async def told(self) -> None:
        """Lets tasks run until nothing is under way."""
        for _ in range(100):
            await asyncio.sleep(0)


async def test_hints_gather_while_a_call_is_under_way_and_the_earliest_stands_for_all() -> None:
    scene = Scene()
    scene.peers.tell(B2, 1, 500)
    way = scene.ways["b2:9000"]
    way.let.clear()
    await way.asked.wait()
    for uid, due_ms in ((1, 900), (1, 400), (2, 700), (1, 600)):
        scene.peers.tell(B2, uid, due_ms)
    way.let.set()
    await scene.told()
    assert way.heard == [{1: 500}, {1: 400, 2: 700}]
    assert (scene.counted("sent"), scene.counted("dropped")) == (3.0, 0.0)
    await scene.tasks.cancel()


async def test_a_broker_that_does_not_answer_holds_up_no_other_and_its_hints_are_dropped() -> None:
    scene = Scene()
    scene.peers.tell(B2, 1, 500)
    scene.ways["b2:9000"].let.clear()
    scene.peers.tell(B3, 1, 500)
    await scene.told()
    assert scene.ways["b3:9000"].heard == [{1: 500}]
    scene.ways["b2:9000"].deaf = True
    scene.ways["b2:9000"].let.set()
    await scene.told()
    assert scene.counted("dropped") == 1.0
    scene.ways["b2:9000"].deaf = False
    scene.peers.tell(B2, 1, 600)
    await scene.told()
    assert scene.ways["b2:9000"].heard == [{1: 600}]
    await scene.tasks.cancel()


async def test_what_a_busy_broker_refuses_is_told_again_with_what_has_come_since() -> None:
    scene = Scene()
    scene.peers.tell(B2, 1, 500)
    way = scene.ways["b2:9000"]
    way.busy = 2
    way.let.clear()
    await way.asked.wait()
    scene.peers.tell(B2, 1, 600)
    scene.peers.tell(B2, 2, 700)
    way.let.set()
    await scene.told()
    assert way.heard == [{1: 500, 2: 700}]
    assert (scene.counted("sent"), scene.counted("dropped")) == (2.0, 0.0)
    await scene.tasks.cancel()


async def test_no_more_topics_wait_than_may() -> None:
    scene = Scene(waiting=3)
    scene.peers.tell(B2, 0, 1)
    way = scene.ways["b2:9000"]
    way.let.clear()
    await way.asked.wait()
    for uid in range(1, 6):
        scene.peers.tell(B2, uid, 500)
    scene.peers.tell(B2, 1, 400)  # it waits already
    assert scene.counted("dropped") == 2.0
    way.let.set()
    await scene.told()
    assert way.heard[1:] == [{1: 400, 2: 500, 3: 500}]
    await scene.tasks.cancel()


async def test_who_is_gone_or_has_moved_is_parted_with() -> None:
    scene = Scene()
    scene.peers.tell(B2, 1, 500)
    scene.peers.tell(B3, 1, 500)
    await scene.told()
    scene.peers.keep([B3])
    scene.peers.tell(Member("b3", "elsewhere:9000"), 1, 600)
    await scene.told()
    assert scene.ways["b2:9000"].closed and scene.ways["b3:9000"].closed
    assert scene.ways["elsewhere:9000"].heard == [{1: 600}]
    await scene.peers.close()
    assert scene.ways["elsewhere:9000"].closed
    await scene.tasks.cancel()


async def test_without_a_way_to_others_hints_are_counted_as_dropped() -> None:
    metrics = Metrics()
    peers = BrokerPeers(runtime(Limits(), metrics, Tasks(lambda name, error: None)), "b1", None)
    peers.tell(B2, 1, 500)
    assert metrics.registry.get_sample_value("timeline_hints_total", {"outcome": "dropped"}) == 1.0


async def test_who_comes_and_goes_is_told_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    here = Registered(Register())
    await here.start(Member("b1", "b1:9000"), "c")
    topic = Topic("t", 7, TopicSettings(buckets=8))
    here.host(topic.uid, "t", [b"c1"])
    neighbours = MembershipLog(here, "b1")

    def told() -> list[tuple[str, str]]:
        neighbours.look([topic])
        said = [(record.levelname, record.getMessage()) for record in caplog.records]
        caplog.clear()
        return said

    caplog.set_level("INFO", "timeline.broker")
    here.view.learn([B2], {topic.uid: {"b2": 1}})
    assert told() == []  # who was there before is no news
    theirs = sum(here.owner(topic.uid, bucket, 8) == B2 for bucket in range(8))
    here.view.learn([], {})
    assert told() == [
        ("WARNING", f"broker b2 is gone: {theirs} buckets changed hands, {theirs} of them to this broker")
    ]
    assert told() == []
    here.view.learn([B2, B3], {topic.uid: {"b2": 1}})
    assert told() == [("INFO", f"brokers b2, b3 are here: {theirs} buckets changed hands, 0 of them to this broker")]
    here.view.learn([B2, B3], {topic.uid: {"b2": 1, "b3": 1}})
    assert told() == []  # a consumer came, no broker


async def test_a_broker_tells_of_another_that_leaves(caplog: pytest.LogCaptureFixture) -> None:
    register, store, bits = Register(), Lasting(), random.Random(1).getrandbits
    nodes = [
        Node(store=store, clock=Clock(), membership=Registered(register), random_bits=bits, name=name)
        for name in ("b1", "b2")
    ]
    caplog.set_level("INFO", "timeline.broker")
    for node in nodes:
        await node.join(await node.open())
    assert "broker b2 is here: 0 buckets changed hands" in caplog.text
    await nodes[1].stop()
    assert "broker b2 is gone: 0 buckets changed hands" in caplog.text
    await nodes[0].stop()


async def test_who_deals_a_bucket_now_is_told_what_was_put_while_that_changed() -> None:
    """It looked into the store when it learned of it, and what was stored a moment later was told to nobody."""
    scene, here = Scene(), Registered(Register())
    await here.start(Member("b1", "b1:9000"), "c")
    limits = Limits(hint_pace_ms=0, hint_rest_ms=0, retell_ms=5_000)
    parts = runtime(limits, scene.metrics, scene.tasks)
    cluster = ClusterHints(parts, here, "b1", scene._make, lambda uid, due_ms, seq: True, lambda uid, one: None)
    topic = Topic("t", 7, TopicSettings())
    ids, due_ms = Ragged.of([b"a", b"b", b"c"]), np.array([900, 400, 100], dtype=np.int64)
    cluster.scheduled(topic, ids, due_ms, np.array([True, True, False]), 0)
    await scene.told()
    assert not scene.ways
    here.view.learn([B2, B3], {topic.uid: {"b2": 1}})
    cluster.changed()
    await scene.told()
    assert scene.ways["b2:9000"].heard == [{topic.uid: 400}] and "b3:9000" not in scene.ways
    for mono_ms in (6_000.0, 12_000.0):
        cluster.stand(mono_ms, True)
    cluster.changed()
    await scene.told()
    assert len(scene.ways["b2:9000"].heard) == 1, "what was put long ago, its own looks have found"
    await scene.tasks.cancel()
