"""The peer beanstalkd, with the three commands of the same work (put without delay → reserve → delete).

It is driven in several ways, and the quickest counts. One connection works in rounds: a window of puts, as many
reserves, as many deletes. Or there are two connections. One puts, the other reserves and deletes, and neither waits for
an answer before its next command. The payloads are those of the cycle. Each is checked to come out once.

beanstalkd has no due times finer than a second, and no ids of the producer's own. It cannot move a job, or cancel by id
or tag. Without `-b` it keeps nothing. With it and without `-f 0`, it answers before the disk has the message.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import timeline
from timeline.bench.figures import BenchReport
from timeline.bench.ledger import Ledger
from timeline.bench.load import ID_BYTES, batch_at, batch_sizes, ids_of
from timeline.bench.processes import CannotMeasure, Measured, started
from timeline.bench.scenario import cpu_s_of_self
from timeline.bench.scenarios.throughput import WINDOW_BATCHES, CycleScenario, measured
from timeline.child import free_ports
from timeline.clock import Clock

KINDS = {
    "memory": "keeps nothing",
    "binlog": "binlog, synced every 50 ms: a crash loses what it answered since",
    "fsync": "binlog, synced before each answer",
}
"""How it is started → what that is worth."""
SERVERS = ("/usr/bin/beanstalkd", "/usr/sbin/beanstalkd")
WINDOWS = (100, 500, 2_000)
TWO_CONNECTIONS = 0
WAYS = {**{window: f"one connection, windows of {window:,}" for window in WINDOWS}, TWO_CONNECTIONS: "two connections"}
"""The ways to drive it, by the window of one connection."""
TRIAL = 10
"""A trial of each way has so much fewer messages than the measurement with the best one."""
RESERVES_AHEAD = 2_000
SYNCED_MESSAGES = 5_000
CONNECT_TRIES = 200


@asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[tuple[Measured, int]]:
    """Run beanstalkd inside the context; yield the process and its port."""
    server = shutil.which("beanstalkd") or next((path for path in SERVERS if Path(path).exists()), None)
    if server is None:
        raise CannotMeasure("--peer beanstalkd needs the server: apt-get install beanstalkd")
    flags: list[str] = []
    if kind != "memory":
        binlog = folder / f"binlog-{kind}"
        binlog.mkdir(exist_ok=True)
        flags = ["-b", str(binlog), "-f", "0" if kind == "fsync" else "50"]
    (port,) = free_ports(1)
    async with started(f"beanstalkd-{kind}", folder, server, "-l", "127.0.0.1", "-p", str(port), *flags) as child:
        await _listening(child, port)
        yield child, port


async def _listening(child: Measured, port: int) -> None:
    for _ in range(CONNECT_TRIES):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            if child.process.returncode is not None:
                break
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return
    raise CannotMeasure(f"beanstalkd does not listen: {child.last_words()}")


class _Connection(asyncio.Protocol):
    """A connection that is needed until the end: `lost` fails when beanstalkd ends it."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_exception(CannotMeasure(f"beanstalkd ended a connection: {error or 'it closed it'}"))


class _Putter(_Connection):
    """The connection that puts, and counts the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.answered = asyncio.Event()
        self.wrong: list[str] = []
        self._missing = 0

    async def put(self, batch: timeline.Batch) -> None:
        """Put all without a delay. Return when all are answered."""
        payloads = batch.payloads.tolist()
        head = b"put 0 0 60 %d\r\n"
        self.answered.clear()
        self._missing += len(payloads)
        self.transport.write(b"".join([head % len(payload) + payload + b"\r\n" for payload in payloads]))
        await self.answered.wait()

    def data_received(self, data: bytes) -> None:
        lines = (self._rest + data).split(b"\r\n")
        self._rest = lines.pop()
        self._missing -= len(lines)
        if not all(line.startswith(b"INSERTED") for line in lines):
            self.wrong.append("a put was refused")
        if self._missing <= 0:
            self.answered.set()


class _Worker(_Connection):
    """The connection that reserves and deletes, up to RESERVES_AHEAD commands ahead of the answers.

    It reserves at most half of what the ledger lets be in flight: deletes wait behind reserves until jobs have come.
    """

    def __init__(self, ledger: Ledger, payload_bytes: int) -> None:
        super().__init__()
        self._ahead = max(1, min(RESERVES_AHEAD, ledger.window // 2))
        self._ledger = ledger
        self._answer = re.compile(rb"DELETED\r\n|RESERVED (\d+) %d\r\n(.{%d})\r\n" % ((payload_bytes,) * 2), re.DOTALL)
        self._longest_bytes = payload_bytes + len(b"RESERVED 18446744073709551615 9999999\r\n\r\n")
        self._to_reserve = ledger.total

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._reserve(self._ahead)

    def _reserve(self, count: int) -> None:
        count = min(count, self._to_reserve)
        self._to_reserve -= count
        self.transport.write(b"reserve\r\n" * count)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        end = deleted = 0
        numbers: list[bytes] = []
        ids: list[bytes] = []
        while (match := self._answer.match(data, end)) is not None:
            end = match.end()
            if match[1] is None:
                deleted += 1
            else:
                numbers.append(match[1])
                ids.append(match[2][:ID_BYTES])
        self._rest = data[end:]
        if len(self._rest) > self._longest_bytes:
            self._ledger.wrong.append(f"beanstalkd answered {self._rest[:40]!r}")
            self._ledger.finished.set()
        if numbers:
            self._ledger.met(ids)
            self.transport.write(b"".join([b"delete %b\r\n" % number for number in numbers]))
            self._reserve(len(numbers))
        if deleted:
            self._ledger.settle(deleted)


class _Rounds(_Connection):
    """The one connection that does all: a round of puts, then of reserves, then of deletes."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._missing = 0
        self._answered = asyncio.Event()

    async def run(self, ledger: Ledger, window: int, payload_bytes: int) -> None:
        """Do all rounds. Raise CannotMeasure for an answer that is none of these."""
        clock = Clock()
        for size in batch_sizes(ledger.total, window):
            batch = batch_at(size, clock.now_ms(), payload_bytes)
            await ledger.admit(ids_of(batch))
            puts = [b"put 0 0 60 %d\r\n%b\r\n" % (payload_bytes, payload) for payload in batch.payloads.tolist()]
            self._check(await self._ask(b"".join(puts), size), b"INSERTED ")
            reserved = await self._ask(b"reserve\r\n" * size, 2 * size)
            self._check(reserved[::2], b"RESERVED ")
            ledger.met([payload[:ID_BYTES] for payload in reserved[1::2]])
            deletes = [b"delete %b\r\n" % line.split(b" ", 2)[1] for line in reserved[::2]]
            self._check(await self._ask(b"".join(deletes), size), b"DELETED")
            ledger.settle(size)

    async def _ask(self, commands: bytes, lines: int) -> list[bytes]:
        """Send commands, and return the lines of their answers. A payload of ours is a line."""
        self._missing = lines
        self._answered.clear()
        self.transport.write(commands)
        await self._answered.wait()
        told, self._parts = b"".join(self._parts).split(b"\r\n"), []
        return told[:-1]

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._missing -= data.count(b"\n")
        if self._missing <= 0:
            self._answered.set()

    @staticmethod
    def _check(lines: list[bytes], word: bytes) -> None:
        wrong = next((line for line in lines if not line.startswith(word)), None)
        if wrong is not None:
            raise CannotMeasure(f"beanstalkd answered {wrong[:40]!r}")


async def run_beanstalkd(asked: CycleScenario, kind: str, folder: Path) -> BenchReport:
    """Do the cycle's work with beanstalkd, started as `kind` of KINDS, in the way that is quickest in a trial. Raises
    CannotMeasure."""
    if kind == "fsync":  # a sync each is so slow that fewer messages show as much
        asked = replace(asked, messages=min(asked.messages, SYNCED_MESSAGES), warm_up=0)
    trial = replace(asked, messages=max(1, asked.messages // TRIAL), warm_up=asked.warm_up // TRIAL)
    async with running(kind, folder) as (child, port):
        rates: dict[int, float] = {}
        for way in WAYS:
            report = await measured("a trial", trial, partial(_turn, trial, port, way))
            if report.wrong:
                raise CannotMeasure(f"beanstalkd, {WAYS[way]}: {'; '.join(report.wrong)}")
            rates[way] = report.figures["rate_per_s"]
        best = max(rates, key=rates.__getitem__)
        cpu = {"server_cpu": child.cpu_s, "client_cpu": cpu_s_of_self}
        report = await measured(f"beanstalkd {kind}", asked, partial(_turn, asked, port, best), **cpu)
    others = ", ".join(f"{WAYS[way]} {rate:,.0f}/s" for way, rate in rates.items())
    report.notes += [KINDS[kind], f"driven by {WAYS[best]}; trials: {others}"]
    return report


async def _turn(asked: CycleScenario, port: int, way: int, messages: int) -> Ledger:
    loop = asyncio.get_running_loop()
    if way != TWO_CONNECTIONS:
        ledger = Ledger(messages, way)
        transport, rounds = await loop.create_connection(_Rounds, "127.0.0.1", port)
        try:
            await ledger.through(rounds.run(ledger, way, asked.payload_bytes), rounds.lost)
        finally:
            transport.close()
        return ledger
    ledger = Ledger(messages, WINDOW_BATCHES * asked.batch)
    putting, putter = await loop.create_connection(_Putter, "127.0.0.1", port)
    working, worker = await loop.create_connection(lambda: _Worker(ledger, asked.payload_bytes), "127.0.0.1", port)
    puts = ledger.put_each(batch_sizes(messages, asked.batch), asked.payload_bytes, putter.put)
    try:
        await ledger.through(puts, putter.lost, worker.lost)
    finally:
        putting.close()
        working.close()
    ledger.wrong += putter.wrong
    return ledger
