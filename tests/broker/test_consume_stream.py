"""A consume stream by itself: built from what it uses, without a broker around it."""

from __future__ import annotations

import asyncio
import random

import numpy as np

from tests.broker.link import Pipe
from tests.storage_plugins.sqlite_calls import puts
from timeline.broker.api.consume import ConsumeStream
from timeline.broker.api.streams import ClientStream, Streams
from timeline.broker.api.topics import TopicAccess
from timeline.broker.catalog import Catalog, Readiness
from timeline.broker.cluster import ClusterHints
from timeline.broker.dispatch.dealer import Dealer, Dealers
from timeline.broker.dispatch.roster import Outboxes
from timeline.broker.fairness import LoopScheduler
from timeline.broker.lanes import MeteredStore, Settling
from timeline.broker.late import LatenessCauses, LateRing, TopicLateness, Traces
from timeline.broker.limits import Limits
from timeline.broker.runtime import Runtime, Tasks
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.metrics import Metrics
from timeline.model import LeavingReason, Operation, Status, Topic
from timeline.storage_plugins.memory import MemoryStore
from timeline.sync import make_membership
from timeline.wire import Deliver, Hello, Leaving, Settle, Settled, Welcome


class Parts:
    """What a consume stream meets of a broker, over a store in memory."""

    def __init__(self) -> None:
        clock, limits, metrics, membership = Clock(), Limits(), Metrics(), make_membership("local://")
        self.tasks = Tasks(lambda name, error: None)
        self.runtime = Runtime(clock, limits, metrics, self.tasks, LoopScheduler(clock.monotonic_ms))
        self.store = MeteredStore(MemoryStore(), self.runtime, lambda: None, lambda uid: None)
        self.dealers = Dealers(self._dealer_of, self.tasks)
        self.cluster = ClusterHints(self.runtime, membership, "b1", None, self.dealers.hint, self.dealers.supersede)
        self.random_bits = random.Random(1).getrandbits
        catalog = Catalog(self.store, clock, self.random_bits, lambda before, after, made: None, self.cluster.alone)
        self.settling = Settling(self.store, self.runtime, self.cluster.scheduled)
        self.readiness = Readiness(self.store, membership, asyncio.Event())
        self.topics = TopicAccess(catalog, self.readiness, lambda: None)

    def _dealer_of(self, topic: Topic) -> Dealer:
        limits, metrics = self.runtime.limits, self.runtime.metrics
        return Dealer(
            topic,
            runtime=self.runtime,
            store=self.store,
            settling=self.settling,
            lateness=TopicLateness(LatenessCauses(0), LateRing(10), metrics, limits, Traces("b1")),
            outboxes=Outboxes(limits.outboxes_bytes, self.dealers.wake),
            random_bits=self.random_bits,
            buckets=self.cluster.buckets,
            hosts=self.cluster.host,
        )


async def test_a_stream_is_built_from_what_it_uses() -> None:
    parts, pipe = Parts(), Pipe()
    await parts.store.open()
    parts.readiness.say("")
    topic = await parts.topics.catalog.create("t", {})
    now_ms = parts.runtime.clock.now_ms()
    await parts.store.put(topic, now_ms, puts([b"a"], now_ms))
    streams = Streams(parts.runtime.limits, parts.runtime.metrics)

    served = ConsumeStream(
        ClientStream(pipe, "test"), parts.runtime, parts.topics, parts.dealers, parts.cluster, streams
    )
    serving = asyncio.ensure_future(served.serve())
    none = np.zeros(0, dtype=np.uint64)
    pipe.up(Hello("t", "c", 1, 0, 10, 1 << 20, Ragged.of([]), none, none.astype(np.int64)))
    welcome: Welcome = await pipe.down()
    assert (welcome.broker, welcome.heartbeat_ms) == ("b1", parts.runtime.limits.heartbeat_ms)
    got: Deliver = await pipe.down(Deliver)
    assert got.ids.tolist() == [b"a"]
    pipe.up(
        Settle(
            request=5,
            ids=got.ids,
            birth=got.birth,
            version=got.version,
            operation=np.array([Operation.ACK], dtype=np.uint8),
            time_ms=np.zeros(1, dtype=np.int64),
            flags=np.zeros(1, dtype=np.uint8),
            op=np.ones(1, dtype=np.uint64),
        )
    )
    settled: Settled = await pipe.down(Settled)
    assert (settled.request, settled.answers.status.tolist()) == (5, [Status.OK.code])

    await parts.dealers.dismiss(LeavingReason.DRAINING, "the end", 1_000)
    leaving: Leaving = await pipe.down(Leaving)
    assert leaving.text == "the end"
    await pipe.close()
    await serving
    await parts.tasks.cancel()
