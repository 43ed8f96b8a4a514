"""TLS between drivers and a broker: what works, and what is said where it does not."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import timeline
from tests.security.certificates import DAY, NOW, Authority, Pair
from tests.security.conftest import Papers
from tests.security.guarded import Guarded
from timeline.broker.server.certificates import Certificates
from timeline.clock import Clock
from timeline.credentials import Credentials, credentials_of
from timeline.driver.transport import addresses as probing
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.driver.transport.relay import RelayTransport
from timeline.errors import Invalid
from timeline.wire import Fault, Ping, Pong, TransportError, decode_as, encode

Start = Callable[..., Coroutine[Any, Any, Guarded]]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer for a handshake than a person waits."""
    monkeypatch.setattr(probing, "PROBE_S", 20.0)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(pair, client_ca="")` starts a broker that speaks TLS; without a pair one that does not."""
    running: list[Guarded] = []

    async def started(pair: Pair | None = None, client_ca: str = "", at_ms: int = 0) -> Guarded:
        clock = (lambda: at_ms) if at_ms else Clock().now_ms
        made = Guarded(None, Certificates(pair.cert, pair.key, client_ca, clock) if pair else None)
        running.append(made)
        await made.start()
        return made

    yield started
    for each in running:
        await each.stop()


async def trouble(address: str, **how: Any) -> str:
    """Why no connection can be made."""
    transport = GrpcTransport(address, credentials_of(**how))
    with pytest.raises(TransportError) as told:
        await transport.ready(60.0)
    await transport.close()
    assert told.value.fault is Fault.UNREACHABLE
    return told.value.reason


async def test_a_broker_and_its_drivers_speak_tls(start: Start, papers: Papers) -> None:
    broker = await start(papers.broker)
    async with timeline.connect(broker.address, timeout="20s", ca=papers.ours.ca) as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p, tl.consumer("t", id="c") as c:
            await p.produce(b"x", in_=0, id="m")
            delivery = await anext(aiter(c))
            assert (delivery.id, delivery.payload) == ("m", b"x")
            await delivery.ack()


@pytest.mark.slow
async def test_mutual_tls_lets_in_whom_its_authorities_signed(start: Start, papers: Papers) -> None:
    broker = await start(papers.broker, papers.ours.ca)
    mine = {"ca": papers.ours.ca, "cert": papers.client.cert, "key": papers.client.key}
    async with timeline.connect(broker.address, timeout="20s", **mine) as tl:
        assert (await tl.ping()).broker == "guarded"
    assert "wants to see a certificate: connect with cert= and key=" in await trouble(broker.address, ca=papers.ours.ca)
    stranger = {"cert": papers.stranger.cert, "key": papers.stranger.key}
    assert "does not take our certificate" in await trouble(broker.address, ca=papers.ours.ca, **stranger)
    late = {"cert": papers.expired.cert, "key": papers.expired.key}
    assert "does not take our certificate" in await trouble(broker.address, ca=papers.ours.ca, **late)


@pytest.mark.slow
async def test_what_is_wrong_with_a_broker_s_certificate_is_said(start: Start, papers: Papers) -> None:
    good = await start(papers.broker)
    assert "none of the authorities in ca=" in await trouble(good.address, ca=papers.theirs.ca)
    assert "none of the authorities" in await trouble(good.address, tls=True)
    expired = await start(papers.expired, at_ms=int((NOW - 5 * DAY).timestamp() * 1000))  # its clock is wrong
    assert "it has expired, have it renewed" in await trouble(expired.address, ca=papers.ours.ca)
    other = await start(papers.ours.issue("other", "elsewhere.example"))
    assert "made out to another name" in await trouble(other.address, ca=papers.ours.ca)


async def test_one_side_with_tls_and_the_other_without(start: Start, papers: Papers) -> None:
    encrypted, plain = await start(papers.broker), await start()
    mutual = await start(papers.broker, papers.ours.ca)
    assert "speaks TLS: connect with tls=True, or ca=FILE" in await trouble(encrypted.address)
    assert "speaks TLS: connect with tls=True, or ca=FILE" in await trouble(mutual.address)
    assert "does not speak TLS" in await trouble(plain.address, ca=papers.ours.ca)
    assert "nobody listens at localhost:1" in await trouble("localhost:1", ca=papers.ours.ca)
    assert "nobody listens at localhost:1" in await trouble("localhost:1")


@pytest.mark.slow
async def test_a_renewed_certificate_is_served_and_what_stands_goes_on(
    start: Start, papers: Papers, tmp_path: Path
) -> None:
    pair = Pair(str(tmp_path / "broker.pem"), str(tmp_path / "broker.key"))
    for file, source in ((pair.cert, papers.broker.cert), (pair.key, papers.broker.key)):
        shutil.copy(source, file)
    broker = await start(pair)
    async with timeline.connect(broker.address, timeout="20s", ca=papers.ours.ca) as standing:
        await standing.ping()
        fresh = Authority(tmp_path, "fresh").issue("broker", "localhost", file="renewed")
        shutil.copy(fresh.cert, pair.cert)
        broker.look()  # half of it is there: the old one stays
        async with timeline.connect(broker.address, timeout="20s", ca=papers.ours.ca) as tl:
            await tl.ping()
        shutil.copy(fresh.key, pair.key)
        broker.look()
        async with timeline.connect(broker.address, timeout="20s", ca=str(tmp_path / "fresh.ca.pem")) as tl:
            await tl.ping()
        assert "none of the authorities" in await trouble(broker.address, ca=papers.ours.ca)
        await standing.ping()


async def test_a_driver_reads_its_files_again_for_each_connection(start: Start, papers: Papers, tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    shutil.copy(papers.theirs.ca, ca)
    broker = await start(papers.broker)
    transport = GrpcTransport(broker.address, credentials_of(ca=ca))
    with pytest.raises(TransportError, match="none of the authorities"):
        await transport.ready(60.0)
    shutil.copy(papers.ours.ca, ca)
    assert decode_as(await transport.unary("Ping", encode(Ping(1.5)), 60.0), Pong).broker == "guarded"
    await transport.close()


@pytest.mark.processes
async def test_a_relay_connects_as_its_parent_would(start: Start, papers: Papers) -> None:
    broker = await start(papers.broker, papers.ours.ca)
    mine = Credentials(True, papers.ours.ca, papers.client.cert, papers.client.key)
    relay = RelayTransport(broker.address, mine)
    pong = decode_as(await relay.unary("Ping", encode(Ping(1.5)), 20.0), Pong)
    assert pong.broker == "guarded"
    await relay.close()


async def test_connections_that_say_nothing_keep_nobody_out(start: Start, papers: Papers) -> None:
    """A flood before the handshake: connections that never speak TLS; who does is served meanwhile."""
    broker = await start(papers.broker)
    silent = [await asyncio.open_connection("127.0.0.1", broker.port) for _ in range(200)]
    try:
        async with timeline.connect(broker.address, timeout="20s", ca=papers.ours.ca) as tl:
            assert (await tl.ping()).broker == "guarded"
    finally:
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"ca": "/no/such.pem"}, "the CA '/no/such.pem' cannot be read: No such file"),
        ({"ca": __file__}, "must be certificates of authorities, in PEM"),
        ({"ca": os.devnull}, "must be a plain file"),
        ({"cert": "client.cert"}, "takes both: the certificate and its key"),
        ({"tls": False, "ca": "x.pem"}, "leave one of them out"),
        ({"ca": 5}, "ca is the name of a PEM file, not 5"),
        ({"token": 5}, "token is a text"),
        ({"token": Path("/no/such.token")}, "the token file '/no/such.token' cannot be read"),
    ],
)
def test_credentials_that_cannot_be_used_are_refused_at_once(how: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        timeline.connect("localhost:9000", **how)
    with pytest.raises(Invalid, match=says):
        timeline.connect_sync("localhost:9000", **how)


def test_a_certificate_and_another_s_key_are_refused(papers: Papers) -> None:
    with pytest.raises(Invalid, match="is not that of the certificate"):
        timeline.connect("localhost:9000", cert=papers.client.cert, key=papers.broker.key)
