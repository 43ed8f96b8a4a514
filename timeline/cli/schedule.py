"""`timeline schedule …`: when something recurs."""

from __future__ import annotations

from itertools import islice
from zoneinfo import ZoneInfo

import click

from timeline.cli.app import Suggesting, say
from timeline.cli.options import Milliseconds, json_option, parse_time, zone_of
from timeline.cli.output import print_json, print_table
from timeline.clock import Clock
from timeline.driver.times import as_datetime
from timeline.recurrence import FoldPolicy, GapPolicy, Occurrence, Recurrence, WallChange
from timeline.wording import shown_lateness

MOST_SHOWN = 10_000
_CHANGES = {
    WallChange.NONE: "",
    WallChange.SKIPPED: "clocks skip {wall:%H:%M} that day",
    WallChange.FIRST: "the first of two {wall:%H:%M}",
    WallChange.SECOND: "the second of two {wall:%H:%M}",
}


@click.group(cls=Suggesting)
def schedule() -> None:
    """Show the times that a rule gives. Nothing is scheduled.

    \b
    Example:
      timeline schedule preview "0 9 * * 1-5" --zone Europe/Berlin
    """


@schedule.command()
@click.argument("expressions", nargs=-1, metavar="[CRON]…")
@click.option("--every", default=None, type=Milliseconds(), help="A period, counted from --start or from 1970.")
@click.option("--rrule", multiple=True, help="A rule of RFC 5545, like FREQ=MONTHLY;BYDAY=-1FR. May be repeated.")
@click.option(
    "--exclude",
    multiple=True,
    metavar="DATE|TIME|RULE",
    help="What is left out: 2026-12-25, 'cron:* * 25 12 *', 'rrule:FREQ=…'. May be repeated.",
)
@click.option("--zone", default="UTC", show_default=True, help="Time zone of the rules.")
@click.option(
    "--gap",
    type=click.Choice([one.value for one in GapPolicy]),
    help="A time that clocks skip is later, or left out. Default: by the rule.",
)
@click.option(
    "--fold",
    type=click.Choice([one.value for one in FoldPolicy]),
    help="Which one counts of a time that clocks show twice. Default: by the rule.",
)
@click.option("--start", metavar="TIME", help="No occurrence before it.")
@click.option("--end", metavar="TIME", help="No occurrence at it or after it.")
@click.option("--count", type=click.IntRange(min=1), help="The most occurrences, from --start on.")
@click.option("--from", "since", metavar="TIME", default="now", show_default=True, help="Show those from this time on.")
@click.option("--next", "shown", default=10, show_default=True, type=click.IntRange(1, MOST_SHOWN), help="How many.")
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
    # `count` counts from the start on. Without it there may be years of seconds in between.
    found = asked.occurrences(start_ms if count else since_ms)
    following = list(islice((one for one in found if one.at_ms >= since_ms), shown))
    if as_json:
        print_json([_time(one, where) for one in following])
        return
    say(asked.words(), "")
    now_ms = Clock().now_ms()
    rows = [
        (_shown(one, where), _distance(one.at_ms - now_ms), _CHANGES[one.change].format(wall=one.wall))
        for one in following
    ]
    print_table(("when", "in", "clocks"), rows, empty="none from that time on")


def _time(one: Occurrence, zone: ZoneInfo) -> str:
    return as_datetime(one.at_ms).astimezone(zone).isoformat()


def _shown(one: Occurrence, zone: ZoneInfo) -> str:
    when = as_datetime(one.at_ms).astimezone(zone)
    return f"{when:%a} {when.isoformat(sep=' ')}"


def _distance(ahead_ms: int) -> str:
    """Return how far ahead a time is, or with a minus how long ago."""
    return shown_lateness(ahead_ms) if ahead_ms >= 0 else f"-{shown_lateness(-ahead_ms)}"
