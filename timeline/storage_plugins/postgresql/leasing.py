"""Leases and settles: the hot half of a message's way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from timeline.columns import Indexes, Int64, Ragged, UInt32
from timeline.leases import deal
from timeline.leases.dealing import turns_of
from timeline.model import Answers, Operation, Rows, Status, Topic, buckets_of
from timeline.storage_plugins.asks import settle_ask
from timeline.storage_plugins.contract import Grant, LeasedRows, Settles
from timeline.storage_plugins.postgresql import lease_statements, statements
from timeline.storage_plugins.postgresql.connections import Connection, Steps
from timeline.storage_plugins.postgresql.messages import Changes, decide_each
from timeline.storage_plugins.postgresql.rows import Part, leased_of, stored_of
from timeline.storage_plugins.sql import signed
from timeline.storage_plugins.sql.search import MOST_REMOVED, burial, buried, met

BYTES_AT_ONCE = 256 * 1024 * 1024
"""Of payloads and headers that one lease reads together; what is left is due at once (`next_due_ms`)."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was leased, and the end of the lease that runs out next."""

    leased: LeasedRows
    end_ms: int | None

    @property
    def nothing(self) -> bool:
        """Whether nothing was leased, nor removed on the way."""
        leased = self.leased
        return not (len(leased.rows) or leased.expired or len(leased.buried))


def nothing_leased(next_due_ms: int | None = None) -> LeasedRows:
    """That nothing was leased."""
    none = Rows.empty(payload=True)
    return LeasedRows(none, np.zeros(0, np.uint32), np.zeros(0, np.int64), Ragged.of([]), next_due_ms)


class Search:
    """Looks for what may be leased, and removes or buries what it meets that has expired or was delivered out."""

    def __init__(
        self, steps: Steps, topic: Topic, now_ms: int, buckets: list[int] | None, due_before_ms: int, overdue_ms: int,
        after_ms: int,
    ) -> None:  # fmt: skip
        self._steps, self._topic, self._now_ms, self._buckets = steps, topic, now_ms, buckets
        self._due_before_ms = due_before_ms
        self._changes = Changes(topic, now_ms)
        free_ms = now_ms - overdue_ms if overdue_ms else max(now_ms, due_before_ms)
        self._after_ms = after_ms
        self._until_ms = {False: free_ms, True: now_ms - max(topic.settings.redelivery_backoff_ms, overdue_ms)}
        self._expired: list[bytes] = []
        self._buried: list[Rows] = []
        self.expired = 0
        self.buried = Rows.empty()

    async def first(self, wanted: int) -> Part:
        """The first `wanted` eligible messages by (due, id). What nobody holds comes from one index, what a lease
        that ran out left from another; both are read in order and merged."""
        eligible: list[Any] = []
        removed = 0
        after = (self._after_ms, b"")
        while len(eligible) < wanted and removed < MOST_REMOVED:
            left = wanted - len(eligible)
            met = await self._steps.use(partial(self._met, after, left), writes=False)
            chosen = [record for record in met if self._may_lease(record)]
            eligible += chosen
            removed += len(met) - len(chosen)
            if len(met) < left:
                break
            after = (met[-1]["due_ms"], met[-1]["id"])
        lost = await self._changes.write(self._steps)
        self.expired = sum(id not in lost for id in self._expired)
        self.buried = Rows.concat([rows for rows in self._buried if rows.ids[0] not in lost])
        return Part.of(eligible)

    async def _met(self, after: tuple[int, bytes], most: int, connection: Connection) -> list[Any]:
        found: list[Any] = []
        for held, until_ms in self._until_ms.items():
            asked = (self._topic.uid, until_ms, self._buckets, *after, most)
            found += await connection.fetch(lease_statements.SEARCH[held], *asked)
        found.sort(key=lambda record: (record["due_ms"], record["id"]))
        return found[:most]

    def _may_lease(self, record: Any) -> bool:
        """Whether this one may be leased: by a glance at it, or by the rules."""
        changes, settings = self._changes, self._topic.settings
        expires_ms, most = record["expires_ms"], settings.max_deliveries
        if not 0 < expires_ms <= self._now_ms and not 0 < most <= record["deliveries"]:
            return True
        stored = changes.met[record["id"]] = stored_of(record)
        status = met(stored.message, self._due_before_ms, self._now_ms, settings)
        if status is Status.EXPIRED:
            changes.remove(stored)
            self._expired.append(stored.id)
        elif status is Status.DEAD:
            ask, decision = burial(stored.message, self._now_ms, settings)
            if decision.status is Status.OK and decision.message is not None:
                changes.apply(stored, ask, decision)
                self._buried.append(buried(Part.of([record]).rows, decision.message))
        return status is Status.OK


async def lease_by_rules(
    steps: Steps, topic: Topic, buckets: list[int] | None, now_ms: int, due_before_ms: int, grants: Sequence[Grant],
    overdue_ms: int, due_from_ms: int,
) -> Found:  # fmt: skip
    """`Store.lease_due`, whatever is met: a search, what it removes, the leases, what comes next. `due_from_ms`:
    nothing is looked for that was due before."""
    search = Search(steps, topic, now_ms, buckets, due_before_ms, overdue_ms, due_from_ms)
    wanted = sum(grant.count for grant in grants)
    eligible = await search.first(wanted) if wanted else Part.of([])
    turns = deal(grants, eligible.sizes)
    leased = await _lease(steps, topic, now_ms, grants, turns, eligible)
    leased.expired, leased.buried = search.expired, search.buried
    if overdue_ms:
        return Found(leased, None)
    free_ms, end_ms = await steps.use(
        lambda connection: first_due(connection, topic, due_from_ms - 1, buckets), writes=False
    )
    held_ms = None if end_ms is None else end_ms + topic.settings.redelivery_backoff_ms
    leased.next_due_ms = _earliest((free_ms, held_ms))
    return Found(leased, end_ms)


async def _lease(
    steps: Steps, topic: Topic, now_ms: int, grants: Sequence[Grant], turns: UInt32, eligible: Part
) -> LeasedRows:
    """Writes the leases as dealt; what somebody else was faster at is left out."""
    if not len(turns):
        return nothing_leased()
    rows = eligible.rows.take(np.arange(len(turns)))
    lease_ms = np.array([grant.lease_ms for grant in grants], dtype=np.int64)
    until_ms: Int64 = np.maximum(rows.due_ms, now_ms) + lease_ms[turns]
    holders = Ragged.of([grants[turn].holder for turn in turns.tolist()])
    asked = (
        topic.uid,
        eligible.buckets[: len(turns)],
        rows.ids.tolist(),
        signed(rows.birth),
        rows.version.tolist(),
        rows.due_ms.tolist(),
        until_ms.tolist(),
        holders.tolist(),
    )
    contents = await steps.use(lambda connection: connection.fetch(lease_statements.LEASE_EACH, *asked), writes=True)
    done = np.array([record[0] for record in contents], dtype=np.intp)
    rows, turns, until_ms, holders = rows.take(done), turns[done], until_ms[done], holders.take(done)
    damaged = tuple(at for at, (_, payload, _) in enumerate(contents) if payload is None)
    held = dataclasses.replace(
        rows,
        due_ms=until_ms,
        version=rows.version + 1,
        deliveries=rows.deliveries + np.uint32(1),
        holders=holders,
        payloads=Ragged.of([payload or b"" for _, payload, _ in contents]),
        headers=Ragged.of([headers or b"" for _, _, headers in contents]),
    )
    return LeasedRows(held, turns, rows.due_ms, rows.holders, None, damaged=damaged)


async def lease_plain(
    connection: Connection,
    topic: Topic,
    buckets: list[int] | None,
    now_ms: int,
    due_before_ms: int,
    grants: Sequence[Grant],
    overdue_ms: int,
    due_from_ms: int,
    end_from_ms: int,
) -> Found | None:
    """`Store.lease_due` by one statement; None where what was met is for the rules, and nothing was done.
    `due_from_ms`: nothing is looked for that was due before; `end_from_ms`: what runs out next does
    not do so before."""
    settings = topic.settings
    backoff_ms = settings.redelivery_backoff_ms
    several = len(grants) > 1
    wanted = sum(grant.count for grant in grants)
    asked: list[Any] = [
        topic.uid,
        now_ms - overdue_ms if overdue_ms else max(now_ms, due_before_ms),
        now_ms - max(backoff_ms, overdue_ms),
        buckets,
        wanted,
        now_ms,
        settings.max_deliveries,
        [grant.lease_ms for grant in grants],
        [grant.holder for grant in grants],
        [min(grant.max_bytes, BYTES_AT_ONCE) for grant in grants],
        (turns_of(grants, wanted) + np.uint32(1)).tolist() if several else grants[0].alone,
        due_from_ms,
        end_from_ms,
    ]
    found = await connection.fetchrow(lease_statements.LEASE[several], *asked)
    if not found["plain"]:
        return None
    leased = leased_of(found, grants)
    ends_ms = [found["next_held_ms"], int(leased.rows.due_ms.min()) if len(leased.rows) else None]
    if not overdue_ms:
        times = [found["free_ms"], found["next_free_ms"]]
        times += [None if end is None else end + backoff_ms for end in (found["held_ms"], *ends_ms)]
        if found["passed"] > 0 or found["fitting"] > len(leased.rows):
            # Somebody else is at some of them, and may leave them as they are. Not at once: a lock may last.
            times.append(now_ms + 1)
        leased.next_due_ms = _earliest(times)
    return Found(leased, _earliest(ends_ms))


def _earliest(times: Iterable[int | None]) -> int | None:
    return min((time for time in times if time is not None), default=None)


async def first_due(
    connection: Connection, topic: Topic, after_ms: int, buckets: list[int] | None
) -> tuple[int | None, int | None]:
    """The earliest due > after_ms of what nobody holds, and of what is held."""
    free, held = await connection.fetchrow(lease_statements.FIRST_DUE, topic.uid, after_ms, buckets)
    return free, held


async def settle_plain(
    topic: Topic, now_ms: int, settles: Settles, chosen: Indexes, answers: Answers, connection: Connection
) -> list[int]:
    """Settles `chosen`, all of one operation, by one statement where token and holder match; answers which it did."""
    operation = Operation(int(settles.operation[chosen[0]]))
    remembers = bool(topic.settings.remember_ms)
    # In one order for everybody, so that calls that meet on the same messages wait, and never for each other.
    order = chosen
    if len(chosen) > 1:
        ids = settles.ids.take(chosen)
        order = chosen[np.lexsort((np.array(ids.tolist()), buckets_of(ids, topic.settings.buckets)))]
    ids = settles.ids.take(order)
    asked = [
        topic.uid,
        buckets_of(ids, topic.settings.buckets).tolist(),
        ids.tolist(),
        signed(settles.birth[order]),
        settles.version[order].tolist(),
        settles.holders.take(order).tolist(),
    ]
    if operation is Operation.ACK:
        record = await connection.fetchrow(statements.ACK[remembers], *asked, *([now_ms] if remembers else []))
        if record[0] is None:
            return []
        done = order[record[0]]
        answers.late[done] = np.array(record[1], dtype=np.int64) <= now_ms
        acked: list[int] = done.tolist()
        return acked
    asked.append(settles.time_ms[order].tolist())
    if operation is Operation.RELEASE:
        asked += [signed(settles.op[order]), settles.unseen[order].tolist()]
    records = await connection.fetch(_PLAIN[operation], *asked, now_ms)
    done = order[[record[0] for record in records]] if records else order[:0]
    answers.due_ms[done] = [record[1] for record in records]
    answers.version[done] = settles.version[done] + (operation is Operation.RELEASE)
    settled: list[int] = done.tolist()
    return settled


_PLAIN = {Operation.EXTEND: statements.EXTEND, Operation.RELEASE: statements.RELEASE}


def plain_settles(settles: Settles) -> list[Indexes]:
    """What of a batch may be settled by a statement for each operation: nothing where an id comes twice."""
    if len(set(settles.ids.tolist())) < len(settles):
        return []
    parts = (np.flatnonzero(settles.operation == operation) for operation in (Operation.ACK, *_PLAIN))
    return [part for part in parts if len(part)]


async def settle(steps: Steps, topic: Topic, now_ms: int, settles: Settles) -> Answers:
    """`Store.settle`: a statement for each operation where tokens match, the rest by the rules."""
    answers = Answers.blank(len(settles))
    left = list(range(len(settles)))
    for chosen in plain_settles(settles):
        act = partial(settle_plain, topic, now_ms, settles, chosen, answers)
        done = await steps.use(act, writes=True)
        left = [] if len(done) == len(left) else sorted(set(left).difference(done))
    if left:
        ids = settles.ids.tolist()
        asks = [settle_ask(settles, at) for at in left]
        await decide_each(steps, topic, now_ms, [ids[at] for at in left], asks, answers, left)
    return answers
