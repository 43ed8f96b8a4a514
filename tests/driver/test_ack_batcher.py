"""Acks that nobody waits for: how long they gather, and what sends them at once. In virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import timeline
from tests.driver.broker import Broker
from tests.driver.test_in_flight import _frame
from tests.simulation.loop import Timer, VirtualLoop
from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.driver.consume.in_flight import HANDED, SETTLING, DeliveredFrame, InFlight
from timeline.driver.consume.settler import GATHER_MESSAGES, GATHER_MS, LEASE_LEFT_MS, AckBatcher
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.wire import Settle, decode


class _Table:
    """A hand with one load of messages handed out, what gathers of it, and virtual time."""

    def __init__(self, credit: int = 1_000, credit_bytes: int = 1_000_000, lease_ms: float = 60_000.0) -> None:
        self.loop = VirtualLoop(random.Random(1))
        self.clock = Clock(self.loop.time, self.loop.time)
        self.in_flight = InFlight(credit, credit_bytes)
        self.frame: DeliveredFrame = _frame(200, self.clock.monotonic_ms() + lease_ms)
        self.in_flight.arrive(self.frame)
        self.in_flight.next_batch(self.clock.monotonic_ms())
        self.woken = 0
        self.gathering = AckBatcher(self.in_flight, self.clock, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def ack(self, count: int, start: int = 0) -> None:
        """Acks so many, from `start` on."""

        async def work() -> None:
            for index in range(start, start + count):
                self.gathering.add(self.frame, index)

        self.loop.run_until_complete(work())

    def wait(self, ms: float) -> None:
        self.loop.run_until_complete(Timer(self.loop).wait(ms / 1000.0))

    def taken(self) -> list[int]:
        return [index for _, at in self.gathering.take() for index in at.tolist()]


@pytest.fixture
def table() -> Callable[..., _Table]:
    return _Table


def test_a_lone_ack_waits_for_others_and_not_for_long(table: Callable[..., _Table]) -> None:
    t = table()
    t.ack(1)
    t.wait(GATHER_MS - 1.0)
    assert not t.gathering.ripe and not t.woken and t.gathering
    t.ack(1, start=1)
    t.wait(1.1)
    assert t.gathering.ripe and t.woken == 1
    assert t.taken() == [0, 1] and not t.in_flight.credit.owed  # credit goes back with the frame, not before
    assert not t.gathering and not t.gathering.ripe
    t.wait(10 * GATHER_MS)
    assert t.woken == 1  # nothing gathers: nothing wakes


def test_as_many_as_fill_a_good_frame_go_at_once(table: Callable[..., _Table]) -> None:
    t = table()
    t.ack(GATHER_MESSAGES - 1)
    assert not t.gathering.ripe
    t.ack(3, start=GATHER_MESSAGES - 1)
    assert t.gathering.ripe and t.woken == 1 and len(t.taken()) == GATHER_MESSAGES + 2
    t.wait(10 * GATHER_MS)
    assert t.woken == 1  # no timer of the first is left behind


@pytest.mark.parametrize(
    ("credit", "credit_bytes", "at_once"), [(1, 9_999, 1), (2, 9_999, 1), (9, 9_999, 4), (99, 50, 3)]
)
def test_half_of_the_credit_does_not_wait(
    table: Callable[..., _Table], credit: int, credit_bytes: int, at_once: int
) -> None:
    t = table(credit, credit_bytes)
    t.ack(at_once - 1)
    assert not t.gathering.ripe
    t.ack(1, start=at_once - 1)
    assert t.gathering.ripe


def test_a_lease_that_is_about_to_end_does_not_wait(table: Callable[..., _Table]) -> None:
    t = table(lease_ms=LEASE_LEFT_MS + 1.0)
    t.ack(1)
    assert not t.gathering.ripe
    t.frame.end_ms[7] -= 2.0
    t.frame.earliest_ms -= 2.0
    t.ack(1, start=6)
    assert not t.gathering.ripe
    t.ack(1, start=7)
    assert t.gathering.ripe


def test_many_of_a_batch_count_as_one_by_one(table: Callable[..., _Table]) -> None:
    t = table()

    async def work() -> None:
        t.gathering.add_all(t.frame, np.arange(0))
        assert not t.gathering
        t.gathering.add_all(t.frame, np.arange(5))
        assert not t.gathering.ripe
        t.gathering.add_all(t.frame, np.arange(5, GATHER_MESSAGES))

    t.loop.run_until_complete(work())
    assert t.gathering.ripe and t.taken() == list(range(GATHER_MESSAGES))
    assert t.frame.state[0] == SETTLING and t.frame.state[GATHER_MESSAGES] == HANDED


class _Watched(GrpcTransport):
    """The real way, on which settles are noted as they go."""

    settles: list[list[bytes]]

    async def stream(self, method: str, timeout_s: float) -> Any:
        stream = await super().stream(method, timeout_s)
        send = stream.send

        async def noted(data: bytes) -> None:
            frame = decode(data)
            if isinstance(frame, Settle):
                self.settles.append(frame.ids.tolist())
            await send(data)

        stream.send = noted  # type: ignore[method-assign]
        return stream


async def test_a_settle_that_is_awaited_takes_along_what_has_gathered(broker: Broker) -> None:
    settles: list[list[bytes]] = []

    def watched(address: str) -> _Watched:
        made = _Watched(address)
        made.settles = settles
        return made

    async with Timeline(broker.address, "10s", transport_factory=watched) as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            await p.produce_many([timeline.Message(b"", in_=0, id=f"m{n}") for n in range(4)])
            first, second, third, last = [await anext(aiter(c)) for _ in range(4)]
            first.ack_soon()
            second.ack_soon()
            await third.release(in_="1h")
            assert [ids for ids in settles if third.id.encode() not in ids] == [[first.id.encode(), second.id.encode()]]
            last.ack_soon()
        assert settles[-1] == [last.id.encode()]  # closing does not leave it behind
        assert [m.id async for m in tl.scan("t")] == [third.id]
