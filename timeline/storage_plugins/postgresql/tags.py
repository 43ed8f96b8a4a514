"""Moves and cancels by tag, chunk by chunk."""

from __future__ import annotations

from collections import Counter

from timeline.leases import Ask, decide
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins.contract import TagMutation, TagStep
from timeline.storage_plugins.postgresql.connections import Steps
from timeline.storage_plugins.postgresql.messages import MOST_LOST, Changes, too_often
from timeline.storage_plugins.postgresql.rows import Stored, stored_of, whole
from timeline.storage_plugins.postgresql.schema import NOTHING
from timeline.storage_plugins.postgresql.statements import TOPIC
from timeline.storage_plugins.sql import TAGGED
from timeline.storage_plugins.sql.rows import cursor_at, place_after

_OF_TAG = f"m.topic = {TOPIC} AND {TAGGED.replace(chr(120) + chr(39) * 2, NOTHING)} AND m.tag = $2"
_LAST = f"""
SELECT l.bucket, l.id, l.n FROM (
  SELECT p.bucket, p.id, row_number() OVER () AS n FROM (
    SELECT m.bucket, m.id FROM timeline.message AS m WHERE {_OF_TAG} AND (m.bucket, m.id) > ($3, $4)
    ORDER BY m.bucket, m.id LIMIT $5) AS p
) AS l ORDER BY l.n DESC LIMIT 1
"""
_ROWS = f"""
SELECT {whole()} FROM timeline.message AS m WHERE {_OF_TAG} AND m.put_ms <= $7
  AND (m.bucket, m.id) > ($3, $4) AND (m.bucket, m.id) <= ($5, $6) ORDER BY m.bucket, m.id
"""


async def step(steps: Steps, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
    """`Store.mutate_tag`: a chunk is read, decided, and changed where nobody was faster; where somebody was, the
    message is read again."""
    tagged = (topic.uid, mutation.tag, *place_after(cursor))
    last = await steps.use(lambda connection: connection.fetchrow(_LAST, *tagged, limit), writes=False)
    if last is None:
        return TagStep({}, None)
    bounds = (*tagged, last["bucket"], last["id"], mutation.started_ms)
    counts: Counter[int] = Counter()
    dues_ms: list[int] = []
    lost: set[bytes] | None = None
    for _ in range(MOST_LOST):
        records = await steps.use(lambda connection: connection.fetch(_ROWS, *bounds), writes=False)
        chunk = _Chunk(topic, now_ms, mutation)
        for record in records:
            if lost is None or record["id"] in lost:
                chunk.decide(stored_of(record))
        lost = await chunk.changes.write(steps)
        done = [(status, due_ms) for id, status, due_ms in chunk.decided if id not in lost]
        counts.update(status.code for status, _ in done)
        dues_ms += [due_ms for _, due_ms in done if due_ms]
        if not lost:
            break
    else:
        raise too_often()
    onward = cursor_at(last["bucket"], last["id"]) if last["n"] == limit else None
    return TagStep(dict(counts), onward, min(dues_ms, default=None))


class _Chunk:
    """What is decided of some messages of the tag: (id, status, due of what is moved or 0) each."""

    def __init__(self, topic: Topic, now_ms: int, mutation: TagMutation) -> None:
        self.changes = Changes(topic, now_ms)
        self.decided: list[tuple[bytes, Status, int]] = []
        self._mutation = mutation

    def decide(self, stored: Stored) -> None:
        """Decides one, and notes what it changes."""
        mutation, message = self._mutation, stored.message
        due_ms, moves = mutation.due_ms, mutation.operation is Operation.MOVE
        if moves and due_ms == 0:
            due_ms = max(0, message.scheduled_ms + mutation.by_ms)
        if moves and due_ms > mutation.latest_ms and message.last_op != mutation.op:
            self.decided.append((stored.id, Status.INVALID, 0))
            return
        ask = Ask(mutation.operation, time_ms=due_ms, group=mutation.group, op=mutation.op, leased=mutation.leased)
        decision = decide(message, ask, self.changes.now_ms, self.changes.topic.settings)
        moved_ms = 0
        if not mutation.dry_run:
            self.changes.met[stored.id] = stored
            self.changes.apply(stored, ask, decision)
            if moves and decision.status is Status.OK and decision.message is not None:
                moved_ms = decision.message.due_ms
        self.decided.append((stored.id, decision.status, moved_ms))
