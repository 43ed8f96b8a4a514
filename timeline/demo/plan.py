"""The plan of a day: who files, moves and cancels which flight when, and when a gate will crash.

Made once by the conductor and written as a file that the other processes read, so that all of them play the same day.
What is to happen is known beforehand; when the service does it is what the demo measures.
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
READY, GO = "ready", "go"
"""What a process says once it could begin, and what the conductor answers."""
HISTORY_SUFFIX = ".history.jsonl"

MIN_SPEED, MAX_SPEED = 1.0, 20_000.0
DEFAULT_SPEED = 600.0
TOPIC = "departures"
LEASE_MS = 2_000
FEEDERS = 3
GATES = 4
CREDIT = 64
"""Departures a gate may have in hand; four of them take the largest bank of a day together."""

FILED_AHEAD_MIN, FILED_AHEAD_REAL_MS = 240, 6_000
"""A departure is put so long before its time: minutes of the day, but no less than this really takes."""
NOTICE_MIN, NOTICE_REAL_MS = 45, 2_500
"""Delays and cancellations are announced at least so long before the scheduled time."""
BOARDING_MIN, BOARDING_LEAST_MS, BOARDING_MOST_MS = 4, 20, 400
"""What a gate takes from the delivery to its ack: minutes of the day, within real bounds well below the lease."""
START_MS = 500
"""From making the plan to the first put: every process reads the plan meanwhile."""
CRASHES_AT = (0.12, 0.32, 0.55, 0.78)
"""When gates crash, as shares of the day's departures."""


def gate_name(number: int, life: int = 1) -> str:
    """The consumer id of gate `number` (from 0) in its `life` (from 1): a gate that comes back after a crash is another
    consumer, so that what the dead one had in hand comes back by its lease alone."""
    return f"gate-{number + 1}" + (f".{life}" if life > 1 else "")


@dataclass(frozen=True, slots=True)
class DayClock:
    """At `real_ms` (milliseconds UTC, now) it is `day_ms` (milliseconds UTC, in 2013)."""

    real_ms: int
    day_ms: int
    speed: float

    def real(self, day_ms: float) -> int:
        """The real time at which the day's clock says `day_ms`, rounded up."""
        return math.ceil(self.real_ms + (day_ms - self.day_ms) / self.speed)

    def day(self, real_ms: float) -> int:
        """What the day's clock says at `real_ms`."""
        return int(self.day_ms + (real_ms - self.real_ms) * self.speed)

    def text(self, day_ms: float, seconds: bool = False) -> str:
        """New York's wall time at `day_ms`, such as 07:42."""
        return dt.datetime.fromtimestamp(day_ms / 1000, NEW_YORK).strftime("%H:%M:%S" if seconds else "%H:%M")


@dataclass(frozen=True, slots=True)
class Crash:
    """Gate `gate` crashes with the first departure it is handed at or after `after_ms` (real, UTC)."""

    gate: int
    after_ms: int


@dataclass(frozen=True, slots=True)
class Filing:
    """What a feeder does with a flight: puts it at `put_ms` for `due_ms`; then, at `notice_ms`, moves it to `moved_ms`
    or cancels it. All real milliseconds UTC; 0 is never."""

    flight: Flight
    put_ms: int
    due_ms: int
    notice_ms: int
    moved_ms: int

    @property
    def final_due_ms(self) -> int:
        """When it must go out in the end."""
        return self.moved_ms or self.due_ms


@dataclass(frozen=True, slots=True)
class DayPlan:
    """All that the processes of a demo share."""

    day: dt.date
    clock: DayClock
    filings: tuple[Filing, ...]
    crashes: tuple[Crash, ...]
    carriers: tuple[tuple[str, ...], ...]
    """For each feeder the carriers that it works for."""
    address: str
    lease_ms: int = LEASE_MS
    topic: str = TOPIC

    @property
    def boarding_ms(self) -> int:
        return int(min(max(BOARDING_MIN * MINUTE_MS / self.clock.speed, BOARDING_LEAST_MS), BOARDING_MOST_MS))

    @property
    def begin_ms(self) -> int:
        """When the first departure is put."""
        return min(filing.put_ms for filing in self.filings)

    @property
    def last_due_ms(self) -> int:
        """When the last departure goes out."""
        return max(filing.final_due_ms for filing in self.filings)

    def write(self, path: Path) -> None:
        """As a file that `read_plan` reads."""
        path.write_text(json.dumps(dataclasses.asdict(self), default=str), encoding="utf-8")


def read_plan(path: Path) -> DayPlan:
    """The plan that `DayPlan.write` wrote."""
    said = json.loads(path.read_text(encoding="utf-8"))
    filings = tuple(Filing(**{**each, "flight": Flight(**each["flight"])}) for each in said.pop("filings"))
    return DayPlan(
        day=dt.date.fromisoformat(said.pop("day")),
        clock=DayClock(**said.pop("clock")),
        filings=filings,
        crashes=tuple(Crash(**each) for each in said.pop("crashes")),
        carriers=tuple(tuple(each) for each in said.pop("carriers")),
        **said,
    )


def make_plan(
    flights: Sequence[Flight],
    day: dt.date,
    now_ms: int,
    address: str,
    speed: float = DEFAULT_SPEED,
    topic: str = TOPIC,
) -> DayPlan:
    """The plan for `flights` (at least one), whose first put happens START_MS after `now_ms`. Raises Invalid for a
    speed out of range."""
    check_speed(speed)
    first_ms = flights[0].scheduled_ms
    # The day's clock starts early enough that the first departure can be filed, announced late and still be in time.
    ahead_ms = math.ceil(max(FILED_AHEAD_REAL_MS, NOTICE_MIN * MINUTE_MS / speed + NOTICE_REAL_MS))
    clock = DayClock(now_ms + START_MS, int(first_ms - ahead_ms * speed), speed)
    filings = tuple(_filing(flight, clock) for flight in flights)
    return DayPlan(day, clock, filings, _crashes(filings), _shared_out(flights), address, topic=topic)


def check_speed(speed: float) -> float:
    """`speed`, when a day can be played that fast. Raises Invalid."""
    if not MIN_SPEED <= speed <= MAX_SPEED:  # NaN too
        raise Invalid(
            f"the speed must be from {MIN_SPEED:g} to {MAX_SPEED:g} times real time, not {speed:g}: "
            "at 600 a day takes about two and a half minutes, at 6000 about 20 seconds"
        )
    return speed


def _filing(flight: Flight, clock: DayClock) -> Filing:
    due_ms = clock.real(flight.scheduled_ms)
    filed_ms = max(FILED_AHEAD_MIN * MINUTE_MS / clock.speed, FILED_AHEAD_REAL_MS)
    put_ms = max(clock.real_ms, math.floor(due_ms - filed_ms))
    if not flight.cancelled and not flight.late:
        return Filing(flight, put_ms, due_ms, 0, 0)
    # Airlines announce at different times; which, is decided by the id, the same in every run. Never before the put
    # has had its time to be answered.
    least_ms = max(NOTICE_MIN * MINUTE_MS / clock.speed, NOTICE_REAL_MS)
    most_ms = max(due_ms - put_ms - 1_000, least_ms)
    share = zlib.crc32(flight.id.encode()) / 2**32
    notice_ms = math.floor(due_ms - (least_ms + share * (most_ms - least_ms)))
    moved_ms = 0 if flight.cancelled else clock.real(flight.leaves_ms)
    return Filing(flight, put_ms, due_ms, notice_ms, moved_ms)


def _crashes(filings: Sequence[Filing]) -> tuple[Crash, ...]:
    """Gates in turn, at shares of the departures that will go out; few departures, one crash all the same."""
    dues = sorted(filing.final_due_ms for filing in filings if not filing.flight.cancelled)
    if not dues:
        return ()
    at = sorted({dues[int(share * (len(dues) - 1))] for share in CRASHES_AT})
    return tuple(Crash(number % GATES, after_ms) for number, after_ms in enumerate(at))


def _shared_out(flights: Sequence[Flight]) -> tuple[tuple[str, ...], ...]:
    """The carriers over the feeders, each next one to the feeder with the fewest flights so far."""
    counts = Counter(flight.carrier for flight in flights)
    loads = [0] * min(FEEDERS, len(counts))
    shares: list[list[str]] = [[] for _ in loads]
    for carrier, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        lightest = loads.index(min(loads))
        loads[lightest] += count
        shares[lightest].append(carrier)
    return tuple(tuple(share) for share in shares)
