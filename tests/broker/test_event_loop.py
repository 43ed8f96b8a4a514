"""The broker's event loop: what asyncio does, and no timer rounded up to the next millisecond."""

from __future__ import annotations

import asyncio
import selectors
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from timeline.broker.server import process
from timeline.broker.server.process import new_loop

if sys.platform != "linux":
    pytest.skip("epoll is Linux's", allow_module_level=True)

from timeline.broker.server.process import MicrosecondSelector


@pytest.fixture
def selector() -> Iterator[MicrosecondSelector]:
    with MicrosecondSelector() as made:
        yield made


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.mark.parametrize("timeout", [None, -1.0, 0.0, 0.0005, 0.002, 5.0])
def test_what_is_ready_is_told_whatever_the_time(
    selector: MicrosecondSelector, pair: tuple[socket.socket, socket.socket], timeout: float | None
) -> None:
    key = selector.register(pair[0], selectors.EVENT_READ, "data")
    pair[1].send(b"x")
    assert selector.select(timeout) == [(key, selectors.EVENT_READ)]


@pytest.mark.parametrize("timeout", [-1.0, 0.0, 0.0003, 0.002, 0.0021, 0.004])
def test_nothing_is_told_when_the_time_is_over(
    selector: MicrosecondSelector, pair: tuple[socket.socket, socket.socket], timeout: float
) -> None:
    selector.register(pair[0], selectors.EVENT_READ)
    assert selector.select(timeout) == []


def test_short_waits_are_never_left_to_epoll(selector: MicrosecondSelector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would round them up."""
    asked: list[float | None] = []

    def select(self: object, timeout: float | None = None) -> list[object]:
        asked.append(timeout)
        return []

    monkeypatch.setattr(selectors.EpollSelector, "select", select)
    for timeout in (0.0003, 0.001, 0.0019):
        assert selector.select(timeout) == []
    assert asked == []
    selector.select(0.25)
    assert asked == [pytest.approx(0.249)]


def test_timers_of_a_loop_are_in_order_and_never_early() -> None:
    async def run() -> list[float]:
        loop, went = asyncio.get_running_loop(), asyncio.Queue[tuple[float, float]]()
        delays = [0.0047, 0.0003, 0.0019, 0.0031, 0.0003, 0.0]
        for delay in delays:
            due = loop.time() + delay
            loop.call_at(due, lambda due=due: went.put_nowait((due, loop.time())))
        found = [await went.get() for _ in delays]
        assert [due for due, _ in found] == sorted(due for due, _ in found)
        return [at - due for due, at in found]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        resolution = time.get_clock_info("monotonic").resolution
        assert min(runner.run(run())) >= -resolution


def test_a_signal_wakes_a_loop_from_a_short_wait_and_from_a_long_one() -> None:
    async def run(delay: float) -> None:
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, heard.set)
        timers = [loop.call_later(delay * times, lambda: None) for times in (1, 2, 3)]
        loop.call_soon(signal.raise_signal, signal.SIGUSR1)
        await heard.wait()
        for timer in timers:
            timer.cancel()
        loop.remove_signal_handler(signal.SIGUSR1)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        for delay in (0.0005, 60.0):
            runner.run(run(delay))


def test_a_process_with_too_many_files_has_asyncios_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "FD_SETSIZE", 0)
    made = new_loop()
    try:
        assert not isinstance(made._selector, MicrosecondSelector)  # type: ignore[attr-defined]
    finally:
        made.close()
    monkeypatch.undo()
    made = new_loop()
    try:
        assert isinstance(made._selector, MicrosecondSelector)  # type: ignore[attr-defined]
    finally:
        made.close()
