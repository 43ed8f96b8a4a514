"""Times and durations as a person writes them."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import timeline
from timeline.driver.batch import durations
from timeline.driver.times import (
    LOOKS_LIKE_SECONDS,
    as_datetime,
    duration_ms,
    expiry_ms,
    instant_ms,
    local,
    parse_iso,
    shift_ms,
)
from timeline.errors import Invalid
from timeline.model import MAX_DURATION_MS, MAX_TIME_MS


@pytest.mark.parametrize(
    ("written", "millis"),
    [
        ("250ms", 250),
        ("30s", 30_000),
        ("15m", 900_000),
        ("2h", 7_200_000),
        ("10d", 864_000_000),
        ("1w", 604_800_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        ("0.1s", 100),
        ("1.5h", 5_400_000),
        ("1us", 1),
        (" 5s ", 5_000),
        (5, 5_000),
        (0, 0),
        (0.25, 250),
        (0.1, 100),
        (0.0001, 1),
        (2.3, 2_300),
        (np.int64(3), 3_000),
        (timedelta(milliseconds=7), 7),
        (timedelta(microseconds=1), 1),
        (timedelta(microseconds=1001), 2),
    ],
)
def test_durations(written: object, millis: int) -> None:
    assert duration_ms(written) == millis  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "5", "5 parsecs", "-5s", "1e3s", "5s later", "40000d", b"5s"),
        *(
            float("nan"),
            float("inf"),
            -1,
            -0.5,
            True,
            None,
            (),
            timedelta(milliseconds=-1),
            10**12,
            1e300,
            1e305,
            -1e308,
        ),
        *("9" * 5_000 + "s", "0." + "9" * 5_000 + "s", "\u0665s"),  # Python would not read, or read as 5
    ],
)
def test_durations_that_cannot_be_meant_are_refused(wrong: object) -> None:
    with pytest.raises(Invalid, match="in_ must"):
        duration_ms(wrong)  # type: ignore[arg-type]


@given(st.integers(0, MAX_DURATION_MS))
def test_durations_in_ms_are_exact_however_they_are_written(millis: int) -> None:
    assert duration_ms(f"{millis}ms") == millis
    assert duration_ms(timedelta(milliseconds=millis)) == millis
    assert duration_ms(f"{millis // 1000}.{millis % 1000:03}s") == millis


def test_points_in_time() -> None:
    assert instant_ms(datetime(2026, 3, 29, 12, tzinfo=UTC)) == 1_774_785_600_000
    assert instant_ms(1_774_785_600_000) == 1_774_785_600_000
    assert instant_ms(np.int64(1_774_785_600_000)) == 1_774_785_600_000  # type: ignore[arg-type]
    east = datetime(2026, 3, 29, 14, tzinfo=timezone(timedelta(hours=2)))
    assert instant_ms(east) == 1_774_785_600_000
    assert instant_ms(datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)) == instant_ms(datetime(2026, 1, 1, tzinfo=UTC)) + 1
    assert instant_ms(datetime(1970, 1, 1, 0, 0, 0, 1, tzinfo=UTC)) == 1
    assert instant_ms(datetime(1971, 1, 1, tzinfo=UTC)) == 31_536_000_000
    assert instant_ms(LOOKS_LIKE_SECONDS) == LOOKS_LIKE_SECONDS
    assert instant_ms(MAX_TIME_MS) == MAX_TIME_MS


@pytest.mark.parametrize(
    ("wrong", "mends"),
    [
        (datetime(2026, 1, 1), r"no time zone.*timeline\.local"),
        (1_774_785_600, "looks like seconds.*multiply by 1000"),
        (1_774_785_600.5, "float"),
        (float("nan"), "float"),
        (True, "at"),
        (-1, "above 0, not -1; for a time from now use in_="),
        (0, "above 0, not 0"),
        (datetime(1969, 12, 31, 23, 59, tzinfo=UTC), "after the start of 1970, not 1969-12-31T23:59:00"),
        (datetime(1970, 1, 1, tzinfo=UTC), "after the start of 1970"),
        (datetime(1970, 1, 1, tzinfo=timezone(timedelta(hours=1))), "after the start of 1970"),
        (datetime.min.replace(tzinfo=UTC), "after the start of 1970"),
        (MAX_TIME_MS + 1, "9999"),
        (None, "in_="),
        ("2026-01-01", "fromisoformat"),
        (timedelta(1), "in_="),
        (date(2026, 1, 1), "time of day"),
        (np.float64(1.8e12), "float"),
        (np.array([1_774_785_600_000] * 2), "datetime or int milliseconds"),
    ],
)
def test_points_in_time_that_cannot_be_meant_are_refused(wrong: object, mends: str) -> None:
    with pytest.raises(Invalid, match=mends):
        instant_ms(wrong)  # type: ignore[arg-type]


@given(st.datetimes(min_value=datetime(1971, 1, 1), max_value=datetime(9999, 12, 30)))
def test_a_due_is_never_rounded_down(naive: datetime) -> None:
    when = naive.replace(tzinfo=UTC)
    back = as_datetime(instant_ms(when))
    assert timedelta(0) <= back - when < timedelta(milliseconds=1)


class _Fine(datetime):
    """As a Timestamp of pandas, which counts nanoseconds beside a datetime's microseconds."""

    nanosecond = 1


class _Long(timedelta):
    """As a Timedelta of pandas."""

    nanoseconds = 1


class _NoTime(datetime):
    """As pandas' NaT: a datetime that is none, equals nothing, and cannot be written in parts."""

    __hash__ = datetime.__hash__

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __format__(self, spec: str) -> str:
        raise ValueError("NaTType does not support strftime")


def test_nanoseconds_round_up_as_all_parts_of_a_millisecond_do() -> None:
    whole = instant_ms(datetime(2027, 1, 1, tzinfo=UTC))
    assert instant_ms(_Fine(2027, 1, 1, tzinfo=UTC)) == whole + 1
    assert instant_ms(_Fine(2027, 1, 1, 0, 0, 0, 999, tzinfo=UTC)) == whole + 1
    assert duration_ms(_Long(0)) == 1 and duration_ms(_Long(milliseconds=1)) == 2
    assert expiry_ms(_Long(0)) == (1, True)


def test_what_is_a_datetime_and_no_time_is_refused() -> None:
    with pytest.raises(Invalid, match=r"at must be an aware datetime .* which is no time"):
        instant_ms(_NoTime(2027, 1, 1))
    batch = timeline.Batch([b"", b""], at=[datetime(2027, 1, 1, tzinfo=UTC), _NoTime(2027, 1, 1)])
    assert "which is no time" in batch.refused[1][1] and 0 not in batch.refused


@pytest.mark.parametrize("huge", ["9" * 1_000_000, 10**6_000, -(10**6_000)], ids=["text", "above", "below"])
def test_what_is_refused_is_shown_in_short(huge: object) -> None:
    for read in (instant_ms, duration_ms, expiry_ms, shift_ms):
        with pytest.raises(Invalid) as told:
            read(huge)  # type: ignore[operator]
        assert len(str(told.value)) < 300


def test_expiry_is_a_time_or_a_while() -> None:
    assert expiry_ms("1h") == (3_600_000, True)
    assert expiry_ms(timedelta(seconds=1)) == (1_000, True)
    assert expiry_ms(1_774_785_600_000) == (1_774_785_600_000, False)
    with pytest.raises(Invalid):
        expiry_ms("0s")


@pytest.mark.parametrize("seconds", [7200, 7200.0, 7200.5, np.int64(7200), np.float64(7200)])
def test_an_expiry_of_seconds_is_refused_whole_or_not(seconds: Any) -> None:
    for put in (lambda: expiry_ms(seconds), lambda: timeline.Message(b"", in_="1h", expires=seconds)):
        with pytest.raises(Invalid, match=r"expires.* from now give a text like '15m'"):
            put()
    with pytest.raises(Invalid, match="expires"):
        timeline.Batch([b""], in_="1h", expires=seconds)
    assert "expires" in timeline.Batch([b""], in_="1h", expires=[seconds]).refused[0][1]


def test_wall_times() -> None:
    assert local("2026-07-01", "09:00", "America/New_York").astimezone(UTC) == datetime(2026, 7, 1, 13, tzinfo=UTC)
    assert local(date(2026, 7, 1), time(9), "Europe/Berlin").utcoffset() == timedelta(hours=2)
    assert timeline.local is local


def test_wall_times_that_clocks_skip() -> None:
    skipped = ("2026-03-29", "02:30", "Europe/Berlin")
    assert local(*skipped).strftime("%H:%M %z") == "03:30 +0200"
    assert local(*skipped, gap="earlier").strftime("%H:%M %z") == "01:30 +0100"
    with pytest.raises(Invalid, match="skip"):
        local(*skipped, gap="refuse")


def test_wall_times_that_clocks_show_twice() -> None:
    twice = ("2026-10-25", "02:30", "Europe/Berlin")
    assert local(*twice).utcoffset() == timedelta(hours=2)
    assert local(*twice, fold=1).utcoffset() == timedelta(hours=1)


@pytest.mark.parametrize(
    "wrong",
    [
        ("2026-13-01", "09:00", "Europe/Berlin"),
        ("2026-01-01", "25:00", "Europe/Berlin"),
        ("2026-01-01", "09.30", "Europe/Berlin"),
        ("2026-01-01", "09:30.5", "Europe/Berlin"),
        ("2026-01-01", "09:00", "Atlantis/Capital"),
        ("2026-01-01", "09:00", "../etc/passwd"),
        ("2026-01-01", "09:00+01:00", "Europe/Berlin"),
        ("2026-01-01", "09:00", "Europe/Berlin", "sideways"),
        ("2026-01-01", "09:00", "Europe/Berlin", "later", 2),
        ("2026-01-01", "09:00", "Europe/Berlin", "later", 1.0),
        ("2026-01-01", "09:00", "Europe/Berlin", np.array(["later", "earlier"])),
        ("2026-01-01", "09:00", None),
        (None, "09:00", "Europe/Berlin"),
        ("0001-01-01", "00:00", "Asia/Tokyo"),
        ("9999-12-31", "23:30", "America/New_York"),
    ],
)
def test_wall_times_that_cannot_be_read_are_refused(wrong: tuple[object, ...]) -> None:
    with pytest.raises(Invalid):
        local(*wrong)  # type: ignore[arg-type]


@given(st.datetimes(min_value=datetime(1971, 1, 1), timezones=st.timezones() | st.none()))
def test_whatever_python_writes_in_iso_8601_is_read(when: datetime) -> None:
    basic = when.strftime("%Y%m%dT%H%M%S")
    for text in (when.isoformat(), when.isoformat(" "), when.isoformat(timespec="minutes"), basic):
        assert parse_iso(text) == datetime.fromisoformat(text)
    assert local("2026-01-01", when.time().isoformat(), "UTC").time() == when.time()


def test_forms_that_other_programs_write_are_read() -> None:
    plus_one = timezone(timedelta(hours=1))
    assert parse_iso("2030-01-01 09:00:00 +0100") == datetime(2030, 1, 1, 9, tzinfo=plus_one)
    assert parse_iso("2030-W01") == datetime(2029, 12, 31)
    assert parse_iso("2030-W01-2t09z") == datetime(2030, 1, 1, 9, tzinfo=UTC)


@pytest.mark.parametrize(
    "text",
    [
        "2030-01-01T09.30Z", "2030-01-01T09:30.5Z", "2030-01-01x09:30Z", "2030-01-01T0930,5", "2030-01-01T09:00+05.30",
    ],
)  # fmt: skip
def test_what_python_reads_as_another_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_iso(text)


@pytest.mark.parametrize(
    ("by", "millis"),
    [
        *(("2h", 7_200_000), ("-2h", -7_200_000), (" -2h ", -7_200_000), (-5, -5_000), (0.25, 250)),
        *((timedelta(seconds=-1), -1_000), ("1.5ms", 2), ("-1.5ms", -1), (-0.0015, -1)),
        (timedelta(microseconds=-1_001), -1),
    ],
)
def test_shifts_go_both_ways_and_round_towards_later(by: object, millis: int) -> None:
    assert shift_ms(by) == millis  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [0, "0s", "-0s", "-0.9ms", "--2h", "-", "", True, False, None, b"-2h", float("-inf"), -1e308, "-40000d"]
)
def test_shifts_that_cannot_be_meant_are_refused(wrong: object) -> None:
    with pytest.raises(Invalid, match="by must"):
        shift_ms(wrong)  # type: ignore[arg-type]


def test_a_point_in_time_given_as_a_length_is_named() -> None:
    with pytest.raises(Invalid, match=r"36600 days, not 1795325759331: a number is seconds from now; .* use at=$"):
        duration_ms(1_795_325_759_331)
    with pytest.raises(Invalid, match=r"for a point in time use --at$"):
        duration_ms("1795325759331s", "--in")
    assert duration_ms(3_162_240_000.0) == 3_162_240_000_000
    with pytest.raises(Invalid, match="36600 days"):
        duration_ms(3_162_240_000.0000005)  # however little too long
    with pytest.raises(Invalid, match=r"lease must be at most 36600 days, .*: a number is seconds$"):
        duration_ms(1_795_325_759_331, "lease")
    with pytest.raises(Invalid, match=r"use at=$"):
        durations(np.array([1_795_325_759_331]), 1)
