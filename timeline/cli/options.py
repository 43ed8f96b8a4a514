"""The values of the command line: times, durations, settings, and how to reach a broker."""

from __future__ import annotations

import asyncio
import difflib
import functools
import inspect
import os
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import click
from click.core import ParameterSource

import timeline
from timeline.cli.app import DONE, REFUSED, UNREACHABLE, USAGE, Failed, complain
from timeline.clock import Clock
from timeline.config import has_password, local_address, parse_url
from timeline.credentials import PLAIN, BadCredentials, Credentials, credentials_of
from timeline.driver.times import LOOKS_LIKE_SECONDS, as_datetime, duration_ms, in_utc, instant_ms, local, parse_iso
from timeline.driver.transport.addresses import DEFAULT_ADDRESS, ProbeResult, parse_addresses, place_of, probe
from timeline.errors import Closed, Forbidden, Invalid, NotFound, TimelineError, Unavailable
from timeline.model import DEFAULT_GROUP, Status, Topic, check_topic_name, fits_new_topic
from timeline.schedules.specification import INTERNAL_PREFIX

FORMS = (
    "a time is ISO 8601 with its offset (2026-03-29T09:00+02:00, …Z), now, now+15m, now-1h, a local time "
    "(2026-03-29T09:00) with --tz Europe/Berlin, or milliseconds since 1970 UTC"
)
_BARE = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?")
_MILLIS = re.compile(r"-?[0-9]{9,30}")
"""More digits than a date without hyphens has."""
_LENGTH = re.compile(r"\s*-?[0-9]+(?:\.[0-9]*)?\s*[a-z].*|\s*-?[0-9]{1,7}(?:\.[0-9]*)?\s*")
"""A text that begins like a duration, or a number of fewer digits than a date has."""
_NOW = re.compile(r"now(?:\s*([+-])\s*(\S+))?")
_KEPT = "timeline.credentials"
PROBE_S = 1.0
"""How long to wait for each address when no broker answered."""
START_ONE = "Start one with 'timeline serve', or say where it is with --address HOST:PORT or TIMELINE_ADDRESS."
LOOK_AT_IT = "The broker may be stopped or overloaded: look at its process and its log, or wait longer with --timeout."
_NO_ANSWER = {"NOBODY", "SILENT", "TALKS", "UNKNOWN_NAME", "UNREACHABLE"}
"""Findings of a call that nobody answered."""
TOPICS_NAMED = 8
TEXTS = ("topic", "name", "id", "ids", "tag", "group", "headers")
"""Arguments of commands that must be text. A payload, a shell's command and a file's path may be any bytes."""
COMPLETION_WAIT = "800ms"
"""How long a shell's completion of a topic may take."""


class Duration(click.ParamType[str]):
    """An option that takes a duration. A number without a unit is seconds, as in the Python API."""

    name = "DURATION"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the text with its unit. Its range is checked where its bounds are known."""
        return with_unit(str(value))


DURATION = Duration()


class Milliseconds(Duration):
    """An option that takes a duration of at least `least_ms`, and gives it in milliseconds."""

    def __init__(self, least_ms: int = 1) -> None:
        self._least_ms = least_ms

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        """Return the duration. Raises Invalid, which names the option."""
        if isinstance(value, int):
            return value
        option = parameter.opts[0] if parameter is not None else "a duration"
        return duration_ms(super().convert(value, parameter, context), option, least_ms=self._least_ms)


class _Zone(click.ParamType[ZoneInfo]):
    name = "ZONE"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> ZoneInfo:
        found = value if isinstance(value, ZoneInfo) else zone_of(value)
        assert found is not None
        return found


class Url(click.ParamType[str]):
    """A URL that may hold a password, or @FILE with the URL in it. Warns of a password on the command line.
    `elsewhere`: where else the URL may be given."""

    name = "URL|@FILE"

    def __init__(self, elsewhere: str = "") -> None:
        self.elsewhere = elsewhere

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> str:
        """Return the URL itself."""
        url = parse_url(value)
        source = context and parameter and context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and url == value and has_password(url):
            option = f"{parameter.opts[0]} " if isinstance(parameter, click.Option) else ""
            complain(
                f"others on this machine can read the password in {option or 'the URL '}from the list of processes. "
                f"Write the URL into a file of yours, and give {option}@FILE{self.elsewhere}"
            )
        return url


def with_unit(text: str) -> str:
    """Return a duration with its unit. A bare number is seconds."""
    return f"{text}s" if _BARE.fullmatch(text) else text


def is_length(text: str) -> bool:
    """Return whether a text, a time or a duration, is meant as a duration. It may still be malformed."""
    return _LENGTH.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Time:
    """A point in time (`at_ms`, milliseconds UTC), or a distance from now (`in_ms`, may be negative)."""

    at_ms: int | None = None
    in_ms: int | None = None

    @property
    def at(self) -> datetime | None:
        """The point in time for the driver, which takes ints of the early 1970s for seconds."""
        return None if self.at_ms is None else as_datetime(self.at_ms)

    def asked(self) -> dict[str, Any]:
        """Return `at=` or `in_=` for the driver. A time before now becomes now."""
        return {"at": self.at} if self.at_ms is not None else {"in_": max(0, self.in_ms or 0) / 1000}

    def absolute_ms(self) -> int:
        """Return milliseconds UTC. A distance counts from this machine's clock."""
        return Clock().now_ms() + (self.in_ms or 0) if self.at_ms is None else self.at_ms


def parse_time(text: str, option: str, zone: str | None = None) -> Time:
    """Return a time in one of `FORMS`. Raises Invalid, which names `option`."""
    said = text.strip()
    match = _NOW.fullmatch(said)
    if match is not None:
        if match[2] is None:
            return Time(in_ms=0)
        length_ms = duration_ms(with_unit(match[2]), option)
        if match[1] == "-" and length_ms >= Clock().now_ms():
            raise Invalid(f"{option} must be a time after the start of 1970, not {text!r:.60}")
        return Time(in_ms=length_ms if match[1] == "+" else -length_ms)
    if _MILLIS.fullmatch(said):
        if abs(int(said)) < LOOKS_LIKE_SECONDS:
            raise Invalid(f"{option} {text!r:.60} looks like seconds: it takes milliseconds since 1970 UTC; {FORMS}")
        return Time(at_ms=instant_ms(int(said), option))
    try:
        when = parse_iso(said)
    except ValueError:
        raise Invalid(f"{option} {text!r:.60} is no time: {FORMS}") from None
    if when.tzinfo is None:
        if zone is None:
            raise Invalid(
                f"{option} {text!r:.60} does not say in which time zone: add the offset ({in_utc(said)} is UTC) or "
                "give --tz"
            )
        when = local(date(when.year, when.month, when.day), when.time(), zone)
    return Time(at_ms=instant_ms(when, option))


def due_of(at: str | None, in_: str | None, zone: str | None, options: tuple[str, str]) -> Time:
    """Return the time that one of two options asks for: absolute, or from now. Raises Invalid unless exactly one is
    given, and for a zone that does not exist, even when it is not needed."""
    zone_of(zone)
    if (at is None) == (in_ is None):
        raise Invalid(f"give either {options[0]} (a time) or {options[1]} (how long from now), one of the two")
    if in_ is not None:
        return Time(in_ms=duration_ms(in_, options[1]))
    assert at is not None
    return parse_time(at, options[0], zone)


def parse_headers(pairs: Sequence[str]) -> dict[str, str]:
    """Return headers written as `k=v`. Raises Invalid."""
    headers: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise Invalid(f"--header is name=value, not {pair!r:.60}")
        if key in headers:
            raise Invalid(f"--header {key!r:.60} is given twice")
        headers[key] = value
    return headers


def zone_of(zone: str | None) -> ZoneInfo | None:
    """Return the time zone by its name, None for None. Raises Invalid."""
    if zone is None:
        return None
    found = local("2000-01-01", "12:00", zone).tzinfo
    assert isinstance(found, ZoneInfo)
    return found


def shown_count(count: int, rate_per_s: float) -> str:
    """Return a count with its rate per second. Nothing has no rate."""
    return f"{count:,}, {rate_per_s:,.0f}/s" if count else "0"


def shown_bytes(size_bytes: int) -> str:
    """Return an exact size for people, such as 1MiB or 1500B."""
    for unit, unit_bytes in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes and size_bytes % unit_bytes == 0:
            return f"{size_bytes // unit_bytes}{unit}"
    return f"{size_bytes}B"


class ConnectionOption(click.Option):
    """An option that says how to reach a broker. `timeline help connection` shows it; a command's help has one line
    for all of them, in the place of --address."""

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        if context.command is connection:
            return super().get_help_record(context)
        return ("--address …", "How to reach a broker: 'timeline help connection'.") if self.name == "address" else None


def _connection_option(*names: str, **settings: Any) -> Callable[[Any], Any]:
    return click.option(*names, cls=ConnectionOption, **settings)


address_option = _connection_option(
    "--address",
    envvar="TIMELINE_ADDRESS",
    default=DEFAULT_ADDRESS,
    metavar="HOST:PORT",
    help="Address of a broker, or of several, with commas. Variable: TIMELINE_ADDRESS.",
)
timeout_option = _connection_option(
    "--timeout", default="5s", type=DURATION, help="Longest time that one call may take."
)
CREDENTIALS = (
    ("--tls", {"is_flag": True}, "Encrypt the connection."),
    ("--tls-ca", {"metavar": "FILE"}, "Authority that signed the broker's certificate."),
    ("--tls-cert", {"metavar": "FILE"}, "Certificate of this client, for brokers that ask for one."),
    ("--tls-key", {"metavar": "FILE"}, "Private key of that certificate."),
    ("--token-file", {"metavar": "FILE"}, "File with this client's token. TIMELINE_TOKEN may hold the token itself."),
)
"""The options that say who calls: name, settings, meaning."""
NAMES = tuple(option.lstrip("-").replace("-", "_") for option, _, _ in CREDENTIALS)
operator_option = click.option(
    "--as-operator", is_flag=True, help="Act on messages of any group. Needs the right operator; brokers log it."
)
group_option = click.option("--group", default=DEFAULT_GROUP, help="Producer group that owns the messages.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
zone_option = click.option(
    "--tz", "zone", type=_Zone(), help="Time zone of the times that are shown. Default: this machine's."
)


def every_option(help: str, default: str = "1s") -> Callable[[Any], Any]:
    """Return the option `--every`: how often a command looks again."""
    return click.option("--every", default=default, type=Milliseconds(), help=help)


def credential_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `CREDENTIALS` and keep their values for `connected`. A command with `operator_option` hands that on, too."""

    @functools.wraps(function)
    def with_credentials(**given: Any) -> Any:
        click.get_current_context().meta[_KEPT] = credentials_of_options(given)
        return function(**{name: value for name, value in given.items() if name not in (*NAMES, "as_operator")})

    for option, settings, meaning in reversed(CREDENTIALS):
        variable = f"TIMELINE_{option.lstrip('-').replace('-', '_').upper()}"
        named = f"{meaning} Variable: {variable}."
        with_credentials = _connection_option(option, envvar=variable, help=named, **settings)(with_credentials)
    return with_credentials


@click.command("connection", add_help_option=False)
@credential_options
@timeout_option
@address_option
def connection() -> None:
    """Options of all commands that ask a broker. They stand after the command.

    \b
    Example:
      timeline ls departures --address broker-1:9000,broker-2:9000 \\
        --tls-ca ca.pem --token-file web.token
    """


def connection_page(width: int | None = None) -> str:
    """Return what `timeline help connection` prints. Default for `width`: the terminal's."""
    context = click.Context(
        connection, info_name="timeline COMMAND", max_content_width=110, terminal_width=width, show_default=True
    )
    return connection.get_help(context)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Which brokers a command asks, how long a call may take, and whether the command prints JSON."""

    address: str
    timeout: str
    as_json: bool

    def run(self, work: Callable[[timeline.Timeline], Awaitable[int | None]]) -> int:
        """Do `work` with a client and return the exit code. None means done."""

        async def run() -> int | None:
            async with connected(self.address, self.timeout) as tl:
                return await work(tl)

        return asyncio.run(run()) or DONE


def client_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of every client: --address, --timeout, --json and the credentials. `function` gets them as
    ClientOptions; a coroutine also gets a client, and is run to its end. Turn errors that any client may meet into
    sentences that say what to do."""

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
            unreached = asyncio.run(no_answer(address, error, f" within {timeout}"))
            if unreached is None:
                raise  # its reason says why
            raise Failed(UNREACHABLE, f"{Unavailable.code}: {unreached.found}. {unreached.advice}") from error
        except NotFound as error:
            topic = given.get("topic") or given.get("name")
            if topic:  # else one of all topics was dropped meanwhile
                asyncio.run(_explain_missing(address, timeout, topic, error))
            raise

    for option in (json_option, timeout_option, address_option):
        asking = option(asking)
    return credential_options(asking)


def credentials_of_options(given: Mapping[str, Any]) -> Credentials:
    """Return the credentials that options name, or TIMELINE_TOKEN without a token file. Raises Invalid."""
    tls, ca, cert, key, file = (given.get(name) or None for name in NAMES)
    token: str | Path | None = Path(file) if file else os.environ.get("TIMELINE_TOKEN") or None
    try:
        return credentials_of(tls, ca, cert, key, token, as_operator=bool(given.get("as_operator")))
    except Invalid as bad:
        part = bad.part if isinstance(bad, BadCredentials) else ""
        raise Invalid(f"{bad.reason} ({_at_fault(part, file)})") from bad


def _at_fault(part: str, token_file: str | None) -> str:
    """Return the option and the variable that have the faulty `part` of the credentials."""
    if part == "token" and not token_file:
        return "TIMELINE_TOKEN"
    option = {"token": "token-file", "ca": "tls-ca", "key": "tls-key", "cert": "tls-cert"}.get(part, "")
    if not option:
        return "--tls-cert and --tls-key, or TIMELINE_TLS_CERT and TIMELINE_TLS_KEY"
    return f"--{option}, or TIMELINE_{option.upper().replace('-', '_')}"


def credentials() -> Credentials:
    """Return the credentials of the running command."""
    context = click.get_current_context(silent=True)
    kept = context.meta.get(_KEPT, PLAIN) if context is not None else PLAIN
    assert isinstance(kept, Credentials)
    return kept


def connected(address: str, timeout: str) -> timeline.Timeline:
    """Return a client of the brokers at `address`, with the running command's credentials."""
    return timeline.Timeline(address, timeout, credentials=credentials())


def topic_names(context: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Return the topics that begin with `begun`, for a shell's completion. None when no broker answers in time."""

    async def names(tl: timeline.Timeline) -> list[str]:
        return [each.name for each in await tl.topics() if each.name.isprintable()]

    return completed(context, begun, names)


def completed(
    context: click.Context, begun: str, names: Callable[[timeline.Timeline], Awaitable[list[str]]]
) -> list[str]:
    """Return those of `names` that begin with `begun`, for a shell's completion. None when no broker answers in time.
    `names` gets a client by the options of `context`."""

    async def ask() -> list[str]:
        address = context.params.get("address") or DEFAULT_ADDRESS
        credentials = credentials_of_options(context.params)
        async with timeline.Timeline(address, COMPLETION_WAIT, credentials=credentials) as tl:
            return [name for name in await names(tl) if name.startswith(begun)]

    try:
        return asyncio.run(ask())
    except TimelineError:
        return []


def _check_texts(given: Mapping[str, Any]) -> None:
    """Raise Invalid for bytes that are no UTF-8 where text belongs. Python has them as halves of surrogate pairs."""
    for name in TEXTS:
        said = given.get(name) or ()
        for text in (said,) if isinstance(said, str) else said:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise Invalid(f"ids, names, tags and headers are text in UTF-8, not {text!a:.80}") from None


def check_addresses(addresses: str) -> None:
    """Raise Failed unless `addresses` is a list of addresses. Names the address that was probably meant."""
    try:
        parse_addresses(addresses)
    except Invalid as bad:
        raise Failed(USAGE, bad.reason) from bad


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """The findings at the addresses of a call that no broker answered, and advice. `nobody`: no broker is there."""

    found: str
    advice: str
    nobody: bool


async def no_answer(addresses: str, error: TimelineError, within: str = "") -> NoAnswer | None:
    """Probe `addresses` after `error`. None: a broker may be there, and the reason of the error says more. `within`:
    how long a broker that is there had for its answer."""
    found: dict[object, tuple[str, ProbeResult]] = {}
    listed = parse_addresses(addresses)
    for address, one in zip(listed, await asyncio.gather(*(probe(each, PROBE_S) for each in listed)), strict=True):
        found.setdefault((place_of(address), one), (address, one))
    there = [address for address, one in found.values() if one in (ProbeResult.TALKS, ProbeResult.TLS)]
    gone = ", ".join(f"{address} ({one.short})" for address, one in found.values() if address not in there)
    if not there:
        return NoAnswer(f"no broker at {gone}", START_ONE, nobody=True)
    if not error.found or not {*error.found} <= _NO_ANSWER:
        return None
    takes, answers = ("takes", "does") if len(there) == 1 else ("take", "do")
    besides = f"; no broker at {gone}" if gone else ""
    said = f"{' and '.join(there)} {takes} connections, but {answers} not answer{within}{besides}"
    return NoAnswer(said, LOOK_AT_IT, nobody=False)


async def who_serves(listen: str) -> str:
    """Return which broker has the address that a broker would listen on here, in words. Empty when none does."""
    try:
        async with connected(local_address(listen), "1s") as tl:
            answer = await tl.ping()
    except TimelineError as trouble:
        if trouble.lasting or isinstance(trouble, Forbidden):
            return "a Timeline broker that does not let us in already serves here"
        return ""
    return f"the Timeline broker {answer.broker} (timeline {answer.version}) already serves here"


def missing_topic(name: str, there: Collection[str]) -> str:
    """Return the sentence for a topic that is not among `there`. It names the nearest topics, or the first ones."""
    if name.startswith(INTERNAL_PREFIX):
        return f"{NotFound.code}: there is no topic {name!r}. Brokers make ~schedules with the first schedule."
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
    new = "'timeline topic create' makes one." if fits_new_topic(name) else "None can be made under this name."
    return f"{NotFound.code}: there is no topic {name!r}. {hint} {new}"


async def check_topic(tl: timeline.Timeline, name: str) -> Topic:
    """Return the record of topic `name`. Raises Failed, which names the nearest, when there is none; Invalid for a bad
    name."""
    check_topic_name(name)
    there = {each.name: each for each in await tl.topics(internal=name.startswith(INTERNAL_PREFIX))}
    if name not in there:
        raise Failed(REFUSED, missing_topic(name, there))
    return there[name]


async def check_receipts(tl: timeline.Timeline, name: str, receipts: Collection[timeline.Receipt]) -> None:
    """Raise Failed when no message was found because the topic does not exist: one sentence, not one per id."""
    if receipts and all(receipt.status is Status.NOT_FOUND for receipt in receipts):
        await check_topic(tl, name)


async def _explain_missing(address: str, timeout: str, topic: str, error: NotFound) -> None:
    """Raise Failed when `error` is about a missing topic. Return when it is not, or no broker can tell."""
    try:
        async with connected(address, timeout) as tl:
            await check_topic(tl, topic)
    except Failed as missing:
        raise missing from error
    except TimelineError:
        return  # `error` is all that is known
