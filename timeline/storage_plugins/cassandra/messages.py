"""Messages by id: found, decided by the one table of rules, changed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, decide
from timeline.model import Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.asks import fill, mutation_asks, put_asks, settle_asks
from timeline.storage_plugins.cassandra.bucket import Bucket
from timeline.storage_plugins.cassandra.contents import Content
from timeline.storage_plugins.cassandra.desk import Desk, Standing
from timeline.storage_plugins.cassandra.partition import AT_ONCE
from timeline.storage_plugins.cassandra.rows import Stored
from timeline.storage_plugins.cassandra.sharing import Dropped, Part
from timeline.storage_plugins.cassandra.statements import INLINE_BYTES
from timeline.storage_plugins.contract import Mutations, Puts, Settles, StoreError, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.records import dropped


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
            ids = list(dict.fromkeys(self.ids[at] for at in some))
            part = Part(self.desk, self.topic, ids, partial(self.standing, some), presumes=self.news is not None)
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
