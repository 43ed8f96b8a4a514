"""UNKNOWN means that something may have happened: what each call raises beside a broker that answers no more."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import timeline
from timeline.driver.blocking.client import SyncTimeline
from timeline.driver.consume.pull import LeaseToken

PATIENCE = "400ms"
RECEIPT = LeaseToken("t", "h", b"a", 1, 1).receipt()
LATER = 1_900_000_000_000


async def _all(pages: Any) -> list[Any]:
    return [each async for each in pages]


CALLS: dict[str, tuple[bool, Callable[[Any, Any], Any]]] = {
    "topics": (False, lambda tl, p: tl.topics()),
    "forecast": (False, lambda tl, p: tl.forecast("t")),
    "ping": (False, lambda tl, p: tl.ping()),
    "standing": (False, lambda tl, p: tl.standing()),
    "late": (False, lambda tl, p: tl.late()),
    "why": (False, lambda tl, p: tl.why("t", "a")),
    "count": (False, lambda tl, p: tl.count("t")),
    "get": (False, lambda tl, p: tl.get("t", "a")),
    "scan": (False, lambda tl, p: tl.scan("t")),
    "scan_pages": (False, lambda tl, p: tl.scan_pages("t")),
    "dead": (False, lambda tl, p: tl.dead("t")),
    # These ask for the broker's version first.
    "take": (False, lambda tl, p: tl.take("t", wait=0)),
    "settle": (False, lambda tl, p: tl.settle(RECEIPT, "ack")),
    "move_tag, dry": (False, lambda tl, p: p.move_tag("spring", by="1h", dry_run=True)),
    "cancel_tag, dry": (False, lambda tl, p: p.cancel_tag("spring", dry_run=True)),
    # These look at what is there before they change anything.
    "move_tag": (False, lambda tl, p: p.move_tag("spring", by="1h")),
    "cancel_tag": (False, lambda tl, p: p.cancel_tag("spring")),
    "create_topic": (True, lambda tl, p: tl.create_topic("new")),
    "update_topic": (True, lambda tl, p: tl.update_topic("t", lease="1m")),
    "pause_topic": (True, lambda tl, p: tl.pause_topic("t")),
    "resume_topic": (True, lambda tl, p: tl.resume_topic("t")),
    "topic_secrets": (True, lambda tl, p: tl.topic_secrets("t", rotate=True)),
    "topic_secrets, seen": (False, lambda tl, p: tl.topic_secrets("t")),
    "drop_topic": (True, lambda tl, p: tl.drop_topic("t")),
    "get_schedule": (False, lambda tl, p: tl.get_schedule("t", "s")),
    "schedules": (False, lambda tl, p: tl.schedules()),
    "schedule": (True, lambda tl, p: tl.schedule("t", "s", every="1h")),
    "create_schedule": (True, lambda tl, p: tl.create_schedule(timeline.Specification("t", "s", every_ms=3_600_000))),
    "produce": (True, lambda tl, p: p.produce(b"", at=LATER, id="b")),
    "produce_many": (True, lambda tl, p: p.produce_many(timeline.Batch([b""], at=LATER))),
    "move": (True, lambda tl, p: p.move("a", at=LATER)),
    "move_many": (True, lambda tl, p: p.move_many(["a"], at=LATER)),
    "cancel": (True, lambda tl, p: p.cancel("a")),
    "cancel_many": (True, lambda tl, p: p.cancel_many(["a"])),
    "revive": (True, lambda tl, p: p.revive(["a"], at=LATER)),
    "purge": (True, lambda tl, p: p.purge(["a"])),
}
"""Each call: whether it changes something, and how it is made."""
NO_CALLS = {"aclose", "produce_iter"}
"""The first waits for what is under way; the second yields receipts, which say UNKNOWN as `produce` does."""


def _there(kind: type) -> set[str]:
    awaited = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    named = ((name, method) for name, method in inspect.getmembers(kind) if not name.startswith("_"))
    return {name for name, method in named if any(is_one(method) for is_one in awaited)}


def test_every_call_is_in_the_table() -> None:
    there = _there(timeline.Timeline) | _there(timeline.Producer)
    assert there - NO_CALLS == {name for name in CALLS if "," not in name}


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a broker process, and what stops it in its tracks. A test's parameter: more options of its own."""
    given = ("--listen", "127.0.0.1:0", "--metrics", "off", "--json")
    command = [sys.executable, "-m", "timeline", "serve", *given, *getattr(request, "param", ())]
    broker = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert broker.stdout is not None
        yield json.loads(broker.stdout.readline())["listen"], lambda: broker.send_signal(signal.SIGSTOP)
    finally:
        broker.kill()
        broker.communicate()


def _expected(name: str, told: type[timeline.TimelineError]) -> None:
    writes = CALLS[name][0]
    assert told is (timeline.Unknown if writes else timeline.Unavailable), name


async def _told(call: Coroutine[Any, Any, Any]) -> type[timeline.TimelineError]:
    try:
        answer = await call
    except timeline.TimelineError as error:
        return type(error)
    raise AssertionError(f"a stopped broker answered {answer}")


@pytest.mark.processes
async def test_a_stopped_broker(served: tuple[str, Callable[[], None]]) -> None:
    address, stop = served
    async with timeline.connect(address, timeout=PATIENCE) as tl:
        await tl.create_topic("t", timeout="10s")
        clients = {name: timeline.connect(address, timeout=PATIENCE) for name in CALLS}
        producers = {name: client.producer("t") for name, client in clients.items()}
        await tl.producer("t").produce(b"", at=LATER, id="a", tag="spring", timeout="10s")
        for number, (name, client) in enumerate(clients.items()):  # each is connected, and its stream is open
            await client.ping(timeout="10s")
            await producers[name].produce(b"", at=LATER, id=f"warm{number}", timeout="10s")
        consumer = tl.consumer("t", id="c", lease="30s")
        await tl.producer("t").produce(b"", in_=0, id="due", timeout="10s")
        delivery = await consumer.take()
        assert delivery is not None
        stop()
        made = {}
        for name, client in clients.items():
            call = CALLS[name][1](client, producers[name])
            made[name] = call if inspect.iscoroutine(call) else _all(call)
        told = dict(zip(made, await asyncio.gather(*map(_told, made.values())), strict=True))
        for name, kind in told.items():
            _expected(name, kind)
        settles = (delivery.extend("1m", timeout=PATIENCE), delivery.ack(timeout=PATIENCE))
        # The second waits for the first one's answer, and is never sent.
        assert [await _told(settle) for settle in settles] == [timeline.Unknown, timeline.Unavailable]
        await asyncio.gather(*(client.aclose() for client in clients.values()))


@pytest.mark.processes
def test_a_stopped_broker_without_await(served: tuple[str, Callable[[], None]]) -> None:
    address, stop = served
    clients: dict[str, tuple[SyncTimeline, Any]] = {}
    for name in CALLS:
        client = timeline.connect_sync(address, PATIENCE)
        client.create_topic("t", timeout="10s")
        clients[name] = client, client.producer("t")
        clients[name][1].produce(b"", at=LATER, timeout="10s")
    stop()

    def told(name: str) -> type[timeline.TimelineError]:
        client, producer = clients[name]
        try:
            with pytest.raises((timeline.Unavailable, timeline.Unknown)) as raised:
                list(CALLS[name][1](client, producer))
            return raised.type
        finally:
            client.close()

    with ThreadPoolExecutor(len(CALLS)) as threads:
        for name, kind in zip(CALLS, threads.map(told, CALLS), strict=True):
            _expected(name, kind)


@pytest.mark.processes
@pytest.mark.parametrize("served", [("--max-streams", "1")], indirect=True)
async def test_what_is_refused_past_the_limit_of_streams_was_never_put(served: tuple[str, Callable[[], None]]) -> None:
    """Each attempt meets a refusal, which may cross with what is sent."""
    told: Counter[type] = Counter()
    async with timeline.connect(served[0], timeout="10s") as tl:
        await tl.create_topic("t")
        first = tl.producer("t")
        await first.produce(b"", at=LATER)  # its stream is the one
        for at in range(40):
            async with timeline.connect(served[0], timeout="100ms") as other:
                name = ("produce", "produce_many")[at % 2]
                told[await _told(CALLS[name][1](other, other.producer("t")))] += 1
    assert told == {timeline.Unavailable: 40}
