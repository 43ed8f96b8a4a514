"""What a broker counts of its store, and how much of the store's time that takes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from tests.broker.link import Link, broker, statuses
from tests.simulation.loop import in_virtual_time, wait
from timeline.broker.fairness import SHARE
from timeline.broker.limits import Limits
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.model import Operation, Status, Topic, TopicSettings
from timeline.storage_plugins.contract import Puts, StoreError, StoreUnavailable, Swept
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import Deliver, Forecast, Forecasted, SettleFlag, TopicAction, decode_as, encode

MINUTE_MS, HOUR_MS, FAR_MS = 60_000, 3_600_000, 4_000_000_000_000


def shown(link: Link, name: str, **labels: str) -> float | None:
    registry: CollectorRegistry = link.node.metrics.registry
    return registry.get_sample_value(name, {"topic": "t", **labels})


async def counted(link: Link) -> None:
    await link.node.counts.near()
    await link.node.counts.far()


async def test_what_is_expected_is_told_by_when_it_comes():
    async with broker() as link:
        dues_ms = [0, 30_000, 30_000, 5 * MINUTE_MS, 9 * MINUTE_MS, 30 * MINUTE_MS, 5 * HOUR_MS, 48 * HOUR_MS]
        await link.put([f"m{at}" for at in range(len(dues_ms))], in_ms=dues_ms[-1])
        await asyncio.gather(*(link.mutate(Operation.MOVE, [f"m{at}"], due) for at, due in enumerate(dues_ms)))
        await counted(link)
        expected = [shown(link, "timeline_expected_messages", within=within) for within in ("1m", "10m", "1h", "24h")]
        assert expected == [2, 4, 5, 6]
        assert shown(link, "timeline_expected_peak_messages") == 2
        assert shown(link, "timeline_messages_depth", state="available") == 1
        assert shown(link, "timeline_messages_depth", state="waiting") == 7
        assert shown(link, "timeline_buckets") == 64 and shown(link, "timeline_topic_rate_limit") == 0


async def test_what_waits_is_not_told_before_it_is_counted():
    store = MemoryStore("memory://")
    await store.open()
    topic = await store.create_topic(Topic("t", 7, TopicSettings()))
    puts = Puts.filled(
        1, ids=Ragged.of([b"a"]), birth=np.ones(1, dtype=np.uint64), due_ms=np.array([FAR_MS]), groups=Ragged.of([b""])
    )
    await store.put(topic, 1, puts)
    async with broker(store, limits=Limits(count_every_ms=3_600_000)) as link:
        counts = link.node.counts
        await counts.near()
        assert shown(link, "timeline_messages_depth", state="available") == 0
        assert shown(link, "timeline_messages_depth", state="waiting") is None
        assert shown(link, "timeline_expected_messages", within="24h") is None and 7 not in counts.depths
        await counts.far()
        assert shown(link, "timeline_messages_depth", state="waiting") == 1 and counts.depths[7].waiting == 1


async def test_what_is_overdue_is_told_but_not_while_the_topic_is_paused():
    async with broker() as link:
        await link.put(["a"], in_ms=0)
        await link.node.counts.near()
        before = shown(link, "timeline_overdue_seconds")
        assert before is not None
        while not shown(link, "timeline_overdue_seconds"):
            await link.node.counts.near()
        await link.topic(TopicAction.UPDATE, paused=True)
        await link.node.counts.near()
        assert shown(link, "timeline_overdue_seconds") == 0


async def test_leases_are_counted_by_how_they_ended():
    async with broker() as link:
        consumer = await link.consume(credit=10)
        for operation, flags in (
            (Operation.ACK, SettleFlag(0)),
            (Operation.RELEASE, SettleFlag(0)),
            (Operation.RELEASE, SettleFlag.UNSEEN),
            (Operation.EXTEND, SettleFlag(0)),
            (Operation.BURY, SettleFlag(0)),
        ):
            await link.put([f"m{operation}{flags}"], in_ms=0)
            got = await consumer.down(Deliver)
            time_ms = HOUR_MS if operation in (Operation.RELEASE, Operation.EXTEND) else 0
            more = {"reason": b"why"} if operation is Operation.BURY else {}
            if flags is SettleFlag.UNSEEN:
                await link.topic(TopicAction.UPDATE, paused=True)  # else it would be back at once
            answer = await link.settle(consumer, got, operation, time_ms, flags=flags, **more)
            assert statuses(answer) == [Status.OK]
            if flags is SettleFlag.UNSEEN:
                assert statuses(await link.mutate(Operation.MOVE, [f"m{operation}{flags}"], HOUR_MS)) == [Status.OK]
                await link.topic(TopicAction.UPDATE, paused=False)
        ended = {
            cause: shown(link, "timeline_leases_ended_total", cause=cause)
            for cause in ("acked", "released", "unseen", "buried", "ran_out")
        }
        assert ended == {"acked": 1, "released": 1, "unseen": 1, "buried": 1, "ran_out": 0}


async def test_a_message_is_available_once_its_lease_has_run_out():
    async with broker() as link:
        consumer = await link.consume(credit=1, lease_ms=100)
        await link.put(["a"], in_ms=0)
        await consumer.down(Deliver)
        await link.topic(TopicAction.UPDATE, paused=True)  # so nobody leases it again
        await link.node.counts.near()
        while not shown(link, "timeline_messages_depth", state="available"):
            await link.node.counts.near()
        assert shown(link, "timeline_messages_depth", state="available") == 1
        frame = encode(Forecast("t", HOUR_MS, HOUR_MS))
        assert decode_as(await link.node.service.unary("Forecast", frame), Forecasted).overdue == 1


async def test_a_lease_that_ran_out_is_counted_when_the_message_is_leased_again():
    async with broker() as link:
        consumer = await link.consume(credit=1, lease_ms=100)
        await link.put(["a"], in_ms=0)
        await consumer.down(Deliver)
        other = await link.consume("other")
        await other.down(Deliver)
        assert shown(link, "timeline_leases_ended_total", cause="ran_out") == 1


class Counting(MemoryStore):
    """Takes `per_message_s` for each message that a count finds, and `round_trip_s` for each call, in virtual time.
    Says how many each count found, and when it began and ended."""

    def __init__(self, round_trip_s: float = 0.0, per_message_s: float = 0.002) -> None:
        super().__init__("memory://")
        self.round_trip_s, self.per_message_s = round_trip_s, per_message_s
        self.found: list[int] = []
        self.spans: list[tuple[float, float]] = []

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        await wait(self.round_trip_s)
        return await super().next_due(topic, buckets, after_ms)

    async def count_due(self, topic: Topic, edges_ms: np.ndarray, held: bool = False) -> np.ndarray:
        counts, loop = await super().count_due(topic, edges_ms, held), asyncio.get_running_loop()
        found, began_s = int(counts.sum()), loop.time()
        await wait(self.round_trip_s + self.per_message_s * found)
        self.found.append(found)
        self.spans.append((began_s, loop.time()))
        return counts


@asynccontextmanager
async def counting(store: Counting) -> AsyncIterator[Link]:
    """A broker in virtual time that counts only when a test says so."""
    loop = asyncio.get_running_loop()
    async with broker(store, Limits(count_every_ms=3_600_000), Clock(loop.time, loop.time)) as link:
        yield link


async def fill(link: Link, dues_ms: Iterable[float]) -> None:
    for at, due_ms in enumerate(dues_ms):
        await link.put([f"m{at}"], due_ms)


async def forecast(link: Link, window_ms: int, step_ms: int) -> Forecasted:
    return decode_as(await link.node.service.unary("Forecast", encode(Forecast("t", window_ms, step_ms))), Forecasted)


def test_counting_takes_a_bounded_share_of_the_stores_time() -> None:
    async def scene() -> None:
        store = Counting()
        async with counting(store) as link:
            for name in ("t", "u", "v"):
                await link.topic(TopicAction.CREATE, name)
                await link.put(["a"], HOUR_MS, topic=name)
            await counted(link)
            spans = [(began, ended) for began, ended in store.spans if ended > began]
            assert len(spans) == 3
            for (began, ended), (next_began, _) in itertools.pairwise(spans):
                assert next_began - began >= (ended - began) / SHARE * 0.99

    in_virtual_time(scene)


@pytest.fixture
def parts_of_20(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeline.broker.status.PART", 20)


@pytest.mark.usefixtures("parts_of_20")
def test_many_messages_are_counted_in_parts() -> None:
    async def scene() -> None:
        store = Counting()
        async with counting(store) as link:
            await fill(link, ((hour + 0.5) * HOUR_MS + at for hour in range(0, 100, 2) for at in range(10)))
            await link.node.counts.near()
            for most in (160, 40):
                store.found.clear()
                await link.node.counts.far()
                assert sum(store.found) == 500 and max(store.found) <= most and len(store.found) < 80
                assert shown(link, "timeline_expected_messages", within="1h") == 10
                assert shown(link, "timeline_expected_messages", within="24h") == 120
                assert shown(link, "timeline_messages_depth", state="waiting") == 500
            store.found.clear()
            told = await forecast(link, 100 * HOUR_MS, 4 * HOUR_MS)
            assert sum(told.counts.tolist()) == 500 and set(told.counts.tolist()) == {20}
            assert len(store.found) > 5 and max(store.found) <= 40

    in_virtual_time(scene)


@pytest.mark.usefixtures("parts_of_20")
def test_a_forecast_counts_what_is_overdue_in_parts() -> None:
    async def scene() -> None:
        store = Counting()
        async with counting(store) as link:
            await fill(link, (100.0 * at for at in range(500)))
            await wait(3_600)
            for _ in range(4):
                await counted(link)
            store.found.clear()
            told = await forecast(link, HOUR_MS, HOUR_MS)
            assert told.overdue == 500 and told.counts.tolist() == [0]
            assert max(store.found) <= 40

    in_virtual_time(scene)


@pytest.mark.usefixtures("parts_of_20")
@pytest.mark.parametrize("due_ms", [0, 5 * MINUTE_MS, 500 * HOUR_MS])
def test_many_of_one_minute_are_counted_at_once_only_until_they_are_known(due_ms: int) -> None:
    async def scene() -> None:
        store = Counting()
        async with counting(store) as link:
            await fill(link, (due_ms + 100 * at for at in range(500)))
            for _ in range(8):
                store.found.clear()
                await counted(link)
                depth = [shown(link, "timeline_messages_depth", state=state) for state in ("available", "waiting")]
                assert sum(depth) == 500
            assert max(store.found) <= 40 and len(store.found) < 60

    in_virtual_time(scene)


@pytest.mark.usefixtures("parts_of_20")
def test_what_comes_near_is_counted_in_the_parts_that_are_known() -> None:
    async def scene() -> None:
        store = Counting()
        async with counting(store) as link:
            await fill(link, (HOUR_MS + 60 * at for at in range(1_000)))
            for _ in range(8):
                await counted(link)
            await wait(2_900)
            store.found.clear()
            await counted(link)
            assert sum(store.found) == 1_000 and max(store.found) <= 40

    in_virtual_time(scene)


@pytest.mark.usefixtures("parts_of_20")
@pytest.mark.parametrize(
    ("round_trip_s", "per_message_s"), [(0.0, 0.0), (0.1, 0.002)], ids=["a store with an index", "a store far away"]
)
def test_parts_grow_where_more_messages_cost_little(round_trip_s: float, per_message_s: float) -> None:
    async def scene() -> None:
        store = Counting(round_trip_s, per_message_s)
        async with counting(store) as link:
            await fill(link, (20 * HOUR_MS + 60_000 * at for at in range(1_000)))
            for _ in range(6):
                store.found.clear()
                await counted(link)
            assert sum(store.found) == 1_000 and len(store.found) <= 20
            store.round_trip_s, store.per_message_s = 0.0, 0.002
            for _ in range(12):
                store.found.clear()
                await counted(link)
            assert max(store.found) <= 40

    in_virtual_time(scene)


@pytest.mark.usefixtures("parts_of_20")
def test_a_topic_keeps_its_depth_while_it_is_counted_again() -> None:
    async def scene() -> None:
        store = Counting(round_trip_s=1.0)
        async with counting(store) as link:
            await fill(link, [HOUR_MS] * 3)
            await counted(link)
            uid = next(iter(link.node.counts.depths))
            again = asyncio.ensure_future(link.node.counts.near())
            while not again.done():
                await link.put([f"{asyncio.get_running_loop().time()}"], HOUR_MS)
                assert link.node.counts.depths[uid].waiting == 3 and not link.node.counts.rounds.is_empty(uid)
                await wait(0.25)
            await again
            await counted(link)
            assert link.node.counts.depths[uid].waiting > 3

    in_virtual_time(scene)


class Refusing(MemoryStore):
    """Counts and sweeps any topic but those `refused`, and says what it swept."""

    def __init__(self) -> None:
        super().__init__("memory://")
        self.refused = {"t"}
        self.swept: list[str] = []

    async def count_due(self, topic: Topic, edges_ms: np.ndarray, held: bool = False) -> np.ndarray:
        if topic.name in self.refused:
            raise StoreUnavailable("too many to be counted within the deadline")
        return await super().count_due(topic, edges_ms, held)

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        if topic.name in self.refused:
            raise StoreUnavailable("too much to be swept within the deadline")
        self.swept.append(topic.name)
        return await super().sweep(topic, now_ms, limit)


async def test_a_topic_that_cannot_be_counted_is_that_topics_trouble_alone():
    store = Refusing()
    async with broker(store, limits=Limits(count_every_ms=3_600_000, sweep_every_ms=3_600_000)) as link:
        await link.topic(TopicAction.CREATE, "u")
        for name in ("t", "u"):
            await link.put(["a"], HOUR_MS, topic=name)
        store.refused = set()
        await link.node.counts.near()
        store.refused = {"t"}
        for count in (link.node.counts.near, link.node.counts.far):
            with pytest.raises(StoreError):
                await count()
        value = link.node.metrics.registry.get_sample_value
        assert value("timeline_messages_depth", {"topic": "u", "state": "waiting"}) == 1
        assert link.node.not_ready == "", "what cannot be counted can be put and delivered all the same"


async def test_a_topic_that_cannot_be_swept_is_that_topics_trouble_alone():
    store = Refusing()
    async with broker(store, limits=Limits(count_every_ms=3_600_000, sweep_every_ms=3_600_000)) as link:
        await link.topic(TopicAction.CREATE, "u")
        with pytest.raises(StoreError):
            await link.node._sweep()
        assert store.swept == ["u"]


@pytest.mark.slow
async def test_what_a_sweep_had_to_find_is_counted_as_stranded():
    async with broker() as link:
        link.node.membership.buckets = lambda uid, buckets: []  # nobody deals any bucket, as far as this one knows
        await link.put(["a"], in_ms=0)
        consumer = await link.consume()
        dealer = next(iter(link.node.dealers))
        while not shown(link, "timeline_stranded_total"):
            dealer._sweep_at_ms = 0.0
            dealer.look()
            await link.node.counts.near()
        assert (await consumer.down(Deliver)).ids.tolist() == [b"a"]


@pytest.mark.parametrize("store", ["memory://", "sqlite"])
async def test_room_is_told_where_the_store_knows_it(store: str, tmp_path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}" if store == "sqlite" else store
    async with broker(url) as link:
        await link.node.counts.near()
        free, size = (
            link.node.metrics.registry.get_sample_value(f"timeline_store_{which}_bytes") for which in ("free", "size")
        )
        if store == "sqlite":
            assert free is not None and size is not None and 0 < free <= size
        else:
            assert free is None and size is None
