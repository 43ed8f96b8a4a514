"""The same words without await, from plain threads, and after a fork."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import timeline
from timeline import Batch, Message, Status
from timeline.driver.blocking.calls import Background
from timeline.driver.transport.grpc_transport import GrpcTransport


def test_a_message_goes_round_without_await(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            assert p.produce(b"1", in_=0, id="m1").status is Status.OK
            assert p.produce_many([Message(b"2", in_="1h", id="m2")]).counts == {Status.OK: 1}
            assert [r.id for r in p.produce_iter(Message(b"3", in_="2h", id=f"n{n}") for n in range(3))] == [
                "n0",
                "n1",
                "n2",
            ]
            assert p.move("m2", at=1_900_000_000_000).version == 2
            assert p.cancel("m2").ok
            assert p.produce(b"old", in_="1h", id="m3").version == 1
            assert p.produce(b"new", in_="1h", id="m3", if_exists="move").moved
            assert p.produce(b"new", in_="1h", id="m3", if_exists="replace").version == 1
            stored = tl.get("t", "m3")
            assert stored is not None and stored.payload == b"new"
            assert p.produce_many(Batch([b"newer"], in_="1h", ids=["m3"]), if_exists="replace")[0].ok
            assert p.cancel("m3").ok
            for d in c:
                assert (d.id, d.payload) == ("m1", b"1")
                assert d.extend("1m") == d.lease_until
                d.ack()
                break
            p.produce_many(Batch([b""] * 50, in_=0))
            left = 50
            for b in c.batches():
                assert b[0].id == b.ids[0].decode()
                assert not b.ack().failed
                left -= len(b)
                if not left:
                    break
            with pytest.raises(timeline.NotFound):
                p.cancel("absent")
        assert sorted(m.id for m in tl.scan("t")) == ["n0", "n1", "n2"]
        assert tl.get("t", "absent") is None
        assert [t.name for t in tl.topics()] == ["t"]
        assert tl.ping().broker == "b1"
    with pytest.raises(timeline.Closed):
        tl.topics()
    with pytest.raises(timeline.Closed):
        p.produce(b"", in_=0)
    assert "timeline" not in {thread.name for thread in threading.enumerate()}


def test_one_producer_serves_all_threads(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p, ThreadPoolExecutor(8) as pool:
            receipts = list(pool.map(lambda n: p.produce(b"%d" % n, in_="1h", id=f"m{n}"), range(200)))
        assert [r.id for r in receipts] == [f"m{n}" for n in range(200)]
        assert all(r.ok for r in receipts)


def test_run_blocks_until_it_is_told_to_stop(served: str) -> None:
    seen: list[str] = []
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            p.produce_many(Batch([b""] * 20, in_=0))

            def handler(d: timeline.SyncDelivery) -> None:
                seen.append(d.id)
                if len(seen) == 20:
                    os.kill(os.getpid(), signal.SIGTERM)

            c.run(handler, concurrency=1)
        assert len(seen) == 20
        assert list(tl.scan("t")) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_clients_own_thread_is_refused(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            p.produce(b"", in_=0)

            async def handler(d: timeline.Delivery) -> None:
                with pytest.raises(timeline.Invalid, match="asynchronous client"):
                    tl.topics()
                c._target.stop_taking()

            c.run(handler)


CHILD = """
import asyncio, os, signal, sys, timeline
address = sys.argv[1]

def forked(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # ends a child that hangs
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status

def in_own_loop(work):
    with asyncio.Runner() as own:
        own.run(work)

def sync_way():
    tl = timeline.connect_sync(address, timeout="20s")
    p = tl.producer("t")
    assert p.produce(b"", in_="1h", id="parent").ok

    def child():
        assert p.produce(b"", in_="1h", id="child").ok
        assert {m.id for m in tl.scan("t")} == {"parent", "child"}

    forked(child)
    assert p.produce(b"", in_="1h", id="parent again").ok
    tl.close()

async def one(tl, p, id):
    assert (await p.produce(b"", in_="1h", id=id)).ok

def async_way():
    tl = timeline.connect(address, timeout="20s")
    p = tl.producer("t")
    with asyncio.Runner() as runner:
        runner.run(one(tl, p, "async parent"))
        forked(lambda: in_own_loop(one(tl, p, "async child")))
        runner.run(one(tl, p, "async parent again"))
        runner.run(tl.aclose())

async def first_of_two(tl, c):
    p = tl.producer("t")
    await p.produce_many(timeline.Batch([b""] * 2, in_=0))
    first = await c.take()
    while not c._in_flight.ready:
        await asyncio.sleep(0)
    return first

async def in_child(c, first):
    try:
        await first.ack()
    except timeline.Closed as told:
        assert "forked" in str(told), told
    else:
        raise AssertionError("the parent's delivery was settled in its child")
    d = await c.take()
    assert d.version == 3, "the parent's buffer was handed out in its child"

def consumer_way():
    tl = timeline.connect(address, timeout="20s")
    c = tl.consumer("t", id="w")
    with asyncio.Runner() as runner:
        first = runner.run(first_of_two(tl, c))
        forked(lambda: in_own_loop(in_child(c, first)))
        runner.run(tl.aclose())

def nameless_way():
    tl = timeline.connect_sync(address, timeout="20s")
    p = tl.producer("t")
    unused, used = tl.consumer("t", credit=1), tl.consumer("t", credit=1)
    p.produce(b"", in_=0, id="parent's")
    held, names = used.take(), {used.id, unused.id}
    assert held.id == "parent's" and len(names) == 2

    def child():
        assert not {used.id, unused.id} & names, "a child goes by its parent's name"
        for c in (used, unused):
            p.produce(b"", in_=0)
            c.take().ack()
            c.close()

    forked(child)
    assert {used.id, unused.id} == names
    held.ack()
    p.produce(b"", in_=0, id="parent's again")
    assert used.take().id == "parent's again"
    tl.close()

def closing_way():
    tl = timeline.connect_sync(address, timeout="20s")
    p, c = tl.producer("t"), tl.consumer("t", id="w")
    p.produce(b"", in_=0)
    held = c.take()

    def child():
        for each in (p, c, tl):
            each.close()

    forked(child)
    forked(tl.close)
    held.ack()
    assert p.produce(b"", in_="1h", id="parent again").ok
    tl.close()

async def opened(tl, p, c, h):
    await p.produce(b"", in_=0)
    await h.__aenter__()
    return await c.take()

async def closed(*all):
    for each in all:
        await each.aclose()

def async_closing_way():
    tl = timeline.connect(address, timeout="20s")
    all = tl.producer("t"), tl.consumer("t", id="w"), tl.holding("t", "h")
    with asyncio.Runner() as runner:
        held = runner.run(opened(tl, *all))
        forked(lambda: in_own_loop(closed(*all, tl)))
        forked(lambda: in_own_loop(closed(tl, *all)))
        runner.run(held.ack())
        runner.run(one(tl, all[0], "parent again"))
        runner.run(closed(tl, *all))

ways = {
    "sync": sync_way,
    "async": async_way,
    "consumer": consumer_way,
    "nameless": nameless_way,
    "closing": closing_way,
    "async closing": async_closing_way,
}
ways[sys.argv[2]]()
"""


@pytest.mark.processes
@pytest.mark.parametrize("way", ["sync", "async", "consumer", "nameless", "closing", "async closing"])
def test_after_a_fork_parent_and_child_each_have_their_own_connection(served: str, way: str) -> None:
    with timeline.connect_sync(served, timeout="20s") as tl:
        tl.create_topic("t")
    done = subprocess.run([sys.executable, "-c", CHILD, served, way], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")  # what a child leaves behind as it ends says nothing, either


TWINS = [
    (timeline.Timeline, timeline.SyncTimeline),
    (timeline.Producer, timeline.SyncProducer),
    (timeline.Consumer, timeline.SyncConsumer),
    (timeline.Delivery, timeline.SyncDelivery),
    (timeline.DeliveryBatch, timeline.SyncDeliveryBatch),
]
DOCUMENTED = {timeline.Consumer: {"stats", "aclose", "stop_taking", "taking", "take", "batches", "take_batch", "run"}}
"""The words of a consumer that are a user's; the others are for what it hands out."""


@pytest.mark.parametrize(("one", "twin"), TWINS, ids=lambda kind: kind.__name__)
def test_the_words_without_await_are_the_same_ones(one: type, twin: type) -> None:
    words = DOCUMENTED.get(one) or {name for name in dir(one) if not name.startswith("_")}
    # `holding` is for data pipelines, which run an event loop of their own.
    for word in words - {"aclose", "closed", "topic", "group", "holding"}:
        asked, answered = getattr(one, word), getattr(twin, word)
        if not callable(asked):
            continue
        wanted, given = (inspect.signature(each).parameters.values() for each in (asked, answered))
        assert [(each.name, each.kind, each.default) for each in given] == [
            (each.name, each.kind, each.default) for each in wanted
        ], word
    assert ("aclose" in words) == hasattr(twin, "close")


def test_batches_and_pages_are_taken_one_by_one(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t", timeout="5s")
        with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            p.produce_many(Batch([b"x"] * 3, in_=0))
            batch = c.take_batch()
            assert batch is not None and c.taking
            assert sum(len(page.rows) for page in tl.scan_pages("t", state="leased")) == 3
            assert not batch.ack().failed
        assert not c.taking and c.take_batch() is None


def test_a_few_are_taken_within_a_bounded_wait(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            assert c.take(max=10, wait="1ms") == []
            p.produce_many(Batch([b"x"] * 3, in_=0))
            met: set[str] = set()
            while len(met) < 3:
                taken = c.take(max=2, wait="20s")
                assert 1 <= len(taken) <= 2
                met |= {d.id for d in taken}
                for d in taken:
                    d.ack()
            assert list(tl.scan("t")) == []
        with pytest.raises(timeline.Closed):
            c.take(max=1, wait="1s")


@pytest.mark.parametrize("take", [lambda c: c.take(), lambda c: c.take(10, "20s"), lambda c: c.take_batch()])
def test_ctrl_c_amid_a_take_puts_back_what_was_taken(
    served: str, monkeypatch: pytest.MonkeyPatch, take: Callable[[Any], Any]
) -> None:
    """It may come when the client's thread has taken, and this one was not handed it yet."""
    wait = Background.wait

    def interrupted(future: Future[Any]) -> Any:
        monkeypatch.setattr(Background, "wait", staticmethod(wait))
        wait(future)
        raise KeyboardInterrupt

    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            p.produce_many(Batch([b"x"] * 3, in_=0, ids=list("abc")))
            monkeypatch.setattr(Background, "wait", staticmethod(interrupted))
            with pytest.raises(KeyboardInterrupt):
                take(c)
            met: list[Any] = []
            while len(met) < 3:
                met += c.take(max=10, wait="20s")
            assert sorted((d.id, d.deliveries) for d in met) == [("a", 1), ("b", 1), ("c", 1)]
            assert c.stats.delivered == 3
            for d in met:
                d.ack()
            assert list(tl.scan("t")) == []


def test_inside_a_running_loop_it_is_refused_and_in_a_thread_it_works(served: str) -> None:
    async def program() -> list[str]:
        tl = timeline.connect_sync(served, timeout="10s")
        p = tl.producer("t")
        for call in (tl.topics, lambda: p.produce(b"", in_=0), lambda: list(tl.scan("t")), tl.close):
            with pytest.raises(
                timeline.Invalid, match=r"use timeline.connect\(\) and await here, or run .*to_thread\(f\)"
            ):
                call()

        def in_a_thread() -> list[str]:
            with timeline.connect_sync(served, timeout="10s") as mine:
                return [topic.name for topic in mine.topics()]

        return await asyncio.to_thread(in_a_thread)

    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
    assert asyncio.run(program()) == ["t"]


def test_a_block_that_is_refused_in_a_loop_raises_one_error(served: str) -> None:
    """Closing would be refused, too. That error would only hide the first one's remedy below a second traceback."""

    def puts() -> None:
        with timeline.connect_sync(served, timeout="10s") as tl, tl.producer("t") as p:
            p.produce(b"", in_=0)

    def scans() -> None:
        with timeline.connect_sync(served, timeout="10s") as tl:
            list(tl.scan("t"))

    def takes() -> None:
        with timeline.connect_sync(served, timeout="10s") as tl, tl.consumer("t") as c:
            next(iter(c))

    def closes() -> None:
        with timeline.connect_sync(served, timeout="10s"):
            pass

    async def program() -> None:
        for block in (puts, scans, takes, closes):
            with pytest.raises(timeline.Invalid) as refused:
                block()
            assert refused.value.__context__ is None, block

    asyncio.run(program())


def test_an_error_for_all_handlers_has_a_short_traceback(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        for _ in range(2):
            with tl.consumer("absent") as c, pytest.raises(timeline.NotFound) as refused:
                c.run(lambda _: None)
            assert [frame.name for frame in refused.traceback].count("work") == 1
        with tl.consumer("absent") as c, pytest.raises(timeline.NotFound) as refused:
            next(iter(c))
        assert "_conclude" not in [frame.name for frame in refused.traceback]


def test_ctrl_c_breaks_a_scan_off(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(self: object, method: str, frame: bytes, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        await asyncio.Event().wait()
        yield b""

    monkeypatch.setattr(GrpcTransport, "unary_stream", stuck)
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with pytest.raises(KeyboardInterrupt):
            list(tl.scan("t"))
        assert [topic.name for topic in tl.topics()] == ["t"]


def test_a_handler_that_exits_ends_the_run_and_not_the_hope_of_an_answer(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p:
            p.produce(b"", in_=0)

        async def handler(d: timeline.Delivery) -> None:
            raise SystemExit(3)

        with pytest.raises(SystemExit):
            tl.consumer("t", id="w").run(handler)
        assert [topic.name for topic in tl.topics()] == ["t"]


def test_a_close_where_it_may_not_be_closes_nothing(served: str) -> None:
    tl = timeline.connect_sync(served)

    async def closes() -> None:
        tl.close()

    with pytest.raises(timeline.Invalid, match="would block the event loop"):
        asyncio.run(closes())
    with pytest.raises(timeline.Invalid, match="the client's own thread"):
        tl._run(closes())
    assert tl.topics() == []
    tl.close()
    tl.close()
