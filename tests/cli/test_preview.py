"""`timeline schedule preview`: the next times, in words and for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Call
from timeline.driver.times import as_datetime
from timeline.recurrence import Occurrence, Recurrence

BERLIN = ("--zone", "Europe/Berlin")


def test_a_skipped_time_is_marked(call: Call) -> None:
    done = call("schedule", "preview", "30 2 * * *", *BERLIN, "--from", "2027-03-27T00:00", "--next", "3")
    assert done.code == 0
    words, _, head, *rows = done.out.splitlines()
    assert words == "At 02:30 every day, in Europe/Berlin"
    assert head.split() == ["when", "in", "clocks"]
    assert [row[:29] for row in rows] == [
        "Sat 2027-03-27 02:30:00+01:00",
        "Sun 2027-03-28 03:30:00+02:00",
        "Mon 2027-03-29 02:30:00+02:00",
    ]
    assert [row.endswith("clocks skip 02:30 that day") for row in rows] == [False, True, False]


def test_for_machines_it_is_a_list_of_times(call: Call) -> None:
    done = call(
        *("schedule", "preview", "0 9 * * 1-5", "--zone", "America/New_York", "--from", "2026-10-30T09:00"),
        *("--next", "2", "--json"),
    )
    assert json.loads(done.out) == ["2026-10-30T09:00:00-04:00", "2026-11-02T09:00:00-05:00"]


def test_all_options_together(call: Call) -> None:
    done = call(
        *("schedule", "preview", "0 9 * * *", "0 18 * * *", "--every", "12h", "--rrule", "FREQ=DAILY;BYHOUR=23"),
        *("--exclude", "2026-12-25", "--start", "2026-12-24T00:00Z", "--end", "2026-12-26T12:00Z", "--count", "7"),
        *("--from", "2026-12-24T10:00Z", "--json", "--gap", "skip", "--fold", "second"),
    )
    hours = ["24T12", "24T18", "24T23", "26T00", "26T09"]
    assert json.loads(done.out) == [f"2026-12-{hour}:00:00+00:00" for hour in hours]


@pytest.mark.parametrize("count", [(), ("--count", "3")])
def test_the_time_since_the_start_is_walked_through_only_for_a_count(
    call: Call, count: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    begins: list[int] = []
    occurrences = Recurrence.occurrences

    def noted(self: Recurrence, from_ms: int, before: int = 0) -> Iterator[Occurrence]:
        begins.append(from_ms)
        return occurrences(self, from_ms, before)

    monkeypatch.setattr(Recurrence, "occurrences", noted)
    years = ("--start", "2000-01-01T00:00Z", "--from", "2026-06-01T00:00Z")
    done = call("schedule", "preview", "* * * * * *", *years, *count, "--next", "1", "--json")
    assert json.loads(done.out) == ([] if count else ["2026-06-01T00:00:00+00:00"])
    assert [as_datetime(at_ms).year for at_ms in begins] == [2000 if count else 2026]


def test_nothing_left_is_said(call: Call) -> None:
    done = call("schedule", "preview", "@daily", "--end", "2026-01-01T00:00Z", "--from", "2026-06-01T00:00Z")
    assert done.code == 0 and "none from that time on" in done.out
    done = call("schedule", "preview", "@daily", "--from", "9999-12-31T20:00Z", "--zone", "Pacific/Kiritimati")
    assert done.code == 0 and "none from that time on" in done.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("61 * * * *",), "the minute of cron '61 * * * *' must be 0 to 59"),
        ((), "a schedule needs a rule"),
        (("@daily", "--zone", "Mars/Base"), "no time zone 'Mars/Base' is known here"),
        (("@daily", "--from", "soon"), "--from 'soon' is no time"),
        (("@daily", "--every", "500ms"), "every must be at least 1s"),
    ],
)
def test_a_mistake_is_named(call: Call, arguments: tuple[str, ...], said: str) -> None:
    done = call("schedule", "preview", *arguments)
    assert done.code == 2 and said in done.err
