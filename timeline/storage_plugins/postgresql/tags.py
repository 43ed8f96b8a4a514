"""Moves and cancels by tag, chunk by chunk.

What nothing refuses (not leased, of the asking group, not expired, not done before) is changed by the statement that
walks the chunk, which decides on each message as it stands when it is locked; only the others are read, decided by the
rules, and changed where nobody was faster.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from timeline.columns import Ragged
from timeline.leases import decide
from timeline.model import Operation, Status, Topic, buckets_of
from timeline.storage_plugins.asks import tag_ask
from timeline.storage_plugins.contract import TagMutation, TagStep
from timeline.storage_plugins.postgresql import statements
from timeline.storage_plugins.postgresql.connections import Connection, Steps
from timeline.storage_plugins.postgresql.messages import MOST_LOST, Changes, too_often
from timeline.storage_plugins.postgresql.rows import stored_of
from timeline.storage_plugins.postgresql.schema import NOTHING
from timeline.storage_plugins.postgresql.statements import OR_REPLACED, TOPIC
from timeline.storage_plugins.sql import TAGGED, signed_one
from timeline.storage_plugins.sql.rows import cursor_at, place_after

AT_ONCE = 2_000
"""Messages of one statement: it has them locked until it is done, and others want the server, too."""

_CHUNK = f"""chunk AS MATERIALIZED (
  SELECT m.ctid AS place, m.bucket, m.id, m.put_ms FROM timeline.message AS m
  WHERE m.topic = {TOPIC} AND {TAGGED.replace(chr(120) + chr(39) * 2, NOTHING)} AND m.tag = $2
    AND (m.bucket, m.id) > ($3, $4)
  ORDER BY m.bucket, m.id LIMIT $5
)"""
_TO = "CASE WHEN $10::int8 != 0 THEN $10::int8 ELSE greatest(0, m.scheduled_ms + $11::int8) END"
"""The due that a move asks for: the absolute one, or shifted from the scheduled one."""
_OF_CHUNK = "m.ctid = f.place AND m.put_ms <= $6::int8 AND m.grp = $7::bytea AND m.died_ms = 0"
_FREE = "(length(m.holder) = 0 OR m.due_ms <= $8::int8)"
"""Not leased. No partial index serves what is said so; see `statements`."""
_MOVABLE = (
    f"{_OF_CHUNK} AND {_FREE} AND m.last_op != $9::int8 AND {_TO} <= $12::int8 "
    "AND ($11::int8 = 0 OR m.asked_ms <= $6::int8) "
    f"AND (m.expires_ms = 0 OR m.expires_ms > greatest($8::int8, {_TO}))"
)
_CANCELLABLE = f"{_OF_CHUNK} AND ({_FREE} OR $9::bool) AND (m.expires_ms = 0 OR m.expires_ms > $8::int8)"
_MOVE = f"""done AS (
  UPDATE timeline.message AS m SET version = m.version + 1, due_ms = {_TO}, scheduled_ms = {_TO},
    asked_ms = $8::int8, holder = {NOTHING}, last_op = $9::int8
  FROM chunk AS f WHERE {_MOVABLE} RETURNING f.id, m.due_ms
)"""
_CANCEL = f"""done AS (
  DELETE FROM timeline.message AS m USING chunk AS f WHERE {_CANCELLABLE}
  RETURNING m.row, m.id, m.birth, m.version, m.payload_sum, m.due_ms
), content AS (DELETE FROM timeline.payload WHERE row = ANY(ARRAY(SELECT done.row FROM done)))"""
_KEPT = f"""kept AS (
  INSERT INTO timeline.remembered (topic, id, birth, version, payload_sum, last_op, settled_ms)
  SELECT {TOPIC}, done.id, done.birth, done.version, done.payload_sum, $10::int8, $8::int8 FROM done
  {OR_REPLACED}
)"""


def chunk(operation: Operation, dry_run: bool, remembers: bool) -> str:
    """The next messages of the walk over (bucket, id), and the operation on those that nothing refuses: the last one's
    place, how many there are, how many were done, the earliest due among those, and the ids of the others that were
    there at the start. No record where the walk is done.

    $2 tag, $3, $4 bucket and id of the last one before, $5 how many, $6 when the operation started, $7 group, $8 now.
    A move: $9 its operation id, $10 and $11 the due or the shift, $12 the latest due. A cancel: $9 whether leased
    ones too, $10 its operation id.
    """
    moves = operation is Operation.MOVE
    parts = [_CHUNK]
    if dry_run:
        refused = _MOVABLE if moves else _CANCELLABLE
        parts.append(
            f"done AS MATERIALIZED (\n  SELECT f.id, m.due_ms FROM chunk AS f, timeline.message AS m WHERE {refused}\n)"
        )
    else:
        parts += [_MOVE] if moves else [_CANCEL, _KEPT] if remembers else [_CANCEL]
    return f"""
WITH {", ".join(parts)}
SELECT l.bucket, l.id, (SELECT count(*) FROM chunk) AS met, (SELECT count(*) FROM done) AS done,
  (SELECT min(done.due_ms) FROM done) AS earliest_ms,
  ARRAY(SELECT c.id FROM chunk AS c WHERE c.put_ms <= $6::int8 EXCEPT SELECT done.id FROM done) AS others
FROM chunk AS l ORDER BY l.bucket DESC, l.id DESC LIMIT 1
"""


CHUNK = {
    (operation, dry_run, remembers): chunk(operation, dry_run, remembers)
    for operation in (Operation.MOVE, Operation.CANCEL)
    for dry_run in (False, True)
    for remembers in (False, True)
    if not remembers or (operation is Operation.CANCEL and not dry_run)
}


async def step(steps: Steps, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
    """`Store.mutate_tag`."""
    limit = min(limit, AT_ONCE)
    moves, dry_run = mutation.operation is Operation.MOVE, mutation.dry_run
    remembers = bool(topic.settings.remember_ms) and not moves and not dry_run
    asked: list[Any] = [topic.uid, mutation.tag, *place_after(cursor), limit, mutation.started_ms]
    asked += [mutation.group, now_ms]
    op = signed_one(mutation.op)
    asked += [op, mutation.due_ms, mutation.by_ms, mutation.latest_ms] if moves else [mutation.leased]
    if remembers:
        asked.append(op)
    statement = CHUNK[mutation.operation, dry_run, remembers]
    found = await steps.use(lambda connection: connection.fetchrow(statement, *asked), writes=not dry_run)
    if found is None:
        return TagStep({}, None)
    counts: Counter[int] = Counter()
    dues_ms: list[int] = []
    if found["done"]:
        counts[Status.OK.code] = found["done"]
        if moves and not dry_run:
            dues_ms.append(found["earliest_ms"])
    if found["others"]:
        dues_ms += await _decide_each(steps, topic, now_ms, mutation, found["others"], counts)
    onward = cursor_at(found["bucket"], found["id"]) if found["met"] == limit else None
    return TagStep(dict(counts), onward, min(dues_ms, default=None))


async def _decide_each(
    steps: Steps, topic: Topic, now_ms: int, mutation: TagMutation, ids: list[bytes], counts: Counter[int]
) -> list[int]:
    """What something may refuse: by the rules; where somebody was faster, the message is read again. Adds to `counts`,
    and answers the dues of what was moved."""
    buckets = dict(zip(ids, buckets_of(Ragged.of(ids), topic.settings.buckets).tolist(), strict=True))
    dues_ms: list[int] = []
    left = ids

    async def read(connection: Connection) -> list[Any]:
        return await connection.fetch(statements.FIND, topic.uid, [buckets[id] for id in left], left)

    for _ in range(MOST_LOST):
        changes = Changes(topic, now_ms)
        decided: list[tuple[bytes, Status, int]] = []
        for record in await steps.use(read, writes=False):
            stored = stored_of(record)
            # Another message may have come under this id.
            here = record["tag"] == mutation.tag
            if not here or not mutation.meets(record["put_ms"], stored.message.asked_ms, stored.message.last_op):
                continue
            ask = tag_ask(mutation, stored.message)
            if ask is None:
                decided.append((stored.id, Status.INVALID, 0))
                continue
            decision = decide(stored.message, ask, now_ms, topic.settings)
            moved_ms = 0
            if not mutation.dry_run:
                changes.met[stored.id] = stored
                changes.apply(stored, ask, decision)
                if decision.status is Status.OK and decision.message is not None:
                    moved_ms = decision.message.due_ms
            decided.append((stored.id, decision.status, moved_ms))
        lost = await changes.write(steps)
        counts.update(status.code for id, status, _ in decided if id not in lost)
        dues_ms += [due_ms for id, _, due_ms in decided if due_ms and id not in lost]
        left = sorted(lost)
        if not left:
            return dues_ms
    raise too_often()
