"""What the store has of each topic, counted for people, metrics and autoscalers, at a bounded share of its time.

What comes due within ten minutes is counted by the minute, and often; what lies beyond may be most of the store, and is
counted as often as its cost allows. Topics take turns; those without messages are looked at seldom.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from timeline.broker.fairness.cooperative import EMPTY_COUNTED, TopicRounds, rest
from timeline.broker.status.broker_status import Depth
from timeline.columns import Int64
from timeline.model import MAX_TIME_MS, Topic
from timeline.storage_plugins.contract import DiskSpace, StoreError, TellsDiskSpace

if TYPE_CHECKING:
    from timeline.broker.node import Node

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
NEAR_MINUTES = 10


@dataclass(slots=True)
class _Counted:
    """Of one topic. `near`: what is due, then what comes due in each of the next minutes. `far`: what comes due within
    the hour after them, within the day after that, and later."""

    near: Int64 = field(default_factory=lambda: np.zeros(1 + NEAR_MINUTES, dtype=np.int64))
    far: Int64 = field(default_factory=lambda: np.zeros(3, dtype=np.int64))
    next_due_ms: int = 0
    counted_ms: int = 0


class Counting:
    """Counts what the store of `node` has, and sets the gauges and `node.depths`. `rounds`: the topics that it counts;
    those without a living message are empty."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.rounds = TopicRounds(EMPTY_COUNTED)
        self._counted: dict[int, _Counted] = {}
        """What was counted of topics that are not empty."""

    def add(self, topic: Topic, empty: bool) -> None:
        """A topic that is here from now on; `empty`: it was made just now."""
        self.rounds.add(topic.uid, empty)
        if empty:
            self._tell(topic, _Counted(counted_ms=self._node.clock.now_ms()))

    def restart(self) -> None:
        """A broker is gone, and with it what it knew of topics that were used through it: each is counted again."""
        self.rounds.restart()
        depths = self._node.depths
        for uid in [uid for uid, depth in depths.items() if not depth.next_due_ms]:
            del depths[uid]

    def forget(self, uid: int) -> None:
        """The topic was dropped."""
        self.rounds.remove(uid)
        self._counted.pop(uid, None)

    async def near(self) -> None:
        """How much room is left. Then one turn of each topic: what is due, and what comes due within ten minutes."""
        await self._turns([self._room, *(partial(self._near, uid) for uid in self.rounds.begin())])

    async def far(self) -> None:
        """One turn of each topic: what comes due later than that."""
        await self._turns([partial(self._far, uid) for uid in self._counted])

    async def _turns(self, counts: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """One after the other, whatever becomes of any. Raises the last trouble in the end."""
        node = self._node
        trouble: StoreError | None = None
        for count in counts:
            started_ms = node.clock.monotonic_ms()
            try:
                await count()
            except StoreError as error:
                trouble = error
            await rest(node.clock.monotonic_ms() - started_ms)
        if trouble is not None:
            raise trouble

    async def _near(self, uid: int) -> None:
        node, topic, now_ms = self._node, self._node.catalog.of(uid), self._node.clock.now_ms()
        if topic is None:
            return  # dropped meanwhile
        self.rounds.empty(uid)
        counted, found = self._counted.get(uid, _Counted()), True
        try:
            next_due = await node.store.call("next_due", node.store.store.next_due(topic, None, -1))
            found = next_due is not None
            if found:
                edges = now_ms + 1 + MINUTE_MS * np.arange(-1, NEAR_MINUTES + 1, dtype=np.int64)
                edges[0] = 0
                counted.near = await node.store.call("count_due", node.store.store.count_due(topic, edges))
            else:
                counted = _Counted()
        finally:
            if found:
                node.stocked(uid)
        if (topic := node.catalog.of(uid)) is None:
            return  # its series are gone and stay so
        counted.next_due_ms, counted.counted_ms = next_due or 0, now_ms
        if found:
            self._counted[uid] = counted
        else:
            self._counted.pop(uid, None)
        if found or self.rounds.is_empty(uid):
            self._tell(topic, counted)

    async def _far(self, uid: int) -> None:
        node, topic = self._node, self._node.catalog.of(uid)
        if topic is None:
            return
        start_ms = node.clock.now_ms() + 1
        ends = [start_ms + NEAR_MINUTES * MINUTE_MS, start_ms + HOUR_MS, start_ms + DAY_MS, MAX_TIME_MS + 1]
        counts = await node.store.call("count_due", node.store.store.count_due(topic, np.array(ends, dtype=np.int64)))
        topic, counted = node.catalog.of(uid), self._counted.get(uid)
        if topic is not None and counted is not None:  # not dropped, nor emptied, meanwhile
            counted.far = counts
            self._tell(topic, counted)

    def _tell(self, topic: Topic, counted: _Counted) -> None:
        metrics = self._node.metrics
        available, minutes = int(counted.near[0]), counted.near[1:]
        ten_minutes, far = int(minutes.sum()), counted.far.tolist()
        self._node.depths[topic.uid] = Depth(available, ten_minutes + sum(far), counted.next_due_ms, counted.counted_ms)
        expected = {
            "1m": int(minutes[0]),
            "10m": ten_minutes,
            "1h": ten_minutes + far[0],
            "24h": ten_minutes + far[0] + far[1],
        }
        for within, count in expected.items():
            metrics.topic_gauge("timeline_expected_messages", topic.name, count, within)
        metrics.topic_gauge("timeline_expected_peak_messages", topic.name, int(minutes.max()))
        metrics.topic_gauge("timeline_messages_depth", topic.name, available, "available")
        metrics.topic_gauge("timeline_messages_depth", topic.name, ten_minutes + sum(far), "waiting")
        metrics.topic_gauge("timeline_next_due_timestamp_seconds", topic.name, counted.next_due_ms / 1000.0)
        metrics.topic_gauge("timeline_overdue_seconds", topic.name, _overdue_ms(topic, counted) / 1000.0)
        metrics.topic_gauge("timeline_topic_rate_limit", topic.name, topic.settings.max_rate_per_s)
        mine = self._node.membership.buckets(topic.uid, topic.settings.buckets)
        metrics.topic_gauge("timeline_buckets", topic.name, topic.settings.buckets if mine is None else len(mine))

    async def _room(self) -> None:
        """How much room is left where the store keeps its data, if it can tell."""
        store = self._node.store.store
        room: DiskSpace | None = None
        if isinstance(store, TellsDiskSpace):
            room = await self._node.store.call("room", store.room())
        if room is not None:
            self._node.metrics.gauge("timeline_store_free_bytes", room.free_bytes)
            self._node.metrics.gauge("timeline_store_size_bytes", room.size_bytes)


def _overdue_ms(topic: Topic, counted: _Counted) -> int:
    """How long the earliest message that could have been delivered has been due. A pause holds up all; what somebody
    held may have to wait for the topic's backoff first."""
    settings = topic.settings
    if not counted.next_due_ms or settings.paused:
        return 0
    return max(0, counted.counted_ms - counted.next_due_ms - settings.redelivery_backoff_ms)
