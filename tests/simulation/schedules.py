"""A seed with recurring schedules: editors change them while brokers crash, disagree and step their clocks. At the end
it is judged whether each occurrence was produced once, none early, and none that no revision has.

An edit is known by when it was invoked and when it was answered. In between, and for as long as its outcome is unknown,
either revision may decide. Such doubt never counts against anybody.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

from tests.simulation.loop import Timer
from tests.simulation.world import FULL, Outcome, Pieces, Size, World
from timeline.broker.schedules.records import ScheduleStore
from timeline.broker.schedules.runner import ScheduleRunner
from timeline.errors import Fenced, NotFound, TimelineError
from timeline.history import Verdict, Violation
from timeline.model import Status
from timeline.schedules.record import TRIGGER, schedule_of

TOPIC = "planned"
SLACK_MS = 1_500
"""By how much an occurrence may lie beside an edit without its being wrong: brokers' clocks differ, and edits are done
between two moments."""
NAMES = 6
PERIODS_S = (1, 2, 3, 5)
EDITS = 9
"""Of each schedule."""
QUIET_S = 25.0
OUTCOMES = (
    "occurrence OK", "occurrence DUPLICATE", "occurrence UNKNOWN", "occurrence UNAVAILABLE", "record OK",
    "record EXISTS", "record UNKNOWN", "record UNAVAILABLE", "occurrences cancelled", "record waits for the one before",
    "look repeated", "schedule created", "schedule updated", "schedule paused",
    "schedule resumed",    "schedule deleted", "schedule triggered", "edit of unknown outcome", "edit fenced",
    "edit beside another one",
)  # fmt: skip
"""What a run of seeds must have met."""


@dataclass(slots=True)
class Revision:
    """What an edit asked for: the `every_s` of its rule (0: nothing is produced), and from when to when (true ms) it
    was under way. `sure`: it was answered."""

    every_s: int
    invoked_ms: float
    returned_ms: float = inf
    sure: bool = False
    alone: bool = False
    """Whether occurrences may be skipped or wait."""

    def has(self, at_ms: int) -> bool:
        """Whether its rule has this time."""
        return self.every_s > 0 and at_ms % (self.every_s * 1_000) == 0


@dataclass(slots=True)
class Seen:
    """What a consumer received."""

    id: str
    birth: int
    due_ms: int
    at_ms: float


@dataclass(slots=True)
class Ledger:
    """All that was asked and seen in a seed."""

    revisions: dict[str, list[Revision]] = field(default_factory=lambda: defaultdict(list))
    triggers: dict[str, bool] = field(default_factory=dict)
    """Ids of triggers that were answered."""
    seen: list[Seen] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    """By schedule, how many occurrences its last state declares as not produced."""

    def judge(self, end_ms: float, pending: list[str], bound_ms: float) -> Iterator[Violation]:
        """Yield each broken promise."""
        births: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
        for one in self.seen:
            found = schedule_of(one.id)
            due_ms = one.due_ms if found is None or one.id.endswith(TRIGGER) else found[1]
            if one.at_ms < due_ms - bound_ms:
                yield Violation("EARLY", f"{one.id} came {due_ms - one.at_ms:.0f} ms before its time")
            if found is not None and not one.id.endswith(TRIGGER):
                births[found].add((one.id, one.birth))
        for (name, at_ms), ids in births.items():
            if len(ids) > 1:
                yield Violation("TWICE", f"the occurrence of {name} at {at_ms} was produced as {sorted(ids)}")
            if not any(may <= at_ms <= until for may, until in self._may(name, at_ms)):
                yield Violation("PHANTOM", f"{sorted(ids)} is an occurrence of no revision: {self.revisions[name]}")
        for id in {one.id for one in self.seen if not one.id.endswith(TRIGGER)}:
            if schedule_of(id) is None:
                yield Violation("PHANTOM", f"{id} is no occurrence")
        seen = {one.id for one in self.seen}
        for id in self.triggers:
            if id not in seen:
                yield Violation("MISSING", f"the trigger {id} was never received")
        for name in self.revisions:
            missing = [at_ms for at_ms in self._must(name, end_ms) if (name, at_ms) not in births]
            if len(missing) > self.counted.get(name, 0):
                said = f"{self.revisions[name]}, of which {self.counted.get(name, 0)} are declared"
                yield Violation("MISSING", f"{name} never came at {missing[:5]} ({len(missing)} times): {said}")

    def _may(self, name: str, at_ms: int) -> Iterator[tuple[float, float]]:
        """Yield the spans in which revisions may decide that have this time."""
        revisions = self.revisions[name]
        for place, one in enumerate(revisions):
            later = [other.returned_ms for other in revisions[place + 1 :] if other.sure]
            if one.has(at_ms):
                yield one.invoked_ms - SLACK_MS, min(later, default=inf) + SLACK_MS

    def _must(self, name: str, end_ms: float) -> Iterator[int]:
        """Yield the times at which there must be an occurrence."""
        revisions = self.revisions[name]
        for place, one in enumerate(revisions):
            until_ms = min([end_ms, *(other.invoked_ms for other in revisions[place + 1 :])]) - SLACK_MS
            # An edit whose outcome is unknown may still be done later than one that was answered.
            doubt = any(not other.sure for other in revisions[:place])
            if one.sure and one.every_s and not one.alone and not doubt:
                period_ms = one.every_s * 1_000
                first_ms = -(-int(one.returned_ms + SLACK_MS) // period_ms) * period_ms
                yield from range(first_ms, int(max(first_ms, until_ms)), period_ms)


class ScheduleWorld(World):
    """A seed of schedules."""

    def __init__(self, seed: int, pieces: Pieces | None = None, brokers: int = 0, size: Size = FULL) -> None:
        super().__init__(seed, pieces, brokers, size)
        self.ledger = Ledger()
        self._work: list[asyncio.Task[Any]] = []

    def now_ms(self) -> float:
        """The true time."""
        return self.history_clock.now()

    async def _run(self) -> float:
        if len(self.brokers) > 1:
            self.loop.create_task(self.registry.watch())
        await self.start_broker()
        await self._create_topics()
        async with self.client(self.process("planner"), random.Random(f"{self.seed}-planner")) as client:
            await client.create_topic(TOPIC, lease="2s", buckets=8, remember="2h")
        self.start_consumer("c1")
        self.start_producer("a", 5)
        for number in range(2):
            process = self.process(f"worker{number}")
            self._work.append(process.run(self._receive(process, number)))
        editors = [self.process(f"editor{number}") for number in range(NAMES)]
        self._work += [one.run(self._edit(one, f"s{number}")) for number, one in enumerate(editors)]
        self.loop.create_task(self._lose_answers())
        await self.faults.strike()
        await self.faults.heal()
        for task in self._work[2:]:
            await asyncio.wait([task])
        end_ms = self.now_ms() + QUIET_S * 1_000 - 8_000
        await self.timer.wait(QUIET_S)
        await self._look_at_states()
        for broker in self.brokers:
            await broker.drain()
        return end_ms

    async def _lose_answers(self) -> None:
        """For longer than a broker repeats a put, the store does all puts and answers none. Later it takes none."""
        rng = random.Random(f"{self.seed}-answers")
        for fault in ("puts_lost", "puts_refused"):
            await self.timer.wait(rng.uniform(0.5, 3.0))
            for broker in self.brokers:
                setattr(broker.store.trouble, fault, True)
            await self.timer.wait(rng.uniform(0.3, 1.5))
            for broker in self.brokers:
                setattr(broker.store.trouble, fault, False)

    async def _receive(self, process: Any, number: int) -> None:
        """Receives occurrences and acknowledges them, some of them late."""
        rng, timer = random.Random(f"{self.seed}-worker{number}"), Timer(self.loop)
        client = self.client(process, rng)
        while True:
            try:
                async with client.consumer(TOPIC, id=f"worker{number}", credit=rng.choice((2, 20))) as consumer:
                    async for one in consumer:
                        birth, _ = self.token(one)
                        self.ledger.seen.append(Seen(one.id, birth, one.due_ms, self.now_ms()))
                        if rng.random() < 0.1:
                            await timer.wait(rng.random())
                        one.ack_soon()
            except TimelineError:
                await timer.wait(0.2)

    async def _edit(self, process: Any, name: str) -> None:
        """Creates a schedule and edits it, until the faults are over and once more."""
        rng, timer = random.Random(f"{self.seed}-{name}"), Timer(self.loop)
        client = self.client(process, rng)
        overlap = rng.choice(("allow", "allow", "allow", "skip", "queue"))
        handle: Any = None
        for _ in range(EDITS):
            await timer.wait(rng.choice((0.0, 1.0, 4.0, 8.0)) * rng.random())
            every_s = rng.choice(PERIODS_S)
            if handle is None:
                handle = await self._do(
                    name, "created", every_s, overlap != "allow",
                    lambda every_s=every_s: client.schedule(TOPIC, name, every=every_s, overlap=overlap),
                )  # fmt: skip
                continue
            kind = rng.choice(("updated", "updated", "paused", "resumed", "triggered", "fenced"))
            if kind == "triggered":
                await self._trigger(handle)
            elif kind == "fenced":
                await self._be_fenced(client, handle)
            elif await self._known(client, name, handle):
                await self._change(name, handle, kind, every_s, overlap != "allow")
        if handle is not None and rng.random() < 0.3 and await self._known(client, name, handle):
            await self._do(name, "deleted", 0, False, handle.delete)
        await client.aclose()

    async def _known(self, client: Any, name: str, handle: Any) -> bool:
        """Reads the schedule again, so that an edit begins with what stands."""
        try:
            await handle.refresh()
        except TimelineError:
            return False
        return True

    async def _change(self, name: str, handle: Any, kind: str, every_s: int, alone: bool) -> None:
        if kind == "paused":
            await self._do(name, kind, 0, alone, handle.pause)
            return
        if kind == "updated" and handle.paused:
            every_s = 0  # it stays paused, and its rule is not changed
            return
        stands = handle.specification.every_ms // 1_000
        if kind == "resumed":
            await self._do(name, kind, stands, alone, handle.resume)
        else:
            await self._do(name, kind, every_s, alone, lambda: handle.update(every=every_s))

    async def _do(self, name: str, kind: str, every_s: int, alone: bool, work: Callable[[], Any]) -> Any:
        """Does an edit, and notes it."""
        rival = self.loop.create_task(self._rival(name)) if self.rng.random() < 0.5 else None
        revision = Revision(every_s, self.now_ms(), alone=alone)
        self.ledger.revisions[name].append(revision)
        try:
            done = await work()
        except TimelineError:
            self.occurred["edit of unknown outcome"] += 1
            return None
        finally:
            if rival is not None:
                await asyncio.wait([rival])
        revision.sure, revision.returned_ms = True, self.now_ms()
        self.occurred[f"schedule {kind}"] += 1
        return done

    async def _rival(self, name: str) -> None:
        """Changes the same schedule at the same time, but none of its times."""
        self.incarnations += 1
        number = self.incarnations
        process = self.process(f"rival{number}")

        async def work() -> None:
            async with self.client(process, random.Random(f"{self.seed}-rival{number}")) as client:
                try:
                    found = await client.get_schedule(TOPIC, name)
                    if found is not None:
                        await found.update(payload=f"by rival {number}")
                        self.occurred["edit beside another one"] += 1
                except TimelineError:
                    return

        await asyncio.wait([process.run(work())])

    async def _trigger(self, handle: Any) -> None:
        try:
            receipt = await handle.trigger()
        except TimelineError:
            return
        self.occurred["schedule triggered"] += 1
        self.ledger.triggers[receipt.id] = True

    async def _be_fenced(self, client: Any, handle: Any) -> None:
        """An edit of a revision that there is not yet changes nothing."""
        try:
            await handle.update(every=1, if_revision=1_000_000)
        except Fenced:
            self.occurred["edit fenced"] += 1
        except TimelineError:
            return

    async def _look_at_states(self) -> None:
        async with self.client(self.process("reader"), random.Random(f"{self.seed}-reader")) as client:
            for name in list(self.ledger.revisions):
                try:
                    found = await client.get_schedule(TOPIC, name)
                except NotFound:
                    found = None
                if found is not None:
                    self.ledger.counted[name] = found.state.missed + found.state.failed + found.state.skipped

    def run(self) -> Outcome:
        """Runs the seed and judges its schedules."""
        asyncio.set_event_loop(self.loop)
        collects = gc.isenabled()
        gc.disable()
        try:
            with watched(self.occurred):
                end_ms = self.loop.run_until_complete(self._run())
        finally:
            self.loop.finish()
            asyncio.set_event_loop(None)
            if collects:
                gc.enable()
        violations = list(self.ledger.judge(end_ms, [], self.bound_ms()))
        for task in self.loop.tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and not isinstance(error, TimelineError):
                violations.append(Violation("ERROR", f"a task ended by {error!r}"))
        self.occurred += self.network.occurred + self.store.occurred
        return Outcome(self.seed, Verdict(violations, {}), len(self.ledger.seen), self.occurred)


@contextmanager
def watched(occurred: Counter[str]) -> Iterator[None]:
    """Counts what looks and edits meet."""
    messages, records, cancel = ScheduleStore.put_messages, ScheduleStore.put_records, ScheduleStore.cancel
    repeat, wake = ScheduleRunner._repeat_later, ScheduleStore.wake

    async def put_messages(self: Any, *given: Any) -> Any:
        answers = await messages(self, *given)
        occurred.update(f"occurrence {one.status}" for one in answers)
        return answers

    async def put_records(self: Any, *given: Any) -> Any:
        answers = await records(self, *given)
        occurred.update(f"record {one.status}" for one in answers)
        return answers

    async def cancelling(self: Any, *given: Any) -> Any:
        answers = await cancel(self, *given)
        occurred["occurrences cancelled"] += sum(one.status is Status.OK for one in answers)
        return answers

    async def woken(self: Any, *given: Any) -> Any:
        occurred["record waits for the one before"] += 1
        return await wake(self, *given)

    def repeated(self: Any, one: Any) -> None:
        occurred["look repeated"] += 1
        repeat(self, one)

    ScheduleStore.put_messages, ScheduleStore.put_records = put_messages, put_records  # type: ignore[method-assign]
    ScheduleStore.cancel, ScheduleStore.wake = cancelling, woken  # type: ignore[method-assign]
    ScheduleRunner._repeat_later = repeated  # type: ignore[method-assign]
    try:
        yield
    finally:
        ScheduleStore.put_messages, ScheduleStore.put_records = messages, records  # type: ignore[method-assign]
        ScheduleStore.cancel, ScheduleStore.wake = cancel, wake  # type: ignore[method-assign]
        ScheduleRunner._repeat_later = repeat  # type: ignore[method-assign]


def never(occurred: Counter[str]) -> list[str]:
    """What must have occurred and never did."""
    return [what for what in OUTCOMES if not occurred[what]]
