"""The peer beanstalkd: put → reserve → delete."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from timeline.bench.peers.own_servers import HOST, OwnServer, PeerConnection, program
from timeline.bench.processes import CannotMeasure, Measured
from timeline.child import free_ports

PLACES = ("/usr/bin/beanstalkd", "/usr/sbin/beanstalkd")
TO_RUN_S = 60
SYNCED = "fsync"


class BeanstalkdConnection(PeerConnection):
    """Speaks beanstalkd's protocol. A delay is in whole seconds, rounded up."""

    name = "beanstalkd"

    def __init__(self) -> None:
        super().__init__()
        self._taken: list[bytes] = []

    async def begin(self, sets_times: bool) -> None:
        pass

    async def put(self, payloads: list[bytes]) -> None:
        await self._put(payloads, [0] * len(payloads))

    async def put_at(self, payloads: list[bytes], due_ms: list[int], now_ms: int) -> None:
        await self._put(payloads, [-((now_ms - due) // 1000) for due in due_ms])

    async def _put(self, payloads: list[bytes], delays_s: list[int]) -> None:
        puts = [
            b"put 0 %d %d %d\r\n%b\r\n" % (delay_s, TO_RUN_S, len(payload), payload)
            for payload, delay_s in zip(payloads, delays_s, strict=True)
        ]
        self.check(await self.ask(b"".join(puts), len(puts)), b"INSERTED ")

    async def take(self, count: int) -> list[bytes]:
        told = await self.ask(b"reserve\r\n" * count, 2 * count)
        self.check(told[::2], b"RESERVED ")
        self._taken = [line.split(b" ", 2)[1] for line in told[::2]]
        return told[1::2]

    async def ack(self) -> None:
        deletes = [b"delete %b\r\n" % number for number in self._taken]
        self.check(await self.ask(b"".join(deletes), len(deletes)), b"DELETED")


@asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[tuple[Measured, int]]:
    """Run beanstalkd inside the context. Raise CannotMeasure."""
    path = shutil.which("beanstalkd") or next((path for path in PLACES if Path(path).exists()), None)
    if path is None:
        raise CannotMeasure("--peer beanstalkd needs the server: apt-get install beanstalkd")
    flags: list[str] = []
    if kind != "memory":
        binlog = folder / f"binlog-{kind}"
        binlog.mkdir(exist_ok=True)
        flags = ["-b", str(binlog), "-f", "0" if kind == SYNCED else "50"]
    (port,) = free_ports(1)
    async with program(f"beanstalkd-{kind}", folder, path, port, "-l", HOST, "-p", str(port), *flags) as running:
        yield running


BEANSTALKD = OwnServer(
    "beanstalkd",
    {
        "memory": "keeps nothing",
        "binlog": "binlog, synced every 50 ms: a crash loses what it answered since",
        SYNCED: "binlog, synced before each answer",
    },
    SYNCED,
    "does not: have due times finer than a second or ids of the producer's own, move, cancel by id or tag, fence a "
    "worker that took too long",
    running,
    lambda _: BeanstalkdConnection(),
)
