"""The conductor plays one day, from the first process to the summary."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import shutil
import signal
import tempfile
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import timeline
from timeline.broker.server.gateway_process import missing_package
from timeline.child import free_ports
from timeline.clock import Clock
from timeline.demo.flights import DEFAULT_DAY, Flight, flights_of
from timeline.demo.picture import DayPicture
from timeline.demo.plan import (
    CREDIT,
    DEFAULT_SPEED,
    GATES,
    HISTORY_SUFFIX,
    INSPECTOR,
    LEASE_MS,
    PLAN,
    TOPIC,
    DayPlan,
    Inspections,
    WebhookPlan,
    check_speed,
    gate_name,
    make_plan,
)
from timeline.demo.processes import (
    ETCD,
    GO,
    REDIS,
    CannotPlay,
    DemoChild,
    DemoProcesses,
    missing,
    start_etcd,
    start_redis,
)
from timeline.demo.summary import Played, summarize
from timeline.history import read_history
from timeline.model import encode_headers, payload_sum

TICK_S = 0.1
OVERTIME_MS = 20_000
"""How long after the last due time the day may go on before missing departures count as lost."""
AGAIN_S = 1.0
"""How long a crashed gate stays away."""
SCANNED = ("id", "birth", "version", "due_ms", "scheduled_ms", "deliveries", "group", "expires_ms", "died_ms")
"""Fields of a message on the timeline that the checker takes."""
BROKERS = 2
"""Of a cluster; the last of them is killed when half of the departures are out."""
PUSH_TIMEOUT_MS = 5 * LEASE_MS
"""How long the webhook gate may take to answer. If it stalls, it loses its lease first, like the others. The gateway's
release would come too late to give the departure another time."""
SCHEDULE = "runway"
REMEMBER = "1h"
"""A cluster's topic remembers settled ids. So what a driver asked of the killed broker gets a definite answer."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of a demo.

    `store`: a URL; empty for an SQLite file of its own, or for a Redis of its own with `cluster`. `cluster`: two
    brokers over three members of etcd. `keep`: leave the folder with histories, logs and store behind. `console`: after
    the day, keep the brokers and the gateway with its console open until SIGINT.
    """

    day: dt.date = DEFAULT_DAY
    speed: float = DEFAULT_SPEED
    data: str | None = None
    store: str = ""
    keep: bool = False
    cluster: bool = False
    console: bool = False


class Viewer(Protocol):
    """A board, or plain lines."""

    def watch(self, picture: DayPicture, now_ms: float) -> None:
        """Show the picture; called about ten times per second."""

    def say(self, text: str) -> None:
        """Show a line before or after the day."""


async def conduct(options: DemoOptions, viewer: Viewer) -> Played:
    """Play a day and judge it. Every process has ended when this returns or raises.

    Raises Invalid for a day, file or speed that cannot be played. Raises CannotPlay when a process cannot be started,
    or a broker dies unplanned.
    """
    check_speed(options.speed)
    if options.cluster and (absent := missing(*([ETCD] if options.store else [ETCD, REDIS]))):
        raise CannotPlay(absent)
    flights = flights_of(options.day, options.data)
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        # The end of the demo, or of its terminal, ends all of its processes.
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    with _folder(options.keep) as folder:
        processes = DemoProcesses(folder)
        try:
            return await Conductor(options, flights, processes, viewer).play()
        finally:
            await processes.kill()


@contextlib.contextmanager
def _folder(keep: bool) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="timeline-demo-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder)


class Conductor:
    """One day on its way."""

    def __init__(self, options: DemoOptions, flights: list[Flight], processes: DemoProcesses, viewer: Viewer) -> None:
        self.options = options
        self.flights = flights
        self.folder = processes.folder
        self.processes = processes
        self.viewer = viewer
        self.clock = Clock()
        self.troubles: list[str] = []
        self.brokers: list[DemoChild] = []
        self.killed = ""
        self.lives = [1] * GATES
        self.gates: list[DemoChild | None] = [None] * GATES
        self.returning: set[asyncio.Task[None]] = set()
        self.webhooks: list[DemoChild] = []
        """The gateway, and the gate to which it sends webhooks; none if packages are missing."""
        self.console = ""
        """Where the gateway has its console."""
        self.inspectors: list[DemoChild] = []
        """The inspector of the runway; none if the day is too short."""

    async def play(self) -> Played:
        """Play the whole day."""
        address = await (self._cluster() if self.options.cluster else self._broker())
        # A given store may have other users: the day has a topic of its own there, which is dropped at the end.
        topic = TOPIC if not self.options.store else f"demo-{TOPIC}-{self.clock.now_ms()}"
        async with timeline.connect(address, timeout="10s") as client:
            webhook = await self._create(client, topic, address)
            plan, feeders = await self._begin(client, address, topic, webhook)
            await self._watch(plan, feeders)
            await self._close(feeders)
            rows = await self._scan(client, topic)
            end_wall_ms = self.clock.now()
            if self.options.console and self.webhooks:
                await self._stay_open()
            elif self.options.console:
                self.viewer.say(f"there is no console: it needs {missing_package()}")
            if self.options.store and not self.options.keep:
                await self._clean_up(client, plan)
        for broker in self.brokers:
            if await broker.end():
                self.troubles.append(f"the {broker.ended()}")
        if self.options.cluster and not self.killed:
            self.troubles.append("no broker was killed, so nothing was shown about that")
        histories = sorted(self.folder.glob(f"*{HISTORY_SUFFIX}"))
        summary = summarize(plan, read_history(histories), rows, end_wall_ms, self.troubles)
        return Played(summary, plan, self.folder if self.options.keep else None, self.killed)

    async def _stay_open(self) -> None:
        """Keep the console open until SIGINT, and end its gateway then."""
        gateway, interrupted = self.webhooks[0], asyncio.Event()
        self.viewer.say(f"the day is over. Ctrl-C ends it; until then, the console stays open at {self.console}")
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted.set)
        ends: list[Coroutine[Any, Any, object]] = [interrupted.wait()]
        ends += [child.process.wait() for child in (gateway, *self.brokers)]
        waiting = {asyncio.ensure_future(end) for end in ends}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()
            asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        if await gateway.end():
            self.troubles.append(gateway.ended())

    async def _broker(self) -> str:
        """Start one broker. Return its address."""
        self.viewer.say("opening: a broker, airlines' feeders and gates, each a process of its own …")
        store = self.options.store or f"sqlite:///{self.folder / 'timeline.db'}"
        broker, address = await self.processes.broker(store)
        self.brokers = [broker]
        return address

    async def _cluster(self) -> str:
        """Start brokers that find each other through etcd. Return their addresses."""
        self.viewer.say(
            f"opening: etcd's members, {BROKERS} brokers, airlines' feeders and gates, each a process of its own …"
        )
        sync = await start_etcd(self.processes)
        store = self.options.store or await start_redis(self.processes)
        names = [f"broker-{number}" for number in range(1, BROKERS + 1)]
        opened = await asyncio.gather(
            *(self.processes.broker(store, name, "--sync", sync, "--name", name) for name in names)
        )
        self.brokers = [broker for broker, _ in opened]
        return ",".join(address for _, address in opened)

    async def _create(self, client: timeline.Timeline, topic: str, address: str) -> WebhookPlan | None:
        """Create the day's topic. This first call shows whether the broker can use its store. Start the gateway and its
        gate."""
        settings: dict[str, Any] = {"remember": REMEMBER} if self.options.cluster else {}
        (port,) = free_ports(1)
        absent = missing_package()
        if not absent:
            settings |= {
                "push_url": f"http://127.0.0.1:{port}/departures",
                "push_timeout": dt.timedelta(milliseconds=PUSH_TIMEOUT_MS),
                "push_concurrency": CREDIT,
                "max_lease": dt.timedelta(milliseconds=LEASE_MS),
            }
        lease = dt.timedelta(milliseconds=LEASE_MS)
        creating = asyncio.ensure_future(client.create_topic(topic, lease=lease, **settings))
        broker = self.brokers[0]
        dying = asyncio.ensure_future(broker.process.wait())
        await asyncio.wait((creating, dying), return_when=asyncio.FIRST_COMPLETED)
        if dying.done():
            creating.cancel()
            raise CannotPlay(f"the {broker.ended()}")
        dying.cancel()
        creating.result()
        if absent:
            self.viewer.say(f"no gate is a webhook receiver: that needs {absent}")
            return None
        (secret, *_) = await client.topic_secrets(topic)
        gate, (gateway, where) = await asyncio.gather(
            self.processes.webhook_gate(port), self.processes.gateway(address)
        )
        self.webhooks = [gateway, gate]
        self.console = f"http://{where}/"
        self.viewer.say(f"watch the day in a browser, too: {self.console}")
        return WebhookPlan(where, secret)

    async def _begin(
        self, client: timeline.Timeline, address: str, topic: str, webhook: WebhookPlan | None
    ) -> tuple[DayPlan, list[DemoChild]]:
        """Start feeders, gates and the inspector. The day's clock starts when all of them are ready."""
        asked = (self.flights, self.options.day)
        alike = make_plan(*asked, self.clock.now_ms(), address, self.options.speed, topic=topic)
        feeders = [await self.processes.role(f"feeder-{n + 1}", "feeder", n) for n in range(len(alike.carriers))]
        gates = [await self.processes.role(gate_name(n), "gate", n, 1) for n in range(GATES)]
        self.gates = [*gates]
        if alike.inspections is not None:
            await client.create_topic(alike.inspections.topic)
            self.inspectors = [await self.processes.role(INSPECTOR, INSPECTOR)]
        begin = [*gates, *self.webhooks[1:], *feeders, *self.inspectors]
        await self.processes.ready(*begin)
        self.clock.observe()
        plan = make_plan(*asked, self.clock.now_ms(), address, self.options.speed, topic=topic)
        plan = dataclasses.replace(plan, webhook=webhook)
        plan.write(self.folder / PLAN)
        for child in begin:
            await child.tell(GO)
        if plan.inspections is not None:
            await self._schedule(client, plan.inspections)
        return plan, feeders

    async def _schedule(self, client: timeline.Timeline, inspections: Inspections) -> None:
        """Make the recurring schedule that produces an inspection of the runway each hour of the day."""
        await client.schedule(
            inspections.topic,
            SCHEDULE,
            every=dt.timedelta(milliseconds=inspections.period_ms),
            start=inspections.first_ms,
            end=inspections.times[-1] + 1,
            catch_up="all",
            payload="inspect the runway, for the {sequence}. time",
        )

    async def _watch(self, plan: DayPlan, feeders: list[DemoChild]) -> None:
        """Watch the day until every flight has left or is cancelled, and the runway is inspected; or time is up."""
        picture = DayPicture(plan, self.folder)
        until_ms = plan.last_due_ms + 2 * plan.lease_ms + OVERTIME_MS
        while not picture.done and self.clock.now() < until_ms:
            await asyncio.sleep(TICK_S)
            self.clock.observe()
            picture.refresh()
            picture.presume(self.clock.now())
            self.viewer.watch(picture, self.clock.now())
            if self.options.cluster and not self.killed and 2 * picture.settled >= len(picture.departures):
                await self._kill_a_broker(picture)
            for child in (*self.brokers, *self.webhooks, *self.inspectors, *feeders):
                code = child.process.returncode
                if code or (code == 0 and child not in feeders):
                    raise CannotPlay(f"the {child.name} died with code {code}: {child.last_words()}")
            self._look_after_gates(plan)

    async def _kill_a_broker(self, picture: DayPicture) -> None:
        """Kill the last broker with SIGKILL. The others have all of its work from then on."""
        broker = self.brokers.pop()
        self.killed = broker.name
        picture.say(self.clock.now(), "crash", f"{broker.name} is killed; {self.brokers[0].name} goes on")
        await broker.kill()

    def _look_after_gates(self, plan: DayPlan) -> None:
        """Bring back gates that have crashed, after a while and as other consumers."""
        for number, gate in enumerate(self.gates):
            if gate is None or gate.running:
                continue
            planned = sum(crash.gate == number for crash in plan.crashes) >= self.lives[number]
            if gate.process.returncode != -signal.SIGKILL or not planned:
                self.troubles.append(f"{gate.ended()} (unplanned)")
            self.gates[number] = None
            self.lives[number] += 1
            task = asyncio.create_task(self._reopen(number, self.lives[number]))
            self.returning.add(task)
            task.add_done_callback(self.returning.discard)

    async def _reopen(self, number: int, life: int) -> None:
        await asyncio.sleep(AGAIN_S)
        gate = await self.processes.role(gate_name(number, life), "gate", number, life)
        try:
            await self.processes.ready(gate)
            await gate.tell(GO)
        except (CannotPlay, ConnectionError) as trouble:
            self.troubles.append(f"{gate.name} could not come back: {trouble}")
        else:
            self.gates[number] = gate

    async def _close(self, feeders: list[DemoChild]) -> None:
        """End gates and feeders in order, so that their histories are whole."""
        if self.returning:
            await asyncio.gather(*self.returning)
        gates = [gate for gate in self.gates if gate is not None]
        webhooks = self.webhooks[1:] if self.options.console else self.webhooks
        for child in [*feeders, *gates, *webhooks, *self.inspectors]:
            if await child.end():
                self.troubles.append(child.ended())

    async def _clean_up(self, client: timeline.Timeline, plan: DayPlan) -> None:
        """Remove what the day has made in a store with other users."""
        await client.drop_topic(plan.topic)
        if plan.inspections is not None:
            schedule = await client.get_schedule(plan.inspections.topic, SCHEDULE)
            if schedule is not None:
                await schedule.delete()
            await client.drop_topic(plan.inspections.topic)

    async def _scan(self, client: timeline.Timeline, topic: str) -> list[dict[str, Any]]:
        """Return what is still on the timeline, in the checker's form."""
        rows = []
        async for row in client.scan(topic, payload=True):
            headers = encode_headers(row.headers) if row.headers else b""
            told: dict[str, Any] = {name: getattr(row, name) for name in SCANNED}
            told |= {name: getattr(row, name) or "" for name in ("holder", "tag", "dead")}
            sums = {"sum": row.payload_sum, "read_sum": payload_sum(row.payload or b"", headers)}
            rows.append({"topic": topic, **told, **sums, "state": str(row.state)})
        return rows
