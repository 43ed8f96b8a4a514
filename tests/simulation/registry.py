"""What etcd is to the simulated brokers: entries under leases, events that come late or get lost, and times in which it
does not answer, or has forgotten everything. What a broker makes of it is the very code of `timeline.sync`."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from timeline.sync import JoinState, Member, Membership, MembershipChange, MembershipState
from timeline.sync.view import View

if TYPE_CHECKING:
    from tests.simulation.loop import Process, Timer, VirtualLoop

TTL_S = 5.0
BEAT_S = 1.5
RELIST_S = 15.0
Key: TypeAlias = tuple[str, int]
"""A broker's name, and a topic's uid; 0 for the broker itself."""
GHOST = "ghost"


class Registry:
    """The cluster's entries. `slowest_s`: how late an event comes at most. `loss`: the chance that one gets lost.
    `down`: it answers nobody, and lets no lease run out meanwhile."""

    def __init__(self, loop: VirtualLoop, timer: Timer, rng: random.Random, occurred: Counter[str]) -> None:
        self.loop, self.timer, self._rng, self.occurred = loop, timer, rng, occurred
        self.slowest_s, self.loss, self.down = 0.01, 0.0, False
        self.cut: set[str] = set()
        """Brokers that do not reach it."""
        self.entries: dict[Key, Any] = {}
        self._seen_s: dict[str, float] = {}
        self._listeners: dict[str, RegistryMembership] = {}

    def answers(self, broker: str) -> bool:
        """Whether `broker` reaches it now."""
        return not self.down and broker not in self.cut

    def listen(self, broker: str, membership: RegistryMembership) -> None:
        self._listeners[broker] = membership

    def beat(self, broker: str, mine: Mapping[Key, Any]) -> None:
        """`broker` says that it is there, and what it hosts."""
        self._seen_s[broker] = self.loop.time()
        for key in [key for key in self.entries if key[0] == broker and key not in mine]:
            self._set(key, None)
        for key, value in mine.items():
            if self.entries.get(key) != value:
                self._set(key, value)

    def leave(self, broker: str) -> None:
        """All entries of `broker` go."""
        for key in [key for key in self.entries if key[0] == broker]:
            self._set(key, None)
        self._seen_s.pop(broker, None)

    def expire(self) -> None:
        """Leases run out, unless nobody could have kept them alive."""
        if self.down:
            self._seen_s = dict.fromkeys(self._seen_s, self.loop.time())
            return
        for broker, seen_s in list(self._seen_s.items()):
            if self.loop.time() - seen_s > TTL_S:
                self.occurred["broker's lease ran out"] += 1
                self.leave(broker)

    async def watch(self) -> None:
        """Lets leases run out as time goes by."""
        while True:
            await self.timer.wait(0.5)
            self.expire()

    def forget(self) -> None:
        """It lost its data."""
        self.entries.clear()
        self._seen_s.clear()

    def haunt(self, uids: Collection[int], consumers: int) -> None:
        """A broker that is not there is said to host so many consumers of each topic; none: it goes."""
        if not consumers:
            self.leave(GHOST)
            return
        self._set((GHOST, 0), Member(GHOST, f"{GHOST}:9000"))
        for uid in uids:
            self._set((GHOST, uid), consumers)

    def topics_changed(self, broker: str) -> None:
        """Tells all others to read the topics again."""
        self._tell(lambda membership: membership.topics_heard(), broker)

    def _set(self, key: Key, value: Any) -> None:
        if value is None:
            self.entries.pop(key, None)
        else:
            self.entries[key] = value
        self._tell(lambda membership: membership.heard(key, value), key[0])

    def _tell(self, event: Callable[[RegistryMembership], None], sender: str) -> None:
        for broker, membership in self._listeners.items():
            if broker == sender:
                continue
            if not self.answers(broker) or self._rng.random() < self.loss:
                self.occurred["event lost"] += 1
            else:
                membership.soon(self._rng.random() * self.slowest_s, event)


class RegistryMembership(Membership):
    """One broker's side: it beats, hears events in their order, and reads everything again now and then."""

    def __init__(self, registry: Registry, process: Process, name: str) -> None:
        self._registry, self._process, self.name = registry, process, name
        self._view = View()
        self._known: dict[Key, Any] = {}
        self._hosted: dict[int, int] = {}
        self._callbacks: list[Callable[[MembershipChange], None]] = []
        self._heard_s = 0.0
        self._revision_told = 0

    async def start(self, member: Member, cluster_uid: str) -> None:
        while not self._registry.answers(self.name):
            await self._registry.timer.wait(0.2)
        self._view.join(member)
        self._registry.listen(self.name, self)
        self._beat()
        self._relist()
        self._process.run(self._keep())

    async def stop(self) -> None:
        self._view.join(None)
        if self._registry.answers(self.name):
            self._registry.leave(self.name)

    async def _keep(self) -> None:
        relist_s = self._registry.loop.time() + RELIST_S
        while self._view.myself is not None:
            await self._registry.timer.wait(BEAT_S)
            if not self._registry.answers(self.name) or self._view.myself is None:
                continue
            self._beat()
            if self._registry.loop.time() >= relist_s:
                relist_s += RELIST_S
                self._relist()

    def _beat(self) -> None:
        if self._view.myself is None or not self._registry.answers(self.name):
            return
        mine: dict[Key, Any] = {(self.name, uid): count for uid, count in self._hosted.items() if count}
        self._registry.beat(self.name, {(self.name, 0): self._view.myself, **mine})

    def _relist(self) -> None:
        self._known = {key: value for key, value in self._registry.entries.items() if key[0] != self.name}
        self._learn()
        self._call(MembershipChange.TOPICS)

    def soon(self, delay_s: float, event: Callable[[RegistryMembership], None]) -> None:
        """An event comes, after those that came before it."""
        loop = self._registry.loop
        at = self._heard_s = max(self._heard_s, loop.time() + delay_s)
        self._process.call(loop.call_at, at, event, self)

    def heard(self, key: Key, value: Any) -> None:
        """An entry changed."""
        if value is None:
            self._known.pop(key, None)
        else:
            self._known[key] = value
        self._learn()

    def topics_heard(self) -> None:
        """Somebody changed a topic."""
        self._call(MembershipChange.TOPICS)

    def _learn(self) -> None:
        others = [value for (_, uid), value in self._known.items() if not uid]
        hosting: dict[int, dict[str, int]] = {}
        for (name, uid), value in self._known.items():
            if uid:
                hosting.setdefault(uid, {})[name] = value
        if self._view.learn(others, hosting):
            self._call(MembershipChange.MEMBERS)

    def _call(self, change: MembershipChange) -> None:
        for callback in self._callbacks:
            callback(change)

    @property
    def state(self) -> MembershipState:
        if self._view.myself is None:
            return MembershipState(JoinState.APART)
        there = self._registry.answers(self.name)
        return MembershipState(JoinState.JOINED if there else JoinState.FROZEN, self._view.revision)

    def on_change(self, callback: Callable[[MembershipChange], None]) -> None:
        self._callbacks.append(callback)

    def members(self) -> Sequence[Member]:
        return self._view.members()

    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        self._hosted[topic_uid] = len(consumers)
        if self._view.host(topic_uid, len(consumers)):
            self._call(MembershipChange.MEMBERS)
            self._process.call(self._registry.loop.call_later, 0.005, self._beat)

    def hosting(self, topic_uid: int) -> Mapping[str, int]:
        return self._view.hosting(topic_uid)

    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        return self._view.buckets(topic_uid, buckets)

    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        return self._view.owner(topic_uid, bucket, buckets)

    def topics_changed(self) -> None:
        if self._registry.answers(self.name):
            self._registry.topics_changed(self.name)
