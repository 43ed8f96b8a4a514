"""Scans that break off: what is there is told whole, or it is said that it is not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import timeline
from tests.driver.broker import Broker
from tests.simulation.loop import Timer, VirtualLoop
from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.model import Rows
from timeline.storage_plugins.contract import StoreUnknown
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import Fault, ScanPage, TransportError, encode


class _Stuck(GrpcTransport):
    """An address that answers the first page of a scan, and no other."""

    async def unary_stream(self, method: str, frame: bytes, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        async for page in super().unary_stream(method, frame, timeout_s):
            yield page
            await asyncio.Event().wait()


async def test_a_scan_that_gets_no_page_in_time_ends(broker: Broker, tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce_many([timeline.Message(b"x" * 700_000, in_="1h") for _ in range(3)])
    async with Timeline(broker.address, "20s", transport_factory=_Stuck) as stuck:
        got = 0
        with pytest.raises(timeline.Unavailable, match=r"the scan broke off.*no page in time"):
            async for _ in stuck.scan("t", payload=True, timeout="150ms"):
                got += 1
        assert got


class _Torn(MemoryStore):
    """A store that cannot say, after the first page of a scan, what became of the next; `times` over."""

    times = 1

    async def scan(self, *asked: Any) -> Any:
        if asked[3] and self.times:
            self.times -= 1
            raise StoreUnknown("the connection to the store broke")
        return await super().scan(*asked)


@pytest.mark.slow
async def test_a_scan_that_a_broker_ends_in_its_middle_is_never_taken_for_whole() -> None:
    store = _Torn()
    broker = Broker(store)
    await broker.start()
    try:
        async with Timeline(broker.address, "20s") as tl:
            await tl.create_topic("t")
            async with tl.producer("t") as p:
                await p.produce_many([timeline.Message(b"x", in_="1h", id=f"m{at:04}") for at in range(1_500)])
            assert len({m.id async for m in tl.scan("t")}) == 1_500  # it goes on where it was
            store.times = 1 << 30
            with pytest.raises(timeline.Unavailable, match="broke"):  # the scan, or the store under it
                async for _ in tl.scan("t", timeout="150ms"):
                    pass
    finally:
        await broker.stop()


async def test_a_scan_under_way_when_the_client_closes_says_so(broker: Broker, tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce_many([timeline.Message(b"x" * 700_000, in_="1h") for _ in range(12)])
    pages = tl.scan_pages("t", payload=True)
    assert len((await anext(pages)).rows)
    await tl.aclose()
    with pytest.raises(timeline.Closed):
        while True:
            await anext(pages)


@pytest.mark.parametrize(
    ("asked", "mends"),
    [
        *(({"buckets": one}, "buckets= is a pair") for one in ("x", (-1, 3), (1.5, 3), (3, 3), (1,), 5, (0, 5_000))),
        *(({"limit": limit}, "limit must be a whole number from 0") for limit in (2**63, -1, True, "x")),
        *(({"ids": ids}, "ids must be a list of ids") for ids in ("abc", b"abc", 5)),
        ({"ids": ["a", 5]}, r"ids\[1\]: an id is text"),
    ],
)
async def test_a_scan_of_what_cannot_be_is_refused(tl: timeline.Timeline, asked: dict[str, Any], mends: str) -> None:
    with pytest.raises(timeline.Invalid, match=mends):
        _ = [page async for page in tl.scan_pages("t", **asked)]


class _Pages(GrpcTransport):
    """The way to two brokers. Behind a:1 nobody answers; b:1 breaks off after its first page, and then sends the last
    one."""

    pages = 0

    async def unary_stream(self, method: str, frame: bytes, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        if self.address == "a:1":
            await asyncio.Event().wait()
        self.pages += 1
        yield encode(ScanPage(Rows.blank(0), 0, b"on" if self.pages == 1 else b""))
        raise TransportError(Fault.BROKEN, "reset")


async def _scanned_slowly(loop: VirtualLoop, addresses: str, pause_s: float) -> tuple[list[bytes], float]:
    """Return the cursor of each page, and when the first came, in virtual seconds."""
    began_s, came_s, cursors = loop.time(), list[float](), list[bytes]()
    clock = Clock(loop.time, loop.time)
    async with Timeline(addresses, "4s", transport_factory=_Pages, clock=clock, random=random.Random(1)) as tl:
        tl._context.channel.worked("a:1" if "a:1" in addresses else "b:1")
        async for page in tl.scan_pages("t"):
            came_s.append(loop.time() - began_s)
            cursors.append(page.cursor)
            await Timer(loop).wait(pause_s)
    return cursors, came_s[0]


def test_the_callers_own_time_between_pages_is_not_the_brokers() -> None:
    loop = VirtualLoop(random.Random(1))
    assert loop.run_until_complete(_scanned_slowly(loop, "b:1", 60.0)) == ([b"on", b""], pytest.approx(0.0))
    loop.finish()


def test_a_scan_leaves_time_for_another_broker_if_the_first_is_silent() -> None:
    loop = VirtualLoop(random.Random(1))
    assert loop.run_until_complete(_scanned_slowly(loop, "a:1,b:1", 0.0)) == ([b"on", b""], pytest.approx(2.0, abs=0.1))
    loop.finish()
