"""`timeline late`: what was late in the last while, and why."""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

import click

import timeline
from timeline.cli.app import DONE, SOME_FAILED, complain, say
from timeline.cli.options.client_options import ClientOptions, check_topic, client_command, topic_names
from timeline.cli.options.values import DURATION, shown_zone_option
from timeline.cli.terminal.output import picked, print_json, print_table
from timeline.driver.late import HAPPENED, LEARNT, LateDelivery, LateReport
from timeline.driver.times import duration_ms, shown_time
from timeline.model import MAX_BATCH
from timeline.wording import shown_lateness


@click.command()
@click.argument("topic", required=False, shell_complete=topic_names)
@click.option("--since", default="1h", show_default=True, type=DURATION, help="How far to look back.")
@click.option("--limit", type=click.IntRange(1, MAX_BATCH), default=100, show_default=True, help="The newest so many.")
@shown_zone_option
@client_command
async def late(
    tl: timeline.Timeline, options: ClientOptions, topic: str | None, since: str, limit: int, zone: ZoneInfo | None
) -> int:
    """Deliveries that were more than 50 ms late, of TOPIC or of all topics, each with its cause.

    Each broker keeps the newest 10,000 until it ends; all brokers are asked. Causes are counted over all that they
    keep, shown here or not. Exit code 1 when one did not answer.

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
                shown_time(one.delivered_ms, zone), shown_lateness(one.delivered_ms - one.due_ms), one.topic, one.id,
                one.consumer, one.why,
            )
            for one in found
        ]  # fmt: skip
        where = f" on {topic}" if topic else ""
        empty = f"nothing{where} was more than 50 ms late in the last {since}, or since the brokers started"
        print_table(("DELIVERED", "LATE BY", "TOPIC", "ID", "CONSUMER", "WHY"), rows, ("LATE BY",), empty=empty)
        _sum_up(report)
    if len(report.deliveries) > len(found):
        complain(f"these are the newest {limit:,} of {len(report.deliveries):,}; --limit shows more")
    if report.dropped:
        complain(f"the brokers had to forget {report.dropped:,} older ones since they started")
    for gone in report.unreachable:
        complain(f"{gone} did not answer: what was late there is missing here")
    return SOME_FAILED if report.unreachable else DONE


def _sum_up(report: LateReport) -> None:
    """Causes, the most frequent first, each with what to do."""
    if report.causes:
        say("")
    for cause, count in report.causes.items():
        say(f"{count:>6} × {HAPPENED[cause]} → {LEARNT[cause]}")


def late_json(one: LateDelivery) -> dict[str, Any]:
    """A late delivery for machines."""
    return {
        **picked(one, "topic", "id"),
        "consumer": one.consumer,
        **picked(one, "due", "due_ms", "delivered", "delivered_ms"),
        "late_ms": one.delivered_ms - one.due_ms,
        "cause": one.cause,
    }
