"""`timeline consume`: takes messages when they come due."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
from typing import Any

import click

import timeline
from timeline.cli.app import DONE, INTERRUPTED, SOME_FAILED, USAGE, Failed, awaited, complain, explain
from timeline.cli.asking import client_command, topic_names
from timeline.cli.identity import connected
from timeline.cli.output import payload_fields, plain, print_json, shown_payload
from timeline.cli.values import DURATION, iso, shown_lateness, shown_time
from timeline.driver.times import duration_ms
from timeline.errors import Invalid, TimelineError

BACKOFF_FIRST_S, BACKOFF_CAP_S = 1.0, 3600.0
QUIET_S = 0.5
_PROGRAM = re.compile(r"\s*([\w./+-]+)(?=\s|$)")
PARTING_S = 1.0
"""How long a consumer with nothing in hand may take to end in order after a signal."""


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option("--id", help="This consumer's id; one that comes back under its id gets what it still holds.  [host-pid]")
@click.option("--lease", type=DURATION, help="How long to have each message.  [the topic's]")
@click.option("--credit", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Messages at once.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after so many.")
@click.option("--wait", type=DURATION, help="End when nothing has come for so long.")
@click.option("--release", type=DURATION, help="Do not ack: put each back on the timeline, due again so long from now.")
@click.option("--exec", "command", metavar="CMD", help="Run CMD with the payload on its standard input.")
@client_command
def consume(
    topic: str,
    id: str | None,
    lease: str | None,
    credit: int,
    count: int | None,
    wait: str | None,
    release: str | None,
    command: str | None,
    address: str,
    timeout: str,
    as_json: bool,
) -> int:
    """Print messages of TOPIC as they come due, and ack each.

    With --exec, a shell runs CMD for one message after the other: exit code 0 acks it, any other puts it back with a
    wait that doubles with each delivery (1s to 1h). The lease is extended while CMD runs; CMD finds TIMELINE_ID,
    TIMELINE_TAG, TIMELINE_DUE and TIMELINE_DELIVERIES in its environment. Several that consume one topic share its
    messages: each message goes to one of them. SIGTERM and Ctrl-C (exit code 130) end in order: what nobody saw goes
    back at once; a second Ctrl-C does not wait for CMD.

    \b
    Example:
      timeline consume departures --count 10 --json
      timeline consume reminders --exec "mail -s reminder ops@example.org"
    """
    if release is not None and command is not None:
        raise Invalid("--release puts every message back, --exec decides by the exit code: give one of the two")
    if command is not None:
        _check_command(command)
    taker = Taker(
        as_json=as_json,
        release_s=None if release is None else duration_ms(release, "--release") / 1000,
        command=command,
        wait_s=None if wait is None else duration_ms(wait, "--wait", least_ms=1) / 1000,
        count=count,
    )
    settings: dict[str, Any] = {"id": id or f"{socket.gethostname()}-{os.getpid()}"}
    if lease is not None:
        settings["lease"] = duration_ms(lease, "--lease", least_ms=1) / 1000
    settings["credit"] = min(credit, count) if count else credit

    async def work() -> int:
        async with (
            connected(address, timeout) as tl,
            tl.consumer(topic, **settings) as consumer,
        ):
            return await _until_told(consumer, taker)

    return awaited(work())


def _check_command(command: str) -> None:
    """Raises Failed where the shell that is to run CMD knows no such program: else each message would be put back, and
    count as delivered, for a word that is misspelt. What is more than a program's name is the shell's to judge."""
    named = _PROGRAM.match(command)
    if named and subprocess.run(["/bin/sh", "-c", f"command -v {named[1]}"], stdout=subprocess.DEVNULL).returncode:
        raise Failed(USAGE, f"the shell finds no program {named[1]!r}: give --exec its path, or one that is there")


async def _until_told(consumer: timeline.Consumer, taker: Taker) -> int:
    """Takes until all is done or a signal comes; the exit code. The first signal ends in order, another at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    told: list[signal.Signals] = []

    def at_once() -> None:
        if task is not None and (len(told) > 1 or not taker.busy):
            task.cancel()

    def tell(number: signal.Signals) -> None:
        told.append(number)
        consumer.stop_taking()
        # Without a broker there is nothing to end in order, but a long time to wait.
        loop.call_later(0 if len(told) > 1 else PARTING_S, at_once)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, tell, number)
    quiet = loop.call_later(QUIET_S, taker.say_it_waits, consumer.topic)
    try:
        code = await taker.take(consumer)
    except asyncio.CancelledError:
        if not told:
            raise
        code = SOME_FAILED if taker.busy else DONE
    finally:
        quiet.cancel()
    return INTERRUPTED if signal.SIGINT in told else code


class Taker:
    """Takes deliveries one after the other and settles each as was asked. `taken` counts them, `failed` what was not
    acked; `busy`: one is in hand."""

    def __init__(
        self,
        *,
        as_json: bool,
        release_s: float | None,
        command: str | None,
        wait_s: float | None,
        count: int | None,
    ) -> None:
        self.as_json = as_json
        self.release_s = release_s
        self.command = command
        self.wait_s = wait_s
        self.count = count
        self.taken = self.failed = 0
        self.busy = False

    def say_it_waits(self, topic: str) -> None:
        """That it goes on, where it does so until told and nothing has shown that yet."""
        if not (self.taken or self.as_json or self.count or self.wait_s is not None):
            complain(f"waiting for messages of {topic}; Ctrl-C ends it")

    async def take(self, consumer: timeline.Consumer) -> int:
        """Until `count` have come, nothing comes for `wait_s`, or the consumer takes no more. The exit code."""
        while self.taken != self.count:
            try:
                async with asyncio.timeout(self.wait_s):
                    delivery = await consumer.take()
            except TimeoutError:
                break
            if delivery is None:
                break
            self.taken += 1
            self.busy = True
            await self._settle(delivery, consumer)
            self.busy = False
        return SOME_FAILED if self.failed else DONE

    async def _settle(self, delivery: timeline.Delivery, consumer: timeline.Consumer) -> None:
        try:
            if self.command is not None:
                await self._run(delivery, self.command, consumer)
            elif self.release_s is not None:
                self._print(delivery, "released")
                await delivery.release(in_=self.release_s)
            else:
                try:
                    self._print(delivery, "")
                except OSError:  # nobody reads it any more: whoever comes next does
                    await delivery.release(in_=0, reason="its consumer could not print it")
                    raise
                await delivery.ack()
        except TimelineError as error:
            self.failed += 1
            complain(explain(error))

    async def _run(self, delivery: timeline.Delivery, command: str, consumer: timeline.Consumer) -> None:
        """Runs the command for a delivery, extending the lease meanwhile; acks or releases by its exit code, also when
        the broker is away for a while: what was done is else done again."""
        environment = {
            **os.environ,
            "TIMELINE_ID": delivery.id,
            "TIMELINE_TAG": delivery.tag or "",
            "TIMELINE_DUE": iso(delivery.scheduled_ms) or "",
            "TIMELINE_DELIVERIES": str(delivery.deliveries),
        }
        # In a group of its own: a Ctrl-C typed at the terminal is meant for this command, which lets CMD end.
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.PIPE, env=environment, process_group=0
        )
        extending = asyncio.ensure_future(_keep(delivery, consumer.lease_ms / 1000))
        try:
            await process.communicate(delivery.payload)
        finally:
            extending.cancel()
            if process.returncode is None:
                try:
                    os.killpg(process.pid, signal.SIGTERM)
                except ProcessLookupError:
                    pass  # it has ended this moment
                await process.wait()
        if process.returncode == 0:
            self._print(delivery, "exit 0")
            await delivery.ack(timeout=consumer.patience_s(delivery))
            return
        self.failed += 1
        back_s = min(BACKOFF_FIRST_S * 2.0 ** min(delivery.deliveries - 1, 30), BACKOFF_CAP_S)
        self._print(delivery, f"exit {process.returncode}, again in {back_s:g}s")
        patience_s = consumer.patience_s(delivery)
        await delivery.release(in_=back_s, reason=f"exit {process.returncode}", timeout=patience_s)

    def _print(self, delivery: timeline.Delivery, done: str) -> None:
        late_ms = delivery.lateness.total_seconds() * 1000
        if self.as_json:
            print_json({**delivery_json(delivery), "lateness_ms": round(late_ms, 3), "done": done or "acked"})
            return
        again = f"  delivery {delivery.deliveries}" if delivery.deliveries > 1 else ""
        done = f"  {done}" if done else ""
        due = shown_time(delivery.scheduled_ms)
        text = f"{due}  {plain(delivery.id)}  {shown_payload(delivery.payload, 200)}"
        click.echo(f"{text}  (+{shown_lateness(late_ms)}){again}{done}")


async def _keep(delivery: timeline.Delivery, lease_s: float) -> None:
    """Extends a lease at each third of it, as long as that works."""
    while True:
        await asyncio.sleep(lease_s / 3)
        try:
            await delivery.extend(lease_s)
        except TimelineError as lost:
            complain(explain(lost))
            return


def delivery_json(delivery: timeline.Delivery) -> dict[str, Any]:
    """A delivery for machines."""
    return {
        "id": delivery.id,
        **payload_fields(delivery.payload),
        "headers": dict(delivery.headers),
        "tag": delivery.tag or None,
        "due": iso(delivery.due_ms),
        "due_ms": delivery.due_ms,
        "scheduled": iso(delivery.scheduled_ms),
        "scheduled_ms": delivery.scheduled_ms,
        "deliveries": delivery.deliveries,
        "version": delivery.version,
        "lease_until": iso(delivery.lease_until_ms),
    }
