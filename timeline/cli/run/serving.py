"""The processes of `timeline serve`: one broker in this process, several worker processes behind one port, or a
worker."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import timeline
from timeline import config
from timeline.broker.server.process import new_loop
from timeline.broker.server.service import serve
from timeline.broker.server.workers import Started, Supervisor, WorkerProcess, settings_from_supervisor
from timeline.cli.app import DONE, REFUSED, USAGE, Failed, say
from timeline.cli.options import who_serves
from timeline.logs import set_up_logs
from timeline.storage_plugins import make_store, shown
from timeline.sync import MembershipRefused


def run_alone(settings: config.ServeConfig, as_json: bool) -> int:
    """Run one broker in this process. Raises Failed when it cannot listen."""

    def announce(listen: str, metrics: str, http: str, store_open: bool) -> None:
        _announce(settings, as_json, listen, [metrics], http, store_open)

    return _listening(settings, lambda: _run(serve(settings, timeline.__version__, announce)))


def run_workers(settings: config.ServeConfig, as_json: bool) -> int:
    """Keep `settings.workers` brokers running behind one port. Raises Failed when they cannot share their store, or
    cannot listen."""
    if not make_store(settings.store).capabilities.shared:
        raise Failed(
            USAGE,
            f"{shown(settings.store)} is a store of one broker, and --workers {settings.workers} are several. "
            "docs/stores.md lists the stores that several brokers can share. Choose one of these, or --workers 1",
        )
    set_up_logs(settings.log_level, settings.log_format)

    def announce(listen: str, http: str, started: list[Started]) -> None:
        metrics, store_open = [one.metrics for one in started], all(one.store_open for one in started)
        _announce(settings, as_json, listen, metrics, http, store_open, workers=[asdict(one) for one in started])

    return _listening(settings, lambda: asyncio.run(Supervisor(settings, announce).run()))


def run_worker() -> int:
    """Run one of the workers. Its standard input and output belong to the supervisor."""
    worker = WorkerProcess(settings_from_supervisor())
    settings = worker.config

    def announce(listen: str, metrics: str, _: str, store_open: bool) -> None:
        worker.tell({"say": "serves", "listen": listen, "metrics": metrics, "store_open": store_open})

    return _listening(settings, lambda: _run(serve(settings, timeline.__version__, announce, worker)))


def _run(broker: Coroutine[Any, Any, None]) -> int:
    """Run a broker to its end, on its own kind of loop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(broker)
    return DONE


def _announce(
    settings: config.ServeConfig, as_json: bool, listen: str, metrics: list[str], http: str, store_open: bool,
    **workers: Any,
) -> None:  # fmt: skip
    """Print where brokers listen, and their store. `workers`: each worker, if there are several."""
    store = shown(settings.store)
    if as_json:
        told = {"listen": listen, "metrics": metrics[0], "http": http, "store": store, "store_open": store_open}
        say(json.dumps({**told, **workers}))
        return
    rest = f"{len(metrics)} workers, " if workers else ""
    rest += "without metrics" if metrics[0] == "off" else f"metrics on {', '.join(metrics)}"
    rest += ", without HTTP" if http == "off" else f", HTTP on {_shown_port(http)}"
    if store_open:
        say(f"timeline {timeline.__version__} serves {store} on {listen}, {rest}")
    else:
        say(f"timeline {timeline.__version__} listens on {listen}, {rest}; it serves once {store} can be opened")


def _shown_port(address: str) -> str:
    host, port = config.split_address(address)
    return address if port else f"a free port of {host}, which the log names"


def _listening(settings: config.ServeConfig, run: Callable[[], int]) -> int:
    """Return what `run` returns. Raises Failed when an address is not free, or the cluster refuses the broker."""
    try:
        return run()
    except MembershipRefused as refused:
        raise Failed(REFUSED, str(refused)) from refused
    except OSError as refused:
        if refused.filename not in (settings.listen, settings.metrics, settings.http):
            raise
        raise Failed(REFUSED, asyncio.run(_cannot_listen(refused, settings))) from refused


async def _cannot_listen(refused: OSError, settings: config.ServeConfig) -> str:
    """Return why an address is not free, who has it, and what to do."""
    address = str(refused.filename)
    of_metrics = address == settings.metrics != settings.listen
    if address == settings.http not in (settings.listen, settings.metrics):
        return f"cannot serve HTTP on {address}: {(refused.strerror or '').lower()}. Choose another: --http HOST:PORT."
    option = "--metrics HOST:PORT, or --metrics off" if of_metrics else "--listen HOST:PORT"
    if refused.errno != errno.EADDRINUSE:
        why = (refused.strerror or "it cannot be had").lower()
        if refused.errno == errno.EADDRNOTAVAIL:
            why = "that is no address of this machine (0.0.0.0 is all it has)"
        return f"cannot {'serve metrics' if of_metrics else 'listen'} on {address}: {why}. Choose another: {option}."
    if of_metrics:
        who = "another broker of this machine may have it"
    else:
        port = config.split_address(address)[1]
        another = f"another program has it ('ss -ltnp' or 'lsof -i :{port}' says which)"
        who = await who_serves(address) or another
    others = []
    if not of_metrics and settings.metrics == config.ServeConfig().metrics:
        others.append("--metrics HOST:PORT (or --metrics off)")
    if not of_metrics and not settings.http:
        others.append("--http HOST:PORT for HTTP")
    also = f". A second broker also needs {', and '.join(others)}" if others else ""
    return f"{address} is taken: {who}. Stop that one, or give this one another: {option}{also}."
