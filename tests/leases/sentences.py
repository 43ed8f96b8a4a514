"""The operation table told a second time, as a list of sentences, so that the rules can be held against it.

`timeline.leases.table` says it as effects by state and guards that are all asked; here each operation is a list that is
read from the top: the first sentence that is true of a case gives the answer, and says what changes. The two share no
code but the nouns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from timeline.leases.table import Ask, Decision, Message
from timeline.model import Operation, Status, TopicSettings


class Case:
    """What can be said of a message and of what is asked of it, in plain words."""

    def __init__(self, message: Message | None, ask: Ask, now: int, settings: TopicSettings) -> None:
        self.message = m = message or Message(0, 0)
        self.ask, self.now, self.settings = ask, now, settings
        self.absent = message is None
        self.remembered = m.remembered
        self.there = not self.absent and not self.remembered
        self.dead = self.there and m.died_ms > 0
        living = self.there and not self.dead
        self.held = living and m.holder != b"" and m.due_ms > now
        self.waiting = living and m.holder == b"" and m.due_ms > now
        self.available = living and m.due_ms <= now
        self.expired = living and not self.held and m.expires_ms > 0 and now >= m.expires_ms
        self.same_birth = self.there and m.birth == ask.birth
        self.same_op = ask.op != 0 and m.last_op == ask.op
        self.token = self.same_birth and m.version == ask.version and m.holder == ask.holder
        self.owner = m.group == ask.group
        self.wrong_version = self.there and ask.if_version != 0 and m.version != ask.if_version
        self.asked_past_expiry = self.there and 0 < m.expires_ms <= ask.time_ms
        self.wanted = ask.move or ask.replace
        self.delivered_out = living and settings.max_deliveries > 0 and m.deliveries >= settings.max_deliveries


Change = Callable[[Case], Message | None]


@dataclass(frozen=True)
class Sentence:
    """One line of the table: when it is true, what is answered, and what then stands."""

    says: str
    status: Status
    true: Callable[[Case], bool]
    then: Change | None = None  # None: nothing changes
    repeat: bool = False
    late: bool = False
    leaves_its_id: bool = False


def read(case: Case) -> tuple[Sentence, Decision]:
    """The first true sentence, and the decision that it makes."""
    sentence = next(line for line in SENTENCES[case.ask.operation] if line.true(case))
    stands = case.message if case.there else None
    if sentence.then is not None:
        stands = sentence.then(case)
    put = case.ask.operation is Operation.PUT
    goes = case.there and sentence.then in (born, gone)
    return sentence, Decision(
        sentence.status, stands, case.remembered or sentence.leaves_its_id, sentence.late, sentence.repeat,
        born=sentence.then is born,
        expired=(put and goes and case.expired) or sentence.status is Status.EXPIRED,
        displaced=case.message if put and goes else None,
    )  # fmt: skip


def gone(case: Case) -> None:
    return None


def _with(case: Case, **changes: Any) -> Message:
    return replace(case.message, **changes)


def born(case: Case) -> Message:
    ask = case.ask
    return Message(
        birth=ask.birth,
        version=1,
        due_ms=ask.time_ms,
        scheduled_ms=ask.time_ms,
        asked_ms=case.now,
        holder=b"",
        deliveries=0,
        last_op=0,
        group=ask.group,
        expires_ms=ask.expires_ms,
        payload_sum=ask.payload_sum,
        died_ms=0,
        dead=b"",
        remembered=False,
    )


def leased(case: Case) -> Message:
    m = case.message
    start = case.now if m.due_ms < case.now else m.due_ms
    return _with(
        case,
        due_ms=start + case.ask.time_ms,
        holder=case.ask.holder,
        version=m.version + 1,
        deliveries=m.deliveries + 1,
    )


def extended(case: Case) -> Message:
    return _with(case, due_ms=sorted((case.message.due_ms, case.ask.time_ms))[1])


def let_again(case: Case) -> Message:
    m = case.message
    later = sorted((m.due_ms, case.ask.time_ms))[1]
    return _with(case, due_ms=later, version=m.version + 1, deliveries=m.deliveries + 1)


def asked_anew(case: Case) -> Message:
    at = case.ask.time_ms
    op = case.ask.birth if case.ask.operation is Operation.PUT else case.ask.op
    version = case.message.version + 1
    return _with(case, due_ms=at, scheduled_ms=at, asked_ms=case.now, holder=b"", version=version, last_op=op)


def revived(case: Case) -> Message:
    return replace(asked_anew(case), deliveries=0, died_ms=0, dead=b"")


def free_at(case: Case) -> int:
    """When a release makes it due."""
    asked = case.message.scheduled_ms if case.ask.unseen else case.ask.time_ms
    return asked if asked > case.now else case.now


def released(case: Case) -> Message:
    at = free_at(case)
    return _with(
        case,
        due_ms=at,
        scheduled_ms=at,
        asked_ms=case.now,
        holder=b"",
        version=case.message.version + 1,
        last_op=case.ask.op,
    )


def taken_back(case: Case) -> Message:
    m = case.message
    fewer = m.deliveries - 1 if m.deliveries else 0
    return _with(case, due_ms=free_at(case), holder=b"", version=m.version + 1, last_op=case.ask.op, deliveries=fewer)


def buried(case: Case) -> Message:
    return _with(case, dead=case.ask.reason, died_ms=case.now)


def _in_backoff(case: Case) -> bool:
    m = case.message
    return case.available and m.holder != b"" and case.now - m.due_ms < case.settings.redelivery_backoff_ms


NOWHERE = (
    Sentence("the id is remembered as settled", Status.NOT_FOUND, lambda c: c.remembered),
    Sentence("there is no such id", Status.NOT_FOUND, lambda c: c.absent),
)
DIED = Sentence("it is a dead letter", Status.DEAD, lambda c: c.dead)
RAN_OUT = Sentence("it expired, and nobody holds it", Status.EXPIRED, lambda c: c.expired, gone)
NOT_YOURS = Sentence("token and holder do not match", Status.FENCED, lambda c: c.there and not c.token)
NOBODYS = Sentence("nobody holds it", Status.FENCED, lambda c: c.there and c.message.holder == b"")
HOLDERS = (*NOWHERE, NOT_YOURS, NOBODYS, DIED)
OTHERS = (
    Sentence("it is another group's", Status.FORBIDDEN, lambda c: c.there and not c.owner),
    Sentence("it has another version", Status.FENCED, lambda c: c.wrong_version),
)
TOO_LATE = Sentence("it would be due at or after its expiry", Status.INVALID, lambda c: c.asked_past_expiry)
TOO_LATE_ALIVE = Sentence(
    "it lives, and would be due at or after its expiry", Status.INVALID, lambda c: c.asked_past_expiry and not c.expired
)
TAKEN = Sentence("a consumer holds it", Status.LEASED, lambda c: c.held)
LIVES = Sentence("it is no dead letter", Status.EXISTS, lambda c: c.there and not c.dead)
AGAIN = Sentence(
    "this very call was the last one", Status.OK, lambda c: c.there and c.owner and c.same_op, None, repeat=True
)


def _always(case: Case) -> bool:
    return True


SENTENCES: dict[Operation, tuple[Sentence, ...]] = {
    Operation.PUT: (
        Sentence("same birth: a retry", Status.DUPLICATE, lambda c: c.same_birth, repeat=True),
        Sentence(
            "same birth, settled by now",
            Status.DUPLICATE,
            lambda c: c.remembered and c.message.birth == c.ask.birth,
        ),
        Sentence(
            "this very put moved it before",
            Status.OK,
            lambda c: c.there and c.ask.move and c.owner and c.message.last_op == c.ask.birth,
            repeat=True,
        ),
        Sentence(
            "its expiry is not after its due and after now",
            Status.INVALID,
            lambda c: c.ask.expires_ms > 0 and (c.ask.expires_ms <= c.ask.time_ms or c.ask.expires_ms <= c.now),
        ),
        Sentence("there is no such id", Status.OK, lambda c: c.absent, born),
        Sentence("the id is remembered as settled", Status.DUPLICATE, lambda c: c.remembered),
        Sentence(
            "what was there expired, and the topic remembers it",
            Status.DUPLICATE,
            lambda c: c.expired and c.settings.remember_ms > 0,
            gone,
            leaves_its_id=True,
        ),
        Sentence("what was there expired", Status.OK, lambda c: c.expired, born),
        Sentence(
            "it would be moved to its expiry or beyond", Status.INVALID, lambda c: c.ask.move and c.asked_past_expiry
        ),
        Sentence("it is another group's", Status.FORBIDDEN, lambda c: not c.owner),
        Sentence("a consumer holds what is asked for", Status.LEASED, lambda c: c.held and c.wanted),
        Sentence("what is asked for is a dead letter", Status.DEAD, lambda c: c.dead and c.wanted),
        Sentence("it is moved", Status.OK, lambda c: c.ask.move, asked_anew),
        Sentence("it is replaced", Status.OK, lambda c: c.ask.replace, born),
        Sentence("same payload", Status.DUPLICATE, lambda c: c.message.payload_sum == c.ask.payload_sum),
        Sentence("another message has the id", Status.EXISTS, _always),
    ),
    Operation.LEASE: (
        Sentence("its backoff is not over", Status.INVALID, _in_backoff),
        Sentence(
            "it is not due within the window",
            Status.INVALID,
            lambda c: c.waiting and c.message.due_ms > c.ask.due_before_ms,
        ),
        *NOWHERE,
        TAKEN,
        DIED,
        Sentence("it was delivered as often as it may be", Status.DEAD, lambda c: c.delivered_out),
        RAN_OUT,
        Sentence("it is leased", Status.OK, _always, leased),
    ),
    Operation.EXTEND: (*HOLDERS, RAN_OUT, Sentence("the lease is longer", Status.OK, _always, extended)),
    Operation.REGRANT: (
        *HOLDERS,
        Sentence("it was delivered as often as it may be", Status.DEAD, lambda c: c.delivered_out),
        RAN_OUT,
        Sentence("it is let again", Status.OK, _always, let_again),
    ),
    Operation.ACK: (
        *HOLDERS,
        Sentence("the lease ran out, nobody touched it since", Status.OK, lambda c: c.available, gone, late=True),
        Sentence("it is done", Status.OK, _always, gone),
    ),
    Operation.RELEASE: (
        Sentence("this very call was the last one", Status.OK, lambda c: c.same_birth and c.same_op, None, repeat=True),
        *HOLDERS,
        Sentence(
            "it would be due at or after its expiry",
            Status.EXPIRED,
            lambda c: c.there and 0 < c.message.expires_ms <= free_at(c),
            gone,
        ),
        Sentence("no person's code saw it", Status.OK, lambda c: c.ask.unseen, taken_back),
        Sentence("it is released", Status.OK, _always, released),
    ),
    Operation.BURY: (
        *NOWHERE,
        Sentence("the same holder buried it", Status.OK, lambda c: c.dead and c.token, repeat=True),
        NOT_YOURS,
        Sentence(
            "nobody holds it, and it is not given up",
            Status.FENCED,
            lambda c: c.there and c.message.holder == b"" and not (c.available and c.delivered_out),
        ),
        Sentence("it is buried", Status.OK, _always, buried),
    ),
    Operation.MOVE: (
        AGAIN,
        TOO_LATE_ALIVE,
        *NOWHERE,
        *OTHERS,
        TAKEN,
        DIED,
        RAN_OUT,
        Sentence("it is moved", Status.OK, _always, asked_anew),
    ),
    Operation.CANCEL: (
        Sentence(
            "this very call settled it",
            Status.OK,
            lambda c: c.remembered and c.same_op,
            repeat=True,
        ),
        *NOWHERE,
        *OTHERS,
        Sentence("a consumer holds it", Status.LEASED, lambda c: c.held and not c.ask.leased),
        DIED,
        RAN_OUT,
        Sentence("it is cancelled", Status.OK, _always, gone),
    ),
    Operation.REVIVE: (
        AGAIN,
        TOO_LATE,
        *NOWHERE,
        *OTHERS,
        TAKEN,
        LIVES,
        Sentence("it lives again", Status.OK, _always, revived),
    ),
    Operation.PURGE: (*NOWHERE, *OTHERS, TAKEN, LIVES, Sentence("it is purged", Status.OK, _always, gone)),
}
