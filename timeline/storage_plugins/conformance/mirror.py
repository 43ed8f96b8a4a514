"""A topic as plain as can be: a dictionary of messages, and `leases.decide` for everything. What stores are held to.

Each call takes what a store was asked and answered, works out what the answer must be, and raises Violation where it
is another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from timeline.leases import Ask, Decision, Message, decide
from timeline.leases.table import REMEMBERED, is_expired, state_of
from timeline.model import Answers, Displaced, Operation, Rows, State, Status, Topic, bucket_of, decode_headers
from timeline.storage_plugins.conformance.trial import Violation, by_id, expect, expect_equal
from timeline.storage_plugins.contract import Grant, Leased, Mutations, Puts, Settles, Swept, TagMutation

DELIVERED_OUT = b"max_deliveries"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is fixed of a message besides what the rules look at."""

    put_ms: int
    tag: bytes
    payload: bytes
    headers: bytes


class Mirror:
    """The messages of one topic as they must stand."""

    def __init__(self, topic: Topic) -> None:
        self.topic = topic
        self.messages: dict[bytes, Message] = {}
        self.kept: dict[bytes, Kept] = {}

    # ── one message ──

    def _ask(self, id: bytes, ask: Ask, now_ms: int) -> Decision:
        """What must become of `ask`, done here."""
        message = self.messages.get(id)
        decision = decide(message, ask, now_ms, self.topic.settings)
        if message is None or decision.repeat or not (decision.status is Status.OK or decision.expired):
            return decision
        if decision.expired or decision.message is None:
            self._remove(id, ask, decision.expired)
        elif not decision.born:
            self.messages[id] = decision.message
        return decision

    def _remove(self, id: bytes, ask: Ask, expired: bool) -> None:
        message = self.messages.pop(id)
        del self.kept[id]
        if self.topic.settings.remember_ms and (expired or ask.operation in REMEMBERED):
            cancelled = ask.operation is Operation.CANCEL and not expired
            last_op = ask.op if cancelled else message.last_op
            self.messages[id] = Message(
                message.birth, message.version, last_op=last_op, payload_sum=message.payload_sum, remembered=True
            )

    def _expire(self, id: bytes) -> None:
        self._remove(id, Ask(Operation.LEASE), expired=True)

    # ── calls ──

    def put(self, now_ms: int, puts: Puts, answers: Answers) -> None:
        decisions = []
        for at, id in enumerate(puts.ids.tolist()):
            ask = Ask(
                Operation.PUT,
                time_ms=int(puts.due_ms[at]),
                birth=int(puts.birth[at]),
                group=puts.groups[at],
                payload_sum=int(puts.payload_sum[at]),
                expires_ms=int(puts.expires_ms[at]),
                move=bool(puts.move[at]),
                replace=bool(puts.replace[at]),
            )
            decision = self._ask(id, ask, now_ms)
            if decision.born and decision.message is not None:
                self.messages[id] = decision.message
                self.kept[id] = Kept(now_ms, puts.tags[at], puts.payloads[at], puts.headers[at])
            decisions.append(decision)
        _compare("put", puts.ids.tolist(), answers, decisions)
        displaced = {
            at: Displaced(decision.displaced.birth, decision.displaced.version, decision.expired)
            for at, decision in enumerate(decisions)
            if decision.displaced is not None
        }
        expect_equal(answers.displaced, displaced, "what puts displaced")

    def settle(self, now_ms: int, settles: Settles, answers: Answers) -> None:
        decisions = []
        for at, id in enumerate(settles.ids.tolist()):
            ask = Ask(
                Operation(int(settles.operation[at])),
                time_ms=int(settles.time_ms[at]),
                birth=int(settles.birth[at]),
                version=int(settles.version[at]),
                holder=settles.holders[at],
                op=int(settles.op[at]),
                unseen=bool(settles.unseen[at]),
                reason=settles.reasons[at],
            )
            decisions.append(self._ask(id, ask, now_ms))
        operations = [Operation(int(code)).name for code in settles.operation]
        _compare("settle", settles.ids.tolist(), answers, decisions, operations)

    def mutate(self, now_ms: int, mutations: Mutations, answers: Answers) -> None:
        decisions = []
        for at, id in enumerate(mutations.ids.tolist()):
            ask = Ask(
                mutations.operation,
                time_ms=int(mutations.due_ms[at]),
                group=mutations.groups[at],
                if_version=int(mutations.if_version[at]),
                leased=bool(mutations.leased[at]),
                op=int(mutations.op[at]),
            )
            decisions.append(self._ask(id, ask, now_ms))
        _compare(mutations.operation.name.lower(), mutations.ids.tolist(), answers, decisions)

    def mutate_tag(self, now_ms: int, mutation: TagMutation, counts: dict[Status, int]) -> None:
        wanted: dict[Status, int] = {}
        for id in [id for id, kept in self.kept.items() if kept.tag == mutation.tag]:
            if not mutation.meets(self.kept[id].put_ms, self.messages[id].asked_ms, self.messages[id].last_op):
                continue
            due_ms = mutation.due_ms or self.messages[id].scheduled_ms + mutation.by_ms
            beyond = mutation.operation is Operation.MOVE and due_ms > mutation.latest_ms
            if beyond and self.messages[id].last_op != mutation.op:
                wanted[Status.INVALID] = wanted.get(Status.INVALID, 0) + 1
                continue
            ask = Ask(mutation.operation, time_ms=due_ms, group=mutation.group, leased=mutation.leased, op=mutation.op)
            if mutation.dry_run:
                status = decide(self.messages[id], ask, now_ms, self.topic.settings).status
            else:
                status = self._ask(id, ask, now_ms).status
            wanted[status] = wanted.get(status, 0) + 1
        expect_equal(dict(sorted(counts.items())), dict(sorted(wanted.items())), "counts of a tag operation")

    def lease(
        self,
        now_ms: int,
        due_before_ms: int,
        buckets: Sequence[int] | None,
        grants: Sequence[Grant],
        leased: Leased,
        left: set[bytes],
        overdue_ms: int = 0,
    ) -> None:
        """`left`: the ids that the store still has after the call, which tells whose expiry was met."""
        here = self._in_buckets(buckets)
        if overdue_ms:
            here = [id for id in here if self.messages[id].due_ms <= now_ms - overdue_ms]
            due_before_ms = 0
        decided = {
            id: decide(self.messages[id], _lease_ask(b"?", 1, due_before_ms), now_ms, self.topic.settings)
            for id in here
        }
        eligible = {id for id, decision in decided.items() if decision.status is Status.OK}
        rows = by_id(leased.rows)
        expect(rows.keys() <= eligible, f"leased, though not eligible: {sorted(rows.keys() - eligible)}")
        wanted = sum(grant.count for grant in grants)
        plenty = all(grant.max_bytes >= 1 << 30 for grant in grants)
        if plenty:
            expect_equal(len(rows), min(wanted, len(eligible)), "number of messages leased")
        self._expect_order(leased.rows, eligible)
        for at, id in enumerate(leased.rows.ids.tolist()):
            before, grant = self.messages[id], grants[int(leased.grant[at])]
            expect_equal(int(leased.was_due_ms[at]), before.due_ms, f"was_due_ms of {id!r}")
            expect_equal(leased.prior_holders[at], before.holder, f"prior holder of {id!r}")
            self._ask(id, _lease_ask(grant.holder, grant.lease_ms, due_before_ms), now_ms)
            self.expect_row(id, rows[id])
        met_all = plenty and len(rows) < wanted
        self._bury(now_ms, decided, leased.buried, met_all)
        self._meet_expired(now_ms, decided, leased.expired, left, met_all)
        if not overdue_ms:
            self._expect_next_due(here, now_ms, leased.next_due_ms)

    def _in_buckets(self, buckets: Sequence[int] | None) -> list[bytes]:
        count = self.topic.settings.buckets
        return [id for id in self.messages if buckets is None or bucket_of(id, count) in buckets]

    def _expect_order(self, rows: Rows, eligible: set[bytes]) -> None:
        """Within each bucket: the first of what is eligible, by (due, id)."""
        count = self.topic.settings.buckets
        came: dict[int, list[bytes]] = {}
        for id in rows.ids.tolist():
            came.setdefault(bucket_of(id, count), []).append(id)
        for bucket, ids in came.items():
            there = [id for id in eligible if bucket_of(id, count) == bucket]
            first = sorted(there, key=lambda id: (self.messages[id].due_ms, id))[: len(ids)]
            expect_equal(ids, first, f"order by (due, id) of what was leased from bucket {bucket}")

    def _bury(self, now_ms: int, decided: dict[bytes, Decision], buried: Rows, met_all: bool) -> None:
        spent = {
            id
            for id, decision in decided.items()
            if decision.status is Status.DEAD and state_of(decision.message, now_ms) is State.AVAILABLE
        }
        rows = by_id(buried)
        expect(rows.keys() <= spent, f"buried, though not delivered out: {sorted(rows.keys() - spent)}")
        if met_all:
            expect_equal(sorted(rows), sorted(spent), "what was delivered max_deliveries times and is buried instead")
        for id, row in rows.items():
            self.messages[id] = replace(self.messages[id], dead=DELIVERED_OUT, died_ms=max(1, now_ms))
            self.expect_row(id, row)

    def _meet_expired(
        self, now_ms: int, decided: dict[bytes, Decision], count: int, left: set[bytes], met_all: bool
    ) -> None:
        expired = {id for id, decision in decided.items() if decision.status is Status.EXPIRED}
        gone = expired - left
        expect_equal(count, len(gone), "number of expired messages that a lease met")
        if met_all:
            due = {id for id in expired if self.messages[id].due_ms <= now_ms}
            expect(due <= gone, f"met, expired and not removed: {sorted(due - gone)}")
        for id in gone:
            self._expire(id)

    def _expect_next_due(self, here: list[bytes], now_ms: int, next_due_ms: int | None) -> None:
        backoff_ms = self.topic.settings.redelivery_backoff_ms
        all_ms, sound_ms = [], []
        for id in here:
            message = self.messages.get(id)
            if message is None or message.remembered or message.died_ms:
                continue
            all_ms.append(message.due_ms + (backoff_ms if message.holder else 0))
            if not is_expired(message, now_ms):
                sound_ms.append(all_ms[-1])
        allowed = {min(all_ms, default=None), min(sound_ms, default=None)}
        expect(next_due_ms in allowed, f"next_due_ms is {next_due_ms}, where {allowed} is allowed")

    def sweep(self, now_ms: int, swept: Swept) -> None:
        """For a sweep without a bound that matters, of a topic whose remembered ids are all within their time."""
        retention_ms = self.topic.settings.dead_retention_ms
        expired, dead = 0, 0
        for id, message in list(self.messages.items()):
            if message.remembered:
                continue
            if is_expired(message, now_ms):
                self._expire(id)
                expired += 1
            elif message.died_ms and 0 < retention_ms < now_ms - message.died_ms:
                del self.messages[id], self.kept[id]
                dead += 1
        expect_equal(
            (swept.expired, swept.dead_purged), (expired, dead), "(expired, dead letters) that a sweep removed"
        )

    # ── rows ──

    def expect_row(self, id: bytes, row: dict[str, Any]) -> None:
        """That `row` says what must stand under `id`."""
        message, kept = self.messages[id], self.kept[id]
        wanted = {
            **{name: getattr(message, name) for name in _SAME},
            "groups": message.group,
            "holders": message.holder,
            "tags": kept.tag,
            "put_ms": kept.put_ms,
            "payload_bytes": len(kept.payload),
        }
        if "payloads" in row:
            wanted["payloads"] = kept.payload
            wanted["headers"] = decode_headers(kept.headers)
            row = {**row, "headers": decode_headers(row["headers"])}
        for name, value in wanted.items():
            expect_equal(row[name], value, f"{name} of {id!r}")

    def expect_everything(self, rows: dict[bytes, dict[str, Any]]) -> None:
        """That these are all rows there must be."""
        wanted = {id for id, message in self.messages.items() if not message.remembered}
        expect(
            rows.keys() == wanted,
            f"missing: {sorted(wanted - rows.keys())}; too many: {sorted(rows.keys() - wanted)}",
        )
        for id, row in rows.items():
            self.expect_row(id, row)


_SAME = (
    *("birth", "version", "due_ms", "scheduled_ms", "asked_ms", "deliveries", "last_op", "expires_ms"),
    *("payload_sum", "died_ms", "dead"),
)


def _lease_ask(holder: bytes, lease_ms: int, due_before_ms: int) -> Ask:
    return Ask(Operation.LEASE, time_ms=lease_ms, holder=holder, due_before_ms=due_before_ms)


def _compare(
    call: str, ids: list[bytes], answers: Answers, decisions: list[Decision], operations: Sequence[str] = ()
) -> None:
    expect_equal(len(answers), len(decisions), f"number of answers to a {call}")
    for at, decision in enumerate(decisions):
        message = decision.message
        wanted = (
            decision.status,
            message.version if message else 0,
            message.due_ms if message else 0,
            decision.settled,
            decision.late,
            decision.repeat,
        )
        found = (
            Status.of(int(answers.status[at])),
            int(answers.version[at]),
            int(answers.due_ms[at]),
            bool(answers.settled[at]),
            bool(answers.late[at]),
            bool(answers.repeat[at]),
        )
        if found != wanted:
            what = f"{call} {operations[at] if operations else ''}".strip()
            raise Violation(
                f"(status, version, due, settled, late, repeat) of {what} {ids[at]!r}: {found} where {wanted} must be"
            )
