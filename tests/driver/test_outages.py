"""What calls say, and what becomes of leases, while no broker can be reached or one is at its bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import timeline
from tests.driver.broker import Broker
from tests.driver.test_in_flight import _frame
from tests.simulation.loop import Timer, VirtualLoop
from timeline import wire
from timeline.broker.limits import Limits
from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import DONE, HANDED, SETTLING, InFlight
from timeline.driver.consume.session import QUIET_TIMEOUT_MS, ConsumerSession, Subscription
from timeline.driver.consume.settler import ACK, Settler
from timeline.driver.transport.addresses import NoConnection, ProbeResult
from timeline.driver.transport.channel import Channel, ClientContext
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.errors import TimelineError
from timeline.model import Answers, Status
from timeline.storage_plugins.contract import StoreUnavailable
from timeline.wire import (
    Fault,
    Hello,
    Mutate,
    Mutated,
    Produce,
    Produced,
    TransportError,
    Welcome,
    decode,
    decode_as,
    encode,
)


class _Nowhere(GrpcTransport):
    """An address behind which packets vanish."""

    async def ready(self, timeout_s: float) -> None:
        await asyncio.Event().wait()


class _Nobody(GrpcTransport):
    """An address where nobody listens."""

    async def ready(self, timeout_s: float) -> None:
        raise NoConnection.at(self.address, ProbeResult.NOBODY)


class _SpeaksTls(GrpcTransport):
    """An address whose broker speaks TLS, which a client without it never reaches."""

    async def ready(self, timeout_s: float) -> None:
        raise NoConnection.at(self.address, ProbeResult.TLS)

    async def unary_stream(self, method: str, frame: bytes, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        await self.ready(1.0)
        yield b""


async def _scanned(tl: Timeline) -> list[timeline.StoredMessage]:
    return [message async for message in tl.scan("t")]


@pytest.mark.slow
async def test_errors_of_all_calls_say_that_a_failure_lasts_and_what_was_found() -> None:
    async with Timeline("a:1", "50ms", transport_factory=_SpeaksTls) as tl:
        p = tl.producer("t")
        calls: list[Any] = [
            p.produce(b"", in_=0), p.produce_many([timeline.Message(b"", in_=0)]), p.move("m", in_=0), p.cancel("m"),
            p.move_many(["m", "n"], in_=0), p.purge("m"), p.cancel_tag("x"), _scanned(tl), tl.topics(),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(timeline.Unavailable) as told:
                await call
            assert told.value.lasting and told.value.found == ("TLS",), told.value


@pytest.mark.slow
async def test_a_change_that_was_never_sent_is_unavailable() -> None:
    async with Timeline("a:1", "50ms", transport_factory=_Nowhere) as tl:
        p = tl.producer("t")
        calls: list[Any] = [p.move_many(["m", "n"], in_=0), p.cancel_many(["m"]), p.purge(["m"]), p.cancel("m")]
        for call in calls:
            with pytest.raises(timeline.Unavailable):
                await call


class _NoPing(GrpcTransport):
    """The real way, but for pings: they break, or are never answered when the broker `hangs`."""

    hangs = False

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        if method != "Ping":
            return await super().unary(method, frame, timeout_s)
        if self.hangs:
            await asyncio.Event().wait()
        raise TransportError(Fault.BROKEN, "reset")


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
async def test_a_put_is_not_sent_before_it_is_known_that_the_broker_can_replace(
    broker: Broker, hangs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_NoPing, "hangs", hangs)
    async with Timeline(broker.address, "300ms", transport_factory=_NoPing) as tl:
        await tl.create_topic("t", timeout="20s")
        with pytest.raises(timeline.Unavailable):
            await tl.producer("t").produce(b"x", in_="1h", id="a", if_exists="replace")
        assert await tl.get("t", "a", timeout="20s") is None


class _OpensLate(GrpcTransport):
    """An address that can be reached once `opened` is set. `sent` has the ids of each frame."""

    opened: asyncio.Event
    sent: list[list[bytes]]

    async def ready(self, timeout_s: float) -> None:
        await self.opened.wait()

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        asked = decode_as(frame, Mutate)
        self.sent.append(asked.ids.tolist())
        return encode(Mutated(Answers.blank(len(asked.ids)), 0))


async def test_a_change_that_was_said_to_be_unavailable_is_not_sent_later_with_others() -> None:
    _OpensLate.opened, _OpensLate.sent = asyncio.Event(), []
    async with Timeline("a:1", "20s", transport_factory=_OpensLate) as tl:
        p = tl.producer("t")
        short, long = (
            asyncio.ensure_future(p.move("short", in_=0, timeout="30ms")),
            asyncio.ensure_future(p.move("long", in_=0)),
        )
        with pytest.raises(timeline.Unavailable):
            await short
        _OpensLate.opened.set()
        assert (await long).ok
        assert _OpensLate.sent == [[b"long"]]


async def test_a_change_whose_caller_was_cancelled_is_not_sent_later() -> None:
    _OpensLate.opened, _OpensLate.sent = asyncio.Event(), []
    async with Timeline("a:1", "20s", transport_factory=_OpensLate) as tl:
        p = tl.producer("t")
        cancelled = asyncio.ensure_future(p.move_many(["cancelled", "too"], in_=0))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        _OpensLate.opened.set()
        assert (await p.move_many(["wanted"], in_=0)).counts == {Status.OK: 1}
        assert _OpensLate.sent == [[b"wanted"]]


@pytest.mark.slow
@pytest.mark.parametrize("transport", [_Nowhere, _Nobody])
async def test_who_cannot_be_reached_is_named_once_with_what_to_do(transport: type[GrpcTransport]) -> None:
    async with Timeline("a:1,b:2", "50ms", transport_factory=transport) as tl:
        p = tl.producer("t")
        message = timeline.Message(b"", in_=0)
        for call in (p.produce(b"", in_=0, id="m"), p.produce_many([message]), p.move("m", in_=0)):
            with pytest.raises(timeline.Unavailable) as told:
                await call
            reason = told.value.reason
            assert reason.count("a:1") == reason.count("b:2") == 1 and "timeline serve" in reason
            assert "nothing happened" not in reason  # the advice of Unavailable says so
    async with Timeline("a:1,b:2", "50ms", transport_factory=_Nobody) as tl:
        with pytest.raises(timeline.Unavailable, match=r"a:1.*b:2.*timeline serve"):
            await tl.consumer("t").take()
        with pytest.raises(timeline.Unavailable, match=r"a:1.*b:2.*timeline serve"):
            await tl.topics()


@pytest.mark.slow
async def test_throttled_says_how_long_the_broker_asked_to_wait() -> None:
    broker = Broker(limits=Limits(intake_messages=1, throttle_ms=3_000))
    await broker.start()
    try:
        async with timeline.connect(broker.address, timeout="20s") as tl:
            await tl.create_topic("t")
            async with tl.producer("t") as p:
                await p.produce(b"", in_="1h")
                held = broker.hold()
                first = asyncio.ensure_future(p.produce(b"", in_="1h"))
                while not broker.node.intake.waiting:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
                with pytest.raises(timeline.Throttled) as told:
                    await p.produce(b"", in_="1h", timeout="400ms")
                assert told.value.retry_after_ms == 3_000
                receipts = await p.produce_many([timeline.Message(b"", in_="1h")] * 2, timeout="400ms")
                assert receipts.counts == {Status.THROTTLED: 2}
                assert [one.retry_after_ms for one in receipts.failed[1:]] == [3_000]
                with pytest.raises(timeline.Throttled, match="1 more") as told:
                    receipts.raise_failed()
                assert told.value.retry_after_ms == 3_000
                streamed = [one async for one in p.produce_iter([timeline.Message(b"", in_="1h")], timeout="400ms")]
                with pytest.raises(timeline.Throttled) as told:
                    streamed[0].raise_failed()
                assert told.value.retry_after_ms == 3_000
                held.set()
                assert (await first).ok
    finally:
        await broker.stop()


def test_leases_and_deadlines_end_though_no_broker_is_there() -> None:
    loop, told = VirtualLoop(random.Random(1)), list[TimelineError]()
    clock, in_flight, broker_clock = Clock(loop.time, loop.time), InFlight(10, 1_000), BrokerClock()
    channel = Channel(["a:1"], _Nobody, clock, random.Random(1))
    context = ClientContext(channel, clock, random.Random(1), 1_000.0)
    settler = Settler(context, in_flight, broker_clock, lambda frame, index, error: told.append(error))
    session = ConsumerSession(context, Subscription("t", "w", 1, 0), in_flight, settler, broker_clock)
    session.welcome = Welcome("b1", 0, 30_000, 60_000, 1_000_000, 2_000, ())  # it was connected before
    frame = _frame(3, clock.monotonic_ms() + 2 * QUIET_TIMEOUT_MS)
    frame.end_ms[1] = frame.earliest_ms = clock.monotonic_ms() + 3_000.0
    in_flight.arrive(frame)
    in_flight.next(0.0)
    in_flight.next(0.0)

    async def work() -> None:
        session.start()
        settler.unawaited([(frame, np.array([0]))], ACK, timeout_ms=QUIET_TIMEOUT_MS)
        frame.mark(np.array([0]), SETTLING)
        await Timer(loop).wait(4.0)
        assert (in_flight.stats.lost, list(frame.lost)) == (1, [0, 1, 0]) and not told
        await Timer(loop).wait(QUIET_TIMEOUT_MS / 1_000.0)
        assert [type(error) for error in told] == [timeline.Unavailable] and "a:1" in told[0].reason
        assert frame.state[0] == HANDED and not settler.queue.waiting  # it is ours still, and nothing is left behind
        await Timer(loop).wait(QUIET_TIMEOUT_MS / 1_000.0)
        assert frame.state == bytearray([DONE] * 3) and (in_flight.stats.lost, in_flight.stats.dropped) == (2, 1)
        await session.stop(0.0)

    loop.run_until_complete(work())
    assert loop.failures == []
    loop.finish()


@pytest.mark.slow
async def test_a_settle_that_failed_gives_no_credit_back(broker: Broker, tl: timeline.Timeline) -> None:
    assert broker.node is not None
    store = broker.node.store
    settle = store.settle

    async def fails(*asked: Any) -> Any:
        raise StoreUnavailable("the disk is full")

    async with tl.producer("t") as p, tl.consumer("t", id="w", credit=1) as c:
        for n in range(3):
            await p.produce(b"", in_=0, id=f"m{n}")
        first = await c.take()
        assert first is not None
        store.settle = fails  # type: ignore[method-assign]
        with pytest.raises(timeline.Unavailable, match="the disk is full"):
            await first.ack(timeout="2s")
        store.settle = settle  # type: ignore[method-assign]
        assert c._in_flight.credit.held_messages == 1 and _credit(broker) == 0
        await first.ack()
        for _ in range(2):
            delivery = await c.take()
            assert delivery is not None
            await delivery.ack()
    assert [m async for m in tl.scan("t")] == []


def _credit(broker: Broker) -> int:
    """The credit in messages that the broker knows of its one consumer."""
    assert broker.node is not None
    (dealer,) = broker.node.dealers
    ((_, consumer),) = dealer.roster.consumers.items()
    return consumer.credit_messages


@pytest.mark.parametrize("way", ["batch", "one by one", "soon"])
async def test_where_some_settles_of_a_frame_are_refused_no_more_is_in_flight_than_credit(
    broker: Broker, tl: timeline.Timeline, way: str
) -> None:
    assert broker.node is not None
    store = broker.node.store
    settle = store.settle
    refused = {b"m0"}

    async def refuses(topic: Any, now_ms: int, settles: Any) -> Any:
        good = np.flatnonzero([id not in refused for id in settles.ids.tolist()])
        answers = Answers.blank(len(settles), Status.UNAVAILABLE)
        answers.status[good] = (await settle(topic, now_ms, settles.take(good))).status
        return answers

    async with tl.producer("t") as p, tl.consumer("t", id="w", credit=4, credit_bytes=1_000) as c:
        await p.produce_many([timeline.Message(b"0123456789", in_=0, id=f"m{n}") for n in range(8)])
        taken = await anext(c.batches())
        assert len(taken) == 4
        store.settle = refuses  # type: ignore[method-assign]
        acks: list[asyncio.Future[Any]] = []
        if way == "soon":
            taken.ack_soon()
        elif way == "batch":
            acks.append(asyncio.ensure_future(taken.ack(timeout="30s")))
        else:
            acks.extend(asyncio.ensure_future(one.ack(timeout="30s")) for one in taken)
        more = [await c.take() for _ in range(3)]
        assert [one.id for one in more if one is not None] == ["m4", "m5", "m6"]
        assert _credit(broker) == 0 and c._in_flight.credit.held_messages == 4 and c._in_flight.credit.held_bytes == 40
        refused.clear()
        last = await c.take()
        assert last is not None and last.id == "m7"
        await asyncio.gather(*acks)
        for one in (*more, last):
            assert one is not None
            await one.ack()
    assert c._in_flight.credit.held_messages == 0
    assert [m async for m in tl.scan("t")] == []


def test_closing_waits_once_for_all_that_cannot_be_sent() -> None:
    loop = VirtualLoop(random.Random(1))
    clock = Clock(loop.time, loop.time)

    async def work() -> float:
        tl = Timeline("a:1", "2s", transport_factory=_Nobody, clock=clock, random=random.Random(1))
        calls = [asyncio.ensure_future(tl.producer("t").produce(b"", in_=0, timeout="1h")) for _ in range(5)]
        await Timer(loop).wait(0.1)
        began_s = loop.time()
        await tl.aclose()
        took_s = loop.time() - began_s
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, timeline.Unavailable) and "closed before" in outcome.reason
        return took_s

    assert loop.run_until_complete(work()) == pytest.approx(2.0, abs=0.01)
    assert loop.failures == []
    loop.finish()


class _Spoken:
    """A stream to a broker that answers after a second. One that is `frozen` takes one frame, greets a consumer, and
    reads no more: the next send waits for ever."""

    def __init__(self, loop: VirtualLoop, frozen: bool) -> None:
        self._loop, self._frozen = loop, frozen
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.sent: list[Any] = []

    async def send(self, frame: bytes) -> None:
        if self._frozen and self.sent:
            await asyncio.Event().wait()
        self.sent.append(asked := decode(frame))
        if isinstance(asked, Hello):
            self._answers.put_nowait(encode(Welcome("b", 0, 30_000, 60_000, 1_000_000, 2_000, ())))
        elif isinstance(asked, Produce) and not self._frozen:
            answer = encode(Produced(asked.request, Answers.blank(len(asked.ids)), 0))
            self._loop.call_later(1.0, self._answers.put_nowait, answer)

    async def receive(self) -> bytes | None:
        return await self._answers.get()

    async def close(self) -> None:
        self._answers.put_nowait(None)

    def cancel(self) -> None:
        self._answers.put_nowait(None)


class _Speaks(GrpcTransport):
    """The way to such brokers. The one at a:1 is frozen. `streams`: those that were opened, by address."""

    streams: dict[str, list[_Spoken]]

    async def stream(self, method: str, timeout_s: float) -> _Spoken:  # type: ignore[override]
        stream = _Spoken(asyncio.get_running_loop(), self.address == "a:1")  # type: ignore[arg-type]
        self.streams.setdefault(self.address, []).append(stream)
        return stream


def _speaking(loop: VirtualLoop, addresses: str) -> Timeline:
    """A client of those brokers, at the first of them."""
    _Speaks.streams = {}
    clock = Clock(loop.time, loop.time)
    tl = Timeline(addresses, "4s", transport_factory=_Speaks, clock=clock, random=random.Random(1))
    tl._context.channel.worked(addresses.split(",")[0])
    return tl


def test_a_broker_that_reads_no_more_holds_no_put_beyond_the_time_for_another() -> None:
    loop = VirtualLoop(random.Random(1))

    async def work() -> float:
        async with _speaking(loop, "a:1,b:1") as tl:
            p, began_s = tl.producer("t"), loop.time()
            first = asyncio.ensure_future(p.produce(b"", in_=0, id="first"))
            await Timer(loop).wait(0.1)
            second = asyncio.ensure_future(p.produce(b"", in_=0, id="second"))
            assert [receipt.ok for receipt in await asyncio.gather(first, second)] == [True, True]
            took_s = loop.time() - began_s
        assert [frame.ids.tolist() for frame in _Speaks.streams["a:1"][0].sent] == [[b"first"]]
        again = sorted(id for frame in _Speaks.streams["b:1"][0].sent for id in frame.ids.tolist())
        assert again == [b"first", b"second"]
        return took_s

    assert loop.run_until_complete(work()) == pytest.approx(3.0, abs=0.2)  # half of the timeout, and an answer
    assert loop.failures == []
    loop.finish()


def test_a_consumer_leaves_a_broker_that_reads_no_more() -> None:
    loop = VirtualLoop(random.Random(1))

    async def work() -> None:
        async with _speaking(loop, "a:1,b:1") as tl:
            taking = asyncio.ensure_future(tl.consumer("t", id="w").take())
            await Timer(loop).wait(10.0)  # three heartbeats are 6 s
            assert set(_Speaks.streams) == {"a:1", "b:1"}
            taking.cancel()

    loop.run_until_complete(work())
    assert loop.failures == []
    loop.finish()


@pytest.mark.parametrize("again", ["client", "producer"])
def test_a_second_close_waits_for_the_flush_of_the_first(again: str) -> None:
    """As on SIGTERM: a handler closes the client, and the block of `async with` ends, too."""
    loop = VirtualLoop(random.Random(1))

    async def work() -> None:
        tl = _speaking(loop, "b:1")
        p = tl.producer("t")
        call = asyncio.ensure_future(p.produce(b"", in_=0))
        await Timer(loop).wait(0.1)
        closes = []
        for _ in range(3):
            closes.append(asyncio.ensure_future(tl.aclose() if again == "client" else p.aclose()))
            await Timer(loop).wait(0.1)
        closes.append(asyncio.ensure_future(tl.aclose()))
        await Timer(loop).wait(0.1)
        closes[0].cancel()  # the others wait on
        await asyncio.wait(closes, return_when=asyncio.ALL_COMPLETED)
        assert call.done() and (await call).ok
        assert [close.cancelled() for close in closes] == [True, False, False, False]
        await tl.aclose()

    loop.run_until_complete(work())
    assert loop.failures == []
    loop.finish()


ENDED: list[VirtualLoop] = []
"""Loops that were closed with tasks in them. A task that is collected as garbage would call into its loop."""


def test_closing_waits_for_nothing_of_a_loop_that_has_ended() -> None:
    first, second = VirtualLoop(random.Random(1)), VirtualLoop(random.Random(1))
    ENDED.append(first)

    async def use() -> tuple[Timeline, timeline.Producer, timeline.Consumer]:
        tl = _speaking(first, "b:1")
        p, c = tl.producer("t"), tl.consumer("t", id="w")
        c.open()
        assert (await p.produce(b"", in_=0)).ok
        return tl, p, c

    async def close() -> None:
        for each in (p, c, tl):
            await each.aclose()

    tl, p, c = first.run_until_complete(use())
    first.close()
    second.run_until_complete(close())
    second.finish()


def test_a_consumer_that_waited_in_a_loop_that_has_ended_is_closed_in_another_one() -> None:
    first, second = VirtualLoop(random.Random(1)), VirtualLoop(random.Random(1))
    ENDED.append(first)

    async def use() -> tuple[Timeline, timeline.Consumer, asyncio.Task[Any]]:
        tl = _speaking(first, "b:1")
        c = tl.consumer("t", id="w")
        waiting = asyncio.create_task(c.take())
        await Timer(first).wait(1.0)
        assert not waiting.done()
        return tl, c, waiting

    async def close() -> None:
        tl._context.check()  # any use of the client
        for each in (c, tl):
            await each.aclose()

    tl, c, _waiting = first.run_until_complete(use())
    first.close()
    second.run_until_complete(close())
    second.finish()


class _Silent(GrpcTransport):
    """The real way, but behind port 1 packets vanish."""

    async def ready(self, timeout_s: float) -> None:
        if self.address == "127.0.0.1:1":
            async with asyncio.timeout(timeout_s):
                await asyncio.Event().wait()
        await super().ready(timeout_s)

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        try:
            return await super().unary(method, frame, timeout_s)
        except TimeoutError:
            raise TransportError(Fault.UNREACHABLE, f"{self.address} did not answer in time") from None


@pytest.mark.slow
async def test_who_does_not_answer_takes_no_time_from_the_others(broker: Broker) -> None:
    async with Timeline(f"127.0.0.1:1,{broker.address}", "300ms", transport_factory=_Silent) as tl:
        assert (await tl.late()).unreachable == ("127.0.0.1:1",)
        told = await tl.standing()
        assert [one.address for one in told.brokers] == [broker.address]
        assert told.unreachable == {"127.0.0.1:1": "127.0.0.1:1 did not answer in time"}


async def test_a_call_under_way_when_the_client_closes_says_so(broker: Broker, tl: timeline.Timeline) -> None:
    assert broker.node is not None
    store, asked, go = broker.node.store.store, asyncio.Event(), asyncio.Event()
    topics = store.topics

    async def held() -> Any:
        asked.set()
        await go.wait()
        return await topics()

    store.topics = held  # type: ignore[method-assign]
    store.capabilities = replace(store.capabilities, shared=True)  # so that others may change records
    calls = [asyncio.ensure_future(tl.topics()), asyncio.ensure_future(tl.create_topic("t", lease="31s"))]
    await asked.wait()
    await tl.aclose()
    for call in calls:
        with pytest.raises(timeline.Closed):
            await call
    go.set()


@pytest.mark.parametrize("what", ["producer", "consumer"])
async def test_closing_that_is_cancelled_leaves_nothing_running(
    broker: Broker, tl: timeline.Timeline, what: str
) -> None:
    assert broker.node is not None
    before = asyncio.all_tasks()
    p, c = tl.producer("t"), tl.consumer("t", id="w")
    await p.produce(b"", in_=0)
    taken = await c.take()
    assert taken is not None
    go, settle = broker.hold(), broker.node.store.settle

    async def held(*asked: Any) -> Any:
        await go.wait()
        return await settle(*asked)

    broker.node.store.settle = held  # type: ignore[method-assign]
    calls = [asyncio.ensure_future(p.produce(b"", in_="1h")), asyncio.ensure_future(taken.ack())]
    while not (p._stream.queue.outstanding and c._settler.queue.outstanding):
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(p.aclose() if what == "producer" else c.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    with pytest.raises(timeline.Unknown):
        await calls[what == "consumer"]
    names = {task.get_name() for task in asyncio.all_tasks() - before}
    assert f"{'producing' if what == 'producer' else 'consuming'} t" not in names
    go.set()
    await calls[what == "producer"]
    await p.aclose()
    await c.aclose()


async def test_a_producer_that_nobody_holds_any_more_leaves_nothing_open(broker: Broker, tl: timeline.Timeline) -> None:
    assert broker.node is not None
    before = asyncio.all_tasks()
    for n in range(5):
        await tl.producer("t").produce(b"", in_="1h", id=f"m{n}")
        await tl.producer("t").move(f"m{n}", in_="2h")
    ours = {"producing t", "mutating t"}
    while len(broker.node.service.streams) or ours & {task.get_name() for task in asyncio.all_tasks() - before}:
        await asyncio.sleep(0)


async def test_no_text_of_grpc_says_how_a_call_ended(broker: Broker, tl: timeline.Timeline) -> None:
    """gRPC words a lost connection as "Socket closed" or "Stream removed", and the end of the time in its own way."""
    assert broker.store is not None
    asked = asyncio.Event()

    async def never(*_: object, **__: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    broker.store.count_due = never  # type: ignore[assignment, method-assign]
    transport = GrpcTransport(broker.address)
    stream = await transport.stream("Produce", 20.0)  # which connects
    frame = encode(wire.Forecast("t", 60_000, 60_000))
    with pytest.raises(TransportError) as late:
        await transport.unary("Forecast", frame, 0.05)
    assert (late.value.fault, late.value.reason) == (Fault.DEADLINE, "no answer in time")
    asked.clear()
    calls = [asyncio.ensure_future(one) for one in (transport.unary("Forecast", frame, 20.0), stream.receive())]
    await asked.wait()
    await broker.stop()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    said = {str(one.reason) for one in ended if isinstance(one, TransportError)}
    assert said and said <= {"the connection broke off", "the call broke off"}
    await transport.close()
