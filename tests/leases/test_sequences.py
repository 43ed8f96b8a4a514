"""Sequences of operations on one id, against what `invariants.md` promises of any sequence.

The model knows nothing of the table. It keeps what a bystander could write down: which versions were handed out, when
the lease ends as last extended, how often it was delivered, and what was answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from timeline.leases import Ask, Decision, Message, decide, state_of
from timeline.model import Operation, State, Status, TopicSettings

HOLDERS = st.sampled_from((b"anna", b"ben", b"cleo"))
ENDS = ("ACK", "CANCEL", "PURGE", "EXPIRED", "REPLACED")
STEPS_MS = st.sampled_from((0, 1, 5, 10, 30))


@dataclass
class Life:
    """What a bystander knows of one birth."""

    granted: list[int] = field(default_factory=list)
    deliveries: int = 0
    lease_ends_ms: int = 0
    asked_due_ms: int = 0
    over: bool = False
    over_by: str = ""


class OneId(RuleBasedStateMachine):
    """One id in a store that does as `decide` says."""

    @initialize(remembers=st.booleans(), max_deliveries=st.sampled_from((0, 2, 4)), backoff_ms=st.sampled_from((0, 7)))
    def begin(self, remembers: bool, max_deliveries: int, backoff_ms: int) -> None:
        self.settings = TopicSettings(
            max_deliveries=max_deliveries,
            redelivery_backoff_ms=backoff_ms,
            remember_ms=60_000 if remembers else 0,
        )
        self.now = 1_000
        self.stored: Message | None = None
        self.lives: dict[int, Life] = {}
        self.tokens: list[tuple[int, int, bytes]] = []
        self.last: Ask | None = None
        self.count = 0

    def fresh(self) -> int:
        self.count += 1
        return self.count

    @property
    def life(self) -> Life:
        assert self.stored is not None
        return self.lives[self.stored.birth]

    def ask(self, ask: Ask) -> Decision:
        """Asks, stores what a store would, and checks what holds of any answer."""
        before = self.stored
        decided = decide(before, ask, self.now, self.settings)
        self.store(ask, decided)
        if (decided.status is not Status.OK and not decided.expired) or decided.repeat:
            assert self.stored == before
        if decided.expired:
            assert before is not None and before.expires_ms > 0
        if decided.expired and ask.operation is Operation.PUT:  # a release may go beyond the expiry
            assert before is not None and before.expires_ms <= self.now
            assert state_of(before, self.now) in (State.WAITING, State.AVAILABLE)
        if before is not None and not before.remembered and self.stored is not None and not self.stored.remembered:
            if decided.displaced is None:
                assert self.stored.birth == before.birth and self.stored.version >= before.version
            else:
                assert decided.displaced == before and self.stored.birth != before.birth and self.stored.version == 1
        if decided.status is Status.OK:
            self.last = ask
        return decided

    def store(self, ask: Ask, decided: Decision) -> None:
        before = self.stored
        if decided.repeat or (decided.status is not Status.OK and not decided.expired):
            return
        self.stored = decided.message
        ended = decided.message is None or decided.displaced is not None
        if ended and before is not None and not before.remembered:
            life = self.lives[before.birth]
            assert not life.over
            replaced = decided.displaced is not None and not decided.expired
            life.over = True
            life.over_by = "EXPIRED" if decided.expired else "REPLACED" if replaced else ask.operation.name
            assert life.over_by in ENDS  # S8: nothing else ends a message
            if self.settings.remember_ms and life.over_by in ("ACK", "CANCEL", "EXPIRED"):
                assert not decided.born  # what is remembered is not stored again
                op = ask.op if ask.operation is Operation.CANCEL else 0
                self.stored = Message(
                    before.birth, before.version, last_op=op, payload_sum=before.payload_sum, remembered=True
                )

    @rule(step=STEPS_MS)
    def time_goes_on(self, step: int) -> None:
        self.now += step

    @rule(
        due=st.integers(-20, 40),
        expires=st.sampled_from((0, 0, -5, 20, 60)),
        sum=st.sampled_from((1, 2)),
        group=st.sampled_from((b"ops", b"ops", b"sales")),
        how=st.sampled_from(("", "move", "replace")),
    )
    def put(self, due: int, expires: int, sum: int, group: bytes, how: str) -> None:
        birth = self.fresh()
        due_ms, expires_ms = self.now + due, self.now + expires if expires else 0
        before = self.stored
        ask = Ask(
            Operation.PUT, due_ms, birth, group=group, payload_sum=sum, expires_ms=expires_ms,
            move=how == "move", replace=how == "replace",
        )  # fmt: skip
        decided = self.ask(ask)
        if decided.born:
            self.lives[birth] = Life(asked_due_ms=due_ms)
            assert not 0 < expires_ms <= max(due_ms, self.now)  # it can be delivered
            assert before is None or decided.expired or (how == "replace" and before.group == group)
        elif decided.status is Status.OK:
            assert how == "move"
            self.moved(before, due_ms)
        if before is not None and before.remembered:
            assert decided.settled
        if decided.status is Status.DUPLICATE and not decided.settled:
            assert before is not None and before.group == group

    def moved(self, before: Message | None, due_ms: int) -> None:
        """S7: the version grew, and the lease that may have run out is no longer anybody's."""
        assert before is not None and self.stored is not None
        assert self.stored.version > before.version and self.stored.holder == b""
        assert state_of(before, self.now) is not State.LEASED
        self.life.asked_due_ms, self.life.lease_ends_ms = due_ms, 0

    @rule(holder=HOLDERS, lease=st.integers(1, 30), ahead=st.sampled_from((0, 0, 8)))
    def lease(self, holder: bytes, lease: int, ahead: int) -> None:
        before = self.stored
        ask = Ask(Operation.LEASE, lease, holder=holder, due_before_ms=self.now + ahead if ahead else 0)
        if self.ask(ask).status is not Status.OK:
            return
        assert before is not None and self.stored is not None
        life = self.life
        assert not life.over  # S6
        assert life.asked_due_ms <= self.now + ahead  # S1, S7
        assert life.lease_ends_ms <= self.now  # S11
        assert not 0 < self.settings.max_deliveries <= life.deliveries
        assert not 0 < before.expires_ms <= self.now
        self.hand_out(self.stored)
        assert self.stored.due_ms >= self.now + lease

    def hand_out(self, message: Message) -> None:
        life = self.life
        assert all(version < message.version for version in life.granted)  # S2
        life.granted.append(message.version)
        life.deliveries += 1
        life.lease_ends_ms = message.due_ms
        self.tokens.append((message.birth, message.version, message.holder))

    @precondition(lambda self: self.tokens)
    @rule(
        data=st.data(),
        operation=st.sampled_from(
            (Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.BURY, Operation.REGRANT)
        ),
        ahead=st.integers(0, 40),
        unseen=st.booleans(),
    )
    def settle(self, data: st.DataObject, operation: Operation, ahead: int, unseen: bool) -> None:
        recent = st.integers(max(0, len(self.tokens) - 2), len(self.tokens) - 1)
        birth, version, holder = self.tokens[data.draw(recent | st.integers(0, len(self.tokens) - 1))]
        before, now = self.stored, self.now
        ask = Ask(
            operation, now + ahead, birth, version, holder, op=self.fresh() << 32, unseen=unseen, reason=b"broken"
        )
        decided = self.ask(ask)
        if before is None or before.remembered:
            assert decided.status is Status.NOT_FOUND
            return
        current = (before.birth, before.version) == (birth, version)
        if not current:  # S4
            assert decided.status is Status.FENCED
            return
        if operation is Operation.ACK and not before.died_ms:  # S5
            assert decided.status is Status.OK and decided.late == (before.due_ms <= now)
        if decided.status is Status.OK and not decided.repeat:
            self.settled(operation, before, unseen)

    def settled(self, operation: Operation, before: Message, unseen: bool) -> None:
        life, after = self.lives[before.birth], self.stored
        if operation is Operation.EXTEND:
            assert after is not None and after.due_ms >= before.due_ms and after.version == before.version
            life.lease_ends_ms = after.due_ms
        elif operation is Operation.RELEASE:
            assert after is not None and after.version > before.version and after.due_ms >= self.now
            life.lease_ends_ms, life.asked_due_ms = 0, after.due_ms
            life.deliveries -= unseen
            assert not unseen or after.scheduled_ms == before.scheduled_ms
        elif operation is Operation.REGRANT:
            assert after is not None and after.holder == before.holder
            self.hand_out(after)
        elif operation is Operation.BURY:
            assert after is not None and (after.dead, after.version) == (b"broken", before.version)

    @rule(
        due=st.integers(-5, 40),
        group=st.sampled_from((b"ops", b"ops", b"ops", b"sales")),
        guess=st.sampled_from((0, 0, 1)),
        operation=st.sampled_from((Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE)),
        leased=st.booleans(),
    )
    def mutate(self, due: int, group: bytes, guess: int, operation: Operation, leased: bool) -> None:
        before = self.stored
        due_ms = self.now + due
        ask = Ask(operation, due_ms, group=group, op=self.fresh() << 32, if_version=guess, leased=leased)
        decided = self.ask(ask)
        if before is None or before.remembered:
            assert decided.status is Status.NOT_FOUND
        elif decided.status is Status.OK:
            assert before.group == group and guess in (0, before.version)
            assert bool(before.died_ms) == (operation in (Operation.REVIVE, Operation.PURGE))
            if operation is Operation.MOVE:
                self.moved(before, due_ms)
            elif operation is Operation.REVIVE:
                self.life.deliveries, self.life.lease_ends_ms, self.life.asked_due_ms = 0, 0, due_ms

    @precondition(lambda self: self.last is not None)
    @rule()
    def the_last_call_again(self) -> None:
        """S16: whatever was accepted last, sent again changes nothing, at once or later.

        Two are no calls of a user and carry no operation id: a lease asked again is a new lease, a regrant is fenced.
        A put whose message is settled by now is the one doubling that the design names; it is not repeated here."""
        assert self.last is not None
        before, ask = self.stored, self.last
        if ask.operation is Operation.LEASE or (ask.operation is Operation.PUT and before is None):
            return
        again = decide(before, ask, self.now, self.settings)
        stays = None if before is None or before.remembered else before
        if again.status is Status.EXPIRED:  # found expired: an extend of a lease that has run out
            assert ask.operation is Operation.EXTEND and before is not None and before.expires_ms <= self.now
            return
        assert again.message == stays
        if ask.operation in (Operation.MOVE, Operation.RELEASE, Operation.REVIVE) and stays is not None:
            assert (again.status, again.repeat) == (Status.OK, True)
        if ask.operation is Operation.CANCEL:
            assert (again.status is Status.OK) == (before is not None)
        if ask.operation is Operation.PUT and not again.settled:
            assert again.repeat

    @rule()
    def memory_fades(self) -> None:
        if self.stored is not None and self.stored.remembered:
            self.stored = None

    @invariant()
    def the_row_agrees_with_the_bystander(self) -> None:
        message = self.stored if hasattr(self, "stored") else None
        if message is None or message.remembered:
            return
        life = self.lives[message.birth]
        assert not life.over
        assert message.deliveries == life.deliveries
        state = state_of(message, self.now)
        assert (state is State.LEASED) == (life.lease_ends_ms > self.now and not message.died_ms)
        if state is State.WAITING:
            assert message.due_ms == life.asked_due_ms


TestOneId = pytest.mark.slow(OneId.TestCase)
TestOneId.settings = hypothesis_settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_a_repeat_is_recognised_after_the_next_lease_too() -> None:
    """A release whose answer was lost is sent again when somebody else has the message already."""
    settings = TopicSettings()
    held = Message(birth=3, version=2, due_ms=200, scheduled_ms=100, holder=b"anna", deliveries=1)
    release = Ask(Operation.RELEASE, 150, 3, 2, b"anna", op=77)
    freed = decide(held, release, 100, settings).message
    assert freed is not None and freed.version == 3
    taken = decide(freed, Ask(Operation.LEASE, 30, holder=b"ben"), 150, settings).message
    assert taken is not None
    again = decide(taken, release, 160, settings)
    assert (again.status, again.message, again.repeat) == (Status.OK, taken, True)
    other = decide(taken, replace(release, op=78), 160, settings)
    assert (other.status, other.message) == (Status.FENCED, taken)
