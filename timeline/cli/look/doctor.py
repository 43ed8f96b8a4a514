"""`timeline doctor`: is everything as it should be, and what to do where it is not."""

from __future__ import annotations

import platform
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.metadata import PackageNotFoundError, version

import click
from click.core import ParameterSource
from rich.text import Text

import timeline
from timeline import config
from timeline.cli.app import DONE, SOME_FAILED
from timeline.cli.look.findings import BAD, GOOD, WARNING, Finding, of_broker, of_ports, of_store, of_topics
from timeline.cli.options.client_options import (
    START_ONE,
    ClientOptions,
    client_command,
    connected,
    credentials,
    nobody_found,
)
from timeline.cli.run.serve import stranded
from timeline.cli.terminal.output import console, print_json
from timeline.driver.queries import PingAnswer
from timeline.errors import STAYS, Forbidden, Invalid, TimelineError
from timeline.wire.transport import Fault
from timeline.wording import install_command

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
"""By what was found at the broker's address, what mends it here."""
_SIGNS = {GOOD: ("✓", "green"), WARNING: ("!", "bold yellow"), BAD: ("✗", "bold red")}


@click.command()
@click.option("--config", "file", envvar="TIMELINE_CONFIG", metavar="FILE", help="serve's settings; TIMELINE_CONFIG.")
@client_command
def doctor(options: ClientOptions, file: str | None) -> int:
    """Check versions, configuration, broker, clock, store, ports, topics and consumers; say what to do.

    A broker that answers at --address is asked how it stands. Where none does, the store that 'timeline serve' would
    take here is opened as serve would, and closed, and its ports are tried.
    Exit code 1 when something is wrong; a warning alone is no error.

    \b
    Example:
      timeline doctor
      timeline doctor --address broker-1:9000 --json
    """
    source = click.get_current_context().get_parameter_source("address")

    async def work(tl: timeline.Timeline) -> int:
        worst = GOOD
        _tell(_asked(options.address, source), options.as_json)
        # It holds a client, which is to be closed here even when nobody reads on (`| head`).
        async with aclosing(_look(tl, options, file)) as findings:
            async for finding in findings:
                worst = max(worst, finding.severity)
                _tell(finding, options.as_json)
        return SOME_FAILED if worst == BAD else DONE

    return options.run(work)


def _asked(address: str, source: ParameterSource | None) -> Finding:
    """Where a broker is looked for, and who said so."""
    said = {ParameterSource.COMMANDLINE: "as --address says", ParameterSource.ENVIRONMENT: "as TIMELINE_ADDRESS says"}
    by_default = "which is the default; --address HOST:PORT or TIMELINE_ADDRESS say another"
    who = said.get(source, by_default) if source is not None else by_default
    return Finding("address", GOOD, f"looking for a broker at {address}, {who}")


def _tell(finding: Finding, as_json: bool) -> None:
    if as_json:
        print_json(finding.as_json())
        return
    sign, style = _SIGNS[finding.severity]
    line = Text.assemble((sign, style), f" {finding.about:<15}", finding.found)
    console().print(line, soft_wrap=True)
    if finding.advice:
        console().print(Text(f"    → {finding.advice}", "cyan"), soft_wrap=True)


async def _look(tl: timeline.Timeline, options: ClientOptions, file: str | None) -> AsyncGenerator[Finding, None]:
    """One thing after the other: what is here, then what a broker says, or where none does, what one would need."""
    yield _versions()
    settings = None
    try:
        settings = config.load({}, file=file)
    except Invalid as bad:
        yield Finding("configuration", BAD, bad.reason, "mend it: 'timeline serve' refuses it with these words")
    else:
        yield Finding("configuration", GOOD, _shown(settings, file))
        if cut_off := stranded(settings):
            yield Finding("configuration", WARNING, cut_off)
    try:
        standings = await tl.standing()
    except TimelineError as trouble:
        found = await _no_broker(options.address, trouble)
        nobody = found.nobody
        yield found
    else:
        for one in standings.brokers:
            try:
                ping = await _ping(one.address, options.timeout)
            except TimelineError as trouble:
                yield await _no_broker(one.address, trouble)  # it has gone since it said how it stands
                continue
            for finding in of_broker(one, ping):
                yield finding
        for gone, reason in standings.unreachable.items():
            silent = TimelineError(reason)
            silent.found = standings.found.get(gone, ())
            yield await _no_broker(gone, silent)
        for finding in of_topics(standings, {each.name: each.settings for each in await _topics(tl)}):
            yield finding
        # Ports are of interest to whoever might start a broker here; beside one that answers, with --config.
        for finding in [] if settings is None or file is None else await of_ports(settings, answered=True):
            yield finding
        return
    if settings is not None:
        for finding in [*(await of_ports(settings, answered=False) if nobody else []), *await of_store(settings.store)]:
            yield finding


async def _ping(address: str, timeout: str) -> PingAnswer:
    """The round trip to this very broker."""
    async with connected(address, timeout) as tl:
        return await tl.ping()


async def _topics(tl: timeline.Timeline) -> list[timeline.Topic]:
    """The topics; none when the broker cannot say, which its own finding tells."""
    try:
        return await tl.topics()
    except TimelineError:
        return []


def _versions() -> Finding:
    """This package and what it stands on."""
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
    from timeline.storage_plugins import shown

    place = f"{file}: " if file else ""
    return (
        f"{place}'timeline serve' without options would listen on {settings.listen}, "
        f"metrics {settings.metrics}, store {shown(settings.store)}"
    )


async def _no_broker(address: str, trouble: TimelineError) -> Finding:
    if nobody := await nobody_found(address):
        return Finding("broker", BAD, nobody, START_ONE, nobody=True)
    said = trouble.reason.removeprefix(f"{address}: ").removesuffix(f"; {STAYS}")
    found = f"{address} takes connections, but answers no question: {said}"
    return Finding("broker", BAD, found, _mends(trouble))


def _mends(trouble: TimelineError) -> str:
    """What to do about a broker that is there and cannot be asked."""
    if isinstance(trouble, Forbidden):
        said = credentials()
        if Fault.UNAUTHENTICATED in trouble.found and not (said.token or said.token_file):
            return "give one: --token-file FILE, or TIMELINE_TOKEN; 'timeline token create' makes one"
        return "--token-file FILE, or TIMELINE_TOKEN, gives another token: 'timeline token create' makes one"
    known = next((_MENDED[found] for found in trouble.found if found in _MENDED), "")
    return known or "is it a Timeline broker of this version? metrics are on a port of their own"
