"""The examples that run to their end, each as it stands."""

from __future__ import annotations

import re
from collections import Counter
from zoneinfo import ZoneInfo

import pytest

import timeline
from tests.examples.conftest import FILES, ROOT, SERVE, Run, commands, docstring

ZONES = ("Pacific/Auckland", "Asia/Kolkata", "Europe/Berlin", "America/New_York", "America/Los_Angeles")


@pytest.mark.processes
@pytest.mark.prove
def test_a_fleet_is_replaced_under_load_and_nothing_is_delivered_twice(run: Run, tl: timeline.SyncTimeline) -> None:
    [line] = run("worker_fleet")
    told = re.fullmatch(r"(\d+) mails, (\d+) sent, (\d+) of them twice", line)
    assert told is not None
    count, sent, twice = map(int, told.groups())
    assert (sent, twice) == (count, 0)
    assert count >= 400
    assert not list(tl.scan("mails"))


@pytest.mark.processes
def test_a_long_task_is_delivered_once(run: Run, tl: timeline.SyncTimeline) -> None:
    lines = run("long_task", TASK_S="5", LEASE_S="2")
    assert lines[0] == "holiday: delivery 1, the lease ends in 2 s"
    assert re.fullmatch(r"holiday: encoded, uploading until \d\d:\d\d:\d\d at the latest", lines[1])
    assert lines[2:] == ["done"]
    assert not list(tl.scan("videos"))


@pytest.mark.processes
def test_a_ladder_ends_in_a_dead_letter_that_is_revived(run: Run, tl: timeline.SyncTimeline) -> None:
    tl.create_topic("webhooks")
    with tl.producer("webhooks", group="shop") as p:
        p.produce(b"{}", in_="1h", id="order-7")  # of a run that was broken off on a longer ladder
    lines = run("retry_ladder", LADDER="100ms 200ms")
    [order] = {name for line in lines for name in re.findall(r"order-\d+-\d+", line)}
    assert lines == [
        f"{order}: attempt 1 failed, again in 100ms",
        f"{order}: attempt 2 failed, again in 200ms",
        f"{order}: attempt 3 failed, buried",
        f"dead: {order}, because: 3 attempts, the last: connection refused",
        f"{order}: delivered at attempt 1",
    ]
    assert [message.id for message in tl.scan("webhooks")] == ["order-7"]


@pytest.mark.processes
def test_a_campaign_goes_out_at_nine_everywhere_but_for_what_was_called_off(
    run: Run, tl: timeline.SyncTimeline
) -> None:
    lines = run("campaign")
    assert [line.partition(": ")[2] for line in lines[:5]] == ["2000 mails"] * 5
    assert lines[5:] == ["calling off spring-b would meet 5000 of 10000", "called off: 5000 OK"]
    left = list(tl.scan("mailing"))
    assert {message.tag for message in left} == {"spring-a"}
    by_due = Counter(message.due for message in left)
    assert sorted(by_due.values()) == [1000] * 5
    at_nine = {zone for zone in ZONES for due in by_due if f"{due.astimezone(ZoneInfo(zone)):%H:%M}" == "09:00"}
    assert at_nine == set(ZONES)


@pytest.mark.processes
def test_a_dunning_job_sends_once_however_often_it_runs(run: Run) -> None:
    job = ["job: 500 OK", "job: 500 DUPLICATE", "job: 500 DUPLICATE"]
    assert run("dunning") == [*job, "500 letters sent for 500 invoices"]
    assert run("dunning") == ["job: 500 DUPLICATE"] * 3 + ["0 letters sent for 0 invoices"]


@pytest.mark.processes
def test_reminders_are_sent_for_what_was_committed(run: Run, tl: timeline.SyncTimeline) -> None:
    lines = run("outbox_orders")
    assert [line for line in lines if line.startswith("mallory")] == [
        "mallory: this customer buys nothing here; the order is rolled back, and its reminder with it"
    ]
    assert lines[-1] == "3 orders, 3 of them with a reminder"
    assert {message.payload for message in tl.scan("payments", payload=True)} == {b"ada", b"grace", b"edsger"}


@pytest.mark.processes
def test_a_schedule_begins_each_month_and_each_customer_gets_one_invoice(run: Run, tl: timeline.SyncTimeline) -> None:
    *months, told, following = run("monthly_invoices")
    count = len(months)
    assert 3 <= count <= 4
    assert all(re.fullmatch(r"\d{4}-\d\d: 3 invoices", line) for line in months) and len(set(months)) == count
    assert told == f"{count} months, {3 * count} invoices sent for {3 * count}"
    assert re.fullmatch(r"next run: \d{4}-\d\d-01 06:00:00\+0[12]:00", following)
    assert run("monthly_invoices") == ["0 months, 0 invoices sent for 0", following]
    assert [(one.name, one.state.missed) for one in tl.schedules()] == [("monthly", 0)]


@pytest.mark.processes
def test_schedules_take_over_from_celery_beat(run: Run, tl: timeline.SyncTimeline) -> None:
    lines = run("replace_celery_beat")
    assert lines[:3] == [
        "close-the-month: At 06:00 on the first day of every month, in Europe/Berlin",
        "check-stock: Every 15th minute of every hour on Monday through Friday, in Europe/Berlin",
        "pulse: Every 1s, in Europe/Berlin",
    ]
    started = Counter(lines[3:])
    assert started["the month is closed"] == 1
    assert started["pulse of north"] >= 2  # and once in fifteen minutes, the stock
    assert sum(started.values()) == 4
    assert list(tl.schedules()) == []


@pytest.mark.processes
def test_timers_are_cancelled_before_they_fire(run: Run, tl: timeline.SyncTimeline) -> None:
    was_set, was_cancelled, last = run("timeouts")
    assert re.fullmatch(r"100000 timers set in \d+\.\d s", was_set)
    assert re.fullmatch(r"100000 timers cancelled in \d+\.\d s", was_cancelled)
    assert last == "none is left to fire"
    assert tl.forecast("timeouts").overdue == 0


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_an_example_says_what_it_shows_and_how_to_run_it(name: str) -> None:
    serve, example = commands(name)
    assert serve == SERVE
    assert f"examples.{name}:app" in example or example == f"python examples/{name}.py"
    assert len(docstring(name).partition("\n\n")[0]) > 60
    index = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert f"[{name}.py]({name}.py)" in index


def test_examples_are_short() -> None:
    assert FILES
    assert not {file.name for file in FILES if len(file.read_text(encoding="utf-8").splitlines()) > 110}
