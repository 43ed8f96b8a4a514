"""Commands whose broker does what it is asked, and whose answers are lost: what they say, and their exit codes."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.cli.conftest import Call
from timeline.driver.transport.grpc_transport import GrpcStream, GrpcTransport
from timeline.wire import Fault, TransportError

LOST = TransportError(Fault.BROKEN, "the connection was cut")
READS = (
    "topic list",
    "topic show TOPIC",
    "show TOPIC a",
    "ls TOPIC",
    "forecast TOPIC",
    "late",
    "why TOPIC a",
    "dead list TOPIC",
    "cluster",
    "top --once",
    "move TOPIC --tag spring --by 1h --dry-run",
    "cancel TOPIC --tag spring --dry-run",
    # These look before they change anything.
    "move TOPIC --tag spring --by 1h",
    "cancel TOPIC --tag spring",
    "topic create TOPIC2",
)
WRITES = (
    "topic update TOPIC --lease 1m",
    "topic pause TOPIC",
    "topic drop TOPIC --yes",
    "produce TOPIC x --in 1h --id b",
    "move TOPIC a --in 2h",
    "move TOPIC a --in 2h --if-version 1",
    "cancel TOPIC a",
    "dead revive TOPIC a",
    "dead purge TOPIC a --yes",
)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no answer arrives."""
    unary, receive = GrpcTransport.unary, GrpcStream.receive

    async def no_answer(transport: GrpcTransport, method: str, frame: bytes, timeout_s: float) -> bytes:
        await unary(transport, method, frame, timeout_s)
        raise LOST

    async def no_pages(*asked: object) -> AsyncGenerator[bytes, None]:
        raise LOST
        yield b""

    async def no_frame(stream: GrpcStream) -> bytes | None:
        await receive(stream)
        raise LOST

    monkeypatch.setattr(GrpcTransport, "unary", no_answer)
    monkeypatch.setattr(GrpcTransport, "unary_stream", no_pages)
    monkeypatch.setattr(GrpcStream, "receive", no_frame)


def _said(tell: Call, topic: str, command: str) -> str:
    done = tell(*(word.replace("TOPIC", topic) for word in command.split()), "--timeout", "300ms")
    assert done.code == 3, (command, done)
    return done.err


@pytest.mark.slow
@pytest.mark.parametrize("command", READS)
def test_what_only_reads_is_unavailable(tell: Call, topic: str, lost: None, command: str) -> None:
    said = _said(tell, topic, command)
    assert "UNAVAILABLE" in said and "UNKNOWN" not in said


@pytest.mark.slow
@pytest.mark.parametrize("command", WRITES)
def test_what_changes_something_is_unknown(tell: Call, topic: str, lost: None, command: str) -> None:
    said = _said(tell, topic, command)
    assert said.startswith("timeline: UNKNOWN") and "may or may not have happened" in said
