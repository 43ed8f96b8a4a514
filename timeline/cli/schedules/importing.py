"""`timeline schedule import`: a crontab becomes schedules."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo

import click

import timeline
from timeline.cli.app import SOME_FAILED, complain, say
from timeline.cli.options import ClientOptions, check_topic, client_command, topic_names, zone_of
from timeline.cli.output import Progress, print_json, print_table, shown_payload, time_cell
from timeline.cli.schedules.crontab import (
    Crontab,
    CrontabEntry,
    CrontabNote,
    CrontabStyle,
    machine_zone,
    named_entries,
    read_crontab,
)
from timeline.cli.schedules.options import HANDLING, added, read_whole, specification_arguments
from timeline.clock import Clock
from timeline.driver.schedules import specification_fields
from timeline.driver.tasks import all_of
from timeline.driver.times import iso_or_none
from timeline.errors import Closed, Exists, Invalid, TimelineError, TooLarge, Unavailable, explain
from timeline.schedules import Specification

MAX_CRONTAB_BYTES = 1024 * 1024
COLUMNS = ("LINE", "NAME", "CRON", "NEXT", "RESULT", "COMMAND")
CREATED, WOULD, THERE = "created", "to create", "there already"
AT_A_TIME = 16
"""Schedules that are created at the same time."""
LIKELY_USERS = ("root", "www-data", "nobody")
"""Users of other machines' crontabs, which this machine may lack."""


@dataclass(slots=True)
class ImportedEntry:
    """An entry of a crontab, the schedule that stands for it, and what became of it: a sentence if it was refused."""

    entry: CrontabEntry
    specification: Specification
    result: str
    refused: bool = False


@click.command("import")
@click.argument("topic", shell_complete=topic_names)
@click.argument("crontab")
@click.option("--zone", metavar="ZONE", help="Time zone of the crontab's times. Default: this machine's.")
@click.option(
    "--style",
    type=click.Choice([one.value for one in CrontabStyle]),
    help="A user's crontab, or the system's, with a user before each command. Default: by the lines.",
)
@added(*HANDLING)
@click.option("--paused", is_flag=True, help="Create them paused.")
@click.option("--dry-run", is_flag=True, help="Show what would be created.")
@client_command
async def import_(
    tl: timeline.Timeline, options: ClientOptions, topic: str, crontab: str, zone: str | None, style: str | None,
    paused: bool, dry_run: bool, **given: Any,
) -> int:  # fmt: skip
    """Turn a crontab into schedules of TOPIC. CRONTAB is a file, or - for standard input.

    Each line becomes a schedule, named after its command. The payload of its messages is the command, which a consumer
    of TOPIC runs. Text behind a % becomes the header stdin, and the user of a system crontab the header user. CRON_TZ
    and RANDOM_DELAY count. Lines that cannot be taken, such as @reboot, are named. To run it again creates nothing
    twice.

    \b
    Example:
      crontab -l | timeline schedule import jobs - --dry-run
      timeline schedule import jobs /etc/crontab --zone Europe/Berlin
    """
    chosen = CrontabStyle(style) if style else None
    read = read_crontab(_text(crontab), _zone(zone), chosen, [*_users(), *LIKELY_USERS])
    shared = specification_arguments(given, "UTC") | {"paused": paused}
    standing = await _standing(tl, topic, dry_run)
    planned = plan_import(topic, read, shared, standing)
    if not dry_run:
        fresh = [one for one in planned if one.result == WOULD]
        with Progress("created", len(fresh)) as progress:
            for at in range(0, len(fresh), AT_A_TIME):
                part = fresh[at : at + AT_A_TIME]
                try:
                    await all_of(*(_create(tl, one) for one in part))
                except TimelineError:
                    progress.clear()
                    made = sum(one.result == CREATED for one in fresh)
                    complain(f"broke off: {made} of {len(fresh)} are known to be created. Run it again for the others")
                    raise
                progress.add(len(part))
    for note in read.notes:
        if note.refused or not options.as_json:
            complain(f"line {note.line}: {note.text}")
    for one in planned:
        if one.refused:
            complain(f"line {one.entry.line}: {one.result}")
    _print(planned, options, read, dry_run)
    return SOME_FAILED if read.refused or any(one.refused for one in planned) else 0


def _text(file: str) -> str:
    """Return the text of a crontab. Raise Invalid if it is none."""
    content = read_whole(file, MAX_CRONTAB_BYTES)
    if len(content) > MAX_CRONTAB_BYTES:
        raise Invalid(f"{file:.60} has more than {MAX_CRONTAB_BYTES} bytes: that is no crontab")
    try:
        return content.decode()
    except UnicodeDecodeError as bad:
        line = content.count(b"\n", 0, bad.start) + 1
        raise Invalid(f"line {line} of {file:.60} is not UTF-8: write it in UTF-8") from None


def _zone(zone: str | None) -> str:
    found = machine_zone() if zone is None else zone
    zone_of(found)
    return found


def _users() -> list[str]:
    import pwd  # not on every system

    return [user.pw_name for user in pwd.getpwall()]


async def _standing(tl: timeline.Timeline, topic: str, dry_run: bool) -> list[timeline.Schedule]:
    """Return the schedules of the topic. A dry run needs no broker."""
    try:
        await check_topic(tl, topic)
        return [each async for each in tl.schedules(topic)]
    except (Unavailable, Closed) as away:
        if not dry_run:
            raise
        complain(f"what is there already is not known: {explain(away)}")
        return []


def plan_import(
    topic: str, read: Crontab, shared: Mapping[str, Any], standing: Sequence[timeline.Schedule]
) -> list[ImportedEntry]:
    """Return a schedule for each entry. One that says the same, under whatever name, stands for it. Another name that
    is in the way is refused, unless a further entry of the crontab explains it. An entry that no schedule can have
    becomes a note of the crontab."""
    left: dict[str, list[Specification]] = defaultdict(list)
    for one in standing:
        left[_meaning(one.specification)].append(one.specification)
    claimed: dict[int, Specification] = {}
    entries = []
    for entry in read.entries:
        try:
            meaning = _meaning(_specification(topic, entry.base, entry, shared))
        except (Invalid, TooLarge) as bad:
            read.notes.append(CrontabNote(entry.line, bad.reason, refused=True))
            continue
        entries.append(entry)
        if same := left[meaning]:
            claimed[entry.line] = same.pop(0)
    in_the_way = {one.name for rest in left.values() for one in rest}
    fresh = [entry for entry in entries if entry.line not in claimed]
    names = {entry.line: name for name, entry in named_entries(fresh, [one.name for one in claimed.values()])}
    planned = []
    for entry in entries:
        if entry.line in claimed:
            planned.append(ImportedEntry(entry, claimed[entry.line], THERE))
            continue
        name = names[entry.line]
        made = _specification(topic, name, entry, shared)
        if name not in in_the_way:
            planned.append(ImportedEntry(entry, made, WOULD))
            continue
        said = (
            f"{topic} has another schedule {name!r}: 'timeline schedule update' changes it, 'timeline schedule delete' "
            "makes room"
        )
        planned.append(ImportedEntry(entry, made, said, refused=True))
    return planned


def _specification(topic: str, name: str, entry: CrontabEntry, shared: Mapping[str, Any]) -> Specification:
    given = {
        **({"jitter": f"{entry.jitter_ms}ms"} if entry.jitter_ms else {}),
        **shared,
        "cron": entry.cron,
        "zone": entry.zone,
        "payload": entry.command,
        "headers": entry.headers,
    }
    return Specification(topic, name, **specification_fields(given))


def _meaning(says: Specification) -> str:
    """Return what schedules that say the same have in common, whatever they are called, paused or not."""
    return json.dumps(says.to_json() | {"name": "", "paused": False}, sort_keys=True)


async def _create(tl: timeline.Timeline, one: ImportedEntry) -> None:
    """Create a schedule, and note what became of it. Raise the errors that concern all of them."""
    try:
        await tl.create_schedule(one.specification)
        one.result = CREATED
    except (Unavailable, Closed):
        raise
    except (Invalid, Exists) as refused:
        one.result, one.refused = refused.reason, True
    except TimelineError as refused:
        one.result, one.refused = explain(refused), True


def _print(planned: Sequence[ImportedEntry], options: ClientOptions, read: Crontab, dry_run: bool) -> None:
    now_ms = Clock().now_ms()
    rows = []
    for one in planned:
        entry, says = one.entry, one.specification
        following = next(says.recurrence.occurrences(now_ms), None)
        next_ms = 0 if following is None else following.at_ms
        if options.as_json:
            print_json(
                {
                    "line": entry.line,
                    "name": says.name,
                    "cron": entry.cron,
                    "zone": entry.zone,
                    "next": iso_or_none(next_ms),
                    "command": entry.command,
                    "headers": entry.headers,
                    "result": "refused" if one.refused else one.result,
                    **({"reason": one.result} if one.refused else {}),
                }
            )
        result = "refused" if one.refused else one.result
        rows.append(
            (entry.line, says.name, entry.cron, time_cell(next_ms, ZoneInfo(entry.zone)) if next_ms else "–", result,
             shown_payload(entry.command.encode()))
        )  # fmt: skip
    if options.as_json:
        return
    print_table(COLUMNS, rows, right=("LINE",), empty="the crontab runs nothing", spare=("COMMAND", "LINE"))
    if planned:
        zones = sorted({one.entry.zone for one in planned})
        says_it = f"read as a {read.style} crontab, its times in {', '.join(zones)}"
        say("", f"{says_it}{'. Nothing was created: this was a dry run' if dry_run else ''}", indent=4)
