"""Clients of HTTP, as a process of its own: puts, long polls, and a receiver of webhooks.

`python -m timeline.bench.http_load WHAT ADDRESS TOPIC COUNT TASKS` prints `ready` and waits for a line. Then it works,
and prints its figures as a line of JSON. ADDRESS is that of a broker or a gateway. WHAT is one of these:

- `put-grpc` and `put-http` put single messages from TASKS tasks.
- `batch-grpc` puts batches of 1,000, and `batch-http` lines of JSON.
- `poll` takes COUNT messages with TASKS long polls, and acknowledges each.
- `click` visits each page of the console COUNT times for each of TASKS people. Several people rest a second each time.
- `receive` answers 204 to COUNT webhooks. `ready` has its URL. The first one is not counted: it prints `begun`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

import timeline
from timeline.bench.figures import latencies
from timeline.bench.load import BEGUN, PENDING_FROM_MS, READY, batch_at, batch_sizes, ids_of, meant_of, observed
from timeline.bench.processes import CannotMeasure, cpu_s
from timeline.clock import Clock

BATCH = 1_000
PAYLOAD_BYTES = 100
POLL = {"max": 100, "wait": "5s"}
CONNECTIONS = 1_000
PAGES = {
    "overview": "/",
    "topic": "/topic?name={topic}",
    "messages": "/messages?topic={topic}",
    "due": "/messages?topic={topic}&due_from=2020-01-01T00:00&due_to=2040-01-01T00:00",
    "dead": "/dead?topic={topic}",
    "letters": "/dead/letters?topic={topic}",
    "tag": "/dead/letters?topic={topic}&tag=spring&reason=smtp",
    "reasons": "/dead/reasons?topic={topic}",
    "load": "/load?window=7d&topic={topic}",
    "late": "/late",
    "find": "/find?q=nobody",
    "schedules": "/schedules",
    "week": "/schedules/week",
    "cluster": "/cluster",
}
"""Pages of the console, and the parts that they load by themselves."""
REST_S = 1.0

Work = Callable[[str, str, int, int], Coroutine[Any, Any, dict[str, float]]]


async def begun() -> None:
    """Say that all is ready, and wait for the line that begins."""
    print(READY, flush=True)
    await asyncio.to_thread(sys.stdin.readline)


@asynccontextmanager
async def http_client(address: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session at a gateway, with as many connections as there are tasks."""
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(f"http://{address}", connector=connector) as session:
        yield session


async def rate_of(
    count: int, tasks: int, todo: Iterator[Any], call: Callable[[Any], Awaitable[None]]
) -> dict[str, float]:
    """Do all of `todo`, which is `count` messages, in `tasks` tasks. Return the rate, and the cost here."""
    clock = Clock()

    async def work() -> None:
        for one in todo:
            await call(one)

    await begun()
    started_ms, used_s = clock.monotonic_ms(), cpu_s(os.getpid())
    await asyncio.gather(*(work() for _ in range(tasks)))
    elapsed_s, used_s = (clock.monotonic_ms() - started_ms) / 1000, cpu_s(os.getpid()) - used_s
    return {"per_s": count / elapsed_s, "client_cpu_us_per_message": used_s * 1e6 / count}


def messages(count: int, due_ms: int) -> list[tuple[str, bytes]]:
    """Return ids and payloads of `count` messages."""
    batch = batch_at(count, due_ms, PAYLOAD_BYTES)
    return [(id.decode(), payload) for id, payload in zip(ids_of(batch), batch.payloads, strict=True)]


def bodies(count: int) -> list[bytes]:
    """Return `count` messages that are due in an hour, each as JSON."""
    due_ms = Clock().now_ms() + PENDING_FROM_MS
    return [
        msgspec.json.encode({"id": id, "payload_text": payload.decode(), "at": due_ms})
        for id, payload in messages(count, due_ms)
    ]


async def put_grpc(address: str, topic: str, count: int, tasks: int) -> dict[str, float]:
    async with timeline.connect(address, timeout="60s") as client:
        producer, due_ms = client.producer(topic), Clock().now_ms() + PENDING_FROM_MS
        await client.topics()  # so that the connection exists

        async def call(one: tuple[str, bytes]) -> None:
            await producer.produce(one[1], at=due_ms, id=one[0])

        return await rate_of(count, tasks, iter(messages(count, due_ms)), call)


async def batch_grpc(address: str, topic: str, count: int, tasks: int) -> dict[str, float]:
    async with timeline.connect(address, timeout="60s") as client:
        producer, due_ms = client.producer(topic), Clock().now_ms() + PENDING_FROM_MS
        await client.topics()

        async def call(batch: timeline.Batch) -> None:
            (await producer.produce_many(batch)).raise_failed()

        batches = [batch_at(size, due_ms, PAYLOAD_BYTES) for size in batch_sizes(count, BATCH)]
        return await rate_of(count, tasks, iter(batches), call)


async def put_http(address: str, topic: str, count: int, tasks: int) -> dict[str, float]:
    async with http_client(address) as session:

        async def call(body: bytes) -> None:
            headers = {"Content-Type": "application/json"}
            async with session.post(f"/v1/topics/{topic}/messages", data=body, headers=headers) as answer:
                expect(answer, 201, await answer.read())

        return await rate_of(count, tasks, iter(bodies(count)), call)


async def batch_http(address: str, topic: str, count: int, tasks: int) -> dict[str, float]:
    async with http_client(address) as session:

        async def call(lines: bytes) -> None:
            headers = {"Content-Type": "application/x-ndjson"}
            async with session.post(f"/v1/topics/{topic}/messages", data=lines, headers=headers) as answer:
                said = await answer.read()
                expect(answer, 207, said)
                if set(json.loads(said)["counts"]) != {"OK"}:
                    raise CannotMeasure(f"not all were put: {said[:200]!r}")

        lines = [b"\n".join(bodies(size)) for size in batch_sizes(count, BATCH)]
        return await rate_of(count, tasks, iter(lines), call)


def expect(answer: aiohttp.ClientResponse, status: int, said: bytes) -> None:
    """Raise CannotMeasure for another status."""
    if answer.status != status:
        raise CannotMeasure(f"{answer.method} answered {answer.status}: {said[:200]!r}")


async def poll(address: str, topic: str, count: int, tasks: int) -> dict[str, float]:
    """Take until `count` messages came. Each is acknowledged by a call of its own poll's receipts."""
    late_ms: list[float] = []
    async with observed() as clock, http_client(address) as session:

        async def ack(receipts: list[str]) -> None:
            async with session.post("/v1/leases:ack", json={"receipts": receipts}) as answer:
                expect(answer, 207, await answer.read())

        async def work(acks: asyncio.TaskGroup) -> None:
            while len(late_ms) < count:
                async with session.post(f"/v1/topics/{topic}/leases", json=POLL) as answer:
                    said = await answer.read()
                now_ms = clock.now()
                expect(answer, 200, said)
                found = msgspec.json.decode(said)["messages"]
                late_ms.extend(now_ms - meant_of(one["payload_text"].encode()) for one in found)
                if found:
                    acks.create_task(ack([one["receipt"] for one in found]))

        await begun()
        async with asyncio.TaskGroup() as acks:
            await asyncio.gather(*(work(acks) for _ in range(tasks)))
    return {**latencies(late_ms), "messages": float(len(late_ms))}


async def receive(address: str, topic: str, count: int, tasks: int) -> dict[str, float]:
    """Answer webhooks until `count` came, and say how late each was. `address`, `topic` and `tasks` are not used."""
    late_ms: list[float] = []
    seen: set[str] = set()
    all_came = asyncio.Event()
    times: list[float] = []
    async with observed() as clock:

        async def hook(request: web.Request) -> web.Response:
            body = await request.read()
            if meant_of(body) == 0:
                print(BEGUN, flush=True)
                return web.Response(status=204)
            late_ms.append(clock.now() - meant_of(body))
            times.append(clock.monotonic_ms())
            seen.add(request.headers["webhook-id"])
            if len(seen) >= count:
                all_came.set()
            return web.Response(status=204)

        app = web.Application()
        app.router.add_post("/hook", hook)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        print(f"{READY} http://{host}:{port}/hook", flush=True)
        await all_came.wait()
        await runner.cleanup()
    per_s = (len(times) - 1) / max(1e-9, (times[-1] - times[0]) / 1000)
    return {**latencies(late_ms), "messages": float(len(seen)), "requests": float(len(late_ms)), "per_s": per_s}


async def click(address: str, topic: str, count: int, tasks: int) -> dict[str, float]:
    """Visit the console's pages `count` times. Return how long each took in the median, and the longest of all."""
    took_ms: dict[str, list[float]] = {name: [] for name in PAGES}
    clock = Clock()
    async with http_client(address) as session:

        async def visit(name: str) -> None:
            began_ms = clock.monotonic_ms()
            async with session.get(PAGES[name].format(topic=topic)) as answer:
                expect(answer, 200, await answer.read())
            took_ms[name].append(clock.monotonic_ms() - began_ms)

        async def work(number: int) -> None:
            names = [*PAGES]
            for at in range(count * len(PAGES)):
                if tasks > 1:
                    await asyncio.sleep(REST_S)
                await visit(names[(at + number) % len(names)])

        for name in PAGES:  # templates are compiled, and a connection is open
            await visit(name)
        took_ms = {name: [] for name in PAGES}
        await begun()
        await asyncio.gather(*(work(number) for number in range(tasks)))
    figures = {f"{name}_p50_ms": median(some) for name, some in took_ms.items()}
    every = [one for some in took_ms.values() for one in some]
    return {**figures, "page_max_ms": max(every), "visits": float(len(every))}


WORK: dict[str, Work] = {
    "put-grpc": put_grpc, "batch-grpc": batch_grpc, "put-http": put_http, "batch-http": batch_http,
    "poll": poll, "receive": receive, "click": click,
}  # fmt: skip


def main() -> None:
    what, address, topic, count, tasks = sys.argv[1:]
    print(json.dumps(asyncio.run(WORK[what](address, topic, int(count), int(tasks)))), flush=True)


if __name__ == "__main__":
    main()
