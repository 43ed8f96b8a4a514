"""Mutations: moves and cancels of what is free in columns, all else by the rules; by id and by tag."""

from __future__ import annotations

import numpy as np

from timeline.columns import Bools, Indexes, Int64, Ragged
from timeline.leases import decide
from timeline.model import Answers, Operation, Status, TopicSettings
from timeline.storage_plugins.asks import fill, mutation_ask
from timeline.storage_plugins.contract import Mutations, TagMutation, TagStep
from timeline.storage_plugins.memory.rows import FREE, HELD, KEPT, TopicRows
from timeline.storage_plugins.memory.rulings import message_at, rule
from timeline.storage_plugins.memory.settles import find
from timeline.storage_plugins.memory.walks import Walks


def mutate(rows: TopicRows, settings: TopicSettings, now_ms: int, mutations: Mutations, fast: bool) -> Answers:
    """See `contract.Store.mutate`."""
    answers = Answers.blank(len(mutations))
    ids = mutations.ids.tolist()
    done = np.zeros(len(mutations), dtype=np.bool_)
    if fast and mutations.operation in (Operation.MOVE, Operation.CANCEL):
        slots = find(rows, ids)
        known = np.flatnonzero(slots >= 0)
        picks = known[_plain(rows, slots[known], now_ms, mutations, known)]
        if len(picks) and mutations.operation is Operation.MOVE:
            _move(rows, slots[picks], now_ms, mutations, picks, answers)
        elif len(picks):
            if settings.remember_ms:
                rows.records["last_op"][slots[picks]] = mutations.op[picks]
            rows.remove(slots[picks], now_ms, settings.remember_ms > 0)
        done[picks] = True
    for at in np.flatnonzero(~done).tolist():
        fill(answers, at, rule(rows, ids[at], mutation_ask(mutations, at), now_ms, settings))
    return answers


def _plain(rows: TopicRows, slots: Indexes, now_ms: int, mutations: Mutations, picks: Indexes) -> Bools:
    """Which of the rows nothing refuses a move or cancel: owned, alive, not leased, of the version asked for, not
    expired, and not done before."""
    records, kinds = rows.records, rows.kinds[slots]
    expires_ms = records["expires_ms"][slots]
    op, if_version = mutations.op[picks], mutations.if_version[picks]
    leased = (kinds == HELD) & (records["due_ms"][slots] > now_ms)
    asked_ms: Int64 | int = now_ms
    if mutations.operation is Operation.MOVE:
        asked_ms = np.maximum(now_ms, mutations.due_ms[picks])
    else:
        leased &= ~mutations.leased[picks]
    plain: Bools = (
        ((kinds == FREE) | (kinds == HELD))
        & ~leased
        & (records["group"][slots] == rows.groups.known(_taken(mutations.groups, picks)))
        & ((if_version == 0) | (if_version == records["version"][slots]))
        & ((expires_ms == 0) | (expires_ms > asked_ms))
        & ((op == 0) | (op != records["last_op"][slots]))
    )
    return plain


def _taken(column: Ragged, picks: Indexes) -> Ragged:
    return column if len(picks) == len(column) else column.take(picks)


def _move(rows: TopicRows, slots: Indexes, now_ms: int, mutations: Mutations, picks: Indexes, answers: Answers) -> None:
    records, due_ms = rows.records, mutations.due_ms[picks]
    version = records["version"][slots] + 1
    records["version"][slots] = version
    records["due_ms"][slots] = due_ms
    records["scheduled_ms"][slots] = due_ms
    records["asked_ms"][slots] = now_ms
    records["holder"][slots] = 0
    records["last_op"][slots] = mutations.op[picks]
    rows.place(slots, FREE, due_ms)
    answers.version[picks] = version
    answers.due_ms[picks] = due_ms


def mutate_tag(
    rows: TopicRows,
    walks: Walks,
    settings: TopicSettings,
    now_ms: int,
    mutation: TagMutation,
    cursor: bytes,
    limit: int,
    fast: bool,
) -> TagStep:
    """See `contract.Store.mutate_tag`."""
    tag = rows.tags.find(mutation.tag)
    if not mutation.tag or tag is None:
        return TagStep({}, None)
    ids, after = walks.step(rows, cursor, limit, rows.tagged.get(tag, set()))
    slots = np.array(rows.index.find(ids), dtype=np.intp)
    known = slots >= 0
    slots = slots[known]
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
    answers = _tried(rows, settings, now_ms, chosen, asked) if mutation.dry_run else None
    if answers is None:
        answers = mutate(rows, settings, now_ms, asked, fast)
    codes, many = np.unique(answers.status, return_counts=True)
    counts = dict(zip(codes.tolist(), many.tolist(), strict=True))
    if refused:
        counts[Status.INVALID.code] = counts.get(Status.INVALID.code, 0) + refused
    moved = answers.due_ms[answers.status == Status.OK.code]
    told = len(moved) and mutation.operation is Operation.MOVE and not mutation.dry_run
    return TagStep(
        counts=counts,
        cursor=after,
        earliest_due_ms=int(moved.min()) if told else None,
    )


def _asked(rows: TopicRows, slots: Indexes, mutation: TagMutation) -> Mutations:
    """The tag operation for the messages in `slots`."""
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


def _tried(rows: TopicRows, settings: TopicSettings, now_ms: int, slots: Indexes, mutations: Mutations) -> Answers:
    """What `mutate` would answer; nothing is changed."""
    answers = Answers.blank(len(slots))
    doubtful = ~_plain(rows, slots, now_ms, mutations, np.arange(len(slots)))
    for at in np.flatnonzero(doubtful).tolist():
        ask = mutation_ask(mutations, at)
        fill(answers, at, decide(message_at(rows, int(slots[at])), ask, now_ms, settings))
    return answers
