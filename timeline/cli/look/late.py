"""`timeline late` and `timeline why`: what was late, and why."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from zoneinfo import ZoneInfo

import click

import timeline
from timeline.cli.app import DONE, REFUSED, SOME_FAILED, Failed, complain, say
from timeline.cli.messages.read import entry_json
from timeline.cli.options import DURATION, ClientOptions, check_topic, client_command, topic_names, zone_option
from timeline.cli.output import id_cell, picked, print_json, print_table, time_cell
from timeline.driver.late import HAPPENED, LEARNT, LateDelivery
from timeline.driver.times import duration_ms
from timeline.errors import NotFound
from timeline.model import MAX_BATCH
from timeline.wording import shown_lateness

COLUMNS = ("DELIVERED", "LATE BY", "TOPIC", "ID", "CONSUMER", "WHY")
SPARE = ("CONSUMER", "TOPIC")
"""Columns that a narrow terminal goes without, the first first."""


@click.command()
@click.argument("topic", required=False, shell_complete=topic_names)
@click.option("--since", default="1h", type=DURATION, help="How far to look back.")
@click.option("--limit", type=click.IntRange(1, MAX_BATCH), default=100, help="Only the newest N.")
@zone_option
@client_command
async def late(
    tl: timeline.Timeline, options: ClientOptions, topic: str | None, since: str, limit: int, zone: ZoneInfo | None
) -> int:
    """List deliveries of TOPIC, or of all topics, that were more than 50 ms late, each with its cause.

    All brokers are asked. Each keeps its newest 10,000 late deliveries until it ends. Causes are counted over all of
    them, shown here or not. Exit code 1 when a broker did not answer.

    \b
    Example:
      timeline late --since 10m
      timeline late departures --json
    """
    duration_ms(since, "--since", least_ms=1)
    if topic is not None:
        await check_topic(tl, topic)
    report = await tl.late(since, topic=topic or "", limit=MAX_BATCH)
    found = report.deliveries[-limit:]
    if options.as_json:
        for one in found:
            print_json(late_json(one))
    else:
        rows = [
            (
                time_cell(one.delivered_ms, zone), shown_lateness(one.delivered_ms - one.due_ms), one.topic,
                id_cell(one.id), one.consumer, one.why,
            )
            for one in found
        ]  # fmt: skip
        where = f" on {topic}" if topic else ""
        empty = f"nothing{where} was more than 50 ms late in the last {since}, or since the brokers started"
        print_table(COLUMNS, rows, ("LATE BY",), empty=empty, spare=SPARE)
        if report.causes:
            say("")
        for cause, count in report.causes.items():  # the most frequent first
            say(f"{count:>6} × {HAPPENED[cause]} → {LEARNT[cause]}", indent=9)
    if len(report.deliveries) > len(found):
        complain(f"these are the newest {limit:,} of {len(report.deliveries):,}; --limit shows more")
    if report.dropped:
        complain(f"the brokers had to forget {report.dropped:,} older ones since they started")
    return _complain_of(report.unreachable, "what was late there")


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("id")
@zone_option
@client_command
async def why(tl: timeline.Timeline, options: ClientOptions, topic: str, id: str, zone: ZoneInfo | None) -> int:
    """Explain why message ID of TOPIC was late, or is due and not delivered yet, and show its state.

    All brokers are asked. Each remembers its newest 10,000 deliveries that were more than 50 ms late, until it ends.

    \b
    Example:
      timeline why departures UA1545
    """
    try:
        told = await tl.why(topic, id)
    except NotFound as absent:
        await check_topic(tl, topic)
        raise Failed(REFUSED, f"{absent.code}: {absent.reason}") from absent
    if options.as_json:
        kept, message = told.kept, told.message
        late = [late_json(one) | {"why": one.why} for one in told.late]
        cause = None if kept is None else late_json(kept) | {"why": kept.why}
        stored = None if message is None else entry_json(message)
        origin = told.schedule and picked(told.schedule, "name", "occurrence=at", "triggered")
        print_json(
            {"topic": told.topic, "id": told.id, "late": late, "kept": cause, "message": stored, "schedule": origin}
        )
    else:
        say(*told.lines(zone), indent=5)
    return _complain_of(told.unreachable, "what it remembers")


def _complain_of(unreachable: Collection[str], missing: str) -> int:
    """Name the brokers that did not answer, and return the exit code."""
    for gone in unreachable:
        complain(f"{gone} did not answer: {missing} is missing here")
    return SOME_FAILED if unreachable else DONE


def late_json(one: LateDelivery) -> dict[str, Any]:
    """Return a late delivery for machines."""
    return {
        **picked(one, "topic", "id"),
        "consumer": one.consumer,
        **picked(one, "due", "due_ms", "delivered", "delivered_ms"),
        "late_ms": one.delivered_ms - one.due_ms,
        "cause": one.cause,
    }
