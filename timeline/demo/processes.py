"""The demo's processes: roles, brokers, and the servers of a cluster. None is left behind.

A cluster has three members of etcd and, unless a store is given, a Redis. They use free ports of this machine, and keep
their data in the demo's folder. `python -m timeline.demo.processes PROGRAM …` runs one of them, a broker with
`serve …`, or a gateway with `gateway …`. It ends that on SIGTERM, or when the conductor is gone (its standard input
ends).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from timeline.child import Child, free_ports
from timeline.demo.plan import WEBHOOK_GATE
from timeline.errors import TimelineError

READY, GO = "ready", "go"
"""The line of a process that could begin, and the conductor's answer."""
START_S = 30.0
"""How long a process may take until it is ready."""
MEMBERS = 3
ETCD, REDIS = "etcd", "redis-server"
DEBIAN = {ETCD: "etcd-server", REDIS: "redis-server"}
"""Their packages, of Debian and Ubuntu."""
LOOK_S = 0.05
STDIN = 0


class CannotPlay(TimelineError):
    """A process of the demo could not be started, or died. The text names it, and has its last words."""

    code = "CANNOT_PLAY"


class DemoChild(Child):
    """A process of the demo. `grouped`: a server, together with the process that runs it."""

    trouble = CannotPlay
    grouped = False

    async def first_line(self) -> str:
        """Return its first line. Raises CannotPlay."""
        return await self.line(START_S)

    def ended(self) -> str:
        """Return how it ended."""
        return f"{self.name} ended with code {self.process.returncode}: {self.last_words()}"

    async def kill(self) -> None:
        """End it at once."""
        if self.grouped and self.running:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self.pid, signal.SIGKILL)
            await self.process.wait()
        await super().kill()


class DemoProcesses:
    """All child processes of one demo, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[DemoChild] = []

    async def broker(self, store: str, name: str = "broker", *options: str) -> tuple[DemoChild, str]:
        """Start a broker on free ports, with more `options` of serve. Return the process and its address."""
        free = "127.0.0.1:0"
        flags = ("serve", "--listen", free, "--metrics", free, "--store", store, "--json", *options)
        child = await self._start(name, "timeline.demo.processes", *flags)
        return child, str(json.loads(await child.first_line())["listen"])

    async def gateway(self, brokers: str) -> tuple[DemoChild, str]:
        """Start a gateway that may send webhooks to this machine. Return the process and its address."""
        flags = ("--broker", brokers, "--listen", "127.0.0.1:0", "--push-allow", "127.0.0.1/32", "--json")
        child = await self._start("gateway", "timeline.demo.processes", "gateway", *flags)
        return child, str(json.loads(await child.first_line())["listen"])

    async def webhook_gate(self, port: int) -> DemoChild:
        """Start the gate that is a webhook receiver."""
        return await self._start(WEBHOOK_GATE, "timeline.demo.webhook", str(self.folder), str(port))

    async def server(self, name: str, *command: str) -> DemoChild:
        """Start a server that brokers need."""
        child = await self._start(name, "timeline.demo.processes", *command)
        child.grouped = True
        return child

    async def role(self, name: str, role: str, *numbers: int) -> DemoChild:
        """Start `python -m timeline.demo.roles ROLE FOLDER NUMBER …`."""
        return await self._start(name, "timeline.demo.roles", role, str(self.folder), *map(str, numbers))

    async def ready(self, *children: DemoChild) -> None:
        """Wait until all of them could begin. Raises CannotPlay."""
        for child in children:
            line = await child.first_line()
            if line != READY:
                raise CannotPlay(f"{child.name} printed {line!r} instead of {READY}")

    async def kill(self) -> None:
        """End all that still runs, at once."""
        for child in self.children:
            await child.kill()

    async def _start(self, name: str, module: str, *arguments: str) -> DemoChild:
        child = await DemoChild.start(name, self.folder, sys.executable, "-m", module, *arguments)
        self.children.append(child)
        return child


def missing(*programs: str) -> str | None:
    """Return a sentence about those of the `programs` that are not installed; None if all are."""
    absent = [DEBIAN[program] for program in programs if shutil.which(program) is None]
    if not absent:
        return None
    own = "; or give a store that brokers share with --store" if DEBIAN[REDIS] in absent else ""
    return f"a cluster needs servers that are not here: apt-get install {' '.join(absent)}{own}"


async def start_etcd(processes: DemoProcesses) -> str:
    """Start three members of one etcd. Return the URL by which brokers find each other."""
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
    """Start a Redis with an append-only file. Return the store's URL."""
    (port,) = free_ports(1)
    where = ("--bind", "127.0.0.1", "--port", str(port), "--dir", str(processes.folder), "--save", "")
    child = await processes.server("redis", REDIS, *where, "--appendonly", "yes", "--appendfsync", "everysec")
    while child.running:  # if it has ended, the broker reports what is missing
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(LOOK_S)
        else:
            writer.close()
            break
    return f"redis://127.0.0.1:{port}/0"


def run_timeline() -> None:
    """Run `timeline serve` or `timeline gateway`, which drains and ends when the conductor is gone."""
    when_the_conductor_is_gone(lambda: os.kill(os.getpid(), signal.SIGTERM))
    runpy.run_module("timeline", run_name="__main__")


def run_server(program: str, *arguments: str) -> None:
    """Run a server until it ends, SIGTERM comes, or the conductor is gone."""
    with subprocess.Popen([program, *arguments], stdin=subprocess.DEVNULL, stdout=sys.stderr) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.kill())  # its data goes with the demo
        when_the_conductor_is_gone(server.kill)
        server.wait()


def when_the_conductor_is_gone(end: Callable[[], None]) -> None:
    """Call `end` from a thread of its own when standard input ends."""

    def wait() -> None:
        # Not through sys.stdin: its lock, held here, would block the interpreter's end.
        while os.read(STDIN, 1024):
            pass
        end()

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    if sys.argv[1] in ("serve", "gateway"):
        run_timeline()
    else:
        run_server(*sys.argv[1:])
