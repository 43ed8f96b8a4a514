"""Counts of schedules for metrics, by topic and state, with the times of the last and the next occurrence. They come
from a slow walk over all records, which costs 0.5 % of this broker's time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from timeline.broker.runtime import Runtime
from timeline.broker.schedules.records import ScheduleStore
from timeline.metrics import Metrics
from timeline.schedules.looks import LEAD_MS, OVERLAP_LEAD_MS
from timeline.schedules.record import STATUSES, status_of
from timeline.storage_plugins.contract import StoreError

log = logging.getLogger("timeline.broker")
SHARE = 0.005
"""Share of this broker's time."""
REST_S = 15.0
"""Between two walks."""
PAGE_ROWS = 200


@dataclass(slots=True)
class _TopicSchedules:
    """The schedules of one topic. Times are ms UTC; 0: none."""

    states: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    last_ms: int = 0
    next_ms: int = 0
    overdue_ms: int = 0
    """How long the time is over of an occurrence that is not put."""

    def add(self, said: dict[str, Any], due_ms: int, now_ms: int) -> None:
        """Count a schedule, by its record as JSON and by when it is looked at next."""
        state, specification = said["state"], said["specification"]
        self.last_ms = max(self.last_ms, state["last_put_ms"])
        paused, waits, ended = specification["paused"], bool(state["queue"]), state["ended"]
        self.states[status_of(paused, waits, ended, state["position_ms"], now_ms)] += 1
        if not paused and (waits or not ended):
            lead_ms = LEAD_MS if specification["overlap"] == "allow" else OVERLAP_LEAD_MS
            next_ms = min([due_ms + lead_ms, *(one[0] for one in state["decided"])])
            self.next_ms = min(self.next_ms or next_ms, next_ms)
            self.overdue_ms = max(self.overdue_ms, now_ms - next_ms)


class ScheduleSurvey:
    """Sets the gauges of schedules, again and again."""

    def __init__(self, runtime: Runtime, store: ScheduleStore) -> None:
        self._clock, self._metrics, self._store = runtime.clock, runtime.metrics, store
        self._shown: set[str] = set()
        """Topics that have gauges."""

    async def run(self) -> None:
        """Walk until cancelled."""
        while True:
            try:
                await self.walk()
            except StoreError as trouble:
                log.debug("schedules cannot be counted yet: %s", trouble)
            await asyncio.sleep(REST_S)

    async def walk(self) -> None:
        """Count all schedules once, and set the gauges. It rests between pages."""
        internal, found = self._store.topic, defaultdict[str, _TopicSchedules](_TopicSchedules)
        cursor: bytes = b""
        while internal is not None:
            began_ms, now_ms = self._clock.monotonic_ms(), self._clock.now_ms()
            rows, cursor = await self._store.rows(internal, cursor, PAGE_ROWS)
            assert rows.payloads is not None
            for payload, due_ms in zip(rows.payloads.tolist(), rows.due_ms.tolist(), strict=True):
                try:
                    said = json.loads(payload)
                    if not said["state"]["deleted"]:
                        found[said["specification"]["topic"]].add(said, due_ms, now_ms)
                except (ValueError, KeyError, TypeError, IndexError, RecursionError):
                    continue  # the look at it tells what is wrong
            if not cursor:
                break
            await asyncio.sleep((self._clock.monotonic_ms() - began_ms) / SHARE / 1_000.0)
        self._set(self._metrics, found)

    def _set(self, metrics: Metrics, found: dict[str, _TopicSchedules]) -> None:
        gone, self._shown = self._shown - found.keys(), set(found)
        for topic in gone:
            if self._store.is_known(topic):  # else its series were forgotten with the topic
                found[topic] = _TopicSchedules()
        for topic, one in found.items():
            for state, count in one.states.items():
                metrics.topic_gauge("timeline_schedules", topic, count, state)
            metrics.topic_gauge("timeline_schedule_last_timestamp_seconds", topic, one.last_ms / 1_000.0)
            metrics.topic_gauge("timeline_schedule_next_timestamp_seconds", topic, one.next_ms / 1_000.0)
            metrics.topic_gauge("timeline_schedule_overdue_seconds", topic, one.overdue_ms / 1_000.0)
