"""A store in trouble: everybody is told the reason, nothing waits for it longer than need be."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.broker.columns import make_leased
from tests.broker.link import broker, statuses
from tests.broker.slow import SlowStore
from timeline.broker import node
from timeline.broker.dispatch import dealer as dealing
from timeline.clock import Clock
from timeline.model import Answers, Operation, Status
from timeline.storage_plugins import make_store
from timeline.storage_plugins.contract import StoreUnavailable
from timeline.storage_plugins.memory import MemoryStore
from timeline.sync.view import LocalMembership
from timeline.wire import Deliver, TopicAction, TransportError


async def test_what_cannot_be_handed_back_is_given_up_after_the_last_try(monkeypatch: pytest.MonkeyPatch):
    waits: list[float] = []
    real = asyncio.sleep

    async def noted(wait_s: float) -> None:
        if wait_s:
            waits.append(wait_s)
        await real(0)

    store = SlowStore()
    async with broker(store) as link:
        topic = await link.node.catalog.find("t")
        assert topic is not None
        back = link.node.dealers.of(topic).own_settles
        store.refuse = {"settle"}
        monkeypatch.setattr(dealing.asyncio, "sleep", noted)
        back.release_unseen([make_leased([0])])
        await back.settled.wait()
        monkeypatch.undo()
        assert store.calls["settle"] == dealing.TRIES == len(waits) + 1


async def test_what_the_store_could_not_do_is_told_to_each_caller_with_the_reason():
    store = SlowStore()
    async with broker(store) as link:
        store.hold("put")
        pipes = [link.open("Produce") for _ in range(3)]
        pipes[0].up(link.puts(["first"]))
        await store.arrived("put")
        for pipe, ids in zip(pipes[1:], (["a", "b"], ["c"]), strict=True):
            pipe.up(link.puts(ids))
        while link.node.intake.waiting < 4:
            await asyncio.sleep(0)
        store.refuse = {"put"}
        store.release("put")
        assert statuses(await pipes[0].down()) == [Status.OK]
        for pipe, count in zip(pipes[1:], (2, 1), strict=True):
            told = await pipe.down()
            assert statuses(told) == [Status.UNAVAILABLE] * count
            assert "put is refused" in told.answers.details[0]


async def test_what_the_store_could_not_settle_is_told_to_each_consumer_with_the_reason():
    store = SlowStore()
    async with broker(store) as link:
        await link.put(["a", "b", "c"])
        pipes = [await link.consume(name, credit=1) for name in ("c1", "c2", "c3")]
        got = [await pipe.down(Deliver) for pipe in pipes]
        store.hold("settle")
        settling = [asyncio.ensure_future(link.settle(pipes[0], got[0], Operation.ACK))]
        await store.arrived("settle")
        settling += [asyncio.ensure_future(link.settle(pipes[at], got[at], Operation.ACK)) for at in (1, 2)]
        while link.node.settling.waiting < 3:
            await asyncio.sleep(0)
        store.refuse = {"settle"}
        store.release("settle")
        told = await asyncio.gather(*settling)
        assert [statuses(one) for one in told] == [[Status.OK], [Status.UNAVAILABLE], [Status.UNAVAILABLE]]
        assert all("settle is refused" in one.answers.details[0] for one in told[1:])


async def test_a_call_under_way_is_answered_before_a_drain_ends():
    store = SlowStore()
    async with broker(store) as link:
        await link.put(["a"], in_ms=3_600_000)
        store.hold("mutate")
        cancelling = asyncio.ensure_future(link.mutate(Operation.CANCEL, ["a"]))
        await store.arrived("mutate")
        draining = asyncio.ensure_future(link.node.drain(3_600_000))
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert not draining.done()
        store.release("mutate")
        assert statuses(await cancelling) == [Status.OK]
        await draining


async def test_a_drain_whose_grace_is_over_waits_for_no_store(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node, "FINISH_S", 3_600.0)
    store = SlowStore()
    async with broker(store) as link:
        store.hold("put")
        link.begin_put(["a"])
        await store.arrived("put")
        await link.node.drain(20)
        assert link.node.not_ready
        monkeypatch.undo()
        store.release("put")


async def test_a_store_that_goes_down_is_told_to_the_log_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "timeline.broker")
    store = SlowStore()
    async with broker(store) as link:
        store.refuse = {"put", "topics"}
        await link.put(["a"])
        with pytest.raises(StoreUnavailable):
            await link.node.store.call("topics", store.topics())
        assert link.node.store.down
        await link.node._check_store()
        assert not link.node.store.down
    told = [record.getMessage() for record in caplog.records if "the store is" in record.getMessage()]
    down = "the store is down, and asked again until it is back: put is refused by the test"
    assert told == [down, "the store is back"]


async def test_a_call_that_fails_when_nobody_waits_for_it_any_more_is_no_news_of_asyncio_s():
    """As a sweep's does that is under way when the broker ends."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    closed = asyncio.Event()

    async def sweep() -> None:
        await closed.wait()
        raise StoreUnavailable("the store is not open")

    async with broker(MemoryStore()) as link:
        waiting = asyncio.ensure_future(link.node.store.call("sweep", sweep()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting  # its traceback holds what it waited for
        closed.set()
        while link.node.store._under_way:
            await asyncio.sleep(0)
    gc.collect()
    assert not told


class Forgetful(MemoryStore):
    """Forgets the last answer of each call while `forgets`."""

    forgets = False

    def _cut(self, answers: Answers) -> Answers:
        return answers.slice(0, len(answers) - 1) if self.forgets else answers

    async def put(self, *asked: Any) -> Answers:
        return self._cut(await super().put(*asked))

    async def settle(self, *asked: Any) -> Answers:
        return self._cut(await super().settle(*asked))

    async def mutate(self, *asked: Any) -> Answers:
        return self._cut(await super().mutate(*asked))


async def test_a_plugin_that_does_not_answer_for_each_message_answers_for_none():
    store = Forgetful()
    async with broker(store) as link:
        consumer = await link.consume()
        await link.put(["a"])
        got = await consumer.down(Deliver)
        store.forgets = True
        ids = ["", "b", "c"]  # one of them is refused before the store hears of it
        told = [await link.put(ids), await link.mutate(Operation.CANCEL, ids)]
        assert [statuses(one) for one in told] == [[Status.INVALID, Status.UNKNOWN, Status.UNKNOWN]] * 2
        settled = await link.settle(consumer, got, Operation.ACK)
        assert statuses(settled) == [Status.UNKNOWN]
        assert all(
            "0 answers for 1" in why or "1 answers for 2" in why
            for why in (settled.answers.details[0], told[0].answers.details[1], told[1].answers.details[1])
        )


class Broken(MemoryStore):
    """Raises what no plugin should, for puts, moves and cancels."""

    async def put(self, *asked: Any) -> Answers:
        raise ZeroDivisionError("seven")

    async def mutate(self, *asked: Any) -> Answers:
        raise ZeroDivisionError("eight")


async def test_what_a_plugin_must_not_raise_is_unknown_and_the_broker_goes_on():
    async with broker(Broken()) as link:
        for _ in range(2):
            for told in (await link.put(["a", "b"]), await link.mutate(Operation.CANCEL, ["a", "b"])):
                assert statuses(told) == [Status.UNKNOWN] * 2
                assert "ZeroDivisionError" in told.answers.details[0]
        assert not link.node.not_ready


class Garbled(MemoryStore):
    """Does each call, and answers it by `wrong[name]`, once for each time in `times`."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: dict[str, Callable[[Any], Any]] = {}
        self.times = 1

    async def _garbled(self, name: str, work: Any) -> Any:
        answer = await work
        if name not in self.wrong or not self.times:
            return answer
        self.times -= 1
        return self.wrong[name](answer)

    async def put(self, *asked: Any) -> Any:
        return await self._garbled("put", super().put(*asked))

    async def lease_due(self, *asked: Any) -> Any:
        return await self._garbled("lease_due", super().lease_due(*asked))

    async def update_topic(self, *asked: Any) -> Any:
        return await self._garbled("update_topic", super().update_topic(*asked))


def cancelled(_: Any) -> Any:
    raise asyncio.CancelledError  # as from a task of the plugin's own


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda _: None, "answered put with None, not Answers"),
        (lambda told: replace(told, version=told.version[1:]), "a version of 1 items for 2 messages"),
        (lambda told: replace(told, due_ms=told.due_ms.tolist()), "a due_ms of -1 items"),
        (lambda told: replace(told, status=told.status + 0.5), "a status of float64, not integers"),
        (cancelled, "CancelledError"),
    ],
)
async def test_a_put_that_a_plugin_answers_wrongly_is_unknown(wrong: Callable[[Any], Any], said: str):
    store = Garbled()
    async with broker(store) as link:
        store.wrong["put"] = wrong
        told = await link.put(["a", "b"])
        assert statuses(told) == [Status.UNKNOWN] * 2
        assert said in told.answers.details[0]
        assert statuses(await link.put(["c"])) == [Status.OK]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda _: None,
        cancelled,
        lambda leased: replace(leased, rows=None),
        lambda leased: replace(leased, grant=leased.grant[1:]),
        lambda leased: replace(leased, grant=leased.grant + 7),
        lambda leased: replace(leased, next_due_ms="soon"),
        lambda leased: replace(leased, rows=replace(leased.rows, version=leased.rows.version[1:])),
    ],
)
async def test_a_lease_that_a_plugin_answers_wrongly_stops_no_topic(wrong: Callable[[Any], Any]):
    store = Garbled()
    async with broker(store) as link:
        store.wrong["lease_due"] = wrong
        consumer = await link.consume()
        await link.put(["a"])
        while store.times:
            await asyncio.sleep(0)
        assert statuses(await link.put(["b"])) == [Status.OK]
        got = await consumer.down(Deliver)
        assert got.ids.tolist() == [b"b"]  # "a" is leased to nobody until its lease runs out


async def test_a_topic_whose_change_a_plugin_answers_wrongly_stays():
    store = Garbled()
    async with broker(store) as link:
        store.wrong["update_topic"] = lambda _: None
        with pytest.raises(TransportError, match="answered update_topic with None"):
            await link.topic(TopicAction.UPDATE, lease_ms=31_000)
        assert statuses(await link.put(["a"])) == [Status.OK]


async def test_a_cancel_that_the_store_could_not_do_says_why_and_when_to_come_again():
    store = SlowStore()
    async with broker(store) as link:
        store.refuse = {"mutate"}
        told = await link.mutate(Operation.CANCEL, ["a"])
        assert statuses(told) == [Status.UNAVAILABLE] and told.retry_after_ms > 0
        assert "mutate is refused" in told.answers.details[0]


class Leaving(LocalMembership):
    """Cannot be left in order."""

    async def stop(self) -> None:
        raise ConnectionError("nobody there")


async def test_a_store_is_closed_though_the_cluster_cannot_be_left(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/a.db"
    made = node.Node(
        store=make_store(url), clock=Clock(), membership=Leaving(), random_bits=random.getrandbits, name="b1"
    )
    await made.start()
    with pytest.raises(ConnectionError):
        await made.stop()
    async with broker(url):  # the file is free again
        pass


async def test_an_error_of_ours_beside_a_put_or_a_settle_is_an_answer_and_keeps_no_room(
    monkeypatch: pytest.MonkeyPatch,
):
    """As in what is told of, once the store has done it."""

    def stumble(*_: Any) -> None:
        raise ZeroDivisionError("nine")

    async with broker() as link:
        node, consumer = link.node, await link.consume()
        await link.put(["a"])
        got = await consumer.down(Deliver)
        monkeypatch.setattr(node.intake, "_scheduled", stumble)
        monkeypatch.setattr(node.settling, "_scheduled", stumble)
        for ids in (["b"], ["c", "d"]):
            told = await link.put(ids)
            assert statuses(told) == [Status.UNKNOWN] * len(ids) and "nine" in told.answers.details[0]
        settled = await link.settle(consumer, got, Operation.RELEASE, 3_600_000)
        assert statuses(settled) == [Status.UNKNOWN] and "nine" in settled.answers.details[0]
        assert (node.intake.waiting, node.settling.waiting) == (0, 0)
        monkeypatch.undo()
        assert statuses(await link.put(["e"])) == [Status.OK]
        for task, count in (("intake", 2.0), ("settling", 1.0)):
            assert node.metrics.registry.get_sample_value("timeline_task_crashes_total", {"task": task}) == count
