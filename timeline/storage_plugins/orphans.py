"""Payloads whose message is gone: deleted beside whatever else goes on, or found by a sweep.

A sweep looks through one share of a topic's files at a time. What has no row is suspected, and deleted when it still
has none a grace later: a put writes its payload before its row, and may be under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from timeline.columns import Ragged
from timeline.model import State, Topic
from timeline.storage_plugins.contract import ScanFilter, Store
from timeline.storage_plugins.payload_rows import places_of
from timeline.storage_plugins.payloads import (
    SHARDS,
    PayloadStore,
    PayloadsUnavailable,
    place_of_name,
    shard_folder,
)

log = logging.getLogger("timeline.store")

MOST_SUSPECTS = 65_536
"""So many are kept in mind; what is beyond waits for a later round."""
MOST_DOOMED = 65_536
"""So many wait to be deleted; what is beyond is left to a sweep."""
LOOKED_UP_AT_ONCE = 1_000
DELETED_AT_ONCE = 1_000
EVERYTHING = frozenset((State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD))


class Orphans:
    """Deletes payloads of messages that are gone. `grace_ms`: how long one without a row is left alone."""

    def __init__(self, payloads: PayloadStore, grace_ms: int) -> None:
        self._payloads, self._grace_ms = payloads, grace_ms
        self._suspects: OrderedDict[str, int] = OrderedDict()
        self._shards: dict[int, int] = {}
        self._doomed: list[str] = []
        self._deleting: asyncio.Task[None] | None = None

    def delete_later(self, names: Sequence[str]) -> None:
        """Deletes these soon, beside whatever else goes on. What cannot be deleted is left to a sweep."""
        self._doomed += names[: max(0, MOST_DOOMED - len(self._doomed))]
        if self._doomed and self._deleting is None:
            self._deleting = asyncio.create_task(self._delete(), name="timeline-payloads")

    async def flush(self) -> None:
        """Returns when what was to be deleted has been."""
        while self._deleting is not None:
            await self._deleting

    async def _delete(self) -> None:
        try:
            while self._doomed:
                names, self._doomed = self._doomed[:DELETED_AT_ONCE], self._doomed[DELETED_AT_ONCE:]
                try:
                    await self._payloads.delete(names)
                except PayloadsUnavailable as trouble:
                    # With what waits behind: each try may take as long as the place is silent.
                    log.warning("%d payloads are left to a sweep: %s", len(names) + len(self._doomed), trouble)
                    self._doomed = []
        finally:
            self._deleting = None

    async def sweep(self, inner: Store, topic: Topic, now_ms: int) -> int:
        """Looks through the next share of the topic's files; how many it deleted."""
        shard = self._shards.get(topic.uid, 0)
        self._shards[topic.uid] = (shard + 1) % SHARDS
        try:
            names = await self._payloads.names(shard_folder(topic.uid, shard))
            living = await self._living(inner, topic, now_ms, names)
            orphans = [name for name in names if name not in living]
            for name in names:
                if name in living:
                    self._suspects.pop(name, None)
            over = [name for name in orphans if self._suspected(name, now_ms) <= now_ms - self._grace_ms]
            await self._payloads.delete(over)
        except PayloadsUnavailable as trouble:
            log.warning("payloads of %s could not be swept: %s", topic.name, trouble)
            return 0
        for name in over:
            self._suspects.pop(name, None)
        return len(over)

    def _suspected(self, name: str, now_ms: int) -> int:
        """Since when `name` has been seen without a row."""
        since = self._suspects.get(name)
        if since is None or since > now_ms:
            since = self._suspects[name] = now_ms
            if len(self._suspects) > MOST_SUSPECTS:
                # The latest: were it the first, a flood of orphans would push out each before its grace is over.
                self._suspects.popitem()
        return since

    async def _living(self, inner: Store, topic: Topic, now_ms: int, names: list[str]) -> set[str]:
        """Those of `names` that rows point to."""
        ids = sorted({place.id for place in map(place_of_name, names) if place is not None})
        living: set[str] = set()
        for start in range(0, len(ids), LOOKED_UP_AT_ONCE):
            asked = Ragged.of(ids[start : start + LOOKED_UP_AT_ONCE])
            cursor: bytes | None = b""
            while cursor is not None:
                where = ScanFilter(EVERYTHING, ids=asked)
                page = await inner.scan(topic, now_ms, where, cursor, LOOKED_UP_AT_ONCE, True)
                living.update(place.name(topic.uid) for place in places_of(page.rows).values())
                cursor = page.cursor
        return living
