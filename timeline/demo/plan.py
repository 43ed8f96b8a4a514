"""The plan of a day: who files, moves and cancels which flight when, and when a gate will crash.

The conductor makes it once, and writes it to a file that the other processes read, so that all play the same day. What
will happen is known beforehand. The demo measures when the service does it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from timeline.demo.flights import MINUTE_MS, NEW_YORK, Flight
from timeline.errors import Invalid

PLAN = "plan.json"
"""The file of the plan, in the demo's folder."""
HISTORY_SUFFIX = ".history.jsonl"

MIN_SPEED, MAX_SPEED = 1.0, 20_000.0
DEFAULT_SPEED = 600.0
TOPIC = "departures"
LEASE_MS = 2_000
FEEDERS = 3
GATES = 4
"""Gates that are consumers, and that crash. One more is a webhook receiver."""
WEBHOOK_GATE = f"gate-{GATES + 1}-webhook"
CREDIT = 64
"""Departures that a gate may have in flight; four gates take the largest bank of a day together."""

FILED_AHEAD_MIN, FILED_AHEAD_REAL_MS = 240, 6_000
"""How long before its time a departure is put: minutes of the day, and at least this in real time."""
NOTICE_MIN, NOTICE_REAL_MS = 45, 2_500
"""How long before the scheduled time delays and cancellations are announced at the latest."""
BOARDING_MIN, BOARDING_LEAST_MS, BOARDING_MOST_MS = 4, 20, 400
"""How long a gate takes from delivery to ack: minutes of the day, within real bounds well below the lease."""
START_MS = 500
"""From making the plan to the first put: every process reads the plan meanwhile."""
CRASHES_AT = (0.12, 0.32, 0.55, 0.78)
"""When gates crash, as shares of the day's departures."""
INSPECTOR = "inspector"
RUNWAY = "inspections"
"""The topic into which a recurring schedule produces."""
HOUR_MS = 60 * MINUTE_MS
LEAST_PERIOD_MS = 1_000
"""No schedule recurs more often (real). On a faster day, the runway is inspected every few hours."""
INSPECTED_AFTER_MS = 3_000
"""How long after the first put the runway may be inspected for the first time (real). The brokers begin meanwhile."""


def gate_name(number: int, life: int = 1) -> str:
    """Return the consumer id of gate `number` (from 0) in its `life` (from 1).

    A gate that comes back after a crash is another consumer. So its departures come back by their leases alone.
    """
    return f"gate-{number + 1}" + (f".{life}" if life > 1 else "")


@dataclass(frozen=True, slots=True)
class DayClock:
    """At `real_ms` (milliseconds UTC, now) it is `day_ms` (milliseconds UTC, in 2013)."""

    real_ms: int
    day_ms: int
    speed: float

    def real(self, day_ms: float) -> int:
        """Return the real time at which the day's clock shows `day_ms`, rounded up."""
        return math.ceil(self.real_ms + (day_ms - self.day_ms) / self.speed)

    def day(self, real_ms: float) -> int:
        """Return what the day's clock shows at `real_ms`."""
        return int(self.day_ms + (real_ms - self.real_ms) * self.speed)

    def text(self, day_ms: float, seconds: bool = False) -> str:
        """Return New York's wall time at `day_ms`, such as 07:42."""
        return dt.datetime.fromtimestamp(day_ms / 1000, NEW_YORK).strftime("%H:%M:%S" if seconds else "%H:%M")


@dataclass(frozen=True, slots=True)
class Crash:
    """Gate `gate` crashes with the first departure that it gets at or after `after_ms` (real, UTC)."""

    gate: int
    after_ms: int


@dataclass(frozen=True, slots=True)
class Filing:
    """The work of a feeder for one flight. All times are real milliseconds UTC; 0 is never.

    It puts the flight at `put_ms` for `due_ms`. At `notice_ms` it moves it to `moved_ms`, or cancels it.
    """

    flight: Flight
    put_ms: int
    due_ms: int
    notice_ms: int
    moved_ms: int

    @property
    def final_due_ms(self) -> int:
        """Return when it must go out in the end."""
        return self.moved_ms or self.due_ms


@dataclass(frozen=True, slots=True)
class Inspections:
    """Inspections of the runway, as a recurring schedule produces them: each `hours` hours of the day, which last
    `period_ms`, from `first_ms` on, `count` in all. Times are real milliseconds UTC."""

    hours: int
    period_ms: int
    first_ms: int
    count: int
    topic: str = RUNWAY

    @property
    def times(self) -> tuple[int, ...]:
        """Return when the runway is inspected."""
        return tuple(self.first_ms + number * self.period_ms for number in range(self.count))


@dataclass(frozen=True, slots=True)
class WebhookPlan:
    """What the gate that is a webhook receiver knows: the gateway's address, and the topic's secret."""

    gateway: str
    secret: str


@dataclass(frozen=True, slots=True)
class DayPlan:
    """A day as all processes of a demo play it. `carriers`: for each feeder, the carriers that it works for. `webhook`:
    of the gate that is a webhook receiver; None: there is no such gate. `inspections`: of the runway; None: the day is
    too short for one."""

    day: dt.date
    clock: DayClock
    filings: tuple[Filing, ...]
    crashes: tuple[Crash, ...]
    carriers: tuple[tuple[str, ...], ...]
    address: str
    lease_ms: int = LEASE_MS
    topic: str = TOPIC
    webhook: WebhookPlan | None = None
    inspections: Inspections | None = None

    @property
    def boarding_ms(self) -> int:
        return int(min(max(BOARDING_MIN * MINUTE_MS / self.clock.speed, BOARDING_LEAST_MS), BOARDING_MOST_MS))

    @property
    def begin_ms(self) -> int:
        """Return when the first departure is put."""
        return min(filing.put_ms for filing in self.filings)

    @property
    def last_due_ms(self) -> int:
        """Return when the last departure goes out."""
        return max(filing.final_due_ms for filing in self.filings)

    def write(self, path: Path) -> None:
        """Write it to a file that `read_plan` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=str), encoding="utf-8")


def read_plan(path: Path) -> DayPlan:
    """Return the plan that `DayPlan.write` wrote."""
    given = json.loads(path.read_text(encoding="utf-8"))
    given["day"] = dt.date.fromisoformat(given["day"])
    given["clock"] = DayClock(**given["clock"])
    given["filings"] = tuple(Filing(**each | {"flight": Flight(**each["flight"])}) for each in given["filings"])
    given["crashes"] = tuple(Crash(**each) for each in given["crashes"])
    given["carriers"] = tuple(map(tuple, given["carriers"]))
    given["webhook"] = None if given["webhook"] is None else WebhookPlan(**given["webhook"])
    given["inspections"] = None if given["inspections"] is None else Inspections(**given["inspections"])
    return DayPlan(**given)


def make_plan(
    flights: Sequence[Flight],
    day: dt.date,
    now_ms: int,
    address: str,
    speed: float = DEFAULT_SPEED,
    topic: str = TOPIC,
) -> DayPlan:
    """Return the plan for `flights` (at least one), whose first put happens START_MS after `now_ms`. Raises Invalid."""
    check_speed(speed)
    first_ms = flights[0].scheduled_ms
    # The day's clock starts early enough to file the first departure, and to announce its delay in time.
    ahead_ms = math.ceil(max(FILED_AHEAD_REAL_MS, NOTICE_MIN * MINUTE_MS / speed + NOTICE_REAL_MS))
    clock = DayClock(now_ms + START_MS, int(first_ms - ahead_ms * speed), speed)
    filings = tuple(_filing(flight, clock) for flight in flights)
    made = DayPlan(day, clock, filings, _crashes(filings), _shared_out(flights), address, topic=topic)
    return dataclasses.replace(made, inspections=_inspections(made))


def check_speed(speed: float) -> None:
    """Raise Invalid if a day cannot be played that fast."""
    if not MIN_SPEED <= speed <= MAX_SPEED:  # NaN too
        raise Invalid(
            f"the speed must be from {MIN_SPEED:g} to {MAX_SPEED:g} times real time, not {speed:g}: "
            "at 600 a day takes about two and a half minutes, at 6000 about 20 seconds"
        )


def _filing(flight: Flight, clock: DayClock) -> Filing:
    due_ms = clock.real(flight.scheduled_ms)
    filed_ms = max(FILED_AHEAD_MIN * MINUTE_MS / clock.speed, FILED_AHEAD_REAL_MS)
    put_ms = max(clock.real_ms, math.floor(due_ms - filed_ms))
    if not flight.cancelled and not flight.late:
        return Filing(flight, put_ms, due_ms, 0, 0)
    # The id decides when the airline announces, so that it is the same in every run. The put has time to be answered.
    least_ms = max(NOTICE_MIN * MINUTE_MS / clock.speed, NOTICE_REAL_MS)
    most_ms = max(due_ms - put_ms - 1_000, least_ms)
    share = zlib.crc32(flight.id.encode()) / 2**32
    notice_ms = math.floor(due_ms - (least_ms + share * (most_ms - least_ms)))
    moved_ms = 0 if flight.cancelled else clock.real(flight.leaves_ms)
    return Filing(flight, put_ms, due_ms, notice_ms, moved_ms)


def _crashes(filings: Sequence[Filing]) -> tuple[Crash, ...]:
    """Return crashes of gates in turn, at shares of the departures; few departures have one crash."""
    dues = sorted(filing.final_due_ms for filing in filings if not filing.flight.cancelled)
    if not dues:
        return ()
    at = sorted({dues[int(share * (len(dues) - 1))] for share in CRASHES_AT})
    return tuple(Crash(number % GATES, after_ms) for number, after_ms in enumerate(at))


def _inspections(plan: DayPlan) -> Inspections | None:
    """Return the inspections of the runway from soon after the first put to the last departure, at full hours."""
    clock = plan.clock
    hours = max(1, math.ceil(LEAST_PERIOD_MS * clock.speed / HOUR_MS))
    period_ms = math.ceil(hours * HOUR_MS / clock.speed)
    after_day_ms = clock.day(plan.begin_ms + INSPECTED_AFTER_MS)
    first_ms = clock.real(-(-after_day_ms // HOUR_MS) * HOUR_MS)
    count = (plan.last_due_ms - first_ms) // period_ms + 1
    topic = plan.topic.replace(TOPIC, RUNWAY)
    return Inspections(hours, period_ms, first_ms, count, topic) if count > 0 else None


def _shared_out(flights: Sequence[Flight]) -> tuple[tuple[str, ...], ...]:
    """Return the carriers of each feeder; each carrier goes to the feeder with the fewest flights so far."""
    counts = Counter(flight.carrier for flight in flights)
    shares: list[list[str]] = [[] for _ in range(min(FEEDERS, len(counts)))]
    for carrier in sorted(counts, key=lambda carrier: (-counts[carrier], carrier)):
        min(shares, key=lambda share: sum(counts[each] for each in share)).append(carrier)
    return tuple(map(tuple, shares))
