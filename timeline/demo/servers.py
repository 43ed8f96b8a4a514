"""What the demo's brokers need to be a cluster: three members of etcd and, where no store is given, a Redis, on free
ports of this machine, their data in the demo's folder. `python -m timeline.demo.servers PROGRAM …` runs one of them, or
with `serve …` a broker, and ends it when it is told to, or when the conductor is gone (its standard input ends)."""

from __future__ import annotations

import asyncio
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from timeline.child import free_ports

if TYPE_CHECKING:
    from timeline.demo.processes import DemoProcesses

MEMBERS = 3
ETCD, REDIS = "etcd", "redis-server"
PACKAGES = {ETCD: "etcd-server", REDIS: "redis-server"}
"""Of Debian and Ubuntu."""
LOOK_S = 0.05
STDIN = 0


def missing(*programs: str) -> str | None:
    """Which of the `programs` that a cluster needs are not installed, as a sentence; None: all are there."""
    absent = [PACKAGES[program] for program in programs if shutil.which(program) is None]
    if not absent:
        return None
    own = "; or give a store that brokers share with --store" if PACKAGES[REDIS] in absent else ""
    return f"a cluster needs servers that are not here: apt-get install {' '.join(absent)}{own}"


async def start_etcd(processes: DemoProcesses) -> str:
    """Three members of one etcd; the URL that brokers find each other by."""
    ports = free_ports(2 * MEMBERS)
    peers = {f"etcd-{number}": f"http://127.0.0.1:{port}" for number, port in enumerate(ports[:MEMBERS], start=1)}
    cluster = ",".join(f"{name}={peer}" for name, peer in peers.items())
    for (name, peer), port in zip(peers.items(), ports[MEMBERS:], strict=True):
        here = f"http://127.0.0.1:{port}"
        where = ("--listen-client-urls", here, "--advertise-client-urls", here)
        among = ("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster)
        data = ("--name", name, "--data-dir", str(processes.folder / name))
        await processes.server(name, ETCD, *data, *where, *among, "--logger", "zap", "--log-level", "warn")
    return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports[MEMBERS:]) + "/demo"


async def start_redis(processes: DemoProcesses) -> str:
    """A Redis with an append-only file; the store's URL."""
    (port,) = free_ports(1)
    where = ("--bind", "127.0.0.1", "--port", str(port), "--dir", str(processes.folder), "--save", "")
    child = await processes.server("redis", REDIS, *where, "--appendonly", "yes", "--appendfsync", "everysec")
    while not await _accepts(port):
        if not child.running:
            break  # the broker says what is missing
        await asyncio.sleep(LOOK_S)
    return f"redis://127.0.0.1:{port}/0"


async def _accepts(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True


def run_broker() -> None:
    """Run `timeline serve`, which drains and ends when the conductor is gone."""
    _when_the_conductor_is_gone(lambda: os.kill(os.getpid(), signal.SIGTERM))
    runpy.run_module("timeline", run_name="__main__")


def run_server(program: str, *arguments: str) -> None:
    """Run a server until it ends, is told to by SIGTERM, or nobody is there any more who could tell."""
    with subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=sys.stderr) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.kill())  # its data goes with the demo
        _when_the_conductor_is_gone(server.kill)
        server.wait()


def _when_the_conductor_is_gone(end: Callable[[], None]) -> None:
    def wait() -> None:
        # Not through sys.stdin: its lock, held here, would hinder the interpreter's end.
        while os.read(STDIN, 1024):
            pass
        end()

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        run_broker()
    else:
        run_server(*sys.argv[1:])
