"""`timeline show` and `timeline ls`: what is on a timeline."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import click

import timeline
from timeline.cli.app import REFUSED, Failed, awaited, complain
from timeline.cli.messages.earliest import bound_ms, earliest
from timeline.cli.messages.follow import follow as changing
from timeline.cli.messages.follow import tell_json, tell_lines
from timeline.cli.options.client_options import check_topic, client_command, topic_names
from timeline.cli.options.identity import connected
from timeline.cli.options.values import DURATION, iso, parse_time, zone_of
from timeline.cli.terminal.output import payload_fields, print_fields, print_json, print_table, shown_payload
from timeline.cli.terminal.progress import Progress, counted
from timeline.driver.times import as_datetime, duration_ms, shown_time
from timeline.errors import Invalid
from timeline.model import State
from timeline.wording import shown_duration

STATES = (State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD)
LIMIT = 100
FOLLOWED_AT_MOST = 10_000


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("id")
@click.option("--tz", metavar="ZONE", help="Show times in this zone.  [this machine's]")
@client_command
def show(topic: str, id: str, tz: str | None, address: str, timeout: str, as_json: bool) -> int:
    """One message of TOPIC with all of its fields, its payload and its state.

    A message that is over (acknowledged, cancelled, purged, expired) leaves nothing to show. A topic that remembers
    keeps its id, so that it is not put twice, but not how it ended.

    \b
    Example:
      timeline show departures UA1545
    """
    zone = zone_of(tz)

    async def work() -> None:
        async with connected(address, timeout) as tl:
            entry = await tl.get(topic, id)
            if entry is None:
                raise Failed(REFUSED, _gone(await check_topic(tl, topic), id))
        if as_json:
            print_json(entry_json(entry))
            return
        fields: dict[str, object] = {
            "id": entry.id,
            "state": entry.state,
            "due": shown_time(entry.due_ms, zone),
            "scheduled": shown_time(entry.scheduled_ms, zone),
            "version": entry.version,
            "deliveries": entry.deliveries,
            "group": entry.group,
        }
        if entry.holder:
            fields["lease of" if entry.state is State.LEASED else "last holder"] = entry.holder
        if entry.tag:
            fields["tag"] = entry.tag
        if entry.expires_ms:
            fields["expires"] = shown_time(entry.expires_ms, zone)
        if entry.died_ms:
            fields |= {"died": shown_time(entry.died_ms, zone), "reason": entry.dead}
        fields |= {f"header {name}": value for name, value in (entry.headers or {}).items()}
        payload = entry.payload or b""
        fields |= {"payload": shown_payload(payload, 2_000), "bytes": len(payload)}
        print_fields(fields)

    return awaited(work())


def _gone(topic: timeline.Topic, id: str) -> str:
    """The sentence for an id without a message: what it may have been, and that nobody can say which."""
    said = (
        f"NOT_FOUND: no message {id!r} is on {topic.name}. It was never put, or it is over (acknowledged, cancelled, "
        "purged, expired): what is over leaves nothing to show"
    )
    if not topic.settings.remember_ms:
        return said
    return (
        f"{said}. The topic remembers ids that are over for {shown_duration(topic.settings.remember_ms)}, so that none "
        "is put twice; not how each ended"
    )


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option(
    "--state", "states", multiple=True, type=click.Choice([str(state) for state in STATES]), help="Only these."
)
@click.option("--tag", help="Only messages of this tag.")
@click.option("--due-from", metavar="TIME", help="Due at or after this time.")
@click.option("--due-to", metavar="TIME", help="Due before this time.")
@click.option("--tz", metavar="ZONE", help="Time zone of what is given and shown.  [this machine's]")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"At most so many.  [{LIMIT}; with --follow {FOLLOWED_AT_MOST}, which it reads at each look]",
)
@click.option("--all", "everything", is_flag=True, help="No limit; with --json printed as they come, in no order.")
@click.option("--payload", "payloads", is_flag=True, help="Read payloads too.")
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C: print what is new, moves, is taken, is gone.")
@click.option("--every", default="1s", show_default=True, type=DURATION, help="With --follow: how often to look.")
@client_command
def ls(
    topic: str,
    states: tuple[str, ...],
    tag: str | None,
    due_from: str | None,
    due_to: str | None,
    tz: str | None,
    limit: int | None,
    everything: bool,
    payloads: bool,
    follow: bool,
    every: str,
    address: str,
    timeout: str,
    as_json: bool,
) -> int:
    """Messages of TOPIC, the first ones by due.

    \b
    Example:
      timeline ls departures --state waiting --due-to now+1h
      timeline ls departures --follow
      timeline ls departures --tag spring --payload --json --all
    """
    zone = zone_of(tz)
    if limit is not None and everything:
        raise Invalid("--limit and --all contradict each other: give one of the two")
    bound = limit or (FOLLOWED_AT_MOST if follow else LIMIT)
    from_ms = 0 if due_from is None else parse_time(due_from, "--due-from", tz).absolute_ms()
    to_ms = 0 if due_to is None else parse_time(due_to, "--due-to", tz).absolute_ms()
    if from_ms and to_ms and from_ms >= to_ms:
        raise Invalid("--due-from must lie before --due-to")
    chosen = [State(state) for state in states] or None
    # As datetimes: the driver takes the milliseconds of the early 1970s for seconds.
    since, until = (as_datetime(one) if one else None for one in (from_ms, to_ms))
    due = (since, until) if since or until else None
    every_s = duration_ms(every, "--every", least_ms=1) / 1000

    async def work() -> None:
        async with connected(address, timeout) as tl:

            def look(before_ms: int | None = None) -> AsyncIterator[timeline.StoredMessage]:
                within = due if before_ms is None else (None, before_ms)
                return tl.scan(topic, state=chosen, tag=tag, due=within, payload=payloads)

            if follow:
                tell = tell_json(entry_json) if as_json else tell_lines(zone, payloads)
                goes_on = f"following {topic}, a look every {shown_duration(round(every_s * 1000))}; Ctrl-C ends it"
                more_words = [] if as_json else [partial(complain, goes_on)]
                return await changing(look, sys.maxsize if everything else bound, every_s, tell, *more_words)
            if everything and as_json:
                async for entry in look():
                    print_json(entry_json(entry))
                return
            most = sys.maxsize if everything else bound
            before_ms = None if everything or tag or due else await bound_ms(tl, topic, bound, chosen or ())
            with Progress("read") as progress:
                entries, more = await earliest(lambda before: counted(look(before), progress), most, before_ms)
        if as_json:
            for entry in entries:
                print_json(entry_json(entry))
        else:
            columns = ["DUE", "ID", "STATE", "TAG", "GROUP", "DELIVERIES", *(["PAYLOAD"] if payloads else [])]
            rows = [
                [
                    shown_time(entry.due_ms, zone), entry.id, entry.state, entry.tag or "", entry.group,
                    entry.deliveries, *([shown_payload(entry.payload or b"")] if payloads else []),
                ]
                for entry in entries
            ]  # fmt: skip
            print_table(columns, rows, right=("DELIVERIES",), empty=_nothing(topic, states, tag, due is not None))
        if more:
            complain(f"there are more than {bound}; --limit or --all shows them")

    return awaited(work())


def _nothing(topic: str, states: tuple[str, ...], tag: str | None, bounded: bool) -> str:
    """The sentence for an empty list."""
    of_tag = f" of tag {tag!r}" if tag else ""
    which = f" {' or '.join(states)}" if states else ""
    return f"no messages{of_tag} are{which} on {topic}{' in that time' if bounded else ''}"


def entry_json(entry: timeline.StoredMessage) -> dict[str, Any]:
    """A message as it stands, for machines."""
    values: dict[str, Any] = {
        "id": entry.id,
        "state": str(entry.state),
        "due": iso(entry.due_ms),
        "due_ms": entry.due_ms,
        "scheduled": iso(entry.scheduled_ms),
        "scheduled_ms": entry.scheduled_ms,
        "version": entry.version,
        "deliveries": entry.deliveries,
        "group": entry.group,
        "holder": entry.holder or None,
        "tag": entry.tag or None,
        "expires": iso(entry.expires_ms),
        "died": iso(entry.died_ms),
        "reason": entry.dead or None,
    }
    if entry.payload is not None:
        values |= {"headers": dict(entry.headers or {}), **payload_fields(entry.payload)}
    return values
