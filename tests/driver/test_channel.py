"""Addresses, which one is tried when, and for how long."""

from __future__ import annotations

import asyncio
import random
import socket

import pytest

import timeline
from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.driver.queries import settings_of
from timeline.driver.transport.addresses import NoConnection, ProbeResult, parse_addresses
from timeline.driver.transport.channel import (
    BACKOFF_CAP_MS,
    LEAVING_REST_MS,
    AttemptState,
    Channel,
    Deadline,
    ask_all,
)
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.errors import Invalid, Unavailable
from timeline.model import Answers
from timeline.wire import Fault, Mutate, Mutated, MutateTag, Ping, Pong, TagMutated, TransportError, decode, encode


def test_addresses() -> None:
    assert parse_addresses("localhost:9000") == ["localhost:9000"]
    assert parse_addresses("a:1, b:2,a:1") == ["a:1", "b:2"]
    assert parse_addresses(["[::1]:9000", "10.0.0.1:65535"]) == ["[::1]:9000", "10.0.0.1:65535"]


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            "",
            "localhost",
            "localhost:0",
            "localhost:65536",
            "http://localhost:9000",
            "a:1,,b:2",
            ":9000",
            "a b:1",
            5,
            None,
            b"a:1",
            {"a:1"},
        ),
        *("a..b:9000", "\udcff:9000", f"{'x' * 64}:9000", f"{'x.' * 127}x:9000", "[zz]:1", "[::1:1", "a:\u0663\u0664"),
    ],
)
def test_what_is_no_address_is_refused_when_connecting(wrong: object) -> None:
    with pytest.raises(Invalid, match="host:port"):
        timeline.connect(wrong)  # type: ignore[arg-type]


def test_bytes_are_no_list_of_addresses() -> None:
    with pytest.raises(Invalid, match=r"not b'a:1'$"):
        timeline.connect(b"a:1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://broker.example.org:9100", "broker.example.org:9100"),
        ("grpc://broker/orders", "broker:9000"),
        ("localhost", "localhost:9000"),
        (":9100", "localhost:9100"),
        ("a:1, b", "a:1,b:9000"),
        (["a:1", "http://b:2/"], "a:1,b:2"),
    ],
)
def test_an_address_that_is_nearly_one_is_told_what_was_meant(written: str | list[str], meant: str) -> None:
    with pytest.raises(Invalid) as refused:
        timeline.connect(written)
    assert refused.value.reason.endswith(f". Did you mean {meant}?")


@pytest.mark.parametrize("written", ["a b:1", "[zz]:1", "a:0", "a:1,,b c"])
def test_nothing_is_suggested_that_is_no_address_either(written: str) -> None:
    with pytest.raises(Invalid) as refused:
        timeline.connect(written)
    assert "Did you mean" not in str(refused.value)


async def test_with_in_place_of_async_with_and_the_other_way_round_is_told() -> None:
    with (
        pytest.raises(TypeError, match=r"timeline\.connect_sync makes the one for `with`"),
        timeline.connect("localhost:9000"),
    ):
        raise AssertionError("it was entered")
    with pytest.raises(TypeError, match=r"timeline\.connect makes the one for `async with`"):
        async with timeline.connect_sync("localhost:9000"):
            raise AssertionError("it was entered")


def test_no_address_at_all_is_refused() -> None:
    with pytest.raises(Invalid, match="no address is given"):
        timeline.connect([])


@pytest.mark.parametrize("wrong", ["", "never", 0, -1, float("nan"), True])
def test_a_timeout_that_cannot_be_meant_is_refused(wrong: object) -> None:
    with pytest.raises(Invalid, match="timeout"):
        timeline.connect("localhost:9000", timeout=wrong)  # type: ignore[arg-type]


class _Hands:
    """A clock whose hands are moved by the test."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def _channel(addresses: str) -> tuple[Channel, _Hands, Clock]:
    hands = _Hands()
    clock = Clock(hands, hands)
    return Channel(parse_addresses(addresses), GrpcTransport, clock, random.Random(1)), hands, clock


async def test_it_stays_with_what_works_and_leaves_what_fails() -> None:
    channel, hands, clock = _channel("a:1,b:1")
    deadline = Deadline.after(clock, 60_000)
    channel.worked("a:1")
    picked = [await channel._pick(deadline) for _ in range(5)]
    assert {place.address for place in picked if place is not None} == {"a:1"}
    gone = TransportError(Fault.BROKEN, "gone")
    channel.failed("a:1", gone)
    place = await channel._pick(deadline)
    assert place is not None and place.address == "b:1"
    rests = []
    for _ in range(20):
        channel.failed("a:1", gone)
        rests.append(channel._places["a:1"].rest_until_ms - clock.monotonic_ms())
    assert max(rests) <= BACKOFF_CAP_MS and rests[-1] >= BACKOFF_CAP_MS / 2 and rests[0] < 100
    hands.now_s += 10
    channel.worked("a:1")
    assert channel._places["a:1"].failures == 0


async def test_the_end_of_the_callers_time_hides_no_earlier_finding() -> None:
    channel, _, _ = _channel("a:1")
    place, said = channel._places["a:1"], ProbeResult.GRPC.said("a:1")
    ended = TransportError(Fault.DEADLINE, "no page in time")
    channel._note(place, NoConnection.at("a:1", ProbeResult.GRPC))
    channel._note(place, ended)
    assert said in channel.unreached().reason
    channel.worked("a:1")
    channel._note(place, ended)
    assert "no page in time" in channel.unreached().reason, "a broker that answered since has no old finding"


@pytest.mark.parametrize("fault", [Fault.OVERLOADED, Fault.NOT_READY])
async def test_a_broker_that_refused_was_reached(fault: Fault) -> None:
    channel, _, _ = _channel("a:1,b:1")
    channel.failed("b:1", NoConnection.at("b:1", ProbeResult.NOBODY))
    assert channel.unreached().reason.startswith("no broker could be reached: a:1 did not answer in time; nobody")
    channel.failed("a:1", TransportError(fault, "too many calls at once"))
    channel.failed("a:1", TransportError(Fault.DEADLINE, "no answer in time"))
    said = "no broker took the call: a:1: too many calls at once; nobody listens at b:1"
    assert channel.unreached().reason == said, "and the address is right"
    channel.worked("a:1")
    channel.leaving("a:1")
    assert channel.unreached().reason.startswith("no broker could be reached: a:1 did not answer in time; nobody")


async def test_a_broker_that_took_the_call_and_said_nothing_was_reached() -> None:
    channel, _, _ = _channel("a:1")
    channel.failed("a:1", TransportError(Fault.DEADLINE, "no answer in time"))
    error = channel.unreached()
    assert (error.reason, error.found) == ("no broker answered: a:1: no answer in time", ("TALKS",))
    channel.worked("a:1")
    error = channel.unreached()
    assert (error.reason, error.found) == ("the broker at a:1 did not take it in time", ("TALKS",))


async def test_two_names_of_one_place_are_named_once() -> None:
    channel, _, _ = _channel("localhost:1,127.0.0.1:1,[::1]:1,127.0.0.1:2")
    for address in channel.known:
        channel.failed(address, TransportError(Fault.NOT_READY, "draining"))
    assert channel.unreached().reason == "no broker took the call: localhost:1: draining; 127.0.0.1:2: draining"
    channel.failed("127.0.0.1:1", NoConnection.at("127.0.0.1:1", ProbeResult.NOBODY))
    assert "; nobody listens at 127.0.0.1:1; " in channel.unreached().reason, "it is not what is at the other name"


class _Known:
    """Brokers that answer pings until `gone`; one is at two addresses."""

    gone = False

    def __init__(self, address: str) -> None:
        self.address = address

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        if self.gone:
            raise TransportError(Fault.BROKEN, "the connection broke off")
        name = "b1" if self.address in ("given:1", "b1:1") else "b2"
        return encode(Pong(0.0, 0.0, 0.0, name, "0", ("b1:1", "b2:1")))


async def test_a_broker_that_went_away_is_named_once_by_the_address_that_was_given() -> None:
    clock = Clock()
    channel = Channel(["given:1"], _Known, clock, random.Random(1))  # type: ignore[arg-type]
    answers, silent = await ask_all(channel, "Ping", encode(Ping(0.0)), Deadline.after(clock, 60_000))
    assert sorted(answers) == ["b2:1", "given:1"] and silent == {}
    for place in channel.known:
        channel.transport(place).gone = True  # type: ignore[attr-defined]
    with pytest.raises(Unavailable) as gone:
        await ask_all(channel, "Ping", encode(Ping(0.0)), Deadline.after(clock, 60_000))
    each = "given:1: the connection broke off; b2:1: the connection broke off"
    assert gone.value.reason == f"no broker answered: {each}"


async def test_a_learned_broker_that_refused_is_named() -> None:
    channel, _, _ = _channel("a:1")
    channel.learn(["b:1"])
    channel.failed("a:1", NoConnection.at("a:1", ProbeResult.NOBODY))
    assert "b:1" not in channel.unreached().reason
    channel.failed("b:1", TransportError(Fault.NOT_READY, "draining"))
    assert channel.unreached().reason == "no broker took the call: nobody listens at a:1; b:1: draining"


async def test_learned_addresses_come_after_those_that_were_given() -> None:
    channel, _, clock = _channel("a:1")
    channel.learn(["a:1", "b:1", "nonsense"])
    assert channel.known == ["a:1", "b:1"] and channel.several
    deadline = Deadline.after(clock, 60_000)
    picked = [await channel._pick(deadline) for _ in range(10)]
    assert {place.address for place in picked if place is not None} == {"a:1"}
    channel.leaving("a:1")
    assert channel._places["a:1"].rest_until_ms == clock.monotonic_ms() + LEAVING_REST_MS
    place = await channel._pick(deadline)
    assert place is not None and place.address == "b:1"


def test_settings_are_written_as_a_person_does() -> None:
    given = {"lease": "30s", "horizon": "10d", "buckets": 8, "lease_ahead": "auto", "paused": False, "remember": None}
    assert settings_of(given) == {
        "lease_ms": 30_000,
        "horizon_ms": 864_000_000,
        "buckets": 8,
        "lease_ahead_ms": -1,
        "paused": False,
    }
    assert settings_of({"lease_ms": 5}) == {"lease_ms": 5}


@pytest.mark.parametrize(
    ("wrong", "mends"),
    [
        ({"leese": "1s"}, "did you mean 'lease'"),
        ({"lease": "1s", "lease_ms": 1_000}, "lease and lease_ms are one setting. Give one of the two"),
        ({"lease_ahead_ms": 0, "lease_ahead": "auto"}, "lease_ahead and lease_ahead_ms are one setting"),
        ({"zzz": 1}, "there are lease"),
        ({"buckets": "8"}, "whole number"),
        ({"buckets": True}, "whole number"),
        ({"paused": 1}, "True or False"),
        ({"lease": "soon"}, "lease must"),
        ({"kind": 5}, "text"),
        ({"max_deliveries": 10**20}, "max_deliveries must be a whole number from 0 to"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, object], mends: str) -> None:
    with pytest.raises(Invalid, match=mends):
        settings_of(wrong)


async def test_one_watch_for_all_who_wait_for_a_silent_address_and_none_after_close() -> None:
    """gRPC cannot take a watch back: what ended after its event loop was closed would print a traceback in the next."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        transport = GrpcTransport(f"127.0.0.1:{silent.getsockname()[1]}")
        before = asyncio.all_tasks()
        asked = await asyncio.gather(*(transport.ready(0.05) for _ in range(10)), return_exceptions=True)
        assert all(isinstance(one, TransportError) and one.fault is Fault.UNREACHABLE for one in asked)
        assert len(asyncio.all_tasks() - before) == 1
        await transport.close()
        assert asyncio.all_tasks() <= before


class _Breaks(GrpcTransport):
    """An address whose connection breaks in the middle of the first call. `told`: how long each was awaited, and what
    its frame said of that."""

    told: list[tuple[float, int]]

    async def ready(self, timeout_s: float) -> None:
        """At once."""

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        asked = decode(frame)
        assert isinstance(asked, Mutate | MutateTag)
        self.told.append((timeout_s * 1000.0, asked.timeout_ms))
        if len(self.told) == 1:
            raise TransportError(Fault.BROKEN, "reset")
        if isinstance(asked, MutateTag):
            return encode(TagMutated({}, b"", 1, 0))
        return encode(Mutated(Answers.blank(len(asked.ids)), 0))


@pytest.mark.parametrize("by_tag", [False, True])
async def test_a_broker_is_told_how_long_it_is_awaited_itself(by_tag: bool) -> None:
    _Breaks.told = []
    async with Timeline("a:1,b:2", "20s", transport_factory=_Breaks) as tl:
        p = tl.producer("t")
        await (p.move_tag("red", in_=0) if by_tag else p.move("m", in_=0))
    (first_ms, first_told), (again_ms, again_told), *_ = _Breaks.told
    assert first_ms <= 10_000 and again_ms <= 10_000
    assert first_told == int(first_ms) and again_told == int(again_ms)


class _Refusing(GrpcTransport):
    """The way to a broker that refuses each call after 100 ms."""

    hands: _Hands
    calls = 0

    async def ready(self, timeout_s: float) -> None:
        pass

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        self.calls += 1
        self.hands.now_s += min(0.1, timeout_s)
        raise TransportError(Fault.OVERLOADED if timeout_s >= 0.1 else Fault.DEADLINE, "its disk is full")


@pytest.mark.parametrize("writes", [True, False])
async def test_no_call_that_writes_goes_again_without_time_for_its_answer(writes: bool) -> None:
    channel, hands, clock = _channel("a:1")
    transport = channel.transport("a:1")
    channel._places["a:1"].transport = refusing = _Refusing("a:1")
    await transport.close()
    refusing.hands = hands
    with pytest.raises(timeline.Unavailable, match="no broker took the call: a:1: its disk is full"):
        await channel.unary("Topics", b"", Deadline.after(clock, 250.0), writes=writes)
    assert refusing.calls == (2 if writes else 3)
    await channel.close()


class _LosesAndForbids(GrpcTransport):
    """The way to a broker whose first answer is lost. The token is refused from then on."""

    faults: list[TransportError]

    async def ready(self, timeout_s: float) -> None:
        pass

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        raise self.faults.pop()


@pytest.mark.parametrize("writes", [True, False])
async def test_a_refusal_after_a_lost_answer_leaves_open_what_happened(writes: bool) -> None:
    channel, _, clock = _channel("a:1")
    channel._places["a:1"].transport = losing = _LosesAndForbids("a:1")
    losing.faults = [TransportError(Fault.FORBIDDEN, "no right"), TransportError(Fault.BROKEN, "gone")]
    error = timeline.Unknown if writes else timeline.Forbidden
    with pytest.raises(error, match="no right"):
        await channel.call("Mutate", b"", Deadline.after(clock, 60_000), AttemptState(), writes=writes)
    await channel.close()
