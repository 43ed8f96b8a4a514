"""Changes of messages inside a transaction, locked and decided by the rules; puts and settles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from timeline.model import Answers, Operation, Topic, buckets_of
from timeline.storage_plugins.asks import put_ask, settle_ask
from timeline.storage_plugins.contract import Puts, Settles, StoreUnavailable
from timeline.storage_plugins.mysql import statements
from timeline.storage_plugins.mysql.connections import Session
from timeline.storage_plugins.sql import changes as sql
from timeline.storage_plugins.sql import signed
from timeline.storage_plugins.sql.changes import decide_each, firsts_of
from timeline.storage_plugins.sql.rows import Stored, remembered_of, stored_of

Reserve = Callable[[int], int]


class NumbersTaken(StoreUnavailable):
    """Row numbers that this process had reserved are others': a server took over that had missed the reservation."""


class Changes(sql.Changes):
    """What a call changes of this store; what it looks up is locked."""

    __slots__ = ("_plain", "session")

    def __init__(self, session: Session, topic: Topic, key: int, now_ms: int) -> None:
        super().__init__(topic, key, now_ms)
        self.session = session
        self._plain: set[int] = set()
        """Rows that nothing stands beside."""

    def load(self, ids: Sequence[bytes], buckets: Sequence[int]) -> dict[bytes, Stored]:
        standing: dict[bytes, Stored] = {}
        places = list(zip(buckets, ids, strict=True))
        for found in statements.find(self.session, self.key, places, lock=True):
            beside = zip(found.numbers["row"], found.numbers["expires_ms"], found.strings["tag"].sizes, strict=True)
            self._plain.update(row for row, expires_ms, tag_bytes in beside if not expires_ms and not tag_bytes)
            standing.update(zip(found.strings["id"].tolist(), stored_of(found), strict=True))
        if remember_ms := self.topic.settings.remember_ms:
            for id, *left in statements.find_remembered(self.session, self.key, ids, self.now_ms - remember_ms):
                standing.setdefault(id, remembered_of(*left))
        return standing

    def write(self) -> None:
        statements.update_messages(self.session, sorted(self.updated.items(), key=lambda item: item[0]))
        gone = [stored.row for stored in self.removed]
        statements.delete(self.session, gone, marked=not self._plain.issuperset(gone))
        statements.remember(self.session, self.key, self.now_ms, self.remembered)
        self.clear()


# ── put ──


def put(session: Session, topic: Topic, key: int, now_ms: int, puts: Puts, reserve: Reserve) -> Answers:
    """`Store.put`: all are inserted at once; what meets a message or a remembered id is decided by the rules."""
    count = len(puts)
    answers = Answers.blank(count)
    ids = puts.ids.tolist()
    buckets = buckets_of(puts.ids, topic.settings.buckets).tolist()
    special = _to_decide(puts, now_ms, ids)
    inserted = _insert(
        session, topic, key, now_ms, puts, ids, buckets, [at for at in range(count) if at not in special], reserve
    )
    answers.version[inserted] = 1
    answers.due_ms[inserted] = puts.due_ms[inserted]
    left = sorted(set(range(count)).difference(inserted))
    asked = {at: put_ask(puts, at) for at in left}
    while left:
        changes = Changes(session, topic, key, now_ms)
        asks = [asked[at] for at in left]
        rest = decide_each(changes, [ids[at] for at in left], [buckets[at] for at in left], asks, answers, left)
        changes.write()
        left = [left[at] for at in rest]
        stored = _insert(session, topic, key, now_ms, puts, ids, buckets, firsts_of(ids, left), reserve)
        left = sorted(set(left).difference(stored))
    return answers


def _to_decide(puts: Puts, now_ms: int, ids: list[bytes]) -> set[int]:
    """Puts that cannot just be inserted: never deliverable."""
    doubtful = {ids[at] for at in np.flatnonzero(puts.never_deliverable(now_ms)).tolist()}
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
        found = session.rows(f"SELECT `row`, birth FROM message WHERE `row` >= {first} AND `row` < {first + count}")
        ours = {row: birth for row, _, _, birth, *_ in rows}
        there = {row for row, birth in found if birth == ours[row]}
        if len(there) < len(found):
            raise NumbersTaken("row numbers were given out twice: this server had missed a reservation")
    if topic.settings.remember_ms:
        inserted = [row[:3] for row in rows if row[0] in there]
        there -= _take_back(session, key, now_ms - topic.settings.remember_ms, inserted)
    statements.mark(session, key, [(*row[:3], row[5], row[10]) for row in rows if row[0] in there])
    kept = [(row, index) for row, index in zip(range(first, first + count), chosen, strict=True) if row in there]
    statements.insert_payloads(session, [(row, puts.payloads[index], puts.headers[index]) for row, index in kept])
    return [index for _, index in kept]


def _take_back(session: Session, key: int, after_ms: int, rows: list[tuple[int, int, bytes]]) -> set[int]:
    """Removes those of the rows (row, bucket, id) just inserted whose id is remembered; answers their numbers.

    Asked after the insert, never before: an insert waits for whoever is settling the same id, and what that one
    remembered is seen only then. While our row stands nobody else settles the id."""
    remembered = {left[0] for left in statements.find_remembered(session, key, [id for _, _, id in rows], after_ms)}
    back = {row for row, _, id in rows if id in remembered}
    statements.delete(session, sorted(back), marked=False)
    return back


# ── settle ──


def settle(session: Session, topic: Topic, key: int, now_ms: int, settles: Settles) -> Answers | None:
    """`Store.settle`; None where the topic was dropped. Acks and extends whose token matches are done by columns,
    everything else by the rules."""
    count = len(settles)
    answers = Answers.blank(count)
    ids = settles.ids.tolist()
    buckets = buckets_of(settles.ids, topic.settings.buckets).tolist()
    changes = Changes(session, topic, key, now_ms)
    left = list(range(count))
    if len(set(ids)) == count:
        plain = (settles.operation == Operation.ACK) | (settles.operation == Operation.EXTEND)
        done = _settle_plain(changes, settles, ids, buckets, np.flatnonzero(plain).tolist(), answers)
        left = sorted(set(left).difference(done)) if len(done) < count else []
    if left:
        if not session.rows(f"SELECT {statements.standing(key)}")[0][0]:
            return None
        asks = [settle_ask(settles, at) for at in left]
        decide_each(changes, [ids[at] for at in left], [buckets[at] for at in left], asks, answers, left)
        changes.write()
    return answers


def _settle_plain(
    changes: Changes, settles: Settles, ids: list[bytes], buckets: list[int], chosen: list[int], answers: Answers
) -> list[int]:
    """Acks and extends of living messages whose token and holder match. Answers which were done."""
    session, now_ms = changes.session, changes.now_ms
    at_of = {ids[at]: at for at in chosen}
    holders = settles.holders.tolist()
    done: list[int] = []
    acked: list[int] = []
    marked = False
    for found in statements.find_held(session, changes.key, [(buckets[at], ids[at]) for at in chosen]):
        place = np.array([at_of[id] for id in found.strings["id"].tolist()], dtype=np.intp)
        columns = {name: np.array(values, dtype=np.int64) for name, values in found.numbers.items()}
        theirs = [holders[at] for at in place.tolist()]
        ours = np.array([a == b for a, b in zip(found.strings["holder"].tolist(), theirs, strict=True)], dtype=np.bool_)
        ours &= columns["birth"].view(np.uint64) == settles.birth[place]
        ours &= columns["version"] == settles.version[place]
        late = columns["due_ms"] <= now_ms
        asks_ack = settles.operation[place] == Operation.ACK
        acks = ours & asks_ack
        answers.late[place[acks]] = late[acks]
        acked += columns["row"][acks].tolist()
        marked |= bool(columns["marked"][acks].any())
        if changes.topic.settings.remember_ms:
            _note_acked(changes, settles, ids, place[acks].tolist(), columns["payload_sum"][acks].tolist())
        extends = ours & ~asks_ack & ~(late & (columns["expires_ms"] > 0) & (columns["expires_ms"] <= now_ms))
        where = place[extends]
        until_ms = np.maximum(columns["due_ms"][extends], settles.time_ms[where])
        statements.extend(session, list(zip(columns["row"][extends].tolist(), until_ms.tolist(), strict=True)))
        answers.version[where] = settles.version[where]
        answers.due_ms[where] = until_ms
        done += place[acks | extends].tolist()
    statements.delete(session, acked, marked)
    statements.remember(session, changes.key, now_ms, changes.remembered)
    changes.clear()
    return done


def _note_acked(
    changes: Changes, settles: Settles, ids: list[bytes], places: list[int], payload_sums: list[int]
) -> None:
    """Notes what is left of acknowledged messages."""
    for at, payload_sum in zip(places, payload_sums, strict=True):
        left = remembered_of(int(settles.birth[at]), int(settles.version[at]), payload_sum, 0)
        changes.remembered.append((ids[at], left.message))


__all__ = ["Changes", "put", "settle"]
