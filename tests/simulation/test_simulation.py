"""Some seeds on each change, thousands in `make test`; and what the simulation itself promises."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections import Counter

import pytest

from tests.simulation.__main__ import run_seeds
from tests.simulation.coverage import FAULTS, RARE, STATUSES, WIDE, WIDEST, missing
from tests.simulation.loop import Process, Stuck, Timer, VirtualLoop
from tests.simulation.world import SMALL, World

FEW = 12
LEAST_OPERATIONS = 300


@pytest.mark.prove
@pytest.mark.slow  # `make check` runs more of them anyway
def test_some_seeds_hold() -> None:
    report = run_seeds(list(range(FEW)))
    assert not report.failures, report.failures[0]
    assert report.seeds == FEW
    assert report.least_operations >= LEAST_OPERATIONS


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_seed_is_the_same_every_time(seed: int) -> None:
    first, second = World(seed, size=SMALL), World(seed, size=SMALL)
    first.run()
    second.run()
    assert first.history() == second.history()


@pytest.mark.slow
def test_seeds_differ() -> None:
    first, second = World(1, size=SMALL), World(2, size=SMALL)
    first.run()
    second.run()
    assert first.history() != second.history()


def test_what_was_never_met_is_named_once_there_were_seeds_enough() -> None:
    everything = {(operation, status) for operation, answers in STATUSES.items() for status in answers}
    statuses, occurred = Counter(dict.fromkeys(everything, 1)), Counter(dict.fromkeys(FAULTS, 1))
    assert missing(statuses, occurred, WIDEST) == []
    statuses["ack", "DEAD"] = statuses["get", "UNKNOWN"] = occurred["crash"] = 0
    assert missing(statuses, occurred, WIDE - 1) == []
    assert missing(statuses, occurred, WIDE) == ["ack DEAD", "crash"]
    assert missing(statuses, occurred, WIDEST) == ["ack DEAD", "get UNKNOWN", "crash"]
    assert {f"{operation} {status}" for operation, status in everything} >= RARE


@pytest.mark.slow
def test_what_others_are_wrongly_said_to_deal_is_swept_as_fast_as_credit_allows() -> None:
    world = World(1, brokers=1)
    world.store.trouble.slowest_s = 0.0
    world.belief.change(frozenset(range(3)), told=False)

    async def scene() -> float:
        await world.start_broker()
        async with world.client(world.process("p"), random.Random(1)) as client:
            await client.create_topic("t")
            await client.producer("t").produce_many([world.message(payload=b"x", in_=0) for _ in range(30)])
            async with client.consumer("t", id="c", credit=2) as consumer:
                for _ in range(30):
                    await (await anext(aiter(consumer))).ack()
        return world.loop.time()

    started_s = world.loop.time()
    took_s = world.loop.run_until_complete(scene()) - started_s
    world.loop.finish()
    sweep_s = (world.limits.sweep_every_ms + world.limits.stranded_after_ms) / 1_000.0
    assert took_s < 2 * sweep_s  # and not as many sweeps as credit fits into what there is


def _loop() -> VirtualLoop:
    return VirtualLoop(random.Random(1))


def test_time_jumps_to_the_next_timer() -> None:
    loop = _loop()
    started_s = loop.time()
    loop.run_until_complete(Timer(loop).wait(86_400.0))
    assert loop.time() == pytest.approx(started_s + 86_400.0)
    loop.finish()


def test_waiting_for_nothing_is_an_error() -> None:
    loop = _loop()
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())
    loop.finish()


def test_a_paused_process_goes_on_and_a_killed_one_never_does() -> None:
    loop = _loop()
    timer, seen = Timer(loop), []

    async def count(name: str) -> None:
        try:
            for _ in range(10):
                await timer.wait(1.0)
                seen.append((name, int(loop.time())))
        finally:
            seen.append((name, -1))

    async def scene() -> None:
        paused, killed = Process(loop, "paused"), Process(loop, "killed")
        task = paused.run(count("paused"))
        killed.run(count("killed"))
        await timer.wait(2.5)
        paused.pause()
        killed.kill()
        await timer.wait(5.0)
        assert len(seen) == 4
        paused.resume()
        await task

    loop.run_until_complete(scene())
    assert [when for name, when in seen if name == "killed"] == [1_001, 1_002]
    assert [when for name, when in seen if name == "paused"] == [1_001, 1_002, *range(1_007, 1_015), -1]
    loop.finish()


@pytest.mark.slow
def test_what_waits_on_its_way_out_is_closed_with_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = _loop()
    timer, said, seen = Timer(loop), [], []
    monkeypatch.setattr(sys, "unraisablehook", said.append)

    async def lingers() -> None:
        try:
            await timer.wait(5.0)
        finally:
            try:
                await timer.wait(5.0)
            finally:
                await timer.wait(5.0)
                seen.append("never")

    async def scene() -> None:
        Process(loop, "p").run(lingers())
        await timer.wait(1.0)

    loop.run_until_complete(scene())
    loop.finish()
    loop.tasks.clear()
    gc.collect()
    assert not said and not seen


def test_what_is_ready_runs_in_an_order_that_the_seed_decides() -> None:
    orders = set()
    for seed in range(20):
        loop = VirtualLoop(random.Random(seed))
        order: list[int] = []

        async def note(number: int, order: list[int] = order) -> None:
            order.append(number)

        async def all_of_them(note: object = note) -> None:
            await asyncio.gather(*(note(number) for number in range(4)))  # type: ignore[operator]

        loop.run_until_complete(all_of_them())
        loop.finish()
        orders.add(tuple(order))
    assert len(orders) > 5
