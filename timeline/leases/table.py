"""The operation table: (state, operation, caller) → effect or status.

Read it as data. `EFFECTS` has an entry for each legal (state, operation). `GUARDS` lists for each operation the
conditions that refuse it, each with its status. All guards are asked. If several refuse, `model.PRECEDENCE` decides
which status is the answer. A message is a value; effects return a new one, or None when it is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from timeline.kinds import Kind, kind_of
from timeline.model import DELIVERED_OUT as DELIVERED_OUT
from timeline.model import PRECEDENCE, Operation, State, Status, TopicSettings


@dataclass(frozen=True, slots=True)
class Message:
    """The part of a stored message that the rules need."""

    birth: int
    version: int
    due_ms: int = 0
    scheduled_ms: int = 0
    asked_ms: int = 0
    holder: bytes = b""
    deliveries: int = 0
    last_op: int = 0
    group: bytes = b"default"
    expires_ms: int = 0
    payload_sum: int = 0
    died_ms: int = 0
    dead: bytes = b""
    remembered: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One operation with its arguments; those an operation does not use are ignored.

    `time_ms` is absolute for PUT, MOVE, RELEASE and REVIVE (the asked due), and for EXTEND and REGRANT (the asked end
    of the lease). For LEASE it is the lease's length. `due_before_ms`: LEASE, how far ahead of time. `op`: the
    operation's id, 0 none.
    """

    operation: Operation
    time_ms: int = 0
    birth: int = 0
    version: int = 0
    holder: bytes = b""
    group: bytes = b"default"
    op: int = 0
    payload_sum: int = 0
    expires_ms: int = 0
    move: bool = False
    replace: bool = False
    leased: bool = False
    unseen: bool = False
    if_version: int = 0
    reason: bytes = b""
    due_before_ms: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The status, the message as it then stands (None: gone or never there), and notes. `settled`: the id is
    remembered. `late`: an ack after the lease ran out. `repeat`: this very call was done before. `born`: `message` is
    a put's own, new one. `expired`: what stood had expired, and is gone. `displaced`: what stood when a put came, and
    is gone, because it had expired or for the new one."""

    status: Status
    message: Message | None
    settled: bool = False
    late: bool = False
    repeat: bool = False
    born: bool = False
    expired: bool = False
    displaced: Message | None = None


def state_of(message: Message | None, now_ms: int) -> State:
    """*dead* if it died; else *leased* if it has a holder and its due lies ahead; else *waiting* or *available*."""
    if message is None:
        return State.ABSENT
    if message.remembered:
        return State.SETTLED
    if message.died_ms:
        return State.DEAD
    if message.due_ms <= now_ms:
        return State.AVAILABLE
    return State.LEASED if message.holder else State.WAITING


def is_expired(message: Message, now_ms: int) -> bool:
    """Expired: past its expiry, and neither under a live lease nor a dead letter."""
    return 0 < message.expires_ms <= now_ms and state_of(message, now_ms) in (State.WAITING, State.AVAILABLE)


@dataclass(frozen=True, slots=True)
class _Case:
    """The arguments of guards and effects."""

    message: Message
    ask: Ask
    now_ms: int
    settings: TopicSettings
    state: State
    kind: Kind


Guard = Callable[[_Case], bool]
Effect = Callable[[_Case], Message | None]


def _not_there(case: _Case) -> bool:
    return case.state in (State.ABSENT, State.SETTLED)


def _not_owner(case: _Case) -> bool:
    return case.message.group != case.ask.group


def _other_token(case: _Case) -> bool:
    message, ask = case.message, case.ask
    return (message.birth, message.version, message.holder) != (ask.birth, ask.version, ask.holder)


def _not_holder(case: _Case) -> bool:
    """Another token or holder, or none: a message without holder cannot be settled."""
    return _other_token(case) or not case.message.holder


def _not_to_bury(case: _Case) -> bool:
    """Like `_not_holder`; but what was delivered out and came back without a holder is the broker's to bury."""
    given_up = case.state is State.AVAILABLE and _delivered_out(case)
    return _other_token(case) or not (case.message.holder or given_up)


def _other_version(case: _Case) -> bool:
    return case.ask.if_version not in (0, case.message.version)


def _is_leased(case: _Case) -> bool:
    return case.state is State.LEASED


def _is_leased_and_spared(case: _Case) -> bool:
    return case.state is State.LEASED and not case.ask.leased


def _is_dead(case: _Case) -> bool:
    return case.state is State.DEAD


def _is_alive(case: _Case) -> bool:
    return case.state is not State.DEAD


def _has_expired(case: _Case) -> bool:
    return is_expired(case.message, case.now_ms)


def _beyond_expiry(case: _Case) -> bool:
    return 0 < case.message.expires_ms <= case.ask.time_ms


def _living_beyond_expiry(case: _Case) -> bool:
    """Return whether a message that has not expired would be due at or after its expiry."""
    return _beyond_expiry(case) and not _has_expired(case)


def _released_beyond_expiry(case: _Case) -> bool:
    return 0 < case.message.expires_ms <= _released_due(case)


def _not_yet(case: _Case) -> bool:
    """Neither available (after the backoff, where a lease ran out) nor waiting within the lease-ahead window."""
    message, now_ms = case.message, case.now_ms
    if case.state is State.AVAILABLE:
        return bool(message.holder) and case.kind.due_after_expiry(message, case.settings) > now_ms
    return case.state is State.WAITING and message.due_ms > case.ask.due_before_ms


def _delivered_out(case: _Case) -> bool:
    return 0 < case.settings.max_deliveries <= case.message.deliveries


def _never_deliverable(case: _Case) -> bool:
    due_ms = case.kind.due_of_put(case.ask.time_ms, case.now_ms)
    return 0 < case.ask.expires_ms <= max(due_ms, case.now_ms)


def _moves_beyond_expiry(case: _Case) -> bool:
    return case.ask.move and _beyond_expiry(case)


def _is_leased_and_wanted(case: _Case) -> bool:
    return case.state is State.LEASED and (case.ask.move or case.ask.replace)


def _is_dead_and_wanted(case: _Case) -> bool:
    return case.state is State.DEAD and (case.ask.move or case.ask.replace)


def _is_in_the_way(case: _Case) -> bool:
    return case.state is not State.ABSENT and not (case.ask.move or case.ask.replace)


def _is_its_like(case: _Case) -> bool:
    return _is_in_the_way(case) and case.message.payload_sum == case.ask.payload_sum


def _is_another(case: _Case) -> bool:
    return _is_in_the_way(case) and case.message.payload_sum != case.ask.payload_sum


_HOLDERS = ((Status.NOT_FOUND, _not_there), (Status.FENCED, _not_holder), (Status.DEAD, _is_dead))
_OWNERS = ((Status.NOT_FOUND, _not_there), (Status.FORBIDDEN, _not_owner), (Status.FENCED, _other_version))

GUARDS: dict[Operation, tuple[tuple[Status, Guard], ...]] = {
    Operation.PUT: (
        (Status.INVALID, _never_deliverable),
        (Status.INVALID, _moves_beyond_expiry),
        (Status.FORBIDDEN, _not_owner),
        (Status.LEASED, _is_leased_and_wanted),
        (Status.DEAD, _is_dead_and_wanted),
        (Status.EXISTS, _is_another),
        (Status.DUPLICATE, _is_its_like),
    ),
    Operation.LEASE: (
        (Status.NOT_FOUND, _not_there),
        (Status.LEASED, _is_leased),
        (Status.DEAD, _is_dead),
        (Status.EXPIRED, _has_expired),
        (Status.DEAD, _delivered_out),
        (Status.INVALID, _not_yet),
    ),
    Operation.EXTEND: (*_HOLDERS, (Status.EXPIRED, _has_expired)),
    Operation.ACK: _HOLDERS,
    Operation.RELEASE: (*_HOLDERS, (Status.EXPIRED, _released_beyond_expiry)),
    # A dead letter has kept its token: who has that repeats the call, who has another is fenced.
    Operation.BURY: ((Status.NOT_FOUND, _not_there), (Status.FENCED, _not_to_bury)),
    # A message that takes its consumer's process down each time must not be let again for ever: refused here, its
    # lease runs out, and the broker buries it.
    Operation.REGRANT: (*_HOLDERS, (Status.DEAD, _delivered_out), (Status.EXPIRED, _has_expired)),
    Operation.MOVE: (
        (Status.INVALID, _living_beyond_expiry),
        *_OWNERS,
        (Status.LEASED, _is_leased),
        (Status.DEAD, _is_dead),
        (Status.EXPIRED, _has_expired),
    ),
    Operation.CANCEL: (
        *_OWNERS,
        (Status.LEASED, _is_leased_and_spared),
        (Status.DEAD, _is_dead),
        (Status.EXPIRED, _has_expired),
    ),
    Operation.REVIVE: (
        (Status.INVALID, _beyond_expiry),
        *_OWNERS,
        (Status.LEASED, _is_leased),
        (Status.EXISTS, _is_alive),
    ),
    Operation.PURGE: (*_OWNERS, (Status.LEASED, _is_leased), (Status.EXISTS, _is_alive)),
}
"""The refusals of each operation, with their conditions. A PUT of a free id is asked about its own message."""


def _released_due(case: _Case) -> int:
    return case.kind.due_of_release(case.message, case.ask.time_ms, case.now_ms, case.ask.unseen)


def _lease(case: _Case) -> Message:
    message, ask = case.message, case.ask
    return replace(
        message,
        due_ms=max(case.now_ms, message.due_ms) + ask.time_ms,
        holder=ask.holder,
        version=message.version + 1,
        deliveries=message.deliveries + 1,
    )


def _extend(case: _Case) -> Message:
    return replace(case.message, due_ms=max(case.message.due_ms, case.ask.time_ms))


def _regrant(case: _Case) -> Message:
    raised = replace(case.message, version=case.message.version + 1, deliveries=case.message.deliveries + 1)
    return replace(raised, due_ms=max(raised.due_ms, case.ask.time_ms))


def _release(case: _Case) -> Message:
    message, due_ms = case.message, _released_due(case)
    freed = replace(message, due_ms=due_ms, holder=b"", version=message.version + 1, last_op=case.ask.op)
    if case.ask.unseen:
        return replace(freed, deliveries=max(0, message.deliveries - 1))
    return replace(freed, scheduled_ms=due_ms, asked_ms=case.now_ms)


def _bury(case: _Case) -> Message:
    return replace(case.message, dead=case.ask.reason, died_ms=max(1, case.now_ms))


def _move(case: _Case) -> Message:
    return _asked(case.message, case)


def _revive(case: _Case) -> Message:
    return _asked(replace(case.message, deliveries=0, dead=b"", died_ms=0), case)


def _asked(message: Message, case: _Case) -> Message:
    """`message` at the due that a person asks for: free, one version on."""
    due_ms = case.ask.time_ms
    return replace(
        message,
        due_ms=due_ms,
        scheduled_ms=due_ms,
        asked_ms=case.now_ms,
        holder=b"",
        version=message.version + 1,
        last_op=case.ask.op,
    )


def _gone(case: _Case) -> None:
    return None


_LIVING = (State.WAITING, State.AVAILABLE, State.LEASED)
_FREE = (State.WAITING, State.AVAILABLE)
_HELD = (State.LEASED, State.AVAILABLE)

EFFECTS: dict[tuple[State, Operation], Effect] = {
    **{(state, Operation.LEASE): _lease for state in _FREE},
    **{(state, Operation.EXTEND): _extend for state in _HELD},
    **{(state, Operation.REGRANT): _regrant for state in _HELD},
    **{(state, Operation.RELEASE): _release for state in _HELD},
    **{(state, Operation.BURY): _bury for state in _HELD},
    **{(state, Operation.ACK): _gone for state in _HELD},
    **{(state, Operation.MOVE): _move for state in _FREE},
    **{(state, Operation.CANCEL): _gone for state in _LIVING},
    (State.DEAD, Operation.REVIVE): _revive,
    (State.DEAD, Operation.PURGE): _gone,
}
"""The effect of an operation that nothing refuses. A guard refuses every pair that is missing. `_put` has the effects
of PUT, which alone may meet an absent id."""

REMEMBERED = (Operation.ACK, Operation.CANCEL)
"""Operations that, besides expiry, leave a remembered id on a topic that remembers."""


def decide(message: Message | None, ask: Ask, now_ms: int, settings: TopicSettings) -> Decision:
    """Return the answer to `ask` at `now_ms` for `message` as it stands (None: no such id), and the message that is
    left.

    Pure: the caller changes the store. It stores `Decision.message` when the status is OK. It removes the message that
    stood when that is `expired` or `displaced`, and when the status is OK without a message.

    A topic that remembers keeps the id of an `expired` message, and of one removed by an operation in `REMEMBERED`. The
    `last_op` of its remains is that of a CANCEL, so that its repeat is recognised.
    """
    if ask.operation is Operation.PUT:
        return _put(message, ask, now_ms, settings)
    if message is None:
        return Decision(Status.NOT_FOUND, None)
    case = _Case(message, ask, now_ms, settings, state_of(message, now_ms), kind_of(settings))
    if _is_repeat(case):
        return Decision(Status.OK, None if message.remembered else message, message.remembered, repeat=True)
    status = _refusal(case)
    if status is not None:
        expired = status is Status.EXPIRED
        left = None if expired or message.remembered else message
        return Decision(status, left, settled=message.remembered, expired=expired)
    late = ask.operation is Operation.ACK and case.state is State.AVAILABLE
    return Decision(Status.OK, EFFECTS[case.state, ask.operation](case), late=late)


def _refusal(case: _Case) -> Status | None:
    refusals = {status for status, refuses in GUARDS[case.ask.operation] if refuses(case)}
    return next((status for status in PRECEDENCE if status in refusals), None)


def _is_repeat(case: _Case) -> bool:
    """Return whether this very call was done before. Then its operation id is the message's last one. A bury keeps
    token and holder: a dead letter knows it by these."""
    message, ask = case.message, case.ask
    if ask.operation is Operation.BURY:
        return case.state is State.DEAD and not _other_token(case)
    if ask.operation is Operation.CANCEL:
        return message.remembered and 0 != ask.op == message.last_op
    if ask.operation in (Operation.MOVE, Operation.REVIVE):
        return not message.remembered and 0 != ask.op == message.last_op and not _not_owner(case)
    return (
        ask.operation is Operation.RELEASE
        and not message.remembered
        and message.birth == ask.birth
        and 0 != ask.op == message.last_op
    )


def _put(message: Message | None, ask: Ask, now_ms: int, settings: TopicSettings) -> Decision:
    """Store under an absent id; else answer DUPLICATE or EXISTS, or move or replace if that is asked.

    A repeat is known before anything refuses it. If it answered INVALID, its producer would think that the message is
    not there.
    """
    kind = kind_of(settings)
    there = None if message is None or message.remembered else message
    settled = message is not None and message.remembered
    if message is not None and message.birth == ask.birth:
        return Decision(Status.DUPLICATE, there, settled=settled, repeat=not settled)
    if there is not None and ask.move:
        # The birth of a put that moves is the operation's id: a repeat of it is known by it.
        moving = replace(ask, operation=Operation.MOVE, op=ask.birth)
        if _is_repeat(_Case(there, moving, now_ms, settings, state_of(there, now_ms), kind)):
            return Decision(Status.OK, there, repeat=True)
    born = _born(ask, now_ms, kind)
    expired = there is not None and is_expired(there, now_ms)
    stands = None if expired else there
    status = None
    if stands is not None or ask.expires_ms:  # a free id refuses nothing but an expiry
        status = _refusal(_Case(stands or born, ask, now_ms, settings, state_of(stands, now_ms), kind))
    if status is not None:
        return Decision(status, there, settled=settled)
    if settled or (expired and settings.remember_ms):
        return Decision(Status.DUPLICATE, None, settled=True, expired=expired, displaced=there)
    if stands is not None and ask.move:
        return Decision(Status.OK, _move(_Case(stands, moving, now_ms, settings, state_of(stands, now_ms), kind)))
    return Decision(Status.OK, born, born=True, expired=expired, displaced=there)


def _born(ask: Ask, now_ms: int, kind: Kind) -> Message:
    due_ms = kind.due_of_put(ask.time_ms, now_ms)
    return Message(
        birth=ask.birth,
        version=1,
        due_ms=due_ms,
        scheduled_ms=due_ms,
        asked_ms=now_ms,
        group=ask.group,
        expires_ms=ask.expires_ms,
        payload_sum=ask.payload_sum,
    )
