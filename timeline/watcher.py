"""Looks at running brokers: topics, the coming load, consumers and late deliveries, with rates between two looks."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from timeline.driver.brokers import BrokerStanding, ConsumerStatus, LatenessHistogram, Standings, TopicLoad
from timeline.driver.client import Timeline
from timeline.driver.late import LateDelivery, LateReport
from timeline.driver.queries import Outlook
from timeline.errors import NotFound, Unavailable
from timeline.model import Topic

STEP_S = 1.0
APART_MS = 10_000
"""How far apart the looks are that are remembered, besides the last one."""
LATENESS_OVER_MS = 60_000
"""Percentiles cover the watched part of the last minute. At the first look they cover all since the broker started."""
FORECAST_TOPICS = 50
"""The coming load is added up over this many topics, the largest."""
OBJECTIVE_MS = 100
OBJECTIVE = 0.999
"""The share of a topic's deliveries that is to be at most OBJECTIVE_MS late, as in the alerts for Prometheus."""
LATE_SINCE = "10m"
LATE_SHOWN = 50


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic over all brokers. `waiting`: None until the store has counted. `delivered_per_s`: None at the first look.
    Percentiles are None without deliveries, infinite past the last bound. `kept`: the share of deliveries at most
    OBJECTIVE_MS late, None without deliveries."""

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
    kept: float | None = None

    @property
    def misses_objective(self) -> bool:
        """Whether too many deliveries are late."""
        return self.kept is not None and self.kept < OBJECTIVE


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Brokers at one moment. `ahead[k]` messages come due in second k from now; `overdue` were due before. `unknown`:
    why no broker could tell more than how it stands itself."""

    now_ms: int
    brokers: tuple[BrokerStanding, ...]
    unreachable: Mapping[str, str]
    topics: tuple[TopicSnapshot, ...]
    ahead: tuple[int, ...]
    overdue: int
    consumers: tuple[ConsumerStatus, ...]
    late: tuple[LateDelivery, ...]
    unknown: str = ""


class Watcher:
    """Looks at brokers, and remembers the looks of the last minute, for rates and percentiles. `ever`: percentiles
    of all deliveries since the brokers started."""

    def __init__(self, tl: Timeline, topic: str = "", ever: bool = False) -> None:
        self._tl, self._topic, self._ever = tl, topic, ever
        self._looks: deque[Standings] = deque()
        self._rates: dict[str, float] | None = None

    async def look(self, seconds_ahead: int) -> Snapshot:
        """Return a snapshot, with the load of the next `seconds_ahead` seconds. Raises TimelineError."""
        standings = await self._tl.standing(self._topic)
        unknown = ""
        try:
            records, report, outlooks = await self._ask(standings, seconds_ahead)
        except Unavailable as trouble:
            if not any(one.trouble or one.warnings for one in standings.brokers):
                raise
            records, report, outlooks, unknown = {}, None, {}, trouble.reason
        loads = added_up(standings)
        overdue = {name: outlook.overdue for name, outlook in outlooks.items()}
        self._remember(standings)
        return Snapshot(
            now_ms=max(one.now_ms for one in standings.brokers),
            brokers=standings.brokers,
            unreachable=standings.unreachable,
            topics=tuple(
                self._topic_snapshot(record, loads.get(name), overdue.get(name))
                for name, record in sorted(records.items())
            ),
            ahead=_together(list(outlooks.values()), seconds_ahead),
            overdue=sum(overdue.values()),
            consumers=tuple(one for broker in standings.brokers for one in broker.consumers),
            late=report.deliveries[::-1] if report else (),
            unknown=unknown,
        )

    async def _ask(
        self, standings: Standings, seconds_ahead: int
    ) -> tuple[dict[str, Topic], LateReport, dict[str, Outlook]]:
        """Return the topics, late deliveries, and the forecasts of the largest topics. Raises TimelineError."""
        tl, loads = self._tl, added_up(standings)
        records = {each.name: each for each in await tl.topics() if self._topic in ("", each.name)}
        report = await tl.late(LATE_SINCE, topic=self._topic, limit=LATE_SHOWN)
        largest = sorted(records, key=lambda name: (-_size(loads.get(name)), name))[:FORECAST_TOPICS]
        asked = {name: tl.forecast(name, seconds_ahead * STEP_S, STEP_S) for name in largest}
        return records, report, await outlooks_of(asked)

    def _remember(self, standings: Standings) -> None:
        now_ms = standings.brokers[0].now_ms
        if self._looks and now_ms - self._looks[-1].brokers[0].now_ms > LATENESS_OVER_MS:
            self._looks.clear()  # nobody has watched for a while
        self._rates = _rates(standings, self._looks[-1]) if self._looks else None
        if len(self._looks) > 1 and self._looks[-1].brokers[0].now_ms - self._looks[-2].brokers[0].now_ms < APART_MS:
            self._looks.pop()  # with many topics, a look is large
        self._looks.append(standings)
        while len(self._looks) > 2 and now_ms - self._looks[1].brokers[0].now_ms >= LATENESS_OVER_MS:
            self._looks.popleft()

    def _topic_snapshot(self, record: Topic, load: TopicLoad | None, overdue: int | None) -> TopicSnapshot:
        """Return a topic's snapshot. `overdue`: as counted just now. None: as the broker counted last."""
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
            **dict(zip(("p50_ms", "p99_ms", "max_ms"), bounds_ms(late), strict=True)),
            kept=None if late is None else late.share_within(OBJECTIVE_MS),
        )

    def _rate(self, name: str) -> float | None:
        """Return deliveries per second since the last look, over the brokers that were there at both."""
        return None if self._rates is None else self._rates.get(name, 0.0)

    def _lateness(self, name: str) -> LatenessHistogram | None:
        """Return lateness over all brokers, of the last minute or since they started. None without deliveries."""
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


async def outlooks_of(asked: Mapping[str, Awaitable[Outlook]]) -> dict[str, Outlook]:
    """Return forecasts by topic. A topic that was dropped meanwhile has none. Raise TimelineError."""

    async def one(outlook: Awaitable[Outlook]) -> Outlook | None:
        try:
            return await outlook
        except NotFound:
            return None

    told = await asyncio.gather(*map(one, asked.values()))
    return {name: outlook for name, outlook in zip(asked, told, strict=True) if outlook is not None}


def largest_of(topics: Sequence[TopicSnapshot], most: int) -> list[str]:
    """Return the names of the topics that most messages wait in."""
    return [one.name for one in sorted(topics, key=lambda one: -((one.waiting or 0) + one.due))[:most]]


def _rates(now: Standings, then: Standings) -> dict[str, float]:
    """Return deliveries per second between two looks, by topic. A broker that restarted in between is left out."""
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
    """Return each topic's load over all brokers. They share the store, so depths are the latest count of one broker."""
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


def bounds_ms(late: LatenessHistogram | None) -> tuple[float | None, ...]:
    """Return the bounds that 50 %, 99 % and all of the deliveries kept. None without deliveries, infinite past the
    last bound."""
    bounds = [None if late is None else late.at_most(share) for share in (0.5, 0.99, 1.0)]
    return tuple(
        None if one is None else math.inf if one == timedelta.max else one / timedelta(milliseconds=1) for one in bounds
    )
