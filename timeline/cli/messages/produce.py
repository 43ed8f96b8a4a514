"""`timeline produce`: put messages on a timeline."""

from __future__ import annotations

import asyncio
import os
import shlex
import stat
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import click

import timeline
from timeline.cli.app import DONE, SOME_FAILED, complain, say
from timeline.cli.options import (
    DURATION,
    ClientOptions,
    check_topic,
    client_command,
    due_of,
    group_option,
    is_length,
    parse_headers,
    parse_time,
    topic_names,
    with_unit,
)
from timeline.cli.output import Progress, judged, print_json, receipt_json, speaking, tell_receipts
from timeline.clock import Clock
from timeline.driver.times import duration_ms
from timeline.errors import FIXED_LIMIT, Invalid, TimelineError, TooLarge, Unknown, explain
from timeline.model import MAX_PAYLOAD_BYTES, Status

READ_BYTES = 256 * 1024
TAKEN: dict[str, str] = {
    Status.EXISTS: "the id is taken by another message: choose another --id, or --if-exists replace to replace it"
}


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("payload", required=False)
@click.option("--at", metavar="TIME", help="Due time: 2026-03-29T09:00+02:00, now+15m, or local with --tz.")
@click.option("--in", "in_", type=DURATION, help="Due time from now: 250ms, 15m, 2h, 10d.")
@click.option("--tz", metavar="ZONE", help="Time zone of a local --at, such as Europe/Berlin.")
@click.option("--id", help="Id of the message, unique in the topic. Default: a new UUIDv7.")
@click.option("--tag", help="Tag that bulk moves and cancels select by.")
@click.option("--header", "headers", multiple=True, metavar="NAME=VALUE", help="Header; repeatable.")
@click.option("--expires", metavar="TIME|DURATION", help="Time after which it is not delivered; or how long from now.")
@group_option
@click.option(
    "--if-exists",
    type=click.Choice(["move", "replace"]),
    help="Move the message that has this id (only its due time changes), or replace all of it. Default: refuse.",
)
@click.option("--lines", is_flag=True, help="Produce each line of standard input as a message.")
@client_command
def produce(options: ClientOptions, topic: str, payload: str | None, lines: bool, **given: Any) -> int:
    """Produce PAYLOAD into TOPIC; - reads it from standard input.

    \b
    Example:
      timeline produce departures "gate closes" --id UA1545 \\
        --at 2026-03-29T09:00+02:00
      timeline produce reminders - --in 15m < reminder.json
      cat jobs.jsonl | timeline produce jobs --lines --in 1h --tag nightly
    """
    put = _Put(topic, options, **given)
    if lines and (payload is not None or put.id is not None):
        raise Invalid("--lines takes payloads from standard input and makes the ids: give neither PAYLOAD nor --id")
    if not lines and payload is None:
        raise Invalid("give a PAYLOAD, - to read it from standard input, or --lines")
    if (lines or payload == "-") and sys.stdin is None:
        raise Invalid("standard input is closed: there is nothing to read")
    if lines:
        return options.run(put.lines)
    content = _stdin_whole() if payload == "-" else os.fsencode(payload or "")
    return options.run(lambda tl: put.one(tl, content))


class _Put:
    """The values that all messages of one command share."""

    def __init__(
        self, topic: str, options: ClientOptions, *, at: str | None, in_: str | None, tz: str | None, id: str | None,
        tag: str | None, headers: tuple[str, ...], expires: str | None, group: str, if_exists: Any,
    ) -> None:  # fmt: skip
        self._due, self._at = due_of(at, in_, tz, ("--at", "--in")), at
        self._shared = {
            **self._due.asked(),
            "headers": parse_headers(headers) or None,
            "expires": _expires(expires, tz),
        }
        self._topic, self._options, self._tag, self._group, self._if_exists = topic, options, tag, group, if_exists
        self.id = id

    async def one(self, tl: timeline.Timeline, content: bytes) -> int:
        """Put one message and return the exit code."""
        async with tl.producer(self._topic, group=self._group) as producer:
            with speaking(TAKEN):
                receipt = await producer.produce(
                    content, id=self.id, tag=self._tag, if_exists=self._if_exists, **self._shared
                )
        done = "moved: only its due time changed, its payload stays" if receipt.moved else "produced"
        code = tell_receipts([receipt], self._options.as_json, done)
        self._tell_past(receipt.ok)
        return code

    async def lines(self, tl: timeline.Timeline) -> int:
        """Produce each line of standard input and return the exit code."""
        failed = sent = 0
        async with tl.producer(self._topic, group=self._group) as producer:
            # Otherwise each line would be refused, with the same words.
            await check_topic(tl, self._topic)
            with Progress("produced") as progress:
                try:
                    async for some, part in _stdin_lines():
                        batch = timeline.Batch(payloads=some, tags=self._tag, **self._shared)
                        sent += len(some)
                        receipts = await producer.produce_many(batch, if_exists=self._if_exists)
                        failed += self._tell(receipts, progress)
                        progress.add(len(some), part)
                except TimelineError as error:
                    progress.clear()
                    stored = f"{progress.done - failed:,} are known to be stored"
                    complain(f"broke off after {progress.done:,} lines, of which {stored}")
                    if isinstance(error, Unknown):
                        error.advice = _in_doubt(progress.done + 1, sent, self._topic, self._tag)
                    raise
                rate = progress.rate_per_s
        if not self._options.as_json:
            say(f"{progress.done - failed} of {progress.done} produced ({rate:,.0f}/s)")
        self._tell_past(failed < progress.done)
        return SOME_FAILED if failed else DONE

    def _tell_past(self, put: bool) -> None:
        """Warn of a due time in the past, which may be a slip in a date."""
        at = self._at
        if put and at is not None and at.strip() != "now" and self._due.absolute_ms() < Clock().now_ms():
            complain(f"--at {at} is past: it goes out at once")

    def _tell(self, receipts: timeline.Receipts, progress: Progress) -> int:
        """Print what became of each line: all as JSON, the refused ones for people. Return how many were refused."""
        failed, as_json = receipts.failed, self._options.as_json
        if failed and not as_json:
            progress.clear()
        for line, (receipt, error) in enumerate(judged(receipts if as_json or failed else ()), progress.done + 1):
            if as_json:
                print_json(receipt_json(receipt))
            elif error is not None:
                if isinstance(error, Unknown):
                    show = f"timeline show {shlex.quote(self._topic)} {receipt.id}"
                    error.advice = f"it may be stored or not, see: {show}"
                else:
                    error.id = None  # generated here, and nothing is stored under it
                complain(f"line {line:,}: {explain(error)}")
        return len(failed)


def _stdin_whole() -> bytes:
    """Return standard input as one payload. Raises TooLarge before it reads more than a payload may have."""
    content = sys.stdin.buffer.read(MAX_PAYLOAD_BYTES + 1)
    if len(content) > MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"standard input has more than {MAX_PAYLOAD_BYTES} bytes, which no topic takes as one payload",
            advice=FIXED_LIMIT,
        )
    return content


def _expires(text: str | None, zone: str | None) -> Any:
    """Return `--expires` for the driver: a time, or a duration from now."""
    if text is None:
        return None
    if is_length(text):
        return timedelta(milliseconds=duration_ms(with_unit(text.strip()), "--expires", least_ms=1))
    when = parse_time(text, "--expires", zone)
    if when.at is not None:
        return when.at
    if not when.in_ms or when.in_ms < 0:
        raise Invalid(f"--expires {text!r:.60} is over already: the message would never be delivered")
    return timedelta(milliseconds=when.in_ms)


def _in_doubt(first: int, last: int, topic: str, tag: str | None) -> str:
    """Return what to do about lines without an answer. To repeat them may put them twice, under new ids."""
    lines = f"line {first:,} is" if first == last else f"lines {first:,} to {last:,} are"
    of_tag = f" --tag {shlex.quote(tag)}" if tag else ""
    return (
        f"{lines} in doubt, no line after {last:,} was sent; before you put them again, look at what is there: "
        f"timeline ls {shlex.quote(topic)}{of_tag} --all --payload"
    )


async def _stdin_lines() -> AsyncIterator[tuple[list[bytes], float | None]]:
    """Yield lines of standard input without their ends, as many as came at once. With a file, also yield the part of it
    (0 to 1) that is read. A last line needs no newline."""
    source, read, ended = sys.stdin.fileno(), 0, 0
    rest: list[bytes] = []  # pieces of a line whose end has not been read
    rest_bytes = 0
    file = os.fstat(source)
    size = file.st_size if stat.S_ISREG(file.st_mode) else 0
    while data := await _read(source):
        read += len(data)
        first, *more = data.split(b"\n")
        rest.append(first)
        rest_bytes += len(first)
        if rest_bytes > MAX_PAYLOAD_BYTES + len(b"\r"):
            about = f"line {ended + 1:,} has more than {MAX_PAYLOAD_BYTES} bytes, which no topic takes"
            raise TooLarge(about, advice=FIXED_LIMIT)
        if more:
            *whole, last = b"".join(rest), *more
            rest, rest_bytes = [last], len(last)
            ended += len(whole)
            yield [line.removesuffix(b"\r") for line in whole], read / size if size else None
    if rest_bytes:
        yield [b"".join(rest)], 1.0


async def _read(source: int) -> bytes:
    """Read what is there, empty at the end. Ctrl-C could end neither a thread nor a blocking read."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(source, readable.set)
    except PermissionError:
        return os.read(source, READ_BYTES)  # a file on a disk is always readable
    try:
        await readable.wait()
    finally:
        loop.remove_reader(source)
    return os.read(source, READ_BYTES)
