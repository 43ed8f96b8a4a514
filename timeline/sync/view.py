"""One broker's view of its cluster: the members, what they host, and so who dispatches which bucket. Pure.

`local://` is the cluster of one: the only member dispatches every bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from timeline.sync.membership import JoinState, Member, Membership, MembershipChange, MembershipState

# ── the assignment: weighted rendezvous hashing over the healthy consumers of each broker ──

# Each pair of bucket and broker has a score that depends only on the two and on the broker's weight. So a bucket's
# first choice changes only if a broker with a higher score comes, or its own goes: the least possible movement. Hashing
# alone is uneven: at 64 buckets per broker, an eighth more or less is usual. So a broker takes at most `SLACK_PERCENT`
# beyond its share, those it scores best. The others go to their next choice, as students go to colleges (Gale and
# Shapley, 1962: the outcome does not depend on the order). A broker that is more than `SLACK_PERCENT` below its share
# then gets, from brokers above theirs, the buckets that it scores best.

SLACK_PERCENT = 5
"""How far a broker's number of buckets may be from its share, beyond rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The buckets of one topic. `brokers`: names in order; `owners`: for each bucket, the index of its broker; empty
    when there is no broker."""

    brokers: tuple[str, ...]
    owners: npt.NDArray[np.int64]
    _of: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def owner(self, bucket: int) -> str | None:
        """Return the broker that dispatches `bucket`; None if there is no broker."""
        return self.brokers[self.owners[bucket]] if self.brokers else None

    def of(self, broker: str) -> tuple[int, ...]:
        """Return the buckets that `broker` dispatches, in order."""
        if broker not in self.brokers:
            return ()
        if broker not in self._of:
            mine = np.flatnonzero(self.owners == self.brokers.index(broker))
            self._of[broker] = tuple(mine.tolist())
        return self._of[broker]


def assign(topic_uid: int, buckets: int, weights: Mapping[str, int]) -> Assignment:
    """Assign a topic's buckets to the brokers with a weight (healthy consumers) above 0. The same arguments give the
    same answer in every process."""
    brokers = tuple(sorted(name for name, weight in weights.items() if weight > 0))
    if len(brokers) < 2:
        return Assignment(brokers, np.zeros(buckets if brokers else 0, dtype=np.int64))
    weight = np.array([weights[name] for name in brokers], dtype=np.int64)
    scores = _scores(topic_uid, buckets, brokers, weight)
    # In whole numbers, so that a share of 64 is never one of 63.999….
    share, total = weight * buckets, int(weight.sum())
    most = np.maximum(-(-share // total), share * (100 + SLACK_PERCENT) // (100 * total))
    least = np.minimum(share // total, -(-share * (100 - SLACK_PERCENT) // (100 * total)))
    owners = _capped(scores, most)
    _fill(owners, scores, least, share // total)
    return Assignment(brokers, owners)


def _scores(
    topic_uid: int, buckets: int, brokers: tuple[str, ...], weight: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return, by bucket and broker, weight / -ln(u), where u is a hash of both in (0, 1). Sources: Thaler and
    Ravishankar, 1998; Schindelhauer and Schomaker, 2005, for the weighted form."""
    named = np.array([_hash(name.encode()) for name in brokers], dtype=np.uint64)
    numbered = _mixed(
        np.arange(buckets, dtype=np.uint64) + np.uint64(_hash(topic_uid.to_bytes(16, "big", signed=True)))
    )
    mixed = _mixed(numbered[:, None] ^ named[None, :])
    uniform = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    scores: npt.NDArray[np.float64] = weight[None, :] / -np.log(uniform)
    return scores


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): each bit of it depends on all of the value's."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _capped(scores: npt.NDArray[np.float64], most: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return for each bucket the broker of the highest score that keeps it. Each broker keeps, of all that come to it,
    the `most` it scores highest."""
    buckets = len(scores)
    choices = np.argsort(-scores, axis=1, kind="stable")
    tried = np.zeros(buckets, dtype=np.int64)
    every = np.arange(buckets)
    while True:
        owners: npt.NDArray[np.int64] = choices[every, tried]
        over = np.flatnonzero(np.bincount(owners, minlength=len(most)) > most)
        if not len(over):
            return owners
        for broker in over.tolist():
            came = np.flatnonzero(owners == broker)
            ranked = came[np.argsort(-scores[came, broker], kind="stable")]
            tried[ranked[most[broker] :]] += 1


def _fill(
    owners: npt.NDArray[np.int64],
    scores: npt.NDArray[np.float64],
    least: npt.NDArray[np.int64],
    enough: npt.NDArray[np.int64],
) -> None:
    """Give each broker below its `least` the buckets that lose least by score, from brokers with more than `enough`."""
    counts = np.bincount(owners, minlength=len(least))
    for poor in np.flatnonzero(counts < least).tolist():
        yours = scores[np.arange(len(owners)), owners]
        for bucket in np.argsort(yours / scores[:, poor], kind="stable").tolist():
            if counts[poor] >= least[poor]:
                break
            rich = owners[bucket]
            if rich != poor and counts[rich] > enough[rich]:
                owners[bucket] = poor
                counts[rich] -= 1
                counts[poor] += 1


# ── the view ──

_NOBODY: Mapping[str, int] = MappingProxyType({})


class View:
    """Members and what they host. `revision` grows with each change. Calculated values are kept until their basis
    changes. A broker's own entry changes at once, before others are told."""

    def __init__(self) -> None:
        self.revision = 0
        self.myself: Member | None = None
        self._mine: dict[int, int] = {}
        self._others: dict[str, Member] = {}
        self._theirs: dict[int, Mapping[str, int]] = {}
        self._heard: Mapping[int, Mapping[str, int]] = {}
        self._hosting: dict[int, Mapping[str, int]] = {}
        self._assigned: dict[tuple[int, int], Assignment] = {}
        self._members: tuple[Member, ...] | None = None

    def join(self, myself: Member | None) -> None:
        """Make this broker a member; None: no longer."""
        if myself != self.myself:
            self.myself = myself
            self._changed(self._mine)

    def host(self, topic_uid: int, consumers: int) -> bool:
        """Set how many healthy consumers of the topic this broker hosts. Return whether that is news."""
        if self._mine.get(topic_uid, 0) == consumers:
            return False
        if consumers:
            self._mine[topic_uid] = consumers
        else:
            del self._mine[topic_uid]
        self._changed((topic_uid,))
        return True

    def learn(self, others: Collection[Member], hosting: Mapping[int, Mapping[str, int]]) -> bool:
        """Set the other members, and how many healthy consumers they host, by topic's uid and broker's name. Return
        whether that is news. Entries of this broker and of brokers that are no members are ignored. A mapping that is
        the same object as the last time is not read again: it must not change."""
        mine = self.myself.name if self.myself else None
        members = {member.name: member for member in others if member.name != mine}
        same = members.keys() == self._others.keys()
        theirs: dict[int, Mapping[str, int]] = {}
        for uid, counts in hosting.items():
            if same and self._heard.get(uid) is counts:
                kept = self._theirs.get(uid, _NOBODY)
            else:
                kept = {name: count for name, count in counts.items() if count > 0 and name in members}
            if kept:
                theirs[uid] = kept
        touched = {uid for uid in self._theirs.keys() | theirs.keys() if self._theirs.get(uid) != theirs.get(uid)}
        self._heard = hosting
        if members == self._others and not touched:
            return False
        self._others, self._theirs = members, theirs
        self._changed(touched)
        return True

    def members(self) -> Sequence[Member]:
        """Return all members, by name."""
        if self._members is None:
            every = [*self._others.values(), *((self.myself,) if self.myself else ())]
            self._members = tuple(sorted(every, key=lambda member: member.name))
        return self._members

    def hosting(self, topic_uid: int) -> Mapping[str, int]:
        """Return the number of healthy consumers of the topic by broker's name."""
        known = self._hosting.get(topic_uid)
        if known is None:
            if topic_uid not in self._theirs and topic_uid not in self._mine:
                return _NOBODY  # not kept: of ten thousand topics most have no consumer
            counts = dict(self._theirs.get(topic_uid, _NOBODY))
            if self.myself and topic_uid in self._mine:
                counts[self.myself.name] = self._mine[topic_uid]
            known = self._hosting[topic_uid] = MappingProxyType(dict(sorted(counts.items())))
        return known

    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        """Return the buckets that this broker dispatches; None: all."""
        hosting = self.hosting(topic_uid)
        if self.myself is None or self.myself.name not in hosting:
            return ()
        if len(hosting) == 1:
            return None
        return self._assignment(topic_uid, buckets).of(self.myself.name)

    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        """Return the broker that dispatches `bucket`."""
        name = self._assignment(topic_uid, buckets).owner(bucket)
        if name is None:
            return None
        return self.myself if self.myself and name == self.myself.name else self._others[name]

    def _assignment(self, topic_uid: int, buckets: int) -> Assignment:
        known = self._assigned.get((topic_uid, buckets))
        if known is None:
            known = self._assigned[topic_uid, buckets] = assign(topic_uid, buckets, self.hosting(topic_uid))
        return known

    def _changed(self, topic_uids: Collection[int]) -> None:
        self.revision += 1
        self._members = None
        for uid in topic_uids:
            self._hosting.pop(uid, None)
        for key in [key for key in self._assigned if key[0] in topic_uids]:
            del self._assigned[key]


class ViewMembership(Membership):
    """The base of memberships, which answers from a `View`. A subclass keeps the view current."""

    def __init__(self) -> None:
        self._view = View()
        self._callbacks: list[Callable[[MembershipChange], None]] = []

    def on_change(self, callback: Callable[[MembershipChange], None]) -> None:
        self._callbacks.append(callback)

    def _call_back(self, change: MembershipChange) -> None:
        for callback in self._callbacks:
            callback(change)

    def members(self) -> Sequence[Member]:
        return self._view.members()

    def hosting(self, topic_uid: int) -> Mapping[str, int]:
        return self._view.hosting(topic_uid)

    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        return self._view.buckets(topic_uid, buckets)

    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        return self._view.owner(topic_uid, bucket, buckets)


class LocalMembership(ViewMembership):
    """A cluster of one. Nothing changes but by this broker, so that there are no callbacks."""

    async def start(self, member: Member, cluster_uid: str) -> None:
        self._view.join(member)

    async def stop(self) -> None:
        self._view.join(None)

    @property
    def state(self) -> MembershipState:
        join_state = JoinState.JOINED if self._view.myself else JoinState.APART
        return MembershipState(join_state, self._view.revision)

    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        self._view.host(topic_uid, len(consumers))

    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        """Return None, for all of them: there is no other broker."""
        return None

    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        return self._view.myself if self._view.hosting(topic_uid) else None

    def topics_changed(self) -> None:
        """Do nothing: there is no other broker."""
