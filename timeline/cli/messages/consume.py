"""`timeline consume`: take messages when they come due, print them, or run a shell's command for each."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

import timeline
from timeline.cli.app import DONE, INTERRUPTED, SOME_FAILED, USAGE, Failed, complain, say
from timeline.cli.options import ClientOptions, Milliseconds, client_command, topic_names
from timeline.cli.output import payload_fields, picked, print_json, shown_payload
from timeline.driver.tasks import end
from timeline.driver.times import iso_or_none, shown_time
from timeline.errors import Closed, Invalid, NotFound, TimelineError, explain
from timeline.model import DELIVERED_OUT, MAX_REASON_BYTES
from timeline.wording import shown_lateness

QUIET_S = 0.5
PARTING_S = 1.0
"""Longest time for an orderly end after a signal, with nothing in flight. Without a broker the wait would be long."""
EXTEND_S = 5.0
"""Longest time of one try to extend a lease, and longest wait before the next try."""
ENDING_S = 2.0
"""How long a command may take to end after SIGTERM."""
LOOK_FIRST_S, LOOK_CAP_S = 0.02, 0.3
"""First and longest wait between two looks whether a process group is gone. The kernel does not announce it."""
ANSWER_S = 1.0
"""How long to wait for the answer to a settle after a signal."""
PIPE_BYTES = 65_536
"""What a pipe holds: one read of it takes all that was written before."""
_PROGRAM = re.compile(r"\s*([\w./+-]+)(?=\s|$)")


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option(
    "--id", help="Id of this consumer. One that returns under its id gets what it still holds. Default: host-pid."
)
@click.option("--lease", type=Milliseconds(), help="Lease of each message. Default: the topic's.")
@click.option("--credit", type=click.IntRange(1, 100_000), default=100, help="Most messages in flight.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N messages.")
@click.option("--wait", type=Milliseconds(), help="End when no message came for this long, once connected.")
@click.option(
    "--release", type=Milliseconds(0), help="Release each message instead of an ack. It is due again after this time."
)
@click.option(
    "--exec",
    "command",
    metavar="CMD",
    help="Shell command to run for each message, with the payload on its standard input.",
)
@client_command
async def consume(
    tl: timeline.Timeline, options: ClientOptions, topic: str, id: str | None, lease: int | None, credit: int,
    count: int | None, wait: int | None, release: int | None, command: str | None,
) -> int:  # fmt: skip
    """Print messages of TOPIC as they come due, and ack each.

    With --exec, a shell runs CMD for one message at a time. Exit code 0 acks the message. Any other code releases it,
    with a wait that doubles with each delivery (1s to 1h). At the last delivery that the topic permits, it buries the
    message. The reason has the exit code and the end of what CMD wrote to standard error. The lease is extended while
    CMD runs. The environment of CMD has TIMELINE_ID, TIMELINE_TAG, TIMELINE_DUE and TIMELINE_DELIVERIES.

    Several consumers of a topic share its messages: each message goes to one of them.

    SIGTERM and Ctrl-C (exit code 130) end in order: unseen messages return at once, and a running CMD may finish. A
    second signal ends CMD and all that it started, with SIGTERM and 2s later with SIGKILL. Its message returns at once.

    \b
    Example:
      timeline consume departures --count 10 --json
      timeline consume reminders --exec "mail -s reminder ops@example.org"
    """
    if release is not None and command is not None:
        raise Invalid("--release puts every message back, --exec decides by the exit code: give one of the two")
    if command is not None:
        check_command(command)
    taker = Taker(
        as_json=options.as_json,
        release_s=None if release is None else release / 1000,
        command=command,
        wait_s=None if wait is None else wait / 1000,
        count=count,
    )
    settings: dict[str, Any] = {"id": f"{socket.gethostname()}-{os.getpid()}" if id is None else id}
    if lease is not None:
        settings["lease"] = lease / 1000
    settings["credit"] = min(credit, count) if count else credit
    return await _until_told(tl.consumer(topic, **settings), taker)


async def _until_told(consumer: timeline.Consumer, taker: Taker) -> int:
    """Take messages until all is done or a signal comes, and return the exit code. The first signal ends in order, the
    second one also ends what is in flight. Both take a bounded time, so a third signal does nothing."""
    loop, taking = asyncio.get_running_loop(), asyncio.ensure_future(taker.take(consumer))
    told: list[signal.Signals] = []
    heard = asyncio.Event()

    def tell(number: signal.Signals) -> None:
        told.append(number)
        heard.set()
        consumer.stop_taking()
        if len(told) == 2:
            taking.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, tell, number)
    quiet = loop.call_later(QUIET_S, taker.say_it_waits, consumer.topic)
    try:
        await asyncio.wait({taking})
        if not taking.cancelled():
            taking.result()
    finally:
        quiet.cancel()
        taking.cancel()
        await _close(consumer, heard)
    return INTERRUPTED if signal.SIGINT in told else taker.code


async def _close(consumer: timeline.Consumer, told: asyncio.Event) -> None:
    """Close in order, but within PARTING_S after a signal."""
    closing, hearing = asyncio.ensure_future(consumer.aclose()), asyncio.ensure_future(told.wait())
    await asyncio.wait({closing, hearing}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({closing}, timeout=PARTING_S)
    await end(closing)
    await end(hearing)


@dataclass(slots=True)
class Taker:
    """Takes deliveries one after the other and settles each. A delivery that is only printed is acked once its line is
    written, without waiting for the answer. `taken` counts deliveries, `failed` those that were not acked."""

    as_json: bool
    release_s: float | None
    command: str | None
    wait_s: float | None
    count: int | None
    taken: int = 0
    failed: int = 0

    def say_it_waits(self, topic: str) -> None:
        """Print that it waits, when nothing else shows that and nothing bounds the wait."""
        if not (self.taken or self.as_json or self.count or self.wait_s is not None):
            complain(f"waiting for messages of {topic}; Ctrl-C ends it")

    async def take(self, consumer: timeline.Consumer) -> None:
        """Take until `count` have come, nothing came for `wait_s`, or the consumer takes no more."""
        consumer.on_settle_error = self._not_acked
        while self.taken != self.count:
            try:
                async with asyncio.timeout(self.wait_s):
                    delivery = await consumer.take()
            except TimeoutError:
                if consumer.welcomed:
                    break
                continue  # a wait begins once a broker is there; if none is, the client's timeout ends it
            if delivery is None:
                break
            self.taken += 1
            await self._settle(delivery, consumer)

    @property
    def code(self) -> int:
        """The exit code. It is final once the consumer is closed, which waits for the answers to its acks."""
        return SOME_FAILED if self.failed else DONE

    async def _settle(self, delivery: timeline.Delivery, consumer: timeline.Consumer) -> None:
        try:
            if self.command is not None:
                await self._run(delivery, self.command, consumer)
            elif self.release_s is not None:
                await _answered(delivery, delivery.release(in_=self.release_s))
                self._print(delivery, "released")
            else:
                try:
                    self._print(delivery, "")
                except OSError:  # nobody reads the output any more: the next consumer gets the message
                    await delivery.release(in_=0, reason="its consumer could not print it")
                    raise
                delivery.ack_soon()
        except TimelineError as error:
            self.failed += 1
            complain(explain(error))
        except asyncio.CancelledError:  # a second signal, with this one in flight
            self.failed += 1
            raise

    def _not_acked(self, delivery: timeline.Delivery, error: TimelineError) -> None:
        self.failed += 1
        complain(explain(error))

    async def _run(self, delivery: timeline.Delivery, command: str, consumer: timeline.Consumer) -> None:
        """Run the command for a delivery, then ack, release or bury it by the exit code. It waits for an absent broker,
        since the work would be done again. It is printed after the answer: until then another consumer may have it."""
        code, hurried, errors = await execute(delivery, command, consumer)
        said, then = shown_ending(code), ""
        patience_s = ANSWER_S if hurried else consumer.patience_s(delivery)
        if code == 0:
            settling, what = delivery.ack(timeout=patience_s), "ack"
        elif 0 < (most := delivery.max_deliveries) <= delivery.deliveries:
            # After a release it would become a dead letter, too, but later and without the reason.
            self.failed += 1
            reason = failure_reason(f"{DELIVERED_OUT.decode()}: {said}", errors)
            settling, what = delivery.bury(reason, timeout=patience_s), "bury"
            then = f" at the last of {most} deliveries: buried"
        else:
            self.failed += 1
            wait = delivery.retry_in
            reason = failure_reason(said, errors)
            settling, what = delivery.release(in_=wait, reason=reason, timeout=patience_s), "release"
            then = f", again in {wait.total_seconds():g}s"
        try:
            await _answered(delivery, settling)
        except TimelineError as error:
            self._print(delivery, f"{said}, but its {what} failed: {error.code}")
            raise
        self._print(delivery, said + then)

    def _print(self, delivery: timeline.Delivery, done: str) -> None:
        late_ms = delivery.lateness.total_seconds() * 1000
        if self.as_json:
            print_json({**delivery_json(delivery), "lateness_ms": round(late_ms, 3), "done": done or "acked"})
            return
        again = f"  delivery {delivery.deliveries}" if delivery.deliveries > 1 else ""
        done = f"  {done}" if done else ""
        due = shown_time(delivery.due_ms)  # the lateness counts from it
        text = f"{due}  {delivery.id}  {shown_payload(delivery.payload, 200)}"
        say(f"{text}  (+{shown_lateness(late_ms)}){again}{done}")


async def _answered(delivery: timeline.Delivery, settling: Coroutine[Any, Any, None]) -> None:
    """Wait for the answer to a settle; after a cancellation, for ANSWER_S at most. An answer in time undoes the
    cancellation: the consumer takes no more anyway."""
    answering = asyncio.ensure_future(settling)
    try:
        await asyncio.shield(answering)
    except asyncio.CancelledError:
        await asyncio.wait({answering}, timeout=ANSWER_S)
        if not answering.done():
            await end(answering)
            complain(f"no broker has answered what became of {delivery.id!r}: it may come again when its lease ends")
            raise
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        answering.result()


def delivery_json(delivery: timeline.Delivery) -> dict[str, Any]:
    """Return a delivery for machines."""
    more = picked(
        delivery, "tag", "due", "due_ms", "scheduled", "scheduled_ms", "deliveries", "version", "lease_until"
    )  # fmt: skip
    return {"id": delivery.id, **payload_fields(delivery.payload), "headers": dict(delivery.headers), **more}


def check_command(command: str) -> None:
    """Raise Failed when CMD is empty or names a program that the shell does not find.

    A shell with an empty command ends with 0, so every message would be acked unseen. A misspelt program would release
    every message after a delivery. Anything but a plain name is left to the shell."""
    if not command.strip():
        raise Failed(USAGE, "--exec is empty: nothing would handle the messages, and all would be acked")
    named = _PROGRAM.match(command)
    if named is None:
        return
    found = subprocess.run(["/bin/sh", "-c", f"command -v {named[1]}"], capture_output=True)
    if found.returncode or ("/" in named[1] and os.path.isdir(named[1])):
        raise Failed(USAGE, f"the shell finds no program {named[1]!r}: give --exec its path, or one that is there")


class Ended(NamedTuple):
    """A command that ended by itself: its exit code, below 0 for a signal. `hurried`: a signal came meanwhile, so its
    message must be settled within ANSWER_S. `errors`: the end of what it wrote to standard error."""

    code: int
    hurried: bool
    errors: bytes


async def execute(delivery: timeline.Delivery, command: str, consumer: timeline.Consumer) -> Ended:
    """Run `command` for a delivery and extend its lease meanwhile. A cancellation ends the command and returns the
    message; when the command has just ended, it is undone, since finished work must be settled."""
    environment = {
        **os.environ,
        "TIMELINE_ID": delivery.id,
        "TIMELINE_TAG": (delivery.tag or "").replace("\0", "\ufffd"),  # which no environment can have
        "TIMELINE_DUE": iso_or_none(delivery.scheduled_ms) or "",
        "TIMELINE_DELIVERIES": str(delivery.deliveries),
    }
    process: asyncio.subprocess.Process | None = None
    starting: asyncio.Task[asyncio.subprocess.Process] | None = None
    hurried = False
    keeping = asyncio.ensure_future(_keep(delivery, consumer))
    async with AsyncExitStack() as fed:
        try:
            stdin = await fed.enter_async_context(_pipe_of(delivery.payload))
            errors = fed.enter_context(ErrorOutput().pipe())
            # In a process group of its own: Ctrl-C goes to `timeline consume`, which lets CMD end.
            spawning = asyncio.create_subprocess_shell(
                command, stdin=stdin, stderr=errors.writing, env=environment, process_group=0
            )
            starting = asyncio.ensure_future(spawning)
            # Shielded: a cancelled start kills the shell alone, and loses track of what it has started.
            process = await asyncio.shield(starting)
            await process.wait()
            await end(keeping)  # else it would report the ack as a lost lease
        except asyncio.CancelledError:
            if starting is not None:
                with suppress(OSError):
                    process = await starting
            if process is None or not _has_ended(process):
                await _stop(delivery, process, keeping)
                raise
            if (task := asyncio.current_task()) is not None:
                task.uncancel()
            await end(keeping)
            hurried = True
        finally:
            keeping.cancel()
    return Ended(await process.wait(), hurried, errors.end)


class ErrorOutput:
    """The standard error of a command. It is passed on as it comes, and its `end` is kept. A child that the command
    left behind may write on: that is passed on, too."""

    def __init__(self) -> None:
        self.end = b""
        self.writing = self._reading = -1

    @contextmanager
    def pipe(self) -> Iterator[ErrorOutput]:
        """Open the pipe. At the end, all that the command wrote has been read."""
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        asyncio.get_running_loop().add_reader(self._reading, self._read)
        try:
            yield self
        finally:
            os.close(self.writing)
            self._read()
            self._read()  # closes it, unless a child that was left behind has it open

    def _read(self) -> None:
        if self._reading < 0:
            return
        try:
            written = os.read(self._reading, PIPE_BYTES)
        except BlockingIOError:
            return
        if not written:
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1
            return
        self.end = (self.end + written)[-MAX_REASON_BYTES:]
        if sys.stderr is None:  # it was closed, and its number may belong to another file
            return
        with suppress(OSError):  # nobody reads it any more
            while written:
                written = written[os.write(2, written) :]


def failure_reason(said: str, errors: bytes) -> str:
    """Return why a command failed: `said`, and as much of the end of its standard error as a reason has room for."""
    room_bytes = MAX_REASON_BYTES - len(said.encode()) - len(": ")
    shown = errors.decode("utf-8", "replace").replace("\0", " ").strip().encode()
    end = shown[-room_bytes:].decode("utf-8", "ignore")
    return f"{said}: {end}" if end else said


@asynccontextmanager
async def _pipe_of(payload: bytes) -> AsyncIterator[int]:
    """Yield the reading end of a pipe that `payload` is written into. With asyncio's own pipe, a process would count
    as running as long as a child that it left behind holds the other end."""
    reading, writing = os.pipe()
    try:
        feed, _ = await asyncio.get_running_loop().connect_write_pipe(asyncio.BaseProtocol, os.fdopen(writing, "wb", 0))
        feed.write(payload)
        feed.write_eof()
        try:
            yield reading
        finally:
            if feed.get_write_buffer_size():
                feed.abort()
    finally:
        os.close(reading)


async def _keep(delivery: timeline.Delivery, consumer: timeline.Consumer) -> None:
    """Extend a lease whenever it is time, until it is lost. A failed try is repeated soon."""
    failing = False
    while True:
        lease_s = consumer.lease_ms / 1000
        rest_s = (consumer.extend_at_ms(delivery) - consumer.monotonic_ms()) / 1000
        await asyncio.sleep(min(lease_s / 12, EXTEND_S) if failing else rest_s)
        try:
            await delivery.extend(lease_s, timeout=min(lease_s / 3, EXTEND_S))
            failing = False
        except TimelineError as error:
            if delivery.lost or isinstance(error, Closed):
                complain(_lost(delivery.id, error))
                return
            if not failing:
                why = error.reason.partition(":")[0] or error.code
                complain(f"the lease of {delivery.id!r} could not be extended ({why}); trying again")
            failing = True


def _lost(id: str, error: TimelineError) -> str:
    if isinstance(error, NotFound):
        return f"{id!r} is gone while its command runs: somebody cancelled it, or had it and acknowledged it"
    return f"the lease of {id!r} has ended: another consumer may run the command, too"


async def _stop(
    delivery: timeline.Delivery, process: asyncio.subprocess.Process | None, keeping: asyncio.Task[None]
) -> None:
    """End a command early, return its message, and print both."""
    about = f"the command for {delivery.id!r}"
    try:
        how = "was not started" if process is None else await _end(process)
    except PermissionError:
        complain(f"{about} runs on, since this user may not end it; its message comes again when its lease ends")
        return
    await end(keeping)
    try:
        await delivery.release(reason="its consumer was stopped", timeout=ANSWER_S)
        back = "its message was given back"
    except TimelineError as error:
        nobody = "no broker took its message back, which comes again when its lease ends"
        back = nobody if error.retryable else explain(error)
    complain(f"{about} {how}; {back}")


def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Return whether a command has ended by itself. asyncio may not know yet."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # a thread of asyncio has already collected its exit code
        return True


async def _end(process: asyncio.subprocess.Process) -> str:
    """End a command with its whole process group, and return how, in words. After a SIGKILL none of them runs any more,
    even if the kernel still lists them."""
    look_s = LOOK_FIRST_S
    try:
        os.killpg(process.pid, signal.SIGTERM)
        async with asyncio.timeout(ENDING_S):
            await process.wait()
            while not is_gone(process.pid):
                await asyncio.sleep(look_s)
                look_s = min(2 * look_s, LOOK_CAP_S)
        return "was ended"
    except ProcessLookupError:
        return "was ended"
    except TimeoutError:
        with suppress(ProcessLookupError, TimeoutError):
            os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(ENDING_S):
                await process.wait()
        return f"was killed, since it was still there {ENDING_S:g}s after SIGTERM"


def is_gone(group: int) -> bool:
    """Return whether nothing of a process group runs any more. A zombie counts as gone where /proc shows it: not every
    container has an init that reaps orphans."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member_of, *_ = stat.read_bytes().rpartition(b") ")[2].split()
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        if int(member_of) == group:
            states.append(state)
    return bool(states) and all(state in b"ZX" for state in states)


def shown_ending(code: int) -> str:
    """Return how a command ended: `exit 3`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # only the first and the last real-time signal have names
        return f"killed by signal {-code}"
