"""`timeline dead …`: dead letters."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click

import timeline
from timeline.cli.app import Suggesting, awaited, complain, say
from timeline.cli.messages.read import entry_json
from timeline.cli.options.client_options import check_receipts, client_command, group_option, topic_names
from timeline.cli.options.identity import connected, operator_option
from timeline.cli.options.values import DURATION, due_of
from timeline.cli.terminal.output import confirm, print_json, print_table
from timeline.cli.terminal.progress import Progress, counted
from timeline.cli.terminal.receipts import tell_receipts
from timeline.driver.times import shown_time
from timeline.errors import Invalid, TimelineError
from timeline.model import Status

ALL_HELP = "All dead letters of the group."
TAG_HELP = "The group's dead letters of this tag."
ALIVE: dict[str, str] = {Status.EXISTS: "it is no dead letter; 'timeline show' says where it is"}
"""What it means that a message is there which should be dead."""
CHUNK = 5_000
"""Letters a call, so that long work shows how far it is."""


@click.group(cls=Suggesting)
def dead() -> None:
    """Dead letters: messages that were buried, by a consumer or after too many deliveries.

    \b
    Example:
      timeline dead list departures
      timeline dead revive departures UA1545
    """


@dead.command("list")
@click.argument("topic", shell_complete=topic_names)
@click.option("--tag", help="Only those of this tag.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="The newest N.  [all]")
@client_command
def list_(topic: str, tag: str | None, limit: int | None, address: str, timeout: str, as_json: bool) -> int:
    """Dead letters of TOPIC with their reasons, by when they died.

    \b
    Example:
      timeline dead list departures
      timeline dead list departures --tag spring --limit 20
    """

    async def work() -> None:
        newest: list[tuple[tuple[int, str, int], timeline.StoredMessage]] = []
        async with connected(address, timeout) as tl:
            with Progress("read") as progress:
                async for entry in counted(tl.dead(topic, tag=tag), progress):
                    heapq.heappush(newest, ((entry.died_ms, entry.id, progress.done), entry))
                    if limit is not None and len(newest) > limit:
                        heapq.heappop(newest)
        entries = [entry for _, entry in sorted(newest, key=lambda one: one[0])]
        if progress.done > len(entries):
            complain(f"these are the newest {len(entries):,} of {progress.done:,}; a larger --limit shows more")
        if as_json:
            for entry in entries:
                print_json(entry_json(entry))
            return
        rows = [
            (shown_time(entry.died_ms), entry.id, entry.dead, entry.deliveries, entry.group, entry.tag or "")
            for entry in entries
        ]
        columns = ("DIED", "ID", "REASON", "DELIVERIES", "GROUP", "TAG")
        print_table(columns, rows, right=("DELIVERIES",), empty=f"{topic} has no dead letters{_of(tag)}")

    return awaited(work())


@dead.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("ids", nargs=-1, metavar="ID…")
@click.option("--all", "everything", is_flag=True, help=ALL_HELP)
@click.option("--tag", help=TAG_HELP)
@click.option("--at", metavar="TIME", help="When they are due again.")
@click.option("--in", "in_", type=DURATION, help="The same from now.  [now]")
@click.option("--tz", metavar="ZONE", help="Time zone of a local --at.")
@group_option
@operator_option
@client_command
def revive(
    topic: str,
    ids: tuple[str, ...],
    everything: bool,
    tag: str | None,
    at: str | None,
    in_: str | None,
    tz: str | None,
    group: str,
    address: str,
    timeout: str,
    as_json: bool,
) -> int:
    """Put dead letters of TOPIC back on the timeline.

    \b
    Example:
      timeline dead revive departures UA1545 --in 1m
      timeline dead revive departures --tag spring
      timeline dead revive departures --all
    """
    _check_selection(ids, everything, tag)
    due = due_of(at, in_ if at is not None or in_ is not None else "0s", tz, ("--at", "--in"))
    when: dict[str, Any] = {"at": due.at} if due.at_ms is not None else {"in_": max(0, due.in_ms or 0) / 1000}

    async def work() -> int:
        async with connected(address, timeout) as tl, tl.producer(topic, group=group) as producer:
            chosen = list(ids) or await _all_dead(tl, topic, group, tag)
            receipts = await _in_chunks(lambda ids: producer.revive(ids, **when), chosen, "revived")
            await check_receipts(tl, topic, receipts)
        return _told(receipts, topic, tag, as_json, "revived")

    return awaited(work())


@dead.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("ids", nargs=-1, metavar="ID…")
@click.option("--all", "everything", is_flag=True, help=ALL_HELP)
@click.option("--tag", help=TAG_HELP)
@group_option
@click.option("--yes", is_flag=True, help="Do not ask.")
@operator_option
@client_command
def purge(
    topic: str,
    ids: tuple[str, ...],
    everything: bool,
    tag: str | None,
    group: str,
    yes: bool,
    address: str,
    timeout: str,
    as_json: bool,
) -> int:
    """Delete dead letters of TOPIC for good.

    \b
    Example:
      timeline dead purge departures UA1545 --yes
      timeline dead purge departures --tag spring
    """
    _check_selection(ids, everything, tag)

    chosen = list(ids)

    async def look() -> None:
        async with connected(address, timeout) as tl:
            chosen.extend(await _all_dead(tl, topic, group, tag))

    async def work() -> int:
        async with connected(address, timeout) as tl, tl.producer(topic, group=group) as producer:
            receipts = await _in_chunks(producer.purge, chosen, "purged")
            await check_receipts(tl, topic, receipts)
        return _told(receipts, topic, tag, as_json, "purged")

    async def count() -> int:
        found = 0
        async with connected(address, timeout) as tl:
            for start in range(0, len(chosen), CHUNK):
                async for page in tl.scan_pages(topic, state="dead", ids=chosen[start : start + CHUNK]):
                    found += len(page.rows)
        return found

    if not ids:
        awaited(look())
    # Where none of them is a dead letter, there is nothing to ask: each is refused, with what it is.
    if chosen and not yes and (found := asyncio.run(count()) if ids else len(chosen)):
        confirm(f"Delete {found} dead letter{'' if found == 1 else 's'} of {topic} for good?")
    return awaited(work())


def _told(receipts: Sequence[timeline.Receipt], topic: str, tag: str | None, as_json: bool, done: str) -> int:
    if not receipts and not as_json:
        say(f"{topic} has no dead letters{_of(tag)} of this group: nothing {done}")
    return tell_receipts(receipts, as_json, done, ALIVE)


def _of(tag: str | None) -> str:
    return f" of tag {tag!r}" if tag else ""


def _check_selection(ids: tuple[str, ...], everything: bool, tag: str | None) -> None:
    if (bool(ids), everything, tag is not None).count(True) != 1:
        raise Invalid("give one of these: one or more IDs, --tag, or --all")
    if tag == "":
        raise Invalid("--tag is empty: name a tag, or say --all")


async def _all_dead(tl: timeline.Timeline, topic: str, group: str, tag: str | None) -> list[str]:
    """Return the ids of a group's dead letters, of one tag or of all. Others' are not its to touch."""
    with Progress("read") as progress:
        return [entry.id async for entry in counted(tl.dead(topic, tag=tag), progress) if entry.group == group]


async def _in_chunks(
    call: Callable[[list[str]], Awaitable[timeline.Receipts]], ids: list[str], done: str
) -> list[timeline.Receipt]:
    """Makes `call` for so many ids at a time, and shows how far it is."""
    receipts: list[timeline.Receipt] = []
    with Progress(done, len(ids)) as progress:
        try:
            for start in range(0, len(ids), CHUNK):
                receipts += await call(ids[start : start + CHUNK])
                progress.add(len(receipts) - progress.done)
        except TimelineError:
            progress.clear()
            if receipts:
                complain(f"broke off after {len(receipts):,} of {len(ids):,}")
            raise
    return receipts
