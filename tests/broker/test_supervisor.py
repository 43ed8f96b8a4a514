"""The supervisor of workers, with small programs in their place: what they print, what they do not read, its port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from timeline.broker.server.workers import MOST_UNSENT_BYTES, Started, Supervisor, _reserved
from timeline.config import ServeConfig

PATIENCE_S = 60.0
BEGIN = """
import json, signal, sys, threading
name = json.loads(sys.stdin.buffer.raw.readline())["name"]
def say(**said):
    print(json.dumps(said), flush=True)
def serve():
    say(say="join", cluster="c", name=name, address=name + ":1", version="")
    say(say="serves", listen=name + ":1", metrics="off", store_open=True)
"""
TALKATIVE = (
    BEGIN
    + """
for line in ("null", "17", "[]", "{}", '{"say', "[" * 100_000, "a package says hello"):
    print(line, flush=True)
serve()
sys.stdin.buffer.read()
"""
)
UNREAD = (
    BEGIN
    + """
awake = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: awake.set())
serve()
if name == "w-1":
    threading.Thread(target=sys.stdin.buffer.read, daemon=True).start()
    for count in range(1, 201):
        say(say="host", topics={str(uid): count for uid in range(2_000)})
    awake.wait()
else:
    awake.wait()
    for line in sys.stdin.buffer:
        heard = json.loads(line).get("hosting", {}).get("7", {}).get("w-1", 0)
        say(say="host", topics={"9000": 1}) if heard == 200 else say(say="beat")
"""
)


@asynccontextmanager
async def supervised(program: str) -> AsyncIterator[tuple[Supervisor, list[Started]]]:
    """A supervisor of two workers that run `program`, once it has announced them."""
    announced: asyncio.Future[list[Started]] = asyncio.get_running_loop().create_future()
    config = ServeConfig(listen="127.0.0.1:0", name="w", metrics="off", workers=2, grace_ms=0)
    command = (sys.executable, "-c", program)
    made = Supervisor(config, lambda _listen, _http, started: announced.set_result(started), command)
    running = asyncio.ensure_future(made.run())
    try:
        yield made, await asyncio.wait_for(announced, PATIENCE_S)
    finally:
        made._stopping.set()
        await asyncio.wait_for(running, PATIENCE_S)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0)


@pytest.mark.processes
async def test_whatever_a_worker_prints_beside_its_messages_is_told_to_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with supervised(TALKATIVE) as (_, started):
        assert [one.name for one in started] == ["w-1", "w-2"]
    printed = [record.getMessage() for record in caplog.records if " printed " in record.getMessage()]
    assert len(printed) == 14
    assert "worker w-1 printed b'null\\n'" in printed


@pytest.mark.processes
async def test_a_worker_that_does_not_read_costs_no_memory_and_learns_all_once_it_reads() -> None:
    async with supervised(UNREAD) as (supervisor, started):
        await until(lambda: supervisor._registry.state["hosting"].get("7") == {"w-1": 200})
        unread = supervisor._places[1]
        assert unread.process is not None and unread.process.stdin is not None
        waiting = unread.process.stdin.transport.get_write_buffer_size()
        assert waiting < MOST_UNSENT_BYTES + len(json.dumps(supervisor._registry.state)) + 1
        assert unread.behind
        os.kill(started[1].pid, signal.SIGUSR1)
        await until(lambda: "9000" in supervisor._registry.state["hosting"])


def test_the_port_is_had_though_what_was_said_over_it_is_not_quite_over() -> None:
    """As when one broker has just ended, before its clients did, and workers take its place."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    with _reserved(f"127.0.0.1:{port}") as listen:
        assert listen == f"127.0.0.1:{port}"
