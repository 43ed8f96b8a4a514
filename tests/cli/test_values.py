"""What people write: times, headers; and what it is refused with."""

from __future__ import annotations

import pytest

from timeline.cli.values import Time, due_of, iso, parse_headers, parse_time, shown_count, shown_time, zone_of
from timeline.clock import Clock
from timeline.driver.times import instant_ms
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
        ("-1774767600000", None, "--at must be milliseconds since 1970 UTC, not negative"),
        ("9" * 30, None, "(the year 9999)"),
    ],
)
def test_no_times(text: str, zone: str | None, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_time(text, "--at", zone)
    assert said in str(refused.value)


def test_a_time_before_clocks_is_a_time_long_past() -> None:
    """The driver would take the milliseconds of 1970 for seconds, and refuse them."""
    for text in ("0001-01-01T00:00Z", "1970-01-01T00:00:01Z"):
        when = parse_time(text, "--at")
        assert when.at_ms is not None
        assert instant_ms(when.at_ms) == when.at_ms < Clock().now_ms()


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
    assert iso(0) is None
    assert iso(1_774_767_600_001) == "2026-03-29T07:00:00.001Z"
    assert shown_time(1_774_767_600_000, zone_of("Europe/Berlin")) == "2026-03-29 09:00:00+02:00"


def test_a_count_of_none_has_no_rate() -> None:
    assert (shown_count(1_234, 910.4), shown_count(0, 910.4)) == ("1,234, 910/s", "0")
