"""`timeline topic …`: topics and their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click

import timeline
from timeline.cli.app import Suggesting, complain, say
from timeline.cli.options import (
    DURATION,
    ClientOptions,
    check_topic,
    client_command,
    shown_bytes,
    topic_names,
    yes_option,
)
from timeline.cli.output import confirm, picked, print_fields, print_json, print_table, time_cell
from timeline.config import parse_bytes
from timeline.driver.brokers import TopicLoad
from timeline.driver.queries import DURATIONS, PERCENTS, Counts
from timeline.driver.times import duration_ms, iso_or_none, shown_time
from timeline.errors import Invalid, Unavailable, Unknown, explain
from timeline.model import LEASE_AHEAD_AUTO, MAX_BUCKETS, MAX_PAYLOAD_BYTES, Topic, TopicSettings
from timeline.watcher import added_up
from timeline.wording import shown_duration, typed_name, typed_value

PLAIN = TopicSettings()
BROKERS_WAIT = "2s"
"""How long brokers may take to report their counts."""
STATES = ("WAITING", "AVAILABLE", "LEASED", "DEAD")
NO_LIMIT = {
    "max_deliveries": "no limit",
    "dead_retention_ms": "for ever",
    "remember_ms": "not at all",
    "max_rate_per_s": "no limit",
    "push_rate": "no limit",
    "redelivery_backoff_ms": "none, due again at once",
    "lease_ahead_ms": "off",
}
"""The meaning of 0, in words."""


@click.group(cls=Suggesting)
def topic() -> None:
    """Create, change and list topics.

    \b
    Example:
      timeline topic create departures --lease 30s
      timeline topic list
    """


def _shown_setting(name: str, value: Any) -> object:
    """Return a setting's value with its unit. A number has the form that `topic update` takes."""
    if value == 0 and name in NO_LIMIT:
        return NO_LIMIT[name]
    if name == "push_url":
        return value or "nowhere"
    if name == "lease_ahead_ms" and value == LEASE_AHEAD_AUTO:
        return "auto (as long as the store's leases take)"
    if name.endswith("_ms"):
        return shown_duration(value)
    if name.endswith("_bytes"):
        return shown_bytes(value)
    if name.endswith("_percent"):
        return typed_value(name, value)
    if name.endswith("_per_s") or name == "push_rate":
        return f"{value}/s"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value


SETTINGS = {
    "lease_ms": ("DURATION", "How long a consumer may have a message."),
    "max_lease_ms": ("DURATION", "How far a lease may be extended."),
    "max_payload_bytes": ("SIZE", f"Largest payload, up to {shown_bytes(MAX_PAYLOAD_BYTES)}."),
    "horizon_ms": ("DURATION", "How far ahead a due time may lie."),
    "max_deliveries": ("N", "Deliveries after which a message is buried; 0: never."),
    "redelivery_backoff_ms": ("DURATION", "Wait before redelivery when a lease ran out."),
    "dead_retention_ms": ("DURATION", "How long dead letters stay; 0s: for ever."),
    "remember_ms": ("DURATION", "How long settled ids are remembered; 0s: not at all."),
    "lease_ahead_ms": ("auto|DURATION", "How long before the due time a message may be leased; 0s: off."),
    "max_rate_per_s": ("N", "Most deliveries per second; 0: no limit."),
    "retry_first_ms": ("DURATION", "Wait after the first failure of a message."),
    "retry_factor_percent": ("FACTOR", "How much longer it waits after each further failure, 1 to 1000."),
    "retry_cap_ms": ("DURATION", "Longest wait after a failure."),
    "retry_jitter_percent": ("SHARE", "Share by which these waits vary, 0 to 1."),
    "push_url": ("URL", "Where the gateway sends each message by POST; '': nowhere."),
    "push_timeout_ms": ("DURATION", "How long the receiver may take to answer."),
    "push_concurrency": ("N", "Most requests to the receiver at a time."),
    "push_rate": ("N", "Most requests to the receiver per second; 0: no limit."),
}
"""The settings that can be changed later: what they take, and what they do."""


def settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each of `SETTINGS`."""
    for field, (takes, does) in reversed(SETTINGS.items()):
        option = f"--{typed_name(field).replace('_', '-')}"
        default = _shown_setting(field, getattr(PLAIN, field))
        kind = DURATION if takes.endswith("DURATION") else None
        function = click.option(option, type=kind, metavar=takes, help=f"{does} Default: {default}.")(function)
    return function


def parse_settings(given: dict[str, str | None]) -> dict[str, Any]:
    """Return the given options as `create_topic` and `update_topic` take them. Raises Invalid."""
    settings: dict[str, Any] = {}
    for name, text in given.items():
        if text is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if name == "lease_ahead" and text == "auto":
            settings[name] = text
        elif name in DURATIONS:
            settings[name] = duration_ms(text, option) / 1000
        elif name in PERCENTS:
            settings[name] = _decimal(option, text)
        elif name == "push_url":
            settings[name] = text
        elif name == "max_payload_bytes":
            settings[name] = parse_bytes(text)
        else:
            settings[name] = _whole(option, text)
    return settings


def _whole(option: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 30:
        negative = text[:1] == "-" and text[1:].isdigit()
        raise Invalid(f"{option} must {'not be negative' if negative else 'be a whole number'}, not {text!r:.40}")
    return int(text)


def _decimal(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Invalid(f"{option} must be a number, not {text!r:.40}") from None


@topic.command()
@click.argument("name")
@click.option(
    "--buckets", metavar="N", help=f"Parts that brokers share, 1 to {MAX_BUCKETS}; fixed. Default: {PLAIN.buckets}."
)
@settings_options
@client_command
async def create(tl: timeline.Timeline, options: ClientOptions, name: str, **given: str | None) -> None:
    """Create topic NAME. To repeat it with the same settings is no error.

    \b
    Example:
      timeline topic create departures --lease 30s --max-deliveries 5
    """
    settings = parse_settings(given)
    stood = {each.uid for each in await tl.topics()}
    made = await tl.create_topic(name, **settings)
    _told(made, options, "there already:" if made.uid in stood else "created")
    if made.settings.push_url:
        if made.uid not in stood:
            await _show_secret(tl, options, name)
        elif not options.as_json:
            say("The secret of its webhooks is not shown again.")
            say(f"'timeline topic secret {name} --rotate' makes a new one.")


count_option = click.option(
    "--count", "counting", is_flag=True, help="Count now, dead letters, too. Reads leased and dead messages."
)


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of a topic by state; None where a count is not known. `counted_ms`: when the brokers counted waiting and
    available ones; 0: just now, for this command."""

    waiting: int | None = None
    available: int | None = None
    leased: int | None = None
    dead: int | None = None
    exact: bool = False
    counted_ms: int = 0

    @classmethod
    def of_counts(cls, counts: Counts) -> Messages:
        """Return what was counted just now."""
        return cls(counts.waiting, counts.available, counts.leased, counts.dead, counts.exact)

    @classmethod
    def of_load(cls, load: TopicLoad | None) -> Messages:
        """Return what brokers know already: the store's last count, and what connected consumers have."""
        if load is None or not load.counted_ms:
            return cls(leased=None if load is None else load.in_flight)
        return cls(load.waiting, load.available, load.in_flight, counted_ms=load.counted_ms)

    def as_json(self) -> dict[str, Any]:
        """Return the counts for machines."""
        return picked(self, "waiting", "available", "leased", "dead", "exact", "counted")

    def cells(self) -> tuple[str, str, str, str]:
        """Return waiting, available, leased and dead for a table."""
        counts = (self.waiting, self.available, self.leased, self.dead)
        waiting, available, leased, dead = ("–" if count is None else f"{count:,}" for count in counts)
        return waiting, available, leased, dead


async def _messages(tl: timeline.Timeline, names: Sequence[str], counting: bool) -> list[Messages]:
    """Return how many messages each topic has: as brokers know, or counted now. Without an answer in time, the
    counts are not known."""
    if counting:
        return [Messages.of_counts(await tl.count(name)) for name in names]
    if not names:
        return []
    try:
        told = await tl.standing(names[0] if len(names) == 1 else "", consumers=1, timeout=BROKERS_WAIT)
    except (Unavailable, Unknown) as trouble:
        complain(f"the messages are not known: {explain(trouble)}")
        return [Messages()] * len(names)
    for gone in told.unreachable:
        complain(f"{gone} did not answer: what its consumers have is missing here")
    loads = added_up(told)
    return [Messages.of_load(loads.get(name)) for name in names]


@topic.command("list")
@count_option
@click.option("--all", "internal", is_flag=True, help="Also internal topics of the brokers, such as ~schedules.")
@client_command
async def list_(tl: timeline.Timeline, options: ClientOptions, counting: bool, internal: bool) -> None:
    """List all topics, with their messages as brokers counted them some seconds ago.

    \b
    Example:
      timeline topic list
      timeline topic list --count --json
    """
    topics = await tl.topics(internal=internal)
    messages = await _messages(tl, [each.name for each in topics], counting)
    if options.as_json:
        for each, counted in zip(topics, messages, strict=True):
            print_json(topic_json(each) | {"messages": counted.as_json()})
        return
    states = STATES if counting else STATES[:-1]
    rows = [
        (
            each.name,
            "paused" if each.settings.paused else "delivers",
            *counted.cells()[: len(states)],
            shown_duration(each.settings.lease_ms),
            each.settings.buckets,
            time_cell(each.created_ms),
        )
        for each, counted in zip(topics, messages, strict=True)
    ]
    empty = "there are no topics yet: 'timeline topic create NAME' makes one"
    columns = ("NAME", "STATE", *states, "LEASE", "BUCKETS", "CREATED")
    print_table(columns, rows, right=(*states, "BUCKETS"), empty=empty, spare=("CREATED", "BUCKETS", "LEASE"))


@topic.command()
@click.argument("name", shell_complete=topic_names)
@count_option
@client_command
async def show(tl: timeline.Timeline, options: ClientOptions, name: str, counting: bool) -> None:
    """Show topic NAME with its messages by state and its settings.

    Without --count: waiting and available messages as brokers counted them some seconds ago, and leased ones that
    connected consumers have.

    \b
    Example:
      timeline topic show departures
      timeline topic show departures --count
    """
    each = await check_topic(tl, name)
    (counted,) = await _messages(tl, [name], counting)
    if options.as_json:
        print_json(topic_json(each) | {"messages": counted.as_json()})
    else:
        print_fields({"name": each.name, **_counted(counted), **_settings(each)})


def _counted(counted: Messages) -> dict[str, object]:
    fields: dict[str, object] = dict(zip(map(str.lower, STATES), counted.cells(), strict=True))
    if counted.dead is None:
        fields["dead"] = "not counted: --count does"
    return fields


def _settings(each: Topic) -> dict[str, object]:
    fields: dict[str, object] = {}
    for field in dataclasses.fields(each.settings):
        value = getattr(each.settings, field.name)
        fields[typed_name(field.name)] = _shown_setting(field.name, value)
    return fields | {"revision": each.revision, "created": shown_time(each.created_ms), "uid": each.uid}


@topic.command()
@click.argument("name", shell_complete=topic_names)
@settings_options
@client_command
async def update(tl: timeline.Timeline, options: ClientOptions, name: str, **given: str | None) -> None:
    """Change settings of topic NAME while it delivers.

    \b
    Example:
      timeline topic update departures --lease 1m --max-rate-per-s 500
    """
    settings = parse_settings(given)
    if not settings:
        raise Invalid("give at least one setting to change, such as --lease 1m")
    before = await check_topic(tl, name) if settings.get("push_url") else None
    _told(await tl.update_topic(name, **settings), options, "updated")
    if before is not None and not before.settings.push_url:
        await _show_secret(tl, options, name)


@topic.command()
@click.argument("name", shell_complete=topic_names)
@click.option("--rotate", is_flag=True, help="Make a new secret. The former stays valid for a day.")
@client_command
async def secret(tl: timeline.Timeline, options: ClientOptions, name: str, rotate: bool) -> None:
    """Replace the secret with which the webhooks of topic NAME are signed, and show the new one once.

    For a day, each request has a signature by both. Rotate twice to end a leaked secret at once. It takes the right
    admin.

    \b
    Example:
      timeline topic secret departures --rotate
    """
    if not rotate:
        raise Invalid("a secret is shown once, when it is made: --rotate makes a new one")
    await _show_secret(tl, options, name, rotate=rotate)


async def _show_secret(tl: timeline.Timeline, options: ClientOptions, name: str, rotate: bool = False) -> None:
    """Print the newest secret of a topic's webhooks."""
    made = (await tl.topic_secrets(name, rotate=rotate))[0]
    if options.as_json:
        print_json({"name": name, "secret": made})
    else:
        say(f"secret of its webhooks: {made}")
        say("Store it where the receiver reads it. It is not shown again.")


@topic.command()
@click.argument("name", shell_complete=topic_names)
@client_command
async def pause(tl: timeline.Timeline, options: ClientOptions, name: str) -> None:
    """Stop deliveries of topic NAME; messages can still be produced.

    \b
    Example:
      timeline topic pause departures
    """
    _told(await tl.update_topic(name, paused=True), options, "paused")


@topic.command()
@click.argument("name", shell_complete=topic_names)
@client_command
async def resume(tl: timeline.Timeline, options: ClientOptions, name: str) -> None:
    """Deliver messages of topic NAME again.

    \b
    Example:
      timeline topic resume departures
    """
    _told(await tl.update_topic(name, paused=False), options, "resumed")


@topic.command()
@click.argument("name", shell_complete=topic_names)
@yes_option
@client_command
def drop(options: ClientOptions, name: str, yes: bool) -> int:
    """Remove topic NAME with all of its messages, for good. Its recurring schedules stay, and go on with a new topic of
    this name: delete them first.

    \b
    Example:
      timeline topic drop departures --yes
    """

    async def look(tl: timeline.Timeline) -> None:
        await check_topic(tl, name)

    if not yes:
        options.run(look)
        confirm(f"Remove topic {name} and all of its messages?")
    code = options.run(lambda tl: tl.drop_topic(name))
    if options.as_json:
        print_json({"name": name, "dropped": True})
    else:
        say(f"dropped {name}")
    return code


def topic_json(each: Topic) -> dict[str, Any]:
    """Return a topic for machines. Durations are in milliseconds, as their names say. The uid is text, since JavaScript
    rounds 64-bit numbers."""
    return {
        "name": each.name,
        **dataclasses.asdict(each.settings),
        "revision": each.revision,
        "created": iso_or_none(each.created_ms),
        "uid": str(each.uid),
    }


def _told(each: Topic, options: ClientOptions, done: str) -> None:
    if options.as_json:
        print_json(topic_json(each))
    else:
        say(f"{done} {each.name}")
