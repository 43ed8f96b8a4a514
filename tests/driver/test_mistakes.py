"""Mistakes inside the driver: whoever waits is told, the log has the trace, and the next call starts afresh."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

import timeline
from tests.driver.broker import Broker
from timeline.driver.client import Timeline
from timeline.driver.tasks import all_of, end, run_until_first
from timeline.driver.transport.grpc_transport import GrpcTransport


class _Stumbling(GrpcTransport):
    """The real way, on which what `stumble` names fails once, as no transport should."""

    stumble = ""

    def _trip(self, where: str) -> None:
        if _Stumbling.stumble == where:
            _Stumbling.stumble = ""
            raise RuntimeError("a mistake")

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        self._trip("unary")
        return await super().unary(method, frame, timeout_s)

    async def stream(self, method: str, timeout_s: float) -> Any:
        stream = await super().stream(method, timeout_s)
        send, receive = stream.send, stream.receive

        async def tripping_send(frame: bytes) -> None:
            self._trip("send")
            await send(frame)

        async def tripping_receive() -> bytes | None:
            data = await receive()
            self._trip("receive")
            return data

        stream.send, stream.receive = tripping_send, tripping_receive  # type: ignore[method-assign]
        return stream


@pytest.fixture
async def stumbling(broker: Broker) -> AsyncIterator[Timeline]:
    """A client whose transport can be made to fail."""
    async with Timeline(broker.address, "10m", transport_factory=_Stumbling) as tl:
        await tl.create_topic("t")
        yield tl
        _Stumbling.stumble = ""


@pytest.mark.parametrize("where", ["send", "receive"])
async def test_a_mistake_on_a_produce_stream_ends_its_calls(
    stumbling: Timeline, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with stumbling.producer("t") as p:
        _Stumbling.stumble = where
        # What was sent when it happened may have been done.
        with caplog.at_level(logging.ERROR), pytest.raises(timeline.Unknown, match="a mistake") as told:
            await p.produce(b"", in_="1h", id="m")
        assert told.value.id == "m" and "RuntimeError: a mistake" in caplog.text
        assert (await p.produce(b"", in_="1h", id="m")).ok


async def test_a_mistake_in_a_change_ends_it(stumbling: Timeline, caplog: pytest.LogCaptureFixture) -> None:
    async with stumbling.producer("t") as p:
        await p.produce(b"", in_="1h", id="m")
        _Stumbling.stumble = "unary"
        with caplog.at_level(logging.ERROR), pytest.raises(timeline.Unknown, match="a mistake"):
            await p.move("m", in_="2h")
        assert "RuntimeError: a mistake" in caplog.text
        assert (await p.move("m", in_="2h")).version == 2


async def test_a_mistake_in_the_loop_of_changes_ends_them(
    stumbling: Timeline, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stumbling.producer("t") as p:
        queue = p._queue(timeline.driver.mutations.Operation.MOVE)  # type: ignore[attr-defined]
        follows = queue.next

        def stumbles(form: bool = True) -> Any:
            monkeypatch.setattr(queue, "next", follows)
            raise RuntimeError("a mistake")

        monkeypatch.setattr(queue, "next", stumbles)
        with caplog.at_level(logging.ERROR), pytest.raises(timeline.Unavailable, match="a mistake"):
            await p.move("m", in_="2h")
        with pytest.raises(timeline.NotFound):
            await p.move("m", in_="2h")


@pytest.mark.parametrize("where", ["send", "receive"])
async def test_a_mistake_on_a_consume_stream_is_told_to_whoever_iterates(stumbling: Timeline, where: str) -> None:
    async with stumbling.producer("t") as p, stumbling.consumer("t", id="w") as c:
        await p.produce(b"", in_=0)
        _Stumbling.stumble = where
        with pytest.raises(timeline.Unavailable, match="a mistake"):
            await c.take()
        d = await c.take()
        assert d is not None
        await d.ack()


async def test_a_mistake_while_keeping_leases_ends_a_run(stumbling: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stumbles(self: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr("timeline.driver.consume.handlers._Crew.keep", stumbles)
    async with stumbling.consumer("t", id="w") as c:
        with pytest.raises(RuntimeError, match="a mistake"):
            await c.run(print)


async def _fails() -> None:
    raise RuntimeError("a mistake")


async def _lasts(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("ended")


async def test_work_and_what_runs_beside_it_end_together() -> None:
    ended: list[str] = []
    await run_until_first(asyncio.sleep(0), _lasts(ended))
    with pytest.raises(RuntimeError, match="a mistake"):
        await run_until_first(_lasts(ended), _fails())
    with pytest.raises(RuntimeError, match="a mistake"):
        await run_until_first(_fails(), _lasts(ended))
    assert len(ended) == 3
    failed = asyncio.ensure_future(_fails())
    await asyncio.wait({failed})
    with pytest.raises(RuntimeError, match="a mistake"):
        await end(failed)
    await end()
    with pytest.raises(RuntimeError, match="a mistake"):
        await all_of(_fails(), asyncio.sleep(0), _note(ended))
    assert len(ended) == 4


async def _note(ended: list[str]) -> None:
    await asyncio.sleep(0)
    ended.append("noted")
