"""A hostile client as a process of its own: it floods a broker until its standard input ends, waits for the answers to
all that it sent, and tells how often each status was among them.

It runs with the lowest priority: a flood from another machine takes none of the broker's processors by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

from tests.faults.hostile import burials, hello, puts
from tests.faults.machine import PATIENCE_S
from timeline.driver.transport import GrpcTransport
from timeline.model import Status
from timeline.wire import (
    Beat,
    Credit,
    Produced,
    Settled,
    TopicAction,
    Topics,
    TransportError,
    Welcome,
    decode,
    decode_as,
    encode,
)

KIB = 1024
Said = Counter[str]


class Attack:
    """One connection of a flood. `stop` is set when it is to end; `sent` counts what was sent until then."""

    def __init__(self, address: str, number: int, stop: asyncio.Event) -> None:
        self.way = GrpcTransport(address)
        self.number, self.stop = number, stop
        self.said: Said = Counter()

    async def puts(self, each: int, size: int) -> None:
        """Frames of `each` puts of `size` bytes, due in an hour, each message another one."""
        stream = await self.way.stream("Produce", PATIENCE_S)
        payloads = [b"x" * size] * each

        def frame(at: int) -> bytes:
            ids = [b"%d-%d-%d" % (self.number, at, one) for one in range(each)]
            return encode(puts(1 + at, ids, payloads, in_ms=3_600_000))

        await self._flood(stream.send, stream.receive, frame, Produced)
        stream.cancel()

    async def settles(self, each: int) -> None:
        """Frames of `each` burials, for as long a reason as may be, of what nobody put."""
        stream = await self.way.stream("Consume", PATIENCE_S)
        await stream.send(hello(f"c{self.number}"))
        decode_as(await stream.receive() or b"", Welcome)
        data = encode(burials(1, [b"%d" % one for one in range(each)]))
        await self._flood(stream.send, stream.receive, lambda at: data, Settled)
        stream.cancel()

    async def beats(self) -> None:
        """Questions whether the broker is there, thousands at once."""
        stream = await self.way.stream("Consume", PATIENCE_S)
        await stream.send(hello(f"c{self.number}"))
        decode_as(await stream.receive() or b"", Welcome)
        data = encode(Credit(echo=1))
        await self._flood(stream.send, stream.receive, lambda at: data, Beat)
        stream.cancel()

    async def calls(self) -> None:
        """Lists of topics, 32 at once."""
        data = encode(Topics(TopicAction.LIST, ""))

        async def one() -> None:
            while not self.stop.is_set():
                try:
                    await self.way.unary("Topics", data, PATIENCE_S)
                    self.said["OK"] += 1
                except TransportError as fault:
                    self.said[fault.fault.name] += 1

        await asyncio.gather(*(one() for _ in range(32)))

    async def _flood(
        self,
        send: Callable[[bytes], Awaitable[None]],
        receive: Callable[[], Awaitable[bytes | None]],
        frame: Callable[[int], bytes],
        kind: type[Produced | Settled | Beat],
    ) -> None:
        sent = answered = 0
        over = asyncio.Event()

        async def sending() -> None:
            nonlocal sent
            while not self.stop.is_set():
                data = frame(sent)
                sent += 1
                await send(data)
            over.set()

        task = asyncio.create_task(sending())
        while not (over.is_set() and answered == sent):
            receiving = asyncio.create_task(receive())  # type: ignore[arg-type]
            ending = asyncio.create_task(over.wait())
            await asyncio.wait(
                [receiving, ending] if not over.is_set() else [receiving], return_when=asyncio.FIRST_COMPLETED
            )
            ending.cancel()
            if not receiving.done() and answered == sent:
                receiving.cancel()
                break
            answer = decode(await receiving or b"")
            answered += 1
            if isinstance(answer, Produced | Settled):
                self.said.update(Status.of(code).value for code in answer.answers.status.tolist())
            else:
                self.said["OK"] += 1
        await task


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("puts", "small", "settles", "beats", "calls"))
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, default=8)
    asked = parser.parse_args()
    os.nice(19)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    floods = [Attack(asked.address, number, stop) for number in range(asked.streams)]
    ways = {
        "puts": lambda one: one.puts(64, 16 * KIB),
        "small": lambda one: one.puts(1, 100),
        "settles": lambda one: one.settles(1_000),
        "beats": lambda one: one.beats(),
        "calls": lambda one: one.calls(),
    }
    running = [asyncio.create_task(ways[asked.kind](one)) for one in floods]
    print(json.dumps({"floods": 1}), flush=True)
    await asyncio.gather(*running)
    said = sum((one.said for one in floods), Counter[str]())
    print(json.dumps(dict(said)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
