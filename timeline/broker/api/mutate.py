"""Mutate calls: moves, cancels, revivals and purges, by ids or by tag, with a definite answer for each message.

A call that is with the store cannot be taken back. A driver that lost the answer sends the same operations again and
learns how things stand then. That must still hold once the first call is over. So a repeat waits for the first call,
and a call that nobody waits for is not begun.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from timeline.broker.api.access import Deed, Principal
from timeline.broker.api.admission import admit_mutations, beyond_horizon, count_answers, forbidden, latest_ms, refused
from timeline.broker.api.topics import TopicAccess, Walk, opened, permit, sealed
from timeline.broker.cluster import ClusterHints
from timeline.broker.lanes import MeteredStore, perhaps_done
from timeline.broker.runtime import Runtime
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins.contract import (
    Mutations,
    ScanFilter,
    StoreError,
    StoreUnavailable,
    StoreUnknown,
    TagMutation,
)
from timeline.wire import Mutate, Mutated, MutateTag, TagMutated, validate_mutate
from timeline.wording import no_such_topic

log = logging.getLogger("timeline.broker")
MAX_TAG_CHUNK = 10_000
PAGE_ROWS = 1_000
IDS_NAMED = 5
MOST_AHEAD_MS = 1_000
"""Most that another broker's clock may be ahead, by which a walk began."""
NOT_BEGUN = "the broker came to it after its caller's time was over: it was not begun"


class Sendings:
    """Mutations on their way, by operation id. A repeat is done after the earlier calls."""

    def __init__(self) -> None:
        self._last: dict[int, asyncio.Future[None]] = {}
        """For each operation, the end of its newest call, which comes after the ends of all earlier ones."""

    @asynccontextmanager
    async def in_order(self, ops: Sequence[int]) -> AsyncIterator[None]:
        """Enter once no earlier call of any of `ops` is under way. Later ones wait for its end. Id 0 is none.

        Callers must not be cancelled: the next call would no longer wait for the one before.
        """
        again = not self._last.keys().isdisjoint(ops)
        before = {self._last[op] for op in ops if op in self._last} if again else set()
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last.update(dict.fromkeys(ops, over))
        self._last.pop(0, None)
        try:
            if before:
                await asyncio.wait(before)
            yield
        finally:
            for op in ops:
                if self._last.get(op) is over:
                    del self._last[op]
            over.set_result(None)


@dataclass(slots=True)
class PendingCall:
    """A call of a peer. `came_ms`: when (monotonic). `begun`: its turn has come. `gone`: its caller waits no more."""

    came_ms: float
    begun: bool = False
    gone: bool = False


class MutateHandler:
    """Mutate calls of one broker."""

    def __init__(self, runtime: Runtime, topics: TopicAccess, store: MeteredStore, cluster: ClusterHints) -> None:
        self._clock, self._limits, self._metrics = runtime.clock, runtime.limits, runtime.metrics
        self._topics, self._store, self._cluster = topics, store, cluster
        self._sendings = Sendings()

    async def by_ids(self, asked: Mutate, caller: Principal, call: PendingCall) -> Mutated:
        """Return an answer for each named message. The frame's `timeout_ms` (here and below) counts from when the call
        came. Raise StoreError."""
        count = len(asked.op)
        why = caller.change_refusal(asked.topic, asked.group)
        if why:
            denied = forbidden(count, validate_mutate(asked), why)
            count_answers(self._metrics, asked.operation, denied.status)
            return Mutated(denied)
        async with self._sendings.in_order(asked.op.tolist()):
            if self._not_wanted(call, asked.timeout_ms):
                answers = refused(count, Status.UNAVAILABLE, NOT_BEGUN)
                count_answers(self._metrics, asked.operation, answers.status)
                return Mutated(answers, self._limits.throttle_ms)
            topic = await self._topics.catalog.find(asked.topic)
            if topic is None:
                return Mutated(refused(count, Status.NOT_FOUND, no_such_topic(asked.topic)))
            return await self._mutate(asked, topic, caller)

    async def _mutate(self, asked: Mutate, topic: Topic, caller: Principal) -> Mutated:
        refusals, mutations = admit_mutations(asked, topic, self._clock.now())
        if caller.as_operator:
            mutations.groups = await self._owners(topic, mutations, caller)
        answers: Answers | None = None
        if len(mutations):
            try:
                answers = await self._store.mutate(topic, self._clock.now_ms(), mutations)
            except StoreError as trouble:
                nothing = isinstance(trouble, StoreUnavailable)
                status = Status.UNAVAILABLE if nothing else Status.UNKNOWN
                answers = refused(len(mutations), status, trouble.detail)
            if asked.operation in (Operation.MOVE, Operation.REVIVE):
                self._cluster.scheduled(topic, mutations.ids, mutations.due_ms, perhaps_done(answers), 0)
        whole = refusals.merge(answers)
        count_answers(self._metrics, asked.operation, whole.status)
        waits = bool((whole.status == Status.UNAVAILABLE.code).any())
        return Mutated(whole, self._limits.throttle_ms if waits else 0)

    async def _owners(self, topic: Topic, mutations: Mutations, caller: Principal) -> Ragged:
        """Return the group that owns each message; the given group where there is no such message.

        An operator acts in the name of each owner. Raise StoreError.
        """
        ids, store = mutations.ids.tolist(), self._store
        found: dict[bytes, bytes] = {}
        where, cursor = ScanFilter(ids=mutations.ids), b""
        while ids:
            now_ms = self._clock.now_ms()
            page = await store.call("scan", store.store.scan(topic, now_ms, where, cursor, PAGE_ROWS, False))
            found.update(zip(page.rows.ids.tolist(), page.rows.groups.tolist(), strict=True))
            if not page.cursor:
                break
            cursor = page.cursor
        named = ", ".join(repr(id.decode(errors="replace")) for id in ids[:IDS_NAMED])
        more = f" and {len(ids) - IDS_NAMED} more" * (len(ids) > IDS_NAMED)
        _note_operator(caller, mutations.operation, topic, named + more)
        asked = mutations.groups.tolist()
        return Ragged.of([found.get(id, group) for id, group in zip(ids, asked, strict=True)])

    def _not_wanted(self, call: PendingCall, timeout_ms: int) -> bool:
        """Return whether its caller has gone, or waits no longer."""
        late = timeout_ms > 0 and self._clock.monotonic_ms() >= call.came_ms + timeout_ms
        return call.gone or late

    async def by_tag(self, asked: MutateTag, caller: Principal, call: PendingCall) -> TagMutated:
        """Do a chunk of an operation by tag. Raise Invalid, StoreError, TransportError."""
        permit(caller.change_refusal(asked.topic, asked.group))
        async with self._sendings.in_order([asked.op]):
            if self._not_wanted(call, asked.timeout_ms):
                raise StoreUnavailable(NOT_BEGUN)
            topic = await self._topics.find(asked.topic, caller, Deed.SEE)
            if caller.as_operator:
                _note_operator(caller, asked.operation, topic, f"tag {asked.tag!r} of group {asked.group!r}")
            return await self._walk(topic, self._tag_mutation(asked, topic), asked)

    def _tag_mutation(self, asked: MutateTag, topic: Topic) -> TagMutation:
        if not asked.tag:
            raise Invalid("a tag must not be empty: an empty one would mean every message")
        now = self._clock.now()
        at_ms = asked.at_ms or (math.ceil(now) + asked.in_ms if asked.in_ms >= 0 else 0)
        if asked.operation is Operation.MOVE and not at_ms and not asked.by_ms:
            raise Invalid("a move by tag needs a time to move to, or a shift that is not 0")
        if asked.operation is Operation.MOVE and at_ms and asked.by_ms:
            raise Invalid("a move by tag takes a time to move to or a shift, not both")
        if asked.operation is Operation.MOVE and asked.by_ms <= -now:  # stored, it would be the first moment of 1970
            raise Invalid("a shift back must be shorter than the time since 1970. Give the time to move to with at=")
        if asked.operation is Operation.MOVE and not asked.op:
            raise Invalid("an operation id must be 64 random bits, not 0")
        last_ms = latest_ms(topic, now)
        if at_ms > last_ms:
            raise Invalid(beyond_horizon(topic))
        return TagMutation(
            operation=asked.operation,
            tag=asked.tag,
            group=asked.group.encode(),
            started_ms=asked.started_ms or math.floor(now),
            op=asked.op,
            due_ms=at_ms,
            by_ms=asked.by_ms,
            latest_ms=last_ms,
            leased=asked.leased,
            dry_run=asked.dry_run,
        )

    async def _walk(self, topic: Topic, mutation: TagMutation, asked: MutateTag) -> TagMutated:
        limit = min(asked.limit or MAX_TAG_CHUNK, MAX_TAG_CHUNK)
        cursor = opened(topic, Walk.TAG, asked.cursor)
        now_ms = self._clock.now_ms()
        if mutation.by_ms and not mutation.dry_run and now_ms <= mutation.started_ms:
            # Shifted messages must count as asked for after its start, or a repeat would shift them again.
            await asyncio.sleep(min(mutation.started_ms + 1 - now_ms, MOST_AHEAD_MS) / 1000.0)
            now_ms = self._clock.now_ms()
        work = self._store.store.mutate_tag(topic, now_ms, mutation, cursor, limit)
        try:
            step = await self._store.call("mutate_tag", work)
        except StoreUnknown:
            if mutation.operation is Operation.MOVE and not mutation.dry_run:
                self._cluster.scheduled_somewhere(topic, mutation.due_ms or now_ms)
            raise
        if step.earliest_due_ms is not None:
            self._cluster.scheduled_somewhere(topic, step.earliest_due_ms)
        if not mutation.dry_run:
            for code, many in step.counts.items():
                count_answers(self._metrics, mutation.operation, np.full(many, code, dtype=np.uint8))
            self._store.expired(topic, step.counts.get(Status.EXPIRED.code, 0))
            if self._store.journal is not None:
                self._store.journal.mutated_tag(topic, mutation, step)
        return TagMutated(step.counts, sealed(topic, Walk.TAG, step.cursor), mutation.started_ms, mutation.due_ms)


def _note_operator(caller: Principal, operation: Operation, topic: Topic, what: str) -> None:
    """Log what an operator does, at a level that is always kept."""
    log.warning(
        "as an operator: %s of %s on %r",
        operation.name.lower(),
        what,
        topic.name,
        extra={"identity": caller.name, "token": caller.token},
    )
