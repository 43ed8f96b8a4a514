"""`timeline why`: why one message was late, or is not delivered yet."""

from __future__ import annotations

from typing import Any

import click

import timeline
from timeline.cli.app import DONE, REFUSED, SOME_FAILED, Failed, awaited, complain, say
from timeline.cli.look.late import late_json
from timeline.cli.messages.read import entry_json
from timeline.cli.options.client_options import check_topic, client_command, topic_names
from timeline.cli.options.identity import connected
from timeline.cli.options.values import zone_of
from timeline.cli.terminal.output import print_json
from timeline.errors import NotFound


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
            try:
                told = await tl.why(topic, id)
            except NotFound as absent:
                await check_topic(tl, topic)
                raise Failed(REFUSED, f"{absent.code}: {absent.reason}") from absent
        if as_json:
            print_json(_json(told))
        else:
            say(*told.lines(zone))
        for gone in told.unreachable:
            complain(f"{gone} did not answer: what it remembers is missing here")
        return SOME_FAILED if told.unreachable else DONE

    return awaited(work())


def _json(told: timeline.Why) -> dict[str, Any]:
    return {
        "topic": told.topic,
        "id": told.id,
        "late": [late_json(one) | {"why": one.why} for one in told.late],
        "kept": None if told.kept is None else late_json(told.kept) | {"why": told.kept.why},
        "message": None if told.message is None else entry_json(told.message),
    }
