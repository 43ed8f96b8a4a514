"""Messages by id: found, decided by the one table of rules, and changed by compare-and-set against what was found.

If a transaction holds what it has found, no other call comes in between. Elsewhere no transaction spans a read and its
change: a call that loses the race for a message reads it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

import numpy as np

from timeline.columns import Bools, Indexes, Int64
from timeline.leases import Ask, decide
from timeline.model import Answers, Operation, Status, buckets_of
from timeline.storage_plugins.asks import fill, mutation_asks, place_of, put_asks, settle_asks, tag_ask
from timeline.storage_plugins.contract import Mutations, Puts, Settles, StoreUnknown, Swept, TagMutation, TagStep
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.sql.dialect import Changes, SqlDialect
from timeline.storage_plugins.sql.rows import FoundColumns, FoundMessage, cursor_after, stored_of
from timeline.storage_plugins.sql.statements import Atomic, Plan

MOST_LOST = 100
"""Races that one call may lose for the same message. In each of them another call has changed it."""
Insert = Callable[[list[int], bool], Plan[list[int]]]
"""Stores the puts at these indexes whose id is neither taken nor remembered, and returns which it stored. The flag:
they take the places of messages that this very transaction has removed."""
Store = Callable[[Puts, list[int], bool], Plan[Collection[int]]]
"""The same for all of these puts, with their buckets: what each SQL store writes in its own way."""
Settle = Callable[["Changes", Settles, list[bytes], list[int], Answers], Plan[Collection[int]]]
"""Settles what token and holder alone decide, from the settles, their ids and buckets. Fills the answers, and returns
which were done."""
Look = Callable[[list[bytes] | None], Plan[Iterable[FoundColumns]]]
"""Reads the messages under these ids; None: those that were found before."""


def too_often() -> StoreUnknown:
    """Return the error of a call that lost every race for a message. Its other messages may have been changed."""
    return StoreUnknown(f"other calls changed a message {MOST_LOST} times between its read and its change")


def decide_each(
    changes: Changes, ids: Sequence[bytes], buckets: Sequence[int], asks: Sequence[Ask], answers: Answers,
    places: Sequence[int], insert: Insert | None = None,
) -> Plan[list[int]]:  # fmt: skip
    """Decide `asks` in order, each on what the ones before left, write their changes and fill `answers` at `places`.
    Return the indexes of puts that met nothing, and of asks after such a put under the same id: the caller stores
    those. `insert` stores the puts that take a message's place."""
    settings, now_ms = changes.topic.settings, changes.now_ms
    bucket_of = dict(zip(ids, buckets, strict=True))
    left = list(range(len(ids)))
    absent: list[int] = []
    for _ in range(MOST_LOST):
        asked = list(dict.fromkeys(ids[at] for at in left))
        standing = yield from changes.load(asked, [bucket_of[id] for id in asked])
        new: dict[bytes, int] = {}
        for at in left:
            id, ask = ids[at], asks[at]
            if id in new:
                absent.append(at)
                continue
            stored = standing.get(id)
            decision = decide(stored.message if stored else None, ask, now_ms, settings)
            remains = changes.apply(stored, ask, decision)
            if remains is None:
                standing.pop(id, None)
            else:
                standing[id] = remains
            if decision.born:
                new[id] = at
                absent.append(at)
            fill(answers, places[at], decision)
        in_place = changes.removed.keys() & new.keys() if insert is not None else set[bytes]()
        removals = changes.apart(in_place)
        lost = yield from changes.write()
        if in_place and insert is not None:
            firsts = {id: places[new[id]] for id in in_place}
            without, done = yield Atomic(partial(_take_places, removals, firsts, insert))
            lost |= without
            absent = [at for at in absent if places[at] not in done]
        left = [at for at in left if ids[at] in lost]
        absent = [at for at in absent if ids[at] not in lost]
        if not left:
            return sorted(absent)
    raise too_often()


def _take_places(removals: Changes, firsts: dict[bytes, int], insert: Insert) -> Plan[tuple[set[bytes], set[int]]]:
    """Remove messages and store the puts that take their places. Return the ids that another call changed first, and
    which puts were stored. This may be done again, so it leaves `removals` as they are."""
    lost = yield from removals.sql.change(removals)
    stored = yield from insert(sorted(at for id, at in firsts.items() if id not in lost), True)
    return lost, set(stored)


def mutate(changes: Changes, mutations: Mutations) -> Plan[Answers]:
    """Do `Store.mutate`."""
    count = len(mutations)
    answers = Answers.blank(count)
    buckets = buckets_of(mutations.ids, changes.topic.settings.buckets).tolist()
    yield from decide_each(changes, mutations.ids.tolist(), buckets, mutation_asks(mutations), answers, range(count))
    return answers


def settle(changes: Changes, settles: Settles, plain: Settle) -> Plan[Answers | None]:
    """Do `Store.settle`: what token and holder alone decide by `plain`, all else by the rules. Return None if the
    topic was dropped."""
    count = len(settles)
    answers = Answers.blank(count)
    ids = settles.ids.tolist()
    buckets = buckets_of(settles.ids, changes.topic.settings.buckets).tolist()
    left = list(range(count))
    if len(set(ids)) == count:
        done = yield from plain(changes, settles, ids, buckets, answers)
        left = sorted(set(left).difference(done)) if len(done) < count else []
    if left:
        if not (yield from changes.sql.has_key(changes)):
            return None
        asks = settle_asks(settles.take(np.array(left)))
        yield from decide_each(changes, [ids[at] for at in left], [buckets[at] for at in left], asks, answers, left)
    return answers


def settle_by_columns(
    settles: Settles, place: Indexes, ours: Bools, due_ms: Int64, expires_ms: Int64, now_ms: int, answers: Answers
) -> tuple[Bools, Bools, Int64]:
    """Decide acks and extends of messages that have a holder. Return which of `ours` are acknowledged, which are
    extended, and until when. `place`: the settle of each. Fills the answers."""
    late = due_ms <= now_ms
    asks_ack = settles.operation[place] == Operation.ACK
    acks, extends = ours & asks_ack, ours & ~asks_ack & ~(late & (expires_ms > 0) & (expires_ms <= now_ms))
    answers.late[place[acks]] = late[acks]
    where = place[extends]
    until_ms = np.maximum(due_ms[extends], settles.time_ms[where])
    answers.version[where] = settles.version[where]
    answers.due_ms[where] = until_ms
    return acks, extends, until_ms


# ── put ──


def likely(puts: Puts, now_ms: int, ids: Sequence[bytes], known: Collection[int] = ()) -> list[int]:
    """Return the puts that may be stored at once. Not those that are never deliverable or `known` to be remembered, nor
    others under such an id. Each of these must meet what the ones before it left."""
    special = {*np.flatnonzero(puts.never_deliverable(now_ms)).tolist(), *known}
    if not special:
        return list(range(len(ids)))
    doubtful = {ids[at] for at in special}
    return [at for at, id in enumerate(ids) if id not in doubtful]


def put(changes: Changes, puts: Puts, store: Store, known: Collection[int] = ()) -> Plan[Answers]:
    """Do `Store.put`: new messages are stored at once. The rules decide on those that meet a message or a remembered
    id. `known`: puts whose id is known to be remembered."""
    ids, count = puts.ids.tolist(), len(puts)
    buckets: list[int] = buckets_of(puts.ids, changes.topic.settings.buckets).tolist()

    def insert(chosen: list[int], in_place: bool) -> Plan[list[int]]:
        if not chosen:
            return []
        some, whose = puts, buckets
        if len(chosen) < count:
            some, whose = puts.take(np.array(chosen, dtype=np.intp)), [buckets[at] for at in chosen]
        stored = yield from store(some, whose, in_place)
        return chosen if len(stored) == len(chosen) else [chosen[at] for at in stored]

    answers = Answers.blank(count)
    answers.version[:] = 1
    answers.due_ms[:] = puts.due_ms
    stored = yield from insert(likely(puts, changes.now_ms, ids, known), False)
    left = [] if len(stored) == count else sorted(set(range(count)).difference(stored))
    asked, lost = dict(zip(left, put_asks(puts.take(np.array(left, dtype=np.intp))) if left else (), strict=True)), 0
    while left:
        if lost == MOST_LOST:
            raise StoreUnknown(f"other calls took and freed an id {MOST_LOST} times while it was put")
        waited = len(left)
        asks, places = [asked[at] for at in left], [buckets[at] for at in left]
        absent = yield from decide_each(changes, [ids[at] for at in left], places, asks, answers, left, insert)
        if not absent:
            break
        # These met nothing: the message with their id is gone by now, or a put before them took its place.
        left = [left[at] for at in absent]
        new = yield from insert(sorted({ids[at]: at for at in reversed(left)}.values()), False)
        for at in new:
            answers.status[at], answers.settled[at] = Status.OK.code, False
            answers.version[at], answers.due_ms[at] = 1, puts.due_ms[at]
        left = sorted(set(left).difference(new))
        lost = 0 if len(left) < waited else lost + 1
        if not new and not (yield from changes.sql.still_stands(changes.key)):
            gone = dropped(changes.topic, count)
            answers.status[left], answers.version[left], answers.due_ms[left] = gone.status[left], 0, 0
            answers.details |= {at: gone.details[at] for at in left}
            break
    return answers


# ── by tag ──


class TagCounts:
    """Counts of a tag operation: how many messages answered each status, and the earliest due time of the moved."""

    __slots__ = ("by_status", "earliest_due_ms")

    def __init__(self) -> None:
        self.by_status: Counter[int] = Counter()
        self.earliest_due_ms: int | None = None

    def moved(self, due_ms: int | None) -> None:
        """Note that something was moved to `due_ms`."""
        times = (due_ms, self.earliest_due_ms)
        self.earliest_due_ms = min((time for time in times if time is not None), default=None)

    def add(self, other: TagCounts) -> None:
        """Add what `other` counted."""
        self.by_status += other.by_status
        self.moved(other.earliest_due_ms)


def mutate_tag(changes: Changes, mutation: TagMutation, cursor: bytes, limit: int) -> Plan[TagStep]:
    """Do `Store.mutate_tag`: a chunk of the walk over the tag's index, all of it decided by the rules."""
    query = changes.sql.query(changes.key)
    source, walked = changes.sql.walk(query, mutation.tag, False, place_of(cursor))
    source += f" ORDER BY {walked}.bucket, {walked}.id LIMIT {query(limit)}"
    chunk: FoundColumns = yield changes.sql.messages(query, source, lock=changes.sql.locked)
    onward = cursor_after(changes.topic, chunk.strings["id"][-1]) if chunk.count == limit else None

    def look(left: list[bytes] | None) -> Plan[Iterable[FoundColumns]]:
        yield from ()
        return (chunk,)

    counts = TagCounts()
    yield from mutate_tagged(changes, mutation, look, counts)
    return TagStep(dict(counts.by_status), onward, counts.earliest_due_ms)


def mutate_tagged(changes: Changes, mutation: TagMutation, look: Look, counts: TagCounts) -> Plan[None]:
    """Do `mutation` by the rules on the messages that `look` reads, and count the statuses."""
    left: list[bytes] | None = None
    for _ in range(MOST_LOST):
        decided: list[tuple[bytes, Status, int | None]] = []
        for found in (yield from look(left)):
            for stored, put_ms, tag in zip(
                stored_of(found), found.numbers["put_ms"], found.strings["tag"].tolist(), strict=True
            ):
                message = stored.message
                # The id may have another message by now.
                if tag == mutation.tag and mutation.meets(put_ms, message.asked_ms, message.last_op):
                    decided.append((stored.id, *_decide_tagged(changes, mutation, stored)))
        lost = yield from changes.write()
        for id, status, moved_ms in decided:
            if id not in lost:
                counts.by_status[status.code] += 1
                counts.moved(moved_ms)
        left = sorted(lost)
        if not left:
            return
    raise too_often()


def _decide_tagged(changes: Changes, mutation: TagMutation, stored: FoundMessage) -> tuple[Status, int | None]:
    """Return the status of one message, and its new due time if it is moved."""
    ask = tag_ask(mutation, stored.message)
    if ask is None:
        return Status.INVALID, None
    decision = decide(stored.message, ask, changes.now_ms, changes.topic.settings)
    if mutation.dry_run:
        return decision.status, None
    changes.apply(stored, ask, decision)
    moved = decision.status is Status.OK and decision.message is not None
    return decision.status, decision.message.due_ms if moved and decision.message is not None else None


# ── the sweep ──


def remove_found(changes: Changes, expired: FoundColumns | None, dead: FoundColumns | None) -> Plan[tuple[int, int]]:
    """Remove expired messages and dead letters past retention; return how many of each this call removed."""
    ids: tuple[list[bytes], list[bytes]] = ([], [])
    for at, found in enumerate((expired, dead)):
        for stored in () if found is None else stored_of(found):
            changes.remove(stored, remember=not at)
            ids[at].append(stored.id)
    lost = yield from changes.write()
    return sum(id not in lost for id in ids[0]), sum(id not in lost for id in ids[1])


def sweep(changes: Changes, limit: int) -> Plan[Swept]:
    """Do `Store.sweep`, where contents go with their messages, so that there are no orphans."""
    sql, key, now_ms, settings = changes.sql, changes.key, changes.now_ms, changes.topic.settings
    limit = min(max(1, limit), sql.most_rows)
    query = sql.query(key)
    expired = yield sql.messages(query, f"{sql.expired(query, now_ms)} LIMIT {query(limit)}", lock=sql.passing)
    dead = None
    if settings.dead_retention_ms:
        query = sql.query(key)
        source = (
            f"{sql.along('message_died')} WHERE m.topic {query.topic} AND {sql.dead} "
            f"AND m.{sql.died} <= {query(now_ms - settings.dead_retention_ms)} "
            f"ORDER BY m.{sql.died} LIMIT {query(limit)}"
        )
        dead = yield sql.messages(query, source, lock=sql.passing)
    counts = yield from remove_found(changes, expired, dead)
    forgotten = yield from sql.forget(key, now_ms - settings.remember_ms, limit)
    removed = yield Atomic(partial(remove_dropped, sql, limit, one_topic=True))
    more = limit in (expired.count, 0 if dead is None else dead.count, forgotten) or removed >= limit
    return Swept(expired=counts[0], forgotten=forgotten, dead_purged=counts[1], more=more)


def remove_dropped(sql: SqlDialect, limit: int, one_topic: bool = False) -> Plan[int]:
    """Remove at most `limit` rows of dropped topics, and return how many; fewer if no more are left. `one_topic`: stop
    after one, so that a transaction stays short, and return `limit`."""
    table, key_column = sql.table("dropped"), sql.quoted("key")
    removed = 0
    while removed < limit:
        keys = yield sql.query().rows(f"SELECT {key_column} FROM {table} ORDER BY {key_column} LIMIT 1{sql.claiming}")
        if not keys:
            break
        key = keys[0][0]
        removed += yield from sql.delete_some(key, limit - removed)
        if removed < limit:
            removed += yield from sql.forget(key, None, limit - removed)
        if removed < limit:
            query = sql.query()
            yield query.running(f"DELETE FROM {table} WHERE {key_column} = {query(key)}")
        if one_topic:
            return limit
    return removed
