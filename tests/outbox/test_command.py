"""`timeline outbox …` as a process: killed between sending and marking, ended in order, measured; and its mistakes."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psycopg
import pytest

import timeline
from tests.cli.conftest import Call, plain_environment
from tests.cli.conftest import call as call  # a fixture
from tests.driver.broker import Broker
from tests.outbox.conftest import TOPIC, Shop
from timeline import outbox
from timeline.child import send_signal

PATIENCE_S = 100.0


class Relay:
    """`timeline outbox` as a process, and what it told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def told(self) -> dict[str, Any]:
        """The next line of its output."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE_S)
        read: dict[str, Any] = json.loads(line)
        return read

    async def end(self, number: int) -> tuple[int, str]:
        """Signals it; its exit code, and the last line that it told."""
        send_signal(self.process, number)
        out, _ = await asyncio.wait_for(self.process.communicate(), PATIENCE_S)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode().strip().rpartition("\n")[2]


@asynccontextmanager
async def started(shop: Shop, broker: Broker, *options: str) -> AsyncIterator[Relay]:
    command = ["-m", "timeline", "outbox", shop.url, "--json", "--every", "10ms", "--address", broker.address]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, *options, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, env=plain_environment()
    )
    try:
        yield Relay(process)
    finally:
        send_signal(process, 9)
        await process.wait()


@asynccontextmanager
async def unable_to_mark(shop: Shop) -> AsyncIterator[None]:
    """While this lasts, rows can be read, and locked for the relay, but neither deleted nor changed."""
    if shop.dialect == "sqlite":
        lock = sqlite3.connect(str(shop.engine.url.database), isolation_level=None)
        lock.execute("PRAGMA journal_mode = WAL")
        lock.execute("BEGIN IMMEDIATE")
        yield
        lock.close()
        return
    with psycopg.connect(shop.url) as connection:
        connection.execute(f"LOCK TABLE {outbox.TABLE} IN SHARE MODE")
        yield
        connection.rollback()


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.servers)])
def killed_shop(request: pytest.FixtureRequest) -> Shop:
    shop: Shop = request.getfixturevalue(f"{request.param}_shop")
    return shop


@pytest.mark.processes
async def test_a_relay_killed_between_sending_and_marking_doubles_nothing(
    killed_shop: Shop, tl: timeline.Timeline, broker: Broker
) -> None:
    shop = killed_shop
    shop.add(*(f"{number}" for number in range(20)), in_="0s")
    async with tl.consumer(TOPIC, id="w") as consumer:
        async with unable_to_mark(shop), started(shop, broker) as relay:
            seen = set()
            async with asyncio.timeout(PATIENCE_S):
                async for delivery in consumer:
                    seen.add(delivery.id)
                    await delivery.ack()
                    if len(seen) == 20:
                        break
            code, _ = await relay.end(9)
            assert code == -9
        assert len(shop.left()) == 20
        async with started(shop, broker, "--once") as again:
            code, last = await again.end(0)
        assert code == 0 and json.loads(last) == {"done": 20, "duplicates": 20, "set_aside": 0}
        assert shop.left() == []
        assert [message.id async for message in tl.scan(TOPIC)] == []


@pytest.mark.processes
async def test_a_relay_is_measured_and_ends_in_order(sqlite_shop: Shop, tl: timeline.Timeline, broker: Broker) -> None:
    async with started(sqlite_shop, broker, "--metrics", "127.0.0.1:0") as relay:
        begun = await relay.told()
        assert (begun["table"], begun["shares"], begun["address"]) == ("timeline_outbox", False, broker.address)
        sqlite_shop.add("a")
        assert await relay.told() == {"topic": TOPIC, "status": "OK", "sent": 1}
        columns = f"INSERT INTO {outbox.TABLE} (topic, id, payload, in_ms) VALUES "
        sqlite_shop.run(columns + f"('{TOPIC}', '{'x' * 300}', x'', 0)")
        assert (await relay.told())["refused"].startswith("an id is 1 to 255 bytes")
        scraped = await asyncio.to_thread(lambda: urlopen(f"http://{begun['metrics']}/metrics").read().decode())
        assert f'timeline_relay_sent_total{{status="OK",topic="{TOPIC}"}} 1.0' in scraped
        assert f'timeline_relay_refused_total{{status="INVALID",topic="{TOPIC}"}} 1.0' in scraped
        assert re.search(r"^timeline_relay_waiting \d", scraped, re.MULTILINE)
        assert "timeline_relay_trouble 0.0" in scraped
        code, last = await relay.end(15)
    assert code == 0 and json.loads(last) == {"done": 1, "duplicates": 0, "set_aside": 1}


def test_what_was_set_aside_is_listed_retried_and_purged(sqlite_shop: Shop, call: Call) -> None:
    url = sqlite_shop.url
    assert call("outbox", "list", url).out == "nothing was rejected\n0 waiting, 0 rejected\n"
    sqlite_shop.add("a", "b", "c")
    sqlite_shop.run(f"UPDATE {outbox.TABLE} SET refused_ms = 1, refused = 'EXISTS: taken' WHERE id != 'b'")
    assert "EXISTS: taken" in call("outbox", "list", url).out
    rows = call("outbox", "list", url, "--json", "--limit", 1).json
    assert [(row["id"], row["reason"], row["refused_ms"]) for row in rows] == [("a", "EXISTS: taken", 1)]
    assert call("outbox", "retry", url, rows[0]["seq"]).out == "1 of 1 waits again\n"
    refused = call("outbox", "retry", url, 99)
    assert (refused.code, refused.out) == (1, "0 of 1 waits again\n")
    assert call("outbox", "purge", url, "--all", "--yes", "--json").json == [{"asked": 1, "done": 1}]
    assert sqlite_shop.left() == ["a", "b"]


def test_the_ddl_is_printed_as_it_is_run(call: Call, tmp_path: Path) -> None:
    for dialect in outbox.DIALECTS:
        done = call("outbox", "ddl", "--dialect", dialect, "--table", "mail")
        assert done.out == "".join(f"{made};\n" for made in outbox.ddl(dialect, "mail"))
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.executescript(call("outbox", "ddl", "--dialect", "sqlite").out)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("outbox sqlit:///x", 2, "the outbox lies in a database of SQL"),
        ("outbox sqlite:///nowhere.db", 4, "there is no file nowhere.db"),
        ("outbox relay", 2, "Missing argument 'URL'"),
        ("outbox relya sqlit:///x", 2, "unexpected extra argument"),
        ("outbox lst", 2, "Did you mean list?"),
        ("outbox ddl", 2, "Missing option '--dialect'"),
        ("outbox ddl --dialect oracle", 2, "'oracle' is not one of"),
        ("outbox ddl --dialect sqlite --table a-b", 2, "a table's name is letters"),
        ("outbox sqlite:///x --every soon", 2, "--every must be numbers with a unit"),
        ("outbox sqlite:///x --address nowhere", 2, "Did you mean nowhere:9000?"),
        ("outbox retry sqlite:///x", 2, "give either one or more SEQs"),
        ("outbox purge sqlite:///x 1 --all", 2, "give either one or more SEQs"),
        ("outbox list postgresql://127.0.0.1:1/shop", 3, "cannot be asked"),
    ],
)
def test_a_mistake_gets_one_clear_line(call: Call, arguments: str, code: int, said: str) -> None:
    done = call(*arguments.split())
    assert (done.code, done.out) == (code, "") and said in done.err, done
    assert len(done.err.splitlines()) == 1


def test_the_url_may_come_from_the_environment(sqlite_shop: Shop, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIMELINE_OUTBOX", sqlite_shop.url)
    assert call("outbox", "list").out.endswith("0 waiting, 0 rejected\n")
