"""Messages by id inside a transaction: locked, decided by the one table of rules, changed. Puts and settles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from timeline.leases import Ask, Decision, Message, decide
from timeline.leases.table import REMEMBERED
from timeline.model import Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.contract import Mutations, Puts, Settles
from timeline.storage_plugins.mysql import statements
from timeline.storage_plugins.mysql.connections import Session
from timeline.storage_plugins.sql import signed
from timeline.storage_plugins.sqlite.messages import Stored, fill, stored_of

Reserve = Callable[[int], int]
_UNSIGNED = (1 << 64) - 1


@dataclass(slots=True)
class Changes:
    """What a call changes, gathered, then written in a few statements."""

    session: Session
    topic: Topic
    key: int
    now_ms: int
    updated: dict[int, Message] = field(default_factory=dict)
    removed: list[int] = field(default_factory=list)
    remembered: list[tuple[bytes, Message]] = field(default_factory=list)

    def remove(self, id: bytes, stored: Stored, last_op: int = 0, remember: bool = True) -> Stored | None:
        """Removes a message; answers what is left of it on a topic that remembers."""
        self.updated.pop(stored.row, None)
        self.removed.append(stored.row)
        if not remember or not self.topic.settings.remember_ms:
            return None
        old = stored.message
        left = Message(old.birth, old.version, last_op=last_op, payload_sum=old.payload_sum, remembered=True)
        self.remembered.append((id, left))
        return Stored(0, left)

    def apply(self, stored: Stored | None, id: bytes, ask: Ask, decision: Decision) -> Stored | None:
        """Notes what `decision` changes of `stored`; answers what then stands under the id."""
        if stored is None or not stored.row:
            return stored
        if decision.message is None:
            if decision.status not in (Status.OK, Status.EXPIRED):
                return stored
            last_op = ask.op if ask.operation is Operation.CANCEL and decision.status is Status.OK else 0
            return self.remove(id, stored, last_op, decision.status is Status.EXPIRED or ask.operation in REMEMBERED)
        if decision.message is not stored.message:
            self.updated[stored.row] = decision.message
            return Stored(stored.row, decision.message, stored.size_bytes)
        return stored

    def write(self) -> None:
        """Writes all that was noted, and starts afresh."""
        statements.update_messages(self.session, sorted(self.updated.items(), key=lambda item: item[0]))
        statements.delete(self.session, self.removed)
        statements.remember(self.session, self.key, self.now_ms, self.remembered)
        self.updated, self.removed, self.remembered = {}, [], []


def load(changes: Changes, ids: Sequence[bytes], buckets: Sequence[int]) -> dict[bytes, Stored]:
    """What stands under `ids`, locked: messages, and remembered ids within the topic's time."""
    session, remember_ms = changes.session, changes.topic.settings.remember_ms
    standing: dict[bytes, Stored] = {}
    for found in statements.find(session, changes.key, buckets, ids, lock=True):
        for n, stored in zip(found.numbers["n"], stored_of(found), strict=True):
            standing[ids[n]] = stored
    if remember_ms:
        left = statements.find_remembered(session, changes.key, ids, changes.now_ms - remember_ms)
        for id, birth, version, payload_sum, last_op in left:
            old = Message(
                birth & _UNSIGNED,
                version,
                last_op=last_op & _UNSIGNED,
                payload_sum=payload_sum & _UNSIGNED,
                remembered=True,
            )
            standing.setdefault(id, Stored(0, old))
    return standing


def decide_each(
    changes: Changes, ids: Sequence[bytes], buckets: Sequence[int], asks: Sequence[Ask], answers: Answers,
    places: Sequence[int],
) -> list[int]:  # fmt: skip
    """Decides `asks` in order, each on what the ones before left, notes their changes and fills `answers` at `places`.
    Answers the indexes where a put met nothing: the caller stores those (and only a put can)."""
    standing = load(changes, ids, buckets)
    for at, (id, ask) in enumerate(zip(ids, asks, strict=True)):
        stored = standing.get(id)
        decision = decide(stored.message if stored else None, ask, changes.now_ms, changes.topic.settings)
        if stored is None and decision.status is Status.OK:
            return list(range(at, len(ids)))
        left = changes.apply(stored, id, ask, decision)
        if left is None:
            standing.pop(id, None)
        else:
            standing[id] = left
        fill(answers, places[at], decision)
    return []


# ── put ──


def put(session: Session, topic: Topic, key: int, now_ms: int, puts: Puts, reserve: Reserve) -> Answers:
    """`Store.put`: all are inserted at once; what meets a message or a remembered id is decided by the rules."""
    count = len(puts)
    answers = Answers.blank(count)
    ids = puts.ids.tolist()
    buckets = buckets_of(puts.ids, topic.settings.buckets).tolist()
    special = _to_decide(puts, ids)
    inserted = _insert(
        session, topic, key, now_ms, puts, ids, buckets, [at for at in range(count) if at not in special], reserve
    )
    answers.version[inserted] = 1
    answers.due_ms[inserted] = puts.due_ms[inserted]
    left = sorted(set(range(count)).difference(inserted))
    while left:
        changes = Changes(session, topic, key, now_ms)
        asks = [_put_ask(puts, at) for at in left]
        rest = decide_each(changes, [ids[at] for at in left], [buckets[at] for at in left], asks, answers, left)
        changes.write()
        left = [left[at] for at in rest]
        if left and _insert(session, topic, key, now_ms, puts, ids, buckets, left[:1], reserve):
            at = left.pop(0)
            answers.status[at], answers.version[at], answers.due_ms[at] = Status.OK.code, 1, puts.due_ms[at]
    return answers


def _to_decide(puts: Puts, ids: list[bytes]) -> set[int]:
    """Puts that cannot just be inserted: due at or after their expiry."""
    doubtful = {ids[at] for at in np.flatnonzero((puts.expires_ms > 0) & (puts.expires_ms <= puts.due_ms)).tolist()}
    return {at for at, id in enumerate(ids) if id in doubtful} if doubtful else set()


def _insert(
    session: Session, topic: Topic, key: int, now_ms: int, puts: Puts, ids: list[bytes], buckets: list[int],
    chosen: list[int], reserve: Reserve,
) -> list[int]:  # fmt: skip
    """Inserts `chosen` puts with their contents; answers those whose id was neither taken nor remembered."""
    count = len(chosen)
    if not count:
        return []
    first = reserve(count)
    at = np.array(chosen, dtype=np.intp)
    columns = (
        range(first, first + count),
        [buckets[index] for index in chosen],
        [ids[index] for index in chosen],
        signed(puts.birth[at]),
        puts.due_ms[at].tolist(),
        puts.expires_ms[at].tolist(),
        signed(puts.payload_sum[at]),
        puts.sizes[at].tolist(),
        puts.headers.sizes[at].tolist(),
        [puts.groups[index] for index in chosen],
        [puts.tags[index] for index in chosen],
    )
    # In the index's order: two batches that share ids then wait for each other instead of locking each other out.
    rows = sorted(zip(*columns, strict=True), key=lambda row: row[1:3])
    stored = statements.insert_messages(session, key, now_ms, rows)
    there = set(range(first, first + count))
    if stored < count:
        found = session.rows(f"SELECT `row` FROM message WHERE `row` >= {first} AND `row` < {first + count}")
        there = {row for (row,) in found}
    if topic.settings.remember_ms:
        inserted = [row[:3] for row in rows if row[0] in there]
        there -= _take_back(session, key, now_ms - topic.settings.remember_ms, inserted)
    kept = [(row, index) for row, index in zip(range(first, first + count), chosen, strict=True) if row in there]
    statements.insert_payloads(session, [(row, puts.payloads[index], puts.headers[index]) for row, index in kept])
    return [index for _, index in kept]


def _take_back(session: Session, key: int, after_ms: int, rows: list[tuple[int, int, bytes]]) -> set[int]:
    """Removes those of the rows (row, bucket, id) just inserted whose id is remembered; answers their numbers.

    Asked after the insert, never before: an insert waits for whoever is settling the same id, and what that one
    remembered is seen only then. While our row stands nobody else settles the id."""
    remembered = {left[0] for left in statements.find_remembered(session, key, [id for _, _, id in rows], after_ms)}
    back = {row for row, _, id in rows if id in remembered}
    if back:
        statements.delete(session, sorted(back))
    return back


def _put_ask(puts: Puts, at: int) -> Ask:
    return Ask(
        Operation.PUT,
        time_ms=int(puts.due_ms[at]),
        birth=int(puts.birth[at]),
        group=puts.groups[at],
        payload_sum=int(puts.payload_sum[at]),
        expires_ms=int(puts.expires_ms[at]),
        move=bool(puts.move[at]),
    )


# ── settle, mutate ──


def settle(session: Session, topic: Topic, key: int, now_ms: int, settles: Settles) -> Answers:
    """`Store.settle`. Acks whose token matches are done by columns, everything else by the rules."""
    count = len(settles)
    answers = Answers.blank(count)
    ids = settles.ids.tolist()
    buckets = buckets_of(settles.ids, topic.settings.buckets).tolist()
    left = list(range(count))
    if len(set(ids)) == count and not topic.settings.remember_ms:
        acks = np.flatnonzero(settles.operation == Operation.ACK).tolist()
        done = _ack_plain(session, key, now_ms, settles, ids, buckets, acks, answers)
        left = sorted(set(left).difference(done))
    if left:
        changes = Changes(session, topic, key, now_ms)
        asks = [_settle_ask(settles, at) for at in left]
        decide_each(changes, [ids[at] for at in left], [buckets[at] for at in left], asks, answers, left)
        changes.write()
    return answers


def _ack_plain(
    session: Session, key: int, now_ms: int, settles: Settles, ids: list[bytes], buckets: list[int], acks: list[int],
    answers: Answers,
) -> list[int]:  # fmt: skip
    """Acks of living messages whose token and holder match, where nothing is remembered. Answers which were done."""
    birth, version, holders = signed(settles.birth), settles.version.tolist(), settles.holders.tolist()
    asked = sorted((buckets[at], ids[at].hex(), at) for at in acks)
    columns = [(at, bucket, id, birth[at], version[at], holders[at].hex()) for bucket, id, at in asked if holders[at]]
    done: list[int] = []
    rows: list[int] = []
    for found in statements.find_held(session, key, now_ms, columns):
        place = found.numbers["n"]
        answers.late[place] = np.array(found.numbers["late"], dtype=np.bool_)
        done += place
        rows += found.numbers["row"]
    statements.delete(session, rows)
    return done


def _settle_ask(settles: Settles, at: int) -> Ask:
    return Ask(
        Operation(int(settles.operation[at])),
        time_ms=int(settles.time_ms[at]),
        birth=int(settles.birth[at]),
        version=int(settles.version[at]),
        holder=settles.holders[at],
        op=int(settles.op[at]),
        unseen=bool(settles.unseen[at]),
        reason=settles.reasons[at],
    )


def mutate(session: Session, topic: Topic, key: int, now_ms: int, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    count = len(mutations)
    answers = Answers.blank(count)
    changes = Changes(session, topic, key, now_ms)
    columns = (mutations.groups, mutations.due_ms, mutations.if_version, mutations.leased, mutations.op)
    asks = [
        Ask(mutations.operation, time_ms=due_ms, group=group, if_version=if_version, leased=leased, op=op)
        for group, due_ms, if_version, leased, op in zip(*(column.tolist() for column in columns), strict=True)
    ]
    ids, buckets = mutations.ids.tolist(), buckets_of(mutations.ids, topic.settings.buckets).tolist()
    decide_each(changes, ids, buckets, asks, answers, range(count))
    changes.write()
    return answers


__all__ = ["Changes", "mutate", "put", "settle"]
