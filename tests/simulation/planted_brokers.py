"""Brokers and drivers with one mistake each, everything else being the real thing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.simulation.gauges import ROOMY
from tests.simulation.loop import Timer, VirtualLoop
from timeline.broker.api import consume
from timeline.broker.dispatch.dealer import Dealer
from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.dispatch.pulling import PullConsumer
from timeline.broker.dispatch.roster import ConnectedConsumer, Roster
from timeline.broker.dispatch.rounds import LeaseAhead
from timeline.broker.fairness import Quota
from timeline.broker.lanes import Intake, MeteredStore
from timeline.broker.node import Node
from timeline.driver.consume.broker_clock import BrokerClock
from timeline.driver.consume.in_flight import DeliveredFrame, InFlight
from timeline.model import Answers, State, Topic
from timeline.storage_plugins.contract import LeasedRows, Puts, ScanFilter

ALL = frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD))


class EagerIntake(Intake):
    """Answers OK for ids that are free, and stores them afterwards; asks the store for all others."""

    async def put(self, topic: Topic, puts: Puts, deadline_ms: float, peer: str = "") -> Answers:
        inner = self._store.store.inner  # type: ignore[attr-defined]
        there = await inner.scan(topic, 0, ScanFilter(ALL, ids=puts.ids), b"", 100_000, False)
        if len(there.rows) or topic.settings.remember_ms:
            return await super().put(topic, puts, deadline_ms, peer)
        self._tasks.spawn(self._later(topic, puts, deadline_ms), "eager put")
        answers = Answers.blank(len(puts))
        answers.version[:], answers.due_ms = 1, puts.due_ms.copy()
        return answers

    async def _later(self, topic: Topic, puts: Puts, deadline_ms: float) -> None:
        await super().put(topic, puts, deadline_ms)


class EagerNode(Node):
    """A broker that answers before the commit."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.intake.__class__ = EagerIntake


class RepeatingIntake(Intake):
    """Puts again, after a while, what was answered already."""

    async def put(self, topic: Topic, puts: Puts, deadline_ms: float, peer: str = "") -> Answers:
        answers = await super().put(topic, puts, deadline_ms, peer)
        self._tasks.spawn(self._later(topic, puts), "putting again")
        return answers

    async def _later(self, topic: Topic, puts: Puts) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await Timer(loop).wait(1.5)
        await super().put(topic, puts, math.inf)


class RepeatingNode(Node):
    """A broker that repeats puts of its own accord."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.intake.__class__ = RepeatingIntake


class BottomlessNode(Node):
    """A broker whose intake takes whatever comes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.intake._quota = Quota(ROOMY.intake_messages, ROOMY.intake_bytes)


@contextmanager
def instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`value` in the place of what `owner` has under `name`, for a while."""
    before = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def same_turn() -> Any:
    """Each dealing round begins with the same consumer."""
    return instead(Roster, "dealt_last", lambda roster, consumer: None)


def leaves_one_out() -> Any:
    """The last in order is never dealt to while there are others."""
    ready = Roster.ready

    def some(roster: Roster, now_ms: float) -> list[ConnectedConsumer]:
        able = sorted(ready(roster, now_ms), key=lambda consumer: consumer.id)
        return able[:-1] if len(roster.consumers) > 1 else able

    return instead(Roster, "ready", some)


def credit_anyway() -> Any:
    """The credit of a Settle counts whatever was answered."""
    return instead(consume, "credit_counts", lambda operation, status: True)


def always_idle() -> Any:
    """A message larger than the credit in bytes goes to whoever's turn it is."""
    return instead(ConnectedConsumer, "idle", property(lambda consumer: True))


def endless_leases() -> Any:
    """A driver that takes leases for longer than they are."""
    ends = BrokerClock.monotonic_ms
    return instead(BrokerClock, "monotonic_ms", lambda clock, broker_ms: ends(clock, broker_ms) + 5_000.0)


def lets_again() -> Any:
    """Whoever reconnects gets again what it has in hand."""
    return instead(consume, "tokens", lambda ids, birth, version: set())


def pushes_ahead() -> Any:
    """What was leased ahead of its time goes out at once."""
    return instead(Dealer, "give", Dealer._push)


def looks_far_ahead() -> Any:
    """Leases what is due within two seconds, and holds it."""
    return instead(LeaseAhead, "window_ms", lambda ahead, asked_ms, lease_p99_ms: 2_000)


def hands_back_what_it_pushed() -> Any:
    """Now and then what was pushed goes back as unseen, too."""
    push = Dealer._push

    def both(dealer: Dealer, consumer: ConnectedConsumer, batch: LeasedBatch) -> None:
        push(dealer, consumer, batch)
        if int(batch.rows.birth[0]) % 32 == 0:
            dealer.own_settles.release_unseen([batch])

    return instead(Dealer, "_push", both)


def hands_out_twice() -> Any:
    """A driver that gives code a delivery a second time, now and then."""
    following = InFlight.next

    def again(in_flight: InFlight, now_ms: float) -> tuple[DeliveredFrame, int] | None:
        before = in_flight.__dict__.pop("given", None)
        if before is not None:
            return before
        found = following(in_flight, now_ms)
        if found is not None and in_flight.stats.delivered % 10 == 0:
            in_flight.__dict__["given"] = found
        return found

    return instead(InFlight, "next", again)


def takes_twice() -> Any:
    """Gives a batch to every Take that waits."""

    def push(consumer: PullConsumer, item: object) -> None:
        for take in list(consumer.takes) if isinstance(item, LeasedBatch) else ():
            take.get(item, 0)

    return instead(PullConsumer, "push", push)


def pushes_nothing() -> Any:
    """Leases, and loses what it leased."""
    return instead(Dealer, "_push", lambda dealer, consumer, batch: None)


def is_deaf() -> Any:
    """A dealer that does not hear of what was put, moved or released."""
    return instead(Dealer, "hint", lambda dealer, due_ms, commit_seq=0: None)


def never_sweeps() -> Any:
    """A sweep that looks into no bucket."""
    lease_due = MeteredStore.lease_due

    async def none_for_sweeps(store: MeteredStore, topic: Topic, buckets: Any, *asked: Any) -> LeasedRows:
        return await lease_due(store, topic, [] if asked[-1] else buckets, *asked)

    return instead(MeteredStore, "lease_due", none_for_sweeps)
