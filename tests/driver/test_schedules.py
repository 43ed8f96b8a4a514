"""Recurring schedules from Python: both drivers at a real broker."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import timeline
from tests.driver.broker import Broker, FewerMethods
from timeline import CatchUp, Invalid, Overlap, ScheduleState, Specification, Status
from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.driver.schedules import Schedule, ScheduleOrigin, ScheduleView, specification_fields, why_absent
from timeline.driver.times import as_datetime, instant_ms
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.wire import Fault, TransportError
from timeline.wire.frames import MAJOR, MINOR, SERVICE

MONTHLY: dict[str, Any] = {"cron": "0 6 1 * *", "zone": "Europe/Berlin", "payload": "invoices of {occurrence}"}


async def test_the_same_schedule_is_returned_and_another_one_is_refused(tl: timeline.Timeline) -> None:
    s = await tl.schedule("t", "monthly", **MONTHLY)
    assert (s.topic, s.name, s.revision, s.status, s.paused) == ("t", "monthly", 1, "active", False)
    assert s.specification == Specification(
        "t", "monthly", cron=("0 6 1 * *",), zone="Europe/Berlin", payload=b"invoices of {occurrence}"
    )
    assert re.fullmatch(r"Schedule\('t/monthly', active, next \d{4}-\d\d-01 0[45]:00:00Z\)", repr(s))
    again = await tl.schedule("t", "monthly", **MONTHLY)
    assert (again.revision, again.specification) == (1, s.specification)
    assert (await tl.create_schedule(s.specification)).revision == 1
    with pytest.raises(timeline.Exists, match=r"t has another schedule 'monthly', which differs in cron, payload\."):
        await tl.schedule("t", "monthly", **MONTHLY | {"cron": "0 7 1 * *", "payload": b"x"})


def test_values_are_short_at_a_prompt() -> None:
    assert repr(Specification("t", "s", cron="@daily", payload=b"x" * 200, zone="UTC")) == (
        f"Specification('t', 's', cron=('@daily',), payload=b'{'x' * 78})"
    )
    assert repr(ScheduleState()) == "ScheduleState()"
    state = ScheduleState(produced=3, missed=1, last_ms=1_900_000_000_000, ended=True)
    assert repr(state) == "ScheduleState(3 produced, 1 missed, last 2030-03-17 17:46:40Z, ended)"


async def test_schedules_are_found_and_listed(tl: timeline.Timeline) -> None:
    assert await tl.get_schedule("t", "monthly") is None
    assert [s async for s in tl.schedules()] == []
    await tl.create_topic("other")
    for topic, name in (("t", "b"), ("t", "a"), ("other", "c")):
        await tl.schedule(topic, name, every="1h")
    assert sorted([s.name async for s in tl.schedules("t")]) == ["a", "b"]
    assert sorted([f"{s.topic}/{s.name}" async for s in tl.schedules()]) == ["other/c", "t/a", "t/b"]
    found = await tl.get_schedule("t", "a")
    assert found is not None and found.specification.every_ms == 3_600_000
    with pytest.raises(timeline.NotFound):
        await tl.schedule("absent", "a", every="1h")


async def test_a_list_goes_over_all_pages(tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeline.driver.schedules.PAGE", 3)
    for number in range(8):
        await tl.schedule("t", f"s{number}", every="1h")
    assert sorted([s.name async for s in tl.schedules("t")]) == [f"s{number}" for number in range(8)]


async def test_an_update_changes_what_it_names(tl: timeline.Timeline) -> None:
    s = await tl.schedule("t", "monthly", **MONTHLY, jitter="5m", tag="a")
    assert await s.update(cron=["0 7 1 * *", "0 7 15 * *"], jitter=None, catch_up="all", window="2d") is s
    says = s.specification
    assert (says.cron, says.jitter_ms, says.catch_up) == (("0 7 1 * *", "0 7 15 * *"), 0, CatchUp.ALL)
    assert (says.window_ms, says.zone, says.tag, s.revision) == (172_800_000, "Europe/Berlin", "a", 2)
    with pytest.raises(timeline.Fenced):
        await s.update(overlap="skip", if_revision=1)
    await s.update(overlap=Overlap.SKIP, if_revision=2)
    found = await tl.get_schedule("t", "monthly")
    assert found is not None and (found.revision, found.specification.overlap) == (3, Overlap.SKIP)
    assert (found.state, found.specification) == (s.state, s.specification)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "say which fields to change: cron, every,"),
        ({"cronn": "@daily"}, "no field 'cronn': did you mean 'cron'?"),
        ({"cron": "61 * * * *"}, "the minute of cron '61 * * * *' must be 0 to 59"),
        ({"every": -1}, "every must not be negative"),
        ({"start": datetime(2026, 1, 1)}, "has no time zone"),
        ({"payload": 7}, "payload must be bytes or text, not int"),
        ({"payload": "\ud800"}, "payload holds half of a surrogate pair"),
        ({"overlap": "later"}, "overlap must be allow, skip, queue, not 'later'"),
        ({"cron": "@daily", "pending": "drop"}, "pending must be 'cancel' or 'keep'"),
        ({"cron": "@daily", "if_revision": 0}, "if_revision must be a whole number from 1, not 0"),
        ({"name": "other"}, "a schedule has no field 'name'"),
    ],
)
async def test_a_mistake_is_named_before_anything_is_sent(fields: dict[str, Any], said: str) -> None:
    client = timeline.connect("127.0.0.1:1")
    s = Schedule(Specification("t", "s", every_ms=60_000).to_json() | {"revision": 1}, client._context)
    with pytest.raises(Invalid) as refused:
        await s.update(**fields)
    assert said in str(refused.value)
    await client.aclose()


def test_arguments_become_fields() -> None:
    at = datetime(2027, 1, 1, tzinfo=UTC)
    given: dict[str, Any] = {
        "cron": ["@daily"], "every": 90, "end": at, "expires": timedelta(hours=1), "payload": bytearray(b"x"),
        "window": None, "tag": None, "headers": None, "gap": None, "start": None,
    }  # fmt: skip
    assert specification_fields(given) == {
        "cron": ("@daily",), "every_ms": 90_000, "end_ms": instant_ms(at), "expires_ms": 3_600_000, "payload": b"x",
        "window_ms": 3_600_000, "tag": "", "headers": {}, "gap": None, "start_ms": 0,
    }  # fmt: skip


async def test_the_next_times_are_in_the_schedules_zone(tl: timeline.Timeline) -> None:
    start = datetime(2027, 3, 27, tzinfo=UTC)
    s = await tl.schedule("t", "night", cron="30 2 * * *", zone="Europe/Berlin", start=start, count=3)
    assert [one.isoformat() for one in s.next()] == [
        "2027-03-27T02:30:00+01:00",
        "2027-03-28T03:30:00+02:00",
        "2027-03-29T02:30:00+02:00",
    ]
    assert s.next(1)[0] == as_datetime(s.next_ms)
    await s.pause()
    assert (s.status, len(s.next(2))) == ("paused", 2)
    with pytest.raises(Invalid, match=r"next\(\) takes a whole number from 0 to 10000, not -1"):
        s.next(-1)


async def test_the_next_times_begin_with_the_start_and_end_with_the_count(tl: timeline.Timeline) -> None:
    start = datetime(2030, 1, 1, tzinfo=UTC)
    s = await tl.schedule("t", "later", every="1h", start=start, count=2)
    await s.update(tag="x")  # by which it has a position
    assert s.next(3) == [start, start + timedelta(hours=1)]
    over = await tl.schedule("t", "over", every="1h", start=datetime(2020, 1, 1, tzinfo=UTC), count=2)
    assert (over.next(3), over.next_ms) == ([], 0)


@pytest.mark.slow
async def test_a_rule_without_a_time_holds_up_nobody(tl: timeline.Timeline) -> None:
    """All that it says is excluded. A list of schedules names it all the same, soon."""
    s = await tl.schedule("t", "never", cron="* * * * * *", exclude="cron:* * * * * *")
    assert s.next_ms == 0 and s.next(1) == []
    assert [one.name async for one in tl.schedules()] == ["never"]
    assert (await s.trigger()).ok
    await s.delete()


async def test_times_are_those_that_a_broker_told_where_rules_cannot_be_read(
    tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tl.schedule("t", "s", every="1h")
    s = await tl.get_schedule("t", "s")
    assert s is not None
    local = s.next(10)
    monkeypatch.setattr("timeline.driver.schedules.rules_are_readable", lambda: False)
    assert s.next(10) == local and len(local) == 10


@pytest.mark.slow
async def test_occurrences_are_messages_with_the_template_filled_in(tl: timeline.Timeline) -> None:
    s = await tl.schedule(
        "t", "tick", every="1s", count=3, start=as_datetime(instant_ms(datetime.now(UTC)) + 1_500), tag="ticks",
        payload="{sequence} at {occurrence}", headers={"n": "{sequence}", "fixed": "x"}, group="ops",
    )  # fmt: skip
    times = s.next(5)
    assert len(times) == 3
    async with tl.consumer("t") as c:
        got = []
        async for d in c:
            got.append(d)
            await d.ack()
            if len(got) == 3:
                break
    assert [d.due for d in got] == times
    assert [d.id for d in got] == [f"tick@{_text(one)}" for one in times]
    assert [d.payload.decode() for d in got] == [f"{n} at {_text(one)}" for n, one in enumerate(times, 1)]
    assert [d.headers["n"] for d in got] == ["1", "2", "3"] and {d.tag for d in got} == {"ticks"}
    await s.refresh()
    assert (s.state.produced, s.state.missed, s.state.last_id) == (3, 0, got[-1].id)


def _text(when: datetime) -> str:
    plain = when.astimezone(UTC).replace(tzinfo=None)
    return f"{plain.isoformat(timespec='milliseconds' if plain.microsecond else 'seconds')}Z"


async def test_one_is_triggered_by_hand(tl: timeline.Timeline) -> None:
    s = await tl.schedule("t", "monthly", **MONTHLY)
    receipt = await s.trigger()
    assert receipt.ok and re.fullmatch(r"monthly@[\dT:.-]+Z\.trigger", receipt.id)
    stored = await tl.get("t", receipt.id)
    assert stored is not None and stored.payload is not None and stored.payload.startswith(b"invoices of 20")
    why = await tl.why("t", receipt.id)
    assert why.schedule is not None and why.schedule.triggered
    assert why.lines()[0].startswith("from schedule monthly: triggered by hand at ")


async def test_a_trigger_is_repeated_by_its_time(tl: timeline.Timeline) -> None:
    s = await tl.schedule("t", "monthly", **MONTHLY)
    now = datetime.now(UTC)
    first, again = [await s.trigger(at=now) for _ in range(2)]
    assert first.id == again.id and again.ok
    assert [one.id async for one in tl.scan("t")] == [first.id]
    with pytest.raises(Invalid, match=r"at must be within a day of now, and 2020-01-01.* is not"):
        await s.trigger(at=datetime(2020, 1, 1, tzinfo=UTC))


async def test_a_backfill_produces_what_was_not_produced(tl: timeline.Timeline) -> None:
    s = await tl.schedule("t", "daily", cron="@daily", start=datetime(2026, 1, 1, tzinfo=UTC), paused=True)
    span = datetime(2026, 1, 3, tzinfo=UTC), datetime(2026, 1, 6, tzinfo=UTC)
    assert await s.backfill(*span, dry_run=True) == timeline.Backfill(3, 0, 0)
    assert [m async for m in tl.scan("t")] == []
    assert await s.backfill(*span) == timeline.Backfill(3, 0, 0)
    ids = sorted([m.id async for m in tl.scan("t")])
    assert ids == [f"daily@2026-01-0{day}T00:00:00Z" for day in (3, 4, 5)]
    assert await s.backfill(span[0], datetime(2026, 1, 7, tzinfo=UTC)) == timeline.Backfill(1, 3, 0)
    with pytest.raises(Invalid, match="end must lie after start"):
        await s.backfill(*reversed(span))
    why = await tl.why("t", ids[0])
    assert "it was caught up after brokers were away, or was backfilled" in why.lines()[1]


async def test_a_deleted_schedule_is_gone_and_may_come_again(tl: timeline.Timeline) -> None:
    s = await tl.schedule("t", "monthly", **MONTHLY)
    await s.delete()
    assert await tl.get_schedule("t", "monthly") is None
    assert [one async for one in tl.schedules()] == []
    for call in (s.delete(), s.pause(), s.refresh(), s.trigger()):
        with pytest.raises(timeline.NotFound):
            await call
    assert (await tl.schedule("t", "monthly", every="1h")).specification.every_ms == 3_600_000


async def test_pause_and_resume(tl: timeline.Timeline) -> None:
    s = await tl.schedule("t", "s", every="10s")
    assert (await s.pause()).status == "paused"
    assert (await s.pause()).status == "paused"
    assert [m async for m in tl.scan("t")] == []
    assert (await s.resume()).status == "active"
    found = await tl.get_schedule("t", "s")
    assert found is not None and (found.status, found.state.missed) == ("active", 0)


async def test_why_knows_an_occurrence_that_is_not_there(tl: timeline.Timeline) -> None:
    s = await tl.schedule("t", "monthly", **MONTHLY)
    future = f"monthly@{_text(s.next(2)[1])}"
    with pytest.raises(timeline.NotFound, match=r"Schedule monthly puts it shortly before that time"):
        await tl.why("t", future)
    await s.pause()
    with pytest.raises(timeline.NotFound, match=r"Schedule monthly is paused: it produces nothing"):
        await tl.why("t", future)
    with pytest.raises(timeline.NotFound, match=r"Schedule monthly was created after that time: .*backfill t monthly"):
        await tl.why("t", "monthly@2025-12-01T05:00:00Z")
    with pytest.raises(timeline.NotFound, match="Schedule monthly has no occurrence at that time"):
        await tl.why("t", "monthly@2027-01-01T00:00:00Z")
    with pytest.raises(timeline.NotFound) as plain:
        await tl.why("t", "other@2027-01-01T00:00:00Z")
    assert "Schedule" not in str(plain.value)


def test_why_knows_that_a_schedule_has_ended() -> None:
    says, hour_ms = Specification("t", "s", every_ms=3_600_000), 3_600_000
    state = ScheduleState(position_ms=9 * hour_ms, last_ms=5 * hour_ms, ended=True)
    found: Any = SimpleNamespace(name="s", topic="t", paused=False, specification=says, state=state)
    assert "Schedule s has ended" in why_absent(ScheduleOrigin("s", 6 * hour_ms, False), found)
    assert "Schedule s decided on it" in why_absent(ScheduleOrigin("s", 5 * hour_ms, False), found)


def test_an_origin_tells_jitter_and_a_schedule_that_is_gone() -> None:
    at_ms = 1_900_000_000_000
    says = Specification("t", "s", every_ms=60_000, jitter_ms=5_000)
    stored: Any = type("Stored", (), {"put_ms": at_ms - 60_000, "scheduled_ms": at_ms + 3_000})
    told = ScheduleOrigin("s", at_ms, False, says).lines(stored, UTC)
    assert told == [
        "from schedule s: its occurrence of 2030-03-17 17:46:40+00:00",
        "  its jitter made it due 3 s later",
    ]
    gone = ScheduleOrigin("s", at_ms, False).lines(stored, UTC)
    assert gone == ["from schedule s, which is not there any more: its occurrence of 2030-03-17 17:46:40+00:00"]


async def test_internal_topics_are_listed_on_demand(tl: timeline.Timeline) -> None:
    await tl.schedule("t", "s", every="1h")
    assert [topic.name for topic in await tl.topics()] == ["t"]
    assert [topic.name for topic in await tl.topics(internal=True)] == ["t", "~schedules"]
    (record,) = [m async for m in tl.scan("~schedules")]
    assert record.id.startswith("t/s#") and record.tag == "t/s"
    with pytest.raises(timeline.Forbidden):
        await tl.drop_topic("~schedules")


class WithoutSchedules(FewerMethods):
    """The handlers of a broker that knows no schedules."""

    UNKNOWN = frozenset({f"/{SERVICE}/Schedules"})


@pytest.fixture
async def older() -> AsyncIterator[Broker]:
    running = Broker()
    running.handlers = WithoutSchedules
    async with running:
        yield running


async def test_an_older_broker_is_named_with_the_version_that_schedules_need(older: Broker) -> None:
    """Also in the first call, when the driver could take it for another service."""
    said = f"recurring schedules need brokers of wire version 1.4: .*It speaks version {MAJOR}.{MINOR} of the wire"
    async with timeline.connect(older.address) as tl:
        with pytest.raises(Invalid, match=said):
            await tl.schedule("t", "s", every="1h")
        with pytest.raises(Invalid, match=said):
            await tl.get_schedule("t", "s")
        await tl.create_topic("t")
        async with tl.producer("t") as p:
            await p.produce(b"", in_="1h", id="s@2027-01-01T00:00:00Z")
        assert (await tl.why("t", "s@2027-01-01T00:00:00Z")).schedule is None


class LosesAnswers(GrpcTransport):
    """To a real broker. The first answer of each call about schedules is lost."""

    seen: ClassVar[set[bytes]] = set()

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        answer = await super().unary(method, frame, timeout_s)
        if method == "Schedules" and frame not in LosesAnswers.seen:
            LosesAnswers.seen.add(frame)
            raise TransportError(Fault.BROKEN, "the answer was lost")
        return answer


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["one broker", "another broker"])
async def test_a_lost_answer_makes_nothing_twice(tmp_path: Path, several: bool) -> None:
    """The call is repeated: at the same broker, or at another one, which knows nothing of the first attempt."""
    store = f"sqlite:///{tmp_path}/timeline.db"
    async with Broker(store) as broker:
        client = timeline.Timeline(broker.address, "10s", transport_factory=LosesAnswers)
        async with client as tl:
            if several:
                await forget_answers(broker, client)
            await tl.create_topic("t")
            s = await tl.schedule("t", "monthly", **MONTHLY)
            assert s.revision == 1
            await s.update(cron="0 7 1 * *", if_revision=1)
            assert (s.revision, s.specification.cron) == (2, ("0 7 1 * *",))
            await s.update(cron="0 8 1 * *")
            assert s.revision == 3
            with pytest.raises(timeline.Fenced):
                await s.update(cron="0 9 1 * *", if_revision=2)
            assert (await s.trigger()).ok
            assert len([m async for m in tl.scan("t")]) == 1
            assert (await s.pause()).paused and not (await s.resume()).paused
            await s.delete()
            assert await tl.get_schedule("t", "monthly") is None


async def forget_answers(broker: Broker, client: timeline.Timeline) -> None:
    """Have the broker keep no answer, as another one of its cluster has none."""
    assert broker.node is not None
    broker.node.service._schedules._answered = Forgetful()


class Forgetful(OrderedDict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@pytest.mark.slow
def test_all_of_it_from_a_plain_thread(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        s = tl.schedule("t", "monthly", **MONTHLY)
        assert isinstance(s, timeline.SyncSchedule) and repr(s).startswith("SyncSchedule('t/monthly', active, next ")
        assert tl.create_schedule(s.specification).revision == 1
        assert s.update(cron="0 7 1 * *") is s
        assert (s.revision, s.specification.cron) == (2, ("0 7 1 * *",))
        assert s.pause().paused and not s.resume().paused
        assert s.trigger().status is Status.OK
        assert s.backfill(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 3, 2, tzinfo=UTC)).produced == 3
        other = tl.get_schedule("t", "monthly")
        assert other is not None and other.revision == 4 and other.refresh() is other
        assert [one.next(2) for one in tl.schedules("t")] == [s.next(2)]
        s.delete()
        assert tl.get_schedule("t", "monthly") is None and list(tl.schedules()) == []


@pytest.mark.parametrize(("now_s", "status", "left"), [(-1, "active", 3), (30, "active", 1), (41, "ended", 0)])
def test_a_schedule_has_ended_once_its_last_time_is_over(now_s: int, status: str, left: int) -> None:
    """Occurrences are put two minutes ahead, so the broker knows of its end before."""
    start_ms, hands = 1_900_000_000_000, [0.0]
    hands[0] = start_ms / 1_000 + now_s
    tl = Timeline("a:1", clock=Clock(lambda: hands[0], lambda: hands[0]))
    shown = Specification("t", "s", every_ms=20_000, start_ms=start_ms, count=3).to_json()
    state = {"position_ms": start_ms + 40_001, "sequence": 3, "ended": True}
    found = ScheduleView(shown | {"state": state}, tl._context)
    assert (found.status, len(found.next())) == (status, left)
