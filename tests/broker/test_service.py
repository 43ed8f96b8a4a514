"""`timeline serve` as a process: its ports, health, probes, structured logs, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import secrets
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import timeline
from tests.simulation.loop import Timer, VirtualLoop
from timeline.broker.node import Node
from timeline.broker.server import service
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.config import ServeConfig
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.model import LeavingReason
from timeline.storage_plugins.contract import Opened, StoreUnavailable
from timeline.storage_plugins.memory import MemoryStore
from timeline.sync.view import LocalMembership
from timeline.wire import (
    SERVICE,
    BrokerStatus,
    Fault,
    Hello,
    Leaving,
    Ping,
    Pong,
    StatusRequest,
    TopicAction,
    Topics,
    TransportError,
    Welcome,
    decode,
    decode_as,
    encode,
)

pytestmark = pytest.mark.processes


class Broker:
    """A broker process that has opened its port."""

    def __init__(self, process: asyncio.subprocess.Process, addresses: dict[str, str]) -> None:
        self.process = process
        self.listen, self.metrics = addresses["listen"], addresses["metrics"]

    async def probe(self, path: str) -> tuple[int, str]:
        def get() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=10) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as refused:
                return refused.code, refused.read().decode()

        return await asyncio.to_thread(get)

    async def ready(self) -> GrpcTransport:
        """A transport to it, once it serves."""
        async with grpc.aio.insecure_channel(self.listen) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        return GrpcTransport(self.listen)


async def start(*flags: str, cwd: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "timeline", "serve", "--json", "--listen", "127.0.0.1:0", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip


@asynccontextmanager
async def serving(cwd: Path, *flags: str) -> AsyncIterator[Broker]:
    process = await start("--metrics", "127.0.0.1:0", "--log-format", "json", *flags, cwd=cwd)
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        assert line, (await process.communicate())[1].decode()
        yield Broker(process, json.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("shared", [True, False])
async def test_a_store_that_does_not_answer_is_told_ever_more_rarely(
    shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Away(MemoryStore):
        tries, announced = 0, 0
        capabilities = replace(MemoryStore.capabilities, shared=shared)

        async def open(self) -> Opened:
            self.tries += 1
            if self.tries == 130:
                stopping.set()
            raise StoreUnavailable(f"nobody there, try {self.tries}")

    def announce(store_open: bool) -> None:
        assert not store_open
        store.announced += 1

    stopping, store = asyncio.Event(), Away()
    clock = Clock()
    node = Node(
        store=store, clock=clock, membership=LocalMembership(), random_bits=secrets.randbits, name="b", address="b:1",
        version="0",
    )  # fmt: skip
    monkeypatch.setattr(service, "RETRY_OPEN_S", 0.0)
    caplog.set_level("WARNING", "timeline.broker")
    assert not await service._open(node, stopping, announce)
    told = [record.getMessage() for record in caplog.records]
    assert [int(re.findall(r"try (\d+)", text)[0]) for text in told] == [1, 2, 4, 8, 16, 32, 62, 92, 122]
    assert all(text.startswith("not ready yet: the store cannot be used: ") for text in told)
    assert all(("--store" in text) is shared for text in told)  # a file has no host and port to look at
    assert (store.tries, store.announced) == (130, 1)
    assert node.not_ready == "the broker waits for its store: nobody there, try 130"


async def test_a_broker_that_waits_for_its_store_says_why(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{nobody.getsockname()[1]}"
        why = f"the broker waits for its store: no connection to Redis at {where}"
        async with serving(tmp_path, "--store", f"redis://{where}/0") as broker:
            status, text = await broker.probe("/readyz")
            assert status == 503 and text.startswith(why)
            transport = GrpcTransport(broker.listen)
            listed = transport.unary("Topics", encode(Topics(TopicAction.LIST, "")), 20)
            for call in (listed, transport.stream("Produce", 20), transport.stream("Consume", 20)):
                with pytest.raises(TransportError) as refused:
                    await call
                assert refused.value.fault is Fault.NOT_READY and refused.value.reason.startswith(why)
            told = decode_as(await transport.unary("Stand", encode(StatusRequest("", 1)), 20), BrokerStatus)
            assert told.trouble.startswith(why)
            await transport.close()
            async with timeline.connect(broker.listen, timeout="500ms") as tl:
                with pytest.raises(timeline.Unavailable, match=f"no broker took the call: .*{re.escape(why)}"):
                    await tl.producer("t").produce(b"", in_=0)


async def test_a_broker_is_up_since_its_first_try_to_open_the_store() -> None:
    class Away(MemoryStore):
        async def open(self) -> Opened:
            raise StoreUnavailable("nobody there")

    clock = Clock()
    node = Node(
        store=Away(), clock=clock, membership=LocalMembership(), random_bits=secrets.randbits, name="b", address="b:1",
        version="0",
    )  # fmt: skip
    began_ms = set()
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            await node.open()
        began_ms.add(node.readiness.started_ms)
        while clock.now_ms() == node.readiness.started_ms:
            await asyncio.sleep(0)
    assert len(began_ms) == 1 and began_ms != {0}
    await node.stop()


async def test_it_serves_health_probes_and_metrics_and_ends_on_sigterm(tmp_path: Path):
    async with serving(tmp_path, "--store", "memory://", "--name", "tester") as broker:
        transport = await broker.ready()
        pong = decode_as(await transport.unary("Ping", encode(Ping(1.5)), 5), Pong)
        assert (pong.sent_ms, pong.broker) == (1.5, "tester")
        assert pong.answered_ms >= pong.received_ms
        assert await broker.probe("/healthz") == (200, "alive\n")
        assert await broker.probe("/readyz") == (200, "ready\n")
        assert (await broker.probe("/nothing"))[0] == 404
        status, text = await broker.probe("/metrics")
        assert status == 200
        assert 'timeline_broker_info{name="tester"' in text
        await transport.unary("Topics", encode(Topics(TopicAction.CREATE, "t")), 5)
        stream = await transport.stream("Consume", 5)
        none = np.zeros(0, dtype=np.uint64)
        await stream.send(encode(Hello("t", "c", 1, 0, 1, 1, Ragged.of([]), none, none.astype(np.int64))))
        assert isinstance(decode(await stream.receive() or b""), Welcome)
        broker.process.send_signal(signal.SIGTERM)
        leaving = decode_as(await stream.receive() or b"", Leaving)
        assert leaving.reason is LeavingReason.DRAINING
        await stream.close()
        _, logs = await broker.process.communicate()
        assert broker.process.returncode == 0
        events = [json.loads(line)["event"] for line in logs.decode().splitlines()]
        assert events == ["ready", "draining", "stopped"]


async def test_bad_frames_and_another_major_are_refused_with_the_reason(tmp_path: Path):
    async with serving(tmp_path, "--store", "memory://") as broker:
        transport = await broker.ready()
        with pytest.raises(TransportError) as bad:
            await transport.unary("Topics", b"\0" * 40, 5)
        assert bad.value.fault is Fault.REFUSED_FRAME
        assert "TLN1" in bad.value.reason
        decode_as(await transport.unary("Ping", encode(Ping(0.0)), 5), Pong)
        with pytest.raises(TransportError) as none:
            await transport.unary("Nothing", encode(Ping(0.0)), 5)
        assert none.value.fault is Fault.WRONG_VERSION
        stream = await transport.stream("Consume", 5)
        await stream.send(b"x" * 100)
        with pytest.raises(TransportError) as streamed:
            await stream.receive()
        assert streamed.value.fault is Fault.REFUSED_FRAME
        decode_as(await transport.unary("Ping", encode(Ping(0.0)), 5), Pong)


async def test_a_stream_refused_while_it_is_being_answered_ends_with_the_reason(tmp_path: Path):
    """gRPC sends no status beside a write: whoever refuses has to wait for it."""
    none = np.zeros(0, dtype=np.uint64)
    hello = encode(Hello("t", "c", 1, 0, 1, 1, Ragged.of([]), none, none.astype(np.int64)))
    async with serving(tmp_path, "--store", "memory://") as broker:
        transport = await broker.ready()
        await transport.unary("Topics", encode(Topics(TopicAction.CREATE, "t")), 5)
        for _ in range(20):
            stream = await transport.stream("Consume", 5)
            await stream.send(hello)
            await stream.send(hello)
            assert isinstance(decode(await stream.receive() or b""), Welcome)
            with pytest.raises(TransportError) as refused:
                await asyncio.wait_for(stream.receive(), 10)
            assert refused.value.fault is Fault.REFUSED_FRAME
            assert "not Hello" in refused.value.reason


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--store", "nosuch://x"), "memory"),
        (("--store", "sqlite:///"), "sqlite:///"),
        (("--store", "memory://", "--sync", "locale://"), "local://"),
        (("--store", "memory://", "--metrics", "nonsense"), "host:port"),
        (("--store", "memory://", "--grace", "soon"), "grace"),
        (("--stroe", "memory://"), "--store"),
    ],
)
async def test_what_cannot_be_meant_is_refused_with_a_sentence(tmp_path: Path, flags: tuple[str, ...], word: str):
    code, said = await ended(await start(*flags, cwd=tmp_path))
    assert code in (2, 4)
    assert word in said
    assert "Traceback" not in said


async def test_a_taken_port_is_said(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = await start("--store", "memory://", "--metrics", "off", "--listen", address, cwd=tmp_path)
        code, said = await ended(process)
        assert code != 0
        assert address in said
        process = await start("--store", "memory://", "--metrics", address, cwd=tmp_path)
        code, said = await ended(process)
        assert code != 0
        assert address in said


@pytest.mark.parametrize(("files", "connections"), [(20, 10), (256, 128), (600, 344), (4096, 3840)])
def test_where_few_files_may_be_opened_connections_get_some_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, files: int, connections: int
):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    options = dict(service._bounds(ServeConfig()))
    assert options["grpc.max_allowed_incoming_connections"] == connections
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [f"this process may open {files} files, which leaves {connections} connections: allow it more (ulimit -Hn, "
         "LimitNOFILE=)"] if files < 1024 else []
    )  # fmt: skip


def test_how_long_an_end_lasts_counts_from_the_first_signal() -> None:
    """The journal has what is left of the grace."""
    loop = VirtualLoop(random.Random(1))

    async def story() -> list[float]:
        stopping = service._Stopping()
        before = stopping.lasts_s
        stopping.begin()
        await Timer(loop).wait(5.0)
        stopping.begin()
        await Timer(loop).wait(2.0)
        return [before, stopping.lasts_s]

    assert loop.run_until_complete(story()) == pytest.approx([0.0, 7.0])
    loop.finish()
