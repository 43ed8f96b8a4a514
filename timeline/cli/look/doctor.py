"""`timeline doctor`: check versions, settings, brokers, clocks, store, ports and topics, and say how to fix them."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

import timeline
from timeline import __version__, config
from timeline.broker.server.gateway_process import missing_package
from timeline.broker.server.process import check_free
from timeline.cli.app import DONE, SOME_FAILED
from timeline.cli.options import (
    PROBE_S,
    ClientOptions,
    client_command,
    connected,
    credentials,
    no_answer,
    who_serves,
)
from timeline.cli.output import console, picked, print_folded, print_json
from timeline.cli.run.serve import doubts
from timeline.clock import CRITICAL_MS, WARN_MS, Clock
from timeline.driver.brokers import BrokerStanding, Standings
from timeline.driver.queries import PingAnswer
from timeline.driver.transport.channel import named_trouble
from timeline.errors import STAYS, Forbidden, Invalid, TimelineError
from timeline.model import PULL_PREFIX, TopicSettings
from timeline.storage_plugins import make_store, shown
from timeline.storage_plugins.contract import StoreError
from timeline.watcher import added_up
from timeline.wire import Health
from timeline.wire.transport import Fault
from timeline.wording import install_command, shown_lateness

STORE_SLOW_MS = 50.0
DISK_LOW_BYTES = 1024**3
DURABLE = "'timeline serve --store sqlite:///timeline.db' keeps them"
NEEDED = ("grpcio", "numpy")
TO_SERVE = ("prometheus-client", "grpcio-health-checking")
_MENDED = {
    "TLS": "give --tls, or --tls-ca FILE with the authority that signed the broker's certificate",
    "NOT_TLS": "leave --tls, --tls-ca and --tls-cert (or their variables) out",
    "WRONG_NAME": "ask by a name that is in it: --address HOST:PORT",
    "UNKNOWN_AUTHORITY": "--tls-ca FILE names who signed it",
    "UNTRUSTED": "have the broker's certificate renewed, and look at this machine's clock",
    "WANTS_CERTIFICATE": "give one: --tls-cert FILE and --tls-key FILE",
    "CERTIFICATE_REFUSED": "give one that the broker's --client-ca has signed: --tls-cert and --tls-key",
}
"""The advice, by the finding at the broker's address."""
UNWELL = {
    Health.SILENT: ("was not heard of lately", "its process or its network hangs: it gets nothing until it is heard"),
    Health.STALLED: ("does not take what is pushed", "its process is too busy to read: give it less credit"),
    Health.SET_ASIDE: (
        "let its leases run out one after another and is suspended for a while",
        "its handler hangs, or the lease is too short for it",
    ),
}
"""The trouble of a consumer, and its remedy."""


class Severity(IntEnum):
    """How good something is: the command fails for BAD alone."""

    GOOD = 0
    WARNING = 1
    BAD = 2


GOOD, WARNING, BAD = Severity


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice`: what to do, or empty. `nobody`: no broker is there."""

    about: str
    severity: Severity
    found: str
    advice: str = ""
    nobody: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the finding for machines."""
        return picked(self, "about", "verdict=severity", "found", "advice")


_SIGNS = {GOOD: ("✓", "green"), WARNING: ("!", "bold yellow"), BAD: ("✗", "bold red")}


@click.command()
@click.option(
    "--config",
    "file",
    envvar="TIMELINE_CONFIG",
    metavar="FILE",
    help="Settings file of serve. Variable: TIMELINE_CONFIG.",
)
@client_command
def doctor(options: ClientOptions, file: str | None) -> int:
    """Check versions, configuration, broker, clock, store, ports, topics and consumers, and say what to do.

    A broker that answers at --address is asked for its status. The ports that 'timeline serve' would use here are
    tried, too, and its store if nothing listens at --address. Exit code 1 when something is wrong; a warning alone is
    no error.

    A port that a Timeline broker has is named as such: a warning if none answers at --address. A port that another
    program has is wrong. Only a default port is then a warning, if a broker answers: this machine may serve nothing.

    \b
    Example:
      timeline doctor
      timeline doctor --address broker-1:9000 --json
    """
    source = click.get_current_context().get_parameter_source("address")

    async def work(tl: timeline.Timeline) -> int:
        worst = GOOD
        _tell(_asked(options.address, source), options.as_json)
        # Closed here even when nobody reads the output any more (`| head`), since it holds a client.
        async with aclosing(_look(tl, options, file)) as looking:
            async for findings in looking:
                for finding in findings:
                    worst = max(worst, finding.severity)
                    _tell(finding, options.as_json)
        return SOME_FAILED if worst == BAD else DONE

    return options.run(work)


def _asked(address: str, source: ParameterSource | None) -> Finding:
    """Return where a broker is looked for, and which setting says so."""
    said = {ParameterSource.COMMANDLINE: "as --address says", ParameterSource.ENVIRONMENT: "as TIMELINE_ADDRESS says"}
    by_default = "the default. --address HOST:PORT or TIMELINE_ADDRESS sets another"
    who = said.get(source, by_default) if source is not None else by_default
    return Finding("address", GOOD, f"looking for a broker at {address}, {who}")


def _tell(finding: Finding, as_json: bool) -> None:
    if as_json:
        print_json(finding.as_json())
        return
    sign, style = _SIGNS[finding.severity]
    print_folded(console(), f"{sign} {finding.about:<15}{finding.found}", 17, mark=style)
    if finding.advice:
        print_folded(console(), f"    → {finding.advice}", 6, "cyan")


async def _look(tl: timeline.Timeline, options: ClientOptions, file: str | None) -> AsyncGenerator[list[Finding], None]:
    """Yield findings: what is here, then what a broker says, or what a broker would need if none answers."""
    yield [_versions()]
    settings = None
    try:
        settings = config.load({}, file=file)
    except Invalid as bad:
        yield [Finding("configuration", BAD, bad.reason, "fix it: 'timeline serve' refuses it with these words")]
    else:
        yield [Finding("configuration", GOOD, _shown(settings, file))]
        yield [Finding("configuration", WARNING, doubt) for doubt in doubts(settings)]
    try:
        standings = await tl.standing()
    except TimelineError as trouble:
        found = await _no_broker(options.address, trouble)
        yield [found]
        if settings is not None and found.nobody:
            yield await of_ports(settings, answered=False)
            yield await of_store(settings.store)
        return
    for one in standings.brokers:
        try:
            yield of_broker(one, await _ping(one.address, options.timeout))
        except TimelineError as trouble:
            yield [await _no_broker(one.address, trouble)]  # it has gone since it sent its status
    for gone, reason in standings.unreachable.items():
        silent = TimelineError(reason)
        silent.found = standings.found.get(gone, ())
        yield [await _no_broker(gone, silent)]
    yield of_topics(standings, {each.name: each.settings for each in await _topics(tl)})
    if settings is not None:
        yield await of_ports(settings, answered=True)


async def _ping(address: str, timeout: str) -> PingAnswer:
    """Measure the round trip to this broker."""
    async with connected(address, timeout) as tl:
        return await tl.ping()


async def _topics(tl: timeline.Timeline) -> list[timeline.Topic]:
    """Return the topics. None when the broker cannot list them, which is a finding of its own."""
    try:
        return await tl.topics()
    except TimelineError:
        return []


def _versions() -> Finding:
    """Check this package and those that it needs."""
    missing = [name for name in TO_SERVE if not _installed(name)]
    said = ", ".join(f"{name} {_installed(name)}" for name in NEEDED)
    serves = "" if not missing else f"; cannot serve here without {' and '.join(missing)}"
    advice = f"{install_command('server')}, if this machine is to serve" if missing else ""
    found = f"{timeline.__version__} on Python {platform.python_version()}, {said}{serves}"
    return Finding("timeline", WARNING if missing else GOOD, found, advice)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _shown(settings: config.ServeConfig, file: str | None) -> str:
    place = f"{file}: " if file else ""
    return (
        f"{place}'timeline serve' without options would listen on {settings.listen}, "
        f"metrics {settings.metrics}, store {shown(settings.store)}"
    )


async def _no_broker(address: str, trouble: TimelineError) -> Finding:
    if (unreached := await no_answer(address, trouble)) is not None:
        return Finding("broker", BAD, unreached.found, unreached.advice, nobody=unreached.nobody)
    said = named_trouble(address, trouble.reason.removesuffix(f"; {STAYS}"))
    return Finding("broker", BAD, said, _mends(trouble))


def _mends(trouble: TimelineError) -> str:
    """Return what to do about a broker that is there and cannot be asked."""
    if isinstance(trouble, Forbidden):
        said = credentials()
        if Fault.UNAUTHENTICATED in trouble.found and not (said.token or said.token_file):
            return "give one: --token-file FILE, or TIMELINE_TOKEN; 'timeline token create' makes one"
        return "--token-file FILE, or TIMELINE_TOKEN, gives another token: 'timeline token create' makes one"
    known = next((_MENDED[found] for found in trouble.found if found in _MENDED), "")
    return known or "is it a Timeline broker of this version? metrics are on a port of their own"


def of_broker(one: BrokerStanding, ping: PingAnswer) -> list[Finding]:
    """Check a broker that answered: its readiness, version, clock and store."""
    up = shown_lateness(max(0, one.now_ms - one.started_ms))
    who = f"{one.broker} at {one.address}, timeline {one.version}, up {up}, {ping.round_trip_ms:.1f} ms away"
    if one.trouble:
        found = [
            Finding("broker", BAD, f"{who}: not ready: {one.trouble}", "it tries again by itself; its log says more")
        ]
    elif one.version != __version__:
        found = [Finding("broker", WARNING, f"{who}; this is {__version__}", "bring both to one version when you can")]
    else:
        found = [Finding("broker", GOOD, who)]
    return [*found, _clock(ping), *_store_of(one)]


def _clock(ping: PingAnswer) -> Finding:
    offset_ms, error_ms = ping.offset_ms, ping.error_ms
    ahead = "ahead of" if offset_ms >= 0 else "behind"
    off, about = shown_lateness(abs(offset_ms)), shown_lateness(error_ms)
    said = f"the broker's is {off} {ahead} this machine's, give or take {about}"
    sure_ms = abs(offset_ms) - error_ms
    if sure_ms < WARN_MS:
        return Finding("clock", GOOD, said)
    verdict = BAD if sure_ms >= CRITICAL_MS else WARNING
    return Finding("clock", verdict, said, "set both clocks by chrony or ntpd: due times are read on the broker's")


def _store_of(one: BrokerStanding) -> list[Finding]:
    """Check a broker's store: its speed, and a finding for each warning. A warning alone is enough when the store is
    not used, or works well."""
    weak = [Finding("store", WARNING, f"{one.store}: {warning}") for warning in one.warnings]
    asked = _store_at_work(one)
    return weak if weak and (one.trouble or asked.severity is GOOD) else [asked, *weak]


def _store_at_work(one: BrokerStanding) -> Finding:
    if one.trouble:
        return Finding("store", WARNING, f"{one.store or 'the store'}: not asked, the broker is not ready")
    took = f", leases' p99 {shown_lateness(one.store_ms)}" if one.store_ms else ""
    if one.store_ms > STORE_SLOW_MS:
        advice = (
            "leases that take longer than lease_ahead make messages late: look at the disk or database "
            "(timeline_store_call_seconds in /metrics)"
        )
        return Finding("store", WARNING, f"{one.store}{took}", advice)
    if one.store.startswith("memory://"):
        return Finding("store", WARNING, f"{one.store}{took}: messages end with the broker", DURABLE)
    return Finding("store", GOOD, f"{one.store}{took}")


async def of_ports(settings: config.ServeConfig, answered: bool) -> list[Finding]:
    """Check whether the ports that serve would use here are free, or which broker has them. `answered`: a broker has
    answered, so that one here is no surprise, and a default port need not be meant. Without the default port of HTTP,
    serve starts all the same."""
    found, who = [], ""
    http_by_default = not settings.http and settings.listen == config.ServeConfig().listen and not missing_package()
    for option in ("listen", "metrics", "http"):
        unasked = option == "http" and http_by_default
        address = config.HTTP if unasked else getattr(settings, option)
        if address in ("", "off"):
            continue
        about, another = f"{address} for --{option}", f"choose another: --{option} HOST:PORT"
        try:
            check_free(address)
        except OSError as taken:
            if option == "listen":
                ours = who = await who_serves(address)
            else:
                ours = "a Timeline broker already serves this here" if who and await _serves_metrics(address) else ""
            if ours:
                verdict, advice = (GOOD, "") if answered else (WARNING, another)
                found.append(Finding("port", verdict, f"{about}: {ours}", advice))
                continue
            default = address == getattr(config.ServeConfig(), option)
            why = (taken.strerror or str(taken)).lower()
            verdict = WARNING if unasked or (answered and default) else BAD
            found.append(Finding("port", verdict, f"{about} cannot be had: {why}", another))
        else:
            found.append(Finding("port", GOOD, f"{about} is free"))
    return found


async def _serves_metrics(listen: str) -> bool:
    """Return whether a broker or a gateway has its metrics at the address, with TLS or without."""
    host, port = config.split_address(config.local_address(listen))
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    request = f"GET /metrics HTTP/1.1\r\nHost: {config.joined(host, port)}\r\nConnection: close\r\n\r\n"
    for tls in (None, unverified):
        with suppress(OSError, EOFError, asyncio.LimitOverrunError):
            async with asyncio.timeout(PROBE_S):
                reader, writer = await asyncio.open_connection(host, port, ssl=tls)
                try:
                    writer.write(request.encode())
                    await reader.readuntil(b"# HELP timeline_")
                    return True
                finally:
                    writer.close()
    return False


async def of_store(url: str) -> list[Finding]:
    """Check whether the store at `url` could be served. A missing file is not created."""
    name = shown(url)
    try:
        store = make_store(url)
        if not store.capabilities.durable:
            return [Finding("store", WARNING, f"{name}: messages end with the broker", DURABLE)]
        file = store.file
        if file is not None and not file.exists():
            return [_folder(name, file)]
        clock = Clock()
        begun_ms = clock.monotonic_ms()
        try:
            opened = await store.open()
            await store.check()
        finally:
            await store.close()
        took_ms = clock.monotonic_ms() - begun_ms
    except StoreError as refused:
        return [Finding("store", BAD, f"{name}: {refused.reason}", "'timeline serve' would meet the same")]
    found = [Finding("store", GOOD, f"{name}: {opened.server}, opened and checked in {shown_lateness(took_ms)}")]
    found += [Finding("store", WARNING, f"{name}: {warning}") for warning in opened.warnings]
    return [*found, *([] if file is None else _room(file))]


def _folder(name: str, file: Path) -> Finding:
    folder = file.absolute().parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return Finding("store", GOOD, f"{name} is not there yet; serve will make it")
    why = "is not there" if not folder.is_dir() else "cannot be written by this user"
    return Finding("store", BAD, f"{name}: the folder {folder} {why}", f"mkdir -p {folder}, owned by who runs serve")


def _room(file: Path) -> list[Finding]:
    left = shutil.disk_usage(file.absolute().parent).free
    if left >= DISK_LOW_BYTES:
        return []
    found = f"{left // 1024**2:,} MiB left where {file.name} is"
    return [Finding("disk", WARNING, found, "make room: a full disk stops puts; nothing that was answered is lost")]


def of_topics(standings: Standings, settings: Mapping[str, TopicSettings]) -> list[Finding]:
    """Check what stops deliveries, topic by topic, and which consumers are not healthy."""
    found: list[Finding] = []
    loads = added_up(standings)
    connected = [consumer for one in standings.brokers for consumer in one.consumers]
    takes = Counter(consumer.topic for consumer in connected if consumer.id.startswith(PULL_PREFIX))
    for name, load in sorted(loads.items()):
        waiting = load.available
        if name in settings and settings[name].paused:
            advice = f"'timeline topic resume {name}' lets it deliver"
            found.append(Finding("topic", WARNING, f"{name} is paused, {waiting:,} due", advice))
        elif waiting and not load.consumers:
            advice = f"start one: 'timeline consume {name}' takes and prints them"
            found.append(Finding("consumers", WARNING, f"nobody consumes {name}, with {waiting:,} due", advice))
        elif waiting and not load.credit and takes[name] == load.consumers:
            advice = (
                "call take again sooner, wait longer in each call, or keep a consumer; see that webhooks are answered"
            )
            gone = f"no take of {name} waits now, and it has no other consumer, with {waiting:,} due"
            still = "a take that has ended still counts as a consumer for about a minute"
            found.append(Finding("consumers", WARNING, f"{gone}; {still}", advice))
        elif waiting and not load.credit:
            advice = "start more, give them more credit, or let handlers take less time; see that webhooks are answered"
            full = f"all consumers of {name} are full or ask for nothing, with {waiting:,} due"
            found.append(Finding("consumers", WARNING, full, advice))
    for consumer in connected:
        if consumer.health is not Health.HEALTHY:
            what, advice = UNWELL[consumer.health]
            found.append(Finding("consumers", WARNING, f"{consumer.id} of {consumer.topic} {what}", advice))
    due, consumers = (sum(getattr(load, name) for load in loads.values()) for name in ("available", "consumers"))
    summary = f"{_many(len(loads), 'topic')}, {_many(due, 'message')} due, {_many(consumers, 'consumer')}"
    return [Finding("topics", GOOD, summary), *found]


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
