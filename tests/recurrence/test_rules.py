"""What may be written of a recurrence, what it means, and how a mistake is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Any

import pytest
from dateutil.rrule import rrulestr

from timeline.errors import Invalid
from timeline.recurrence import Recurrence

FROM = datetime(2026, 11, 26, 12, tzinfo=UTC)


def ms(when: datetime) -> int:
    return int(when.timestamp() * 1_000)


def shown(most: int = 3, since: datetime = FROM, **asked: Any) -> list[str]:
    """The next times in UTC."""
    found = islice(Recurrence(**asked).occurrences(ms(since)), most)
    return [f"{datetime.fromtimestamp(one.at_ms / 1_000, UTC):%a %Y-%m-%d %H:%M:%S}" for one in found]


@pytest.mark.parametrize(
    ("cron", "times"),
    [
        ("0 9 * * 1-5", ["Fri 2026-11-27 09:00:00", "Mon 2026-11-30 09:00:00", "Tue 2026-12-01 09:00:00"]),
        ("0 9 * * MON,WED", ["Mon 2026-11-30 09:00:00", "Wed 2026-12-02 09:00:00", "Mon 2026-12-07 09:00:00"]),
        ("0 0 1 JAN *", ["Fri 2027-01-01 00:00:00", "Sat 2028-01-01 00:00:00", "Mon 2029-01-01 00:00:00"]),
        ("30 8 L * *", ["Mon 2026-11-30 08:30:00", "Thu 2026-12-31 08:30:00", "Sun 2027-01-31 08:30:00"]),
        ("30 8 LW * *", ["Mon 2026-11-30 08:30:00", "Thu 2026-12-31 08:30:00", "Fri 2027-01-29 08:30:00"]),
        ("0 8 * * 5L", ["Fri 2026-11-27 08:00:00", "Fri 2026-12-25 08:00:00", "Fri 2027-01-29 08:00:00"]),
        ("0 8 * * 5#3", ["Fri 2026-12-18 08:00:00", "Fri 2027-01-15 08:00:00", "Fri 2027-02-19 08:00:00"]),
        # Sunday 15 November is over, Tuesday 15 December is one itself, Friday 15 January, Monday 15 February.
        ("0 8 15W * *", ["Tue 2026-12-15 08:00:00", "Fri 2027-01-15 08:00:00", "Mon 2027-02-15 08:00:00"]),
        # Saturday 1 May 2027 has its weekday after it, Sunday 31 January 2027 before it.
        ("0 8 1W 5 *", ["Mon 2027-05-03 08:00:00", "Mon 2028-05-01 08:00:00", "Tue 2029-05-01 08:00:00"]),
        ("0 8 31W 1 *", ["Fri 2027-01-29 08:00:00", "Mon 2028-01-31 08:00:00", "Wed 2029-01-31 08:00:00"]),
        ("0 8 1W,20 * *", ["Tue 2026-12-01 08:00:00", "Sun 2026-12-20 08:00:00", "Fri 2027-01-01 08:00:00"]),
        # Either day field, as in cron.
        ("0 9 15W * */2", ["Tue 2026-12-15 09:00:00", "Thu 2027-04-15 09:00:00", "Tue 2027-06-15 09:00:00"]),
        ("0 8 1W * 6", ["Sat 2026-11-28 08:00:00", "Tue 2026-12-01 08:00:00", "Sat 2026-12-05 08:00:00"]),
        ("0 8 13 * 5", ["Fri 2026-11-27 08:00:00", "Fri 2026-12-04 08:00:00", "Fri 2026-12-11 08:00:00"]),
        ("*/20 * * * * *", ["Thu 2026-11-26 12:00:00", "Thu 2026-11-26 12:00:20", "Thu 2026-11-26 12:00:40"]),
        ("@daily", ["Fri 2026-11-27 00:00:00", "Sat 2026-11-28 00:00:00", "Sun 2026-11-29 00:00:00"]),
        ("0 0 29 2 *", ["Tue 2028-02-29 00:00:00", "Sun 2032-02-29 00:00:00", "Fri 2036-02-29 00:00:00"]),
        ("0 12 * * 0", ["Sun 2026-11-29 12:00:00", "Sun 2026-12-06 12:00:00", "Sun 2026-12-13 12:00:00"]),
        ("0 12 * * 7", ["Sun 2026-11-29 12:00:00", "Sun 2026-12-06 12:00:00", "Sun 2026-12-13 12:00:00"]),
        # A step in a range of one is idle.
        ("29-29/1 2 * * *", ["Fri 2026-11-27 02:29:00", "Sat 2026-11-28 02:29:00", "Sun 2026-11-29 02:29:00"]),
        ("0 12 * 1-jan/3 0-SUN/2", ["Sun 2027-01-03 12:00:00", "Sun 2027-01-10 12:00:00", "Sun 2027-01-17 12:00:00"]),
    ],
)
def test_cron(cron: str, times: list[str]) -> None:
    assert shown(cron=[cron]) == times


@pytest.mark.parametrize(
    ("rrule", "times"),
    [
        ("FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=17", ["Fri 2026-11-27 17:00:00", "Fri 2026-12-25 17:00:00"]),
        ("RRULE:FREQ=YEARLY;BYMONTH=12;BYMONTHDAY=-1", ["Thu 2026-12-31 00:00:00", "Fri 2027-12-31 00:00:00"]),
        ("freq=weekly;byday=mo,th;byhour=6;byminute=15", ["Mon 2026-11-30 06:15:00", "Thu 2026-12-03 06:15:00"]),
        ("FREQ=MINUTELY;BYMINUTE=0,50", ["Thu 2026-11-26 12:00:00", "Thu 2026-11-26 12:50:00"]),
        ("FREQ=DAILY;UNTIL=20261128T000000Z", ["Fri 2026-11-27 00:00:00", "Sat 2026-11-28 00:00:00"]),
        ("FREQ=DAILY;UNTIL=20261127", ["Fri 2026-11-27 00:00:00"]),
        ("FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1", ["Mon 2026-11-30 00:00:00", "Thu 2026-12-31 00:00:00"]),
        ("FREQ=YEARLY;BYMONTH=2;BYYEARDAY=100", []),
        pytest.param("FREQ=DAILY;BYMONTH=2;BYYEARDAY=100", [], marks=pytest.mark.slow),
    ],
)
def test_rules_of_rfc_5545(rrule: str, times: list[str]) -> None:
    assert shown(2, rrule=[rrule]) == times


@pytest.mark.slow
@pytest.mark.parametrize("freq", ["SECONDLY", "MINUTELY", "HOURLY", "DAILY", "WEEKLY", "MONTHLY", "YEARLY"])
def test_a_rule_gives_the_same_times_however_long_after_its_start_it_is_asked(freq: str) -> None:
    start = datetime(2026, 1, 29, 8, 7, 5, tzinfo=UTC)
    asked = Recurrence(rrule=[f"FREQ={freq};INTERVAL=3"], start_ms=ms(start))
    every = [one.at_ms for one in islice(asked.occurrences(ms(start)), 400)]
    for at in (1, 2, 100, 398):
        for since_ms in (every[at - 1] + 1, every[at]):
            assert [one.at_ms for one in islice(asked.occurrences(since_ms), 2)] == every[at : at + 2]


def test_periods_count_from_the_start_or_from_1970() -> None:
    assert shown(2, every_ms=7 * 60_000) == ["Thu 2026-11-26 12:01:00", "Thu 2026-11-26 12:08:00"]
    start_ms = ms(datetime(2026, 11, 26, 11, 59, 30, tzinfo=UTC))
    assert shown(2, every_ms=7 * 60_000, start_ms=start_ms) == ["Thu 2026-11-26 12:06:30", "Thu 2026-11-26 12:13:30"]


def test_several_rules_give_each_time_once() -> None:
    asked = {"cron": ["0 */2 * * *", "0 13 * * *"], "every_ms": 3_600_000 * 3, "rrule": ["FREQ=HOURLY;BYHOUR=16"]}
    times = ["12:00", "13:00", "14:00", "15:00", "16:00", "18:00", "20:00", "21:00"]
    assert [time[-8:-3] for time in shown(8, **asked)] == times


@pytest.mark.parametrize(
    ("exclude", "times"),
    [
        (["2026-11-27"], ["Sat 2026-11-28 09:00:00", "Sun 2026-11-29 09:00:00"]),
        (["2026-11-27T10:00"], ["Sat 2026-11-28 09:00:00", "Sun 2026-11-29 09:00:00"]),
        (["2026-11-27T09:00Z"], ["Sat 2026-11-28 09:00:00", "Sun 2026-11-29 09:00:00"]),
        (["2026-11-27T09:00+02:00"], ["Fri 2026-11-27 09:00:00", "Sat 2026-11-28 09:00:00"]),
        (["cron:* * * * 6,7"], ["Fri 2026-11-27 09:00:00", "Mon 2026-11-30 09:00:00"]),
        (["rrule: FREQ=WEEKLY;BYDAY=FR;BYHOUR=10"], ["Sat 2026-11-28 09:00:00", "Sun 2026-11-29 09:00:00"]),
        (["2026-11-27", "cron:0 10 28 * *"], ["Sun 2026-11-29 09:00:00", "Mon 2026-11-30 09:00:00"]),
    ],
)
def test_what_is_excluded(exclude: list[str], times: list[str]) -> None:
    assert shown(2, cron=["0 10 * * *"], exclude=exclude, zone="Europe/Berlin") == times


def test_start_end_and_count_bound_it() -> None:
    start_ms, end_ms = ms(datetime(2026, 11, 28, 9, tzinfo=UTC)), ms(datetime(2026, 12, 1, 9, tzinfo=UTC))
    days = ["Sat 2026-11-28 09:00:00", "Sun 2026-11-29 09:00:00", "Mon 2026-11-30 09:00:00"]
    assert shown(9, cron=["0 9 * * *"], start_ms=start_ms, end_ms=end_ms) == days
    assert shown(9, cron=["0 9 * * *"], start_ms=start_ms, count=2) == days[:2]
    rest = Recurrence(cron=["0 9 * * *"], start_ms=start_ms, count=3).occurrences(start_ms + 1, before=1)
    assert len(list(rest)) == 2
    assert shown(9, rrule=["FREQ=DAILY;COUNT=3"], start_ms=start_ms) == days


@pytest.mark.slow
def test_what_never_comes_ends() -> None:
    assert shown(cron=["0 0 * * *"], exclude=["cron:0 0 * * *"]) == []
    day_ms, last = 86_400_000, ["Thu 9998-12-31 00:00:00"]
    for zone in ("UTC", "Pacific/Kiritimati", "Pacific/Niue"):
        assert len(shown(every_ms=day_ms, zone=zone, since=datetime(9998, 12, 30, 12, tzinfo=UTC))) == 1
        rules: list[dict[str, Any]] = [{"cron": ["0 0 * * *"]}, {"rrule": ["FREQ=DAILY"]}, {"every_ms": day_ms}]
        for rule in rules:
            assert shown(**rule, zone=zone, since=datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)) == []
    assert shown(cron=["0 0 * * *"], since=datetime(9998, 12, 30, 12, tzinfo=UTC)) == last


def test_rules_that_are_far_apart_are_not_walked_through_time_by_time() -> None:
    """An excluded rule of each second, beside one of each day."""
    assert shown(cron=["0 9 * * *"], exclude=["cron:* * 10-23 * * *"]) == shown(cron=["0 9 * * *"])
    assert shown(1, cron=["0 0 1 1 *"], exclude=["cron:* * * * * 1-5"]) == ["Sat 2028-01-01 00:00:00"]
    assert shown(1, cron=["0 9 * * *"], exclude=["rrule:FREQ=SECONDLY;BYDAY=FR"]) == ["Sat 2026-11-28 09:00:00"]


@pytest.mark.parametrize(
    ("cron", "said"),
    [
        ("61 * * * *", "the minute of cron '61 * * * *' must be 0 to 59, or *, a list (1,3)"),
        ("* 24 * * *", "the hour of cron '* 24 * * *' must be 0 to 23"),
        ("* * 32 * *", "the day of the month of cron '* * 32 * *' must be 1 to 31, L (the last)"),
        ("* * 31W 2 *", "cron '* * 31W 2 *' has a day of the month that none of its months has"),
        ("* * 32W * *", "the day of the month of cron '* * 32W * *' must be 1 to 31, L (the last)"),
        ("* * * FOO *", "the month of cron '* * * FOO *' must be 1 to 12, or JAN to DEC"),
        ("* * * * FRI-SUN", "the day of the week of cron '* * * * FRI-SUN' must be 0 to 7"),
        ("60 * * * * *", "the second of cron '60 * * * * *' must be 0 to 59"),
        ("* * * *", "must have five fields (minute, hour, day of the month, month, day of the week), or six"),
        ("", "must have five fields"),
        ("*/0 * * * *", "the minute of cron '*/0 * * * *'"),
        ("0 0 31 2,4 *", "cron '0 0 31 2,4 *' has a day of the month that none of its months has"),
        ("@never", "must have five fields"),
    ],
)
def test_a_wrong_cron_expression_is_refused_by_its_field(cron: str, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        Recurrence(cron=[cron])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("rrule", "said"),
    [
        ("", "it is one rule, like FREQ=WEEKLY;BYDAY=MO,TH"),
        ("DTSTART:20260101T000000\nRRULE:FREQ=DAILY", "give its DTSTART as start"),
        ("BYDAY=MO", "FREQ must be one of SECONDLY, MINUTELY, HOURLY, DAILY, WEEKLY, MONTHLY, YEARLY, not ''"),
        ("FREQ=OFTEN", "FREQ must be one of"),
        ("FREQ=DAILY;BYHOUR=24", "BYHOUR must be 0 to 23, not '24'"),
        ("FREQ=DAILY;BYMONTHDAY=0", "BYMONTHDAY must be 1 to 31, or -31 to -1 from the end, not '0'"),
        ("FREQ=DAILY;INTERVAL=0", "INTERVAL must be 1 to 1000000, not '0'"),
        ("FREQ=DAILY;INTERVAL=2", "COUNT and INTERVAL count from a start: give one"),
        ("FREQ=DAILY;COUNT=2", "COUNT and INTERVAL count from a start: give one"),
        ("FREQ=DAILY;COUNT=2;UNTIL=20270101", "it takes COUNT or UNTIL, not both"),
        ("FREQ=DAILY;COUNT=100001", "COUNT must be 1 to 100000"),
        ("FREQ=WEEKLY;BYDAY=MONDAY", "BYDAY must be days like MO,TH, or -1FR for the last Friday, not 'MONDAY'"),
        ("FREQ=DAILY;UNTIL=tomorrow", "UNTIL must be like 20271231 or 20271231T235959Z, not 'TOMORROW'"),
        ("FREQ=DAILY;UNTIL=20271332", "UNTIL must be like"),
        ("FREQ=DAILY;BYEASTER=0", "there is no part BYEASTER: the parts are FREQ, UNTIL, INTERVAL"),
        ("FREQ=DAILY;;", "'' must be a name and a value, like BYHOUR=9"),
        ("FREQ=DAILY;FREQ=DAILY", "each name once"),
        ("FREQ=DAILY;BYSETPOS=1", "BYSETPOS needs FREQ=WEEKLY or a longer one"),
        ("FREQ=HOURLY;BYMONTH=2,4;BYMONTHDAY=31", "none of its months has a day of BYMONTHDAY"),
        (
            "FREQ=MONTHLY;BYDAY=99MO",
            "the number before a day of BYDAY is 1 to 5 with FREQ=MONTHLY or 1 to 53 with FREQ=Y",
        ),
        ("FREQ=WEEKLY;BYDAY=1MO", "the number before a day of BYDAY is 1 to 5 with FREQ=MONTHLY"),
        ("FREQ=WEEKLY;WKST=XX", "WKST must be one of MO, TU"),
        ("FREQ=MONTHLY;BYDAY=2MO;BYSETPOS=0", "BYSETPOS must be 1 to 366"),
    ],
)
def test_a_wrong_rule_is_refused_by_its_part(rrule: str, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        Recurrence(rrule=[rrule])
    assert said in str(refused.value)


def test_a_rule_that_turns_out_to_be_empty_is_refused() -> None:
    start_ms = ms(datetime(2026, 1, 1, tzinfo=UTC))
    with pytest.raises(Invalid, match="it does not fit together"):
        shown(rrule=["FREQ=SECONDLY;INTERVAL=86400;BYHOUR=5"], start_ms=start_ms)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "a schedule needs a rule: give cron (like '0 9 * * 1-5'), every (like 15m) or rrule"),
        ({"every_ms": 999}, "every must be at least 1s, not 999 ms"),
        ({"cron": ["@daily"], "zone": "Mars/Base"}, "no time zone 'Mars/Base' is known here"),
        ({"cron": ["@daily"], "zone": "../etc/passwd"}, "no time zone '../etc/passwd' is known here"),
        ({"cron": ["@daily"], "exclude": ["soon"]}, "exclude 'soon' must be a date (2026-12-25), a time"),
        ({"cron": ["@daily"], "exclude": ["2026-13-01"]}, "exclude '2026-13-01' must be a date"),
        ({"cron": ["@daily"], "exclude": ["cron:61 * * * *"]}, "the minute of cron '61 * * * *'"),
        ({"cron": ["@daily"], "count": 3}, "count needs a start to count from"),
        ({"cron": ["@daily"], "count": -1, "start_ms": 5}, "count must be 1 to 100000, not -1: give an end instead"),
        ({"cron": ["@daily"], "count": 100_001, "start_ms": 5}, "count must be 1 to 100000, not 100001"),
        ({"cron": ["@daily"] * 99, "exclude": ["cron:@daily"] * 2}, "a schedule has at most 100 rules"),
        ({"cron": ["@daily"], "start_ms": 253_370_764_800_001}, "start and end must lie before the year 9999"),
        ({"cron": ["@daily"], "start_ms": 5, "end_ms": 5}, "end must be after start"),
    ],
)
def test_other_mistakes_are_refused_by_their_field(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid) as refused:
        Recurrence(**asked)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"cron": ["0 9 * * 1-5"]}, "At 09:00 on Monday through Friday, in UTC"),
        ({"cron": ["0 9 15W * *"], "zone": "Asia/Tokyo"}, "By the cron expression 0 9 15W * *, in Asia/Tokyo"),
        ({"cron": ["0 9 31 2 1"]}, "At 09:00 on Monday in February, in UTC"),
        ({"every_ms": 900_000, "rrule": ["FREQ=DAILY"]}, "By the rule FREQ=DAILY and every 15m, in UTC"),
        # Both kinds of day, of which either counts; and one of them covers all days.
        ({"cron": ["0 9 15 * 1"]}, "At 09:00 on the 15th day of every month, or at 09:00 on Monday, in UTC"),
        ({"cron": ["0 9 1-31 * 1"]}, "At 09:00 every day, in UTC"),
        ({"cron": ["0 9 15 * 1-7"]}, "At 09:00 every day, in UTC"),
        ({"cron": ["0 6-6/3 * * *"]}, "At 06:00 every day, in UTC"),
    ],
)
def test_words(asked: dict[str, Any], words: str) -> None:
    assert Recurrence(**asked).words() == words


@pytest.mark.slow
def test_days_that_are_excluded_in_a_row_end_nothing() -> None:
    holidays = [f"2026-12-{day:02}" for day in range(1, 32)]
    assert shown(1, datetime(2026, 12, 1, tzinfo=UTC), cron=["* * * * * *"], exclude=holidays) == [
        "Fri 2027-01-01 00:00:00"
    ]
    # Where a clock is set back over midnight, the day after begins at the first of both midnights.
    around = {"cron": ["*/10 * * * *"], "zone": "America/Havana", "exclude": ["2026-10-31"]}
    since = datetime(2026, 10, 31, 3, 50, tzinfo=UTC)
    assert shown(2, since, **around) == ["Sat 2026-10-31 03:50:00", "Sun 2026-11-01 04:00:00"]


@pytest.mark.slow
def test_a_walk_says_how_far_it_has_come_and_can_go_on_there() -> None:
    asked = Recurrence(cron=["* * * * * *"], exclude=["cron:* 0-58 * * * *"])
    whole = [one.at_ms for one in islice(asked.occurrences(ms(FROM)), 200)]
    found: list[int] = []
    at_ms = ms(FROM)
    while len(found) < 200:
        for one in asked.walk(at_ms):
            if isinstance(one, int):
                assert one > at_ms
                at_ms = one
                break  # and begin again there
            at_ms = one.at_ms + 1
            found.append(one.at_ms)
            if len(found) == 200:
                break
    assert found == whole


def test_a_rare_rule_is_found_and_its_silence_remembered() -> None:
    asked = Recurrence(rrule=["FREQ=DAILY;BYMONTH=2;BYMONTHDAY=29;BYDAY=MO"])
    for since in (FROM, FROM.replace(year=2030), FROM):
        found = islice(asked.occurrences(ms(since)), 2)
        years = [datetime.fromtimestamp(one.at_ms / 1_000, UTC).year for one in found]
        assert years == [2044, 2072]
    assert [datetime.fromtimestamp(next(asked.occurrences(ms(FROM.replace(year=2045)))).at_ms / 1_000, UTC).year] == [
        2072
    ]


@pytest.mark.parametrize("rrule", ["FREQ=YEARLY;INTERVAL=3;BYWEEKNO=53", "FREQ=MONTHLY;BYDAY=5FR;INTERVAL=5"])
def test_a_rule_is_the_same_however_far_it_is_moved(rrule: str) -> None:
    """It is walked some cycles of 400 years later, where the library is quicker."""
    start = datetime(2001, 1, 5, tzinfo=UTC)
    asked = Recurrence(rrule=[rrule], start_ms=ms(start))
    found = [
        datetime.fromtimestamp(one.at_ms / 1_000, UTC).replace(tzinfo=None)
        for one in islice(asked.occurrences(ms(start)), 20)
    ][:20]
    assert found == list(islice(rrulestr(rrule, dtstart=start.replace(tzinfo=None)), 20))


HOURS, SIXTY = ",".join(map(str, range(24))), ",".join(map(str, range(60)))
EACH_SECOND = f"BYHOUR={HOURS};BYMINUTE={SIXTY};BYSECOND={SIXTY}"


@pytest.mark.parametrize("freq", ["DAILY", "WEEKLY", "MONTHLY;BYMONTHDAY=26,27", "YEARLY;BYDAY=MO,TU,WE,TH,FR,SA,SU"])
def test_no_rule_walks_through_the_seconds_of_years(freq: str) -> None:
    """It would take a quarter of an hour, at each look."""
    assert shown(2, FROM.replace(second=7), rrule=[f"FREQ={freq};{EACH_SECOND}"]) == [
        "Thu 2026-11-26 12:00:07",
        "Thu 2026-11-26 12:00:08",
    ]


@pytest.mark.slow
def test_the_seconds_of_a_day_before_a_time_are_not_walked_through() -> None:
    """It would take some minutes: each rule that excludes begins again at each time."""
    within = f"BYHOUR={HOURS};BYMINUTE={SIXTY};BYSECOND={','.join(map(str, range(1, 60)))}"
    late = FROM.replace(hour=23, minute=30)
    asked = Recurrence(cron=["* * * * *"], exclude=[f"rrule:FREQ=DAILY;{within}"] * 99)
    found = [one.at_ms for one in islice(asked.occurrences(ms(late)), 25)]
    assert found == [ms(late) + 60_000 * minute for minute in range(25)]


def test_the_last_minute_of_all_is_no_error() -> None:
    last = "FREQ=YEARLY;BYMONTH=12;BYMONTHDAY=31;BYHOUR=23;BYMINUTE=59;BYSECOND=0"
    assert len(shown(9, datetime(9996, 12, 1, tzinfo=UTC), rrule=[last])) == 3  # nothing recurs after 9998


def test_times_of_day_that_are_chosen_by_place_have_a_bound() -> None:
    with pytest.raises(Invalid, match="with BYSETPOS, a day has at most 1440 times, not 86400"):
        Recurrence(rrule=[f"FREQ=MONTHLY;BYMONTHDAY=1;BYSETPOS=5;{EACH_SECOND}"])


@pytest.mark.parametrize("interval", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("freq", ["MONTHLY", "YEARLY"])
def test_a_start_that_is_moved_keeps_day_and_phase(freq: str, interval: int) -> None:
    rule = f"FREQ={freq};INTERVAL={interval}"
    for start in (datetime(1972, 2, 29, 8, 15), datetime(1999, 12, 31, 23, 59, 59), datetime(2001, 5, 30)):
        from_start = islice((one for one in rrulestr(rule, dtstart=start) if one >= FROM.replace(tzinfo=None)), 3)
        moved = shown(rrule=[rule], start_ms=ms(start.replace(tzinfo=UTC)))
        assert moved == [f"{one:%a %Y-%m-%d %H:%M:%S}" for one in from_start]


@pytest.mark.prove
@pytest.mark.slow
def test_what_many_rules_exclude_is_bounded_in_all() -> None:
    """Each of a hundred rules is walked between two times. Those steps count, as excluded times do."""
    rules = ["cron:1-59/4 * * * * *"] * 80
    asked = Recurrence(cron=["* * * * *"], exclude=[*rules, "cron:* * * * *"])
    first = next(asked.walk(ms(FROM)))
    assert isinstance(first, int) and ms(FROM) < first <= ms(FROM) + 120_000
    assert list(asked.occurrences(ms(FROM))) == []
    some = Recurrence(cron=["* * * * *"], exclude=[*rules, "cron:1-59 * * * *"])
    assert 0 < len(list(islice(some.occurrences(ms(FROM)), 500))) < 500


@pytest.mark.slow
def test_rules_that_give_the_same_times_count_as_steps() -> None:
    asked = Recurrence(cron=["* * * * *"] * 100)
    walked = list(islice(asked.walk(ms(FROM)), 50))
    assert sum(isinstance(one, int) for one in walked) >= 4


def test_rules_that_exclude_cost_nothing_before_the_first_time() -> None:
    """They begin at the time that is asked for, and not in 1970."""
    holidays = [f"cron:0 9 {day} {month} *" for month in range(1, 11) for day in (3, 9, 12, 20, 25, 27)]
    first = next(Recurrence(cron=["0 9 * * *"], exclude=holidays).walk(ms(FROM)))
    assert not isinstance(first, int) and first.at_ms == ms(datetime(2026, 11, 27, 9, tzinfo=UTC))


@pytest.mark.parametrize("exclude", ["2027-03-28T02:30", "2027-03-28T03:30", "2027-03-28", "cron:30 3 28 3 *"])
def test_a_time_that_clocks_moved_is_excluded_as_named_and_as_shown(exclude: str) -> None:
    from_time = datetime(2027, 3, 27, tzinfo=UTC)
    assert shown(2, from_time, cron=["30 2 * * *"], zone="Europe/Berlin")[1] == "Sun 2027-03-28 01:30:00"
    found = shown(2, from_time, cron=["30 2 * * *"], zone="Europe/Berlin", exclude=[exclude])
    assert found == ["Sat 2027-03-27 01:30:00", "Mon 2027-03-29 00:30:00"]
