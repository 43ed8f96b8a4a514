"""Every message and every question that can make a difference to the rules, enumerated around one instant."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from timeline.leases.table import Ask, Message
from timeline.model import Operation, TopicSettings

NOW = 1_000_000
BIRTH, VERSION, OP, SUM = 7, 5, 91, 0xFEED
ANNA, BEN = b"anna", b"ben"
MAX_DELIVERIES, BACKOFF_MS, WINDOW_MS = 3, 25, 15

DUES = (NOW - 2 * BACKOFF_MS, NOW - BACKOFF_MS, NOW - 1, NOW, NOW + 1, NOW + WINDOW_MS, NOW + WINDOW_MS + 1)
EXPIRIES = (0, NOW - 5, NOW, NOW + 1, NOW + 30)
TIMES = (NOW - 20, NOW, NOW + 1, NOW + 29, NOW + 30, NOW + 100)
TOKENS = ((BIRTH, VERSION), (BIRTH, VERSION - 1), (BIRTH, VERSION + 1), (BIRTH + 1, VERSION))
HOLDERS = (ANNA, BEN, b"")
GROUPS = (b"ops", b"sales")

PLAIN = TopicSettings(max_deliveries=MAX_DELIVERIES)
STRICT = TopicSettings(max_deliveries=MAX_DELIVERIES, redelivery_backoff_ms=BACKOFF_MS)
ENDLESS = TopicSettings(max_deliveries=0)
REMEMBERING = TopicSettings(max_deliveries=MAX_DELIVERIES, remember_ms=60_000)

Question = tuple[Message | None, Ask, TopicSettings]


def messages(
    deliveries: tuple[int, ...] = (1,), scheduled: tuple[int, ...] = (NOW - 60,), last_ops: tuple[int, ...] = (0, OP)
) -> list[Message | None]:
    """A message in every state: absent, remembered, and living or dead at every due, with every holder and expiry."""
    told: list[Message | None] = [None]
    told += [Message(birth, 4, last_op=op, payload_sum=SUM, remembered=True) for birth in (0, 7) for op in last_ops]
    for due, holder, dead, expires, count, planned, op in product(
        DUES, (b"", ANNA), (b"", b"why"), EXPIRIES, deliveries, scheduled, last_ops
    ):
        told.append(
            Message(
                birth=BIRTH,
                version=VERSION,
                due_ms=due,
                scheduled_ms=planned,
                asked_ms=NOW - 500,
                holder=holder,
                deliveries=count,
                last_op=op,
                group=b"ops",
                expires_ms=expires,
                payload_sum=SUM,
                died_ms=NOW - 3 if dead else 0,
                dead=dead,
            )
        )
    return told


def settles(operation: Operation, times: tuple[int, ...] = (0,), ops: tuple[int, ...] = (0,)) -> list[Ask]:
    """The operation by every holder with every token."""
    return [
        Ask(operation, time_ms=time, birth=birth, version=version, holder=holder, op=op, reason=b"broken")
        for (birth, version), holder, time, op in product(TOKENS, HOLDERS, times, ops)
    ]


def mutations(operation: Operation, times: tuple[int, ...] = (0,), leased: tuple[bool, ...] = (False,)) -> list[Ask]:
    """The operation by every group, with and without a version."""
    return [
        Ask(operation, time_ms=time, group=group, op=op, if_version=version, leased=also)
        for time, group, op, version, also in product(times, GROUPS, (0, OP, OP + 1), (0, VERSION, VERSION - 1), leased)
    ]


def _puts() -> list[Ask]:
    return [
        Ask(
            Operation.PUT, time_ms=time, birth=birth, group=group, payload_sum=sum, expires_ms=expires,
            move=how == "move", replace=how == "replace",
        )
        for time, birth, group, sum, expires, how in product(
            TIMES, (BIRTH, OP, OP + 1), GROUPS, (SUM, SUM + 1), (0, NOW, NOW + 30), ("", "move", "replace")
        )
    ]  # fmt: skip


def _leases() -> list[Ask]:
    return [
        Ask(Operation.LEASE, time_ms=40, holder=holder, due_before_ms=window)
        for holder, window in product((ANNA, BEN), (0, NOW, NOW + WINDOW_MS))
    ]


def _releases() -> Iterator[Question]:
    asks = settles(Operation.RELEASE, TIMES, (0, OP, OP + 1))
    yield from product(messages((0, 1)), asks, (PLAIN,))
    unseen = [
        Ask(Operation.RELEASE, birth=ask.birth, version=ask.version, holder=ask.holder, op=ask.op, unseen=True)
        for ask in settles(Operation.RELEASE, ops=(0, OP, OP + 1))
    ]
    yield from product(messages((0, 1), (NOW - 60, NOW, NOW + 29, NOW + 30)), unseen, (PLAIN,))


def questions(operation: Operation) -> Iterator[Question]:
    """Every (message, question, settings) of `operation` that can make a difference."""
    counts = (0, 1, MAX_DELIVERIES)
    match operation:
        case Operation.PUT:
            return product(messages(), _puts(), (PLAIN, REMEMBERING))
        case Operation.LEASE:
            return product(messages(counts), _leases(), (PLAIN, STRICT, ENDLESS))
        case Operation.EXTEND:
            return product(messages(), settles(operation, TIMES), (PLAIN,))
        case Operation.REGRANT:
            return product(messages(counts, last_ops=(0,)), settles(operation, TIMES), (PLAIN, ENDLESS))
        case Operation.ACK:
            return product(messages(), settles(operation), (PLAIN, STRICT))
        case Operation.RELEASE:
            return _releases()
        case Operation.BURY:
            return product(messages(counts), settles(operation), (PLAIN, ENDLESS))
        case Operation.CANCEL:
            return product(messages(), mutations(operation, leased=(False, True)), (PLAIN,))
        case Operation.PURGE:
            return product(messages(), mutations(operation), (PLAIN,))
        case _:
            return product(messages(), mutations(operation, TIMES), (PLAIN,))
