"""Calls by way of a relay process: they end as they would without one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

import timeline
from tests.driver.broker import Broker
from timeline.credentials import PLAIN
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.driver.transport.relay import OPENING, RecordKind, RelayServer, RelayTransport, record
from timeline.wire import Fault, Ping, Pong, Scan, ScanPage, TransportError, decode_as, encode

pytestmark = pytest.mark.processes
LATER = 1_900_000_000_000


@pytest.fixture
async def relay(broker: Broker) -> AsyncIterator[RelayTransport]:
    made = RelayTransport(broker.address)
    yield made
    await made.close()


async def test_a_call_and_what_refuses_it(relay: RelayTransport) -> None:
    pong = decode_as(await relay.unary("Ping", encode(Ping(1.5)), 20.0), Pong)
    assert pong.broker == "b1"
    with pytest.raises(TransportError, match="does not know this call") as refused:
        await relay.unary("Nothing", b"", 20.0)
    assert refused.value.fault is Fault.WRONG_VERSION
    assert await relay.unary("Ping", encode(Ping(1.5)), 20.0)


async def test_ctrl_c_in_a_terminal_is_for_the_program_alone(relay: RelayTransport) -> None:
    assert await relay.unary("Ping", encode(Ping(1.5)), 20.0)
    assert relay._process is not None
    assert os.getpgid(relay._process._process.pid) != os.getpgid(0)


async def test_nobody_there_is_told_with_the_address() -> None:
    relay = RelayTransport("127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(TransportError, match=r"nobody listens at 127\.0\.0\.1:1") as told:
            await relay.unary("Ping", encode(Ping(1.5)), 20.0)
        assert told.value.fault is Fault.UNREACHABLE
    await relay.close()


async def test_a_relay_that_dies_ends_its_calls_and_the_next_starts_another(relay: RelayTransport) -> None:
    stream = await relay.stream("Consume", 20.0)
    assert relay._process is not None
    relay._process._process.kill()
    with pytest.raises(TransportError, match="relay process has ended") as told:
        await stream.receive()
    assert told.value.fault is Fault.BROKEN
    assert await relay.unary("Ping", encode(Ping(1.5)), 20.0)
    stream.cancel()  # the old one's number is not the new one's
    assert await relay.unary("Ping", encode(Ping(1.5)), 20.0)


async def test_at_most_one_page_is_read_ahead_of_a_slow_reader(relay: RelayTransport, broker: Broker) -> None:
    async with timeline.connect(broker.address) as tl, tl.producer("t") as producer:
        await tl.create_topic("t")
        ids = [f"{at:02}" for at in range(30)]
        batch = timeline.Batch([b"x" * 300_000] * len(ids), at=LATER, ids=ids)
        (await producer.produce_many(batch)).raise_failed()
    pages = relay.unary_stream("Scan", encode(Scan("t", payload=True)), 60.0)
    found = [await anext(pages)]
    assert relay._process is not None
    (call,) = relay._process._calls.values()
    for _ in range(100):
        assert await relay.unary("Ping", encode(Ping(1.5)), 20.0)
        assert call.frames.qsize() <= 1
    found += [page async for page in pages]
    assert len(found) > 3
    assert sorted(id.decode() for page in found for id in decode_as(page, ScanPage).rows.ids.tolist()) == ids


async def test_a_relay_whose_parent_has_ended_says_nothing(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    ours, its = os.pipe()
    os.close(ours)
    loop, heard = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(its, "wb"))
    gone = RelayServer(GrpcTransport(broker.address, PLAIN), asyncio.StreamWriter(transport, protocol, None, loop))
    running = asyncio.ensure_future(gone.run(heard))
    method, frame = b"Ping", encode(Ping(1.5))
    for call in range(3):
        heard.feed_data(record(RecordKind.UNARY, call, OPENING.pack(20_000, len(method)) + method + frame))
    while heard._buffer:  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    while gone._tasks:
        await asyncio.sleep(0)
    heard.feed_eof()
    await running
    assert caplog.records == []
