"""The tasks of a broker: how they end."""

from __future__ import annotations

import asyncio

import pytest

from timeline.broker.runtime import Tasks


def crashed(name: str, crash: BaseException) -> None:
    raise AssertionError(f"{name} crashed: {crash}")


async def test_what_a_cancelled_task_still_asks_of_others_is_done() -> None:
    """A look at schedules ends its leases when it is cancelled, by a call of the store that begins then."""
    tasks, done = Tasks(crashed), list[str]()

    async def call(answer: asyncio.Future[None]) -> None:
        await asyncio.sleep(0)
        answer.set_result(None)

    async def ask(what: str) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tasks.spawn(call(answer), what, finishes=True)
        await answer
        done.append(what)

    async def look() -> None:
        try:
            await ask("settling")
            await asyncio.Event().wait()
        finally:
            await ask("settling again")

    tasks.spawn(look(), "looking")
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await tasks.cancel(finish_s=60)
    assert done == ["settling", "settling again"]


@pytest.mark.slow
async def test_a_task_that_waits_for_what_never_comes_holds_up_no_stop() -> None:
    """Both are cancelled before the second one has begun, so nobody answers the first one."""
    tasks, ended = Tasks(crashed), list[str]()

    async def look() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("look")

    tasks.spawn(look(), "looking")
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await tasks.cancel(finish_s=0)
    assert ended == ["look"]
