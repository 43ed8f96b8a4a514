"""A command that a shell runs for a delivery: its payload on standard input, its lease kept meanwhile, and its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import timeline
from timeline.cli.app import USAGE, Failed, complain, explain
from timeline.cli.options.values import iso
from timeline.driver.tasks import end
from timeline.errors import Closed, NotFound, TimelineError

EXTEND_S = 5.0
"""How long one try to extend a lease may take at most, and the longest rest before the next one."""
ENDING_S = 2.0
"""How long a command may take to end after SIGTERM."""
LOOK_FIRST_S, LOOK_CAP_S = 0.02, 0.3
"""How long to rest between two looks whether all of a process group is gone, which nobody tells: longer each time."""
ANSWER_S = 1.0
"""How long to wait for a broker's answer to what becomes of a message, once a person wants to be gone."""
_PROGRAM = re.compile(r"\s*([\w./+-]+)(?=\s|$)")


def check_command(command: str) -> None:
    """Raises Failed where CMD is empty, since a shell that has nothing to run ends with 0, and each message would be
    acked unseen; and where the shell that is to run CMD knows no such program: else each message would be put back, and
    count as delivered, for a word that is misspelt. What is more than a program's name is the shell's to judge."""
    if not command.strip():
        raise Failed(USAGE, "--exec is empty: nothing would handle the messages, and all would be acked")
    named = _PROGRAM.match(command)
    if named is None:
        return
    found = subprocess.run(["/bin/sh", "-c", f"command -v {named[1]}"], capture_output=True)
    if found.returncode or ("/" in named[1] and os.path.isdir(named[1])):
        raise Failed(USAGE, f"the shell finds no program {named[1]!r}: give --exec its path, or one that is there")


class Ended(NamedTuple):
    """A command that has ended by itself: its exit code, less than 0 for a signal. `hurried`: somebody wants to be gone
    since, and its message may still be settled, but within ANSWER_S."""

    code: int
    hurried: bool


async def execute(delivery: timeline.Delivery, command: str, consumer: timeline.Consumer) -> Ended:
    """Runs `command` for a delivery whose lease is extended meanwhile. When this is cancelled, the command is ended and
    the message given back; where it has ended by then, the cancellation is put off: what is done is to be settled."""
    environment = {
        **os.environ,
        "TIMELINE_ID": delivery.id,
        "TIMELINE_TAG": delivery.tag or "",
        "TIMELINE_DUE": iso(delivery.scheduled_ms) or "",
        "TIMELINE_DELIVERIES": str(delivery.deliveries),
    }
    process: asyncio.subprocess.Process | None = None
    starting: asyncio.Task[asyncio.subprocess.Process] | None = None
    hurried = False
    keeping = asyncio.ensure_future(_keep(delivery, consumer))
    async with AsyncExitStack() as fed:
        try:
            stdin = await fed.enter_async_context(_pipe_of(delivery.payload))
            # In a group of its own: a Ctrl-C typed at the terminal is meant for this command, which lets CMD end.
            spawning = asyncio.create_subprocess_shell(command, stdin=stdin, env=environment, process_group=0)
            starting = asyncio.ensure_future(spawning)
            # Shielded: asyncio, cancelled here, kills the shell alone, and nobody knows any more what that has started.
            process = await asyncio.shield(starting)
            await process.wait()
            await end(keeping)  # else it takes what is acknowledged for somebody else's doing, and says so
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
    return Ended(await process.wait(), hurried)


@asynccontextmanager
async def _pipe_of(payload: bytes) -> AsyncIterator[int]:
    """The reading end of a pipe that `payload` is written into. Not asyncio's own pipe to a process: for that one a
    process has not ended while anybody, such as a child that it left behind, holds the other end."""
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
    """Extends a lease whenever it is time, until it is lost; one that cannot be extended now is tried again soon."""
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
    """Ends a command before its time, gives its message back, since nobody works on it any more, and says so."""
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
    """Whether a command has ended by itself, of which asyncio may be about to hear."""
    if process.returncode is not None:
        return True
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # asyncio has asked for its exit code already, in a thread
        return True


async def _end(process: asyncio.subprocess.Process) -> str:
    """Ends a command with all that it started in its group: how, in words. After a SIGKILL none of it does anything
    more, even where the kernel still holds on to it."""
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
    """Whether nothing of a process group runs any more. A process that has ended, of which its parent has not heard
    yet, counts as gone where the kernel tells (/proc): not every container has an init that hears of orphans."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    states = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member_of, *_ = stat.read_bytes().rpartition(b") ")[2].split()
        except (OSError, ValueError):  # it has gone meanwhile
            continue
        if int(member_of) == group:
            states.append(state)
    return bool(states) and all(state in b"ZX" for state in states)


def shown_ending(code: int) -> str:
    """How a command ended: `exit 3`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # of the real-time signals only the first and the last have names
        return f"killed by signal {-code}"
