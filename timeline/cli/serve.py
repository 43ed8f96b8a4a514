"""`timeline serve`: one broker in this process until SIGTERM."""

from __future__ import annotations

import asyncio
import errno
import json

import click

import timeline
from timeline import config
from timeline.cli.app import REFUSED, Failed, package_version
from timeline.errors import TimelineError
from timeline.storage_plugins import shown


@click.command()
@click.option("--listen", metavar="HOST:PORT", help="Where drivers connect; port 0 takes a free one.  [127.0.0.1:9000]")
@click.option("--advertise", metavar="HOST:PORT", help="The address under which others reach it.  [from --listen]")
@click.option("--name", help="Its name in logs, metrics and the cluster.  [host-pid]")
@click.option("--store", metavar="URL", help="Where messages live.  [sqlite:///timeline.db]")
@click.option("--sync", metavar="URL", help="How brokers find each other.  [local://]")
@click.option("--metrics", metavar="HOST:PORT|off", help="/metrics, /healthz and /readyz.  [127.0.0.1:9001]")
@click.option("--grace", metavar="DURATION", help="How long the drain on SIGTERM may take.  [30s]")
@click.option("--log-level", metavar="|".join(config.LOG_LEVELS), help="[info]")
@click.option("--log-format", metavar="|".join(config.LOG_FORMATS), help="[text]")
@click.option("--max-inflight-bytes", metavar="SIZE", help="Puts waiting for the store.  [64MiB]")
@click.option("--max-outbox-bytes", metavar="SIZE", help="Deliveries waiting for consumers.  [128MiB]")
@click.option("--max-streams", metavar="COUNT", help="Streams of producers and consumers at once.  [10000]")
@click.option("--max-streams-per-peer", metavar="COUNT", help="The same from one host.  [5000]")
@click.option("--max-scans", metavar="COUNT", help="Scans under way at once.  [64]")
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
