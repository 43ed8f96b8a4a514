"""What calls work with: the desk, a change tried until nobody was faster, messages as decisions leave them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from timeline.leases import Ask, Decision, decide
from timeline.model import Status, Topic
from timeline.storage_plugins.asks import removal
from timeline.storage_plugins.cassandra.bucket import Bucket, Buckets, Changed
from timeline.storage_plugins.cassandra.contents import Content, Contents
from timeline.storage_plugins.cassandra.partition import Met, Partition
from timeline.storage_plugins.cassandra.records import Records
from timeline.storage_plugins.cassandra.rows import Stored
from timeline.storage_plugins.cassandra.turns import Breaths, Turns
from timeline.storage_plugins.contract import StoreUnavailable, StoreUnknown

Result = TypeVar("Result")

TRIES = 60
"""Times a change is decided anew because another process changed the bucket in between."""
LONGEST_PAUSE_S = 0.05


@dataclass(slots=True)
class Desk:
    """What calls work with. `looking`: where the search for contents of nobody stands, by topic: bucket, part, and the
    place in it. `worn`: ways through buckets (topic, bucket, whether by tag) with more traces than can be read past."""

    partition: Partition
    contents: Contents
    buckets: Buckets
    records: Records
    turns: Turns = field(default_factory=Turns)
    breaths: Breaths = field(default_factory=Breaths)
    looking: dict[int, tuple[int, int, tuple[bytes, int, int]]] = field(default_factory=dict)
    worn: set[tuple[int, int, bool]] = field(default_factory=set)

    async def stands(self, topic: Topic, lately: bool = False) -> bool:
        """Whether a topic is there, as `Records.stands` says. Of one that is not, nothing is kept in mind."""
        there = await self.records.stands(topic, lately)
        if not there:
            self.forget(topic.uid)
        return there

    def forget(self, topic: int) -> None:
        """Forgets a topic that was dropped, here or by another."""
        self.records.forget(topic)
        self.buckets.forget(topic)
        self.looking.pop(topic, None)
        self.worn = {way for way in self.worn if way[0] != topic}


async def settled_on(bucket: Bucket, attempt: Callable[[], Awaitable[Result]], locked: bool = False) -> Result:
    """What `attempt` answers once nobody changed the bucket meanwhile. `locked`: the caller holds the lock."""
    if not locked:
        async with bucket.lock:
            return await settled_on(bucket, attempt, locked=True)
    for turn in range(TRIES):
        try:
            return await attempt()
        except Met:
            continue
        except Changed:
            # Of two that meet again and again, one must come first: each waits for a time of its own.
            await asyncio.sleep(min(0.001 * (1 << turn), LONGEST_PAUSE_S) * random.random())
    raise StoreUnavailable(f"bucket {bucket.number} is changed all the time by others")


@contextmanager
def partly(done: Callable[[], object]) -> Iterator[None]:
    """Where a part of a call was `done`, that nothing happened would be untrue of a failure that follows."""
    try:
        yield
    except StoreUnavailable as error:
        if done():
            raise StoreUnknown(f"a part of it was done, then: {error}") from error
        raise


class Standing:
    """Messages of a bucket as a batch of decisions leaves them."""

    def __init__(self, topic: Topic, now_ms: int, found: dict[bytes, Stored]) -> None:
        self.topic = topic
        self.now_ms = now_ms
        self._before = found
        self._after: dict[bytes, Stored | None] = dict(found)
        self.gone: list[Stored] = []

    def decide(self, id: bytes, ask: Ask, new: Stored | None = None) -> Decision:
        """Decides and notes the effect. `new`: what a put stores, but for the message."""
        stored = self._after.get(id)
        if stored is not None and self._forgotten(stored):
            stored = None
        decision = decide(stored.message if stored else None, ask, self.now_ms, self.topic.settings)
        gone = removal(ask, decision)
        if stored is not None and gone is not None:
            self.remove(stored, *gone)
        if decision.message is None or decision.repeat or decision.status is not Status.OK:
            return decision
        if not decision.born and stored is not None:
            self._after[id] = replace(stored, message=decision.message)
        elif new is not None:
            self._after[id] = replace(new, message=decision.message)
        return decision

    def there(self) -> list[Stored]:
        """What was found, by id."""
        return [self._before[id] for id in sorted(self._before)]

    def remove(self, stored: Stored, last_op: int = 0, remember: bool = True) -> None:
        """Removes a message; its id is remembered where the topic does so."""
        keeps = remember and self.topic.settings.remember_ms > 0
        self._after[stored.id] = stored.settled(last_op, self.now_ms) if keeps else None
        self.gone.append(stored)

    def set(self, stored: Stored) -> None:
        """`stored` stands from now on."""
        self._after[stored.id] = stored

    def forget(self, id: bytes) -> None:
        """Removes what is left of a settled message."""
        self._after[id] = None

    def _forgotten(self, stored: Stored) -> bool:
        return stored.message.remembered and stored.settled_ms <= self.now_ms - self.topic.settings.remember_ms

    def pairs(self) -> dict[bytes, tuple[Stored | None, Stored | None]]:
        """What changed."""
        changed: dict[bytes, tuple[Stored | None, Stored | None]] = {}
        for id, after in self._after.items():
            before = self._before.get(id)
            if before is not after:
                changed[id] = (before, after)
        return changed


def contents_of(bucket: Bucket, gone: Sequence[Stored]) -> list[Content]:
    """Where the contents of messages lie that lie apart."""
    return [Content.of(bucket.number, stored) for stored in gone if not stored.inline]
