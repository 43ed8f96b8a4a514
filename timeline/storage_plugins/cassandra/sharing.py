"""What calls ask of a bucket meanwhile goes into one batch: puts, settles, mutations and leases alike.

A conditional batch costs a node as much as many messages in it, so what waits for a bucket while its last batch is
under way goes together. Each part is decided on the state that the batch's condition names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from timeline.model import Topic
from timeline.storage_plugins.cassandra.bucket import Bucket, Changed
from timeline.storage_plugins.cassandra.desk import Desk, Standing, contents_of, settled_on
from timeline.storage_plugins.cassandra.partition import AT_ONCE, Met
from timeline.storage_plugins.cassandra.rows import Stored
from timeline.storage_plugins.cassandra.turns import FEW
from timeline.storage_plugins.contract import StoreError, StoreUnknown

Decided = Callable[[dict[bytes, Stored]], Standing]
"""From what was found of the ids that were asked for to how they are to stand."""


class Dropped(Exception):
    """The topic is no more."""


@dataclass(slots=True, eq=False)
class Part:
    """What a call asks of one bucket at once: `ids`, each once, at most AT_ONCE. `decided` is called again whenever
    somebody else was faster. `presumes`: that the ids are free. `whole`: that content which lies beside a message is
    wanted with it. `leases`: that messages are leased by it."""

    desk: Desk
    topic: Topic
    ids: list[bytes]
    decided: Decided
    presumes: bool = False
    whole: bool = False
    leases: bool = False
    ended: bool = False
    trouble: Exception | None = None

    async def done(self, bucket: Bucket) -> None:
        """Returns once it is done, together with what other calls ask of the bucket meanwhile. Raises Dropped,
        StoreUnavailable, StoreUnknown."""
        bucket.wait(self)
        self.desk.turns.asked(bucket)
        try:
            async with bucket.lock:
                while not self.ended:
                    await _do(self.desk, bucket)
        finally:
            bucket.give_up(self)
        if self.trouble is not None:
            raise self.trouble


def _first(bucket: Bucket) -> list[Part]:
    """Of what waits for a bucket as much as goes into one batch, and no id twice; it waits no more."""
    ids: set[bytes] = set()
    first: list[Part] = []
    for part in bucket.waiting:
        if not first or (len(ids) + len(part.ids) <= AT_ONCE and ids.isdisjoint(part.ids)):
            first.append(part)
            ids.update(part.ids)
    bucket.take(first)
    return first


async def _do(desk: Desk, bucket: Bucket) -> None:
    """Decides parts of calls that wait for a bucket and makes it so by one batch; the caller holds its lock."""
    parts: list[Part] = []

    async def attempt() -> None:
        # Others have their turns while this one waits because somebody else was faster.
        async with desk.turns.turn(bucket):
            parts[:] = parts or _first(bucket)
            await _attempt(desk, bucket, parts)

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


async def _attempt(desk: Desk, bucket: Bucket, parts: list[Part]) -> None:
    head = await desk.partition.head(bucket)
    await desk.breaths.take()
    if head.last is None and not await desk.stands(parts[0].topic):
        raise Dropped
    found = {id: bucket.messages[id] for part in parts for id in part.ids if id in bucket.messages}
    copied = bool(found)
    absent = frozenset(id for part in parts if part.presumes for id in part.ids if id not in found)
    for whole in (False, True):
        looked = [part for part in parts if part.whole is whole and not part.presumes]
        rest = [id for part in looked for id in part.ids if id not in found]
        if rest:
            found |= await desk.partition.find(bucket, rest, whole)
    for part in parts:
        part.presumes = False
    standings: list[tuple[Part, Standing]] = []
    pairs: dict[bytes, tuple[Stored | None, Stored | None]] = {}
    since_breath = 0
    for part in parts:
        if since_breath >= FEW:
            await desk.breaths.take()
            since_breath = 0
        since_breath += len(part.ids)
        standing = part.decided({id: found[id] for id in part.ids if id in found})
        standings.append((part, standing))
        pairs |= standing.pairs()
    if any(pairs.get(id, (None, None))[1] is None for id in absent):
        raise Met
    if pairs:
        await desk.breaths.take()
        await desk.partition.change(bucket, pairs, absent)
    elif copied and await desk.partition.confirm([bucket]):
        raise Changed
    for part, standing in standings:
        desk.contents.delete(part.topic.uid, contents_of(bucket, standing.gone))
