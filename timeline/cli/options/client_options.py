"""What every command that asks a broker takes: whom it asks, who it is to them, and how it answers; the client that is
made of that; and what is said when no broker is there, or no such topic, or the address is not one."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

import timeline
from timeline.cli.app import DONE, REFUSED, UNREACHABLE, USAGE, Failed
from timeline.cli.options.values import DURATION
from timeline.config import joined, split_address
from timeline.credentials import PLAIN, BadCredentials, Credentials, credentials_of
from timeline.driver.transport.addresses import DEFAULT_ADDRESS, parse_addresses
from timeline.driver.transport.probe import ProbeResult, probe
from timeline.errors import Closed, Forbidden, Invalid, NotFound, TimelineError, Unavailable
from timeline.model import DEFAULT_GROUP, Status, Topic, check_topic_name

TOKEN_VARIABLE = "TIMELINE_TOKEN"
_KEPT = "timeline.credentials"
PROBE_S = 1.0
"""How long to wait for an address that does not answer, when asked whether anybody is there."""
START_ONE = "Start one with 'timeline serve', or say where it is with --address HOST:PORT or TIMELINE_ADDRESS."
TOPICS_NAMED = 8
TEXTS = ("topic", "name", "id", "ids", "tag", "group", "headers")
"""What commands call their arguments that are text: a payload, a shell's command and a file's path may be any bytes."""
COMPLETION_WAIT = "800ms"
"""How long a shell's completion of a topic may take."""

group_option = click.option(
    "--group", default=DEFAULT_GROUP, show_default=True, help="The producer group that owns the messages."
)
OPTIONS = (
    click.option("--tls", is_flag=True, envvar="TIMELINE_TLS", help="Encrypt; TIMELINE_TLS."),
    click.option("--tls-ca", envvar="TIMELINE_TLS_CA", metavar="FILE", help="Who signed the broker's certificate."),
    click.option("--tls-cert", envvar="TIMELINE_TLS_CERT", metavar="FILE", help="A certificate of our own, to show."),
    click.option("--tls-key", envvar="TIMELINE_TLS_KEY", metavar="FILE", help="Its key."),
    click.option(
        "--token-file", envvar="TIMELINE_TOKEN_FILE", metavar="FILE", help="Who we are; or TIMELINE_TOKEN, the token."
    ),
)
address_option = click.option(
    "--address",
    envvar="TIMELINE_ADDRESS",
    default=DEFAULT_ADDRESS,
    show_default=True,
    metavar="HOST:PORT",
    help="The broker, or several with commas; TIMELINE_ADDRESS.",
)
operator_option = click.option(
    "--as-operator", is_flag=True, help="Whatever group owns them: takes the right operator, and is logged."
)
NAMES = ("tls", "tls_ca", "tls_cert", "tls_key", "token_file")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
timeout_option = click.option(
    "--timeout", default="5s", show_default=True, type=DURATION, help="How long a call may take."
)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Whom a command asks, how long a call may take, and whether it answers in JSON."""

    address: str
    timeout: str
    as_json: bool

    def run(self, work: Callable[[timeline.Timeline], Awaitable[int | None]]) -> int:
        """Do `work` with a client; the exit code (None: done)."""

        async def run() -> int | None:
            async with connected(self.address, self.timeout) as tl:
                return await work(tl)

        return asyncio.run(run()) or DONE


def client_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every command that talks to a broker takes, --address, --timeout, --json and who we are, and turn the
    three errors that anybody may meet into the sentence that mends them. `function` gets ClientOptions; one that is a
    coroutine gets a client before it, and is run to its end."""

    @functools.wraps(function)
    def asking(address: str, timeout: str, as_json: bool, **given: Any) -> Any:
        options = ClientOptions(address, timeout, as_json)
        check_addresses(address)
        _check_texts(given)
        try:
            if inspect.iscoroutinefunction(function):
                return options.run(lambda tl: function(tl, options, **given))
            return function(options, **given)
        except (Unavailable, Closed) as error:
            nobody = asyncio.run(nobody_there(address))
            if not nobody and error.found:
                raise  # it says what was found at each address
            nobody = (
                nobody or f"{address} takes connections, but the call was not done within {timeout}: {error.reason}"
            )
            raise Failed(UNREACHABLE, f"{Unavailable.code}: {nobody}") from error
        except NotFound as error:
            asyncio.run(_explain_missing(address, timeout, given.get("topic") or given.get("name") or "", error))
            raise

    for option in (json_option, timeout_option, address_option):
        asking = option(asking)
    return credential_options(asking)


def credential_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --tls, --tls-ca, --tls-cert, --tls-key and --token-file; what they say is kept for `connected`. A command
    that has `operator_option`, too, says so by the same way."""

    @functools.wraps(function)
    def with_credentials(**given: Any) -> Any:
        click.get_current_context().meta[_KEPT] = credentials_of_options(given)
        return function(**{name: value for name, value in given.items() if name not in (*NAMES, "as_operator")})

    for option in reversed(OPTIONS):
        with_credentials = option(with_credentials)
    return with_credentials


def credentials_of_options(given: Mapping[str, Any]) -> Credentials:
    """What the options say, and TIMELINE_TOKEN where no file is named. Raises Invalid."""
    tls, ca, cert, key, file = (given.get(name) or None for name in NAMES)
    token: str | Path | None = Path(file) if file else os.environ.get(TOKEN_VARIABLE) or None
    try:
        return credentials_of(tls, ca, cert, key, token, as_operator=bool(given.get("as_operator")))
    except Invalid as bad:
        part = bad.part if isinstance(bad, BadCredentials) else ""
        raise Invalid(f"{bad.reason} ({_at_fault(part, file)})") from bad


def _at_fault(part: str, token_file: str | None) -> str:
    """Which option, or variable in its place, has the `part` of the credentials that is at fault."""
    if part == "token" and not token_file:
        return TOKEN_VARIABLE
    option = {"token": "token-file", "ca": "tls-ca", "key": "tls-key", "cert": "tls-cert"}.get(part, "")
    if not option:
        return "--tls-cert and --tls-key, or TIMELINE_TLS_CERT and TIMELINE_TLS_KEY"
    return f"--{option}, or TIMELINE_{option.upper().replace('-', '_')}"


def credentials() -> Credentials:
    """What the options of the command that runs now say."""
    context = click.get_current_context(silent=True)
    kept = context.meta.get(_KEPT, PLAIN) if context is not None else PLAIN
    assert isinstance(kept, Credentials)
    return kept


def connected(address: str, timeout: str) -> timeline.Timeline:
    """A client of the brokers at `address`, as whom the options of the command that runs now say."""
    return timeline.Timeline(address, timeout, credentials=credentials())


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
    found = await nobody_found(addresses)
    return f"{found}. {START_ONE}" if found else ""


async def nobody_found(addresses: str) -> str:
    """The first half of that sentence: what was found at each address."""
    listed = parse_addresses(addresses)
    answers = await asyncio.gather(*(probe(address, PROBE_S) for address in listed))
    if {ProbeResult.TALKS, ProbeResult.TLS} & set(answers):
        return ""
    found = (f"{address} ({answer.short})" for address, answer in zip(listed, answers, strict=True))
    return f"no broker at {', '.join(found)}"


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
        if trouble.lasting:
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
