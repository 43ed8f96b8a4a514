"""How messages of a bucket change: what a call asks is decided by the one table of rules, and becomes part of a batch.

A conditional batch costs a node about as much as FEW messages in it. So what waits for a bucket while its last batch is
under way goes into the next one: puts, settles, mutations and leases alike. Each part is decided on the state that the
batch's condition names. Of small batches only some are under way at once: with all of them, as many as there are
buckets would be sent one by one.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, Decision, decide
from timeline.model import Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.asks import fail, fill, mutation_asks, put_asks, removal, settle_asks
from timeline.storage_plugins.cassandra.bucket import AT_ONCE, AlreadyThere, Bucket, BucketAccess, Buckets, Changed
from timeline.storage_plugins.cassandra.records import Records, all_topics
from timeline.storage_plugins.cassandra.rows import LATER, CassandraRow, Content, Contents
from timeline.storage_plugins.cassandra.statements import INLINE_BYTES
from timeline.storage_plugins.contract import Mutations, Puts, Settles, StoreError, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.records import dropped

Result = TypeVar("Result")

TRIES = 60
"""How often a change is decided again because another process changed the bucket in between."""
LONGEST_PAUSE_S = 0.05
SPREAD = 32
"""Buckets that change at once, by batches of FEW messages or more."""
FEW = 16
SPREAD_OF_FEW = 4
"""Buckets that change at once, by smaller batches."""
FAIR = 4
"""A bucket with a lease goes ahead of others, as a message that is leased late is late. But one turn in this number
goes to the first in line."""


# ── whose turn it is ──


class CooperativeYield:
    """Long work, one piece per round of the event loop, so that messages go out between the pieces."""

    def __init__(self) -> None:
        self._line: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Continue in a later round of the event loop, alone among those who wait here."""
        loop = asyncio.get_running_loop()
        mine: asyncio.Future[None] = loop.create_future()
        if not self._line:
            loop.call_soon(self._next, loop)
        self._line.append(mine)
        await mine

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._line:
            first = self._line.popleft()
            if not first.done():  # one that was cancelled is passed over
                first.set_result(None)
                break
        if self._line:
            loop.call_soon(self._next, loop)


class BatchSlots:
    """The line of buckets that wait to change, and how many change. It knows which in line have enough for a large
    batch, and which have a lease: there may be thousands of buckets."""

    def __init__(self) -> None:
        self._line: dict[Bucket, asyncio.Future[bool]] = {}  # in the order they came; whether it is a small turn
        self._large: dict[Bucket, None] = {}
        self._leasing: dict[Bucket, None] = {}
        self._under_way = {True: 0, False: 0}
        self._given = 0

    @asynccontextmanager
    async def slot(self, bucket: Bucket) -> AsyncIterator[None]:
        """Wait for the bucket's turn, and keep it while the body runs. The caller holds the bucket's lock. If it is
        cancelled, it leaves the line, and the turn to others."""
        given: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._line[bucket] = given
        self.asked(bucket)
        try:
            small = await given
        except BaseException:
            self._leave(bucket)
            if given.done() and not given.cancelled():
                self._end(given.result())
            raise
        try:
            yield
        finally:
            self._end(small)

    @asynccontextmanager
    async def lease_of(self, bucket: Bucket) -> AsyncIterator[None]:
        """Let the bucket go ahead of others meanwhile, as a lease waits for it."""
        bucket.leases += 1
        self.asked(bucket)
        try:
            yield
        finally:
            bucket.leases -= 1

    def asked(self, bucket: Bucket) -> None:
        """Note that more was asked of a bucket. In line, it may now have enough for a large turn."""
        if bucket in self._line:
            if bucket.asked >= FEW:
                self._large[bucket] = None
            if bucket.leases:
                self._leasing[bucket] = None
            self._give()

    def _end(self, small: bool) -> None:
        self._under_way[small] -= 1
        self._give()

    def _give(self) -> None:
        """Give the turns that are free."""
        while self._large and self._under_way[False] < SPREAD:
            self._let(next(iter(self._large)), small=False)
        while self._line and self._under_way[True] < SPREAD_OF_FEW:
            self._given += 1
            urgent = self._given % FAIR != 0 and self._leasing
            self._let(next(iter(urgent or self._line)), small=True)

    def _let(self, bucket: Bucket, small: bool) -> None:
        given = self._line[bucket]
        self._leave(bucket)
        if not given.done():
            self._under_way[small] += 1
            given.set_result(small)

    def _leave(self, bucket: Bucket) -> None:
        for line in (self._line, self._large, self._leasing):
            line.pop(bucket, None)


# ── decisions ──


@dataclass(slots=True)
class StoreContext:
    """The parts that calls work with. `looking`: by topic, where the search for orphaned contents is: bucket, part, and
    place in it. `tombstoned`: walks (topic, bucket, whether by tag) with more tombstones than Cassandra reads past."""

    partition: BucketAccess
    contents: Contents
    buckets: Buckets
    records: Records
    slots: BatchSlots = field(default_factory=BatchSlots)
    cooperative: CooperativeYield = field(default_factory=CooperativeYield)
    looking: dict[int, tuple[int, int, tuple[bytes, int, int]]] = field(default_factory=dict)
    tombstoned: set[tuple[int, int, bool]] = field(default_factory=set)

    async def stands(self, topic: Topic, lately: bool = False) -> bool:
        """Return whether a topic is there, as `Records.stands` says. Forget one that is not."""
        there = await self.records.stands(topic, lately)
        if not there:
            self.forget(topic.uid)
        return there

    async def topics(self) -> list[Topic]:
        """Return all topics, by name. Forget others: when another process drops a topic, no call may name it again."""
        # Known before the read, so that a topic which is created meanwhile is kept.
        known = self.records.topics() | self.buckets.topics() | self.looking.keys()
        known |= {uid for uid, _, _ in self.tombstoned}
        found = await all_topics(self.partition.connected)
        for uid in known - {topic.uid for topic in found}:
            self.forget(uid)
        return found

    def forget(self, topic: int) -> None:
        """Forget a topic that was dropped, here or by another process."""
        self.records.forget(topic)
        self.buckets.forget(topic)
        self.looking.pop(topic, None)
        self.tombstoned = {way for way in self.tombstoned if way[0] != topic}


async def settled_on(bucket: Bucket, attempt: Callable[[], Awaitable[Result]], locked: bool = False) -> Result:
    """Repeat `attempt` until the bucket was not changed meanwhile. `locked`: the caller holds the lock."""
    if not locked:
        async with bucket.lock:
            return await settled_on(bucket, attempt, locked=True)
    for turn in range(TRIES):
        try:
            return await attempt()
        except AlreadyThere:
            continue
        except Changed:
            # Two that meet again and again each wait for a time of their own.
            await asyncio.sleep(min(0.001 * (1 << turn), LONGEST_PAUSE_S) * random.random())
    raise StoreUnavailable(f"other processes change bucket {bucket.number} all the time")


@contextmanager
def partly(done: Callable[[], object]) -> Iterator[None]:
    """Raise StoreUnknown in place of StoreUnavailable if a part of the call was `done` before."""
    try:
        yield
    except StoreUnavailable as error:
        if done():
            raise StoreUnknown(f"a part of it was done, then: {error}") from error
        raise


class DecidedMessages:
    """Messages of a bucket, before and after a batch of decisions."""

    def __init__(self, topic: Topic, now_ms: int, found: dict[bytes, CassandraRow]) -> None:
        self.topic = topic
        self.now_ms = now_ms
        self._before = found
        self._after: dict[bytes, CassandraRow | None] = dict(found)
        self.gone: list[CassandraRow] = []

    def decide(self, id: bytes, ask: Ask, new: CassandraRow | None = None) -> Decision:
        """Decide and note the effect. `new`: what a put stores, but for the message."""
        stored = self._after.get(id)
        if stored is not None and self._forgotten(stored):
            stored = None
        decision = decide(stored.message if stored else None, ask, self.now_ms, self.topic.settings)
        gone = removal(ask, decision)
        if stored is not None and gone is not None:
            self.remove(stored, *gone)
        if decision.message is None or decision.repeat or decision.status is not Status.OK:
            return decision
        if not decision.born and stored is not None:
            self._after[id] = replace(stored, message=decision.message)
        elif new is not None:
            self._after[id] = replace(new, message=decision.message)
        return decision

    def there(self) -> list[CassandraRow]:
        """Return what was found, by id."""
        return [self._before[id] for id in sorted(self._before)]

    def remove(self, stored: CassandraRow, last_op: int = 0, remember: bool = True) -> None:
        """Remove a message; its id is remembered if the topic remembers."""
        keeps = remember and self.topic.settings.remember_ms > 0
        self._after[stored.id] = stored.settled(last_op, self.now_ms) if keeps else None
        self.gone.append(stored)

    def set(self, stored: CassandraRow) -> None:
        """Put `stored` in its message's place."""
        self._after[stored.id] = stored

    def forget(self, id: bytes) -> None:
        """Remove what is left of a settled message."""
        self._after[id] = None

    def _forgotten(self, stored: CassandraRow) -> bool:
        return stored.message.remembered and stored.settled_ms <= self.now_ms - self.topic.settings.remember_ms

    def pairs(self) -> dict[bytes, tuple[CassandraRow | None, CassandraRow | None]]:
        """Return what changed."""
        changed: dict[bytes, tuple[CassandraRow | None, CassandraRow | None]] = {}
        for id, after in self._after.items():
            before = self._before.get(id)
            if before is not after:
                changed[id] = (before, after)
        return changed


def contents_of(bucket: Bucket, gone: Sequence[CassandraRow]) -> list[Content]:
    """Return the places of contents that lie apart."""
    return [Content.of(bucket.number, stored) for stored in gone if not stored.inline]


Decided = Callable[[dict[bytes, CassandraRow]], DecidedMessages]
"""From the messages that were found to the decisions on them."""


class Dropped(Exception):
    """The topic was dropped."""


@dataclass(slots=True, eq=False)
class BatchPart:
    """One call's request to one bucket. `ids`: different ones, at most AT_ONCE. `decided`: called again each time
    another process was faster. `presumes`: the ids are presumed free. `whole`: content beside a message is wanted, too.
    `leases`: it leases messages."""

    context: StoreContext
    topic: Topic
    ids: list[bytes]
    decided: Decided
    presumes: bool = False
    whole: bool = False
    leases: bool = False
    ended: bool = False
    trouble: Exception | None = None

    async def done(self, bucket: Bucket) -> None:
        """Do it, together with what other calls ask of the bucket meanwhile. Raise Dropped, StoreUnavailable,
        StoreUnknown."""
        bucket.wait(self)
        self.context.slots.asked(bucket)
        try:
            async with bucket.lock:
                while not self.ended:
                    await _do(self.context, bucket)
        finally:
            bucket.give_up(self)
        if self.trouble is not None:
            raise self.trouble


def _first(bucket: Bucket) -> list[BatchPart]:
    """Take as much as goes into one batch of what waits for a bucket, and no id twice."""
    ids: set[bytes] = set()
    first: list[BatchPart] = []
    for part in bucket.waiting:
        if not first or (len(ids) + len(part.ids) <= AT_ONCE and ids.isdisjoint(part.ids)):
            first.append(part)
            ids.update(part.ids)
    bucket.take(first)
    return first


async def _do(context: StoreContext, bucket: Bucket) -> None:
    """Decide parts of calls that wait for a bucket, and write them by one batch. The caller holds its lock."""
    parts: list[BatchPart] = []

    async def attempt() -> None:
        # Others have their turns while this one waits because another process was faster.
        async with context.slots.slot(bucket):
            parts[:] = parts or _first(bucket)
            await _attempt(context, bucket, parts)

    trouble: Exception | None = StoreUnknown("the change that it was to go with was given up")
    try:
        await settled_on(bucket, attempt, locked=True)
        trouble = None
    except (StoreError, Dropped) as failure:
        trouble = failure
    finally:
        bucket.end(parts)
        for part in parts:
            part.ended, part.trouble = True, trouble


async def _attempt(context: StoreContext, bucket: Bucket, parts: list[BatchPart]) -> None:
    head = await context.partition.head(bucket)
    await context.cooperative.take()
    if head.last is None and not await context.stands(parts[0].topic):
        raise Dropped
    found = {id: bucket.messages[id] for part in parts for id in part.ids if id in bucket.messages}
    copied = bool(found)
    absent = frozenset(id for part in parts if part.presumes for id in part.ids if id not in found)
    for whole in (False, True):
        looked = [part for part in parts if part.whole is whole and not part.presumes]
        rest = [id for part in looked for id in part.ids if id not in found]
        if rest:
            found |= await context.partition.find(bucket, rest, whole)
    for part in parts:
        part.presumes = False
    standings: list[tuple[BatchPart, DecidedMessages]] = []
    pairs: dict[bytes, tuple[CassandraRow | None, CassandraRow | None]] = {}
    since_yield = 0
    for part in parts:
        if since_yield >= FEW:
            await context.cooperative.take()
            since_yield = 0
        since_yield += len(part.ids)
        standing = part.decided({id: found[id] for id in part.ids if id in found})
        standings.append((part, standing))
        pairs |= standing.pairs()
    if any(pairs.get(id, (None, None))[1] is None for id in absent):
        raise AlreadyThere
    if pairs:
        await context.cooperative.take()
        await context.partition.change(bucket, pairs, absent)
    elif copied and await context.partition.confirm([bucket]):
        raise Changed
    for part, standing in standings:
        context.contents.delete(part.topic.uid, contents_of(bucket, standing.gone))


@dataclass(slots=True)
class DecidedCall:
    """A call by id: the ask of each, and the answers. `news`: of a put, what is stored under each free id."""

    context: StoreContext
    topic: Topic
    now_ms: int
    ids: list[bytes]
    asks: Sequence[Ask]
    news: Sequence[CassandraRow] | None
    answers: Answers

    async def bucket(self, bucket: Bucket, places: list[int]) -> StoreError | None:
        """Decide the asks at `places`, all of one bucket, in order. Note failures as answers; return the first."""
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE]
            ids = list(dict.fromkeys(self.ids[at] for at in some))
            part = BatchPart(
                self.context, self.topic, ids, partial(self.standing, some), presumes=self.news is not None
            )
            try:
                await part.done(bucket)
            except (StoreUnavailable, StoreUnknown) as trouble:
                fail(self.answers, some, trouble)
                fail(self.answers, places[start + AT_ONCE :], StoreUnavailable(trouble.reason))
                return trouble
        return None

    def standing(self, places: list[int], found: dict[bytes, CassandraRow]) -> DecidedMessages:
        """Decide the asks at `places` on what was found, and fill their answers."""
        standing, news = DecidedMessages(self.topic, self.now_ms, found), self.news
        for at in places:
            fill(self.answers, at, standing.decide(self.ids[at], self.asks[at], news[at] if news else None))
        return standing


async def decide_all(
    context: StoreContext,
    topic: Topic,
    now_ms: int,
    ids: list[bytes],
    asks: Sequence[Ask],
    news: Sequence[CassandraRow] | None = None,
) -> Answers:
    """Decide each ask, in order within a bucket, and write the decisions. If only some failed, their status says so; if
    all failed alike, the failure is raised."""
    call = DecidedCall(context, topic, now_ms, ids, asks, news, Answers.blank(len(ids)))
    by_bucket: dict[int, list[int]] = defaultdict(list)
    for at, number in enumerate(buckets_of(Ragged.of(ids), topic.settings.buckets).tolist()):
        by_bucket[number].append(at)
    known = context.buckets.of(topic.uid, by_bucket)
    parts = (call.bucket(bucket, by_bucket[bucket.number]) for bucket in known)
    done = await asyncio.gather(*parts, return_exceptions=True)
    if any(isinstance(end, Dropped) for end in done):
        return dropped(topic, len(ids))
    for end in done:
        if isinstance(end, BaseException) and not isinstance(end, (StoreUnavailable, StoreUnknown)):
            raise end
    alike = len(set(call.answers.status.tolist())) == 1 and len(call.answers.details) == len(ids)
    if alike and (trouble := next((end for end in done if isinstance(end, StoreError)), None)) is not None:
        raise trouble
    return call.answers


async def put(context: StoreContext, topic: Topic, now_ms: int, puts: Puts) -> Answers:
    """`Store.put`."""
    ids, attempt = puts.ids.tolist(), context.partition.number()
    news = news_of(puts, now_ms, attempt, topic)
    numbers = buckets_of(puts.ids, topic.settings.buckets).tolist()
    pairs = zip(puts.payloads.tolist(), puts.headers.tolist(), strict=True)
    contents = [
        Content(number, new.id, birth, attempt, new.content_bytes, *pair)
        for number, new, birth, pair in zip(numbers, news, puts.birth.tolist(), pairs, strict=True)
        if not new.inline
    ]
    await context.contents.write(topic.uid, now_ms, contents)
    answers = await decide_all(context, topic, now_ms, ids, put_asks(puts), news)
    if contents:
        # A repeat within the batch has the place of what it repeats. That stays, as does what may be stored.
        fresh = ((answers.status == Status.OK.code) & (answers.version == 1)) | (answers.status == Status.UNKNOWN.code)
        births = puts.birth.tolist()
        stored = {(ids[at], births[at]) for at in np.flatnonzero(fresh).tolist()}
        context.contents.delete(topic.uid, [c for c in contents if (c.id, c.birth) not in stored])
    return answers


def news_of(puts: Puts, now_ms: int, attempt: int, topic: Topic) -> list[CassandraRow]:
    """Return what a put stores of each, but for the message, which the rules make."""
    blank = decide(None, Ask(Operation.PUT, birth=1), now_ms, topic.settings).message
    assert blank is not None
    news: list[CassandraRow] = []
    columns = (column.tolist() for column in (puts.ids, puts.sizes, puts.payloads, puts.headers, puts.tags))
    for id, payload_bytes, payload, headers, tag, later in zip(*columns, LATER.pack(puts), strict=True):
        content_bytes = len(payload) + len(headers)
        content = (payload, headers) if content_bytes <= INLINE_BYTES else None
        sizes = (payload_bytes, len(headers), content_bytes)
        news.append(CassandraRow(id, blank, now_ms, *sizes, attempt, tag, content=content, later=later))
    return news


async def settle(context: StoreContext, topic: Topic, now_ms: int, settles: Settles) -> Answers:
    """`Store.settle`."""
    return await decide_all(context, topic, now_ms, settles.ids.tolist(), settle_asks(settles))


async def mutate(context: StoreContext, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    return await decide_all(context, topic, now_ms, mutations.ids.tolist(), mutation_asks(mutations))
