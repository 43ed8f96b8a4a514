"""One look at running brokers: what topics bear, what comes, who is connected, what was late. What `top` shows."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import timeline
from timeline.cli.look.late import late_json
from timeline.cli.options.values import iso
from timeline.cli.terminal.output import picked
from timeline.driver.brokers import BrokerStanding, ConsumerStatus, LatenessHistogram, Standings, TopicLoad
from timeline.driver.late import LateDelivery
from timeline.driver.queries import Outlook
from timeline.model import Topic

STEP_S = 1.0
LATENESS_OVER_MS = 60_000
"""Percentiles are of the deliveries of the last minute, as far as it was watched; at the first look, of all since the
broker started."""
FORECAST_TOPICS = 50
"""So many topics' coming load is added up at most, the largest."""
LATE_SINCE = "10m"
LATE_SHOWN = 50


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic over all brokers. `waiting`: None until the store has counted. `delivered_per_s`: None until there are
    two looks. Percentiles are None without deliveries, infinite past the last bound."""

    name: str
    state: str
    due: int
    waiting: int | None
    next_due_ms: int
    delivered_per_s: float | None
    consumers: int
    in_flight: int
    credit: int
    p50_ms: float | None
    p99_ms: float | None
    max_ms: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look. `ahead[k]` messages come due in second k from now; `overdue` were due before."""

    now_ms: int
    brokers: tuple[BrokerStanding, ...]
    unreachable: Mapping[str, str]
    topics: tuple[TopicSnapshot, ...]
    ahead: tuple[int, ...]
    overdue: int
    consumers: tuple[ConsumerStatus, ...]
    late: tuple[LateDelivery, ...]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "now": iso(self.now_ms),
            "brokers": [
                {
                    **picked(one, "address", "broker", "version"),
                    "up_ms": one.now_ms - one.started_ms,
                    **picked(one, "trouble", "store"),
                    "store_ms": one.store_ms or None,
                    "store_warnings": list(one.warnings),
                }
                for one in self.brokers
            ],
            "unreachable": dict(self.unreachable),
            "topics": [_topic_json(one) for one in self.topics],
            "due_per_s_ahead": list(self.ahead),
            "overdue": self.overdue,
            "consumers": [
                picked(one, "topic", "id", "health", "in_flight", "credit", "credit_bytes")
                for one in self.consumers
            ],
            "late": [late_json(one) for one in self.late],
        }  # fmt: skip


def _topic_json(one: TopicSnapshot) -> dict[str, Any]:
    return {
        **picked(one, "name", "state", "due", "waiting", "next_due"),
        "delivered_per_s": None if one.delivered_per_s is None else round(one.delivered_per_s, 3),
        **picked(one, "consumers", "in_flight", "credit"),
        "lateness_ms": {"p50": _finite(one.p50_ms), "p99": _finite(one.p99_ms), "max": _finite(one.max_ms)},
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


class Watcher:
    """Looks again and again, and remembers the last minute of looks, for rates and percentiles of late. `ever`: with
    percentiles of all deliveries since the brokers started, for whoever looks only once."""

    def __init__(self, tl: timeline.Timeline, topic: str = "", ever: bool = False) -> None:
        self._tl, self._topic, self._ever = tl, topic, ever
        self._looks: deque[Standings] = deque()
        self._rates: dict[str, float] | None = None

    async def look(self, seconds_ahead: int) -> Snapshot:
        """How it stands now, with the load of so many seconds ahead. Raises TimelineError."""
        tl = self._tl
        standings = await tl.standing(self._topic)
        records = {each.name: each for each in await tl.topics() if self._topic in ("", each.name)}
        report = await tl.late(LATE_SINCE, topic=self._topic, limit=LATE_SHOWN)
        loads = added_up(standings)
        largest = sorted(records, key=lambda name: (-_size(loads.get(name)), name))[:FORECAST_TOPICS]
        outlooks = await asyncio.gather(*(tl.forecast(name, seconds_ahead * STEP_S, STEP_S) for name in largest))
        overdue = {name: outlook.overdue for name, outlook in zip(largest, outlooks, strict=True)}
        self._remember(standings)
        return Snapshot(
            now_ms=max(one.now_ms for one in standings.brokers),
            brokers=standings.brokers,
            unreachable=standings.unreachable,
            topics=tuple(
                self._topic_snapshot(record, loads.get(name), overdue.get(name))
                for name, record in sorted(records.items())
            ),
            ahead=_together(outlooks, seconds_ahead),
            overdue=sum(overdue.values()),
            consumers=tuple(one for broker in standings.brokers for one in broker.consumers),
            late=report.deliveries[::-1],
        )

    def _remember(self, standings: Standings) -> None:
        if self._looks:
            self._rates = _rates(standings, self._looks[-1])
        self._looks.append(standings)
        now_ms = standings.brokers[0].now_ms
        while len(self._looks) > 2 and now_ms - self._looks[1].brokers[0].now_ms >= LATENESS_OVER_MS:
            self._looks.popleft()

    def _topic_snapshot(self, record: Topic, load: TopicLoad | None, overdue: int | None) -> TopicSnapshot:
        """`overdue`: as counted just now; None: take what the broker counted last."""
        load = load or TopicLoad(record.name, 0, 0, 0, 0, 0, 0, 0, 0, 0)
        late = self._lateness(record.name)
        rate = record.settings.max_rate_per_s
        return TopicSnapshot(
            name=record.name,
            state="paused" if record.settings.paused else f"{rate:,}/s at most" if rate else "delivers",
            due=load.available if overdue is None else overdue,
            waiting=load.waiting if load.counted_ms else None,
            next_due_ms=load.next_due_ms,
            delivered_per_s=self._rate(record.name),
            consumers=load.consumers,
            in_flight=load.in_flight,
            credit=load.credit,
            p50_ms=bound_ms(late, 0.5),
            p99_ms=bound_ms(late, 0.99),
            max_ms=bound_ms(late, 1.0),
        )

    def _rate(self, name: str) -> float | None:
        """Deliveries a second since the last look, over brokers that were there then too."""
        return None if self._rates is None else self._rates.get(name, 0.0)

    def _lateness(self, name: str) -> LatenessHistogram | None:
        """LatenessHistogram of the last minute over all brokers, or since they started; None without deliveries."""
        told: LatenessHistogram | None = None
        since_first = len(self._looks) > 1 and not self._ever
        earlier = {one.address: one for one in self._looks[0].brokers} if since_first else {}
        for one in self._looks[-1].brokers:
            late = one.lateness.get(name)
            if late is None:
                continue
            then = earlier.get(one.address)
            if then is not None and then.started_ms == one.started_ms and name in then.lateness:
                late = late.since(then.lateness[name])
            told = late if told is None or told.up_to_ms != late.up_to_ms else told.plus(late)
        return told


def _rates(now: Standings, then: Standings) -> dict[str, float]:
    """Deliveries a second between two looks, by topic. A broker that has started anew in between counts from there."""
    before = {one.address: one for one in then.brokers}
    rates: dict[str, float] = {}
    for one in now.brokers:
        earlier = before.get(one.address)
        if earlier is None or earlier.started_ms != one.started_ms or one.now_ms <= earlier.now_ms:
            continue
        delivered = {load.topic: load.delivered for load in earlier.topics}
        for load in one.topics:
            more = max(0, load.delivered - delivered.get(load.topic, 0))
            rates[load.topic] = rates.get(load.topic, 0.0) + more * 1000 / (one.now_ms - earlier.now_ms)
    return rates


def added_up(standings: Standings) -> dict[str, TopicLoad]:
    """Each topic's load over all brokers: they share the store, so depths are the latest count of one of them."""
    found: dict[str, TopicLoad] = {}
    for load in (load for one in standings.brokers for load in one.topics):
        other = found.get(load.topic)
        if other is None:
            found[load.topic] = load
            continue
        counted = max(load, other, key=lambda one: one.counted_ms)
        summed = ("consumers", "in_flight", "credit", "delivered", "redelivered", "dealt")
        sums = {name: getattr(load, name) + getattr(other, name) for name in summed}
        found[load.topic] = replace(counted, **sums)
    return found


def _size(load: TopicLoad | None) -> int:
    return 0 if load is None else load.available + load.waiting


def _together(outlooks: list[Outlook], steps: int) -> tuple[int, ...]:
    total = [0] * steps
    for outlook in outlooks:
        for at, count in enumerate(outlook.counts.tolist()[:steps]):
            total[at] += count
    return tuple(total)


def bound_ms(late: LatenessHistogram | None, share: float) -> float | None:
    """The bound that `share` of the deliveries kept; None without deliveries, infinite past the last one."""
    bound = late.at_most(share) if late is not None else None
    if bound is None:
        return None
    return math.inf if bound == timedelta.max else bound / timedelta(milliseconds=1)
