"""What people write: times, headers; and what it is refused with."""

from __future__ import annotations

import pytest

from timeline.cli.options import Time, due_of, parse_headers, parse_time, shown_count, zone_of
from timeline.clock import Clock
from timeline.driver.times import instant_ms, iso_or_none, shown_time
from timeline.errors import Invalid


@pytest.mark.parametrize(
    ("text", "zone", "time"),
    [
        ("now", None, Time(in_ms=0)),
        ("now+15m", None, Time(in_ms=900_000)),
        ("now - 1h30m", None, Time(in_ms=-5_400_000)),
        ("2026-03-29T09:00+02:00", None, Time(at_ms=1_774_767_600_000)),
        ("2026-03-29T07:00:00Z", None, Time(at_ms=1_774_767_600_000)),
        ("2026-03-29T09:00", "Europe/Berlin", Time(at_ms=1_774_767_600_000)),
        ("1774767600000", None, Time(at_ms=1_774_767_600_000)),
        ("1795123100000", "Europe/Berlin", Time(at_ms=1_795_123_100_000)),  # ISO 8601 could read a year of it
        ("20260329", "Europe/Berlin", Time(at_ms=1_774_738_800_000)),
        ("2026-03-29 02:30", "Europe/Berlin", Time(at_ms=1_774_747_800_000)),  # skipped by the clocks: an hour later
    ],
)
def test_times(text: str, zone: str | None, time: Time) -> None:
    assert parse_time(text, "--at", zone) == time


@pytest.mark.parametrize(
    ("text", "zone", "said"),
    [
        ("tomorrow", None, "--at 'tomorrow' is no time: a time is ISO 8601"),
        ("2026-03-29T09:00", None, "does not say in which time zone"),
        ("2026-03-29T09:00", "Europe/Berln", "no time zone 'Europe/Berln' is known"),
        ("2026-02-30T09:00Z", None, "is no time"),
        ("now+soon", None, "--at must be numbers with a unit"),
        ("now+" + "9" * 5_000 + "s", None, "--at must be numbers with a unit"),
        ("now*2", None, "is no time"),
        ("", None, "is no time"),
        ("1774767600", None, "--at '1774767600' looks like seconds: it takes milliseconds since 1970 UTC"),
        ("-1774767600000", None, "--at must be milliseconds since 1970 UTC, above 0, not -1774767600000"),
        ("9" * 30, None, "(the year 9999)"),
        ("0001-01-01T00:00Z", None, "--at must be a time after the start of 1970, not 0001-01-01T00:00:00+00:00"),
        ("now-36500d", None, "--at must be a time after the start of 1970, not 'now-36500d'"),
        ("1969-07-20T20:17Z", None, "--at must be a time after the start of 1970"),
    ],
)
def test_no_times(text: str, zone: str | None, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_time(text, "--at", zone)
    assert said in str(refused.value)


def test_a_time_of_the_early_1970s_is_kept_as_it_is() -> None:
    """The driver would take its milliseconds for seconds, and refuse them."""
    when = parse_time("1970-01-01T00:00:01Z", "--at")
    assert when.at is not None
    assert instant_ms(when.at) == when.at_ms == 1_000


def test_a_relative_time_counts_from_this_machines_clock() -> None:
    before = Clock().now_ms()
    assert parse_time("now+1h", "--due-to").absolute_ms() >= before + 3_600_000


@pytest.mark.parametrize(("at", "in_"), [(None, None), ("now", "1s")])
def test_one_of_two_options(at: str | None, in_: str | None) -> None:
    with pytest.raises(Invalid, match="either --at"):
        due_of(at, in_, None, ("--at", "--in"))


def test_headers() -> None:
    assert parse_headers(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for bad in (["a"], ["=1"], ["a=1", "a=2"]):
        with pytest.raises(Invalid, match="--header"):
            parse_headers(bad)


def test_what_is_shown() -> None:
    assert iso_or_none(0) is None
    assert iso_or_none(1_774_767_600_001) == "2026-03-29T07:00:00.001Z"
    assert shown_time(1_774_767_600_000, zone_of("Europe/Berlin")) == "2026-03-29 09:00:00+02:00"


def test_a_count_of_none_has_no_rate() -> None:
    assert (shown_count(1_234, 910.4), shown_count(0, 910.4)) == ("1,234, 910/s", "0")
