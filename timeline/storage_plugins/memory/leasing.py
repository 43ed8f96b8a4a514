"""Leases: what is due, earliest first, dealt over the grants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from timeline.columns import Bools, Indexes, Int64
from timeline.kinds import kind_of
from timeline.leases import Ask, deal, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Operation, Rows, Status
from timeline.storage_plugins.contract import Grant, LeasedRows
from timeline.storage_plugins.memory.agenda import by_id, slots_of
from timeline.storage_plugins.memory.changes import MemoryCall
from timeline.storage_plugins.memory.rows import DEAD, HELD, TopicRows, records_of

Accept = Callable[[Indexes], Bools]


class _Found:
    """The slots that a call met: those to lease, in order; expired ones; those delivered too often; the others."""

    def __init__(self) -> None:
        self.eligible: list[Indexes] = []
        self.count = 0
        self.expired: list[Indexes] = []
        self.spent: list[Indexes] = []
        self.passed: list[Indexes] = []

    def note(self, slots: Indexes, eligible: Bools, expired: Bools, spent: Bools) -> None:
        for found, chosen in (
            (self.eligible, eligible),
            (self.expired, expired),
            (self.spent, spent),
            (self.passed, ~(eligible | expired | spent)),
        ):
            if chosen.any():
                found.append(slots[chosen])
        self.count += int(eligible.sum())


def lease_due(
    call: MemoryCall, buckets: Sequence[int] | None, due_before_ms: int, grants: Sequence[Grant], overdue_ms: int
) -> LeasedRows:
    """See `contract.Store.lease_due`."""
    rows, now_ms = call.rows, call.now_ms
    accept = None if buckets is None else _in_buckets(rows, buckets)
    wanted = sum(grant.count for grant in grants)
    found = _Found()
    if overdue_ms > 0:
        due_before_ms = 0
    if wanted > 0:
        search = _search if call.rows.fast else _judge_each
        search(call, accept, due_before_ms, overdue_ms, wanted, found)
    expired = _joined(found.expired)
    if len(expired):
        rows.remove(expired, now_ms, call.settings.remember_ms > 0)
    buried = _bury(rows, _joined(found.spent), now_ms)
    leased, undealt = _grant(rows, _joined(found.eligible), now_ms, grants)
    leased.expired, leased.buried = len(expired), buried
    if call.rows.fast:
        _stay(rows, _joined([undealt, *found.passed]))
    if overdue_ms <= 0:
        leased.next_due_ms = _next_lease_ms(call, accept)
    return leased


def _next_lease_ms(call: MemoryCall, accept: Accept | None) -> int | None:
    """Return the earliest time at which something may become leasable."""
    times = [call.rows.free.first(accept=accept)]
    if call.rows.fast:
        held_ms = call.rows.held.first(accept=accept)
        times.append(None if held_ms is None else held_ms + call.settings.redelivery_backoff_ms)
    else:
        kind, held = kind_of(call.settings), call.rows.held.slots()
        held = held if accept is None else held[accept(held)]
        times += [kind.due_after_expiry(call.message_at(slot), call.settings) for slot in held.tolist()]
    return min((time for time in times if time is not None), default=None)


def next_due(rows: TopicRows, buckets: Sequence[int] | None, after_ms: int) -> int | None:
    """See `contract.Store.next_due`."""
    accept = None if buckets is None else _in_buckets(rows, buckets)
    times = [agenda.first(after_ms, accept) for agenda in (rows.free, rows.held)]
    return min((time for time in times if time is not None), default=None)


def _in_buckets(rows: TopicRows, buckets: Sequence[int]) -> Accept:
    wanted = np.zeros(rows.buckets, dtype=np.bool_)
    wanted[[bucket for bucket in buckets if 0 <= bucket < rows.buckets]] = True

    def accept(slots: Indexes) -> Bools:
        chosen: Bools = wanted[rows.bucket[slots]]
        return chosen

    return accept


def _search(
    call: MemoryCall, accept: Accept | None, due_before_ms: int, overdue_ms: int, wanted: int, found: _Found
) -> None:
    """Take what is due off the agendas until `wanted` may be leased."""
    rows, settings, now_ms = call.rows, call.settings, call.now_ms
    free_until = now_ms - overdue_ms if overdue_ms > 0 else max(now_ms, due_before_ms)
    held_until = now_ms - max(settings.redelivery_backoff_ms, overdue_ms)
    while found.count < wanted:
        slots = _next_due(rows, free_until, held_until, wanted - found.count)
        if len(slots) == 0:
            return
        records = records_of(rows.words.take(slots, axis=0))
        due_ms, expires_ms = records["due_ms"], records["expires_ms"]
        available = due_ms <= now_ms
        mine = np.ones(len(slots), dtype=np.bool_) if accept is None else accept(slots)
        spent = np.zeros(len(slots), dtype=np.bool_)
        passed = ~mine
        if settings.max_deliveries:
            out = mine & (records["deliveries"] >= settings.max_deliveries)
            spent, passed = out & available, passed | (out & ~available)
        expired = mine & _over(expires_ms, now_ms) & ~spent & ~passed
        found.note(slots, ~(spent | expired | passed), expired, spent)


def _over(expires_ms: Int64, now_ms: int) -> Bools:
    over: Bools = (expires_ms != 0) & (expires_ms <= now_ms)
    return over


def _next_due(rows: TopicRows, free_until: int, held_until: int, count: int) -> Indexes:
    """Take the first `count` of free and held rows together, by (due, id), off their agendas."""
    times, keys = rows.free.take(free_until, count)
    held_times, held_keys = rows.held.take(held_until, count)
    if len(held_keys) == 0:
        return slots_of(keys)
    slots = slots_of(np.concatenate((keys, held_keys)))
    times = np.concatenate((times, held_times))
    order = by_id(times, rows.ids_at(slots))
    beyond = order[count:]
    if len(beyond):
        rows.put_back(times[beyond], slots[beyond])
    return slots[order[:count]]


def _judge_each(
    call: MemoryCall, accept: Accept | None, due_before_ms: int, overdue_ms: int, wanted: int, found: _Found
) -> None:
    """Do the same by the table alone: look at every row, in the order of the topic's kind."""
    rows, now_ms, kind = call.rows, call.now_ms, kind_of(call.settings)
    slots = rows.every()
    slots = slots if accept is None else slots[accept(slots)]
    if overdue_ms > 0:
        slots = slots[rows.records["due_ms"][slots] <= now_ms - overdue_ms]
    messages = [(slot, call.message_at(slot)) for slot in slots.tolist()]
    messages.sort(key=lambda one: kind.order(one[1], rows.ids[one[0]]))
    ask = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=due_before_ms)
    for slot, message in messages:
        if found.count == wanted:
            return
        status = decide(message, ask, now_ms, call.settings).status
        spent = status is Status.DEAD and not message.died_ms and message.due_ms <= now_ms
        verdicts = (status is Status.OK, status is Status.EXPIRED, spent)
        if any(verdicts):
            found.note(np.array([slot], dtype=np.intp), *(np.array([verdict]) for verdict in verdicts))


def _joined(parts: list[Indexes]) -> Indexes:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.intp)


def _bury(rows: TopicRows, slots: Indexes, now_ms: int) -> Rows:
    if len(slots) == 0:
        return Rows.empty()
    died_ms = max(1, now_ms)
    rows.records["died_ms"][slots] = died_ms
    rows.reasons.update((slot, DELIVERED_OUT) for slot in slots.tolist())
    rows.place(slots, DEAD, np.full(len(slots), died_ms, dtype=np.int64))
    return rows.rows(slots, rows.words.take(slots, axis=0), payload=False)


def _stay(rows: TopicRows, slots: Indexes) -> None:
    """Put rows that stay as they are back into their agendas."""
    if len(slots):
        rows.put_back(rows.records["due_ms"][slots], slots)


def _grant(rows: TopicRows, slots: Indexes, now_ms: int, grants: Sequence[Grant]) -> tuple[LeasedRows, Indexes]:
    """Lease of `slots`, in order, what the grants' bytes allow. Return the leases, and the slots not dealt."""
    words = rows.words.take(slots, axis=0)
    dealt = deal(grants, rows.sizes(records_of(words)))
    undealt, slots, words = slots[len(dealt) :], slots[: len(dealt)], words[: len(dealt)]
    records = records_of(words)
    was_due_ms = records["due_ms"].copy()
    prior = records["holder"].copy()
    holders = np.array([rows.holders.number(grant.holder) for grant in grants], dtype=np.uint32)
    lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
    if len(dealt):
        records["due_ms"] = np.maximum(was_due_ms, now_ms) + lease_ms[dealt]
        records["holder"] = holders[dealt]
        records["version"] += 1
        records["deliveries"] += 1
        rows.words[slots] = words
        rows.place(slots, HELD, np.ascontiguousarray(records["due_ms"]))
    leased = LeasedRows(
        rows=rows.rows(slots, words, payload=True),
        grant=dealt,
        was_due_ms=was_due_ms,
        prior_holders=rows.holders.column(prior),
        next_due_ms=None,
    )
    return leased, undealt
