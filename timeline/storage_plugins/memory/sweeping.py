"""Sweeps: what expired, what is remembered no longer, dead letters past their retention."""

from __future__ import annotations

import numpy as np

from timeline.model import TopicSettings
from timeline.storage_plugins.contract import Swept
from timeline.storage_plugins.memory.agenda import Agenda, slots_of
from timeline.storage_plugins.memory.rows import FREE, HELD, TopicRows


def sweep(rows: TopicRows, settings: TopicSettings, now_ms: int, limit: int) -> Swept:
    """See `contract.Store.sweep`."""
    limit = max(1, limit)
    expired, more = _sweep_expired(rows, settings, now_ms, limit)
    forgotten, more_kept = _remove(rows, rows.kept, now_ms - settings.remember_ms, limit)
    dead, more_dead = 0, False
    if settings.dead_retention_ms:
        dead, more_dead = _remove(rows, rows.dead, now_ms - settings.dead_retention_ms, limit)
    return Swept(expired=expired, forgotten=forgotten, dead_purged=dead, more=more or more_kept or more_dead)


def _remove(rows: TopicRows, agenda: Agenda, until_ms: int, limit: int) -> tuple[int, bool]:
    """Removes up to `limit` rows that stand in `agenda` up to `until_ms`, and says whether there are more."""
    slots = slots_of(agenda.take(until_ms, limit)[1])
    if len(slots):
        rows.remove(slots, until_ms, remember=False)
    first = agenda.first()
    return len(slots), first is not None and first <= until_ms


def _sweep_expired(rows: TopicRows, settings: TopicSettings, now_ms: int, limit: int) -> tuple[int, bool]:
    """What is under a live lease is looked at again when that ends; a dead letter, when it is revived."""
    slots = np.unique(slots_of(rows.expiring.take(now_ms, limit)[1]))
    kinds, due_ms = rows.kinds[slots], rows.records["due_ms"][slots]
    leased = (kinds == HELD) & (due_ms > now_ms)
    over = ((kinds == FREE) | (kinds == HELD)) & ~leased
    if leased.any():
        rows.expire_at(slots[leased], due_ms[leased], rows.records["birth"][slots[leased]])
    if over.any():
        rows.remove(slots[over], now_ms, settings.remember_ms > 0)
    first = rows.expiring.first()
    return int(over.sum()), first is not None and first <= now_ms
