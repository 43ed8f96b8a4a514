"""`timeline serve`: one broker in this process until SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from typing import Any

import click

import timeline
from timeline import config
from timeline.cli.app import REFUSED, Failed, package_version
from timeline.cli.values import shown_bytes
from timeline.errors import TimelineError
from timeline.storage_plugins import shown
from timeline.wording import shown_duration

PLAIN = config.ServeConfig()


def setting(option: str, takes: str, does: str, default: object) -> Callable[[Any], Any]:
    """An option of serve, with its default in brackets."""
    return click.option(option, metavar=takes, help=f"{does}  [{default}]")


@click.command()
@setting("--listen", "HOST:PORT", "Where drivers connect; port 0 takes a free one.", PLAIN.listen)
@setting("--advertise", "HOST:PORT", "The address under which others reach it.", "from --listen")
@setting("--name", "TEXT", "Its name in logs, metrics and the cluster.", "host-pid")
@setting("--store", "URL", "Where messages live.", PLAIN.store)
@setting("--sync", "URL", "How brokers find each other.", PLAIN.sync)
@setting("--metrics", "HOST:PORT|off", "/metrics, /healthz and /readyz.", PLAIN.metrics)
@setting("--grace", "DURATION", "How long the drain on SIGTERM may take.", shown_duration(PLAIN.grace_ms))
@setting("--log-level", "|".join(config.LOG_LEVELS), "What is worth a line.", PLAIN.log_level)
@setting("--log-format", "|".join(config.LOG_FORMATS), "Lines for people or machines.", PLAIN.log_format)
@setting("--max-inflight-bytes", "SIZE", "Puts waiting for the store.", shown_bytes(PLAIN.max_inflight_bytes))
@setting("--max-outbox-bytes", "SIZE", "Deliveries waiting for consumers.", shown_bytes(PLAIN.max_outbox_bytes))
@setting("--max-streams", "COUNT", "Streams of producers and consumers at once.", PLAIN.max_streams)
@setting("--max-streams-per-peer", "COUNT", "The same from one host.", PLAIN.max_streams_per_peer)
@setting("--max-scans", "COUNT", "Scans under way at once.", PLAIN.max_scans)
@setting("--metrics-topics", "COUNT", "Topics that metrics name; the rest are summed.", PLAIN.metrics_topics)
@click.option("--config", "file", envvar="TIMELINE_CONFIG", metavar="FILE", help="Settings as TOML; TIMELINE_CONFIG.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one JSON object.")
def serve(file: str | None, as_json: bool, **flags: str | None) -> int:
    """Run a broker until SIGTERM, then drain it and end.

    Every option is a TIMELINE_* variable too (TIMELINE_STORE) and a key of the configuration file; options beat
    variables beat the file. Standard output gets the addresses once the port is open, logs go to standard error.
    Ctrl-C drains too.

    \b
    Example:
      timeline serve --store sqlite:////var/lib/timeline/timeline.db --listen 0.0.0.0:9000
    """
    settings = config.load(flags, file=file)
    try:
        from timeline.broker.service import serve as run_broker
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("timeline"):
            raise
        raise Failed(
            REFUSED, f"serving needs {missing.name}, which is not installed: pip install 'timeline[server]'"
        ) from missing

    def announce(listen: str, metrics: str) -> None:
        if as_json:
            click.echo(json.dumps({"listen": listen, "metrics": metrics, "store": shown(settings.store)}))
        else:
            measured = "without metrics" if metrics == "off" else f"metrics on {metrics}"
            click.echo(f"timeline {package_version()} serves {shown(settings.store)} on {listen}, {measured}")

    try:
        asyncio.run(run_broker(settings, package_version(), announce))
    except OSError as refused:
        if refused.filename not in (settings.listen, settings.metrics):
            raise
        raise Failed(REFUSED, asyncio.run(_cannot_listen(refused, settings))) from refused
    return 0


async def _cannot_listen(refused: OSError, settings: config.ServeConfig) -> str:
    """Why an address cannot be had, who has it, and what to do."""
    address = str(refused.filename)
    of_metrics = address == settings.metrics != settings.listen
    option = "--metrics HOST:PORT, or --metrics off" if of_metrics else "--listen HOST:PORT"
    if refused.errno != errno.EADDRINUSE:
        why = (refused.strerror or "it cannot be had").lower()
        if refused.errno == errno.EADDRNOTAVAIL:
            why = "that is no address of this machine (0.0.0.0 is all it has)"
        return f"cannot {'serve metrics' if of_metrics else 'listen'} on {address}: {why}. Choose another: {option}."
    if of_metrics:
        who = "another broker of this machine may have it"
    else:
        who = (
            await _who_serves(address)
            or f"another program has it ('ss -ltnp' or 'lsof -i :{_port(address)}' says which)"
        )
    return f"{address} is taken: {who}. Stop that one, or give this one another: {option}."


def _port(address: str) -> int:
    return config.split_address(address)[1]


async def _who_serves(address: str) -> str:
    """Which broker answers at a taken address, in words; empty when none does."""
    host, port = config.split_address(address)
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        async with timeline.connect(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", timeout="1s") as tl:
            answer = await tl.ping()
    except TimelineError:
        return ""
    return f"the broker {answer.broker} (timeline {answer.version}) serves there already"
