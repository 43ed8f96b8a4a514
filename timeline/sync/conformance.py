"""The rules of every membership, as checks that any implementation can run: `run_check(name, make, shared)`.

`make` makes a membership that has not started, each time another broker of the same, at first empty, cluster. `shared`:
whether those brokers find each other; where they do not, each has to be a cluster of its own. Knows nothing of pytest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from timeline.errors import Invalid
from timeline.sync.membership import JoinState, Member, Membership, MembershipChange, MembershipRefused

WAIT_S = 60.0
"""A check fails if its condition is not met by then."""
BUCKETS = 64
TOPIC = 7

Make = Callable[[], Membership]


class MembershipViolation(AssertionError):
    """Something that must hold does not; the text says what was seen."""


class Broker:
    """A membership under test, and what it called back."""

    def __init__(self, membership: Membership, member: Member) -> None:
        self.membership, self.member = membership, member
        self.changes = MembershipChange(0)
        self._changed = asyncio.Event()
        membership.on_change(self._noted)

    def _noted(self, change: MembershipChange) -> None:
        self.changes |= change
        self._changed.set()

    async def until(self, holds: Callable[[], object], what: str) -> None:
        """Waits for changes until it `holds`. Raises MembershipViolation when it does not in time."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise MembershipViolation(f"{self.member.name}: {what}: not so after {WAIT_S:g} s") from None

    def names(self) -> list[str]:
        """The members in its view."""
        return [member.name for member in self.membership.members()]

    def deals(self) -> list[int]:
        """The buckets that it deals."""
        buckets = self.membership.buckets(TOPIC, BUCKETS)
        return list(range(BUCKETS)) if buckets is None else list(buckets)

    def owners(self) -> list[str | None]:
        """The dispatcher of each bucket, in its view."""
        found = (self.membership.owner(TOPIC, bucket, BUCKETS) for bucket in range(BUCKETS))
        return [member.name if member else None for member in found]

    def host(self, *ids: bytes) -> None:
        """Hosts these consumers."""
        self.membership.host(TOPIC, "departures", ids)


class MembershipTrial:
    """Makes brokers of one cluster, and ends them."""

    cluster_uid = "9f" * 16

    def __init__(self, make: Make) -> None:
        self._make = make
        self._brokers: list[Broker] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for broker in self._brokers:
            await broker.membership.stop()

    def broker(self, name: str) -> Broker:
        """A broker that has not joined."""
        number = len(self._brokers) + 1
        made = Broker(self._make(), Member(name, f"10.0.0.{number}:9000", "1.0"))
        self._brokers.append(made)
        return made

    async def joined(self, name: str) -> Broker:
        """A broker that has."""
        made = self.broker(name)
        await made.membership.start(made.member, self.cluster_uid)
        return made


def expect(found: object, wanted: object, what: str) -> None:
    """Raises MembershipViolation unless both are the same."""
    if found != wanted:
        raise MembershipViolation(f"{what}: {found!r:.300} where {wanted!r:.300} must be")


Check = Callable[[MembershipTrial], Awaitable[None]]
CHECKS: dict[str, tuple[Check, bool | None]] = {}
"""All checks by name, and whether they are for memberships that are shared (True), that are not (False), or for all."""


def check(shared: bool | None = None) -> Callable[[Check], Check]:
    """Registers `async def check_…(trial)`, whose docstring says what must hold."""

    def register(run: Check) -> Check:
        CHECKS[getattr(run, "__name__", "").removeprefix("check_")] = run, shared
        return run

    return register


async def run_check(name: str, make: Make, shared: bool) -> bool:
    """Run a check; False if it is not for such a membership. Raise MembershipViolation; Invalid for no such check."""
    if name not in CHECKS:
        raise Invalid(f"no such check: {name}. Checks: {', '.join(CHECKS)}")
    run, meant = CHECKS[name]
    if meant not in (None, shared):
        return False
    async with MembershipTrial(make) as trial:
        await run(trial)
    return True


@check()
async def check_joins_and_leaves(trial: MembershipTrial) -> None:
    """A broker is apart, joins, is a member as it said, and leaves; leaving again, or without having joined, does no
    harm."""
    broker = trial.broker("b1")
    expect(broker.membership.state.join_state, JoinState.APART, "the standing before it joins")
    expect(broker.names(), [], "members before it joins")
    await broker.membership.stop()
    broker = await trial.joined("b1")
    expect(broker.membership.state.join_state, JoinState.JOINED, "the standing of who has joined")
    expect(broker.membership.state.reason, "", "the reason of who has joined")
    expect(list(broker.membership.members()), [broker.member], "members")
    await broker.membership.stop()
    await broker.membership.stop()
    expect(broker.membership.state.join_state, JoinState.APART, "the standing of who has left")
    expect(broker.names(), [], "members of who has left")


@check()
async def check_own_consumers_count_at_once(trial: MembershipTrial) -> None:
    """A broker that alone hosts consumers dispatches every bucket at once. Without consumers, no broker does."""
    broker = await trial.joined("b1")
    expect(set(broker.owners()), {None}, "owners while nobody hosts a consumer")
    before = broker.membership.state.revision
    broker.host(b"worker-1", b"worker-2")
    expect(broker.membership.buckets(TOPIC, BUCKETS), None, "buckets of who alone hosts consumers")
    expect(set(broker.owners()), {"b1"}, "owners")
    expect(dict(broker.membership.hosting(TOPIC)), {"b1": 2}, "what is hosted")
    if broker.membership.state.revision <= before:
        raise MembershipViolation("what is believed changed, and its revision did not grow")
    broker.host()
    expect(set(broker.owners()), {None}, "owners once nobody hosts a consumer any more")
    expect(dict(broker.membership.hosting(TOPIC)), {}, "what is hosted")


@check()
async def check_what_is_hosted_before_joining_counts(trial: MembershipTrial) -> None:
    """Consumers may be there before the broker has joined."""
    broker = trial.broker("b1")
    broker.host(b"worker-1")
    await broker.membership.start(broker.member, trial.cluster_uid)
    expect(set(broker.owners()), {"b1"}, "owners")


@check(shared=False)
async def check_brokers_by_themselves_do_not_meet(trial: MembershipTrial) -> None:
    """Where a membership is not shared, each broker is a cluster of its own."""
    one, two = await trial.joined("b1"), await trial.joined("b2")
    for broker in (one, two):
        broker.host(b"worker-1")
        expect(broker.names(), [broker.member.name], "members")
        expect(broker.deals(), list(range(BUCKETS)), "buckets")


@check(shared=True)
async def check_brokers_meet_and_share(trial: MembershipTrial) -> None:
    """Brokers learn of each other, in order of their names; each bucket has one dealer, the same for all of them."""
    brokers = [await trial.joined(name) for name in ("b2", "b1", "b3")]
    for broker in brokers:
        broker.host(broker.member.name.encode())
    for broker in brokers:
        await broker.until(lambda at=broker: at.names() == ["b1", "b2", "b3"], "three members")  # type: ignore[misc]
        await broker.until(lambda at=broker: len(set(at.owners())) == 3, "three dealers")  # type: ignore[misc]
        expect(list(broker.membership.members()), sorted((b.member for b in brokers), key=lambda m: m.name), "members")
    for broker in brokers:
        expect(broker.owners(), brokers[0].owners(), "owners, as two brokers see them")
        mine = [bucket for bucket, name in enumerate(broker.owners()) if name == broker.member.name]
        expect(broker.deals(), mine, "buckets, and those of which it is the owner")


@check(shared=True)
async def check_who_alone_hosts_consumers_deals_alone(trial: MembershipTrial) -> None:
    """A topic whose consumers all sit on one broker is dealt by it, wherever its messages are put."""
    one, two = await trial.joined("b1"), await trial.joined("b2")
    two.host(b"worker-1")
    await one.until(lambda: one.owners() == ["b2"] * BUCKETS, "the other deals all")
    expect(one.deals(), [], "buckets of who hosts no consumer")
    expect(two.membership.buckets(TOPIC, BUCKETS), None, "buckets of who alone hosts consumers")
    expect(one.membership.owner(TOPIC, 0, BUCKETS), two.member, "the owner, with its address")


@check(shared=True)
async def check_consumers_come_and_go(trial: MembershipTrial) -> None:
    """Others learn of consumers that come, move and go."""
    one, two = await trial.joined("b1"), await trial.joined("b2")
    one.host(b"worker-1", b"worker-2")
    await two.until(lambda: two.membership.hosting(TOPIC) == {"b1": 2}, "two consumers there")
    one.host(b"worker-2")
    await two.until(lambda: two.membership.hosting(TOPIC) == {"b1": 1}, "one consumer there")
    one.host()
    two.host(b"worker-1")
    await two.until(lambda: two.membership.hosting(TOPIC) == {"b2": 1}, "none there")
    await one.until(lambda: one.membership.hosting(TOPIC) == {"b2": 1}, "it moved here")
    expect(one.deals(), [], "buckets of who hosts no consumer any more")


@check(shared=True)
async def check_who_leaves_is_missed_at_once(trial: MembershipTrial) -> None:
    """The buckets of a broker that leaves go to those that stay."""
    one, two = await trial.joined("b1"), await trial.joined("b2")
    one.host(b"worker-1")
    two.host(b"worker-2")
    await one.until(lambda: set(one.owners()) == {"b1", "b2"}, "both deal")
    one.changes = MembershipChange(0)
    await two.membership.stop()
    await one.until(lambda: one.names() == ["b1"], "the other left")
    expect(one.membership.buckets(TOPIC, BUCKETS), None, "buckets of who stays")
    expect(MembershipChange.MEMBERS in one.changes, True, "a change of members was called back")


@check(shared=True)
async def check_topics_that_change_are_told(trial: MembershipTrial) -> None:
    """Every broker is told when another one changed a topic's record, each time."""
    one, two = await trial.joined("b1"), await trial.joined("b2")
    await two.until(lambda: two.names() == ["b1", "b2"], "two members")
    for teller, told in ((one, two), (two, one), (one, two)):
        told.changes = MembershipChange(0)
        teller.membership.topics_changed()
        await told.until(lambda told=told: MembershipChange.TOPICS in told.changes, "told of changed topics")  # type: ignore[misc]


@check(shared=True)
async def check_a_broker_of_another_store_is_refused(trial: MembershipTrial) -> None:
    """A broker whose store is another than the cluster's cannot join, and is told why."""
    one = await trial.joined("b1")
    other = trial.broker("b2")
    await _refused(other, "00" * 16, "store")
    expect(one.names(), ["b1"], "members of the cluster")


@check(shared=True)
async def check_a_name_is_given_once(trial: MembershipTrial) -> None:
    """A second broker of the same name cannot join while the first lives; once that has left, it can."""
    one = await trial.joined("b1")
    await _refused(trial.broker("b1"), trial.cluster_uid, "'b1'")
    expect(one.membership.state.join_state, JoinState.JOINED, "the standing of the first")
    await one.membership.stop()
    again = await trial.joined("b1")
    expect(list(again.membership.members()), [again.member], "members")


async def _refused(broker: Broker, cluster_uid: str, says: str) -> None:
    try:
        async with asyncio.timeout(WAIT_S):
            await broker.membership.start(broker.member, cluster_uid)
    except MembershipRefused as refused:
        expect(says in str(refused), True, f"the refusal {str(refused)!r} says {says}")
    except TimeoutError:
        raise MembershipViolation(f"{broker.member.name} was neither refused nor let in after {WAIT_S:g} s") from None
    else:
        raise MembershipViolation(f"{broker.member.name} was let in")
    expect(broker.membership.state.join_state, JoinState.APART, "the standing of who was refused")
