"""`timeline push …`: webhooks from this machine, for trying."""

from __future__ import annotations

import asyncio
import secrets

import click

import timeline
from timeline.cli.app import REFUSED, UNREACHABLE, Failed, Suggesting, needing, say
from timeline.cli.options import ClientOptions, check_topic, client_command, topic_names
from timeline.cli.output import print_fields, print_json
from timeline.clock import Clock
from timeline.driver.times import as_datetime
from timeline.errors import Invalid

SHOWN_BYTES = 1_024


@click.group(cls=Suggesting)
def push() -> None:
    """Try webhooks.

    \b
    Example:
      timeline push test departures
    """


@push.command("test")
@click.argument("name", shell_complete=topic_names)
@click.option("--push-allow", "allowed", multiple=True, metavar="CIDR", help="Private network that it may go to.")
@client_command
async def send_example(tl: timeline.Timeline, options: ClientOptions, name: str, allowed: tuple[str, ...]) -> int:
    """Send one signed example from this machine to the push_url of topic NAME, and show the answer.

    No message is produced, and none is settled. It takes the right admin.

    \b
    Example:
      timeline push test departures
      timeline push test departures --push-allow 127.0.0.0/8
    """
    with needing("gateway", "webhooks need"):
        from timeline.gateway.push.addresses import AddressGuard
        from timeline.gateway.push.request import PushedMessage, headers_of
        from timeline.gateway.push.sender import Sender, Unanswered
        from timeline.gateway.push.settlement import settlement_of

    guard = AddressGuard(allowed)
    topic = await check_topic(tl, name)
    url, settings = topic.settings.push_url, topic.settings
    if not url:
        raise Invalid(f"topic {name} has no push_url. Set it: timeline topic update {name} --push-url URL")
    clock = Clock()
    example = PushedMessage(
        topic=name,
        id="example",
        birth=secrets.randbits(64),
        payload=b'{"example": true}',
        headers={"content-type": "application/json"},
        due=as_datetime(clock.now_ms()).isoformat(),
        deliveries=1,
        receipt="",
    )
    sent = headers_of(example, await tl.topic_secrets(name), clock.now_ms() // 1000)
    sender = Sender(url, guard, 1)
    began_ms = clock.monotonic_ms()
    try:
        answer = await sender.post(sent, example.payload, settings.push_timeout_ms)
    except Unanswered as why:
        # Not an error of the client: the broker answers.
        raise Failed(REFUSED if why.refused else UNREACHABLE, f"{url} did not answer: {why}") from why
    finally:
        await sender.close()
        await asyncio.sleep(0)
    outcome = settlement_of(answer.status, answer.headers, answer.body, clock.now_ms(), settings.max_lease_ms)
    told = {
        "url": url,
        "status": answer.status,
        "took_ms": round(clock.monotonic_ms() - began_ms),
        "would": str(outcome.verb),
        "body": answer.body[:SHOWN_BYTES].decode("utf-8", "replace"),
    }
    if options.as_json:
        print_json(told)
    else:
        for header, value in sent:
            say(f"> {header}: {value}")
        print_fields(told)
    return 0 if 200 <= answer.status < 300 else 1
