"""Puts: stored by one statement where nothing is met; what is met is for the rules."""

from __future__ import annotations

import numpy as np

from timeline.model import Answers, Status, Topic, buckets_of
from timeline.storage_plugins.asks import put_ask
from timeline.storage_plugins.contract import Puts, StoreUnknown
from timeline.storage_plugins.postgresql import records, statements
from timeline.storage_plugins.postgresql.connections import Connection, Steps
from timeline.storage_plugins.postgresql.messages import MOST_LOST, decide_each, find_remembered
from timeline.storage_plugins.postgresql.numbers import Numbers
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.sql import signed


class Putting:
    """One put."""

    def __init__(self, steps: Steps, topic: Topic, now_ms: int, puts: Puts, numbers: Numbers) -> None:
        self._steps, self._topic, self._now_ms, self._puts, self._numbers = steps, topic, now_ms, puts, numbers
        self._ids = puts.ids.tolist()
        self._buckets: list[int] = buckets_of(puts.ids, topic.settings.buckets).tolist()

    async def answers(self) -> Answers:
        """`Store.put`."""
        count, puts = len(self._ids), self._puts
        answers = Answers.blank(count)
        answers.version[:] = 1
        answers.due_ms[:] = puts.due_ms
        stored = await self._store(self._likely())
        left = [] if len(stored) == count else sorted(set(range(count)).difference(stored))
        asked, lost = {at: put_ask(self._puts, at) for at in left}, 0
        while lost < MOST_LOST:
            if not left:
                return answers
            waited = len(left)
            ids, asks = [self._ids[at] for at in left], [asked[at] for at in left]
            absent = await decide_each(self._steps, self._topic, self._now_ms, ids, asks, answers, left, self._insert)
            if not absent:
                return answers
            # They met nothing: who had the id is gone meanwhile, or one before them in this batch took its place.
            left = [left[at] for at in absent]
            firsts = {self._ids[at]: at for at in reversed(left)}
            new = await self._store(sorted(firsts.values()))
            for at in new:
                answers.status[at], answers.settled[at] = Status.OK.code, False
                answers.version[at], answers.due_ms[at] = 1, puts.due_ms[at]
            left = sorted(set(left).difference(new))
            lost = 0 if len(left) < waited else lost + 1
            if not new and await self._steps.use(self._is_dropped, writes=False):
                gone = dropped(self._topic, count)
                answers.status[left], answers.version[left], answers.due_ms[left] = gone.status[left], 0, 0
                answers.details |= {at: gone.details[at] for at in left}
                return answers
        raise StoreUnknown(f"an id was taken and freed by somebody else {MOST_LOST} times while it was put")

    def _likely(self) -> list[int]:
        """What may just be stored: not what is never deliverable, nor another message under such an id."""
        late = np.flatnonzero(self._puts.never_deliverable(self._now_ms)).tolist()
        doubtful = {self._ids[at] for at in late}
        return [at for at, id in enumerate(self._ids) if id not in doubtful]

    async def _is_dropped(self, connection: Connection) -> bool:
        return await records.key_of(connection, self._topic) is None

    async def _store(self, chosen: list[int]) -> list[int]:
        """Stores those of `chosen` whose id is neither taken nor remembered, and answers which."""
        if not chosen:
            return []
        if self._topic.settings.remember_ms:
            return await self._steps.transact(lambda connection: self._insert_unremembered(connection, chosen))
        return await self._steps.use(lambda connection: self._insert(connection, chosen), writes=True)

    async def _insert_unremembered(self, connection: Connection, chosen: list[int]) -> list[int]:
        """The same in a transaction, where ids are remembered. An id is looked for among those once its place is taken:
        nobody can settle it by then without our seeing it."""
        stored = await self._insert(connection, chosen)
        if not stored:
            return []
        ids = [self._ids[at] for at in stored]
        known = {record["id"] for record in await find_remembered(connection, self._topic, self._now_ms, ids)}
        if not known:
            return stored
        again = [at for at in stored if self._ids[at] in known]
        await connection.execute(
            statements.REMOVE_NEW,
            self._topic.uid,
            [self._buckets[at] for at in again],
            [self._ids[at] for at in again],
        )
        return [at for at in stored if self._ids[at] not in known]

    async def _insert(self, connection: Connection, chosen: list[int]) -> list[int]:
        """Stores those of `chosen` whose id is not taken, and answers which."""
        puts = self._puts
        if not chosen:
            return []
        rows = await self._numbers.take(connection, len(chosen))
        at = np.array(chosen, dtype=np.intp)
        count, stored = await connection.fetchrow(
            statements.PUT,
            self._topic.uid,
            self._now_ms,
            rows,
            [self._buckets[index] for index in chosen],
            [self._ids[index] for index in chosen],
            signed(puts.birth[at]),
            puts.due_ms[at].tolist(),
            puts.expires_ms[at].tolist(),
            signed(puts.payload_sum[at]),
            puts.sizes[at].tolist(),
            puts.payloads.take(at).tolist(),
            puts.headers.take(at).tolist(),
            puts.groups.take(at).tolist(),
            puts.tags.take(at).tolist(),
        )
        if count == len(chosen):
            return chosen
        kept = set(stored or ())
        return [index for index, row in zip(chosen, rows, strict=True) if row in kept]
