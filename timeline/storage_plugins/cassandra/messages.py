"""Messages by id: found, decided by the one table of rules, changed; what calls ask of a bucket goes into one batch."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, decide
from timeline.model import Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.asks import fill, mutation_asks, put_asks, settle_asks
from timeline.storage_plugins.cassandra.bucket import Bucket, Changed
from timeline.storage_plugins.cassandra.contents import Content
from timeline.storage_plugins.cassandra.desk import Desk, Standing, contents_of, settled_on
from timeline.storage_plugins.cassandra.partition import AT_ONCE, Met
from timeline.storage_plugins.cassandra.rows import Stored
from timeline.storage_plugins.cassandra.statements import INLINE_BYTES
from timeline.storage_plugins.contract import Mutations, Puts, Settles, StoreError, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.records import dropped


class Dropped(Exception):
    """The topic is no more."""


@dataclass(slots=True)
class Deciding:
    """A call by id: what is asked of each, and the answers. `news`: of a put, what is stored under each id that is
    free."""

    desk: Desk
    topic: Topic
    now_ms: int
    ids: list[bytes]
    asks: Sequence[Ask]
    news: Sequence[Stored] | None
    answers: Answers

    async def bucket(self, bucket: Bucket, places: list[int]) -> StoreError | None:
        """Decides what is asked at `places`, all of one bucket, in order; what failed answers so, and is answered."""
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE]
            part = Part(self, some, list(dict.fromkeys(self.ids[at] for at in some)), self.news is not None)
            try:
                await part.done(bucket)
            except (StoreUnavailable, StoreUnknown) as trouble:
                self._fail(some, trouble)
                self._fail(places[start + AT_ONCE :], StoreUnavailable(trouble.reason))
                return trouble
        return None

    def _fail(self, places: list[int], trouble: StoreError) -> None:
        nothing, answers = isinstance(trouble, StoreUnavailable), self.answers
        answers.status[places] = (Status.UNAVAILABLE if nothing else Status.UNKNOWN).code
        answers.version[places] = answers.due_ms[places] = 0
        answers.settled[places] = answers.late[places] = answers.repeat[places] = 0
        answers.details.update(dict.fromkeys(places, trouble.reason))

    def standing(self, places: list[int], found: dict[bytes, Stored]) -> Standing:
        """What was found once what is asked at `places` is decided, and the answers with it."""
        standing, news = Standing(self.topic, self.now_ms, found), self.news
        for at in places:
            fill(self.answers, at, standing.decide(self.ids[at], self.asks[at], news[at] if news else None))
        return standing


@dataclass(slots=True, eq=False)
class Part:
    """What a call asks of one bucket at once: `ids`, each once. `presumes`: that they are free."""

    call: Deciding
    places: list[int]
    ids: list[bytes]
    presumes: bool
    ended: bool = False
    trouble: Exception | None = None

    async def done(self, bucket: Bucket) -> None:
        """Returns once it is done, together with what other calls ask of the bucket meanwhile: a batch costs as much
        as a hundred messages in it."""
        bucket.waiting.append(self)
        try:
            async with bucket.lock:
                if not self.ended:
                    async with self.call.desk.changing:
                        await _do(self.call.desk, bucket, _first(bucket.waiting))
        finally:
            if self in bucket.waiting:
                bucket.waiting.remove(self)
        if self.trouble is not None:
            raise self.trouble


def _first(waiting: list[Part]) -> list[Part]:
    """Of what waits for a bucket as much as goes into one batch, and no id twice; it waits no more."""
    ids: set[bytes] = set()
    first: list[Part] = []
    for part in waiting:
        if not first or (len(ids) + len(part.ids) <= AT_ONCE and ids.isdisjoint(part.ids)):
            first.append(part)
            ids.update(part.ids)
    waiting[:] = [part for part in waiting if part not in first]
    return first


async def _do(desk: Desk, bucket: Bucket, parts: list[Part]) -> None:
    """Decides parts of calls and makes it so by one batch; the caller holds the bucket's lock."""
    trouble: Exception | None = StoreUnknown("the change that it was to go with was given up")
    try:
        await settled_on(bucket, lambda: _attempt(desk, bucket, parts), locked=True)
        trouble = None
    except (StoreError, Dropped) as failure:
        trouble = failure
    finally:
        for part in parts:
            part.ended, part.trouble = True, trouble


async def _attempt(desk: Desk, bucket: Bucket, parts: list[Part]) -> None:
    head = await desk.partition.head(bucket)
    if head.last is None and not await desk.stands(parts[0].call.topic):
        raise Dropped
    found = {id: bucket.messages[id] for part in parts for id in part.ids if id in bucket.messages}
    copied = bool(found)
    absent = frozenset(id for part in parts if part.presumes for id in part.ids if id not in found)
    rest = [id for part in parts if not part.presumes for id in part.ids if id not in found]
    for part in parts:
        part.presumes = False
    if rest:
        found |= await desk.partition.find(bucket, rest)
    standings: list[tuple[Part, Standing]] = []
    pairs: dict[bytes, tuple[Stored | None, Stored | None]] = {}
    for part in parts:
        standing = part.call.standing(part.places, {id: found[id] for id in part.ids if id in found})
        standings.append((part, standing))
        pairs |= standing.pairs()
    if any(pairs.get(id, (None, None))[1] is None for id in absent):
        raise Met
    if pairs:
        await desk.partition.change(bucket, pairs, absent)
    elif copied and await desk.partition.confirm([bucket]):
        raise Changed
    for part, standing in standings:
        desk.contents.delete(part.call.topic.uid, contents_of(bucket, standing.gone))


async def decide_all(
    desk: Desk, topic: Topic, now_ms: int, ids: list[bytes], asks: Sequence[Ask], news: Sequence[Stored] | None = None
) -> Answers:
    """Decides each ask, in order among those of one bucket, and makes it so. Where some failed and others did not, that
    is their status; where all did alike, it is raised."""
    call = Deciding(desk, topic, now_ms, ids, asks, news, Answers.blank(len(ids)))
    by_bucket: dict[int, list[int]] = defaultdict(list)
    for at, number in enumerate(buckets_of(Ragged.of(ids), topic.settings.buckets).tolist()):
        by_bucket[number].append(at)
    known = desk.buckets.of(topic.uid, by_bucket)
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
    answers = await decide_all(desk, topic, now_ms, ids, put_asks(puts), news)
    if contents:
        # A repeat in this very batch has the place of what it repeats, which stays, as does what may stand.
        fresh = ((answers.status == Status.OK.code) & (answers.version == 1)) | (answers.status == Status.UNKNOWN.code)
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
    return await decide_all(desk, topic, now_ms, settles.ids.tolist(), settle_asks(settles))


async def mutate(desk: Desk, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    return await decide_all(desk, topic, now_ms, mutations.ids.tolist(), mutation_asks(mutations))
