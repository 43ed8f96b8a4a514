"""Moves, cancels, revives and purges inside a transaction, by id."""

from __future__ import annotations

from timeline.leases import Ask
from timeline.model import Answers, Topic, buckets_of
from timeline.storage_plugins.contract import Mutations
from timeline.storage_plugins.sqlite.messages import Changes, decide_each
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


__all__ = ["cursor_at", "mutate", "place_after"]
