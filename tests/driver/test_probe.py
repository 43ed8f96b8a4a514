"""Who is there where no broker is: nobody, somebody who speaks something else, a host that nobody knows."""

from __future__ import annotations

import asyncio
import contextlib
import io
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import timeline
import timeline.driver.transport.addresses as probing
from tests.driver.broker import Broker
from timeline.cli import options as client_options
from timeline.cli.app import UNREACHABLE, run
from timeline.cli.options import no_answer
from timeline.driver.transport.addresses import ProbeResult, probe
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.wire.transport import Fault, TransportError

WAIT_S = 20.0

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as a slow machine may take."""
    monkeypatch.setattr(probing, "PROBE_S", WAIT_S)
    monkeypatch.setattr(client_options, "PROBE_S", WAIT_S)


@asynccontextmanager
async def listening(speak: Speak, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """A server that is no broker; its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await speak(reader, writer)
        except ConnectionError:
            pass  # whoever knocked has gone
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)
    writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
    await writer.drain()


async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-other\r\n")
    await reader.read()


async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(1)


async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    """What a server needs to speak TLS."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1)).sign(
        key, hashes.SHA256()
    )
    file = tmp_path / "server.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + made.public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    return context


@pytest.mark.parametrize(
    ("speak", "answer"), [(http, ProbeResult.HTTP), (ssh, ProbeResult.ELSE), (hangs_up, ProbeResult.HANGS_UP)]
)
async def test_something_else_listens(speak: Speak, answer: ProbeResult) -> None:
    async with listening(speak) as address:
        assert await probe(address, WAIT_S) is answer
        await told_of(address, answer)


async def test_something_listens_that_speaks_tls(certificate: ssl.SSLContext) -> None:
    async with listening(says_nothing, certificate) as address:
        assert await probe(address, WAIT_S) is ProbeResult.TLS
        await told_of(address, ProbeResult.TLS)


async def test_nobody_listens() -> None:
    assert await probe("127.0.0.1:1", WAIT_S) is ProbeResult.NOBODY
    await told_of("127.0.0.1:1", ProbeResult.NOBODY)


async def test_a_host_that_nobody_knows() -> None:
    assert await probe("no-such-host.invalid:9000", WAIT_S) is ProbeResult.UNKNOWN_NAME
    await told_of("no-such-host.invalid:9000", ProbeResult.UNKNOWN_NAME)


async def test_what_takes_connections_and_says_nothing_may_be_a_broker() -> None:
    async with listening(says_nothing) as address:
        assert await probe(address, 0.05) is ProbeResult.TALKS


async def test_a_broker_speaks_http2(broker: Broker) -> None:
    assert await probe(broker.address, WAIT_S) is ProbeResult.TALKS
    assert await no_answer(broker.address, timeline.Unavailable("the store is down")) is None


class _Another(grpc.GenericRpcHandler):
    """Another service's methods: none that we call; or all of them, each answered by `reply`. An empty one: streams
    begin, and nothing comes over them."""

    def __init__(self, reply: bytes | None) -> None:
        self._reply = reply

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if self._reply is None:
            return None

        async def answer(asked: Any, context: Any) -> AsyncIterator[bytes]:
            if not self._reply:
                await context.send_initial_metadata(())
                await asyncio.Event().wait()
            yield self._reply or b""

        async def pages(asked: bytes, context: Any) -> AsyncIterator[bytes]:
            yield self._reply or b""

        async def once(asked: bytes, context: Any) -> bytes:
            return self._reply or b""

        method = details.method.rpartition("/")[2]
        if method in ("Produce", "Consume"):
            return grpc.stream_stream_rpc_method_handler(answer)
        if method == "Scan":
            return grpc.unary_stream_rpc_method_handler(pages)
        return grpc.unary_unary_rpc_method_handler(once)


@asynccontextmanager
async def another_service(reply: bytes | None) -> AsyncIterator[str]:
    """A gRPC server that is no broker; its address."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Another(reply),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


CALLS: list[Callable[[timeline.Timeline], Awaitable[object]]] = [
    lambda tl: tl.topics(),
    lambda tl: tl.create_topic("t"),
    lambda tl: tl.ping(),
    lambda tl: tl.producer("t").produce(b"", in_=0),
    lambda tl: tl.producer("t").move("a", in_=0),
    lambda tl: tl.consumer("t").take(),
    lambda tl: tl.get("t", "a"),
    lambda tl: tl.late(),
    lambda tl: tl.standing(),
]


ANSWER_S = "3s"
"""Every call waits this long for the stream that never answers. A busy machine knows all other answers by then."""


@pytest.mark.slow
@pytest.mark.parametrize("reply", [None, b"\x0a\x03abc", b""], ids=["unimplemented", "protobuf", "empty"])
async def test_a_grpc_server_of_another_service_is_unavailable_and_named(reply: bytes | None) -> None:
    async with another_service(reply) as address, timeline.connect(address, timeout=ANSWER_S) as tl:
        said = ProbeResult.GRPC.said(address)
        for told in await asyncio.gather(*(call(tl) for call in CALLS), return_exceptions=True):
            assert isinstance(told, timeline.Unavailable) and said in told.reason, told

        def without_await() -> None:
            with timeline.connect_sync(address, timeout=ANSWER_S) as plain:
                plain.topics()

        with pytest.raises(timeline.Unavailable, match="no Timeline broker"):
            await asyncio.to_thread(without_await)
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            code = await asyncio.to_thread(run, ["topic", "list", "--address", address, "--timeout", ANSWER_S])
        assert code == UNREACHABLE and said in errors.getvalue()


async def test_a_broker_beside_another_service_is_found(broker: Broker) -> None:
    async with another_service(None) as address, timeline.connect([address, broker.address], timeout="20s") as tl:
        for _ in range(5):
            assert await tl.topics() == []


async def told_of(address: str, answer: ProbeResult) -> None:
    """The Python driver and the command line say it, too, each in its words."""
    transport = GrpcTransport(address)
    with pytest.raises(TransportError) as told:
        await transport.ready(WAIT_S)
    await transport.close()
    assert (told.value.fault, told.value.reason) == (Fault.UNREACHABLE, answer.said(address))
    assert ("nobody listens" in told.value.reason) == (answer is ProbeResult.NOBODY)
    # Of TLS the driver's own sentence tells all there is to tell.
    error = timeline.Unavailable(told.value.reason)
    error.found = (answer.name,)
    said = await no_answer(address, error)
    if answer is ProbeResult.TLS:
        assert said is None
    else:
        assert said is not None and said.nobody and said.found == f"no broker at {address} ({answer.short})"
