"""A broker in this process and plain frames to talk to it: what a driver does, without the driver."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.model import Operation, State, Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.contract import Store
from timeline.sync import make_membership
from timeline.wire import (
    BrokerStatus,
    Credit,
    Deliver,
    Fault,
    Hello,
    Mutate,
    Mutated,
    MutateFlag,
    Produce,
    Produced,
    PutFlag,
    Scan,
    ScanPage,
    Settle,
    Settled,
    SettleFlag,
    StatusRequest,
    TopicAction,
    TopicList,
    Topics,
    TransportError,
    Welcome,
    decode,
    decode_as,
    encode,
)

PATIENT = Limits(sweep_every_ms=3_600_000, count_every_ms=3_600_000, heartbeat_ms=3_600_000)
"""Nothing is found by looking again: what is delivered was told of."""


class Pipe:
    """Both ends of a two-way stream: `Stream` for the broker, `up`/`down` for the test."""

    def __init__(self) -> None:
        self.to_broker: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.from_broker: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self.sending = 0
        """Frames that wait for the test to let them flow."""

    async def send(self, frame: bytes) -> None:
        if self.ended:
            raise TransportError(Fault.BROKEN, "over")
        self.sending += 1
        await self.flowing.wait()
        self.sending -= 1
        self.from_broker.put_nowait(frame)

    async def receive(self) -> bytes | None:
        return await self.to_broker.get()

    async def close(self) -> None:
        self.to_broker.put_nowait(None)

    def cancel(self) -> None:
        self.ended = True
        if self.task is not None:
            self.task.cancel()

    def up(self, frame: Any) -> None:
        self.to_broker.put_nowait(encode(frame))

    async def down(self, kind: Any = None) -> Any:
        """The next frame from the broker, or, with `kind`, the next of that kind."""
        while True:
            data = await self.from_broker.get()
            assert data is not None, "the broker ended the stream"
            frame = decode(data)
            if kind is None or isinstance(frame, kind):
                return frame


class Link:
    """Talks to one node as producers and consumers do."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.random = random.Random(7)
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, method: str, peer: str = "test") -> Pipe:
        pipe = Pipe()

        async def run() -> None:
            try:
                await self.node.service.stream(method, pipe, peer)
            finally:
                pipe.from_broker.put_nowait(None)

        pipe.task = asyncio.ensure_future(run())
        self._tasks.append(pipe.task)
        return pipe

    async def topic(self, action: TopicAction, name: str = "t", **settings: Any) -> TopicList:
        return decode_as(await self.node.service.unary("Topics", encode(Topics(action, name, settings))), TopicList)

    async def drop(self, name: str = "t") -> TopicList:
        return await self.topic(TopicAction.DROP, name)

    def puts(self, ids: list[str], in_ms: int | list[int] = 0, topic: str = "t", **more: Any) -> Produce:
        count = len(ids)
        return Produce(
            request=1,
            topic=topic,
            group=more.pop("group", "default"),
            ids=Ragged.of([id.encode() for id in ids]),
            birth=more.pop("birth", np.array([self.random.getrandbits(64) | 1 for _ in ids], dtype=np.uint64)),
            time_ms=np.full(count, in_ms, dtype=np.int64),
            flags=more.pop("flags", np.full(count, PutFlag.IN, dtype=np.uint8)),
            payloads=more.pop("payloads", Ragged.of([b"p" + id.encode() for id in ids])),
            **more,
        )

    def begin_put(self, ids: list[str]) -> Pipe:
        """Sends a put of what is due at once, and does not wait for its answer."""
        pipe = self.open("Produce")
        pipe.up(self.puts(ids))
        return pipe

    async def ids(self, *states: State) -> list[bytes]:
        """The ids of what is there in these states; in none: of all that lives."""
        found: list[bytes] = []
        async for data in self.node.service.unary_stream("Scan", encode(Scan("t", states=states))):
            found += decode_as(data, ScanPage).rows.ids.tolist()
        return sorted(found)

    async def deliveries(self) -> dict[bytes, int]:
        """How often each message that is there was delivered."""
        found: dict[bytes, int] = {}
        async for data in self.node.service.unary_stream("Scan", encode(Scan("t"))):
            rows = decode_as(data, ScanPage).rows
            found |= zip(rows.ids.tolist(), rows.deliveries.tolist(), strict=True)
        return found

    async def put(self, ids: list[str], in_ms: int | list[int] = 0, topic: str = "t", **more: Any) -> Produced:
        pipe = self.open("Produce")
        pipe.up(self.puts(ids, in_ms, topic, **more))
        answer: Produced = await pipe.down(Produced)
        await pipe.close()
        return answer

    async def mutate(self, operation: Operation, ids: list[str], in_ms: int = 0, **more: Any) -> Mutated:
        count = len(ids)
        frame = Mutate(
            topic=more.pop("topic", "t"),
            group=more.pop("group", "default"),
            operation=operation,
            ids=Ragged.of([id.encode() for id in ids]),
            time_ms=np.full(count, in_ms, dtype=np.int64),
            flags=np.full(count, MutateFlag.IN | more.pop("flags", 0), dtype=np.uint8),
            if_version=np.zeros(count, dtype=np.int64),
            op=np.array([self.random.getrandbits(64) | 1 for _ in ids], dtype=np.uint64),
        )
        return decode_as(await self.node.service.unary("Mutate", encode(frame)), Mutated)

    async def consume(self, name: str = "c", credit: int = 100, session: int = 1, **more: Any) -> Pipe:
        pipe = self.open("Consume", more.pop("peer", "test"))
        hand = more.pop("in_hand", None)
        pipe.up(
            Hello(
                topic=more.pop("topic", "t"),
                consumer=name,
                session=session,
                lease_ms=more.pop("lease_ms", 0),
                credit_messages=credit,
                credit_bytes=more.pop("credit_bytes", 1 << 20),
                ids=hand.ids if hand else Ragged.of([]),
                birth=hand.birth if hand else np.zeros(0, dtype=np.uint64),
                version=hand.version if hand else np.zeros(0, dtype=np.int64),
                room_messages=more.pop("room_messages", 0),
                room_bytes=more.pop("room_bytes", 0),
            )
        )
        assert isinstance(await pipe.down(), Welcome)
        return pipe

    def settles(self, got: Deliver, operation: Operation, time_ms: int, flags: SettleFlag, **more: Any) -> Settle:
        count = len(got.birth)
        return Settle(
            ids=got.ids,
            birth=got.birth,
            version=got.version,
            operation=np.full(count, operation, dtype=np.uint8),
            time_ms=np.full(count, time_ms, dtype=np.int64),
            flags=np.full(count, flags, dtype=np.uint8),
            op=np.array([self.random.getrandbits(64) | 1 for _ in range(count)], dtype=np.uint64),
            **more,
        )

    async def settle(self, pipe: Pipe, got: Deliver, operation: Operation, time_ms: int = 0, **more: Any) -> Settled:
        count = len(got.birth)
        reasons = Ragged.repeat(more.pop("reason", b""), count)
        frame = self.settles(
            got, operation, time_ms, more.pop("flags", SettleFlag(0)), request=self.random.getrandbits(32),
            reasons=reasons, credit_messages=more.pop("credit", count), credit_bytes=got.payloads.nbytes,
        )  # fmt: skip
        pipe.up(frame)
        answer: Settled = await pipe.down(Settled)
        return answer

    def beat(self, pipe: Pipe) -> None:
        pipe.up(Credit())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.node.stop()


def statuses(answer: Any) -> list[Status]:
    return [Status.of(code) for code in answer.answers.status.tolist()]


async def stands(link: Link, topic: str = "", limit: int = 1_000) -> BrokerStatus:
    return decode_as(await link.node.service.unary("Stand", encode(StatusRequest(topic, limit))), BrokerStatus)


@asynccontextmanager
async def broker(
    store: str | Store = "memory://", limits: Limits | None = None, clock: Clock | None = None
) -> AsyncIterator[Link]:
    """A started broker with topic "t"."""
    node = Node(
        store=make_store(store) if isinstance(store, str) else store,
        clock=clock or Clock(),
        membership=make_membership("local://"),
        random_bits=random.Random(1).getrandbits,
        name="b1",
        limits=limits,
    )
    link = Link(node)
    await node.start()
    assert (await link.topic(TopicAction.CREATE)).status == Status.OK.code
    try:
        yield link
    finally:
        await link.close()
