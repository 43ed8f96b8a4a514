"""Topics as callers meet them: found, listed, created, changed and dropped, as far as each caller may."""

from __future__ import annotations

from collections.abc import Callable

from timeline.broker.api.access import Deed, Principal
from timeline.broker.catalog import Catalog
from timeline.broker.readiness import Readiness
from timeline.errors import Invalid
from timeline.model import Status, Topic
from timeline.storage_plugins.contract import TopicConflict
from timeline.wire import Fault, TopicAction, TopicList, Topics, TransportError
from timeline.wording import no_such_topic


class TopicAccess:
    """`catalog`: all of them. `changed` is called when one was created, changed or dropped here."""

    def __init__(self, catalog: Catalog, readiness: Readiness, changed: Callable[[], None]) -> None:
        self.catalog, self._readiness, self._changed = catalog, readiness, changed

    def check_ready(self) -> None:
        """Raise TransportError(NOT_READY) while this broker takes no calls."""
        if why := self._readiness.no_calls:
            raise TransportError(Fault.NOT_READY, why)

    async def find(self, name: str, caller: Principal, deed: Deed) -> Topic:
        """Return the topic, where `caller` may do `deed` on it: what is there is nobody else's to know. Raise
        TransportError, or StoreError."""
        permit(caller.refusal(deed, name))
        topic = await self.catalog.find(name)
        if topic is None:
            raise TransportError(Fault.NO_TOPIC, no_such_topic(name))
        return topic

    async def answer(self, asked: Topics, caller: Principal) -> TopicList:
        """List, create, change or drop. Raise StoreError."""
        catalog, before = self.catalog, self.catalog.known(asked.name)
        try:
            if asked.action is TopicAction.LIST:
                await catalog.refresh()
                return TopicList(Status.OK.code, "", tuple(topic for topic in catalog.all() if caller.sees(topic.name)))
            why = caller.refusal(Deed.GOVERN, asked.name)
            if why:
                return TopicList(Status.FORBIDDEN.code, why, ())
            if asked.action is TopicAction.CREATE:
                topic: Topic | None = await catalog.create(asked.name, asked.settings)
            elif asked.action is TopicAction.UPDATE:
                topic = await catalog.update(asked.name, asked.settings, asked.revision)
            else:
                topic = await catalog.drop(asked.name)
        except Invalid as bad:
            return TopicList(Status.INVALID.code, bad.reason, ())
        except TopicConflict as conflict:
            return TopicList(Status.EXISTS.code, conflict.reason, ())
        if topic is None:
            return TopicList(Status.NOT_FOUND.code, f"there is no topic {asked.name!r}", ())
        if asked.action is TopicAction.DROP or topic != before:
            self._changed()
        return TopicList(Status.OK.code, "", (topic,))


def permit(why: str) -> None:
    """Raise TransportError(FORBIDDEN) for a refusal."""
    if why:
        raise TransportError(Fault.FORBIDDEN, why)
