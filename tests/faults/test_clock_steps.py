"""A real broker whose wall clock is stepped by an hour, and drifts, under libfaketime; a consumer on true time."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import timeline
from tests.faults.faketime import WallClock
from tests.faults.machine import CLOCK_BOUND_MS, PATIENCE_S
from tests.servers.etcd import EtcdServer
from tests.servers.fixture import Running
from tests.servers.redis import RedisServer
from tests.services import require_service
from timeline.clock import SLEW, Clock

pytestmark = pytest.mark.processes
TOPIC = "departures"
HOUR_S = 3_600
EACH = 20
"""Messages at each turn of the clock."""


class Broker:
    """A broker on SQLite with a wall clock that the test sets."""

    def __init__(self, process: asyncio.subprocess.Process, wall: WallClock, addresses: dict[str, str]) -> None:
        self.process, self.wall = process, wall
        self.address, self.metrics = addresses["listen"], addresses["metrics"]

    async def says(self, words: str) -> str:
        """The next line of its log with these words in it."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE_S):
            while line := (await self.process.stderr.readline()).decode():
                if words in line:
                    return line
        raise AssertionError(f"the broker ended and never said {words!r}")

    async def page(self, path: str) -> str:
        """What it says there over HTTP, whatever the status."""

        def read() -> str:
            try:
                with urllib.request.urlopen(f"http://{self.metrics}{path}", timeout=PATIENCE_S) as answer:
                    return str(answer.read().decode())
            except urllib.error.HTTPError as refused:
                return str(refused.read().decode())

        return await asyncio.to_thread(read)

    async def shows(self, name: str, value: float, abs: float = 0.0) -> None:
        """Wait until this gauge is within `abs` of `value`: a broker says a thing in its log and measures it then."""
        async with asyncio.timeout(PATIENCE_S):
            while await self._gauge(name) != pytest.approx(value, abs=abs):
                pass

    async def _gauge(self, name: str) -> float:
        lines = (await self.page("/metrics")).splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@asynccontextmanager
async def broker(folder: Path, wall: str = "+0", name: str = "faked", **settings: str) -> AsyncIterator[Broker]:
    require_service("faketime")
    folder.mkdir(exist_ok=True)
    clock = WallClock(folder)
    clock.set(wall)
    flags = ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--name", name]
    for option, value in ({"store": f"sqlite:///{folder / 'timeline.db'}"} | settings).items():
        flags += [f"--{option}", value]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "timeline", "serve", "--json", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=clock.environment,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = await process.stdout.readline()
        assert line, (await process.stderr.read()).decode()
        yield Broker(process, clock, json.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Passenger:
    """Puts messages that are due soon and far ahead, and receives what comes, on the true time of this process."""

    def __init__(self, client: timeline.Timeline, consumer: timeline.Consumer, clock: Clock) -> None:
        self._client, self.clock = client, clock
        self._deliveries = aiter(consumer)
        self._made = 0

    async def travel(self, far_s: float) -> float:
        """`EACH` messages due within the next half second, and one that is due in `far_s`: by how many ms the earliest
        of them came before its due; negative: none did."""
        now_ms = self.clock.now_ms()
        dues = [now_ms + 100 + 10 * at for at in range(EACH)]
        async with self._client.producer(TOPIC) as producer:
            batch = timeline.Batch(
                payloads=[b"gate"] * EACH, at=dues, ids=[f"m{self._made + at}" for at in range(EACH)]
            )
            (await producer.produce_many(batch)).raise_failed()
            await producer.produce(b"far", at=now_ms + int(far_s * 1_000), id=f"far{self._made}")
        self._made += EACH
        earliest_ms = float("-inf")
        due_of = {f"m{self._made - EACH + at}": due for at, due in enumerate(dues)}
        async with asyncio.timeout(PATIENCE_S):
            while due_of:
                delivery = await anext(self._deliveries)
                came_ms = self.clock.now()
                assert delivery.due_ms == due_of.pop(delivery.id), "a message twice, or one that is not due"
                earliest_ms = max(earliest_ms, delivery.due_ms - came_ms)
                await delivery.ack()
        return earliest_ms


@asynccontextmanager
async def passenger(address: str) -> AsyncIterator[Passenger]:
    async with timeline.connect(address, timeout="30s") as client:
        await client.create_topic(TOPIC, lease="30s")
        async with client.consumer(TOPIC, id="true", credit=EACH) as consumer:
            yield Passenger(client, consumer, Clock())


@pytest.mark.prove
async def test_steps_of_an_hour_and_a_drift_make_nothing_early_by_the_true_clock(tmp_path: Path) -> None:
    async with broker(tmp_path) as faked, passenger(faked.address) as going:
        assert await going.travel(HOUR_S / 2) <= CLOCK_BOUND_MS
        for step_s in (HOUR_S, -HOUR_S):
            faked.wall.set(f"{step_s:+d}")
            said = await faked.says("the wall clock jumped by")
            assert ("by +3," if step_s > 0 else "by -3,") in said
            await faked.shows("timeline_clock_step_seconds", step_s, abs=1.0)
            assert await going.travel(HOUR_S / 2) <= CLOCK_BOUND_MS
            faked.wall.set("+0")
            await faked.says("agree again")
            assert await going.travel(HOUR_S / 2) <= CLOCK_BOUND_MS
        began_ms = going.clock.monotonic_ms()
        faked.wall.set("+0 x1.02")
        for _ in range(2):
            early_ms = await going.travel(HOUR_S / 2)
            gone_ms = going.clock.monotonic_ms() - began_ms
            assert early_ms <= SLEW * gone_ms + CLOCK_BOUND_MS, "a clock is followed by 5 ms a second at most"
        async with timeline.connect(faked.address) as client:
            waiting = [row.id async for row in client.scan(TOPIC, state=("waiting",))]
        assert len(waiting) == 7 and all(id.startswith("far") for id in waiting)


@pytest.mark.prove
async def test_a_machine_that_is_off_is_told_and_its_broker_shows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "timeline.driver")
    async with broker(tmp_path, wall="+0.2") as faked, passenger(faked.address) as going:
        await going.travel(HOUR_S / 2)
        said = [record.message for record in caplog.records if record.message.startswith("this machine's clock is")]
        assert len(said) == 1 and "behind broker faked's" in said[0]
        async with timeline.connect(faked.address) as client:
            ping = await client.ping()
        assert ping.offset_ms == pytest.approx(200, abs=ping.error_ms + 20)
        await faked.says("consumer 'true' has a clock")
        await faked.shows('timeline_clock_offset_seconds{kind="client"', -0.2, abs=0.1)


@pytest.mark.servers
@pytest.mark.prove
async def test_a_broker_an_hour_ahead_stands_aside_until_its_clock_is_set(tmp_path: Path, servers: Running) -> None:
    """Two brokers over one store with a clock of its own: of three clocks, one is wrong."""
    shared = {"store": servers.url(RedisServer), "sync": f"{servers.url(EtcdServer)}/clocks"}
    async with (
        broker(tmp_path / "true", name="true", **shared) as sound,
        broker(tmp_path / "wrong", "+3600", name="wrong", **shared) as wrong,
    ):
        await wrong.says("quarantined: this broker's clock is 3,")
        assert "quarantined" in await wrong.page("/readyz")
        await wrong.shows("timeline_quarantined", 1)
        async with passenger(f"{wrong.address},{sound.address}") as going:
            assert await going.travel(HOUR_S / 2) <= CLOCK_BOUND_MS
            wrong.wall.set("+0")
            await wrong.says("other clocks confirm it")
            await wrong.says("quarantined no more")
            assert await wrong.page("/readyz") == "ready\n"
            assert await going.travel(HOUR_S / 2) <= CLOCK_BOUND_MS
        await sound.shows("timeline_quarantined", 0)
