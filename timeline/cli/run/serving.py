"""What `timeline serve` runs: one broker in this process, several as processes behind one port, or one of those."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

import timeline
from timeline import config
from timeline.broker.server import process
from timeline.broker.server.process import new_loop
from timeline.broker.server.service import serve
from timeline.broker.server.workers import Started, Supervisor, WorkerProcess, settings_from_supervisor
from timeline.cli.app import REFUSED, Failed, say
from timeline.cli.options.client_options import who_serves
from timeline.storage_plugins import make_store, shown
from timeline.sync import MembershipRefused


def run_alone(settings: config.ServeConfig, as_json: bool) -> int:
    """One broker, in this process. Raises Failed when it cannot listen."""

    def announce(listen: str, metrics: str, store_open: bool) -> None:
        if as_json:
            told = {"listen": listen, "metrics": metrics, "store": shown(settings.store), "store_open": store_open}
            say(json.dumps(told))
        else:
            say(_begun(settings, listen, _measured([metrics]), store_open))

    _listening(settings, lambda: _run(serve(settings, timeline.__version__, announce)))
    return 0


def run_workers(settings: config.ServeConfig, as_json: bool) -> int:
    """`settings.workers` brokers behind one port, kept running. Raises Failed when they cannot share their store, or
    cannot listen."""
    if not make_store(settings.store).capabilities.shared:
        raise Failed(
            REFUSED,
            f"{shown(settings.store)} is a store of one broker, and --workers {settings.workers} are several: choose a "
            "store that they can share (postgresql://, mysql://, redis://, cassandra://), or --workers 1",
        )
    process.set_up_logs(settings.log_level, settings.log_format)

    def announce(listen: str, started: list[Started]) -> None:
        store_open = all(one.store_open for one in started)
        if as_json:
            workers = [asdict(one) for one in started]
            said = {"listen": listen, "metrics": started[0].metrics, "store": shown(settings.store)}
            say(json.dumps({**said, "store_open": store_open, "workers": workers}))
        else:
            measured = f"{len(started)} workers, {_measured([one.metrics for one in started])}"
            say(_begun(settings, listen, measured, store_open))

    code = 0

    def run() -> None:
        nonlocal code
        code = asyncio.run(Supervisor(settings, announce).run())

    _listening(settings, run)
    return code


def run_worker() -> int:
    """One of the workers: the supervisor has standard input and output."""
    worker = WorkerProcess(settings_from_supervisor())
    settings = worker.config

    def announce(listen: str, metrics: str, store_open: bool) -> None:
        worker.tell({"say": "serves", "listen": listen, "metrics": metrics, "store_open": store_open})

    _listening(settings, lambda: _run(serve(settings, timeline.__version__, announce, worker)))
    return 0


def _run(broker: Coroutine[Any, Any, None]) -> None:
    """To its end, on a loop of a broker's own."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(broker)


def _begun(settings: config.ServeConfig, listen: str, rest: str, store_open: bool) -> str:
    if store_open:
        return f"timeline {timeline.__version__} serves {shown(settings.store)} on {listen}, {rest}"
    waits = f"it serves once {shown(settings.store)} can be opened"
    return f"timeline {timeline.__version__} listens on {listen}, {rest}; {waits}"


def _measured(metrics: list[str]) -> str:
    return "without metrics" if metrics[0] == "off" else f"metrics on {', '.join(metrics)}"


def _listening(settings: config.ServeConfig, run: Callable[[], None]) -> None:
    """Runs `run`. Raises Failed, with what to do, when an address cannot be had, or its cluster does not take it."""
    try:
        run()
    except MembershipRefused as refused:
        raise Failed(REFUSED, str(refused)) from refused
    except OSError as refused:
        if refused.filename not in (settings.listen, settings.metrics):
            raise
        raise Failed(REFUSED, asyncio.run(_cannot_listen(refused, settings))) from refused


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
            await who_serves(address)
            or f"another program has it ('ss -ltnp' or 'lsof -i :{_port(address)}' says which)"
        )
    return f"{address} is taken: {who}. Stop that one, or give this one another: {option}."


def _port(address: str) -> int:
    return config.split_address(address)[1]
