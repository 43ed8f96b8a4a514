"""Two brokers on PostgreSQL, which find each other by etcd, and two gateways before them. A receiver of webhooks, or
clients of long polls. Each of them is killed in its turn."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import timeline
from tests.faults.cluster import EVERYTHING, ClusterMachine
from tests.faults.gateway import witness
from tests.faults.gateway.receiver import TIMEOUT_MS
from tests.faults.machine import PATIENCE_S, Child
from tests.faults.worker import TOPIC
from tests.servers.postgresql import PostgresqlServer
from tests.servers.process import free_port
from timeline.clock import Clock
from timeline.history import Event

LEASE = "8s"
REMEMBER = "1h"
LOOK_S = 0.05
RECEIVER = "receiver"
HANDLE_MS = 800
"""Each request takes the receiver up to so long, so that requests are always under way."""
POLLERS = ("c1", "c2")
WINDOW = 80
"""The messages that each of them holds."""
SETTLES = ("ack", "release", "bury", "extend")


class GatewayMachine(ClusterMachine):
    """Brokers `b1`, `b2` and gateways `g1`, `g2`. The store is a server of its own, which is killed as well."""

    def __init__(self, folder: Path, server: PostgresqlServer, sync: str) -> None:
        super().__init__(folder, server.url, sync, brokers=2)
        self.server = server
        self.doors = {f"g{number}": f"127.0.0.1:{free_port()}" for number in (1, 2)}
        self.gateways: dict[str, Child] = {}
        self.receiver_address = f"127.0.0.1:{free_port()}"
        self.kills: Counter[str] = Counter()

    # ── who is there ──

    async def start_gateway(self, name: str) -> None:
        """The gateway `name`, listening."""
        flags = ["--broker", self.address, "--listen", self.doors[name], "--push-allow", "127.0.0.0/8", "--json"]
        log, command = self.folder / f"{name}.log", ("-m", "timeline", "gateway", *flags, "--log-level", "warning")
        child = self.gateways[name] = await Child.start(name, log, *command)
        self.children.append(child)
        await child.until(lambda told: "listen" in told)
        self.note("start", process=name)

    async def start_receiver(self) -> None:
        """The one receiver, at the address that the topic has."""
        child = self.consumers[RECEIVER] = await self.start_worker(
            "",
            RECEIVER,
            "--handle-ms",
            str(HANDLE_MS),
            address=self.receiver_address,
            module="tests.faults.gateway.receiver",
        )
        await child.until(lambda told: "listening" in told)

    async def begin_with(self, rate: int, **settings: Any) -> None:
        """Brokers, gateways, the topic and its producers; the witness sees all of it."""
        await witness.watch(self.server.url)
        await asyncio.gather(*(self.start_named(name) for name in self.places))
        async with timeline.connect(self.address, timeout="30s") as client:
            topic = await client.create_topic(TOPIC, lease=LEASE, max_lease=LEASE, remember=REMEMBER, **settings)
        self.faults.note("topic", {"name": TOPIC, "settings": {"remember_ms": topic.settings.remember_ms}})
        await asyncio.gather(*(self.start_gateway(name) for name in self.doors))
        await asyncio.gather(*(self.start_producer(name, 1_000_000, rate) for name in ("p1", "p2")))

    async def begin_pushing(self, rate: int) -> None:
        """Everything for webhooks."""
        await self.start_receiver()
        retry = {"retry_first": "200ms", "retry_cap": "2s", "max_deliveries": 0}
        push = {"push_timeout": TIMEOUT_MS / 1_000.0, "push_concurrency": 150}
        await self.begin_with(rate, push_url=f"http://{self.receiver_address}/hook", **retry, **push)

    async def start_poller(self, name: str) -> None:
        """A client of long polls, which knows both gateways."""
        module, doors = "tests.faults.gateway.poller", ",".join(self.doors.values())
        window = ["--window", str(WINDOW)]
        self.consumers[name] = await self.start_worker("", name, *window, address=doors, module=module)

    async def begin_polling(self, rate: int) -> None:
        """Everything for long polls."""
        await self.begin_with(rate, max_deliveries=0)
        await asyncio.gather(*(self.start_poller(name) for name in POLLERS))

    @property
    def put(self) -> int:
        """How many messages producers have put."""
        return self._told(self.producers, "put")

    # ── faults ──

    async def _kill(self, child: Child, kind: str) -> None:
        self.kills[kind] += 1
        self.note("crash", process=child.name)
        child.signal(signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL

    async def kill_receiver(self, more: int) -> None:
        """Requests under way get no answer, and later ones no connection, until it is there again."""
        await self._kill(self.consumers.pop(RECEIVER), "receiver")
        await self.start_receiver()
        await self.work_on(more)

    async def kill_poller(self, name: str, more: int) -> None:
        """It dies between lease and ack. Another one takes its place."""
        await self._kill(self.consumers.pop(name), "client")
        await self.start_poller(name)
        await self.work_on(more)

    async def kill_gateway(self, name: str, more: int) -> None:
        """The other one goes on alone."""
        await self._kill(self.gateways.pop(name), "gateway")
        await self.work_on(more)
        await self.start_gateway(name)

    async def kill_broker(self, name: str, more: int) -> None:
        """The other one goes on alone."""
        await self._kill(self.brokers.pop(name), "broker")
        await self.work_on(more)
        await self.start_named(name)

    async def kill_store(self, more: int) -> None:
        """Nothing goes on before it is there again."""
        self.kills["store"] += 1
        self.note("crash", process=EVERYTHING)
        self.server.kill()
        await asyncio.to_thread(self.server.start)
        self.note("start", process=EVERYTHING)
        await self.work_on(more)

    async def kill_in_turn(self, puts: int, more: int, out: int, numbers: Sequence[int]) -> None:
        """Kills everything with one of these numbers, one after the other, and the store after each number. Each kill
        finds `out` leases. After it, `more` messages are received. Returns once all were killed and `puts` messages
        were put."""
        kills: list[Callable[[int], Awaitable[None]]] = []
        for number in numbers:
            pushing = RECEIVER in self.consumers
            kills.append(self.kill_receiver if pushing else partial(self.kill_poller, f"c{number}"))
            kills += [
                partial(self.kill_gateway, f"g{number}"),
                partial(self.kill_broker, f"b{number}"),
                self.kill_store,
            ]
        for turn, kill in enumerate(cycle(kills)):
            if turn >= len(kills) and self.put >= puts:
                return
            async with asyncio.timeout(PATIENCE_S):
                while self._told(self.consumers, "held") < 1.2 * out:  # still `out` when the kill has come
                    await self._told_more()
            await kill(more)

    # ── the end ──

    async def news(self) -> None:
        """A gateway settles without telling: the store is looked at again soon."""
        waiting = [asyncio.create_task(child.news.wait()) for child in self.consumers.values()]
        await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    async def stop(self) -> None:
        """Gateways end in order, then receivers and brokers. The store's log completes the history."""
        for child in self.gateways.values():
            child.signal(signal.SIGTERM)
        for child in self.gateways.values():
            assert await child.wait() == 0
        await super().stop()
        self._done = await self._as_witnessed(self._done)

    async def _as_witnessed(self, events: list[Event]) -> list[Event]:
        """Adds to each receive when its lease ended, and to the history the settles that gateways made unasked."""
        clock = Clock()
        cancelled = {
            event.arguments["id"] for event in events if event.operation == "cancel" and event.may_have_happened
        }
        moved = {
            (event.arguments["id"], event.result["version"])
            for event in events
            if event.operation == "move" and event.result.get("version")
        }
        seen = witness.Witness(clock.now() - clock.monotonic_ms(), moved, cancelled)
        await witness.question(self.server.url, seen)
        asked: set[tuple[Any, ...]] = set()
        extended = {
            _what(event): event.result["lease_until_ms"] for event in seen.settles if event.operation == "extend"
        }
        for event in events:
            values = event.arguments
            if event.operation == "receive":
                # What the store never leased so was not to be handed out.
                leased_until_ms = seen.lease_ends[values["id"], values["birth"], values["version"]]
                assert values.setdefault("lease_until_ms", leased_until_ms) == leased_until_ms
            elif event.operation in SETTLES:
                asked.add(_what(event))
                if event.operation == "extend" and event.happened:  # clients of HTTP are not told until when
                    event.result["lease_until_ms"] = extended[_what(event)]
        return [*events, *(event for event in seen.settles if _what(event) not in asked)]

    def explanations(self) -> Counter[str]:
        """Why messages were received again, in numbers. The checker says whether that is so."""
        released = {
            _what(event)[1:] for event in self._done if event.operation == "release" and event.may_have_happened
        }
        received: dict[tuple[str, int], list[int]] = {}
        for event in self._done:
            if event.operation == "receive":
                values = event.arguments
                received.setdefault((values["id"], values["birth"]), []).append(values["version"])
        return Counter(
            "released" if any((*life, version) in released for version in range(low, high)) else "lease ran out"
            for life, versions in received.items()
            for low, high in pairwise(sorted(versions))
        )


def _what(event: Event) -> tuple[Any, ...]:
    values = event.arguments
    return event.operation, values["id"], values["birth"], values["version"]


@contextmanager
def store_of_its_own(folder: Path) -> Iterator[PostgresqlServer]:
    """A PostgreSQL whose log can be read."""
    server = PostgresqlServer(folder, witness.SETTING)
    try:
        yield server.start()
    finally:
        server.kill()


async def judged(made: GatewayMachine, puts: int, out: int) -> dict[str, Any]:
    """Everything is settled, the histories hold, and each kill hit leases. Return what was counted."""
    await made.enough(puts)
    await made.stop()
    verdict = await made.judge()
    assert verdict.holds, verdict.summary()
    counts, why = verdict.counts, made.explanations()
    assert counts["put"] >= puts
    assert counts["early"] == counts["lost"] == counts["doubled"] == 0
    assert counts["redelivered"] == sum(why.values())
    kills = [fault for fault in made.faults_noted() if fault.arguments["what"] == "crash"]
    hit = min(made.leases_out(fault.invoked) for fault in kills)
    counted = {**counts, **why, "leases hit at least": hit, "kills": made.kills}
    assert hit >= out, counted
    return counted
