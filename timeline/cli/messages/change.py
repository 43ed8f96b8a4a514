"""`timeline move` and `timeline cancel`: by ids, or all messages of a tag."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click

import timeline
from timeline.cli.app import complain, say
from timeline.cli.options import (
    DURATION,
    ClientOptions,
    check_receipts,
    client_command,
    due_of,
    group_option,
    operator_option,
    topic_names,
    zone_of,
)
from timeline.cli.output import Progress, counts_json, print_json, speaking, tell_counts, tell_receipts
from timeline.driver.times import shift_ms
from timeline.errors import Invalid, Leased, TimelineError, Unknown
from timeline.model import Status

MOVED: dict[str, str] = {
    Status.FENCED: "it stands at another version than --if-version says: look with 'timeline show', decide again"
}
CANCELLED: dict[str, str] = {**MOVED, Status.LEASED: f"{Leased.advice}, or cancel it all the same with --leased"}
"""The remedy for a refusal, by status, with this command line's options."""


def selection_options(verb: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of both commands to a client command."""

    def selecting(function: Callable[..., Any]) -> Callable[..., Any]:
        function = operator_option(group_option(client_command(function)))
        for option in (
            click.option("--resume", metavar="TOKEN", help="With --tag: continue an interrupted call by its token."),
            click.option("--dry-run", is_flag=True, help="With --tag: count only."),
            click.option("--if-version", type=int, metavar="N", help="Only if it has this version (one ID)."),
            click.option("--tag", help=f"{verb} all messages of this tag."),
            click.argument("ids", nargs=-1, metavar="ID…"),
            click.argument("topic", shell_complete=topic_names),
        ):
            function = option(function)
        return function

    return selecting


@click.command()
@click.option(
    "--to", "--at", "to", metavar="TIME", help="New due time: 2026-03-29T09:00+02:00, now+15m, or local with --tz."
)
@click.option("--in", "in_", type=DURATION, help="New due time from now: 15m, 2h.")
@click.option("--by", type=DURATION, help="With --tag: shift each message by this, such as 2h or -30m.")
@click.option("--tz", metavar="ZONE", help="Time zone of a local --to.")
@selection_options("Move")
async def move(
    tl: timeline.Timeline, options: ClientOptions, topic: str, group: str, to: str | None, in_: str | None,
    by: str | None, tz: str | None, **selected: Any,
) -> int:  # fmt: skip
    """Move messages of TOPIC to another time. A message that a consumer has is not moved.

    \b
    Example:
      timeline move departures UA1545 --to 2026-03-29T10:30+02:00
      timeline move departures UA1545 DL863 --in 20m
      timeline move campaigns --tag spring --by 2h --dry-run
    """
    selection = _Selection(**selected)
    if by is not None:
        if selection.tag is None or to is not None or in_ is not None:
            raise Invalid("--by shifts all messages of a --tag, and goes without --to and --in")
        zone_of(tz)
        shift_ms(by, "--by")  # an error of it names the option here
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
            return await _ByTag(selection, "moved", options, producer).run(producer.move_tag, **when)
        return await selection.run(tl, topic, "moved", options, producer.move, producer.move_many, MOVED, **when)


@click.command()
@click.option("--leased", is_flag=True, help="Cancel messages that a consumer has, too.")
@selection_options("Cancel")
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
    selection = _Selection(**selected)
    async with tl.producer(topic, group=group) as producer:
        if selection.tag is not None:
            return await _ByTag(selection, "cancelled", options, producer).run(producer.cancel_tag, leased=leased)
        one, many = producer.cancel, producer.cancel_many
        return await selection.run(tl, topic, "cancelled", options, one, many, CANCELLED, leased=leased)


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which messages: ids, or all of a tag. Raises Invalid for options that do not go together."""

    ids: tuple[str, ...]
    tag: str | None
    if_version: int | None
    dry_run: bool
    resume: str | None

    def __post_init__(self) -> None:
        if bool(self.ids) == (self.tag is not None):
            raise Invalid("give either one or more IDs, or --tag, one of the two")
        if self.if_version is not None and len(self.ids) != 1:
            raise Invalid("--if-version goes with one ID")
        if self.dry_run and self.tag is None:
            raise Invalid("--dry-run goes with --tag; to look at single messages use: timeline show TOPIC ID")
        if self.resume is not None and self.tag is None:
            raise Invalid("--resume goes with --tag: it continues the call by tag that printed the token")

    async def run(
        self, tl: timeline.Timeline, topic: str, what: str, options: ClientOptions,
        one: Callable[..., Awaitable[timeline.Receipt]], many: Callable[..., Awaitable[timeline.Receipts]],
        words: Mapping[str, str], **given: Any,
    ) -> int:  # fmt: skip
        """Make the call for the ids and print the receipts. Return the exit code."""
        if self.if_version is not None:
            with speaking(words):
                receipt = await one(self.ids[0], if_version=self.if_version, **given)
            return tell_receipts([receipt], options.as_json, what)
        receipts = await many(self.ids, **given)
        await check_receipts(tl, topic, receipts)
        return tell_receipts(receipts, options.as_json, what, words)


async def _how_many(producer: timeline.Producer, tag: str) -> int | None:
    """Count the messages of the tag when a person watches, for the time left. Else return None."""
    with Progress("counted") as progress:
        if not progress.watched:
            return None
        counted = await producer.cancel_tag(
            tag, dry_run=True, progress=lambda told: progress.add(told.done - progress.done)
        )
        return counted.done


class _ByTag:
    """A call by tag, watched. `what` was done to the messages, in words. When it is interrupted, it prints how to
    continue, or that nothing was done."""

    def __init__(self, selection: _Selection, what: str, options: ClientOptions, producer: timeline.Producer) -> None:
        self._selection, self._what, self._options, self._producer = selection, what, options, producer
        self._progress = Progress(what)
        self._told = timeline.TagProgress.of(selection.resume) if selection.resume is not None else None

    def chunk(self, told: timeline.TagProgress) -> None:
        """Take note of the progress."""
        self._told = told
        self._progress.total = told.total or self._progress.total
        self._progress.add(told.done - self._progress.done)

    async def run(self, call: Callable[..., Awaitable[timeline.TagProgress]], **given: Any) -> int:
        """Make the call, print the counts and return the exit code. SIGTERM interrupts it, as Ctrl-C does."""
        tag, dry_run, resume = self._selection.tag, self._selection.dry_run, self._selection.resume
        assert tag is not None
        working = asyncio.current_task()
        assert working is not None
        if threading.current_thread() is threading.main_thread():  # no other thread gets signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
        try:
            if not dry_run and self._what == "moved":  # a cancel counts by itself
                self._progress.total = await _how_many(self._producer, tag)
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
        if self._selection.dry_run:
            return
        if told is None or not told.started_ms:
            complain(f"nothing was {self._what}: it was still looking for the messages of the tag")
            return
        if self._options.as_json:
            print_json(counts_json(told, dry_run=False))
            return
        complain(
            f"it stopped after {told.done:,} messages; more may be {self._what} already. To continue, repeat the "
            "same command with this option:"
        )
        say(f"--resume {told.resume}", err=True)
