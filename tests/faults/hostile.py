"""Hostile clients: connections of plain sockets that speak just enough HTTP/2, frames that nobody means, and a broker
that bears both and serves others beside."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import timeline
from tests.faults.machine import PATIENCE_S, Child
from timeline.columns import Ragged
from timeline.model import MAX_REASON_BYTES, Operation
from timeline.wire import SERVICE, Hello, Produce, PutFlag, Settle, encode

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, DATA, RST_STREAM, WINDOW_UPDATE = 1, 4, 0, 3, 8
ACK, INITIAL_WINDOW_SIZE, WINDOW_BYTES = 1, 4, 65_535
CHUNK = b"x" * 16_384
CANCEL = 8
END_HEADERS = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _header(name: bytes, value: bytes) -> bytes:
    """A header field that is not compressed (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def opening(method: str = "", message: bytes = b"", announced: int = 0) -> bytes:
    """What a client says first: HTTP/2's preface, then, with `method`, a call of it, then a message on that, or the
    beginning of one that is to have `announced` bytes."""
    said = PREFACE + _frame(SETTINGS, 0, 0)
    if method:
        said += _call(method, 1)
    if message:
        said += _frame(DATA, 0, 1, b"\0" + struct.pack(">I", announced or len(message)) + message)
    return said


def _call(method: str, stream: int) -> bytes:
    fields = {
        b":method": b"POST", b":scheme": b"http", b":path": f"/{SERVICE}/{method}".encode(), b":authority": b"x",
        b"te": b"trailers", b"content-type": b"application/grpc",
    }  # fmt: skip
    return _frame(HEADERS, END_HEADERS, stream, b"".join(_header(*field) for field in fields.items()))


def broken_off(method: str, stream: int) -> bytes:
    """A call of `method` that is opened and broken off at once."""
    return _call(method, stream) + _frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL))


async def unending(address: str, method: str, announced: int) -> int:
    """A call, on a connection of its own, whose message lacks its last byte for ever: sends as fast as HTTP/2 permits,
    and answers what was sent once it is hung up on."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    windows = {0: WINDOW_BYTES, 1: WINDOW_BYTES}
    more = asyncio.Event()

    async def listen() -> None:
        while True:
            head = await reader.readexactly(9)
            said = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == WINDOW_UPDATE:
                windows[int.from_bytes(head[5:], "big")] += int.from_bytes(said, "big")
            elif head[3] == SETTINGS and not head[4] & ACK:
                writer.write(_frame(SETTINGS, ACK, 0))
                for at in range(0, len(said), 6):
                    name, value = struct.unpack_from(">HI", said, at)
                    windows[1] += value - WINDOW_BYTES if name == INITIAL_WINDOW_SIZE else 0
            more.set()

    listening = asyncio.create_task(listen())
    listening.add_done_callback(lambda _: more.set())
    sent, begin = 0, b"\0" + struct.pack(">I", announced)
    try:
        writer.write(opening(method))
        while not listening.done():
            part = (begin if not sent else CHUNK)[: max(0, min(*windows.values(), announced + 4 - sent))]
            if not part:
                more.clear()
                await asyncio.wait(
                    {listening, going := asyncio.create_task(more.wait())}, return_when="FIRST_COMPLETED"
                )
                going.cancel()
                continue
            writer.write(_frame(DATA, 0, 1, part))
            sent += len(part)
            for stream in windows:
                windows[stream] -= len(part)
            await writer.drain()
    except ConnectionError:
        pass  # hung up on
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        writer.close()
    return sent


SETTINGS_AGREED = b"\0\0\0\x04\x01\0\0\0\0"
PING = bytes.fromhex("000008060000000000")
PONG = bytes.fromhex("000008060100000000")
"""Headers of an HTTP/2 ping and of its answer. Eight bytes follow, the same in both."""


class Plain:
    """A connection that sends once, keeps what comes, and answers settings and pings whenever it looks."""

    def __init__(self, address: str, said: bytes) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(said)
        self._socket.setblocking(False)
        self.heard = b""
        self.over = False
        self._agreed = False
        self._pings_until = 0

    def look(self) -> None:
        """Takes what has come."""
        try:
            while data := self._receive():
                self.heard += data
            self.over = data is not None
            self._agree()
            self._answer_pings()
        except ConnectionError:
            self.over = True

    def _receive(self) -> bytes | None:
        """None: nothing has come."""
        try:
            return self._socket.recv(65_536)
        except BlockingIOError:
            return None

    def _agree(self) -> None:
        """Acknowledges the settings, with which every connection begins. Without that, it is closed after a while."""
        if self.heard and not self._agreed:
            self._agreed = True
            self._socket.sendall(SETTINGS_AGREED)

    def _answer_pings(self) -> None:
        while (at := self.heard.find(PING, self._pings_until)) >= 0 and len(self.heard) >= at + 17:
            self._socket.sendall(PONG + self.heard[at + 9 : at + 17])
            self._pings_until = at + 17

    @property
    def status(self) -> int | None:
        """The gRPC status that ended its call."""
        found = re.search(rb"grpc-status.(\d+)", self.heard, re.DOTALL)
        return int(found[1]) if found else None

    def fileno(self) -> int:
        """So that it may be waited for like a socket."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def hello(consumer: str, topic: str = "bulk", credit: int = 100, lease_ms: int = 0) -> bytes:
    """The first frame of a consumer."""
    none = np.zeros(0, dtype=np.uint64)
    return encode(Hello(topic, consumer, 1, lease_ms, credit, credit, Ragged.of([]), none, none.astype(np.int64)))


def puts(request: int, ids: list[bytes], payloads: list[bytes], in_ms: int = 0, topic: str = "bulk") -> Produce:
    """A frame of puts; births are made of the request's number."""
    count = len(ids)
    return Produce(
        request=request,
        topic=topic,
        group="default",
        ids=Ragged.of(ids),
        birth=np.arange(1, count + 1, dtype=np.uint64) + np.uint64(request << 20),
        time_ms=np.full(count, in_ms, dtype=np.int64),
        flags=np.full(count, PutFlag.IN, dtype=np.uint8),
        payloads=Ragged.of(payloads),
    )


def burials(request: int, ids: list[bytes]) -> Settle:
    """A frame of burials, each with as long a reason as may be; tokens are made up."""
    count = len(ids)
    return Settle(
        request=request,
        ids=Ragged.of(ids),
        birth=np.arange(1, count + 1, dtype=np.uint64),
        version=np.full(count, 2, dtype=np.int64),
        operation=np.full(count, Operation.BURY, dtype=np.uint8),
        time_ms=np.zeros(count, dtype=np.int64),
        flags=np.zeros(count, dtype=np.uint8),
        op=np.arange(1, count + 1, dtype=np.uint64),
        reasons=Ragged.repeat(b"x" * MAX_REASON_BYTES, count),
        credit_messages=0,
        credit_bytes=0,
    )


@dataclass(frozen=True, slots=True)
class Others:
    """How those fare who mean well, in ms, for people: a busy machine says nothing about the broker. The p99 of their
    lateness, and how long it took them to come: both streams, a first message, its ack."""

    late_p99_ms: float
    came_ms: float


@dataclass(slots=True)
class Victim:
    """A live broker under attack, and a client that means well."""

    child: Child
    address: str
    client: timeline.Timeline
    before_mib: float = 0.0
    served: int = 0

    def _memory_mib(self, field: str) -> float:
        status = Path(f"/proc/{self.child.process.pid}/status").read_text(encoding="ascii")
        found = re.search(rf"{field}:\s+(\d+) kB", status)
        assert found
        return int(found[1]) / 1024

    @property
    def grown_mib(self) -> float:
        """By how much the broker's memory has grown at most since the attack began."""
        return self._memory_mib("VmHWM") - self.before_mib

    async def others(self, count: int = 50) -> Others:
        """Others get their deliveries meanwhile: puts and takes `count` messages, due 20 ms later, each once."""
        return await self._serve([0.02] * count, together=False)

    async def spread(self, count: int = 300) -> Others:
        """The same for messages put well ahead, due one after the other, 5 ms apart."""
        return await self._serve([0.5 + 0.005 * at for at in range(count)], together=True)

    async def _serve(self, due_s: list[float], together: bool) -> Others:
        """A producer and a consumer come, and are there once they have had a first message. Then messages due in so
        many seconds are put, in one batch or one by one, and taken."""
        self.served += 1
        late_ms: list[float] = []
        acks: list[asyncio.Task[timeline.Receipt]] = []
        messages = [timeline.Message(b"x", in_=in_s, id=f"{self.served}-{at}") for at, in_s in enumerate(due_s)]
        wanted = {message.id for message in messages}
        began_s = time.monotonic()
        async with (
            asyncio.timeout(PATIENCE_S),
            self.client.consumer("good", id="good") as consumer,
            self.client.producer("good") as producer,
        ):
            await producer.produce(b"x", in_=0, id=f"{self.served}-first")
            first = await consumer.take()
            assert first is not None
            await first.ack()
            came_s = time.monotonic()
            if together:
                (await producer.produce_many(messages)).raise_failed()
            else:
                puts = (producer.produce(one.payload, in_=one.in_, id=one.id) for one in messages)
                assert {receipt.status for receipt in await asyncio.gather(*puts)} == {"OK"}
            while wanted:
                delivery = await consumer.take()
                assert delivery is not None
                wanted.remove(delivery.id)
                late_ms.append(delivery.lateness.total_seconds() * 1_000)
                # Not waited for before the next one is taken: that would be late by all answers before it.
                acks.append(asyncio.create_task(delivery.ack()))
            await asyncio.gather(*acks)
        return Others(sorted(late_ms)[len(late_ms) * 99 // 100], (came_s - began_s) * 1_000)

    @asynccontextmanager
    async def flooded(self, flood: str, folder: Path) -> AsyncIterator[Flood]:
        """Meanwhile another process floods it (`attacker.py`); at the end that has the answer to each thing it asked,
        or has failed."""
        child = await Child.start(
            "attacker", folder / "attacker.log", "-m", "tests.faults.attacker", flood, self.address
        )
        made = Flood()
        try:
            await child.until(lambda told: "floods" in told)
            yield made
            child.hang_up()
            assert await child.wait() == 0, (folder / "attacker.log").read_text(encoding="utf-8")
            made.asked, made.said = child.told["asked"], Counter(child.told["said"])
        finally:
            await child.finish()


@dataclass(slots=True)
class Flood:
    """How many things an attacker asked, and how often each status was the answer; known once it is over."""

    asked: int = 0
    said: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def victim(folder: Path, *flags: str, store: str = "memory://") -> AsyncIterator[Victim]:
    """A broker with topics "good" and "bulk"; at the end it must still drain in order."""
    serve = ["--store", store, "--listen", "127.0.0.1:0", "--metrics", "off", "--json", "--grace", "5s"]
    child = await Child.start("broker", folder / "broker.log", "-m", "timeline", "serve", *serve, *flags)
    try:
        await child.until(lambda told: "listen" in told)
        address = str(child.told["listen"])
        async with timeline.connect(address, timeout="60s") as client:
            await client.create_topic("good")
            await client.create_topic("bulk")
            made = Victim(child, address, client)
            await made.others(5)
            made.before_mib = made._memory_mib("VmRSS")
            yield made
        assert child.process.returncode is None, "the broker went down"
    finally:
        await child.finish()
