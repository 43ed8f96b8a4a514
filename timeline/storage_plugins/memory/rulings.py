"""A message at a time, by the table of `timeline.leases`: whatever the fast paths do not take."""

from __future__ import annotations

import numpy as np

from timeline.columns import Indexes
from timeline.leases import Ask, Decision, Message, decide
from timeline.model import Status, TopicSettings
from timeline.storage_plugins.asks import removal
from timeline.storage_plugins.memory.rows import DEAD, FREE, HELD, KEPT, TopicRows


def message_at(rows: TopicRows, slot: int) -> Message:
    """The row in `slot` as the rules see it."""
    record = dict(zip(rows.records.dtype.names, rows.records[slot].item(), strict=True))
    if rows.kinds[slot] == KEPT:
        known = {name: record[name] for name in ("birth", "version", "payload_sum", "last_op")}
        return Message(**known, remembered=True)
    return Message(
        birth=record["birth"],
        version=record["version"],
        due_ms=record["due_ms"],
        scheduled_ms=record["scheduled_ms"],
        asked_ms=record["asked_ms"],
        holder=rows.holders.name(record["holder"]),
        deliveries=record["deliveries"],
        last_op=record["last_op"],
        group=rows.groups.name(record["group"]),
        expires_ms=record["expires_ms"],
        payload_sum=record["payload_sum"],
        died_ms=record["died_ms"],
        dead=rows.reasons.get(slot, b""),
    )


def rule(rows: TopicRows, id: bytes, ask: Ask, now_ms: int, settings: TopicSettings) -> Decision:
    """Decides `ask` for the message under `id` and does what was decided. A put of an absent id is the caller's."""
    found = rows.index.get(id)
    slot = found if found >= 0 else None
    if slot is not None and rows.kinds[slot] == KEPT and rows.records["died_ms"][slot] <= now_ms - settings.remember_ms:
        rows.remove(np.array([slot], dtype=np.intp), now_ms, remember=False)  # forgotten, though not swept yet
        slot = None
    decision = decide(None if slot is None else message_at(rows, slot), ask, now_ms, settings)
    if slot is None:
        return decision
    gone = removal(ask, decision)
    if gone is not None:
        leave(rows, slot, *gone, now_ms, settings)
    elif decision.status is Status.OK and decision.message is not None and not decision.repeat:
        write_back(rows, slot, decision.message)
    return decision


def leave(rows: TopicRows, slot: int, last_op: int, remembers: bool, now_ms: int, settings: TopicSettings) -> None:
    """Remove a row. Its id stays remembered, with `last_op`, where it `remembers` and the topic does."""
    rows.records["last_op"][slot] = last_op
    rows.remove(np.array([slot], dtype=np.intp), now_ms, remembers and settings.remember_ms > 0)


def write_back(rows: TopicRows, slot: int, message: Message) -> None:
    """Stores what may have changed of a message and puts it where it then belongs."""
    records = rows.records
    revived = bool(records["died_ms"][slot]) and not message.died_ms
    records["version"][slot] = message.version
    records["due_ms"][slot] = message.due_ms
    records["scheduled_ms"][slot] = message.scheduled_ms
    records["asked_ms"][slot] = message.asked_ms
    records["last_op"][slot] = message.last_op
    records["died_ms"][slot] = message.died_ms
    records["deliveries"][slot] = message.deliveries
    records["holder"][slot] = rows.holders.number(message.holder)
    if message.dead:
        rows.reasons[slot] = message.dead
    else:
        rows.reasons.pop(slot, None)
    slots: Indexes = np.array([slot], dtype=np.intp)
    kind = DEAD if message.died_ms else HELD if message.holder else FREE
    rows.place(slots, kind, np.array([message.died_ms or message.due_ms], dtype=np.int64))
    if revived and message.expires_ms:
        rows.expire_at(slots, records["expires_ms"][slots], records["birth"][slots])
