"""`timeline schedule preview`: when a rule recurs."""

from __future__ import annotations

import click

from timeline.cli.app import say
from timeline.cli.options import json_option, parse_time, zone_of
from timeline.cli.output import print_json, print_table
from timeline.cli.schedules.options import (
    TIME_COLUMNS,
    added,
    end_option,
    every_option,
    exclude_option,
    policy_options,
    rrule_option,
    start_option,
    time_rows,
    zoned,
)
from timeline.recurrence import FoldPolicy, GapPolicy, Recurrence

MOST_SHOWN = 10_000
next_option = click.option(
    "--next", "shown", default=10, show_default=True, type=click.IntRange(1, MOST_SHOWN), help="How many."
)


@click.command()
@click.argument("expressions", nargs=-1, metavar="[CRON]…")
@added(every_option, rrule_option, exclude_option)
@click.option("--zone", default="UTC", show_default=True, help="Time zone of the rules.")
@added(policy_options(), start_option, end_option)
@click.option("--count", type=click.IntRange(min=1), help="The most occurrences, from --start on.")
@click.option("--from", "since", metavar="TIME", default="now", show_default=True, help="Show those from this time on.")
@next_option
@json_option
def preview(
    expressions: tuple[str, ...], every: int | None, rrule: tuple[str, ...], exclude: tuple[str, ...], zone: str,
    gap: str | None, fold: str | None, start: str | None, end: str | None, count: int | None, since: str, shown: int,
    as_json: bool,
) -> None:  # fmt: skip
    """Show the next times of CRON, of --every or of --rrule, or of several together.

    CRON has five fields in quotes: minute, hour, day of the month, month, day of the week. A sixth one in front is the
    second. Days may be L (the last), 5L (the last Friday) and 5#3 (the third Friday). LW is the last day from Monday to
    Friday, and 15W the one nearest to the 15th. Holidays are not known. If both days are given, either one counts.

    --every is a fixed length: 1d is 24 hours. For the same time each day, use CRON. The table names each time that a
    change of clocks concerns. Rules that go with the clock's time, like */15 * * * *, go on through a change. Other
    rules move a skipped time by the length of the gap, and take the first of two equal times.

    \b
    Example:
      timeline schedule preview "0 9 * * 1-5" --zone Europe/Berlin
      timeline schedule preview "30 2 * * *" --zone Europe/Berlin \\
        --from 2027-03-27T00:00 --next 3
      timeline schedule preview --rrule "FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=17" \\
        --exclude 2026-12-25 --json
    """
    where = zone_of(zone)
    assert where is not None

    def at_ms(text: str | None, option: str) -> int:
        return 0 if text is None else parse_time(text, option, zone).absolute_ms()

    start_ms = at_ms(start, "--start")
    asked = Recurrence(
        cron=expressions,
        every_ms=every or 0,
        rrule=rrule,
        exclude=exclude,
        start_ms=start_ms,
        end_ms=at_ms(end, "--end"),
        count=count or 0,
        zone=zone,
        gap=GapPolicy(gap) if gap else None,
        fold=FoldPolicy(fold) if fold else None,
    )
    since_ms = at_ms(since, "--from")
    following = asked.following(since_ms, shown)
    if as_json:
        print_json([zoned(one.at_ms, where) for one in following])
        return
    say(asked.words(), "")
    print_table(TIME_COLUMNS, time_rows(following, where), empty="none from that time on")
