"""`timeline why`: why one message was late, or is not delivered yet."""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

import click

import timeline
from timeline.cli.app import DONE, REFUSED, SOME_FAILED, Failed, awaited, complain, say
from timeline.cli.asking import check_topic, client_command, topic_names
from timeline.cli.causes import ADVICE, HAPPENED, KEEPS, LEARNT
from timeline.cli.identity import connected
from timeline.cli.late import late_json
from timeline.cli.output import print_json
from timeline.cli.read import entry_json
from timeline.cli.values import shown_lateness, shown_time, zone_of
from timeline.clock import Clock
from timeline.driver.reading import LateDelivery
from timeline.model import State
from timeline.wire import Cause

EVER = "36500d"


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("id")
@click.option("--tz", metavar="ZONE", help="Show times in this zone.  [this machine's]")
@client_command
def why(topic: str, id: str, tz: str | None, address: str, timeout: str, as_json: bool) -> int:
    """Why message ID of TOPIC was late, or is due and not delivered yet; and how it stands now.

    Brokers remember their newest 10,000 deliveries that were more than 50 ms late, until they end; all of them are
    asked.

    \b
    Example:
      timeline why departures UA1545
    """
    zone = zone_of(tz)

    async def work() -> int:
        async with connected(address, timeout) as tl:
            record = await check_topic(tl, topic)
            report = await tl.late(EVER, topic=topic, id=id)
            entry = await tl.get(topic, id, payload=False)
        delivered = [one for one in report.deliveries if one.consumer]
        # Each broker that is asked says what keeps it: the latest word counts.
        kept = next((one for one in reversed(report.deliveries) if not one.consumer), None) if entry else None
        if entry is None and not delivered:
            raise Failed(
                REFUSED,
                f"NOT_FOUND: no message {id!r} is on {topic}, and no late delivery of it is remembered: it was "
                "never put, delivered in time, cancelled, purged, expired, or late longer ago than a broker knows",
            )
        if as_json:
            print_json(_json(topic, id, delivered, kept, entry))
        else:
            say(*story(topic, id, delivered, kept, entry, zone))
            if record.settings.paused and kept is not None and kept.cause is not Cause.PAUSED:
                say("     besides, the topic is paused", f"  → {ADVICE[Cause.PAUSED].replace('TOPIC', topic)}")
        for gone in report.unreachable:
            complain(f"{gone} did not answer: what it remembers is missing here")
        return SOME_FAILED if report.unreachable else DONE

    return awaited(work())


def story(
    topic: str,
    id: str,
    delivered: list[LateDelivery],
    kept: LateDelivery | None,
    entry: timeline.StoredMessage | None,
    zone: ZoneInfo | None,
) -> list[str]:
    """What became of a message, in sentences, each cause with what to do about it."""
    lines = []
    for one in delivered:
        late = shown_lateness(one.delivered_ms - one.due_ms)
        when = shown_time(one.delivered_ms, zone)
        lines.append(f"{when}  delivered to {one.consumer}, {late} late: {HAPPENED[one.cause]}")
        lines.append(f"  → {LEARNT[one.cause].replace('TOPIC', topic)}")
    if kept is not None:
        since = shown_lateness(kept.delivered_ms - kept.due_ms)
        lines.append(f"now  due since {since}, and nobody has it: {KEEPS[kept.cause]}")
        lines.append(f"  → {ADVICE[kept.cause].replace('TOPIC', topic)}")
    elif entry is not None:
        if not delivered:
            lines.append("no late delivery of it is remembered")
        lines.append(f"now  {_state(topic, id, entry, zone)}")
    else:
        lines.append(
            f"now  it is not on {topic} any more: acknowledged, cancelled, purged or expired "
            "(only an event journal keeps which)"
        )
    return lines


def _state(topic: str, id: str, entry: timeline.StoredMessage, zone: ZoneInfo | None) -> str:
    when = shown_time(entry.due_ms, zone)
    left_ms = entry.due_ms - Clock().now_ms()
    if entry.state is State.DEAD:
        back = f"'timeline dead revive {topic} {id}' puts it back"
        return f"a dead letter since {shown_time(entry.died_ms, zone)} ({entry.dead}): {back}"
    if entry.state is State.LEASED:
        return f"{entry.holder} has it until {when}, delivery {entry.deliveries}"
    if entry.state is State.AVAILABLE:
        return "due this moment"
    many = "delivery" if entry.deliveries == 1 else "deliveries"
    before = f", after {entry.deliveries} {many}" if entry.deliveries else ""
    return f"waiting{before}: due in {shown_lateness(max(0, left_ms))}, at {when}"


def _json(
    topic: str,
    id: str,
    delivered: list[LateDelivery],
    kept: LateDelivery | None,
    entry: timeline.StoredMessage | None,
) -> dict[str, Any]:
    return {
        "topic": topic,
        "id": id,
        "late": [late_json(one) | {"why": HAPPENED[one.cause]} for one in delivered],
        "kept": None if kept is None else late_json(kept) | {"why": KEEPS[kept.cause]},
        "message": None if entry is None else entry_json(entry),
    }
