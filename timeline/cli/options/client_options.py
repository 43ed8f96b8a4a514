"""What every command that asks a broker has in common: its options, and what it says when no broker is there, or no
such topic, or the address is not one."""

from __future__ import annotations

import asyncio
import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import click

import timeline
from timeline.cli.app import REFUSED, UNREACHABLE, USAGE, Failed
from timeline.cli.options.identity import address_option, connected, credential_options, credentials_of_options
from timeline.cli.options.values import DURATION
from timeline.config import joined, split_address
from timeline.driver.transport.addresses import DEFAULT_ADDRESS, parse_addresses
from timeline.driver.transport.probe import LASTING, ProbeResult, probe
from timeline.errors import Closed, Forbidden, Invalid, NotFound, TimelineError, Unavailable
from timeline.model import DEFAULT_GROUP, Status, Topic, check_topic_name

PROBE_S = 1.0
"""How long to wait for an address that does not answer, when asked whether anybody is there."""
TOPICS_NAMED = 8
TEXTS = ("topic", "name", "id", "ids", "tag", "group", "headers")
"""What commands call their arguments that are text: a payload, a shell's command and a file's path may be any bytes."""
COMPLETION_WAIT = "800ms"
"""How long a shell's completion of a topic may take."""

group_option = click.option(
    "--group", default=DEFAULT_GROUP, show_default=True, help="The producer group that owns the messages."
)


def client_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds what every command that talks to a broker takes, --address, --timeout, --json and who we are, and turns the
    three errors that anybody may meet into the sentence that mends them."""

    @functools.wraps(function)
    def asking(**given: Any) -> Any:
        address, timeout = given["address"], given["timeout"]
        check_addresses(address)
        _check_texts(given)
        try:
            return function(**given)
        except (Unavailable, Closed) as error:
            nobody = asyncio.run(nobody_there(address))
            if not nobody and any(one in error.reason for one in parse_addresses(address)):
                raise
            nobody = (
                nobody or f"{address} takes connections, but the call was not done within {timeout}: {error.reason}"
            )
            raise Failed(UNREACHABLE, f"{Unavailable.code}: {nobody}") from error
        except NotFound as error:
            asyncio.run(_explain_missing(address, timeout, given.get("topic") or given.get("name") or "", error))
            raise

    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON for machines."),
        click.option("--timeout", default="5s", show_default=True, type=DURATION, help="How long a call may take."),
        address_option,
    ):
        asking = option(asking)
    return credential_options(asking)


def topic_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """For shell completion: the topics that begin with `begun`, when a broker answers soon enough."""

    async def ask() -> list[str]:
        address = context.params.get("address") or DEFAULT_ADDRESS
        said = credentials_of_options(context.params)
        async with timeline.Timeline(address, COMPLETION_WAIT, credentials=said) as tl:
            return [each.name for each in await tl.topics() if each.name.startswith(begun) and each.name.isprintable()]

    try:
        return asyncio.run(ask())
    except TimelineError:
        return []


def _check_texts(given: Mapping[str, Any]) -> None:
    """Raises Invalid for bytes that are no UTF-8 where a text belongs; Python has them as halves of surrogate pairs."""
    for name in TEXTS:
        said = given.get(name) or ()
        for text in (said,) if isinstance(said, str) else said:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise Invalid(f"ids, names, tags and headers are text in UTF-8, not {text!a:.80}") from None


def check_addresses(addresses: str) -> None:
    """Raises Failed for what is no list of addresses, with the one that was probably meant."""
    try:
        parse_addresses(addresses)
    except Invalid as bad:
        raise Failed(USAGE, bad.reason) from bad


async def nobody_there(addresses: str) -> str:
    """A sentence that says why no broker can be reached at `addresses` and what to do; empty when one of them may be a
    broker's, so that the trouble is another."""
    listed = parse_addresses(addresses)
    answers = await asyncio.gather(*(probe(address, PROBE_S) for address in listed))
    if {ProbeResult.TALKS, ProbeResult.TLS} & set(answers):
        return ""
    found = ", ".join(f"{address} ({answer.short})" for address, answer in zip(listed, answers, strict=True))
    return (
        f"no broker at {found}. Start one with 'timeline serve', "
        "or say where it is with --address HOST:PORT or TIMELINE_ADDRESS."
    )


async def who_serves(listen: str) -> str:
    """Say in words which broker has the address that a broker would listen on here; empty when none does."""
    host, port = split_address(listen)
    here = joined({"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host), port)
    try:
        async with connected(here, "1s") as tl:
            answer = await tl.ping()
    except Forbidden:
        return "a Timeline broker that does not let us in already serves here"
    except TimelineError as trouble:
        if any(words in trouble.reason for words in LASTING):
            return "a Timeline broker that does not let us in already serves here"
        return ""
    return f"the Timeline broker {answer.broker} (timeline {answer.version}) already serves here"


def missing_topic(name: str, there: Collection[str]) -> str:
    """The sentence for a topic that is not among `there`: the nearest names, or what there is."""
    near = difflib.get_close_matches(name, there, n=3, cutoff=0.5) or [
        each for each in sorted(there) if name and (name in each or each in name)
    ]
    if near:
        hint = f"Did you mean {' or '.join(near[:3])}?"
    elif there:
        more = ", …" if len(there) > TOPICS_NAMED else ""
        hint = f"There are: {', '.join(sorted(there)[:TOPICS_NAMED])}{more}."
    else:
        hint = "There is none yet."
    return f"{NotFound.code}: there is no topic {name!r}. {hint} 'timeline topic create' makes one."


async def check_topic(tl: timeline.Timeline, name: str) -> Topic:
    """The record of topic `name`. Raises Failed, naming the nearest, when there is none; Invalid for no name."""
    check_topic_name(name)
    there = {each.name: each for each in await tl.topics()}
    if name not in there:
        raise Failed(REFUSED, missing_topic(name, there))
    return there[name]


async def check_receipts(tl: timeline.Timeline, name: str, receipts: Collection[timeline.Receipt]) -> None:
    """When a call found nothing at all, looks whether it is the topic that is missing: one sentence about that says
    more than one for each id. Raises Failed."""
    if receipts and all(receipt.status is Status.NOT_FOUND for receipt in receipts):
        await check_topic(tl, name)


async def _explain_missing(address: str, timeout: str, topic: str, error: NotFound) -> None:
    """Raises Failed when it is the topic that `error` did not find; returns when it is not, or nobody can say."""
    if not topic:
        return  # one of all topics, dropped meanwhile
    try:
        async with connected(address, timeout) as tl:
            await check_topic(tl, topic)
    except Failed as missing:
        raise missing from error
    except TimelineError:
        return  # the error that brought us here says what is known
