"""`timeline serve`: one broker in this process until SIGTERM."""

from __future__ import annotations

import asyncio
import json

import click

from timeline import config
from timeline.cli.app import REFUSED, SOME_FAILED, Failed, package_version


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
@click.option("--config", "file", envvar="TIMELINE_CONFIG", metavar="FILE", help="Settings as TOML; TIMELINE_CONFIG.")
@click.option("--json", "as_json", is_flag=True, help="Print the addresses as one JSON object.")
def serve(file: str | None, as_json: bool, **flags: str | None) -> int:
    """Run a broker until SIGTERM, then drain it and end.

    Every option is a TIMELINE_* variable too (TIMELINE_STORE) and a key of the configuration file; options beat
    variables beat the file. Standard output gets the addresses once the port is open, logs go to standard error.

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
            click.echo(json.dumps({"listen": listen, "metrics": metrics, "store": settings.store}))
        else:
            measured = "without metrics" if metrics == "off" else f"metrics on {metrics}"
            click.echo(f"timeline {package_version()} serves {settings.store} on {listen}, {measured}")

    try:
        asyncio.run(run_broker(settings, package_version(), announce))
    except OSError as taken:
        raise Failed(SOME_FAILED, str(taken)) from taken
    return 0
