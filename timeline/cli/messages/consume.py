"""`timeline consume`: takes messages when they come due."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import click

import timeline
from timeline.cli.app import DONE, INTERRUPTED, SOME_FAILED, complain, explain, say
from timeline.cli.messages.execution import ANSWER_S, check_command, execute, shown_ending
from timeline.cli.options.client_options import ClientOptions, client_command, topic_names
from timeline.cli.options.values import Milliseconds
from timeline.cli.terminal.output import payload_fields, picked, print_json, shown_payload
from timeline.driver.tasks import end
from timeline.driver.times import shown_time
from timeline.errors import Invalid, TimelineError
from timeline.wording import shown_lateness

BACKOFF_FIRST_S, BACKOFF_CAP_S = 1.0, 3600.0
QUIET_S = 0.5
PARTING_S = 1.0
"""How long a consumer with nothing in hand may take to end in order after a signal: without a broker there is nothing
to end in order, but a long time to wait."""


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option("--id", help="This consumer's id; one that comes back under its id gets what it still holds.  [host-pid]")
@click.option("--lease", type=Milliseconds(), help="How long to have each message.  [the topic's]")
@click.option("--credit", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Messages at once.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after so many.")
@click.option("--wait", type=Milliseconds(), help="End when nothing has come for so long.")
@click.option(
    "--release", type=Milliseconds(0), help="Do not ack: put each back on the timeline, due again so long from now."
)
@click.option("--exec", "command", metavar="CMD", help="Run CMD with the payload on its standard input.")
@client_command
async def consume(
    tl: timeline.Timeline, options: ClientOptions, topic: str, id: str | None, lease: int | None, credit: int,
    count: int | None, wait: int | None, release: int | None, command: str | None,
) -> int:  # fmt: skip
    """Print messages of TOPIC as they come due, and ack each.

    With --exec, a shell runs CMD for one message after the other: exit code 0 acks it, any other puts it back with a
    wait that doubles with each delivery (1s to 1h). The lease is extended while CMD runs; CMD finds TIMELINE_ID,
    TIMELINE_TAG, TIMELINE_DUE and TIMELINE_DELIVERIES in its environment. Several that consume one topic share its
    messages: each message goes to one of them.

    SIGTERM and Ctrl-C (exit code 130) end in order: what nobody saw goes back at once, a CMD that runs may finish. A
    second one, at any moment, ends CMD and all that it started, with SIGTERM and 2s later with SIGKILL; its message
    goes back at once.

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
    """Takes until all is done or a signal comes; the exit code. The first signal ends in order, the second one also
    what is in hand; what that takes is bounded, so that a third one need not do anything."""
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
    """In order, but no longer than PARTING_S once a person or a supervisor wants it to end."""
    closing, hearing = asyncio.ensure_future(consumer.aclose()), asyncio.ensure_future(told.wait())
    await asyncio.wait({closing, hearing}, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait({closing}, timeout=PARTING_S)
    await end(closing)
    await end(hearing)


@dataclass(slots=True)
class Taker:
    """Takes deliveries one after the other and settles each as was asked. What is only printed is acked once its line
    is written, and without waiting for the answer. `taken` counts deliveries, `failed` what was not acked."""

    as_json: bool
    release_s: float | None
    command: str | None
    wait_s: float | None
    count: int | None
    taken: int = 0
    failed: int = 0

    def say_it_waits(self, topic: str) -> None:
        """That it goes on, where it does so until told and nothing has shown that yet."""
        if not (self.taken or self.as_json or self.count or self.wait_s is not None):
            complain(f"waiting for messages of {topic}; Ctrl-C ends it")

    async def take(self, consumer: timeline.Consumer) -> None:
        """Until `count` have come, nothing comes for `wait_s`, or the consumer takes no more."""
        consumer.on_settle_error = self._not_acked
        while self.taken != self.count:
            try:
                async with asyncio.timeout(self.wait_s):
                    delivery = await consumer.take()
            except TimeoutError:
                break
            if delivery is None:
                break
            self.taken += 1
            await self._settle(delivery, consumer)

    @property
    def code(self) -> int:
        """The exit code: final once the consumer is closed, which waits for the answers to its acks."""
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
                except OSError:  # nobody reads it any more: whoever comes next does
                    await delivery.release(in_=0, reason="its consumer could not print it")
                    raise
                delivery.ack_soon()
        except TimelineError as error:
            self.failed += 1
            complain(explain(error))
        except asyncio.CancelledError:  # told twice, with this one in hand
            self.failed += 1
            raise

    def _not_acked(self, delivery: timeline.Delivery, error: TimelineError) -> None:
        self.failed += 1
        complain(explain(error))

    async def _run(self, delivery: timeline.Delivery, command: str, consumer: timeline.Consumer) -> None:
        """Runs the command for a delivery and acks or releases by its exit code, also when the broker is away for a
        while: what was done is else done again. Prints it once that is answered, so that nothing looks done that is
        another's by now."""
        code, hurried = await execute(delivery, command, consumer)
        said, then = shown_ending(code), ""
        patience_s = ANSWER_S if hurried else consumer.patience_s(delivery)
        if code == 0:
            settling, what = delivery.ack(timeout=patience_s), "ack"
        else:
            self.failed += 1
            back_s = min(BACKOFF_FIRST_S * 2.0 ** min(delivery.deliveries - 1, 30), BACKOFF_CAP_S)
            settling, what = delivery.release(in_=back_s, reason=said, timeout=patience_s), "release"
            then = f", again in {back_s:g}s"
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
        due = shown_time(delivery.due_ms)  # what it is late by is counted from it
        text = f"{due}  {delivery.id}  {shown_payload(delivery.payload, 200)}"
        say(f"{text}  (+{shown_lateness(late_ms)}){again}{done}")


async def _answered(delivery: timeline.Delivery, settling: Coroutine[Any, Any, None]) -> None:
    """Waits for the answer to a settle, once a person wants to be gone for no longer than ANSWER_S; says what is not
    known then. Where the answer comes in time, the cancellation is put off: the consumer takes no more by itself."""
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
    """A delivery for machines."""
    more = picked(
        delivery, "tag", "due", "due_ms", "scheduled", "scheduled_ms", "deliveries", "version", "lease_until"
    )  # fmt: skip
    return {"id": delivery.id, **payload_fields(delivery.payload), "headers": dict(delivery.headers), **more}
