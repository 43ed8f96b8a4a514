"""Acting as an operator: the owners of messages are looked up, so that whoever may act for all of them does so in the
name of each. Every such call is told to the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from timeline.broker.api.access import Principal
from timeline.columns import Ragged
from timeline.model import Operation, Topic
from timeline.storage_plugins.contract import Mutations, ScanFilter

if TYPE_CHECKING:
    from timeline.broker.node import Node

log = logging.getLogger("timeline.broker")
PAGE_ROWS = 1_000
IDS_NAMED = 5


async def owners(node: Node, topic: Topic, mutations: Mutations, caller: Principal) -> Ragged:
    """The group that owns each message now; the asked one where there is no such message. Raises StoreError."""
    ids = mutations.ids.tolist()
    found: dict[bytes, bytes] = {}
    where, cursor = ScanFilter(ids=mutations.ids), b""
    while ids:
        now_ms = node.clock.now_ms()
        page = await node.store.call("scan", node.store.store.scan(topic, now_ms, where, cursor, PAGE_ROWS, False))
        found.update(zip(page.rows.ids.tolist(), page.rows.groups.tolist(), strict=True))
        if not page.cursor:
            break
        cursor = page.cursor
    named = ", ".join(repr(id.decode(errors="replace")) for id in ids[:IDS_NAMED])
    note_operator(
        caller, mutations.operation, topic, named + (f" and {len(ids) - IDS_NAMED} more" * (len(ids) > IDS_NAMED))
    )
    asked = mutations.groups.tolist()
    return Ragged.of([found.get(id, group) for id, group in zip(ids, asked, strict=True)])


def note_operator(caller: Principal, operation: Operation, topic: Topic, what: str) -> None:
    """One line in the log for what is done as an operator, at a level that is always kept."""
    log.warning(
        "as an operator: %s of %s on %r",
        operation.name.lower(),
        what,
        topic.name,
        extra={"identity": caller.identity.name, "token": caller.identity.token},
    )
