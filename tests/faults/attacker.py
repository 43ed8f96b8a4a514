"""A hostile client as a process of its own: it floods a broker until its standard input ends, waits for the answer to
each thing that it asked, and tells how many it asked and how often each status was the answer.

It runs with the lowest priority, as a flood from another machine would: that takes none of the broker's processors but
by what the broker does for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable

from tests.faults.hostile import burials, hello, puts
from tests.faults.machine import PATIENCE_S
from timeline.driver.transport.grpc_transport import GrpcStream, GrpcTransport
from timeline.model import Status
from timeline.wire import (
    Beat,
    Credit,
    Frame,
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
SETTLES_A_FRAME = 1_000
PUTS_A_FRAME = 64
CALLS_AT_ONCE = 250


class Attack:
    """One connection of a flood, up to the moment when `stop` is set. It asks at least `least` frames."""

    def __init__(self, address: str, number: int, least: int, stop: asyncio.Event) -> None:
        self._way = GrpcTransport(address)
        self._number, self._least, self._stop = number, least, stop
        self.asked = 0
        self.said: Counter[str] = Counter()
        self._answered = 0
        self._news = asyncio.Event()

    async def puts(self, each: int, size: int) -> None:
        """Frames of `each` puts of `size` bytes, due in an hour, each message another one."""
        payloads = [b"x" * size] * each

        def frame(at: int) -> bytes:
            ids = [b"%d-%d-%d" % (self._number, at, one) for one in range(each)]
            return encode(puts(1 + at, ids, payloads, in_ms=3_600_000))

        await self._flood(await self._way.stream("Produce", PATIENCE_S), frame, each)

    async def settles(self) -> None:
        """Frames of burials, for as long a reason as may be, of what nobody put."""
        data = encode(burials(1, [b"%d" % one for one in range(SETTLES_A_FRAME)]))
        await self._flood(await self._greeted(), lambda _: data, SETTLES_A_FRAME)

    async def beats(self) -> None:
        """Questions whether the broker is there."""
        data = encode(Credit(echo=1))
        await self._flood(await self._greeted(), lambda _: data, 1)

    async def calls(self) -> None:
        """Lists of topics, as many at once as the broker answers, and more."""
        data = encode(Topics(TopicAction.LIST, ""))

        async def ask() -> None:
            while not self._stop.is_set():
                self.asked += 1
                try:
                    await self._way.unary("Topics", data, PATIENCE_S)
                    self.said["OK"] += 1
                except TransportError as fault:
                    self.said[fault.fault.value] += 1

        await asyncio.gather(*(ask() for _ in range(CALLS_AT_ONCE)))

    async def _greeted(self) -> GrpcStream:
        stream = await self._way.stream("Consume", PATIENCE_S)
        await stream.send(hello(f"c{self._number}"))
        decode_as(await stream.receive() or b"", Welcome)
        return stream

    async def _flood(self, stream: GrpcStream, frame: Callable[[int], bytes], each: int) -> None:
        reading = asyncio.create_task(self._read(stream))
        sent = 0
        while sent < self._least or not self._stop.is_set():
            await stream.send(frame(sent))
            sent += 1
        self.asked = sent * each
        while self._answered < sent:
            self._news.clear()
            await self._news.wait()
        reading.cancel()
        stream.cancel()

    async def _read(self, stream: GrpcStream) -> None:
        while (data := await stream.receive()) is not None:
            self._note(decode(data))
            self._answered += 1
            self._news.set()

    def _note(self, answer: Frame) -> None:
        if isinstance(answer, Produced | Settled):
            self.said.update(Status.of(code).value for code in answer.answers.status.tolist())
        else:
            assert isinstance(answer, Beat)
            self.said["OK"] += 1


FLOODS = {
    "puts": lambda attack: attack.puts(PUTS_A_FRAME, 16 * KIB),
    "small-puts": lambda attack: attack.puts(1, 100),
    "settles": lambda attack: attack.settles(),
    "beats": lambda attack: attack.beats(),
    "calls": lambda attack: attack.calls(),
}


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flood", choices=FLOODS)
    parser.add_argument("address")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--least", type=int, default=48, help="frames that each asks, however soon it is stopped")
    asked = parser.parse_args()
    os.nice(19)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    attacks = [Attack(asked.address, number, asked.least, stop) for number in range(asked.connections)]
    running = [asyncio.create_task(FLOODS[asked.flood](attack)) for attack in attacks]
    print(json.dumps({"floods": 1}), flush=True)
    await asyncio.gather(*running)
    said = sum((attack.said for attack in attacks), Counter[str]())
    print(json.dumps({"asked": sum(attack.asked for attack in attacks), "said": said}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
