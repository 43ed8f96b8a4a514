"""The way from one broker to another: files that change or go while it runs, and what its answers mean."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.security.conftest import Papers
from tests.security.guarded import Guarded, Tokens
from timeline.broker.server.calls import GrpcPeerChannel
from timeline.broker.server.certificates import Certificates
from timeline.clock import Clock
from timeline.credentials import Credentials
from timeline.wire import SERVICE, Fault, Ping, Pong, TransportError, decode_as, encode

PATIENCE_S = 30.0


async def ask(way: GrpcPeerChannel) -> str:
    """Who answers, or why nobody does."""
    try:
        return decode_as(await way.unary("Ping", encode(Ping(0.0)), PATIENCE_S), Pong).broker
    except TransportError as fault:
        assert fault.fault is Fault.BROKEN
        return fault.reason


async def test_a_renewed_certificate_is_shown_though_the_connection_was_made_with_the_old_one(
    papers: Papers, tmp_path: Path
) -> None:
    broker = Guarded(None, Certificates(papers.broker.cert, papers.broker.key, papers.theirs.ca, Clock().now_ms))
    await broker.start()
    cert, key = str(tmp_path / "mine.pem"), str(tmp_path / "mine.key")
    shutil.copy(papers.client.cert, cert)
    shutil.copy(papers.client.key, key)
    way = GrpcPeerChannel(broker.address, Credentials(tls=True, ca=papers.ours.ca, cert=cert, key=key))
    try:
        assert await ask(way) != "guarded"  # nobody there trusts who signed it
        shutil.copy(papers.stranger.cert, cert)
        shutil.copy(papers.stranger.key, key)
        assert await ask(way) != "guarded"
        assert await ask(way) == "guarded"
        Path(key).unlink()
        assert await ask(way) == "guarded"  # what stands goes on
    finally:
        await way.close()
        await broker.stop()


async def test_a_token_file_that_is_gone_is_a_broken_way_and_no_error_of_this_broker(
    guarded: Guarded, tokens: Tokens, tmp_path: Path
) -> None:
    file = tmp_path / "broker.token"
    way = GrpcPeerChannel(guarded.address, Credentials(token_file=str(file)))
    try:
        assert f"the token file {str(file)!r} cannot be read: No such file" in await ask(way)
        file.write_text(tokens.add("b2", "broker"))
        guarded.look()
        assert await ask(way) == "guarded"
        file.unlink()
        assert await ask(way) == "guarded"
    finally:
        await way.close()


async def test_a_broker_that_has_too_much_to_do_is_told_from_one_that_is_not_there() -> None:
    class Busy(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
        def service(self, details: Any) -> Any:
            assert details.method == f"/{SERVICE}/Hint"
            return grpc.unary_unary_rpc_method_handler(self._refuse)

        async def _refuse(self, frame: bytes, context: Any) -> None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "later")

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Busy(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    way = GrpcPeerChannel(f"127.0.0.1:{port}")
    try:
        for fault in (Fault.OVERLOADED, Fault.BROKEN):
            with pytest.raises(TransportError) as told:
                await way.unary("Hint", b"", PATIENCE_S)
            assert told.value.fault is fault
            await server.stop(None)
    finally:
        await way.close()
