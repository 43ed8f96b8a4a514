"""`timeline serve`: one broker in this process until SIGTERM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import click

from timeline import config
from timeline.cli.app import REFUSED, Failed, complain, needing
from timeline.cli.options import Url, shown_bytes
from timeline.wording import typed_name, typed_value


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each setting of serve, with its default."""
    for each in reversed(dataclasses.fields(config.ServeConfig)):
        name, said = typed_name(each.name), each.metadata
        flag = f"--{name.replace('_', '-')}"
        if isinstance(each.default, bool):
            function = click.option(flag, is_flag=True, default=None, help=said["does"])(function)
            continue
        default = said["shown"] or (
            shown_bytes(each.default) if said["takes"] == config.SIZE else typed_value(each.name, each.default)
        )
        kind = (
            Url(f", or set TIMELINE_{name.upper()}, or {name} in a --config file") if "@FILE" in said["takes"] else None
        )
        does = f"{said['does'].removesuffix('.')}. Default: {default}."
        function = click.option(flag, type=kind, metavar=said["takes"], help=does)(function)
    return function


@click.command()
@setting_options
@click.option(
    "--config",
    "file",
    envvar="TIMELINE_CONFIG",
    metavar="FILE",
    help="Settings file, in TOML. Variable: TIMELINE_CONFIG.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one JSON object.")
@click.option("--worker", "as_worker", is_flag=True, hidden=True)
def serve(file: str | None, as_json: bool, as_worker: bool, **flags: str | None) -> int:
    """Run a broker until SIGTERM, then drain it and end.

    Every option is also a variable (TIMELINE_STORE) and a key of the settings file. Options override variables, and
    variables override the file. Others can read a password on the command line: give it elsewhere, or as @FILE.

    Once the store is open, standard output gets the addresses. Logs go to standard error. Ctrl-C drains, too.

    \b
    Example:
      timeline serve --store sqlite:////var/lib/timeline/timeline.db
      timeline serve --listen 0.0.0.0:9000 --tokens tokens.json \\
        --tls-cert broker.pem --tls-key broker.key
    """
    settings = config.ServeConfig() if as_worker else config.load(flags, file=file)
    if exposed := exposure(settings):
        raise Failed(REFUSED, exposed)
    for doubt in [] if as_worker else doubts(settings):
        complain(doubt)
    with needing("server", "serving needs"):
        from timeline.cli.run.serving import run_alone, run_worker, run_workers
    if as_worker:
        return run_worker()
    return run_alone(settings, as_json) if settings.workers == 1 else run_workers(settings, as_json)


def doubts(settings: config.ServeConfig) -> list[str]:
    """Return warnings about settings that each are allowed, and do not fit together."""
    return [said for said in (stranded(settings), tokenless(settings)) if said]


def stranded(settings: config.ServeConfig) -> str:
    """Return why others cannot reach this broker at its advertised address. Empty when they can."""
    host, port = config.split_address(settings.listen)
    if not settings.advertise or not config.is_loopback(host):
        return ""
    advertised, _ = config.split_address(settings.advertise)
    if config.is_loopback(advertised):
        return ""
    return (
        f"other machines are told to come to {settings.advertise}, and cannot reach {settings.listen}. Listen on all "
        f"addresses with --listen 0.0.0.0:{port}, unless a proxy on this machine forwards to it"
    )


def tokenless(settings: config.ServeConfig) -> str:
    """Return why other brokers will refuse this one's calls. Empty when they will not."""
    if not settings.tokens or settings.token_file or settings.sync.startswith("local:"):
        return ""
    return (
        "other brokers refuse the calls of this one, because it has no token: some messages will be seconds late. "
        "Create one with 'timeline token create --right broker', and give it as --token-file FILE"
    )


def exposure(settings: config.ServeConfig) -> str:
    """Return why everybody could use this broker, and the remedy. Empty when nobody can, or --insecure allows it."""
    listens = [address for address in (settings.listen, settings.http) if address not in ("", "off")]
    exposed = [address for address in listens if not config.is_loopback(config.split_address(address)[0])]
    missing = []
    if not settings.tls_cert:
        missing.append("TLS (--tls-cert, --tls-key)")
    if not settings.tokens and not settings.client_ca:
        missing.append("asking who calls (--tokens, or --client-ca)")
    if settings.insecure or not exposed or not missing:
        return ""
    return (
        f"other machines reach {exposed[0]}, and there is no {' and no '.join(missing)}. Give what is missing, "
        "listen on 127.0.0.1, or say --insecure where the network itself keeps strangers out."
    )
