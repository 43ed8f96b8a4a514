"""The calls that change messages: puts, settles, mutations by id and by tag, sweeps, and leases.

Each call has a fast path over whole columns, for messages of which nothing is refused. `MemoryCall.rule` decides the
others one by one, by the table of `timeline.leases`. A lease takes what is due, earliest first, and deals it over the
grants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from timeline.columns import Bools, Indexes, Int64, Ragged
from timeline.kinds import kind_of
from timeline.leases import Ask, Decision, Message, deal, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Answers, Operation, Rows, Status, TopicSettings
from timeline.storage_plugins.asks import fill, mutation_asks, put_asks, removal, settle_asks
from timeline.storage_plugins.contract import (
    PUT_NUMBERS,
    Grant,
    LeasedRows,
    Mutations,
    Puts,
    Settles,
    Swept,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.memory.rows import (
    DEAD,
    FREE,
    HELD,
    KEPT,
    WORDS,
    Agenda,
    TopicRows,
    by_id,
    records_of,
    slots_of,
)
from timeline.storage_plugins.memory.walks import Walks


@dataclass(slots=True)
class MemoryCall:
    """A call on one topic's rows."""

    rows: TopicRows
    settings: TopicSettings
    now_ms: int

    def message_at(self, slot: int) -> Message:
        """Return the row in `slot` as the rules see it."""
        rows = self.rows
        record = dict(zip(rows.records.dtype.names, rows.records[slot].item(), strict=True))
        if rows.kinds[slot] == KEPT:
            known = {name: record[name] for name in ("birth", "version", "payload_sum", "last_op")}
            return Message(**known, remembered=True)
        return Message(
            **{name: record[name] for name in _RULED},
            holder=rows.holders.name(record["holder"]),
            group=rows.groups.name(record["group"]),
            dead=rows.reasons.get(slot, b""),
        )

    def rule(self, id: bytes, ask: Ask) -> Decision:
        """Decide `ask` for the message under `id` and do what was decided, but for a put of an absent id."""
        rows, now_ms, settings = self.rows, self.now_ms, self.settings
        slot = rows.index.get(id)
        if slot >= 0 and rows.kinds[slot] == KEPT and rows.records["died_ms"][slot] <= now_ms - settings.remember_ms:
            rows.remove(np.array([slot], dtype=np.intp), now_ms, remember=False)  # forgotten, though not swept yet
            slot = -1
        if slot < 0:
            return decide(None, ask, now_ms, settings)
        decision = decide(self.message_at(slot), ask, now_ms, settings)
        gone = removal(ask, decision)
        if gone is not None:
            last_op, remembers = gone
            rows.records["last_op"][slot] = last_op
            rows.remove(np.array([slot], dtype=np.intp), now_ms, remembers and settings.remember_ms > 0)
        elif decision.status is Status.OK and decision.message is not None and not decision.repeat:
            self.write_back(slot, decision.message)
        return decision

    def write_back(self, slot: int, message: Message) -> None:
        """Store what may have changed of a message and put it where it then belongs."""
        rows, records = self.rows, self.rows.records
        revived = bool(records["died_ms"][slot]) and not message.died_ms
        for name in _CHANGING:
            records[name][slot] = getattr(message, name)
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


_CHANGING = ("version", "due_ms", "scheduled_ms", "asked_ms", "last_op", "died_ms", "deliveries")
_RULED = (*_CHANGING, "birth", "expires_ms", "payload_sum")


# ── puts ──


def put(call: MemoryCall, puts: Puts) -> Answers:
    """See `contract.Store.put`. Batches of new ids go in as columns, others one by one in their order."""
    rows = call.rows
    answers = Answers.blank(len(puts))
    sound: Bools = ~puts.never_deliverable(call.now_ms)
    if call.rows.fast and bool(sound.all()) and _put_all(rows, call.now_ms, puts):
        answers.version[:] = 1
        answers.due_ms[:] = puts.due_ms
        return answers
    ids = puts.ids.tolist()
    counted = Counter(ids)
    plain = sound & np.fromiter((id not in rows.index and counted[id] == 1 for id in ids), np.bool_, len(ids))
    if call.rows.fast and plain.any():
        picks = np.flatnonzero(plain)
        _put_all(rows, call.now_ms, puts.take(picks))
        answers.version[picks] = 1
        answers.due_ms[picks] = puts.due_ms[picks]
    else:
        plain[:] = False
    rest = np.flatnonzero(~plain)
    for at, ask in zip(rest.tolist(), put_asks(puts.take(rest)), strict=True):
        decision = call.rule(ids[at], ask)
        if decision.born and decision.message is not None:
            one = puts.take(np.array([at], dtype=np.intp))
            one.due_ms[:] = decision.message.due_ms
            _put_all(rows, call.now_ms, one)
        fill(answers, at, decision)
    return answers


def _put_all(rows: TopicRows, now_ms: int, puts: Puts) -> bool:
    """Store the whole batch when no id is known and none comes twice; else change nothing and return False."""
    ids, count = puts.ids.tolist(), len(puts)
    if count == 0:
        return True
    slots = rows.allocate(count)
    if not rows.index.add(ids, slots.tolist()):
        rows.give_back(slots)
        return False
    words = np.zeros((count, WORDS), dtype=np.int64)
    records = records_of(words)
    for name in PUT_NUMBERS:
        records[name] = getattr(puts, name)
    records["version"] = 1
    records["scheduled_ms"] = puts.due_ms
    records["put_ms"] = now_ms
    records["asked_ms"] = now_ms
    records["payload_bytes"] = puts.sizes
    records["headers_bytes"] = puts.headers.sizes
    records["group"] = rows.groups.numbers(puts.groups)
    records["tag"] = rows.tags.numbers(puts.tags)
    rows.write(slots, puts.ids, words, puts.payloads, puts.headers)
    return True


# ── settles ──


def settle(call: MemoryCall, settles: Settles) -> Answers:
    """See `contract.Store.settle`. Acks, extends and releases with a good token go by columns."""
    answers = Answers.blank(len(settles))
    ids = settles.ids.tolist()
    if call.rows.fast and not call.settings.remember_ms and bool((settles.operation == Operation.ACK).all()):
        late = _ack_all(call, settles, ids)
        if late is not None:
            answers.late[:] = late
            return answers
    done = np.zeros(len(settles), dtype=np.bool_)
    if call.rows.fast:
        slots = _find(call.rows, ids)
        matching = slots >= 0
        slots = np.where(matching, slots, 0)
        matching &= _tokens_match(call.rows, slots, settles)
        for operation, apply in _SETTLING.items():
            picks = np.flatnonzero(matching & (settles.operation == operation))
            if len(picks):
                done[apply(call, settles, picks, slots[picks], answers)] = True
    if not done.all():
        rest = np.flatnonzero(~done)
        for at, ask in zip(rest.tolist(), settle_asks(settles.take(rest)), strict=True):
            fill(answers, at, call.rule(ids[at], ask))
    return answers


def _find(rows: TopicRows, ids: list[bytes]) -> Indexes:
    """Return the slot of each id, -1 if there is none or the id comes more than once."""
    slots = np.array(rows.index.find(ids), dtype=np.intp)
    if len(set(ids)) != len(ids):
        known, places, counts = np.unique(slots, return_inverse=True, return_counts=True)
        slots = np.where(counts[places] > 1, -1, known[places])
    return slots


def _tokens_match(rows: TopicRows, slots: Indexes, settles: Settles) -> Bools:
    """Return where birth, version and holder are those of a held row."""
    records = rows.records
    match: Bools = (
        (rows.kinds[slots] == HELD)
        & (records["birth"][slots] == settles.birth)
        & (records["version"][slots] == settles.version)
        & (records["holder"][slots] == rows.holders.known(settles.holders))
    )
    return match


def _ack_all(call: MemoryCall, settles: Settles, ids: list[bytes]) -> Bools | None:
    """Remove the whole batch if every token matches, and return which were late; else change nothing. Ids leave the
    index at once and return to it in the rarer case: one pass instead of two."""
    if not ids:
        return np.zeros(0, dtype=np.bool_)
    rows = call.rows
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
            late: Bools = records["due_ms"] <= call.now_ms
            rows.erase(slots, words)
            return late
    rows.index.put_back(ids, found)
    return None


def _ack(call: MemoryCall, settles: Settles, picks: Indexes, slots: Indexes, answers: Answers) -> Indexes:
    answers.late[picks] = call.rows.records["due_ms"][slots] <= call.now_ms
    call.rows.remove(slots, call.now_ms, call.settings.remember_ms > 0)
    return picks


def _extend(call: MemoryCall, settles: Settles, picks: Indexes, slots: Indexes, answers: Answers) -> Indexes:
    rows = call.rows
    expires_ms = rows.records["expires_ms"][slots]
    sound = (expires_ms == 0) | (expires_ms > call.now_ms)
    picks, slots = picks[sound], slots[sound]
    due_ms = np.maximum(rows.records["due_ms"][slots], settles.time_ms[picks])
    rows.records["due_ms"][slots] = due_ms
    rows.place(slots, HELD, due_ms)
    answers.due_ms[picks] = due_ms
    answers.version[picks] = settles.version[picks]
    return picks


def _release(call: MemoryCall, settles: Settles, picks: Indexes, slots: Indexes, answers: Answers) -> Indexes:
    words = call.rows.words.take(slots, axis=0)
    records = records_of(words)
    unseen = settles.unseen[picks]
    due_ms = np.maximum(call.now_ms, np.where(unseen, records["scheduled_ms"], settles.time_ms[picks]))
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
    records["asked_ms"] = np.where(unseen, records["asked_ms"], call.now_ms)
    call.rows.words[slots] = words
    call.rows.place(slots, FREE, due_ms)
    answers.due_ms[picks] = due_ms
    answers.version[picks] = records["version"]
    return picks


_SETTLING: dict[Operation, Callable[[MemoryCall, Settles, Indexes, Indexes, Answers], Indexes]] = {
    Operation.ACK: _ack,
    Operation.EXTEND: _extend,
    Operation.RELEASE: _release,
}
"""The settles by columns. Each writes its answers and returns the picks that it did."""


# ── mutations ──


def mutate(call: MemoryCall, mutations: Mutations) -> Answers:
    """See `contract.Store.mutate`. Moves and cancels of what is free go by columns."""
    rows, remember = call.rows, call.settings.remember_ms > 0
    answers = Answers.blank(len(mutations))
    ids = mutations.ids.tolist()
    done = np.zeros(len(mutations), dtype=np.bool_)
    if call.rows.fast and mutations.operation in (Operation.MOVE, Operation.CANCEL):
        slots = _find(rows, ids)
        known = np.flatnonzero(slots >= 0)
        picks = known[_plain(call, slots[known], mutations, known)]
        if len(picks) and mutations.operation is Operation.MOVE:
            _move(call, slots[picks], mutations, picks, answers)
        elif len(picks):
            if remember:
                rows.records["last_op"][slots[picks]] = mutations.op[picks]
            rows.remove(slots[picks], call.now_ms, remember)
        done[picks] = True
    if not done.all():
        rest = np.flatnonzero(~done)
        for at, ask in zip(rest.tolist(), mutation_asks(mutations.take(rest)), strict=True):
            fill(answers, at, call.rule(ids[at], ask))
    return answers


def _plain(call: MemoryCall, slots: Indexes, mutations: Mutations, picks: Indexes) -> Bools:
    """Return which rows may be moved or cancelled: owned, alive, not leased, of the version asked for, not expired, and
    not done before."""
    rows, records, kinds = call.rows, call.rows.records, call.rows.kinds[slots]
    expires_ms = records["expires_ms"][slots]
    op, if_version = mutations.op[picks], mutations.if_version[picks]
    leased = (kinds == HELD) & (records["due_ms"][slots] > call.now_ms)
    asked_ms: Int64 | int = call.now_ms
    if mutations.operation is Operation.MOVE:
        asked_ms = np.maximum(call.now_ms, mutations.due_ms[picks])
    else:
        leased &= ~mutations.leased[picks]
    groups = mutations.groups if len(picks) == len(mutations) else mutations.groups.take(picks)
    plain: Bools = (
        ((kinds == FREE) | (kinds == HELD))
        & ~leased
        & (records["group"][slots] == rows.groups.known(groups))
        & ((if_version == 0) | (if_version == records["version"][slots]))
        & ((expires_ms == 0) | (expires_ms > asked_ms))
        & ((op == 0) | (op != records["last_op"][slots]))
    )
    return plain


def _move(call: MemoryCall, slots: Indexes, mutations: Mutations, picks: Indexes, answers: Answers) -> None:
    records, due_ms = call.rows.records, mutations.due_ms[picks]
    version = records["version"][slots] + 1
    records["version"][slots] = version
    records["due_ms"][slots] = due_ms
    records["scheduled_ms"][slots] = due_ms
    records["asked_ms"][slots] = call.now_ms
    records["holder"][slots] = 0
    records["last_op"][slots] = mutations.op[picks]
    call.rows.place(slots, FREE, due_ms)
    answers.version[picks] = version
    answers.due_ms[picks] = due_ms


def mutate_tag(call: MemoryCall, walks: Walks, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
    """See `contract.Store.mutate_tag`."""
    rows = call.rows
    tag = rows.tags.find(mutation.tag)
    if not mutation.tag or tag is None:
        return TagStep({}, None)
    ids, after = walks.step(rows, cursor, limit, rows.tagged.get(tag, set()))
    slots = np.array(rows.index.find(ids), dtype=np.intp)
    slots = slots[slots >= 0]
    there = (
        (rows.records["put_ms"][slots] <= mutation.started_ms)
        & (rows.records["tag"][slots] == tag)
        & (rows.kinds[slots] != KEPT)
    )
    if mutation.shifts:
        asked_before = rows.records["asked_ms"][slots] <= mutation.started_ms
        there &= asked_before | (rows.records["last_op"][slots] == mutation.op)
    chosen = slots[there]
    asked = _asked(rows, chosen, mutation)
    beyond = (asked.due_ms > mutation.latest_ms) & (rows.records["last_op"][chosen] != mutation.op)
    refused = int(beyond.sum()) if mutation.operation is Operation.MOVE else 0
    if refused:
        chosen = chosen[~beyond]
        asked = _asked(rows, chosen, mutation)
    answers = _tried(call, chosen, asked) if mutation.dry_run else mutate(call, asked)
    codes, many = np.unique(answers.status, return_counts=True)
    counts = dict(zip(codes.tolist(), many.tolist(), strict=True))
    if refused:
        counts[Status.INVALID.code] = counts.get(Status.INVALID.code, 0) + refused
    moved = answers.due_ms[answers.status == Status.OK.code]
    told = len(moved) and mutation.operation is Operation.MOVE and not mutation.dry_run
    return TagStep(counts=counts, cursor=after, earliest_due_ms=int(moved.min()) if told else None)


def _asked(rows: TopicRows, slots: Indexes, mutation: TagMutation) -> Mutations:
    """Return the tag operation as mutations of the messages in `slots`."""
    count = len(slots)
    due_ms = np.full(count, mutation.due_ms, dtype=np.int64)
    if mutation.operation is Operation.MOVE and mutation.due_ms == 0:
        due_ms = np.maximum(rows.records["scheduled_ms"][slots] + mutation.by_ms, 0)
    return Mutations(
        operation=mutation.operation,
        ids=Ragged.of(rows.ids[slots].tolist()),
        groups=Ragged.repeat(mutation.group, count),
        due_ms=due_ms,
        if_version=np.zeros(count, dtype=np.int64),
        leased=np.full(count, mutation.leased),
        op=np.full(count, mutation.op, dtype=np.uint64),
    )


def _tried(call: MemoryCall, slots: Indexes, mutations: Mutations) -> Answers:
    """Return what `mutate` would answer; change nothing."""
    answers = Answers.blank(len(slots))
    doubtful = np.flatnonzero(~_plain(call, slots, mutations, np.arange(len(slots))))
    for at, ask in zip(doubtful.tolist(), mutation_asks(mutations.take(doubtful)), strict=True):
        fill(answers, at, decide(call.message_at(int(slots[at])), ask, call.now_ms, call.settings))
    return answers


# ── sweeps ──


def sweep(call: MemoryCall, limit: int) -> Swept:
    """See `contract.Store.sweep`."""
    rows, now_ms, settings = call.rows, call.now_ms, call.settings
    limit = max(1, limit)
    expired, more = _sweep_expired(call, limit)
    forgotten, more_kept = _remove_until(rows, rows.kept, now_ms - settings.remember_ms, limit)
    dead, more_dead = 0, False
    if settings.dead_retention_ms:
        dead, more_dead = _remove_until(rows, rows.dead, now_ms - settings.dead_retention_ms, limit)
    return Swept(expired=expired, forgotten=forgotten, dead_purged=dead, more=more or more_kept or more_dead)


def _remove_until(rows: TopicRows, agenda: Agenda, until_ms: int, limit: int) -> tuple[int, bool]:
    """Remove up to `limit` rows that stand in `agenda` up to `until_ms`; return how many, and whether more are left."""
    slots = slots_of(agenda.take(until_ms, limit)[1])
    if len(slots):
        rows.remove(slots, until_ms, remember=False)
    first = agenda.first()
    return len(slots), first is not None and first <= until_ms


def _sweep_expired(call: MemoryCall, limit: int) -> tuple[int, bool]:
    """Messages under a live lease are looked at again when it ends, and dead letters when they are revived."""
    rows, now_ms = call.rows, call.now_ms
    slots = np.unique(slots_of(rows.expiring.take(now_ms, limit)[1]))
    kinds, due_ms = rows.kinds[slots], rows.records["due_ms"][slots]
    leased = (kinds == HELD) & (due_ms > now_ms)
    over = ((kinds == FREE) | (kinds == HELD)) & ~leased
    if leased.any():
        rows.expire_at(slots[leased], due_ms[leased], rows.records["birth"][slots[leased]])
    if over.any():
        rows.remove(slots[over], now_ms, call.settings.remember_ms > 0)
    first = rows.expiring.first()
    return int(over.sum()), first is not None and first <= now_ms


# ── leases ──

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
