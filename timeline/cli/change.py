"""`timeline move` and `timeline cancel`: by ids, or all of a tag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

import timeline
from timeline.cli.app import awaited
from timeline.cli.asking import check_receipts, client_command, group_option, topic_names
from timeline.cli.identity import connected, operator_option
from timeline.cli.progress import Progress
from timeline.cli.receipts import speaking, tell_counts, tell_receipts
from timeline.cli.values import DURATION, due_of, zone_of
from timeline.driver.times import shift_ms
from timeline.errors import Invalid, Leased
from timeline.model import Status

MOVED: dict[str, str] = {
    Status.FENCED: "it stands at another version than --if-version says: look with 'timeline show', decide again"
}
CANCELLED: dict[str, str] = {**MOVED, Status.LEASED: f"{Leased.advice}, or cancel it all the same with --leased"}
"""What to do about a refusal, in words of this command line."""


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("ids", nargs=-1, metavar="ID…")
@click.option(
    "--to", "--at", "to", metavar="TIME", help="The new due: 2026-03-29T09:00+02:00, now+15m, or local with --tz."
)
@click.option("--in", "in_", type=DURATION, help="The new due from now: 15m, 2h.")
@click.option("--by", type=DURATION, help="With --tag: shift each by this, such as 2h or -30m.")
@click.option("--tz", metavar="ZONE", help="Time zone of a local --to.")
@click.option("--tag", help="Move all messages of this tag.")
@click.option("--if-version", type=int, metavar="N", help="Only if it has this version (one ID).")
@click.option("--dry-run", is_flag=True, help="With --tag: only count.")
@group_option
@operator_option
@client_command
def move(
    topic: str,
    ids: tuple[str, ...],
    to: str | None,
    in_: str | None,
    by: str | None,
    tz: str | None,
    tag: str | None,
    if_version: int | None,
    dry_run: bool,
    group: str,
    address: str,
    timeout: str,
    as_json: bool,
) -> int:
    """Move messages of TOPIC that no consumer has to another time.

    \b
    Example:
      timeline move departures UA1545 --to 2026-03-29T10:30+02:00
      timeline move departures UA1545 DL863 --in 20m
      timeline move campaigns --tag spring --by 2h --dry-run
    """
    _check_selection(ids, tag, if_version, dry_run)
    if by is not None:
        if tag is None or to is not None or in_ is not None:
            raise Invalid("--by shifts all messages of a --tag, and goes without --to and --in")
        zone_of(tz)
        shift_ms(by, "--by")  # judged here, so that what is wrong with it names the option
        when: dict[str, Any] = {"by": by}
    else:
        if to is None and in_ is None:
            raise Invalid(
                "say where to: --to TIME or --in DURATION, for IDs and for a --tag; "
                "or --by DURATION, which shifts each message of a --tag"
            )
        due = due_of(to, in_, tz, ("--to", "--in"))
        when = {"at": due.at} if due.at_ms is not None else {"in_": max(0, due.in_ms or 0) / 1000}

    async def work() -> int:
        async with connected(address, timeout) as tl, tl.producer(topic, group=group) as producer:
            if tag is not None:
                total = None if dry_run else await _how_many(producer, tag)
                with Progress("moved", total) as progress:
                    told = await producer.move_tag(tag, dry_run=dry_run, progress=_watch(progress), **when)
                return tell_counts(told.counts, as_json, tag, "moved", dry_run)
            if if_version is not None:
                with speaking(MOVED):
                    receipt = await producer.move(ids[0], if_version=if_version, **when)
                return tell_receipts([receipt], as_json, "moved")
            receipts = await producer.move_many(ids, **when)
            await check_receipts(tl, topic, receipts)
            return tell_receipts(receipts, as_json, "moved", MOVED)

    return awaited(work())


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("ids", nargs=-1, metavar="ID…")
@click.option("--tag", help="Cancel all messages of this tag.")
@click.option("--leased", is_flag=True, help="Also those that a consumer has.")
@click.option("--if-version", type=int, metavar="N", help="Only if it has this version (one ID).")
@click.option("--dry-run", is_flag=True, help="With --tag: only count.")
@group_option
@operator_option
@client_command
def cancel(
    topic: str,
    ids: tuple[str, ...],
    tag: str | None,
    leased: bool,
    if_version: int | None,
    dry_run: bool,
    group: str,
    address: str,
    timeout: str,
    as_json: bool,
) -> int:
    """Take messages off TOPIC's timeline.

    \b
    Example:
      timeline cancel departures UA1545
      timeline cancel campaigns --tag spring --dry-run
      timeline cancel campaigns --tag spring --leased
    """
    _check_selection(ids, tag, if_version, dry_run)

    async def work() -> int:
        async with connected(address, timeout) as tl, tl.producer(topic, group=group) as producer:
            if tag is not None:
                total = None if dry_run else await _how_many(producer, tag)
                with Progress("cancelled", total) as progress:
                    told = await producer.cancel_tag(tag, leased=leased, dry_run=dry_run, progress=_watch(progress))
                return tell_counts(told.counts, as_json, tag, "cancelled", dry_run)
            if if_version is not None:
                with speaking(CANCELLED):
                    receipt = await producer.cancel(ids[0], leased=leased, if_version=if_version)
                return tell_receipts([receipt], as_json, "cancelled")
            receipts = await producer.cancel_many(ids, leased=leased)
            await check_receipts(tl, topic, receipts)
            return tell_receipts(receipts, as_json, "cancelled", CANCELLED)

    return awaited(work())


def _check_selection(ids: tuple[str, ...], tag: str | None, if_version: int | None, dry_run: bool) -> None:
    """Either ids or a tag, and only what goes with it. Raises Invalid."""
    if bool(ids) == (tag is not None):
        raise Invalid("give either one or more IDs, or --tag, one of the two")
    if if_version is not None and len(ids) != 1:
        raise Invalid("--if-version goes with one ID")
    if dry_run and tag is None:
        raise Invalid("--dry-run goes with --tag; to look at single messages use: timeline show TOPIC ID")


async def _how_many(producer: timeline.Producer, tag: str) -> int | None:
    """How many messages of the tag there are, counted first where a person watches, who wants to know how long it
    takes; None where nobody does."""
    with Progress("counted") as progress:
        if not progress.watched:
            return None
        return (await producer.cancel_tag(tag, dry_run=True, progress=_watch(progress))).done


def _watch(progress: Progress) -> Callable[[Any], None]:
    def chunk(told: Any) -> None:
        progress.add(told.done - progress.done)

    return chunk
