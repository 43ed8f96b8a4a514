"""The catalog: topic records as the store has them, cached; the store stays their authority."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from timeline.broker.metered import MeteredStore
from timeline.clock import Clock
from timeline.errors import Invalid
from timeline.model import FIXED_SETTINGS, Topic, TopicSettings, check_topic_name
from timeline.storage_plugins.contract import TopicConflict

REFRESH_AT_MOST_MS = 1_000.0
"""An unknown name makes us read the records again, but not more often than this."""


class Catalog:
    """Topics by name. `on_change(before, after)` is called for each record that appeared, changed or went.

    One call of the store at a time: records that were read before a create or drop and applied after it would take
    the new topic away again, or bring the dropped one back.
    """

    def __init__(
        self,
        store: MeteredStore,
        clock: Clock,
        random_bits: Callable[[int], int],
        on_change: Callable[[Topic | None, Topic | None], None],
    ) -> None:
        self._store, self._clock, self._random_bits, self._on_change = store, clock, random_bits, on_change
        self._topics: dict[str, Topic] = {}
        self._asked = self._answered = 0
        self._read_at_ms = -REFRESH_AT_MOST_MS
        self._turn = asyncio.Lock()

    def all(self) -> list[Topic]:
        """The records as cached, by name."""
        return [self._topics[name] for name in sorted(self._topics)]

    async def refresh(self) -> None:
        """Reads all records again. However many ask while a reading is under way, one more answers them all: another
        broker that creates a thousand topics says so a thousand times."""
        self._asked += 1
        mine = self._asked
        async with self._turn:
            if self._answered < mine:
                asked = self._asked
                await self._refresh()
                self._answered = asked

    async def _refresh(self) -> None:
        self._read_at_ms = self._clock.monotonic_ms()
        stored = {topic.name: topic for topic in await self._store.call("topics", self._store.store.topics())}
        for name in [*self._topics, *stored]:
            self._replace(self._topics.get(name), stored.get(name))

    def _replace(self, before: Topic | None, after: Topic | None) -> None:
        if before == after:
            return
        if before is not None:
            self._topics.pop(before.name, None)
        if after is not None:
            self._topics[after.name] = after
        self._on_change(before, after)

    async def find(self, name: str) -> Topic | None:
        """The record of `name`, None when there is no such topic."""
        topic = self._topics.get(name)
        if topic is not None:
            return topic
        async with self._turn:
            # Whoever waited here for another's reading is answered from it.
            if name not in self._topics and self._clock.monotonic_ms() - self._read_at_ms >= REFRESH_AT_MOST_MS:
                await self._refresh()
            return self._topics.get(name)

    async def create(self, name: str, given: Mapping[str, int | str | bool]) -> Topic:
        """Creates `name`; where it stands already, answers that if it agrees with the settings given, so that what an
        operator tuned since is no conflict for whoever did not ask for it. Raises Invalid, or TopicConflict."""
        settings = replace(TopicSettings(), **_known(given)).check()
        uid = self._random_bits(63) or 1
        asked = Topic(check_topic_name(name), uid, settings, 1, self._clock.now_ms())
        async with self._turn:
            try:
                topic = await self._store.call("create_topic", self._store.store.create_topic(asked))
            except TopicConflict:
                await self._refresh()
                topic = _agreeing(self._topics.get(name), _known(given))
            self._replace(self._topics.get(name), topic)
            return topic

    async def update(self, name: str, given: Mapping[str, int | str | bool], revision: int) -> Topic | None:
        """Changes the settings given; None when there is no such topic. `revision` 0: whatever stands. Raises Invalid
        (a fixed setting among them) or TopicConflict."""
        known = _known(given)
        async with self._turn:
            return await self._update(name, known, revision)

    async def _update(self, name: str, known: dict[str, Any], revision: int) -> Topic | None:
        for _ in range(5):
            await self._refresh()
            topic = self._topics.get(name)
            if topic is None:
                return None
            fixed = [key for key in FIXED_SETTINGS if key in known and known[key] != getattr(topic.settings, key)]
            if fixed:
                raise Invalid(f"{' and '.join(fixed)} cannot be changed after a topic was created")
            if revision not in (0, topic.revision):
                raise TopicConflict(f"topic {name!r} is at revision {topic.revision}, not {revision}: read it again")
            asked = replace(topic, settings=replace(topic.settings, **known).check())
            try:
                after = await self._store.call("update_topic", self._store.store.update_topic(asked))
            except TopicConflict:
                if revision:
                    raise
                continue
            self._replace(topic, after)
            return after
        raise TopicConflict(f"topic {name!r} keeps changing under us: try again")

    async def drop(self, name: str) -> Topic | None:
        """Drops `name`; answers the record that stood, None when there was none."""
        async with self._turn:
            await self._refresh()
            topic = self._topics.get(name)
            if topic is None or not await self._store.call("drop_topic", self._store.store.drop_topic(topic)):
                return None
            self._replace(topic, None)
            return topic


def _agreeing(topic: Topic | None, given: Mapping[str, Any]) -> Topic:
    """The topic that stands, when it has the settings given; else TopicConflict naming those that differ."""
    if topic is None:
        raise TopicConflict("the topic was created and dropped at this moment: try again")
    other = {
        name: getattr(topic.settings, name) for name, value in given.items() if getattr(topic.settings, name) != value
    }
    if other:
        differ = ", ".join(f"{name} is {value}, not {given[name]}" for name, value in other.items())
        raise TopicConflict(f"topic {topic.name!r} exists with other settings: {differ}; change them by a topic update")
    return topic


def _known(given: Mapping[str, int | str | bool]) -> dict[str, Any]:
    """`given`, when every name is a setting's; else Invalid with the nearest one."""
    names = [field.name for field in fields(TopicSettings)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Invalid(f"a topic has no setting {name!r}{hint}")
    return dict(given)
