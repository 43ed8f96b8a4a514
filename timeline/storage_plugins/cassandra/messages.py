"""Messages by id: found, decided by the one table of rules, changed; a batch of a bucket at a time."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, Decision, decide
from timeline.leases.table import REMEMBERED
from timeline.model import Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.cassandra.bucket import Bucket, Buckets, Changed
from timeline.storage_plugins.cassandra.contents import Content, Contents
from timeline.storage_plugins.cassandra.partition import AT_ONCE, Met, Partition
from timeline.storage_plugins.cassandra.rows import Stored
from timeline.storage_plugins.cassandra.statements import INLINE_BYTES
from timeline.storage_plugins.contract import Mutations, Puts, Settles, StoreUnavailable, StoreUnknown

Result = TypeVar("Result")

SPREAD = 32
"""Buckets of one call that change at once."""
TRIES = 60
"""Times a change is decided anew because another process changed the bucket in between."""
LONGEST_PAUSE_S = 0.05


@dataclass(slots=True)
class Desk:
    """What calls work with."""

    partition: Partition
    contents: Contents
    buckets: Buckets
    changing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SPREAD))


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
        if decision.repeat or decision.status not in (Status.OK, Status.EXPIRED):
            return decision
        if stored is None:
            if new is not None and decision.message is not None:
                self._after[id] = replace(new, message=decision.message)
        elif decision.message is None:
            keeps = decision.status is Status.EXPIRED or ask.operation in REMEMBERED
            cancelled = decision.status is Status.OK and ask.operation is Operation.CANCEL
            self.remove(stored, ask.op if cancelled else 0, keeps)
        else:
            self._after[id] = replace(stored, message=decision.message)
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


def fill(answers: Answers, at: int, decision: Decision) -> None:
    """Writes a decision as answer `at`."""
    answers.status[at] = decision.status.code
    answers.version[at] = decision.message.version if decision.message else 0
    answers.due_ms[at] = decision.message.due_ms if decision.message else 0
    answers.settled[at], answers.late[at], answers.repeat[at] = decision.settled, decision.late, decision.repeat


async def all_of(calls: Sequence[Awaitable[Result]]) -> list[Result]:
    """All parts of a call. Where one failed after another was done, that nothing happened would be untrue."""
    done = await asyncio.gather(*calls, return_exceptions=True)
    failed = [part for part in done if isinstance(part, BaseException)]
    if not failed:
        return [part for part in done if not isinstance(part, BaseException)]
    graver = next((error for error in failed if not isinstance(error, StoreUnavailable)), None)
    if graver is not None:
        raise graver
    if len(failed) < len(done):
        raise StoreUnknown(f"a part of it was done, then: {failed[0]}") from failed[0]
    raise failed[0]


async def decide_all(
    desk: Desk, topic: Topic, now_ms: int, ids: list[bytes], asks: Sequence[Ask], news: Sequence[Stored] | None = None
) -> Answers:
    """Decides each ask, in order among those of one bucket, and makes it so."""
    answers = Answers.blank(len(ids))
    numbers = buckets_of(Ragged.of(ids), topic.settings.buckets).tolist()
    by_bucket: dict[int, list[int]] = defaultdict(list)
    for at, number in enumerate(numbers):
        by_bucket[number].append(at)
    known = desk.buckets.of(topic.uid, by_bucket)

    async def part(bucket: Bucket, places: list[int]) -> None:
        mine = list(dict.fromkeys(ids[at] for at in places))
        presumes = news is not None

        async def attempt() -> list[Stored]:
            nonlocal presumes
            await desk.partition.head(bucket)
            found = {id: bucket.messages[id] for id in mine if id in bucket.messages}
            copied, rest = bool(found), [id for id in mine if id not in found]
            absent: frozenset[bytes] = frozenset(rest if presumes else ())
            presumes = False
            if not absent:
                found |= await desk.partition.find(bucket, rest)
            standing = Standing(topic, now_ms, found)
            for at in places:
                fill(answers, at, standing.decide(ids[at], asks[at], news[at] if news else None))
            pairs = standing.pairs()
            if any(pairs.get(id, (None, None))[1] is None for id in absent):
                raise Met
            if pairs:
                await desk.partition.change(bucket, pairs, absent)
            elif copied and await desk.partition.confirm([bucket]):
                raise Changed
            return standing.gone

        async with desk.changing:
            gone = await settled_on(bucket, attempt)
        desk.contents.delete(topic.uid, contents_of(bucket, gone))

    async def in_turn(bucket: Bucket) -> None:
        places = by_bucket[bucket.number]
        for start in range(0, len(places), AT_ONCE):
            with partly(partial(bool, start)):
                await part(bucket, places[start : start + AT_ONCE])

    await all_of([in_turn(bucket) for bucket in known])
    return answers


async def put(desk: Desk, topic: Topic, now_ms: int, puts: Puts) -> Answers:
    """`Store.put`."""
    ids, attempt = puts.ids.tolist(), desk.partition.number()
    news = _news(puts, now_ms, attempt, topic)
    numbers = buckets_of(puts.ids, topic.settings.buckets).tolist()
    pairs = zip(puts.payloads.tolist(), puts.headers.tolist(), strict=True)
    contents = [
        Content(number, new.id, birth, attempt, new.content_bytes, *pair)
        for number, new, birth, pair in zip(numbers, news, puts.birth.tolist(), pairs, strict=True)
        if not new.inline
    ]
    await desk.contents.write(topic.uid, now_ms, contents)
    asks = [
        Ask(Operation.PUT, time_ms=due_ms, birth=birth, group=group, payload_sum=sum_, expires_ms=expires_ms, move=move)
        for due_ms, birth, group, sum_, expires_ms, move in zip(
            puts.due_ms.tolist(),
            puts.birth.tolist(),
            puts.groups.tolist(),
            puts.payload_sum.tolist(),
            puts.expires_ms.tolist(),
            puts.move.tolist(),
            strict=True,
        )
    ]
    answers = await decide_all(desk, topic, now_ms, ids, asks, news)
    if contents:
        # A repeat in this very batch has the place of what it repeats, which stays.
        fresh = (answers.status == Status.OK.code) & (answers.version == 1)
        births = puts.birth.tolist()
        stored = {(ids[at], births[at]) for at in np.flatnonzero(fresh).tolist()}
        desk.contents.delete(topic.uid, [c for c in contents if (c.id, c.birth) not in stored])
    return answers


def _news(puts: Puts, now_ms: int, attempt: int, topic: Topic) -> list[Stored]:
    """What a put stores, each, but for the message, which the rules make."""
    blank = decide(None, Ask(Operation.PUT, birth=1), now_ms, topic.settings).message
    assert blank is not None
    news: list[Stored] = []
    columns = (puts.ids, puts.sizes, puts.payloads, puts.headers, puts.tags)
    for id, payload_bytes, payload, headers, tag in zip(*(column.tolist() for column in columns), strict=True):
        content_bytes = len(payload) + len(headers)
        content = (payload, headers) if content_bytes <= INLINE_BYTES else None
        sizes = (payload_bytes, len(headers), content_bytes)
        news.append(Stored(id, blank, now_ms, *sizes, attempt, tag, content=content))
    return news


async def settle(desk: Desk, topic: Topic, now_ms: int, settles: Settles) -> Answers:
    """`Store.settle`."""
    columns = (settles.operation, settles.time_ms, settles.birth, settles.version, settles.holders, settles.op)
    asks = [
        Ask(
            Operation(operation),
            time_ms=time_ms,
            birth=birth,
            version=version,
            holder=holder,
            op=op,
            unseen=unseen,
            reason=reason,
        )
        for operation, time_ms, birth, version, holder, op, unseen, reason in zip(
            *(column.tolist() for column in columns), settles.unseen.tolist(), settles.reasons.tolist(), strict=True
        )
    ]
    return await decide_all(desk, topic, now_ms, settles.ids.tolist(), asks)


async def mutate(desk: Desk, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    columns = (mutations.groups, mutations.due_ms, mutations.if_version, mutations.leased, mutations.op)
    asks = [
        Ask(mutations.operation, time_ms=due_ms, group=group, if_version=if_version, leased=leased, op=op)
        for group, due_ms, if_version, leased, op in zip(*(column.tolist() for column in columns), strict=True)
    ]
    return await decide_all(desk, topic, now_ms, mutations.ids.tolist(), asks)
