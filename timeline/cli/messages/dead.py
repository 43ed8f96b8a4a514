"""`timeline dead …`: dead letters."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import click

import timeline
from timeline.cli.app import Suggesting, complain, say
from timeline.cli.messages.read import entry_json
from timeline.cli.options import (
    DURATION,
    ClientOptions,
    check_receipts,
    client_command,
    due_of,
    group_option,
    operator_option,
    topic_names,
    yes_option,
)
from timeline.cli.output import Progress, confirm, counted, id_cell, print_json, print_table, tell_receipts, time_cell
from timeline.errors import Invalid, TimelineError
from timeline.model import Status

ALIVE: dict[str, str] = {Status.EXISTS: "it is no dead letter; 'timeline show' says where it is"}
"""The meaning of EXISTS here: a message is there that should be dead."""
GROUPS = 5
"""Most other groups that an answer names."""
CHUNK = 5_000
"""Letters per call, so that long work shows its progress."""


def letters_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what selects dead letters of TOPIC to a client command: IDs, --tag or --all, and the group."""
    function = operator_option(group_option(client_command(function)))
    for option in (
        click.option("--tag", help="All dead letters of the group with this tag."),
        click.option("--all", "everything", is_flag=True, help="All dead letters of the group."),
        click.argument("ids", nargs=-1, metavar="ID…"),
        click.argument("topic", shell_complete=topic_names),
    ):
        function = option(function)
    return function


@click.group(cls=Suggesting)
def dead() -> None:
    """List, revive and purge dead letters: messages that a consumer buried, or that had too many deliveries.

    \b
    Example:
      timeline dead list departures
      timeline dead revive departures UA1545
    """


@dead.command("list")
@click.argument("topic", shell_complete=topic_names)
@click.option("--tag", help="Only those of this tag.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the newest N. Default: all.")
@client_command
async def list_(tl: timeline.Timeline, options: ClientOptions, topic: str, tag: str | None, limit: int | None) -> None:
    """List dead letters of TOPIC with their reasons, by time of death.

    \b
    Example:
      timeline dead list departures
      timeline dead list departures --tag spring --limit 20
    """
    newest: list[tuple[tuple[int, str, int], timeline.StoredMessage]] = []
    with Progress("read") as progress:
        async for entry in counted(tl.dead(topic, tag=tag), progress):
            heapq.heappush(newest, ((entry.died_ms, entry.id, progress.done), entry))
            if limit is not None and len(newest) > limit:
                heapq.heappop(newest)
    entries = [entry for _, entry in sorted(newest, key=lambda one: one[0])]
    if progress.done > len(entries):
        complain(f"these are the newest {len(entries):,} of {progress.done:,}; a larger --limit shows more")
    if options.as_json:
        for entry in entries:
            print_json(entry_json(entry))
        return
    rows = [
        (time_cell(entry.died_ms), id_cell(entry.id), entry.dead, entry.deliveries, entry.group, entry.tag or "")
        for entry in entries
    ]
    columns = ("DIED", "ID", "REASON", "DELIVERIES", "GROUP", "TAG")
    empty = f"{topic} has no dead letters{_of(tag)}"
    print_table(columns, rows, right=("DELIVERIES",), empty=empty, spare=("GROUP", "TAG", "DELIVERIES"))


@dead.command()
@click.option("--at", metavar="TIME", help="When they are due again.")
@click.option("--in", "in_", type=DURATION, help="How long from now they are due again. Default: now.")
@click.option("--tz", metavar="ZONE", help="Time zone of a local --at.")
@letters_command
async def revive(
    tl: timeline.Timeline, options: ClientOptions, topic: str, group: str, at: str | None, in_: str | None,
    tz: str | None, **selected: Any,
) -> int:  # fmt: skip
    """Put dead letters of TOPIC back on the timeline.

    \b
    Example:
      timeline dead revive departures UA1545 --in 1m
      timeline dead revive departures --tag spring
      timeline dead revive departures --all
    """
    letters = _Letters(topic, group, **selected)
    when = due_of(at, in_ if at is not None or in_ is not None else "0s", tz, ("--at", "--in")).asked()
    async with tl.producer(topic, group=group) as producer:
        receipts = await _in_chunks(lambda ids: producer.revive(ids, **when), await letters.chosen(tl), "revived")
        await check_receipts(tl, topic, receipts)
    return letters.tell(receipts, options, "revived")


@dead.command()
@yes_option
@letters_command
def purge(options: ClientOptions, topic: str, group: str, yes: bool, **selected: Any) -> int:
    """Delete dead letters of TOPIC for good.

    \b
    Example:
      timeline dead purge departures UA1545 --yes
      timeline dead purge departures --tag spring
    """
    letters = _Letters(topic, group, **selected)
    chosen: list[str] = []

    async def look(tl: timeline.Timeline) -> int:
        chosen[:] = await letters.chosen(tl)
        return await letters.count(tl) if letters.ids and not yes else len(chosen)

    async def work(tl: timeline.Timeline) -> int:
        async with tl.producer(topic, group=group) as producer:
            receipts = await _in_chunks(producer.purge, chosen, "purged")
            await check_receipts(tl, topic, receipts)
        return letters.tell(receipts, options, "purged")

    # If none of them is a dead letter, nothing is asked: each is refused with its reason.
    if (found := options.run(look)) and not yes:
        confirm(f"Delete {found} dead letter{'' if found == 1 else 's'} of {topic} for good?")
    return options.run(work)


class _Letters:
    """Dead letters of a group, chosen by id, by tag, or all. Raises Invalid unless it is one of the three."""

    def __init__(self, topic: str, group: str, *, ids: tuple[str, ...], everything: bool, tag: str | None) -> None:
        if (bool(ids), everything, tag is not None).count(True) != 1:
            raise Invalid("give one of these: one or more IDs, --tag, or --all")
        if tag == "":
            raise Invalid("--tag is empty: name a tag, or say --all")
        self.ids = ids
        self._topic, self._group, self._tag = topic, group, tag
        self._of_others: Counter[str] = Counter()
        """Letters of other groups, which were left out."""

    async def chosen(self, tl: timeline.Timeline) -> list[str]:
        """Return their ids. Letters of other groups are left out."""
        if self.ids:
            return list(self.ids)
        found: list[str] = []
        self._of_others.clear()
        with Progress("read") as progress:
            async for entry in counted(tl.dead(self._topic, tag=self._tag), progress):
                if entry.group == self._group:
                    found.append(entry.id)
                else:
                    self._of_others[entry.group] += 1
        return found

    async def count(self, tl: timeline.Timeline) -> int:
        """Return how many of the ids are dead letters."""
        found = 0
        for start in range(0, len(self.ids), CHUNK):
            ids = list(self.ids[start : start + CHUNK])
            async for page in tl.scan_pages(self._topic, state="dead", ids=ids):
                found += len(page.rows)
        return found

    def tell(self, receipts: Sequence[timeline.Receipt], options: ClientOptions, done: str) -> int:
        """Print what became of them, and return the exit code."""
        if not receipts and not options.as_json:
            say(f"{self._topic} has no dead letters{_of(self._tag)} of group {self._group!r}: nothing {done}")
            if most := self._of_others.most_common(GROUPS):
                more = ", and others" if len(self._of_others) > GROUPS else ""
                say(f"  → --group NAME takes those of {', '.join(f'{name!r} ({n:,})' for name, n in most)}{more}")
        return tell_receipts(receipts, options.as_json, done, ALIVE)


def _of(tag: str | None) -> str:
    return f" of tag {tag!r}" if tag else ""


async def _in_chunks(
    call: Callable[[list[str]], Awaitable[timeline.Receipts]], ids: list[str], done: str
) -> list[timeline.Receipt]:
    """Make `call` for `CHUNK` ids at a time, and show the progress."""
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
