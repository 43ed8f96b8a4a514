"""`timeline why`: why one message was late, or is not delivered yet."""

from __future__ import annotations

from typing import Any
from zoneinfo import ZoneInfo

import click

import timeline
from timeline.cli.app import DONE, REFUSED, SOME_FAILED, Failed, complain, say
from timeline.cli.look.late import late_json
from timeline.cli.messages.read import entry_json
from timeline.cli.options.client_options import ClientOptions, check_topic, client_command, topic_names
from timeline.cli.options.values import shown_zone_option
from timeline.cli.terminal.output import print_json
from timeline.errors import NotFound


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("id")
@shown_zone_option
@client_command
async def why(tl: timeline.Timeline, options: ClientOptions, topic: str, id: str, zone: ZoneInfo | None) -> int:
    """Why message ID of TOPIC was late, or is due and not delivered yet; and how it stands now.

    Brokers remember their newest 10,000 deliveries that were more than 50 ms late, until they end; all of them are
    asked.

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
        print_json(_json(told))
    else:
        say(*told.lines(zone))
    for gone in told.unreachable:
        complain(f"{gone} did not answer: what it remembers is missing here")
    return SOME_FAILED if told.unreachable else DONE


def _json(told: timeline.Why) -> dict[str, Any]:
    return {
        "topic": told.topic,
        "id": told.id,
        "late": [late_json(one) | {"why": one.why} for one in told.late],
        "kept": None if told.kept is None else late_json(told.kept) | {"why": told.kept.why},
        "message": None if told.message is None else entry_json(told.message),
    }
