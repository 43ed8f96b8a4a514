"""Settles: acks, extends and releases with a good token in columns, all else by the rules."""

from __future__ import annotations

import numpy as np

from timeline.columns import Bools, Indexes
from timeline.model import Answers, Operation, TopicSettings
from timeline.storage_plugins.asks import fill, settle_ask
from timeline.storage_plugins.contract import Settles
from timeline.storage_plugins.memory.rows import FREE, HELD, TopicRows, records_of
from timeline.storage_plugins.memory.rulings import rule


def find(rows: TopicRows, ids: list[bytes]) -> Indexes:
    """The slot of each id, -1 where there is none and for all of an id that comes more than once."""
    slots = np.array(rows.index.find(ids), dtype=np.intp)
    if len(set(ids)) != len(ids):
        known, places, counts = np.unique(slots, return_inverse=True, return_counts=True)
        slots = np.where(counts[places] > 1, -1, known[places])
    return slots


def settle(rows: TopicRows, settings: TopicSettings, now_ms: int, settles: Settles, fast: bool) -> Answers:
    """See `contract.Store.settle`."""
    answers = Answers.blank(len(settles))
    ids = settles.ids.tolist()
    if fast and not settings.remember_ms and bool((settles.operation == Operation.ACK).all()):
        late = _ack_all(rows, now_ms, settles, ids)
        if late is not None:
            answers.late[:] = late
            return answers
    done = np.zeros(len(settles), dtype=np.bool_)
    if fast:
        slots = find(rows, ids)
        matching = slots >= 0
        slots = np.where(matching, slots, 0)
        matching &= _tokens_match(rows, slots, settles)
        for operation, apply in ((Operation.ACK, _ack), (Operation.EXTEND, _extend), (Operation.RELEASE, _release)):
            picks = np.flatnonzero(matching & (settles.operation == operation))
            if len(picks):
                done[apply(rows, settings, now_ms, settles, picks, slots[picks], answers)] = True
    for at in np.flatnonzero(~done).tolist():
        fill(answers, at, rule(rows, ids[at], settle_ask(settles, at), now_ms, settings))
    return answers


def _tokens_match(rows: TopicRows, slots: Indexes, settles: Settles) -> Bools:
    """Where birth, version and holder are those of a row that is held (neither free nor dead)."""
    records = rows.records
    match: Bools = (
        (rows.kinds[slots] == HELD)
        & (records["birth"][slots] == settles.birth)
        & (records["version"][slots] == settles.version)
        & (records["holder"][slots] == rows.holders.known(settles.holders))
    )
    return match


def _ack_all(rows: TopicRows, now_ms: int, settles: Settles, ids: list[bytes]) -> Bools | None:
    """Takes the whole batch out when every token matches, and says which were late; else changes nothing. Ids leave
    the index at once and return to it in the rarer case: one pass where two would be needed."""
    if not ids:
        return np.zeros(0, dtype=np.bool_)
    found = rows.index.take(ids)
    slots = np.array(found, dtype=np.intp)
    if int(slots.min()) >= 0:
        words = rows.words.take(slots, axis=0)
        records = records_of(words)
        if (
            bool((records["version"] == settles.version).all())
            and bool((records["birth"] == settles.birth).all())
            and bool((records["holder"] == rows.holders.known(settles.holders)).all())
            and bool((rows.kinds[slots] == HELD).all())
        ):
            late: Bools = records["due_ms"] <= now_ms
            rows.erase(slots, words)
            return late
    rows.index.put_back(ids, found)
    return None


def _ack(
    rows: TopicRows,
    settings: TopicSettings,
    now_ms: int,
    settles: Settles,
    picks: Indexes,
    slots: Indexes,
    answers: Answers,
) -> Indexes:
    answers.late[picks] = rows.records["due_ms"][slots] <= now_ms
    rows.remove(slots, now_ms, settings.remember_ms > 0)
    return picks


def _extend(
    rows: TopicRows,
    settings: TopicSettings,
    now_ms: int,
    settles: Settles,
    picks: Indexes,
    slots: Indexes,
    answers: Answers,
) -> Indexes:
    expires_ms = rows.records["expires_ms"][slots]
    sound = (expires_ms == 0) | (expires_ms > now_ms)
    picks, slots = picks[sound], slots[sound]
    due_ms = np.maximum(rows.records["due_ms"][slots], settles.time_ms[picks])
    rows.records["due_ms"][slots] = due_ms
    rows.place(slots, HELD, due_ms)
    answers.due_ms[picks] = due_ms
    answers.version[picks] = settles.version[picks]
    return picks


def _release(
    rows: TopicRows,
    settings: TopicSettings,
    now_ms: int,
    settles: Settles,
    picks: Indexes,
    slots: Indexes,
    answers: Answers,
) -> Indexes:
    words = rows.words.take(slots, axis=0)
    records = records_of(words)
    unseen = settles.unseen[picks]
    due_ms = np.maximum(now_ms, np.where(unseen, records["scheduled_ms"], settles.time_ms[picks]))
    op = settles.op[picks]
    sound = (records["expires_ms"] == 0) | (records["expires_ms"] > due_ms)
    sound &= (op == 0) | (records["last_op"] != op)
    picks, slots, words = picks[sound], slots[sound], words[sound]
    records, unseen, due_ms = records_of(words), unseen[sound], due_ms[sound]
    records["due_ms"] = due_ms
    records["version"] += 1
    records["holder"] = 0
    records["last_op"] = op[sound]
    deliveries = records["deliveries"]
    records["deliveries"] = np.where(unseen & (deliveries > 0), deliveries - 1, deliveries)
    records["scheduled_ms"] = np.where(unseen, records["scheduled_ms"], due_ms)
    records["asked_ms"] = np.where(unseen, records["asked_ms"], now_ms)
    rows.words[slots] = words
    rows.place(slots, FREE, due_ms)
    answers.due_ms[picks] = due_ms
    answers.version[picks] = records["version"]
    return picks
