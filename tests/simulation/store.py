"""The real memory store behind trouble: calls that are slow, refused, or done without an answer. What the store really
did goes into the history, whatever was answered.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from tests.simulation.loop import Timer, VirtualLoop
from timeline.columns import Int64
from timeline.history import History
from timeline.model import Answers, Operation, Rows, Status, Topic
from timeline.storage_plugins.contract import (
    Grant,
    LeasedRows,
    Mutations,
    Opened,
    Page,
    Puts,
    ScanFilter,
    Settles,
    Store,
    StoreUnavailable,
    StoreUnknown,
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.memory import MemoryStore

T = TypeVar("T")
OK = Status.OK.code


class Trouble:
    """How bad the store is now. Chances are per call; `down` refuses every call. `puts_lost`: puts are done, but not
    answered. `puts_refused`: puts alone are refused."""

    def __init__(self) -> None:
        self.mend()

    def mend(self) -> None:
        """All is well."""
        self.slowest_s = 0.004
        self.refused = self.lost_before = self.lost_after = 0.0
        self.down = self.puts_lost = self.puts_refused = False


class Lost:
    """When an answer to what was done was last lost, and when a call was last answered UNKNOWN, done or not: by
    whichever broker."""

    def __init__(self) -> None:
        self.answer_s = self.unknown_s = 0.0


class TroubledStore(Store):
    """A `MemoryStore` that outlives its broker, seen through `trouble`."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, history: History, store: Store | None = None) -> None:
        self.inner = store or MemoryStore(cluster_uid="0" * 32)
        self.capabilities = self.inner.capabilities
        self.tells_commit_seq = rng.random() < 0.5
        self._turns = 0
        self.trouble = Trouble()
        self.occurred: Counter[str] = Counter()
        self._loop = loop
        self._timer = Timer(loop)
        self.lost = Lost()
        self.broker = ""
        """Who calls now."""
        self.brokers = 1
        self._rng = rng
        self._history = history
        self._opened: list[Opened] = []
        self._births: dict[tuple[str, bytes], int] = {}

    def seen_apart(self, rng: random.Random) -> TroubledStore:
        """The same store as another broker sees it: with trouble of its own."""
        apart = copy.copy(self)
        apart.capabilities = replace(self.capabilities, shared=True)
        apart.trouble, apart._rng = Trouble(), rng
        return apart

    async def open(self) -> Opened:
        if not self._opened:
            self._opened.append(await self.inner.open())
        return self._opened[0]

    async def inspect(self) -> Opened:
        return await self._through(self.inner.inspect)

    async def close(self) -> None:
        """The broker lets go; what is stored stays."""

    async def check(self) -> None:
        await self._through(self.inner.check)

    async def _through(self, work: Callable[[], Awaitable[T]]) -> T:
        trouble, draw = self.trouble, self._rng.random
        await self._timer.wait(draw() * draw() * trouble.slowest_s)
        if trouble.down or draw() < trouble.refused:
            self.occurred["store refused"] += 1
            raise StoreUnavailable("the simulated store does not answer")
        if draw() < trouble.lost_before:
            self.occurred["store call lost"] += 1
            self.lost.unknown_s = self._loop.time()
            raise StoreUnknown("the call was lost")
        answer = await work()
        await self._timer.wait(draw() * draw() * trouble.slowest_s / 2)
        if draw() < trouble.lost_after:
            self.occurred["store answer lost"] += 1
            self.lost.answer_s = self.lost.unknown_s = self._loop.time()
            raise StoreUnknown("the answer was lost")
        return answer

    def _turn(self) -> int:
        self._turns += self.tells_commit_seq
        return self._turns

    def _commit(self, topic: Topic, kind: str, id: bytes, values: dict[str, Any]) -> None:
        self._history.note("commit", {"topic": topic.name, "id": id.decode(), "kind": kind, **values})

    # ── topics ──

    async def topics(self) -> list[Topic]:
        return await self._through(self.inner.topics)

    async def create_topic(self, topic: Topic) -> Topic:
        return await self._through(lambda: self.inner.create_topic(topic))

    async def update_topic(self, topic: Topic) -> Topic:
        return await self._through(lambda: self.inner.update_topic(topic))

    async def drop_topic(self, topic: Topic) -> bool:
        return await self._through(lambda: self.inner.drop_topic(topic))

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        async def work() -> Answers:
            answers = await self.inner.put(topic, now_ms, puts)
            for one in answers.displaced.values():
                self.occurred["expired id put again" if one.expired else "message replaced"] += 1
            for at in np.flatnonzero((answers.status == OK) & (answers.repeat == 0)).tolist():
                version = int(answers.version[at])
                values = {"birth": int(puts.birth[at]), "version": version, "due_ms": int(answers.due_ms[at])}
                old = answers.displaced.get(at)
                if old is not None and not old.expired:
                    gone = {"birth": old.birth, "version": old.version, "due_ms": 0, "op": values["birth"]}
                    self._commit(topic, "replace", puts.ids[at], {**gone, "now_ms": now_ms})
                self._put_or_moved(topic, now_ms, puts, at, values)
            answers.commit_seq = self._turn()
            return answers

        if self.trouble.puts_refused:
            self.occurred["store refused"] += 1
            raise StoreUnavailable("the simulated store takes no puts")
        answers = await self._through(work)
        if self.trouble.puts_lost:
            self.occurred["store answer lost"] += 1
            self.lost.answer_s = self.lost.unknown_s = self._loop.time()
            raise StoreUnknown("the answer to a put was lost")
        return answers

    def _put_or_moved(self, topic: Topic, now_ms: int, puts: Puts, at: int, values: dict[str, Any]) -> None:
        id = puts.ids[at]
        if values["version"] == 1:
            values["due_ms"] = int(puts.due_ms[at])
            self._births[topic.name, id] = values["birth"]
            values.update(sum=int(puts.payload_sum[at]), group=puts.groups[at].decode())
            size = len(puts.payloads[at]) + len(puts.headers[at])
            values.update(expires_ms=int(puts.expires_ms[at]), size=size)
            self._commit(topic, "put", id, {**values, "now_ms": now_ms})
        else:
            values.update(op=values["birth"], birth=self._birth_of(topic, id), due_ms=int(puts.due_ms[at]))
            self._commit(topic, "move", id, {**values, "now_ms": now_ms})

    def _birth_of(self, topic: Topic, id: bytes) -> int:
        """The birth of the message that lives under `id`, or lived there last."""
        return self._births[topic.name, id]

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        async def work() -> LeasedRows:
            leased = await self.inner.lease_due(topic, buckets, now_ms, due_before_ms, grants, overdue_ms)
            times = {"now_ms": now_ms, "due_before_ms": due_before_ms}
            for at in range(len(leased.rows)):
                was = {"was_due_ms": int(leased.was_due_ms[at])}
                self._commit(topic, "lease", leased.rows.ids[at], {**_row(leased.rows, at), **times, **was})
            for at in range(len(leased.buried)):
                values = {**_row(leased.buried, at), "now_ms": now_ms}
                self._commit(topic, "bury", leased.buried.ids[at], values)
            leased.commit_seq = self._turn()
            return leased

        asked = {"asked": self._loop.time() * 1_000.0, "now_ms": now_ms, "overdue_ms": overdue_ms}
        asked["buckets"] = None if buckets is None else list(buckets)
        leased = await self._through(work)
        self._note_deal(topic, grants, leased, asked)
        return leased

    def _note_deal(self, topic: Topic, grants: Sequence[Grant], leased: LeasedRows, asked: dict[str, Any]) -> None:
        """How the round was shared, as far as the broker knows: with the answer lost, so is the round."""
        rows, seats = leased.rows, len(grants)
        assert rows.payloads is not None and rows.headers is not None
        sizes = rows.payloads.sizes + rows.headers.sizes
        counts = np.bincount(leased.grant, minlength=seats).tolist()
        nbytes = np.bincount(leased.grant, weights=sizes, minlength=seats).astype(int).tolist()
        holders = [grant.holder.decode() for grant in grants]
        granted = {holder: [grant.count, grant.max_bytes] for holder, grant in zip(holders, grants, strict=True)}
        dealt = {holder: list(got) for holder, *got in zip(holders, counts, nbytes, strict=True)}
        values = {"topic": topic.name, "broker": self.broker, "granted": granted, "dealt": dealt}
        if self.brokers > 1:
            values["brokers"] = self.brokers
        self._history.note("deal", {**asked, **values, "largest": int(sizes.max(initial=0))})

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        async def work() -> Answers:
            answers = await self.inner.settle(topic, now_ms, settles)
            for at in np.flatnonzero(answers.repeat == 0).tolist():
                kind = Operation(int(settles.operation[at])).name.lower()
                version = int(answers.version[at]) if kind in ("release", "regrant") else int(settles.version[at])
                values = {
                    "birth": int(settles.birth[at]),
                    "version": version,
                    "due_ms": int(answers.due_ms[at]),
                    "holder": settles.holders[at].decode(),
                    "op": int(settles.op[at]),
                    "now_ms": now_ms,
                }
                if kind == "release":
                    values["unseen"] = bool(settles.unseen[at])
                if answers.status[at] == OK:
                    self._commit(topic, kind, settles.ids[at], values)
                elif answers.status[at] == Status.EXPIRED.code:
                    self._commit(topic, "expire", settles.ids[at], values)
            return answers

        return await self._through(work)

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        async def work() -> Answers:
            answers = await self.inner.mutate(topic, now_ms, mutations)
            kind = mutations.operation.name.lower()
            for at in np.flatnonzero(answers.repeat == 0).tolist():
                status = int(answers.status[at])
                if status not in (OK, Status.EXPIRED.code):
                    continue
                values = {
                    "birth": self._birth_of(topic, mutations.ids[at]),
                    "version": int(answers.version[at]),
                    "due_ms": int(answers.due_ms[at]),
                    "op": int(mutations.op[at]),
                    "now_ms": now_ms,
                    "leased": bool(mutations.leased[at]),
                }
                self._commit(topic, kind if status == OK else "expire", mutations.ids[at], values)
            return answers

        return await self._through(work)

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        async def work() -> TagStep:
            before = await self._tagged(topic, now_ms, mutation.tag)
            step = await self.inner.mutate_tag(topic, now_ms, mutation, cursor, limit)
            after = await self._tagged(topic, now_ms, mutation.tag)
            for id, values in before.items():
                now = after.get(id)
                if now is None:
                    kind = "cancel" if mutation.operation is Operation.CANCEL else "expire"
                    asked = {"now_ms": now_ms, "op": mutation.op, "leased": mutation.leased}
                    self._commit(topic, kind, id, {**values, **asked})
                elif now["version"] != values["version"]:
                    self._commit(topic, "move", id, {**now, "now_ms": now_ms, "op": mutation.op})
            return step

        return await self._through(work)

    async def _tagged(self, topic: Topic, now_ms: int, tag: bytes) -> dict[bytes, dict[str, Any]]:
        page = await self.inner.scan(topic, now_ms, ScanFilter(tag=tag), b"", 100_000, payload=False)
        return {page.rows.ids[at]: _row(page.rows, at) for at in range(len(page.rows))}

    # ── looking ──

    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        return await self._through(lambda: self.inner.held_by(topic, now_ms, holder, cursor, limit))

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        return await self._through(lambda: self.inner.scan(topic, now_ms, where, cursor, limit, payload))

    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        return await self._through(lambda: self.inner.count_due(topic, edges_ms, held))

    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        return await self._through(lambda: self.inner.next_due(topic, buckets, after_ms))

    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        return await self._through(lambda: self.inner.sweep(topic, now_ms, limit))


def _row(rows: Rows, at: int) -> dict[str, Any]:
    return {
        "birth": int(rows.birth[at]),
        "version": int(rows.version[at]),
        "due_ms": int(rows.due_ms[at]),
        "holder": rows.holders[at].decode(),
    }
