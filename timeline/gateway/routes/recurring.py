"""Recurring schedules: JSON values and the driver's, and a place to walk rules that holds up no other call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import tzinfo
from itertools import islice
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from msgspec import UNSET

from timeline.driver.schedules import Schedule, ScheduleState
from timeline.driver.times import as_datetime, duration_ms, iso, iso_or_none
from timeline.errors import Invalid, Throttled
from timeline.gateway.shapes import (
    ChangeSchedule,
    NextTimes,
    PreviewAnswer,
    PreviewRules,
    RecurringTime,
    Rules,
    ScheduleFields,
    ScheduleProgress,
    StoredSchedule,
)
from timeline.gateway.values import (
    CONTENT_TYPE,
    JSON,
    headers_of,
    instant,
    is_json,
    length,
    payload_fields,
    payload_of,
)
from timeline.recurrence import FoldPolicy, GapPolicy, Occurrence, Recurrence
from timeline.wording import shown_duration

T = TypeVar("T")

SPANS = ("jitter", "window", "expires")
TEMPLATE = (*SPANS, "catch_up", "overlap", "tag", "group", "paused")
COUNTS = ("sequence", "produced", "caught_up", "missed", "skipped", "failed")
MOST_SHOWN = 1_000
"""The most times of one answer."""
MOST_WALKS = 16
"""Walks that may wait for the one under way."""


class RuleWalks:
    """Walks rules in a thread of their own, one after the other. A rule may leave out very many times in a row before
    it gives one, or none. Meanwhile other calls go on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "rules")
        self._walks: list[Future[Any]] = []
        """Those under way. One goes on when its caller has gone."""

    async def run(self, walk: Callable[[], T]) -> T:
        """Return the result of `walk`. Raise Throttled while too many wait."""
        self._walks = [one for one in self._walks if not one.done()]
        if len(self._walks) >= MOST_WALKS:
            raise Throttled("as many rules as may be are being walked", retry_after_ms=1_000)
        walking = self._thread.submit(walk)
        self._walks.append(walking)
        return await asyncio.wrap_future(walking)

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


def schedule_fields(asked: ScheduleFields) -> dict[str, Any]:
    """Return the fields of a schedule as the driver takes them: only those that are given, and None for null. Raise
    Invalid or TooLarge, which name the field."""
    fields = rules_of(asked)
    for name in TEMPLATE:
        value = getattr(asked, name)
        if value is not UNSET:
            fields[name] = length(value, name) if name in SPANS and value is not None else value
    if is_payload_given(asked):
        fields["payload"], headers = payload_of(asked)
        if headers is not None:
            fields["headers"] = headers
    elif asked.headers is not UNSET:
        fields["headers"] = headers_of(asked)
    return fields


def whole(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a schedule: those that are not given have None, which is their default."""
    return dict.fromkeys((*Rules.__struct_fields__, *TEMPLATE, "payload", "headers")) | dict(fields)


def is_payload_given(asked: ScheduleFields) -> bool:
    """Return whether a body has a payload."""
    return asked.payload is not UNSET or asked.payload_text is not None or asked.payload_base64 is not None


def changed_headers(asked: ChangeSchedule, standing: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a schedule after a change. The type of a payload goes with it: what is put as JSON comes
    back as JSON. Raise Invalid or TooLarge."""
    headers = {name: value for name, value in standing.items() if name.lower() != CONTENT_TYPE or value != JSON}
    if asked.headers is not UNSET:
        headers = headers_of(asked) or {}
    marked = asked.payload is not UNSET if is_payload_given(asked) else is_json(standing)
    if marked and not any(name.lower() == CONTENT_TYPE for name in headers):
        headers[CONTENT_TYPE] = JSON
    return headers


def stored_schedule(one: Schedule, payload: bool = True) -> StoredSchedule:
    """Return a schedule for an answer."""
    says = one.specification
    shown = payload_fields(says.payload, says.headers) if payload and one.payload_shown and says.payload else {}
    return StoredSchedule(
        topic=one.topic,
        name=one.name,
        words=says.words(),
        cron=list(says.cron),
        every=_span(says.every_ms),
        rrule=list(says.rrule),
        exclude=list(says.exclude),
        start=iso_or_none(says.start_ms),
        end=iso_or_none(says.end_ms),
        count=says.count or None,
        zone=says.zone,
        gap=says.gap,
        fold=says.fold,
        jitter=shown_duration(says.jitter_ms),
        catch_up=says.catch_up.value,
        window=shown_duration(says.window_ms),
        overlap=says.overlap.value,
        headers=dict(says.headers),
        tag=says.tag or None,
        group=says.group,
        expires=_span(says.expires_ms),
        paused=says.paused,
        revision=one.revision,
        status=one.status,
        state=_progress(one.state),
        next=iso_or_none(one.next_ms),
        warnings=list(one.warnings),
        **shown,
    )


def _span(length_ms: int) -> str | None:
    return shown_duration(length_ms) if length_ms else None


def _progress(state: ScheduleState) -> ScheduleProgress:
    counts = {name: getattr(state, name) for name in COUNTS}
    return ScheduleProgress(
        created=iso(state.created_ms),
        edited=iso(state.edited_ms),
        position=iso_or_none(state.position_ms),
        last=iso_or_none(state.last_ms),
        last_id=state.last_id or None,
        last_put=iso_or_none(state.last_put_ms),
        **counts,
    )


def upcoming(one: Schedule, limit: int) -> Callable[[], NextTimes]:
    """Return what walks a schedule's rules and answers its next times."""

    def walk() -> NextTimes:
        zone = ZoneInfo(one.specification.zone)
        return NextTimes([recurring_time(each, zone) for each in islice(one.occurrences(), limit)])

    return walk


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
        zone = ZoneInfo(recurrence.zone)
        following = recurrence.following(from_ms, asked.limit)
        return PreviewAnswer(recurrence.words(), [recurring_time(one, zone) for one in following])

    return walk


def recurring_time(one: Occurrence, zone: tzinfo) -> RecurringTime:
    """Return a time that a rule gives for an answer."""
    local = as_datetime(one.at_ms).astimezone(zone)
    return RecurringTime(iso(one.at_ms), local.isoformat(), one.change.value)
