"""Moves, cancels, revives and purges inside a transaction, by id and by tag."""

from __future__ import annotations

from collections import Counter

from timeline.leases import Ask, decide
from timeline.model import MAX_TIME_MS, Answers, Operation, Status, Topic, buckets_of
from timeline.storage_plugins.contract import Mutations, TagMutation, TagStep
from timeline.storage_plugins.sql import TAGGED
from timeline.storage_plugins.sqlite import statements
from timeline.storage_plugins.sqlite.messages import Changes, decide_each, stored_of
from timeline.storage_plugins.sqlite.writer import Transaction


def mutate(transaction: Transaction, topic: Topic, key: int, now_ms: int, mutations: Mutations) -> Answers:
    """`Store.mutate`."""
    count = len(mutations)
    answers = Answers.blank(count)
    changes = Changes(transaction, topic, key, now_ms)
    columns = (mutations.groups, mutations.due_ms, mutations.if_version, mutations.leased, mutations.op)
    asks = [
        Ask(mutations.operation, time_ms=due_ms, group=group, if_version=if_version, leased=leased, op=op)
        for group, due_ms, if_version, leased, op in zip(*(column.tolist() for column in columns), strict=True)
    ]
    ids, buckets = mutations.ids.tolist(), buckets_of(mutations.ids, topic.settings.buckets).tolist()
    decide_each(changes, ids, buckets, asks, answers, range(count))
    changes.write()
    return answers


def place_after(cursor: bytes) -> tuple[int, bytes]:
    """Where a walk over (bucket, id) goes on; before everything for an empty cursor."""
    return (int.from_bytes(cursor[:4], "big"), cursor[4:]) if cursor else (-1, b"")


def cursor_at(bucket: int, id: bytes) -> bytes:
    """The cursor of a walk that has passed (bucket, id)."""
    return bucket.to_bytes(4, "big") + id


_TAGGED = statements.WHOLE.over(
    f"(SELECT {statements.WHOLE.inner} FROM message INDEXED BY message_tag "
    f"WHERE topic = ? AND {TAGGED} AND tag = ? AND (bucket, id) > (?, ?) ORDER BY bucket, id LIMIT ?)"
)


def mutate_tag(
    transaction: Transaction, topic: Topic, key: int, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int
) -> TagStep:
    """`Store.mutate_tag`."""
    limit = max(1, limit)
    found = statements.WHOLE.read(transaction.connection, _TAGGED, (key, mutation.tag, *place_after(cursor), limit))
    changes = Changes(transaction, topic, key, now_ms)
    counts: Counter[int] = Counter()
    moved: list[int] = []
    ids, put_ms = found.strings["id"].tolist(), found.numbers["put_ms"]
    for id, at_ms, stored in zip(ids, put_ms, stored_of(found), strict=True):
        if at_ms > mutation.started_ms:
            continue
        due_ms = mutation.due_ms
        if mutation.operation is Operation.MOVE and due_ms == 0:
            due_ms = min(max(0, stored.message.scheduled_ms + mutation.by_ms), MAX_TIME_MS)
        ask = Ask(mutation.operation, time_ms=due_ms, group=mutation.group, op=mutation.op, leased=mutation.leased)
        decision = decide(stored.message, ask, now_ms, topic.settings)
        counts[decision.status.code] += 1
        if mutation.dry_run:
            continue
        changes.apply(stored, id, ask, decision)
        if decision.status is Status.OK and decision.message is not None:
            moved.append(decision.message.due_ms)
    changes.write()
    after = None
    if found.count == limit:
        after = cursor_at(int(buckets_of(found.strings["id"][-1:], topic.settings.buckets)[0]), ids[-1])
    return TagStep(dict(counts), after, min(moved, default=None))


__all__ = ["cursor_at", "mutate", "mutate_tag", "place_after"]
