"""Puts: new ids in columns, known ids by the rules."""

from __future__ import annotations

from collections import Counter

import numpy as np

from timeline.columns import Bools
from timeline.model import Answers, TopicSettings
from timeline.storage_plugins.asks import fill, put_ask
from timeline.storage_plugins.contract import Puts
from timeline.storage_plugins.memory.rows import WORDS, TopicRows, records_of
from timeline.storage_plugins.memory.rulings import rule


def put(rows: TopicRows, settings: TopicSettings, now_ms: int, puts: Puts, fast: bool) -> Answers:
    """See `contract.Store.put`. Batches of new ids go in as columns; what else there is, one by one in their order."""
    answers = Answers.blank(len(puts))
    sound: Bools = ~puts.never_deliverable(now_ms)
    if fast and bool(sound.all()) and _put_all(rows, now_ms, puts):
        answers.version[:] = 1
        answers.due_ms[:] = puts.due_ms
        return answers
    ids = puts.ids.tolist()
    counted = Counter(ids)
    plain = sound & np.fromiter((id not in rows.index and counted[id] == 1 for id in ids), np.bool_, len(ids))
    if fast and plain.any():
        picks = np.flatnonzero(plain)
        _put_all(rows, now_ms, puts.take(picks))
        answers.version[picks] = 1
        answers.due_ms[picks] = puts.due_ms[picks]
    else:
        plain[:] = False
    for at in np.flatnonzero(~plain).tolist():
        _put_one(rows, settings, now_ms, puts, at, answers)
    return answers


def _put_all(rows: TopicRows, now_ms: int, puts: Puts) -> bool:
    """Stores the whole batch when no id is known and none comes twice; else changes nothing and says False."""
    ids, count = puts.ids.tolist(), len(puts)
    if count == 0:
        return True
    slots = rows.allocate(count)
    if not rows.index.add(ids, slots.tolist()):
        rows.give_back(slots)
        return False
    words = np.zeros((count, WORDS), dtype=np.int64)
    records = records_of(words)
    records["birth"] = puts.birth
    records["version"] = 1
    records["due_ms"] = puts.due_ms
    records["scheduled_ms"] = puts.due_ms
    records["put_ms"] = now_ms
    records["asked_ms"] = now_ms
    records["expires_ms"] = puts.expires_ms
    records["payload_sum"] = puts.payload_sum
    records["payload_bytes"] = puts.sizes
    records["headers_bytes"] = puts.headers.sizes
    records["group"] = rows.groups.numbers(puts.groups)
    records["tag"] = rows.tags.numbers(puts.tags)
    rows.write(slots, puts.ids, words, puts.payloads, puts.headers)
    return True


def _put_one(rows: TopicRows, settings: TopicSettings, now_ms: int, puts: Puts, at: int, answers: Answers) -> None:
    id = puts.ids[at]
    decision = rule(rows, id, put_ask(puts, at), now_ms, settings)
    if decision.born:
        _put_all(rows, now_ms, puts.take(np.array([at], dtype=np.intp)))
    fill(answers, at, decision)
