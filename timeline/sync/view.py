"""What one broker believes of its cluster: who is there, what they host, and therefore who deals which bucket. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from timeline.sync.assignment import Assignment, assign
from timeline.sync.membership import Member, Membership, MembershipChange

_NOBODY: Mapping[str, int] = MappingProxyType({})


class View:
    """Members and what they host. `revision` grows with each change. What is reckoned from them is kept until what it
    rests on changes. A broker's own entry is what it is, not what others have been told: it changes at once."""

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
        """This broker is a member from now on; None: not any more."""
        if myself != self.myself:
            self.myself = myself
            self._changed(self._mine)

    def host(self, topic_uid: int, consumers: int) -> bool:
        """This broker hosts so many healthy consumers of the topic; whether that is news."""
        if self._mine.get(topic_uid, 0) == consumers:
            return False
        if consumers:
            self._mine[topic_uid] = consumers
        else:
            del self._mine[topic_uid]
        self._changed((topic_uid,))
        return True

    def learn(self, others: Collection[Member], hosting: Mapping[int, Mapping[str, int]]) -> bool:
        """All other members there are, and how many healthy consumers of each topic they host, by topic's uid and
        broker's name; whether that is news. What is said of this broker or of those who are no members is left out.
        Mappings that are the same objects as the last time are not looked into again: they must not change."""
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
        """All that are there, by name."""
        if self._members is None:
            every = [*self._others.values(), *((self.myself,) if self.myself else ())]
            self._members = tuple(sorted(every, key=lambda member: member.name))
        return self._members

    def hosting(self, topic_uid: int) -> Mapping[str, int]:
        """Healthy consumers of the topic by broker's name."""
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
        """Those that this broker deals; None: all."""
        hosting = self.hosting(topic_uid)
        if self.myself is None or self.myself.name not in hosting:
            return ()
        if len(hosting) == 1:
            return None
        return self._assignment(topic_uid, buckets).of(self.myself.name)

    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        """Who deals `bucket`."""
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
    """What every membership answers from its `View`, whoever keeps that new."""

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
