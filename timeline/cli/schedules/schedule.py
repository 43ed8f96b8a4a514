"""`timeline schedule …`: create, look at and change recurring schedules."""

from __future__ import annotations

import base64
from itertools import islice
from typing import Any
from zoneinfo import ZoneInfo

import click

import timeline
from timeline.cli.app import DONE, REFUSED, SOME_FAILED, Failed, Suggesting, complain, say
from timeline.cli.options import (
    ClientOptions,
    check_topic,
    client_command,
    completed,
    json_option,
    parse_time,
    topic_names,
    zone_of,
    zone_option,
)
from timeline.cli.output import (
    payload_fields,
    print_fields,
    print_json,
    print_table,
    shown_payload,
    tell_receipts,
    time_cell,
)
from timeline.cli.schedules.importing import import_
from timeline.cli.schedules.options import (
    TIME_COLUMNS,
    added,
    distance,
    end_option,
    every_option,
    exclude_option,
    policy_options,
    rrule_option,
    shown_wall,
    specification_arguments,
    specification_options,
    start_option,
    time_rows,
    zoned,
)
from timeline.clock import Clock
from timeline.driver.schedules import ScheduleView, specification_fields
from timeline.driver.times import as_datetime, iso_or_none, shown_time
from timeline.errors import Invalid
from timeline.recurrence import FoldPolicy, GapPolicy, Recurrence
from timeline.schedules import Overlap, Specification
from timeline.wording import shown_duration

LS_COLUMNS = ("TOPIC", "NAME", "STATE", "NEXT", "MISSED", "RULE")
MOST_SHOWN = 10_000
next_option = click.option(
    "--next", "shown", default=10, show_default=True, type=click.IntRange(1, MOST_SHOWN), help="How many."
)
pending_option = click.option(
    "--pending",
    type=click.Choice(["cancel", "keep"]),
    default="cancel",
    show_default=True,
    help="What becomes of messages that are produced already and wait for their time.",
)


@click.group(cls=Suggesting)
def schedule() -> None:
    """Create, look at and change recurring schedules. Each of its times produces one message into its topic.

    \b
    Example:
      timeline schedule create invoices monthly --cron "0 6 1 * *" \\
        --zone Europe/Berlin --payload "send the invoices"
      timeline schedule show invoices monthly
      crontab -l | timeline schedule import jobs - --dry-run
    """


schedule.add_command(import_)


def schedule_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Return the topic's schedules that begin with `begun`, for a shell's completion."""

    async def names(tl: timeline.Timeline) -> list[str]:
        return sorted([each.name async for each in tl.schedules(context.params.get("topic"))])

    return completed(context, begun, names)


def of_schedule(function: Any) -> Any:
    """Add the arguments TOPIC and NAME."""
    function = click.argument("name", shell_complete=schedule_names)(function)
    return click.argument("topic", shell_complete=topic_names)(function)


@schedule.command()
@of_schedule
@specification_options
@click.option("--paused", is_flag=True, help="Produce nothing until it is resumed.")
@client_command
async def create(
    tl: timeline.Timeline, options: ClientOptions, topic: str, name: str, paused: bool, **given: Any
) -> None:
    """Create schedule NAME, which produces messages into TOPIC. To repeat it with the same options is no error.

    'timeline schedule preview --help' explains rules. In text of the payload and of headers, {occurrence} stands for
    the time of the message, and {sequence} for its number.

    \b
    Example:
      timeline schedule create invoices monthly --cron "0 6 1 * *" \\
        --zone Europe/Berlin --payload "invoices of {occurrence}"
      timeline schedule create checks health --every 15m --overlap skip
    """
    asked = specification_arguments(given, given["zone"] or "UTC")
    Specification(topic, name, **specification_fields(asked))  # a mistake is refused before anything is asked
    stood = await tl.get_schedule(topic, name)
    made = await tl.schedule(topic, name, paused=paused, **asked)
    _tell(made, options, "created" if stood is None else "there already:")


@schedule.command("ls")
@click.argument("topic", required=False, shell_complete=topic_names)
@zone_option
@client_command
async def ls_(tl: timeline.Timeline, options: ClientOptions, topic: str | None, zone: ZoneInfo | None) -> None:
    """List the schedules of TOPIC, or of all topics.

    \b
    Example:
      timeline schedule ls
      timeline schedule ls invoices --json
    """
    if topic is not None:
        await check_topic(tl, topic)
    found = sorted([each async for each in tl.schedules(topic)], key=lambda each: (each.topic, each.name))
    if options.as_json:
        for each in found:
            print_json(schedule_json(each))
        return
    rows = [
        (
            each.topic, each.name, each.status, time_cell(each.next_ms, zone) if each.next_ms else "–",
            each.state.missed, _rule(each.specification),
        )
        for each in found
    ]  # fmt: skip
    columns = LS_COLUMNS
    if topic is not None:
        columns, rows = columns[1:], [row[1:] for row in rows]  # type: ignore[misc, assignment]
    where = "" if topic is None else f" of {topic}"
    empty = f"there are no schedules{where}: 'timeline schedule create TOPIC NAME' makes one"
    print_table(columns, rows, right=("MISSED",), empty=empty)
    for each in found:
        _warn(each)


@schedule.command()
@of_schedule
@next_option
@client_command
async def show(tl: timeline.Timeline, options: ClientOptions, topic: str, name: str, shown: int) -> None:
    """Show schedule NAME of TOPIC: what it says, how far it has come, and its next times.

    \b
    Example:
      timeline schedule show invoices monthly --next 3
    """
    found = await _found(tl, topic, name)
    zone = ZoneInfo(found.specification.zone)
    coming = list(islice(found.occurrences(), shown))
    if options.as_json:
        print_json(schedule_json(found) | {"times": [zoned(one.at_ms, zone) for one in coming]})
        return
    print_fields(_fields(found, zone))
    say("")
    if found.paused:
        say(f"paused: 'timeline schedule resume {topic} {name}' lets it go on. If it were resumed now:")
    print_table(TIME_COLUMNS, time_rows(coming, zone), empty="no occurrence was found ahead")
    _warn(found)


def _warn(found: ScheduleView) -> None:
    """Print what is wrong with a schedule."""
    for warning in found.warnings:
        complain(f"{found.topic}/{found.name}: {warning}")


@schedule.command()
@of_schedule
@specification_options
@pending_option
@click.option("--if-revision", type=click.IntRange(min=1), metavar="N", help="Only if it stands at this revision.")
@client_command
async def update(
    tl: timeline.Timeline, options: ClientOptions, topic: str, name: str, pending: str, if_revision: int | None,
    **given: Any,
) -> None:  # fmt: skip
    """Change schedule NAME of TOPIC. Other fields stay as they are.

    A rule replaces all former rules, an --exclude all former ones, and a --header all headers. An empty text clears
    --exclude, --start, --end, --tag, --payload and --header; 0 clears --count, 0s --jitter and --expires.

    \b
    Example:
      timeline schedule update invoices monthly --cron "0 7 1 * *"
    """
    if not any(value not in (None, ()) for value in given.values()):
        raise Invalid("give at least one option to change, such as --cron '0 7 * * *'")
    found = await _found(tl, topic, name)
    asked = specification_arguments(given, given["zone"] or found.specification.zone, replacing=True)
    _tell(await found.update(pending=pending, if_revision=if_revision, **asked), options, "updated")


@schedule.command()
@of_schedule
@pending_option
@client_command
async def pause(tl: timeline.Timeline, options: ClientOptions, topic: str, name: str, pending: str) -> None:
    """Stop schedule NAME of TOPIC until it is resumed.

    \b
    Example:
      timeline schedule pause invoices monthly
    """
    found = await _found(tl, topic, name)
    _tell(await found.pause(pending=pending), options, "paused")


@schedule.command()
@of_schedule
@client_command
async def resume(tl: timeline.Timeline, options: ClientOptions, topic: str, name: str) -> None:
    """Let schedule NAME of TOPIC go on. Occurrences during the pause are not produced, and not missed.

    \b
    Example:
      timeline schedule resume invoices monthly
    """
    found = await _found(tl, topic, name)
    _tell(await found.resume(), options, "resumed")


@schedule.command()
@of_schedule
@client_command
async def trigger(tl: timeline.Timeline, options: ClientOptions, topic: str, name: str) -> int:
    """Produce one message of schedule NAME into TOPIC now, beside its times.

    \b
    Example:
      timeline schedule trigger invoices monthly
    """
    found = await _found(tl, topic, name)
    return tell_receipts([await found.trigger()], options.as_json, "produced")


@schedule.command()
@of_schedule
@click.option("--from", "since", metavar="TIME", required=True, help="The first time that counts.")
@click.option("--to", "until", metavar="TIME", default="now", show_default=True, help="The end; it does not count.")
@click.option("--dry-run", is_flag=True, help="Only count.")
@client_command
async def backfill(
    tl: timeline.Timeline, options: ClientOptions, topic: str, name: str, since: str, until: str, dry_run: bool
) -> int:
    """Produce what schedule NAME of TOPIC did not produce in a time that is over, at most 10,000 messages.

    What it has produced is not produced again. Local times are in the schedule's zone.

    \b
    Example:
      timeline schedule backfill invoices monthly --from 2026-01-01T00:00 \\
        --to 2026-04-01T00:00 --dry-run
    """
    found = await _found(tl, topic, name)
    zone = found.specification.zone
    start, end = (
        as_datetime(parse_time(text, option, zone).absolute_ms())
        for text, option in ((since, "--from"), (until, "--to"))
    )
    if start >= end:
        raise Invalid("--from must lie before --to")
    done = await found.backfill(start, end, dry_run=dry_run)
    if options.as_json:
        print_json({"produced": done.produced, "present": done.present, "failed": done.failed, "dry_run": dry_run})
    else:
        present = f"; {done.present:,} were produced before" if done.present else ""
        say(f"{done.produced:,} {'would be ' if dry_run else ''}produced{present}")
    if done.failed:
        complain(f"{topic} refused {done.failed:,}: the broker's log says why")
    return SOME_FAILED if done.failed else DONE


@schedule.command()
@of_schedule
@pending_option
@client_command
async def delete(tl: timeline.Timeline, options: ClientOptions, topic: str, name: str, pending: str) -> None:
    """Delete schedule NAME of TOPIC. Messages that are due stay; those that wait for their time go with it.

    \b
    Example:
      timeline schedule delete invoices monthly
      timeline schedule delete invoices monthly --pending keep
    """
    found = await _found(tl, topic, name)
    await found.delete(pending=pending)
    if options.as_json:
        print_json({"topic": topic, "name": name, "deleted": True})
    else:
        say(f"deleted {topic}/{name}")


async def _found(tl: timeline.Timeline, topic: str, name: str) -> timeline.Schedule:
    """Return a schedule. Raise Failed, which names what is there, when there is none."""
    found = await tl.get_schedule(topic, name)
    if found is not None:
        return found
    await check_topic(tl, topic)
    there = sorted([each.name async for each in tl.schedules(topic)])
    some = f"There are: {', '.join(there[:8])}{', …' if len(there) > 8 else ''}." if there else "It has none."
    raise Failed(REFUSED, f"NOT_FOUND: {topic} has no schedule {name!r}. {some} 'timeline schedule create' makes one.")


def _tell(made: timeline.Schedule, options: ClientOptions, done: str) -> None:
    """Print what was `done` to a schedule, and when it is next."""
    if options.as_json:
        print_json(schedule_json(made))
        return
    says, zone = made.specification, ZoneInfo(made.specification.zone)
    say(f"{done} {made.topic}/{made.name}: {says.words()}", indent=4)
    if made.next_ms:
        say(f"next {shown_wall(made.next_ms, zone)}, in {distance(made.next_ms - Clock().now_ms())}")
    elif not made.paused:
        say("no occurrence was found ahead")
    _warn(made)


def _rule(says: Specification) -> str:
    """Return the rules of a schedule as they were given, for a table."""
    every = [f"every {shown_duration(says.every_ms)}"] if says.every_ms else []
    zone = "" if says.zone == "UTC" else f" {says.zone}"
    return " + ".join([*says.cron, *every, *says.rrule]) + zone


def _fields(found: timeline.Schedule, zone: ZoneInfo) -> dict[str, object]:
    """Return what `show` prints of a schedule."""
    says, state = found.specification, found.state
    fields: dict[str, object] = {
        "topic": found.topic,
        "name": found.name,
        "state": _state(found),
        "when": says.words(),
        "rule": _rule(says),
    }
    if says.exclude:
        fields["exclude"] = ", ".join(says.exclude)
    bounds = {"start": says.start_ms, "end": says.end_ms}
    fields |= {name: shown_wall(at_ms, zone) for name, at_ms in bounds.items() if at_ms}
    fields |= {name: value for name, value in (("count", says.count), ("gap", says.gap), ("fold", says.fold)) if value}
    if says.jitter_ms:
        fields["jitter"] = shown_duration(says.jitter_ms)
    fields["catch up"] = f"{says.catch_up}, at most {shown_duration(says.window_ms)} back"
    if says.overlap is not Overlap.ALLOW:
        fields["overlap"] = says.overlap
    late = f", {state.caught_up:,} of them caught up" if state.caught_up else ""
    fields["produced"] = f"{state.produced + state.caught_up:,}{late}"
    counts = {"missed": state.missed, "skipped": state.skipped, "failed": state.failed}
    fields |= {name: f"{count:,}" for name, count in counts.items() if count or name == "missed"}
    if state.last_id:
        ahead = ", put ahead of it" if state.last_ms > Clock().now_ms() else ""
        fields["last"] = f"{shown_wall(state.last_ms, zone)}{ahead}"
    fields["group"] = says.group
    if says.tag:
        fields["tag"] = says.tag
    if says.expires_ms:
        fields["expires"] = f"{shown_duration(says.expires_ms)} after its due time"
    fields |= {f"header {name}": value for name, value in says.headers.items()}
    fields["payload"] = shown_payload(says.payload, 2_000) if found.payload_shown else "not shown to this token"
    return fields | {"revision": _revision(found)}


def _state(found: timeline.Schedule) -> str:
    if found.status == "waiting":
        return "waiting: the message before is not finished"
    return "ended: no occurrence follows" if found.status == "ended" else found.status


def _revision(found: timeline.Schedule) -> str:
    state = found.state
    when = state.edited_ms or state.created_ms
    done = "created" if found.revision == 1 else "edited"
    return f"{found.revision}, {done} {shown_time(when)}" if when else str(found.revision)


def schedule_json(found: ScheduleView) -> dict[str, Any]:
    """Return a schedule for machines. Durations are in milliseconds, as their names say."""
    says, state = found.specification, found.state
    shown = says.to_json()
    payload = base64.b64decode(shown.pop("payload"))
    if not found.payload_shown:
        del shown["headers"]
    times = {name: iso_or_none(shown.pop(f"{name}_ms")) for name in ("start", "end")}
    head = {name: shown.pop(name) for name in ("topic", "name")}
    return {
        **head,
        "state": found.status,
        "revision": found.revision,
        "next": iso_or_none(found.next_ms),
        "last": iso_or_none(state.last_ms) if state.last_id else None,
        "last_id": state.last_id or None,
        **{name: getattr(state, name) for name in ("produced", "caught_up", "missed", "skipped", "failed")},
        "created": iso_or_none(state.created_ms),
        "edited": iso_or_none(state.edited_ms),
        **shown,
        **times,
        **(payload_fields(payload) if found.payload_shown else {}),
        "warnings": list(found.warnings),
    }


@schedule.command()
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
