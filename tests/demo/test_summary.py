"""The verdict on a day: a perfect one passes, and each way of spoiling it is noticed and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.demo.staged import StagedDay
from timeline.demo.picture import Spread
from timeline.demo.plan import HISTORY_SUFFIX, LEASE_MS, WEBHOOK_GATE, DayPlan
from timeline.demo.summary import Summary, summarize
from timeline.history import Event, read_history


@pytest.fixture
def events(plan: DayPlan, tmp_path: Path) -> list[Event]:
    """The histories of a perfect day."""
    StagedDay(plan, tmp_path).play()
    return read_history(tmp_path.glob(f"*{HISTORY_SUFFIX}"))


def judged(plan: DayPlan, events: list[Event], troubles: tuple[str, ...] = ()) -> Summary:
    return summarize(plan, events, [], plan.last_due_ms + 10_000, troubles)


def test_a_perfect_day(plan: DayPlan, events: list[Event]) -> None:
    summary = judged(plan, events)
    flights = [filing.flight for filing in plan.filings]
    assert summary.off == [] and summary.well
    assert summary.put == len(flights) == 98
    assert summary.moved == sum(flight.late for flight in flights) > 0
    assert summary.cancelled == sum(flight.cancelled for flight in flights) > 0
    assert summary.delivered == summary.put - summary.cancelled
    assert (summary.early, summary.lost, summary.doubled) == (0, 0, 0)
    assert summary.crashes == summary.leases_back == summary.redelivered == 4
    assert summary.lateness.max == pytest.approx(1.0)
    assert 0 < summary.webhooks < summary.delivered and summary.webhook_lateness.max == pytest.approx(1.0)
    # The lease of what a crashed gate had in hand runs out before anybody gets it again.
    assert summary.redelivery_lateness.p50 >= LEASE_MS


def test_json_has_the_promised_keys(plan: DayPlan, events: list[Event]) -> None:
    told = judged(plan, events).as_json()
    assert set(told) >= {"put", "moved", "cancelled", "delivered", "early", "lost", "doubled", "lateness_ms"}
    assert set(told["lateness_ms"]) == {"p50", "p99", "max"}
    assert told["ok"] is True


def _one(events: list[Event], operation: str, deliveries: int | None = None) -> Event:
    """An event of that operation, of a flight that nobody crashed with."""
    again = {event.arguments["id"] for event in events if event.arguments.get("deliveries", 1) > 1}
    return next(
        event
        for event in events
        if event.operation == operation
        and (event.arguments["deliveries"] == deliveries if deliveries else event.arguments["id"] not in again)
    )


def early(events: list[Event]) -> None:
    event = _one(events, "receive")
    event.wall_ms = event.arguments["scheduled_ms"] - 0.5


def lost(events: list[Event]) -> None:
    id = _one(events, "receive").arguments["id"]
    events[:] = [
        event for event in events if event.arguments.get("id") != id or event.operation not in ("receive", "ack")
    ]


def doubled(events: list[Event]) -> None:
    event = _one(events, "receive")
    values = {**event.arguments, "consumer": "gate-9", "version": event.arguments["version"] + 1, "deliveries": 2}
    events.append(
        replace(event, process="gate-9", arguments=values, invoked=event.invoked + 1, wall_ms=event.wall_ms + 1)
    )


def same_version_twice(events: list[Event]) -> None:
    event = _one(events, "receive")
    events.append(replace(event, process="gate-9", arguments={**event.arguments, "consumer": "gate-9"}))


def cancelled_but_went_out(events: list[Event]) -> None:
    cancel, receive = _one(events, "cancel"), _one(events, "receive")
    values = {**receive.arguments, "id": cancel.arguments["id"]}
    events.append(replace(receive, arguments=values))


def not_moved(events: list[Event]) -> None:
    event = _one(events, "move")
    event.outcome, event.result = "fail", {"status": "LEASED"}


def never_acked(events: list[Event]) -> None:
    id = _one(events, "ack").arguments["id"]
    events[:] = [event for event in events if event.operation != "ack" or event.arguments["id"] != id]


def at_another_time(events: list[Event]) -> None:
    event = _one(events, "receive")
    event.arguments["scheduled_ms"] -= 5


def other_payload(events: list[Event]) -> None:
    _one(events, "receive").arguments["sum"] += 1


def refused_ack(events: list[Event]) -> None:
    event = _one(events, "ack")
    event.outcome, event.result = "fail", {"status": "FENCED"}


def no_lease_back(events: list[Event]) -> None:
    again = {event.arguments["id"] for event in events if event.arguments.get("deliveries", 1) > 1}
    events[:] = [event for event in events if event.arguments.get("id") not in again and event.operation != "fault"]


def no_webhook(events: list[Event]) -> None:
    for event in events:
        if event.arguments.get("consumer") == WEBHOOK_GATE:
            event.arguments["consumer"] = "gate-4"


def no_schedule(events: list[Event]) -> None:
    events[:] = [event for event in events if event.operation != "inspect"]


def inspected_early(events: list[Event]) -> None:
    _one(events, "inspect").wall_ms -= 60_000


def inspected_unasked(events: list[Event]) -> None:
    event = _one(events, "inspect")
    events.append(replace(event, arguments={"id": "runway@1", "scheduled_ms": 1}))


def by_webhook(spoil: Callable[[list[Event]], None]) -> Callable[[list[Event]], None]:
    """Return what spoils an event of the webhook gate."""

    def spoiled(events: list[Event]) -> None:
        mine = [event for event in events if event.arguments.get("consumer") == WEBHOOK_GATE]
        others = [event for event in events if event not in mine]
        spoil(mine)
        events[:] = others + mine

    return spoiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (no_webhook, "no departure went out by webhook"),
        (by_webhook(early), "early is 1"),
        (by_webhook(lost), "lost is 1"),
        (by_webhook(doubled), "doubled is 1"),
        (early, "early is 1"),
        (lost, "never went out"),
        (lost, "lost is 1"),
        (doubled, "doubled is"),
        (same_version_twice, "doubled is"),
        (cancelled_but_went_out, "though they were cancelled"),
        (not_moved, "moved is"),
        (never_acked, "though no gate acked them"),
        (refused_ack, "though no gate acked them"),
        (at_another_time, "at another time than the data say"),
        (other_payload, "broken promises"),
        (no_lease_back, "no lease came back from a crash"),
        (no_lease_back, "no gate crashed"),
        (no_schedule, "inspected is 0, the data say "),
        (inspected_early, "1 inspections came early: runway@"),
        (inspected_unasked, "1 inspections came at no time of the schedule: runway@1"),
    ],
)
def test_each_way_of_spoiling_a_day_is_named(
    plan: DayPlan, events: list[Event], spoil: Callable[[list[Event]], None], said: str
) -> None:
    spoil(events)
    events.sort(key=lambda event: event.invoked)
    summary = judged(plan, events)
    assert not summary.well
    assert any(said in sentence for sentence in summary.off), summary.off


def test_an_ack_whose_answer_a_crash_swallowed_may_have_counted(plan: DayPlan, events: list[Event]) -> None:
    event = _one(events, "ack")
    event.outcome, event.result, event.returned = "unknown", {}, float("inf")
    assert judged(plan, events).off == []


def test_what_is_left_on_the_timeline_is_off(plan: DayPlan, events: list[Event]) -> None:
    flight = plan.filings[0].flight
    row = {"topic": plan.topic, "id": flight.id, "birth": 9, "version": 1, "due_ms": plan.filings[0].due_ms,
           "scheduled_ms": plan.filings[0].due_ms, "holder": "", "deliveries": 0, "group": flight.carrier, "tag": "",
           "expires_ms": 0, "sum": 1, "read_sum": 1, "dead": "", "died_ms": 0, "state": "available"}  # fmt: skip
    summary = summarize(plan, events, [row], plan.last_due_ms + 60_000)
    assert any("still on the timeline" in sentence for sentence in summary.off)


def test_troubles_of_processes_are_off(plan: DayPlan, events: list[Event]) -> None:
    assert judged(plan, events, ("gate-1 ended with code 1",)).off == ["gate-1 ended with code 1"]


def test_spread_is_by_nearest_rank() -> None:
    spread = Spread.of(float(value) for value in range(1, 101))
    assert (spread.count, spread.p50, spread.p99, spread.max) == (100, 50.0, 99.0, 100.0)
    assert Spread.of([]) == Spread(0, 0.0, 0.0, 0.0)
    assert Spread.of([7.0]).p50 == 7.0
