"""What a careful library does: a damaged payload, a call without await, names that are out of range, a quick import."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

import timeline
from tests.driver.broker import Broker
from timeline.columns import Ragged
from timeline.driver.client import Timeline
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.wire import Deliver, Stream, decode, encode


class _Damaging(GrpcTransport):
    """The real way, on which the payloads of deliveries lose a bit."""

    async def stream(self, method: str, timeout_s: float) -> Any:
        return _DamagingStream(await super().stream(method, timeout_s))


class _DamagingStream:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.send, self.close, self.cancel = stream.send, stream.close, stream.cancel

    async def receive(self) -> bytes | None:
        data = await self._stream.receive()
        frame = decode(data) if data is not None else None
        if isinstance(frame, Deliver):
            frame.payloads = Ragged.of([b"Spoilt" if item == b"spoilt" else item for item in frame.payloads])
            return encode(frame)
        return data


async def test_a_damaged_payload_is_buried_and_never_handed_out(broker: Broker) -> None:
    async with Timeline(broker.address, "10s", transport_factory=_Damaging) as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            await p.produce(b"spoilt", in_=0, id="bad")
            await p.produce(b"sound", in_=0, id="good")
            d = await c.take()
            assert d is not None and d.id == "good"
            await d.ack()
        assert [(m.id, m.dead) async for m in tl.dead("t")] == [("bad", "payload damaged")]
        assert c.stats.damaged == 1


async def test_a_due_in_the_past_is_delivered_at_once(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"old", at=946_684_800_000)
        d = await c.take()
        assert d is not None and d.payload == b"old" and d.lateness.days > 9_000
        await d.ack()


async def test_a_call_without_await_is_warned_about(tl: timeline.Timeline) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        tl.producer("t").produce(b"", in_=0)  # type: ignore[unused-coroutine]
    assert any("never awaited" in str(warning.message) for warning in told)


@pytest.mark.parametrize(
    "ask",
    [
        lambda tl: tl.producer(""),
        lambda tl: tl.producer("x" * 256),
        lambda tl: tl.producer("a\nb"),
        lambda tl: tl.producer(None),
        lambda tl: tl.producer("t", group=""),
        lambda tl: tl.producer("t", group="x" * 256),
        lambda tl: tl.consumer("t", id=""),
        lambda tl: tl.consumer("t", id="x" * 256),
        lambda tl: tl.consumer("t", id="a\0"),
        lambda tl: tl.consumer("t", lease="0s"),
        lambda tl: tl.consumer("t", credit=0),
        lambda tl: tl.consumer("t", credit=1.5),
        lambda tl: tl.consumer("t", credit_bytes=True),
    ],
)
def test_names_and_numbers_out_of_range_are_refused_at_once(ask: Any) -> None:
    with pytest.raises(timeline.Invalid):
        ask(timeline.connect("localhost:9000"))


async def test_calls_out_of_range_are_refused_before_anything_is_sent() -> None:
    tl = timeline.connect("127.0.0.1:1", timeout="1h")
    p = tl.producer("t")
    for call in (
        p.produce("text", in_=0),  # type: ignore[arg-type]
        p.produce(b"", in_=0, at=1_900_000_000_000),
        p.produce(b"", in_=0, if_exists="skip"),
        p.produce(b"", in_=0, timeout="0s"),
        p.move("m"),
        p.move("", in_=0),
        p.cancel("m", if_version=0),
        p.cancel("m", if_version=True),
        p.cancel("m", if_version=2**63),
        p.move_many("m", in_=0),
        p.move_many(["m"], at=[1_900_000_000_000] * 2),
        p.move_tag("x"),
        p.move_tag("x", at=1_900_000_000_000, by="1h"),
        p.move_tag("x", by=b"1h"),  # type: ignore[arg-type]
        p.move_tag("x", by=[]),  # type: ignore[arg-type]
        p.move_tag("x", by=True),
        p.move_tag("x", by=float("nan")),
        p.move_tag("x", in_="1h", dry_run="x"),  # type: ignore[arg-type]
        p.cancel_tag("x", dry_run=1),  # type: ignore[arg-type]
        p.cancel_tag("x", leased="x"),  # type: ignore[arg-type]
        p.cancel_tag(""),
        tl.get("t", ""),
        tl.forecast("t", window="10d", step="1s"),
        tl.create_topic("", lease="1s"),
        tl.update_topic("t"),
        tl.late("0s"),
        tl.late(topic="a\nb"),
        tl.standing("a\nb"),
        p.cancel_many(5),  # type: ignore[arg-type]
        p.cancel_many(b"m"),
        p.move_many(["m"], at=np.array([1_900_000_000_000] * 2)),
        tl.consumer("t").run(print, backoff=5),  # type: ignore[arg-type]
    ):
        with pytest.raises(timeline.Invalid):
            await call
    for pages in (tl.scan("t", state="asleep"), tl.scan("t", limit=-1), tl.scan("t", due=(5, None))):
        with pytest.raises(timeline.Invalid):
            await anext(aiter(pages))
    await tl.aclose()


def test_the_import_is_quick_and_everything_named_is_there() -> None:
    told = "import sys, timeline; print(sorted({'numpy', 'grpc', 'asyncio', 'flatbuffers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for name in timeline.__all__:
        assert getattr(timeline, name) is not None
    assert set(timeline.__all__) <= set(dir(timeline))
    with pytest.raises(AttributeError):
        timeline.nonsense  # noqa: B018


async def test_what_every_broker_refuses_is_invalid_and_not_an_outage(tl: timeline.Timeline) -> None:
    with pytest.raises(timeline.Invalid, match=r"limit is 0; allowed are 1 to 100000"):
        await tl.late(limit=0)
    with pytest.raises(timeline.Invalid, match=r"limit is 0; allowed are 1 to 100000"):
        await tl.standing(consumers=0)
