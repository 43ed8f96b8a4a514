"""Recurring schedules: JSON values and the driver's, and a place to walk rules that holds up no other call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import tzinfo
from itertools import islice
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from msgspec import UNSET

from timeline.driver.times import as_datetime, duration_ms
from timeline.errors import Invalid, Throttled
from timeline.gateway.shapes import PreviewAnswer, PreviewRules, RecurringTime, Rules
from timeline.gateway.values import instant, iso, length
from timeline.recurrence import FoldPolicy, GapPolicy, Occurrence, Recurrence

T = TypeVar("T")

MOST_SHOWN = 1_000
"""The most times of one answer."""
MOST_WALKS = 16
"""Walks that may wait for the one under way."""


class RuleWalks:
    """Walks rules in a thread of their own, one after the other. A rule may leave out very many times in a row before
    it gives one, or none. Meanwhile other calls go on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rules")
        self._walks = 0

    async def run(self, walk: Callable[[], T]) -> T:
        """Return the result of `walk`. Raise Throttled while too many wait."""
        if self._walks >= MOST_WALKS:
            raise Throttled("as many rules as may be are being walked", retry_after_ms=1_000)
        self._walks += 1
        walking = asyncio.get_running_loop().run_in_executor(self._thread, walk)
        walking.add_done_callback(self._ended)
        return await walking

    def _ended(self, _: object) -> None:
        self._walks -= 1

    def stop(self) -> None:
        """Begin no other walk."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def rules_of(asked: Rules) -> dict[str, Any]:
    """Return when something recurs, as the driver takes it: only fields that are given, and None for null. Raise
    Invalid, which names the field."""
    given = {name: getattr(asked, name) for name in Rules.__struct_fields__}
    return {name: _rule(name, value) for name, value in given.items() if value is not UNSET}


def _rule(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in ("start", "end"):
        return instant(value, name)
    if name == "every":
        return length(value, name, least_ms=1)
    if name in ("cron", "rrule", "exclude"):
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "count" and value < 1:
        raise Invalid(f"count must be at least 1, not {value}: leave it out for no bound")
    return value


def previewed(asked: PreviewRules, now_ms: int) -> Callable[[], PreviewAnswer]:
    """Return what walks the rules of a body and answers it. Raise Invalid for values that are none."""
    if not 1 <= asked.limit <= MOST_SHOWN:
        raise Invalid(f"limit must be 1 to {MOST_SHOWN}, not {asked.limit}")
    rules = {name: value for name, value in rules_of(asked).items() if value is not None}
    from_ms = now_ms if asked.from_ is None else instant(asked.from_, "from")

    def walk() -> PreviewAnswer:
        recurrence = Recurrence(
            cron=rules.get("cron", ()),
            every_ms=duration_ms(rules.get("every", 0), "every"),
            rrule=rules.get("rrule", ()),
            exclude=rules.get("exclude", ()),
            start_ms=rules.get("start", 0),
            end_ms=rules.get("end", 0),
            count=rules.get("count", 0),
            zone=rules.get("zone", "UTC"),
            gap=GapPolicy(rules["gap"]) if "gap" in rules else None,
            fold=FoldPolicy(rules["fold"]) if "fold" in rules else None,
        )
        # `count` counts from the start on. Without it there may be years of seconds in between.
        found = recurrence.occurrences(recurrence.start_ms if recurrence.count else from_ms)
        shown = islice((one for one in found if one.at_ms >= from_ms), asked.limit)
        zone = ZoneInfo(recurrence.zone)
        return PreviewAnswer(recurrence.words(), [recurring_time(one, zone) for one in shown])

    return walk


def recurring_time(one: Occurrence, zone: tzinfo) -> RecurringTime:
    """Return a time that a rule gives for an answer."""
    local = as_datetime(one.at_ms).astimezone(zone)
    return RecurringTime(iso(one.at_ms), local.isoformat(), one.change.value)
