"""The catalog, which has topic records cached (the store stays their authority), and whether the broker serves."""

from __future__ import annotations

import asyncio
import difflib
import logging
import shlex
from base64 import b64encode
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, TypeVar

from timeline.broker.lanes import MeteredStore
from timeline.clock import Clock
from timeline.errors import Invalid
from timeline.model import (
    FIXED_SETTINGS,
    PushSecret,
    Topic,
    TopicSettings,
    check_new_push_url,
    check_new_topic_name,
    check_topic_name,
    fits_new_topic,
)
from timeline.storage_plugins.contract import StoreError, TopicConflict
from timeline.sync import Membership
from timeline.wording import typed_name, typed_value

log = logging.getLogger("timeline.broker")
T = TypeVar("T")

SECRET_BYTES = 32
ROTATION_MS = 86_400_000
"""How long the former secret of a topic's webhooks stays valid after a rotation."""
REFRESH_AT_MOST_MS = 1_000.0
"""An unknown name makes the broker read the records again, but not more often than this."""
ALONE_MS = 50.0
"""The same for a broker that knows of no other one. It may not have heard of the others yet, as after its start."""
READING_SHARE = 0.1
"""Share of this broker's time for reading the records again after hints of other brokers, or while it is alone."""


class Catalog:
    """Topics by name.

    - `on_change(before, after, made)` is called for each record that appeared, changed or went. `made`: it was just
      created here.
    - `alone`: whether no other broker can have changed any.

    Calls of the store come one at a time. Records that are read before a create or drop and applied after it would take
    the new topic away again, or bring the dropped one back.

    A change begins with the cached record. The store refuses it if another record stands by now; only then are all
    records read again. So a change costs the same however many topics there are.
    """

    def __init__(
        self,
        store: MeteredStore,
        clock: Clock,
        random_bits: Callable[[int], int],
        on_change: Callable[[Topic | None, Topic | None, bool], None],
        alone: Callable[[], bool],
    ) -> None:
        self._store, self._clock, self._random_bits, self._on_change = store, clock, random_bits, on_change
        self._alone = alone
        self._topics: dict[str, Topic] = {}
        self._by_uid: dict[int, Topic] = {}
        self._asked = self._answered = 0
        self._readings = 0
        """How many have begun."""
        self._read_at_ms = -REFRESH_AT_MOST_MS
        self._took_ms = 0.0
        self._sure = self._resting = False
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()

    def all(self) -> list[Topic]:
        """Return the cached records, by name."""
        return [self._topics[name] for name in sorted(self._topics)]

    def known(self, name: str) -> Topic | None:
        """Return the cached record of `name`."""
        return self._topics.get(name)

    def _sole(self) -> bool:
        """Return whether the cache is surely right: no other broker can change records, and no outcome is in doubt."""
        return self._sure and self._store.embedded and self._alone()

    def of(self, uid: int) -> Topic | None:
        """Return the cached record of the topic with this uid."""
        return self._by_uid.get(uid)

    async def refresh(self) -> None:
        """Read all records again, if another broker can have changed one.

        All calls that come during one reading are answered by the next one. A broker that creates a thousand topics
        sends a thousand hints.
        """
        if self._sole():
            return
        self._asked += 1
        mine = self._asked
        async with self._turn:
            if self._answered < mine:
                asked = self._asked
                await self._refresh()
                self._answered = asked

    async def hinted(self) -> None:
        """Read all records again after a hint from another broker, at a bounded share of this broker's time."""
        if self._resting:
            return  # what is hinted at now is there when that reading begins
        self._resting = True
        try:
            rest_ms = self._read_at_ms + self._took_ms / READING_SHARE - self._clock.monotonic_ms()
            await asyncio.sleep(max(0.0, rest_ms) / 1000.0)
        finally:
            self._resting = False
        await self.refresh()

    async def _refresh(self) -> None:
        self._readings += 1
        self._sure = False
        self._read_at_ms = self._clock.monotonic_ms()
        stored = {topic.name: topic for topic in await self._store.call("topics", self._store.store.topics())}
        self._took_ms = self._clock.monotonic_ms() - self._read_at_ms
        if self._topics.keys() - stored.keys():
            await self._store.inspect()  # another store, or one that lost everything, has dropped no topic
        self._sure = True
        for name in [*self._topics, *stored]:
            self._replace(self._topics.get(name), stored.get(name))
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _replace(self, before: Topic | None, after: Topic | None, made: bool = False) -> None:
        if before == after:
            return
        if before is not None:
            self._topics.pop(before.name, None)
            self._by_uid.pop(before.uid, None)
        if after is not None:
            self._topics[after.name] = self._by_uid[after.uid] = after
            if after.newer and (before is None or before.newer != after.newer):
                log.warning("topic %r has settings that only a newer broker knows: %s", after.name, after.newer)
        self._on_change(before, after, made)

    async def find(self, name: str) -> Topic | None:
        """Return the record of `name`. None: a reading that began after this call found no such topic."""
        topic = self._topics.get(name)
        if topic is not None or self._sole():
            return topic
        before = self._readings
        while True:
            async with self._turn:
                # Whoever waited here for another's reading is answered from it, unless it failed.
                wait_ms = self._read_at_ms + self._pause_ms() - self._clock.monotonic_ms()
                # A timer may be early by a little.
                if name not in self._topics and (wait_ms < 1 or not self._sure):
                    await self._refresh()
                if name in self._topics or self._readings > before:
                    return self._topics.get(name)
            # Another broker may have created it a moment ago, and this one not have heard of it yet.
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_ms / 1000.0):
                    await self._news.wait()

    def _pause_ms(self) -> float:
        """Return the least time from one reading for an unknown name to the next."""
        if not self._alone():
            return REFRESH_AT_MOST_MS
        return min(max(ALONE_MS, self._took_ms / READING_SHARE), REFRESH_AT_MOST_MS)

    async def create(self, name: str, given: Mapping[str, int | str | bool]) -> Topic:
        """Create `name`. If it exists and has the given settings, return it: settings that were not given are no
        conflict. Raise Invalid or TopicConflict."""
        settings = replace(TopicSettings(), **_known(given)).check()
        self._store.store.capabilities.check_kind(settings)
        # Only a name of older rules is looked for: `find` may wait a second for what other brokers created.
        if not fits_new_topic(check_topic_name(name)) and await self.find(name) is None:
            check_new_topic_name(name)
        return await self._create(name, settings, lambda there: _agreeing(there, _known(given)))

    async def create_internal(self, name: str, settings: TopicSettings) -> Topic:
        """Create the internal topic `name`. If it exists, return it, with whatever settings."""
        return await self._create(name, settings.check(), lambda there: _agreeing(there, {}))

    async def _create(self, name: str, settings: TopicSettings, agree: Callable[[Topic | None], Topic]) -> Topic:
        """Create `name`. `agree` returns the topic that stands under the name, or raises TopicConflict."""
        uid = self._random_bits(63) or 1
        secrets = (self._secret(),) if settings.push_url else ()
        asked = Topic(name, uid, settings, 1, self._clock.now_ms(), secrets=secrets)
        async with self._turn:
            try:
                topic = await self._change("create_topic", self._store.store.create_topic(asked))
            except TopicConflict:
                topic = agree(await self._again(name))
            self._replace(self._topics.get(name), topic, made=topic.uid == uid)
            return topic

    async def update(
        self, name: str, given: Mapping[str, int | str | bool], revision: int, rotate: bool = False
    ) -> Topic | None:
        """Change the given settings. Return None if there is no such topic. `revision` 0: any. `rotate`: make a new
        secret for its webhooks, too.

        Raise Invalid (a fixed setting among them) or TopicConflict.
        """
        known = _known(given)
        async with self._turn:
            topic = self._topics.get(name) or await self._again(name)
            for _ in range(5):
                if topic is None:
                    return None
                try:
                    after = await self._update(topic, known, revision, rotate)
                except (Invalid, TopicConflict):
                    before, topic = topic, await self._again(name)
                    if topic == before:
                        raise
                    continue
                self._replace(topic, after)
                return after
            raise TopicConflict(f"topic {name!r} keeps changing under us: try again")

    async def _update(self, topic: Topic, known: dict[str, Any], revision: int, rotate: bool) -> Topic:
        fixed = [key for key in FIXED_SETTINGS if key in known and known[key] != getattr(topic.settings, key)]
        if fixed:
            raise Invalid(f"{' and '.join(fixed)} cannot be changed after a topic was created")
        if revision not in (0, topic.revision):
            raise TopicConflict(f"topic {topic.name!r} is at revision {topic.revision}, not {revision}: read it again")
        asked = replace(topic, settings=replace(topic.settings, **known).check())
        if rotate or (asked.settings.push_url and not asked.secrets):
            until_ms = self._clock.now_ms() + ROTATION_MS
            former = tuple(each._replace(until_ms=until_ms) for each in topic.secrets[:1])
            asked = replace(asked, secrets=(self._secret(), *former))
        if asked == topic:  # as after a repeat: nothing changes, if the store agrees
            if await self._again(topic.name) != topic:
                raise TopicConflict(f"topic {topic.name!r} has changed meanwhile: try again")
            return topic
        return await self._change("update_topic", self._store.store.update_topic(asked))

    def _secret(self) -> PushSecret:
        bits = self._random_bits(8 * SECRET_BYTES).to_bytes(SECRET_BYTES, "big")
        return PushSecret(f"whsec_{b64encode(bits).decode()}")

    def secrets(self, topic: Topic) -> tuple[str, ...]:
        """Return the valid secrets of the topic's webhooks, the newest first."""
        now_ms = self._clock.now_ms()
        return tuple(each.secret for each in topic.secrets if not each.until_ms or each.until_ms > now_ms)

    async def drop(self, name: str) -> Topic | None:
        """Drop `name`. Return its record, None if there was none."""
        async with self._turn:
            topic = self._topics.get(name)
            if topic is None or not await self._change("drop_topic", self._store.store.drop_topic(topic)):
                # Another broker may have created it, or dropped it and created it again.
                topic = await self._again(name)
                if topic is None or not await self._change("drop_topic", self._store.store.drop_topic(topic)):
                    return None
            self._replace(topic, None)
            if self._store.journal is not None:
                self._store.journal.dropped(topic)
            return topic

    async def _again(self, name: str) -> Topic | None:
        """Return the record of `name` as the store has it now."""
        if not self._sole():
            await self._refresh()
        return self._topics.get(name)

    async def _change(self, call: str, work: Coroutine[Any, Any, T]) -> T:
        """Change one record. If it is refused, or its outcome is unknown, the cache may be wrong."""
        try:
            return await self._store.call(call, work)
        except StoreError:
            self._sure = False
            raise


def _agreeing(topic: Topic | None, given: Mapping[str, Any]) -> Topic:
    """Return the topic if it has the given settings. Else raise TopicConflict that names the differences."""
    if topic is None:
        raise TopicConflict("the topic was created and dropped at this moment: try again")
    stands = {name: getattr(topic.settings, name) for name in given}
    other = [name for name in given if stands[name] != given[name]]
    if other:
        differ = ", ".join(
            f"{typed_name(name)} is {typed_value(name, stands[name])}, not {typed_value(name, given[name])}"
            for name in other
        )
        raise TopicConflict(
            f"topic {topic.name!r} exists with other settings: {differ}: {_mended(topic.name, other, given)}"
        )
    return topic


def _mended(topic: str, other: Sequence[str], given: Mapping[str, Any]) -> str:
    """Return the commands that give a topic the settings."""
    fixed = [name for name in other if name in FIXED_SETTINGS]
    if fixed:
        return f"{' and '.join(fixed)} cannot be changed after a topic was created; drop it, or take another name"
    options = " ".join(
        f"--{typed_name(name).replace('_', '-')} {shlex.quote(typed_value(name, given[name]))}"
        for name in other
        if name != "paused"
    )
    name = shlex.quote(topic)
    asked = [f"`timeline topic update {name} {options}`"] if options else []
    if "paused" in other:
        asked.append(f"`timeline topic {'pause' if given['paused'] else 'resume'} {name}`")
    return f"{' and '.join(asked)} {'changes it' if len(other) == 1 else 'changes them'}, or update_topic"


def _known(given: Mapping[str, int | str | bool]) -> dict[str, Any]:
    """Return `given` if every name is a setting's, and a new push_url one to which webhooks can go. Else raise Invalid,
    with the nearest name."""
    names = [field.name for field in fields(TopicSettings)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Invalid(f"a topic has no setting {name!r}{hint}")
    if given.get("push_url"):
        check_new_push_url(given["push_url"])
    return dict(given)


STARTING = "the broker is starting"
JOINING = "the broker waits to join its cluster"
AWAITING_STORE = "the broker waits for its store"


class Readiness:
    """Whether a broker serves now.

    - `state`: why it does not serve, whatever its store says. Empty: it may.
    - `quarantined`: why it does not go by its own clock. Empty: it does.
    - `started_ms`: when it was started.
    - `changed` is set whenever `not_ready` may have changed.
    """

    def __init__(self, store: MeteredStore, membership: Membership, changed: asyncio.Event) -> None:
        self._store, self._membership = store, membership
        self.changed = changed
        self.state = STARTING
        self.started_ms = 0
        self.quarantined = ""

    def say(self, state: str) -> None:
        """Set `state`."""
        self.state = state
        self.changed.set()

    @property
    def _keeps_off(self) -> str:
        if self.state == STARTING and self._store.down:
            return f"{AWAITING_STORE}: {self._store.down}"
        if self.state == JOINING and self._membership.state.reason:
            return f"{JOINING}: {self._membership.state.reason}"
        return self.state or self.quarantined or self._store.refused

    @property
    def not_ready(self) -> str:
        """Why it does not serve now. Empty: it does."""
        if why := self._keeps_off:
            return why
        what = "takes no puts" if self._store.full else "is down"
        return f"the store {what}: {self._store.down}" if self._store.down else ""

    @property
    def no_calls(self) -> str:
        """Why it takes no calls. Empty: it does.

        A store without room takes no puts, but it answers reads and takes calls that may free some.
        """
        return "" if self._store.full and not self._keeps_off else self.not_ready
