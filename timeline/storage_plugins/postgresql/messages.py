"""Messages by id: read, decided by the one table of rules, changed by compare-and-set against what was read.

No transaction spans a read and its change: who loses the race for a message reads it again. So a call that changes
nothing is one statement, one that changes something two, and nobody waits for a lock longer than one statement; but a
put that takes the place of a message removes that and stores its own in one transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from timeline.columns import Ragged
from timeline.leases import Ask, Decision, Message, decide
from timeline.model import Answers, Topic, buckets_of
from timeline.storage_plugins.asks import fill, mutation_asks, removal
from timeline.storage_plugins.contract import Mutations, StoreUnknown
from timeline.storage_plugins.postgresql import statements
from timeline.storage_plugins.postgresql.connections import Connection, Steps
from timeline.storage_plugins.postgresql.rows import Stored, remembered_of, stored_of
from timeline.storage_plugins.sql import signed_one
from timeline.storage_plugins.sql.changes import left_of

StoreNew = Callable[[Connection, list[int]], Awaitable[list[int]]]
"""Stores those of the puts whose id is free, within the caller's transaction, and answers which."""
MOST_LOST = 100
"""Races that one call may lose for the same message. In each of them somebody else has changed it."""


def too_often() -> StoreUnknown:
    """The error of a call that lost every race for a message; what it asked of others may have been done."""
    return StoreUnknown(f"a message was changed by somebody else {MOST_LOST} times between its read and its change")


@dataclass(slots=True)
class Changes:
    """What a call changes, gathered, then written by one statement. `met`: what was read, by id; a change stands only
    where the row is still as it was met. `remembered`: ids that leave something behind."""

    topic: Topic
    now_ms: int
    met: dict[bytes, Stored] = field(default_factory=dict)
    updated: dict[bytes, Message] = field(default_factory=dict)
    removed: set[bytes] = field(default_factory=set)
    remembered: dict[bytes, Message] = field(default_factory=dict)

    def remove(self, stored: Stored, last_op: int = 0, remember: bool = True) -> Stored | None:
        """Removes a message; answers what is left of it on a topic that remembers."""
        self.updated.pop(stored.id, None)
        self.removed.add(stored.id)
        if not remember or not self.topic.settings.remember_ms:
            return None
        left = left_of(stored.message, last_op)
        self.remembered[stored.id] = left
        return Stored(0, left, 0, stored.id)

    def apply(self, stored: Stored | None, ask: Ask, decision: Decision) -> Stored | None:
        """Notes what `decision` changes of `stored`; answers what then stands under the id."""
        if stored is None or not stored.row:
            return stored
        gone = removal(ask, decision)
        if gone is not None:
            return self.remove(stored, *gone)
        if decision.message is not None and decision.message is not stored.message:
            self.updated[stored.id] = decision.message
            return Stored(stored.row, decision.message, stored.bucket, stored.id)
        return stored

    async def write(self, steps: Steps) -> set[bytes]:
        """Writes what was noted; answers the ids of which nothing was written, because somebody else came first."""
        if self.updated and self.removed and steps.apart:
            lost = await replace(self, removed=set(), remembered={}).write(steps)
            return lost | await replace(self, updated={}).write(steps)
        if not self.updated and not self.removed:
            return set()
        return await steps.use(self.write_on, writes=True)

    async def write_on(self, connection: Connection) -> set[bytes]:
        """The same by one statement on `connection`."""
        ids = sorted((*self.updated, *self.removed), key=lambda id: (self.met[id].bucket, id))
        met = [self.met[id] for id in ids]
        was = [stored.message for stored in met]
        after = [self.updated.get(id, stored.message) for id, stored in zip(ids, met, strict=True)]
        asked = [
            self.topic.uid,
            [stored.bucket for stored in met],
            ids,
            [signed_one(message.birth) for message in was],
            [message.version for message in was],
            [message.due_ms for message in was],
            [message.died_ms for message in was],
            [id in self.removed for id in ids],
        ]
        if self.updated:
            asked += [
                [message.version for message in after],
                [message.due_ms for message in after],
                [message.scheduled_ms for message in after],
                [message.asked_ms for message in after],
                [message.holder for message in after],
                [message.deliveries for message in after],
                [signed_one(message.last_op) for message in after],
                [message.died_ms for message in after],
                [message.dead for message in after],
            ]
        if self.remembered:
            left = [self.remembered.get(id) for id in ids]
            asked += [
                self.now_ms,
                [left_one is not None for left_one in left],
                [0 if left_one is None else signed_one(left_one.last_op) for left_one in left],
            ]
        statement = statements.CHANGE[bool(self.updated), bool(self.removed), bool(self.remembered)]
        done = await connection.fetchval(statement, *asked)
        return set(ids).difference(ids[at] for at in done or ())

    def apart(self, ids: set[bytes]) -> Changes:
        """Only the removals under `ids`, which this is without from now on."""
        taken = replace(self, updated={}, removed=self.removed & ids, remembered={})
        self.removed -= ids
        return taken


async def read(
    steps: Steps, topic: Topic, now_ms: int, ids: Sequence[bytes], buckets: Sequence[int]
) -> dict[bytes, Stored]:
    """What stands under `ids`: messages, and remembered ids within the topic's time. Remembered ones are looked for
    last: whoever settled a message in between has left its id there by then."""

    async def look(connection: Connection) -> dict[bytes, Stored]:
        found = await connection.fetch(statements.FIND, topic.uid, buckets, ids)
        standing = {record["id"]: stored_of(record) for record in found}
        if topic.settings.remember_ms and len(standing) < len(ids):
            rest = [id for id in ids if id not in standing]
            for record in await find_remembered(connection, topic, now_ms, rest):
                standing[record["id"]] = remembered_of(record)
        return standing

    return await steps.use(look, writes=False)


async def find_remembered(
    connection: Connection, topic: Topic, now_ms: int, ids: Sequence[bytes]
) -> list[dict[str, bytes]]:
    """Records of the remembered among `ids`, within the topic's time."""
    after_ms = now_ms - topic.settings.remember_ms
    found: list[dict[str, bytes]] = await connection.fetch(statements.FIND_REMEMBERED, topic.uid, ids, after_ms)
    return found


async def decide_each(
    steps: Steps, topic: Topic, now_ms: int, ids: Sequence[bytes], asks: Sequence[Ask], answers: Answers,
    places: Sequence[int], store: StoreNew | None = None,
) -> list[int]:  # fmt: skip
    """Decides `asks` in order, each on what the ones before left, writes their changes and fills `answers` at
    `places`. Answers the indexes of the puts that met nothing, and of what comes after new ones under the same id: the
    caller stores those. A put that takes a message's place is stored here, by `store`, which is told its place."""
    buckets = dict(zip(ids, buckets_of(Ragged.of(list(ids)), topic.settings.buckets).tolist(), strict=True))
    left = list(range(len(ids)))
    absent: list[int] = []
    for _ in range(MOST_LOST):
        asked = list(dict.fromkeys(ids[at] for at in left))
        standing = await read(steps, topic, now_ms, asked, [buckets[id] for id in asked])
        changes = Changes(topic, now_ms, dict(standing))
        new: dict[bytes, int] = {}
        for at in left:
            id, ask = ids[at], asks[at]
            stored = standing.get(id)
            if id in new:
                absent.append(at)
                continue
            decision = decide(stored.message if stored else None, ask, now_ms, topic.settings)
            remains = changes.apply(stored, ask, decision)
            if remains is None:
                standing.pop(id, None)
            else:
                standing[id] = remains
            if decision.born:
                new[id] = at
                absent.append(at)
            fill(answers, places[at], decision)
        in_place = changes.removed.intersection(new)
        removals = changes.apart(in_place)
        lost = await changes.write(steps)
        if in_place and store is not None:
            firsts = {id: at for id, at in new.items() if id in in_place}
            without, done = await steps.transact(partial(_take_places, removals, firsts, places, store))
            lost |= without
            absent = [at for at in absent if places[at] not in done]
        left = [at for at in left if ids[at] in lost]
        absent = [at for at in absent if ids[at] not in lost]
        if not left:
            return sorted(absent)
    raise too_often()


async def _take_places(
    removals: Changes, firsts: dict[bytes, int], places: Sequence[int], store: StoreNew, connection: Connection
) -> tuple[set[bytes], set[int]]:
    """Remove messages and store the puts that take their places, in the caller's transaction. Return the ids that
    somebody else changed first, and which places were stored."""
    lost = await removals.write_on(connection)
    return lost, set(await store(connection, sorted(places[at] for id, at in firsts.items() if id not in lost)))


async def mutate(steps: Steps, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    answers = Answers.blank(len(mutations))
    asks = mutation_asks(mutations)
    await decide_each(steps, topic, now_ms, mutations.ids.tolist(), asks, answers, range(len(mutations)))
    return answers
