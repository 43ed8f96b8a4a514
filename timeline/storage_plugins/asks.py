"""Between a call's columns and the rules: each message's question, and the rules' decision as its answer.

Also for scans: whether a message matches, and cursors along (bucket, id). For leases: what becomes of messages whose
payloads cannot be read.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, Decision, Message, state_of
from timeline.leases.table import REMEMBERED
from timeline.model import Answers, Displaced, Operation, Rows, State, Status, Topic, buckets_of
from timeline.storage_plugins.contract import Mutations, Page, Puts, ScanFilter, Settles, TagMutation
from timeline.storage_plugins.errors import StoreError, StoreUnavailable

log = logging.getLogger("timeline.store")

READ_AGAIN_MS = 5_000
"""How long a message rests whose payload could not be read now."""
LIVING = frozenset((State.WAITING, State.AVAILABLE, State.LEASED))


def put_asks(puts: Puts) -> list[Ask]:
    """Return the question to the rules for each put."""
    columns = (puts.due_ms, puts.birth, puts.groups, puts.payload_sum, puts.expires_ms, puts.move, puts.replace)
    rows = zip(*(one.tolist() for one in columns), strict=True)
    return [
        Ask(
            Operation.PUT, time_ms=due_ms, birth=birth, group=group, payload_sum=sum_, expires_ms=expires_ms,
            move=move, replace=replace,
        )
        for due_ms, birth, group, sum_, expires_ms, move, replace in rows
    ]  # fmt: skip


def settle_asks(settles: Settles) -> list[Ask]:
    """Return the question to the rules for each settle."""
    numbers = (settles.operation, settles.time_ms, settles.birth, settles.version, settles.op, settles.unseen)
    columns = (*(one.tolist() for one in numbers), settles.holders.tolist(), settles.reasons.tolist())
    return [
        Ask(Operation(operation), time_ms, birth, version, holder, op=op, unseen=unseen, reason=reason)
        for operation, time_ms, birth, version, op, unseen, holder, reason in zip(*columns, strict=True)
    ]


def mutation_asks(mutations: Mutations) -> list[Ask]:
    """Return the question to the rules for each mutation."""
    columns = (mutations.groups, mutations.due_ms, mutations.if_version, mutations.leased, mutations.op)
    return [
        Ask(mutations.operation, time_ms=due_ms, group=group, if_version=if_version, leased=leased, op=op)
        for group, due_ms, if_version, leased, op in zip(*(one.tolist() for one in columns), strict=True)
    ]


def tag_ask(mutation: TagMutation, message: Message) -> Ask | None:
    """Return the question to the rules for one message of a tag operation. None: INVALID, for it would move the message
    beyond the latest due, and has not done so before."""
    due_ms = mutation.due_ms
    if mutation.operation is Operation.MOVE:
        due_ms = due_ms or max(0, message.scheduled_ms + mutation.by_ms)
        if due_ms > mutation.latest_ms and message.last_op != mutation.op:
            return None
    return Ask(mutation.operation, time_ms=due_ms, group=mutation.group, op=mutation.op, leased=mutation.leased)


def fill(answers: Answers, at: int, decision: Decision) -> None:
    """Write a decision as answer `at`."""
    answers.status[at] = decision.status.code
    answers.version[at] = decision.message.version if decision.message is not None else 0
    answers.due_ms[at] = decision.message.due_ms if decision.message is not None else 0
    answers.settled[at] = decision.settled
    answers.late[at] = decision.late
    answers.repeat[at] = decision.repeat
    answers.displaced.pop(at, None)  # of an attempt that somebody else made void
    if decision.displaced is not None:
        answers.displaced[at] = Displaced(decision.displaced.birth, decision.displaced.version, decision.expired)


def fail(answers: Answers, places: list[int], error: StoreError) -> None:
    """Write that the messages at `places` failed with `error`."""
    nothing = isinstance(error, StoreUnavailable)
    answers.status[places] = (Status.UNAVAILABLE if nothing else Status.UNKNOWN).code
    answers.version[places] = answers.due_ms[places] = 0
    answers.settled[places] = answers.late[places] = answers.repeat[places] = 0
    answers.details.update(dict.fromkeys(places, error.reason))
    for at in places:
        answers.displaced.pop(at, None)


def removal(ask: Ask, decision: Decision) -> tuple[int, bool] | None:
    """Return what a decision leaves of the message that stood: the operation id of its remains, and whether a topic
    that remembers keeps any. None: the message stands."""
    if decision.expired:
        return 0, True
    if decision.displaced is not None:
        return 0, False
    if decision.status is not Status.OK or decision.message is not None or decision.repeat:
        return None
    return ask.op if ask.operation is Operation.CANCEL else 0, ask.operation in REMEMBERED


def matches(where: ScanFilter, message: Message, tag: bytes, now_ms: int) -> bool:
    """Return whether a scan returns a message, its `where.ids` apart."""
    return (
        state_of(message, now_ms) in (where.states or LIVING)
        and (not where.tag or tag == where.tag)
        and message.due_ms >= where.due_from_ms
        and (not where.due_to_ms or message.due_ms < where.due_to_ms)
    )


def cursor_at(bucket: int, id: bytes) -> bytes:
    """Return the cursor of a walk that has passed (bucket, id)."""
    return bucket.to_bytes(4, "big") + id


def places_of(ids: Ragged, buckets: int, cursor: bytes, limit: int) -> tuple[list[tuple[int, bytes]], bytes | None]:
    """Return a page of a scan of `ids`, as (bucket, id) in order, and where to go on (None: no more)."""
    distinct = Ragged.of(list(set(ids.tolist())))
    places = sorted(zip(buckets_of(distinct, buckets).tolist(), distinct.tolist(), strict=True))
    if cursor:
        places = [place for place in places if place > place_of(cursor)]
    return places[:limit], cursor_at(*places[limit - 1]) if len(places) > limit else None


def place_of(cursor: bytes) -> tuple[int, bytes]:
    """Return the (bucket, id) that a walk with this cursor has passed; (0, empty) at its start."""
    return (int.from_bytes(cursor[:4], "big"), cursor[4:]) if cursor else (0, b"")


async def give_back(
    settle: Callable[[Topic, int, Settles], Awaitable[Answers]], topic: Topic, now_ms: int, rows: Rows, why: str
) -> int:
    """Release leased messages unseen, as their payloads could not be read. They rest for `READ_AGAIN_MS`, but not
    beyond their expiry. Return when the first of them is due again. `settle`: the store's."""
    log.warning("%d payloads of %s cannot be read now: %s", len(rows), topic.name, why)
    rested_ms = now_ms + READ_AGAIN_MS
    last_ms = np.where(rows.expires_ms > 0, np.maximum(rows.expires_ms - 1, now_ms), rested_ms)
    until_ms = np.minimum(last_ms, rested_ms)
    for until in np.unique(until_ms).tolist():
        part = rows.take(until_ms == until)
        op = np.array([1 + secrets.randbits(63) for _ in range(len(part))], dtype=np.uint64)
        settles = Settles.of(part, operation=Operation.RELEASE, time_ms=until, op=op, unseen=True)
        try:
            await settle(topic, until, settles)  # as of the end of their rest
        except StoreError as trouble:
            log.warning("they stay leased until their leases run out: %s", trouble.detail)
    return int(until_ms.min())


async def pages(read: Callable[[bytes], Awaitable[Page]]) -> AsyncIterator[Rows]:
    """Yield the rows of a walk, page by page. `read`: returns the page at a cursor."""
    cursor: bytes | None = b""
    while cursor is not None:
        page = await read(cursor)
        yield page.rows
        cursor = page.cursor
