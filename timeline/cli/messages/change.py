"""`timeline move` and `timeline cancel`: by ids, or all of a tag."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import click

import timeline
from timeline.cli.app import complain, say
from timeline.cli.options.client_options import (
    ClientOptions,
    check_receipts,
    client_command,
    group_option,
    operator_option,
    topic_names,
)
from timeline.cli.options.values import DURATION, due_of, zone_of
from timeline.cli.terminal.output import print_json
from timeline.cli.terminal.progress import Progress
from timeline.cli.terminal.receipts import counts_json, speaking, tell_counts, tell_receipts
from timeline.driver.times import shift_ms
from timeline.errors import Invalid, Leased, TimelineError, Unknown
from timeline.model import Status

MOVED: dict[str, str] = {
    Status.FENCED: "it stands at another version than --if-version says: look with 'timeline show', decide again"
}
CANCELLED: dict[str, str] = {**MOVED, Status.LEASED: f"{Leased.advice}, or cancel it all the same with --leased"}
"""What to do about a refusal, in words of this command line."""
resume_option = click.option(
    "--resume", metavar="TOKEN", help="With --tag: continue a call that was interrupted, with the token it printed."
)


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
@resume_option
@group_option
@operator_option
@client_command
async def move(
    tl: timeline.Timeline, options: ClientOptions, topic: str, group: str, to: str | None, in_: str | None,
    by: str | None, tz: str | None, **selected: Any,
) -> int:  # fmt: skip
    """Move messages of TOPIC that no consumer has to another time.

    \b
    Example:
      timeline move departures UA1545 --to 2026-03-29T10:30+02:00
      timeline move departures UA1545 DL863 --in 20m
      timeline move campaigns --tag spring --by 2h --dry-run
    """
    selection = _Selection(**selected).check()
    if by is not None:
        if selection.tag is None or to is not None or in_ is not None:
            raise Invalid("--by shifts all messages of a --tag, and goes without --to and --in")
        zone_of(tz)
        shift_ms(by, "--by")  # judged here, so that what is wrong with it names the option
        when: dict[str, Any] = {"by": by}
    elif to is None and in_ is None:
        raise Invalid(
            "say where to: --to TIME or --in DURATION, for IDs and for a --tag; "
            "or --by DURATION, which shifts each message of a --tag"
        )
    else:
        when = due_of(to, in_, tz, ("--to", "--in")).asked()
    async with tl.producer(topic, group=group) as producer:
        if selection.tag is not None:
            total = None if selection.dry_run else await _how_many(producer, selection.tag)
            return await _ByTag(selection, "moved", options, total).run(producer.move_tag, **when)
        if selection.if_version is not None:
            with speaking(MOVED):
                receipt = await producer.move(selection.ids[0], if_version=selection.if_version, **when)
            return tell_receipts([receipt], options.as_json, "moved")
        receipts = await producer.move_many(selection.ids, **when)
        await check_receipts(tl, topic, receipts)
        return tell_receipts(receipts, options.as_json, "moved", MOVED)


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("ids", nargs=-1, metavar="ID…")
@click.option("--tag", help="Cancel all messages of this tag.")
@click.option("--leased", is_flag=True, help="Also those that a consumer has.")
@click.option("--if-version", type=int, metavar="N", help="Only if it has this version (one ID).")
@click.option("--dry-run", is_flag=True, help="With --tag: only count.")
@resume_option
@group_option
@operator_option
@client_command
async def cancel(
    tl: timeline.Timeline, options: ClientOptions, topic: str, group: str, leased: bool, **selected: Any
) -> int:
    """Take messages off TOPIC's timeline.

    \b
    Example:
      timeline cancel departures UA1545
      timeline cancel campaigns --tag spring --dry-run
      timeline cancel campaigns --tag spring --leased
    """
    selection = _Selection(**selected).check()
    async with tl.producer(topic, group=group) as producer:
        if selection.tag is not None:
            return await _ByTag(selection, "cancelled", options).run(producer.cancel_tag, leased=leased)
        if selection.if_version is not None:
            with speaking(CANCELLED):
                receipt = await producer.cancel(selection.ids[0], leased=leased, if_version=selection.if_version)
            return tell_receipts([receipt], options.as_json, "cancelled")
        receipts = await producer.cancel_many(selection.ids, leased=leased)
        await check_receipts(tl, topic, receipts)
        return tell_receipts(receipts, options.as_json, "cancelled", CANCELLED)


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which messages: either ids or all of a tag, and only what goes with it."""

    ids: tuple[str, ...]
    tag: str | None
    if_version: int | None
    dry_run: bool
    resume: str | None

    def check(self) -> _Selection:
        """Itself. Raises Invalid."""
        if bool(self.ids) == (self.tag is not None):
            raise Invalid("give either one or more IDs, or --tag, one of the two")
        if self.if_version is not None and len(self.ids) != 1:
            raise Invalid("--if-version goes with one ID")
        if self.dry_run and self.tag is None:
            raise Invalid("--dry-run goes with --tag; to look at single messages use: timeline show TOPIC ID")
        if self.resume is not None and self.tag is None:
            raise Invalid("--resume goes with --tag: it continues the call by tag that printed the token")
        return self


async def _how_many(producer: timeline.Producer, tag: str) -> int | None:
    """How many messages of the tag there are, counted first where a person watches, who wants to know how long it
    takes; None where nobody does."""
    with Progress("counted") as progress:
        if not progress.watched:
            return None
        counted = await producer.cancel_tag(
            tag, dry_run=True, progress=lambda told: progress.add(told.done - progress.done)
        )
        return counted.done


class _ByTag:
    """A call by tag, watched. `what` was done to the messages, in words. Interrupted, it prints how to continue."""

    def __init__(self, selection: _Selection, what: str, options: ClientOptions, total: int | None = None) -> None:
        self._selection, self._what, self._options = selection, what, options
        self._progress = Progress(what, total)
        self._told: timeline.TagProgress | None = None

    def chunk(self, told: timeline.TagProgress) -> None:
        """Take note of how far it is."""
        self._told = told
        self._progress.total = told.total or self._progress.total
        self._progress.add(told.done - self._progress.done)

    async def run(self, call: Callable[..., Awaitable[timeline.TagProgress]], **given: Any) -> int:
        """Make the call and print the counts; the exit code. SIGTERM interrupts it, as Ctrl-C does."""
        tag, dry_run, resume = self._selection.tag, self._selection.dry_run, self._selection.resume
        assert tag is not None
        working = asyncio.current_task()
        assert working is not None
        if threading.current_thread() is threading.main_thread():  # elsewhere nobody hears signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        try:
            with self._progress:
                told = await call(tag, dry_run=dry_run, progress=self.chunk, resume=resume, **given)
        except asyncio.CancelledError:
            self._broke_off()
            raise
        except TimelineError as error:
            self._told = error.progress
            if self._told is not None and error.retryable and (self._told.done or isinstance(error, Unknown)):
                error.advice = "continue with --resume; without it, messages may be changed twice"
                self._broke_off()
            raise
        return tell_counts(told, self._options.as_json, tag, self._what, dry_run)

    def _broke_off(self) -> None:
        told = self._told
        if told is None or not told.started_ms or self._selection.dry_run:
            return  # nothing was changed
        if self._options.as_json:
            print_json(counts_json(told, dry_run=False))
            return
        complain(
            f"it stopped after {told.done:,} messages; more may be {self._what} already. To continue, repeat the "
            "same command with this option:"
        )
        say(f"--resume {told.resume}", err=True)
