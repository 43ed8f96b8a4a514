"""Hostile frames on a live broker: each gets its definite answer, nothing in the broker breaks, others are served."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import numpy as np
import pytest

import timeline
from tests.driver.broker import Broker
from tests.faults.hostile import hello, puts
from tests.faults.machine import PATIENCE_S
from tests.wire.mutants import MUTATIONS, good_frames
from timeline.broker.api.mutate import NOT_BEGUN
from timeline.columns import Ragged
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.model import Operation, Status
from timeline.wire import (
    MAX_COUNT,
    SERVICE,
    Beat,
    Credit,
    Fault,
    Frame,
    Hello,
    Leaving,
    Mutate,
    Mutated,
    MutateTag,
    Produce,
    Produced,
    Settle,
    Settled,
    Take,
    TransportError,
    UnknownFrame,
    Welcome,
    WireError,
    decode,
    decode_as,
    encode,
)
from timeline.wire.verify import find_body

REFUSED = (Fault.REFUSED_FRAME, Fault.WRONG_VERSION, Fault.NO_TOPIC)
UNARY = {name: name for name in ("Mutate", "Forecast", "Topics", "Late", "Take")}
UNARY |= {"MutateTag": "Mutate", "StatusRequest": "Stand", "Ping": "Ping", "Hint": "Hint"}
CALLED = {"Produce": "Put", "Settle": "Settle"}
STREAMED = ("Produce", "Hello", "Credit", "Settle", "Leaving", "Scan")
"""Kinds of a stream. Those of CALLED have a unary method as well."""
BITES = 400
SLOW_BITES = 6_000


class Attack:
    """A live broker with topics "departures" and "good", a way for bad frames, and a client that means well."""

    def __init__(self, broker: Broker, tl: timeline.Timeline, way: GrpcTransport) -> None:
        self.broker, self.tl, self.way = broker, tl, way
        self.crashes: list[tuple[str, BaseException]] = []
        self._number = 0

    async def produce(self, data: bytes) -> str:
        """What becomes of a Produce stream on which `data` is said, and then, where that is no reason to end it,
        something good."""
        stream = await self.way.stream("Produce", PATIENCE_S)
        frame, waits = _read(data), set[int]()
        try:
            await stream.send(data)
            if isinstance(frame, Produce | Newer):
                await stream.send(encode(puts(77, [b"x"], [b"y"], in_ms=3_600_000, topic="departures")))
                waits = {77} | ({frame.request} if isinstance(frame, Produce) else set())
            while waits or frame is None:
                answer = await stream.receive()
                assert answer is not None
                waits.discard(decode_as(answer, Produced).request)
        finally:
            stream.cancel()
        return "answered"

    async def consume(self, data: bytes, *, greeted: bool) -> str:
        """The same on a Consume stream; unless it is `greeted` first, `data` stands for the Hello."""
        stream = await self.way.stream("Consume", PATIENCE_S)
        self._number += 1
        frame, heard = _read(data), set[object]()
        try:
            await stream.send(hello(f"hostile-{self._number}", topic="departures") if greeted else data)
            decode_as(await stream.receive() or b"", Welcome)
            if greeted:
                await stream.send(data)
            waits: set[object] = {frame.request} if greeted and isinstance(frame, Settle) else set()
            if isinstance(frame, Hello | Credit | Settle | Newer):
                await stream.send(encode(Credit(echo=78)))
                waits.add(Beat)
            while frame is None or isinstance(frame, Leaving) or not waits <= heard:
                answer = await stream.receive()
                if answer is None:
                    return "ended"
                said = decode(answer)
                if isinstance(said, Leaving):
                    return "told to leave"
                heard.add(said.request if isinstance(said, Settled) else type(said))
        finally:
            stream.cancel()
        return "answered"

    async def ask(self, kind: str, data: bytes, called: bool = False) -> str:
        """Return what comes of `data`, which was a good frame of `kind`, where that is expected. Never silence.
        `called`: by the unary method, if the kind has one beside its stream."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                if kind == "Produce" and not called:
                    return await self.produce(data)
                if kind in ("Hello", "Credit", "Settle", "Leaving") and not called:
                    return await self.consume(data, greeted=kind != "Hello")
                if kind == "Scan":
                    async for page in self.way.unary_stream("Scan", data, PATIENCE_S):
                        decode(page)
                else:
                    if isinstance(take := _read(data), Take):
                        data = encode(replace(take, wait_ms=0))  # nothing is due here
                    decode(await self.way.unary(CALLED[kind] if called else UNARY.get(kind, "Ping"), data, PATIENCE_S))
            except TransportError as fault:
                assert fault.fault in REFUSED or _out_of_time(data, fault), fault
                assert fault.reason
                return "refused"
        return "answered"

    async def others(self) -> None:
        """Who means well is served as ever, and told how the broker stands."""
        async with asyncio.timeout(PATIENCE_S), self.tl.producer("good") as p, self.tl.consumer("good") as c:
            await p.produce(b"x", in_=0)
            d = await c.take()
            assert d is not None
            await d.ack()
            await self.tl.standing()
            await self.tl.late()
            assert "departures" in {topic.name for topic in await self.tl.topics()}
        assert self.crashes == []


class Newer:
    """A frame of a newer minor, which a stream passes over."""


def _read(data: bytes) -> Frame | Newer | None:
    """The frame; None where there is none."""
    try:
        return decode(data)
    except UnknownFrame:
        return Newer()
    except WireError:
        return None


def _out_of_time(data: bytes, fault: TransportError) -> bool:
    """Whether the broker came to `data` after the time that it gives itself, and began nothing."""
    own_ms = getattr(_read(data), "timeout_ms", 0)
    return 0 < own_ms < PATIENCE_S * 1000 and fault.fault is Fault.NOT_READY and NOT_BEGUN in fault.reason


@asynccontextmanager
async def attacked() -> AsyncIterator[Attack]:
    broker = Broker()
    await broker.start()
    assert broker.node is not None
    try:
        async with timeline.connect(broker.address, timeout="60s") as tl:
            for name in ("good", "departures"):
                await tl.create_topic(name)
            way = GrpcTransport(broker.address)
            attack = Attack(broker, tl, way)
            broker.node.tasks._on_crash = lambda name, error: attack.crashes.append((name, error))
            try:
                yield attack
            finally:
                await way.close()
            await attack.others()
    finally:
        await broker.stop()


async def bite(seed: int, count: int) -> Counter[str]:
    """Good frames gone bad, one after the other."""
    chance, outcome = random.Random(seed), Counter[str]()
    good = [(find_body(data).name, data) for data in good_frames()]
    taken = [(kind, data) for kind, data in good if kind in UNARY or kind in STREAMED]
    async with attacked() as attack:
        for number in range(count):
            kind, data = chance.choice(taken if chance.random() < 0.75 else good)  # the rest are answers, not asked for
            bad, called = bytearray(data), kind in CALLED and chance.random() < 0.5
            for _ in range(chance.choice([1, 1, 2])):
                if len(bad) >= 12:
                    chance.choice(MUTATIONS)(bad, chance)
            try:
                outcome[await attack.ask(kind, bytes(bad), called)] += 1
            except Exception as wrong:
                raise AssertionError(f"{kind} {seed}/{number}: {bad.hex()}") from wrong
            if number % 200 == 0:
                await attack.others()
                await attack.tl.create_topic("departures")
    return outcome


@pytest.mark.slow
async def test_each_bad_frame_gets_its_answer_and_harms_nobody() -> None:
    outcome = await bite(1, BITES)
    assert min(outcome["refused"], outcome["answered"]) > BITES // 20


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("seed", [2, 3])
async def test_many_more_bad_frames_get_their_answers(seed: int) -> None:
    outcome = await bite(seed, SLOW_BITES)
    assert min(outcome["refused"], outcome["answered"]) > SLOW_BITES // 20


async def test_frames_without_messages_are_answered_like_any_other() -> None:
    nobody, longs = Ragged.of([]), np.zeros(0, np.int64)
    ubytes, ulongs = longs.astype(np.uint8), longs.astype(np.uint64)
    async with attacked() as attack:
        assert await attack.ask("Produce", encode(puts(5, [], [], topic="departures"))) == "answered"
        settle = Settle(6, nobody, ulongs, longs, ubytes, longs, ubytes, ulongs, credit_messages=3)
        assert await attack.ask("Settle", encode(settle)) == "answered"
        for operation in (Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE):
            mutate = Mutate("departures", "g", operation, nobody, longs, ubytes, longs, ulongs)
            answer = decode_as(await attack.way.unary("Mutate", encode(mutate), PATIENCE_S), Mutated)
            assert len(answer.answers) == 0


async def test_a_frame_that_was_compressed_is_not_unfolded() -> None:
    async with attacked() as attack:
        data = encode(puts(1, [b"m"], [bytes(1_000_000)], in_ms=3_600_000, topic="departures"))
        compression = grpc.Compression.Gzip
        async with grpc.aio.insecure_channel(attack.broker.address, compression=compression) as channel:
            stream = channel.stream_stream(f"/{SERVICE}/Produce")()
            await stream.write(data)
            with pytest.raises(grpc.aio.AioRpcError, match=r"these 1\d{3} bytes are no frame") as refused:
                await stream.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await attack.ask("Produce", data) == "answered"


@pytest.mark.slow
async def test_credit_beyond_all_measure_is_still_told_to_people() -> None:
    async with attacked() as attack:
        streams = [await attack.way.stream("Consume", PATIENCE_S) for _ in range(2)]
        for number, stream in enumerate(streams):
            await stream.send(hello(f"greedy-{number}", topic="departures", credit=MAX_COUNT))
            decode_as(await stream.receive() or b"", Welcome)
            for _ in range(1_100):  # more than 63 bits in all
                await stream.send(encode(Credit(MAX_COUNT, MAX_COUNT)))
            await stream.send(encode(Credit(echo=1)))
            decode_as(await stream.receive() or b"", Beat)
        (stands,) = (await attack.tl.standing("departures")).brokers
        assert [(load.consumers, load.credit) for load in stands.topics] == [(2, MAX_COUNT)]
        assert {one.credit for one in stands.consumers} == {MAX_COUNT}
        async with attack.tl.producer("departures") as p:
            await p.produce(b"x", in_=0, id="m")
        while (await attack.tl.standing("departures")).brokers[0].topics[0].delivered < 1:
            await asyncio.sleep(0)
        for stream in streams:
            stream.cancel()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"op": 0, "by_ms": 5}, "operation id must be 64 random bits"),
        ({"by_ms": 5, "at_ms": 1_900_000_000_000}, "not both"),
        ({"by_ms": 5, "in_ms": 1_000}, "not both"),
        ({}, "a time to move to, or a shift"),
        ({"at_ms": 200_000_000_000_000}, "beyond the topic's horizon"),
    ],
)
async def test_a_move_by_tag_that_cannot_be_meant_is_refused(change: dict[str, int], sentence: str) -> None:
    async with attacked() as attack, attack.tl.producer("departures") as p:
        await p.produce(b"x", at=1_890_000_000_000, id="m", tag="spring")
        frame = MutateTag("departures", "default", Operation.MOVE, b"spring", **{"op": 7, **change})
        with pytest.raises(TransportError, match=sentence) as refused:
            await attack.way.unary("Mutate", encode(frame), PATIENCE_S)
        assert refused.value.fault is Fault.REFUSED_FRAME
        assert [m.version async for m in attack.tl.scan("departures")] == [1]


async def test_tokens_of_others_change_nothing() -> None:
    async with attacked() as attack, attack.tl.producer("departures") as p, attack.tl.consumer("departures") as c:
        await p.produce(b"x", in_=0, id="m")
        d = await c.take()
        assert d is not None
        stream = await attack.way.stream("Consume", PATIENCE_S)
        await stream.send(hello("thief", topic="departures", credit=0))
        decode_as(await stream.receive() or b"", Welcome)
        count, token = 5, d.token
        operations = [Operation.ACK, Operation.EXTEND, Operation.RELEASE, Operation.BURY, Operation.ACK]
        settle = Settle(
            9,
            Ragged.repeat(token.id.encode(), count),
            np.full(count, token.birth, np.uint64),
            np.array([token.version] * 4 + [2**63 - 1]),
            np.array(operations, np.uint8),
            np.full(count, 1_000, np.int64),
            np.zeros(count, np.uint8),
            np.arange(1, count + 1, dtype=np.uint64),
        )
        await stream.send(encode(settle))
        answers = decode_as(await stream.receive() or b"", Settled).answers
        assert {Status.of(code) for code in answers.status.tolist()} == {Status.FENCED}
        stream.cancel()
        await d.ack()
