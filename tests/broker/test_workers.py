"""`timeline serve --workers` as a person starts it: on a store that workers can share, killed, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import timeline
from tests.cli.conftest import start
from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from tests.servers.redis import RedisServer
from timeline.cli.app import run
from timeline.errors import TimelineError

pytestmark = [pytest.mark.processes, pytest.mark.servers]
PATIENCE_S = 90.0


@dataclass
class Served:
    """A supervisor that has announced its workers."""

    process: subprocess.Popen[bytes]
    listen: str
    workers: list[dict[str, Any]]


@contextmanager
def serving(folder: Path, store: str, *arguments: str) -> Iterator[Served]:
    process = start(
        "serve", "--workers", "2", "--listen", "127.0.0.1:0", "--metrics", "off", "--store", store, "--json",
        "--name", "w", *arguments, cwd=folder,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1].decode()
        told = json.loads(line)
        yield Served(process, told["listen"], told["workers"])
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)


async def named(address: str, wanted: str) -> None:
    """Connects to the shared port until the worker `wanted` answers."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                async with timeline.connect(address, timeout="5s") as tl:
                    if (await tl.ping()).broker == wanted:
                        return
            except TimelineError:
                continue


async def test_two_workers_deal_together_one_is_killed_and_comes_back(servers: Running, tmp_path: Path) -> None:
    with serving(tmp_path, servers.url(RedisServer)) as served:
        assert [worker["name"] for worker in served.workers] == ["w-1", "w-2"]
        own = [worker["listen"] for worker in served.workers]
        assert len({*own, served.listen}) == 3
        async with (
            timeline.connect(own[0], timeout="60s") as first,
            timeline.connect(own[1], timeout="60s") as second,
            timeline.connect(served.listen, timeout="60s") as tl,
        ):
            await first.create_topic("workers", lease="30s")
            seen: dict[str, list[str]] = {"c-1": [], "c-2": []}
            every = asyncio.Event()

            async def consume(client: timeline.Timeline, name: str, count: int) -> None:
                async with client.consumer("workers", id=name, credit=5) as c:
                    async for delivery in c:
                        await delivery.ack()
                        seen[name].append(delivery.id)
                        if sum(map(len, seen.values())) >= count:
                            every.set()

            consuming = [
                asyncio.create_task(consume(first, "c-1", 200)), asyncio.create_task(consume(second, "c-2", 200)),
            ]  # fmt: skip
            async with tl.producer("workers") as p:
                messages = [timeline.Message(b"x", in_=0, id=str(number)) for number in range(200)]
                (await p.produce_many(messages)).raise_failed()
                await asyncio.wait_for(every.wait(), PATIENCE_S)
                assert sorted(seen["c-1"] + seen["c-2"], key=int) == [str(number) for number in range(200)]
                assert seen["c-1"] and seen["c-2"]
                os.kill(served.workers[0]["pid"], signal.SIGKILL)
                every.clear()
                again = [timeline.Message(b"x", in_=0, id=str(number)) for number in range(200, 300)]
                (await p.produce_many(again)).raise_failed()
                async with asyncio.timeout(PATIENCE_S):
                    while len({*seen["c-1"], *seen["c-2"]}) < 300:
                        every.clear()
                        await every.wait()
            for task in consuming:
                task.cancel()
            await asyncio.gather(*consuming, return_exceptions=True)
        await named(served.listen, "w-1")
        same = ("--listen", served.listen, "--metrics", "off", "--store", servers.url(RedisServer))
        second = start("serve", "--workers", "2", *same, cwd=tmp_path)
        _, refused = await asyncio.to_thread(second.communicate, timeout=PATIENCE_S)
        assert second.returncode == 4
        assert b"is taken: the Timeline broker w-" in refused
        served.process.send_signal(signal.SIGTERM)
        _out, errors = served.process.communicate(timeout=PATIENCE_S)
        assert served.process.returncode == 0, errors.decode()
        assert b"worker w-1 ended with code -9: another begins" in errors
        assert errors.count(b"stopped") >= 2
        assert b"Traceback" not in errors, errors.decode()


async def test_workers_are_members_through_etcd_like_any_other_broker(servers: Running, tmp_path: Path) -> None:
    sync = f"{servers.server(EtcdServer).url}/{secrets.token_hex(6)}?ttl=2s"
    with serving(tmp_path, servers.url(RedisServer), "--sync", sync) as served:
        async with timeline.connect(served.listen, timeout="20s") as tl:

            async def both() -> dict[str, int]:
                """When each was started, once both are told of."""
                while len(started := {one.broker: one.started_ms for one in (await tl.standing()).brokers}) != 2:
                    pass
                return started

            async with asyncio.timeout(PATIENCE_S):
                first = await both()
                os.kill(served.workers[0]["pid"], signal.SIGKILL)
                while (again := await both())["w-1"] == first["w-1"]:
                    pass
            assert first.keys() == again.keys() == {"w-1", "w-2"} and first["w-2"] == again["w-2"]


async def test_workers_end_with_their_supervisor_however_that_ends(servers: Running, tmp_path: Path) -> None:
    """They hold its standard error: once that has ended, so have they."""
    with serving(tmp_path, servers.url(RedisServer), "--grace", "2s") as served:
        served.process.kill()
        _, errors = await asyncio.to_thread(served.process.communicate, timeout=PATIENCE_S)
        assert errors.count(b"the supervisor is gone: this worker drains") == 2
        async with asyncio.timeout(PATIENCE_S):
            while any(_alive(worker["pid"]) for worker in served.workers):
                await asyncio.sleep(0)  # what it wrote to is closed a little before it has ended


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_a_store_of_one_broker_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = f"sqlite:///{tmp_path}/one.db"
    assert run(["serve", "--workers", "2", "--listen", "127.0.0.1:0", "--metrics", "off", "--store", store]) == 2
    assert "a store of one broker, and --workers 2 are several" in capfd.readouterr().err


def test_settings_that_no_worker_can_serve_with_are_said_once(tmp_path: Path, servers: Running) -> None:
    (tmp_path / "tokens.json").write_text("{")
    (tmp_path / "tokens.json").chmod(0o600)
    process = start(
        "serve", "--workers", "3", "--listen", "127.0.0.1:0", "--metrics", "off", "--store",
        servers.url(RedisServer), "--tokens", "tokens.json", cwd=tmp_path,
    )  # fmt: skip
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert errors.count(b"is not JSON") == 1
