"""HTTP and webhooks: a gateway's rates beside gRPC's, and how late its long polls and webhooks are.

Broker, gateway, feeder and clients are processes of their own. Both ways are measured in one run, one after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from timeline.bench.figures import BenchReport, Target
from timeline.bench.load import BEGUN, READY, Told, payload_of
from timeline.bench.processes import CannotMeasure, Measured, Profile, started, started_module
from timeline.bench.scenario import Scenario, Setup, Stopwatch, set_up, setting
from timeline.bench.scenarios.lateness import BEGIN_MS, LatenessScenario, measured_run

PATIENCE_S = 120.0
LEAD_MS = 2_000
LOAD = 1_000_000
"""Messages of a load that is ended before it has put them all."""


@asynccontextmanager
async def gateway(folder: Path, broker: str, *options: str) -> AsyncIterator[tuple[Measured, str]]:
    """Run a gateway in front of `broker`; yield the process and its address. With `--until-input-ends` it runs as
    `timeline serve` starts it beside a broker."""
    command = ("gateway", "--broker", broker, "--listen", "127.0.0.1:0", "--json", "--log-level", "warning", *options)
    async with started("gateway", folder, sys.executable, "-m", "timeline", *command) as child:
        yield child, str(json.loads(await child.line())["listen"])


@asynccontextmanager
async def client(folder: Path, what: str, address: str, topic: str, count: int, tasks: int) -> AsyncIterator[Measured]:
    """Run a client of `timeline.bench.http_load`, told to begin."""
    asked = (what, address, topic, str(count), str(tasks))
    async with started_module(what, folder, "timeline.bench.http_load", *asked) as child:
        if await child.line() != READY:
            raise CannotMeasure(f"{what} did not start: {child.last_words()}")
        await child.tell("")
        yield child


async def figures_of(child: Measured) -> dict[str, float]:
    """Return what a client prints at its end."""
    found: dict[str, float] = json.loads(await child.line(PATIENCE_S))
    return found


async def fed(setup: Setup, folder: Path, count: int, rate: float) -> None:
    """Let a feeder put `count` messages at `rate` per second. Raise CannotMeasure if some were refused."""
    what = (setup.address, setup.topic, str(count), str(rate), str(LEAD_MS))
    async with started_module("feeder", folder, "timeline.bench.load", *what) as feeder:
        await feeder.line()
        await feeder.tell(str(setup.clock.now_ms() + BEGIN_MS + LEAD_MS))
        told = json.loads(await feeder.line(LEAD_MS / 1000 + count / rate + PATIENCE_S))
    if told["put"] != count:
        raise CannotMeasure(f"{count - told['put']} puts were refused: {told['refused']}")


async def _another(setup: Setup, topic: str) -> Setup:
    """Return the same with another new topic."""
    await setup.client.create_topic(topic)
    return replace(setup, own=replace(setup.own, name=topic))


@dataclass(frozen=True, slots=True)
class HttpScenario(Scenario):
    """Puts over HTTP beside gRPC, long polls, and gRPC's lateness beside a busy gateway.

    \b
    Example:
      timeline bench http --store sqlite://
    """

    name = "http"
    store: str = "sqlite://"
    messages: int = setting(20_000, "Single puts.")
    batched: int = setting(200_000, "Puts in batches.")
    tasks: int = setting(64, "Callers at once.")
    rate: float = setting(500.0, "Messages per second for long polls and lateness.")
    seconds: float = setting(20.0, "Length of each run.", least=0.1)

    @property
    def targets(self) -> tuple[Target, ...]:
        return (
            Target("put_http_per_s", 3_000.0, least=True),
            Target("batch_http_per_s", 50_000.0, least=True),
            Target("poll_p50_ms", 3.0),
            Target("poll_p99_ms", 10.0),
            Target("grpc_p99_ratio", 2.0),
            Target("gateway_resident_mib", 150.0),
        )

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        figures: dict[str, float] = {}
        wrong: list[str] = []
        async with set_up(self, folder) as setup, gateway(folder, setup.address, "--no-push") as (child, address):
            for way, at in (("grpc", setup.address), ("http", address)):
                for kind, count, tasks in (("put", self.messages, self.tasks), ("batch", self.batched, 4)):
                    watch = Stopwatch(broker=setup.child.cpu_s, gateway=child.cpu_s)
                    async with client(folder, f"{kind}-{way}", at, setup.topic, count, tasks) as load:
                        found = await figures_of(load)
                    found |= watch.costs(count)
                    figures |= {f"{kind}_{way}_{name}": value for name, value in found.items()}
            put = 2 * (self.messages + self.batched)
            if (there := await setup.left(window="2h")) != put:
                wrong.append(f"{there} of {put} messages are there")
            late, loaded = [await _another(setup, f"{setup.topic}-{use}") for use in ("late", "load")]
            begun_mib = child.resident_bytes() / 2**20
            figures |= await self._polled(late, folder, address)
            ended_mib = child.resident_bytes() / 2**20
            figures |= {"gateway_resident_mib": ended_mib, "gateway_grown_mib": ended_mib - begun_mib}
            async with gateway(folder, setup.address, "--no-push", "--until-input-ends") as (_, address):
                alone, beside = await self._grpc_beside(late, loaded.topic, folder, address, wrong)
            figures |= {"grpc_p99_ms": alone, "grpc_p99_ms_beside_gateway": beside, "grpc_p99_ratio": beside / alone}
        return self.report(setup.own, figures, wrong)

    async def _polled(self, setup: Setup, folder: Path, address: str) -> dict[str, float]:
        """Return how late long polls get what a feeder puts."""
        count = int(self.rate * self.seconds)
        async with client(folder, "poll", address, setup.topic, count, 8) as pollers:
            await fed(setup, folder, count, self.rate)
            found = await figures_of(pollers)
        return {name.replace("lateness_", "poll_"): value for name, value in found.items()}

    async def _grpc_beside(
        self, setup: Setup, loaded: str, folder: Path, address: str, wrong: list[str]
    ) -> tuple[float, float]:
        """Return the p99 of gRPC's lateness without and with single puts to `loaded` through the gateway, as fast as
        they go."""
        steady = LatenessScenario(self.store, rate=self.rate, seconds=self.seconds)
        alone, trouble = await measured_run(setup, steady, folder)
        wrong += trouble
        async with client(folder, "put-http", address, loaded, LOAD, self.tasks):
            beside, trouble = await measured_run(setup, steady, folder)
        wrong += trouble
        return alone["lateness_p99_ms"], beside["lateness_p99_ms"]


@dataclass(frozen=True, slots=True)
class WebhookScenario(Scenario):
    """Webhooks: from due until the receiver has the request, and requests per second, with gRPC beside.

    \b
    Example:
      timeline bench webhook --store sqlite://
    """

    name = "webhook"
    store: str = "sqlite://"
    rate: float = setting(500.0, "Messages per second of the steady run.")
    seconds: float = setting(20.0, "Length of the steady run.", least=0.1)
    backlog: int = setting(20_000, "Messages that are due at once.")
    concurrency: int = setting(64, "Requests at a time.", most=10_000)

    @property
    def targets(self) -> tuple[Target, ...]:
        return (
            Target("webhook_p50_ms", 4.0),
            Target("webhook_p99_ms", 15.0),
            Target("webhook_min_ms", 0.0, least=True),
            Target("backlog_per_s", 2_000.0, least=True),
            Target("gateway_resident_mib", 150.0),
        )

    async def run(self, folder: Path, told: Told | None = None, profile: Profile | None = None) -> BenchReport:
        count = int(self.rate * self.seconds)
        wrong: list[str] = []
        async with (
            set_up(self, folder) as setup,
            gateway(folder, setup.address, "--push-allow", "127.0.0.0/8") as (child, _),
        ):
            async with self._received(setup, folder, count) as receiver:
                await fed(setup, folder, count, self.rate)
                steady = await figures_of(receiver)
            begun_mib = child.resident_bytes() / 2**20
            async with self._received(setup, folder, self.backlog) as receiver:
                watch = Stopwatch(broker=setup.child.cpu_s, gateway=child.cpu_s)
                await fed(setup, folder, self.backlog, 1e6)
                burst = await figures_of(receiver)
                costs = watch.costs(self.backlog)
            ended_mib = child.resident_bytes() / 2**20
            steady_grpc = LatenessScenario(self.store, rate=self.rate, seconds=self.seconds)
            grpc, trouble = await measured_run(await _another(setup, f"{setup.topic}-grpc"), steady_grpc, folder)
            wrong += trouble
            figures = {name.replace("lateness_", "webhook_"): value for name, value in steady.items()}
            figures |= {
                "backlog_per_s": burst["per_s"],
                **costs,
                "gateway_resident_mib": ended_mib,
                "gateway_grown_mib": ended_mib - begun_mib,
                "grpc_p50_ms": grpc["lateness_p50_ms"],
                "grpc_p99_ms": grpc["lateness_p99_ms"],
            }
            repeated = steady["requests"] + burst["requests"] - count - self.backlog
            if repeated:
                wrong.append(f"{repeated:g} webhooks came twice")
        return self.report(setup.own, figures, wrong)

    @asynccontextmanager
    async def _received(self, setup: Setup, folder: Path, count: int) -> AsyncIterator[Measured]:
        """Run a receiver of `count` webhooks, to which the topic's are sent."""
        asked = ("receive", "-", "-", str(count), "1")
        async with started_module("receiver", folder, "timeline.bench.http_load", *asked) as child:
            url = (await child.line()).removeprefix(f"{READY} ")
            await setup.client.update_topic(setup.topic, push_url=url, push_concurrency=self.concurrency)
            await setup.producer().produce(payload_of(0), in_=0)
            if await child.line(PATIENCE_S) != BEGUN:  # the gateway sends there now
                raise CannotMeasure(f"no webhook came: {child.last_words()}")
            yield child
