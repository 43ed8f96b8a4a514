"""Schedules while something fails: the store at each of its calls, a broker between two of them, a record by hand."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.broker.machines import TOPIC, Lasting, Machine, Town, town
from tests.broker.schedules.villages import START_MS, change, get, pending, record_puts, records, schedule, times
from tests.simulation.loop import Timer
from timeline.broker.schedules import handler
from timeline.model import Answers, Operation, Status, Topic
from timeline.schedules.edits import edited
from timeline.schedules.record import SCHEDULES_TOPIC, ScheduleRecord, occurrence_id, record_id
from timeline.storage_plugins.contract import Mutations, ScanFilter, StoreUnavailable, StoreUnknown

pytestmark = pytest.mark.slow
DROPPED = pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
"""A broker that is killed drops the calls that it was about to make."""
CALLS = ("put", "settle", "mutate", "scan", "lease_due")
"""What looks and edits ask of a store."""


class Failing(Lasting):
    """A store whose call number `at` fails, counted from when it is armed; not if `at` is 0. `before` is called before
    the call, and `after` behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.at = self.count = 0
        self.failed = ""
        self.before: Callable[[], object] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def __getattribute__(self, name: str) -> Any:
        call = super().__getattribute__(name)
        if name not in CALLS:
            return call

        async def counted(*given: Any, **more: Any) -> Any:
            if not self.at:
                return await call(*given, **more)
            self.count += 1
            if self.count != self.at:
                return await call(*given, **more)
            self.failed = name
            self.before()
            await Timer(asyncio.get_running_loop()).wait(0.001)  # where a broker ends that is killed
            answer = await call(*given, **more)
            self.after()
            return answer

        return counted


def unavailable() -> None:
    raise StoreUnavailable("it is away for a moment")


def unknown() -> None:
    raise StoreUnknown("the answer was lost")


@contextmanager
def failing() -> Iterator[tuple[Town, Failing]]:
    """A town on such a store."""
    with town() as there:
        store = there.store = Failing()
        yield there, store


async def _edited(there: Town) -> None:
    """What the story does while the store fails: it edits, pauses and resumes."""
    for method, said in (("update", {"every": "7s"}), ("pause", {}), ("resume", {}), ("update", {"every": "5s"})):
        await change(there, method, **said)
        await there.timer.wait(20)


def _run(fault: str, at: int) -> tuple[Town, str]:
    """A schedule whose store or broker fails at one of its calls, and what failed."""
    with failing() as (there, store):

        async def story() -> None:
            first = await there.broker("b1")
            await there.broker("b2")
            await there.create_topic()
            there.consume("c")
            await schedule(there, every="10s")
            await there.timer.wait(75)
            store.at = at
            if fault == "unavailable":
                store.before = unavailable
            elif fault == "unknown":
                store.after = unknown
            else:
                store.before = lambda: there.loop.call_soon(_kill, there, first, context=contextvars.Context())
            await _edited(there)
            await there.timer.wait(120)

        there.run(story())
    return there, store.failed


def _kill(there: Town, machine: Machine) -> None:
    """kill -9 of a broker that called the store, or that did not."""
    if machine.process is not None and not machine.process.dead:
        there.kill(machine)


@DROPPED
@pytest.mark.parametrize("fault", ["unavailable", "unknown", "kill"])
def test_some_calls_that_fail_cost_no_occurrence(fault: str) -> None:
    for at in (3, 18, 44):
        _judge(fault, at)


@DROPPED
@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["unavailable", "unknown", "kill"])
def test_whatever_fails_each_occurrence_is_produced_once(fault: str) -> None:
    failed = {_judge(fault, at) for at in (*range(1, 40, 2), *range(40, 200, 9))}
    assert failed >= {*CALLS}


def _judge(fault: str, at: int) -> str:
    """Run a schedule whose call number `at` fails, and return which one that was."""
    there, what = _run(fault, at)
    found = times(there)
    assert set(found.values()) == {1}, (fault, at, what)
    last = sorted(at_s for at_s in found if at_s > 165)
    assert last == list(range(last[0], last[-1] + 1, 5)), (fault, at, what)
    assert last[-1] >= 240, (fault, at, what)
    return what


async def begun(there: Town) -> tuple[Machine, Topic]:
    """A broker with a consumer and a schedule, and the topic of records."""
    machine = await there.broker("b1")
    await there.create_topic()
    there.consume("c")
    await schedule(there, every="10s")
    topic = machine.node.catalog.known(SCHEDULES_TOPIC)
    assert topic is not None
    return machine, topic


def test_a_record_that_cannot_be_read_stops_no_other() -> None:
    with town() as there:

        async def story() -> None:
            _, topic = await begun(there)
            bad = [
                b"",
                b"{}",
                b"\xff",
                b"[" * 100_000,
                b'{"specification": 1, "number": 1, "revision": 1, "state": {}}',
            ]
            ids = [record_id(TOPIC, f"bad{number}", 1) for number in range(len(bad))]
            await there.store.put(topic, int(there.true_ms()), record_puts(ids, bad, int(there.true_ms())))
            for number in range(5):
                await schedule(there, f"s{number}", every="10s")
            await there.timer.wait(200)
            for number in range(5):
                assert (await get(there, f"s{number}")).state.produced >= 20
            assert len([one async for one in _listed(there)]) == 6

        there.run(story())
        for number in range(5):
            assert len(times(there, f"s{number}")) >= 19


def test_a_broker_that_finds_a_hundred_edits_in_a_row_carries_them_out_at_once() -> None:
    with town() as there:

        async def story() -> None:
            machine, topic = await begun(there)
            await there.timer.wait(30)
            rows = (await there.store.scan(topic, int(there.true_ms()), ScanFilter(), b"", 10, True)).rows
            assert len(rows) == 1 and rows.payloads is not None
            there.kill(machine)
            now_ms, record = int(there.true_ms()), ScheduleRecord.decode(rows.payloads[0])
            chain: list[ScheduleRecord] = []
            for number in range(100):
                record = edited(record, now_ms, record.specification.changed(tag=f"edit-{number}")).record
                chain.append(record)
            puts = record_puts([one.id for one in chain], [one.encode() for one in chain], now_ms)
            await there.store.put(topic, now_ms, puts)
            await there.start(machine)
            await there.timer.wait(3)
            assert len(await records(there)) == 1
            assert (await get(there)).specification.tag == "edit-99"
            await there.timer.wait(60)

        there.run(story())
        assert set(times(there).values()) == {1}
        assert len(times(there)) >= 8


async def _listed(there: Town) -> Any:
    async def work(client: Any) -> list[Any]:
        return [one async for one in client.schedules()]

    for one in await there.ask(work):
        yield one


def test_an_occurrence_that_the_topic_refuses_is_counted_and_the_schedule_goes_on() -> None:
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            there.consume("c")
            await schedule(there, every="10s", payload="x" * 100)
            await there.timer.wait(65)
            await there.ask(lambda client: client.update_topic(TOPIC, max_payload_bytes=50))
            await there.timer.wait(200)
            found = await get(there)
            assert found.state.failed >= 10
            await there.ask(lambda client: client.update_topic(TOPIC, max_payload_bytes=200))
            await there.timer.wait(200)
            assert (await get(there)).state.failed <= found.state.failed + 12
            assert await pending(there)

        there.run(story())


def test_an_occurrence_with_too_many_headers_is_counted_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older broker created its schedule, which looked at the template alone."""
    monkeypatch.setattr(handler, "_check_fits", lambda *given: None)
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            there.consume("c")
            await schedule(there, "grown", every="10s", headers={"h": "{occurrence}" * 600})
            await schedule(there, "plain", every="10s", headers={"h": "{occurrence}"})
            await there.timer.wait(95)
            assert (await get(there, "grown")).state.failed >= 9

        there.run(story())
        assert not times(there, "grown")
        assert set(times(there, "plain").values()) == {1} and len(times(there, "plain")) >= 9


def test_many_schedules_whose_topics_are_gone_hold_up_no_other() -> None:
    """One reading of the store looks for all of the topics. Beside another broker there is one in a second."""
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.broker("b2")
            await there.create_topic()
            there.consume("c")
            names = [f"gone{number}" for number in range(40)]
            for name in names:
                await there.ask(lambda client, name=name: client.create_topic(name))
                await there.ask(lambda client, name=name: client.schedule(name, "s", every="1m"))
                await there.ask(lambda client, name=name: client.drop_topic(name))
            await schedule(there, "plain", every="1m")
            asked_ms = there.true_ms()
            assert len([one async for one in _listed(there)]) == 41
            assert there.true_ms() - asked_ms <= 2_000
            await there.timer.wait(300)

        there.run(story())
        assert set(times(there, "plain").values()) == {1} and len(times(there, "plain")) >= 5


class Changing(Lasting):
    """A store that reads ids and then their records. The newest record of a schedule has changed between `once`."""

    once = False

    async def scan(self, *given: Any) -> Any:
        page = await super().scan(*given)
        if self.once and given[2].tag:
            self.once = False
            return replace(page, rows=page.rows.slice(0, 0))
        return page


def test_a_schedule_that_changes_while_it_is_read_is_there() -> None:
    with town() as there:
        store = there.store = Changing()

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            await schedule(there, every="1h")
            store.once = True
            assert await get(there) is not None and not store.once

        there.run(story())


class Busy(Lasting):
    """A store that cancels nothing while it is `busy`."""

    busy = False

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        if self.busy and mutations.operation is Operation.CANCEL:
            return Answers.blank(len(mutations), Status.UNAVAILABLE)
        return await super().mutate(topic, now_ms, mutations)


@pytest.mark.parametrize("change_to", [{"every": "7s"}, {"group": "other"}])
def test_a_store_that_cannot_cancel_for_a_while_costs_nothing_but_time(change_to: dict[str, str]) -> None:
    with town() as there:
        store = there.store = Busy()

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            there.consume("c")
            await schedule(there, every="10s")
            await there.timer.wait(65)
            store.busy = True
            await change(there, "update", **change_to)
            await there.timer.wait(12)
            store.busy = False
            await there.timer.wait(150)

        there.run(story())
        found = times(there)
        assert set(found.values()) == {1}
        every_s = 7 if "every" in change_to else 10
        last = sorted(at_s for at_s in found if at_s > 95)
        assert last == list(range(last[0], last[-1] + 1, every_s))


def test_a_topic_that_was_made_again_gets_what_was_decided() -> None:
    with town() as there:

        async def story() -> None:
            machine = await there.broker("b1")
            await there.create_topic(remember="2h")
            there.consume("c")
            await schedule(there, every="10s")
            await there.timer.wait(65)
            topic = machine.node.catalog.known(TOPIC)
            assert topic is not None
            # Another broker does so. This one has not heard of it yet.
            await there.store.drop_topic(topic)
            await there.store.create_topic(replace(topic, uid=topic.uid + 1, revision=1))
            await there.timer.wait(200)
            state = (await get(there)).state
            assert (state.failed, state.missed) == (0, 0)
            assert len(await pending(there)) >= 6

        there.run(story())


def test_a_message_of_somebody_else_under_the_id_of_an_occurrence_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with town() as there:

        async def story() -> None:
            await there.broker("b1")
            await there.create_topic()
            await schedule(there, every="100s")
            id = occurrence_id("s", START_MS + 400_000)

            async def work(client: Any) -> None:
                async with client.producer(TOPIC) as producer:
                    await producer.produce(b"mine", id=id, in_="1h")

            await there.ask(work)
            await there.timer.wait(450)
            assert (await get(there)).state.failed == 1

        there.run(story())
    assert "schedule t/s: topic refused an occurrence: EXISTS" in caplog.text
    assert "a look at schedules failed" not in caplog.text
