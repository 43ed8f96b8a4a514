"""A coroutine that goes on though nobody waits for it."""

from __future__ import annotations

import asyncio

import pytest

from timeline.broker.server.begun import Begun


async def test_it_begins_at_once_and_its_end_is_waited_for():
    gate, steps = asyncio.get_running_loop().create_future(), []

    async def work() -> None:
        steps.append("begun")
        await gate
        await asyncio.sleep(0)
        steps.append("ended")

    begun = Begun(work())
    assert steps == ["begun"] and not begun.over
    asyncio.get_running_loop().call_soon(gate.set_result, None)
    await begun.wait()
    await begun.wait()
    assert steps == ["begun", "ended"] and begun.over


async def test_what_never_waits_is_over_at_once():
    async def work() -> None:
        return

    begun = Begun(work())
    assert begun.over
    await begun.wait()


async def test_whoever_waits_may_be_cancelled_and_it_goes_on():
    gate, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await gate.wait()
        ended.set()

    begun = Begun(work())
    waiting = asyncio.ensure_future(begun.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not begun.over
    gate.set()
    await begun.wait()
    assert ended.is_set()


@pytest.mark.parametrize("late", [False, True])
async def test_an_error_is_told_to_all_who_ask(late: bool):
    async def work() -> None:
        if late:
            await asyncio.sleep(0)
        raise ConnectionError("gone")

    begun = Begun(work())
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            await begun.wait()
