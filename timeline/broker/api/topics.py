"""Topics as callers meet them, and the cursors of walks over topics.

A cursor goes out with a checksum, by which a broker knows its own. A store reads any bytes as a place. Damaged bytes,
or those of another topic, would lie behind all that is there, and the walk would end as if all were done. The checksum
stands behind the cursor. Older brokers take it for a part of the last id, and go on right behind that."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import StrEnum

from timeline.broker.api.access import Deed, Principal
from timeline.broker.catalog import Catalog, Readiness
from timeline.errors import Invalid
from timeline.model import Status, Topic
from timeline.storage_plugins.contract import TopicConflict
from timeline.wire import Fault, TopicAction, TopicList, Topics, TransportError
from timeline.wording import no_such_topic


class TopicAccess:
    """`catalog`: all topics. `changed` is called after one was created, changed or dropped here."""

    def __init__(self, catalog: Catalog, readiness: Readiness, changed: Callable[[], None]) -> None:
        self.catalog, self._readiness, self.changed = catalog, readiness, changed

    def check_ready(self) -> None:
        """Raise TransportError(NOT_READY) while this broker takes no calls."""
        if why := self._readiness.no_calls:
            raise TransportError(Fault.NOT_READY, why)

    async def find(self, name: str, caller: Principal, deed: Deed) -> Topic:
        """Return the topic, if `caller` may do `deed` on it. Refuse before looking whether it exists. Raise
        TransportError or StoreError."""
        permit(caller.refusal(deed, name))
        topic = await self.catalog.find(name)
        if topic is None:
            raise TransportError(Fault.NO_TOPIC, no_such_topic(name))
        return topic

    async def answer(self, asked: Topics, caller: Principal) -> TopicList:
        """List, create, change or drop, or return or rotate the secrets of webhooks. Raise StoreError."""
        catalog, before = self.catalog, self.catalog.known(asked.name)
        try:
            if asked.action is TopicAction.LIST:
                await catalog.refresh()
                listed = tuple(topic for topic in catalog.all() if caller.lists(topic.name, asked.name))
                return TopicList(Status.OK.code, "", listed)
            why = caller.refusal(Deed.GOVERN, asked.name)
            if why:
                return TopicList(Status.FORBIDDEN.code, why, ())
            if asked.action is TopicAction.CREATE:
                topic: Topic | None = await catalog.create(asked.name, asked.settings)
            elif asked.action is TopicAction.UPDATE:
                topic = await catalog.update(asked.name, asked.settings, asked.revision)
            elif asked.action is TopicAction.ROTATE:
                topic = await catalog.update(asked.name, {}, asked.revision, rotate=True)
            elif asked.action is TopicAction.SECRETS:
                topic = await catalog.find(asked.name)
            else:
                topic = await catalog.drop(asked.name)
        except Invalid as bad:
            return TopicList(Status.INVALID.code, bad.reason, ())
        except TopicConflict as conflict:
            return TopicList(Status.EXISTS.code, conflict.reason, ())
        if topic is None:
            return TopicList(Status.NOT_FOUND.code, f"there is no topic {asked.name!r}", ())
        if asked.action is TopicAction.DROP or (topic != before and asked.action is not TopicAction.SECRETS):
            self.changed()
        asks = asked.action in (TopicAction.SECRETS, TopicAction.ROTATE)
        return TopicList(Status.OK.code, "", (topic,), catalog.secrets(topic) if asks else ())


def permit(why: str) -> None:
    """Raise TransportError(FORBIDDEN) for a refusal."""
    if why:
        raise TransportError(Fault.FORBIDDEN, why)


SUM_BYTES = 4


class Walk(StrEnum):
    """The kind of call that a cursor belongs to."""

    SCAN = "scan"
    HELD = "held"
    TAG = "tag"


def sealed(topic: Topic, walk: Walk, cursor: bytes | None) -> bytes:
    """Return a store's cursor as clients get it. Empty or None: the walk is over."""
    return cursor + _sum(topic, walk, cursor) if cursor else b""


def opened(topic: Topic, walk: Walk, told: bytes) -> bytes:
    """Return the store's cursor in a client's. Empty: from the start. Raise Invalid if no such walk gave it."""
    cursor = told[:-SUM_BYTES]
    if told and told != sealed(topic, walk, cursor):
        raise Invalid(
            f"the cursor does not belong to a {walk} of {topic.name!r}. It is damaged, or the topic was dropped and "
            "created again. Give the last one as it came, or begin a new call"
        )
    return cursor


def _sum(topic: Topic, walk: Walk, cursor: bytes) -> bytes:
    return zlib.crc32(cursor, zlib.crc32(f"{walk}/{topic.uid}".encode())).to_bytes(SUM_BYTES, "big")
