"""A broker among others: which consumers it hosts, who is there, and hints of what comes due elsewhere.

All of that makes delivery fast. No safety rests on it, and no caller waits for it.

Hints of a topic gather while a call to a broker is under way. The earliest due time stands for all, because the peer's
own round finds the rest. A hint that an overloaded peer refuses is sent again a little later. A call that fails
otherwise drops its hints, and the next call comes after a rest. The peer's slow poll and its sweep find what it missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from timeline.broker.dispatch.roster import JoinedConsumer
from timeline.broker.runtime import Runtime
from timeline.columns import Bools, Int64, Ragged
from timeline.model import Topic, buckets_of
from timeline.sync import Member, Membership
from timeline.sync.view import assign
from timeline.wire import Fault, Hint, Hinted, TransportError, WireError, decode_as, encode

log = logging.getLogger("timeline.broker")


class PeerChannel(Protocol):
    """A connection to another broker."""

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        """Send one frame for one. Raise TransportError."""

    async def close(self) -> None:
        """End it, with all calls on it."""


PeerFactory = Callable[[str], PeerChannel]
"""Makes the channel to an address."""


News: TypeAlias = int | JoinedConsumer
"""What a peer is told of a topic: when something is due, in ms UTC, or who connected."""
Told: TypeAlias = dict[tuple[int, bytes], News]
"""News by topic's uid and consumer's id; the id of a due time is empty."""


class BrokerPeer:
    """Another broker, and the connection to it for calls and hints."""

    def __init__(self, peers: BrokerPeers, member: Member, channel: PeerChannel) -> None:
        self._peers, self.member, self.channel = peers, member, channel
        self.waiting: Told = {}
        self.gone = False
        self._running = False
        self._silent = False

    def tell(self, topic_uid: int, news: News) -> None:
        """Tell when something of the topic is due there, or that a consumer of it has connected here."""
        about = topic_uid, b"" if isinstance(news, int) else news.id
        if about not in self.waiting and len(self.waiting) >= self._peers.limits.hints_waiting:
            self._peers.count("dropped", 1)
            return
        self.waiting[about] = _newest(news, self.waiting.get(about))
        if not self._running:
            self._running = True
            self._peers.tasks.spawn(self._run(), f"hints to {self.member.name}")

    async def _run(self) -> None:
        try:
            while self.waiting and not self.gone:
                told, self.waiting = self.waiting, {}
                limits = self._peers.limits
                trouble = await self._send(told)
                rest_ms = limits.hint_pace_ms if trouble is None else limits.hint_rest_ms
                if isinstance(trouble, TransportError) and trouble.fault is Fault.OVERLOADED:
                    # It is there, and may have time in a moment: what it refused waits with what has come since.
                    rest_ms = limits.throttle_ms
                    self.waiting = told | {about: _newest(one, told.get(about)) for about, one in self.waiting.items()}
                    for about in list(self.waiting)[limits.hints_waiting :]:
                        del self.waiting[about]
                        self._peers.count("dropped", 1)
                elif trouble is not None:
                    self._peers.count("dropped", len(told))
                await asyncio.sleep(rest_ms / 1000.0)
        finally:
            self._running = False

    async def _send(self, told: Told) -> TransportError | WireError | None:
        """Return why the peer has not received them. None: it has."""
        count = len(told)
        joined = [None if isinstance(one, int) else one for one in told.values()]
        dues = (one if isinstance(one, int) else one.joined_ms for one in told.values())
        frame = Hint(
            self._peers.name,
            np.fromiter((uid for uid, _ in told), dtype=np.int64, count=count),
            np.fromiter(dues, dtype=np.int64, count=count),
        )
        if any(joined):
            frame.consumers = Ragged.of([b"" if one is None else one.id for one in joined])
            frame.sessions = np.array([0 if one is None else one.session for one in joined], dtype=np.uint64)
            frame.bearers = Ragged.of([b"" if one is None else one.bearer.encode() for one in joined])
        try:
            data = await self.channel.unary("Hint", encode(frame), self._peers.limits.hint_timeout_ms / 1000.0)
            decode_as(data, Hinted)
        except (TransportError, WireError) as trouble:
            if not self._silent:
                log.warning("broker %s gets no hints of what comes due there: %s", self.member.name, trouble.reason)
            self._silent = True
            return trouble
        self._silent = False
        self._peers.count("sent", count)
        return None


def _newest(news: News, before: News | None) -> News:
    """Return what to tell: of two due times the sooner one, of two sessions of a consumer the last one."""
    return min(news, before) if isinstance(news, int) and isinstance(before, int) else news


class BrokerPeers:
    """The other brokers of the cluster. `make` makes the channel to an address, on first use. None: there is none."""

    def __init__(self, runtime: Runtime, name: str, make: PeerFactory | None) -> None:
        self.name, self._make = name, make
        self.limits, self._metrics, self.tasks = runtime.limits, runtime.metrics, runtime.tasks
        self._peers: dict[str, BrokerPeer] = {}

    def count(self, outcome: str, many: int) -> None:
        """Count hints that were `sent`, `received` or `dropped`."""
        self._metrics.count("timeline_hints_total", outcome, by=many)

    def tell(self, member: Member, topic_uid: int, news: News) -> None:
        """Tell `member` when something of the topic is due in its buckets, or that a consumer has connected here. It
        returns at once."""
        peer = self.peer(member)
        if peer is None:
            self.count("dropped", 1)
        else:
            peer.tell(topic_uid, news)

    def peer(self, member: Member) -> BrokerPeer | None:
        """Return `member` with its one connection. None: it has no address, or there are as many as there may be."""
        peer = self._peers.get(member.name)
        if peer is not None and peer.member.address != member.address:
            self._part(self._peers.pop(member.name))
            peer = None
        if peer is None and self._make and member.address and len(self._peers) < self.limits.peers:
            peer = self._peers[member.name] = BrokerPeer(self, member, self._make(member.address))
        return peer

    def keep(self, members: Collection[Member]) -> None:
        """Forget all that are not among `members`."""
        there = {member.name for member in members}
        for name in [name for name in self._peers if name not in there]:
            self._part(self._peers.pop(name))

    def _part(self, peer: BrokerPeer) -> None:
        self.count("dropped", len(peer.waiting))
        peer.gone = True
        peer.waiting.clear()
        self.tasks.spawn(peer.channel.close(), f"parting with {peer.member.name}", finishes=True)

    async def close(self) -> None:
        """End all connections."""
        peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            peer.gone = True
            await peer.channel.close()


log = logging.getLogger("timeline.broker")
Hosting = Mapping[int, Mapping[str, int]]
"""Healthy consumers, by topic's uid and broker's name."""


class ClusterHints:
    """One broker's knowledge of the others, and its hints to them. `wake(topic uid, due_ms, commit_seq)` hears what
    comes due in this broker's own buckets, and `supersede(topic uid, consumer)` who connected elsewhere."""

    def __init__(
        self,
        runtime: Runtime,
        membership: Membership,
        name: str,
        make_peer: PeerFactory | None,
        wake: Callable[[int, int, int], bool],
        supersede: Callable[[int, JoinedConsumer], None],
    ) -> None:
        self.membership, self.name, self._wake, self._supersede = membership, name, wake, supersede
        self.peers = BrokerPeers(runtime, name, make_peer)
        self._retell_ms = runtime.limits.retell_ms
        self._serving = True
        self._lately: tuple[dict[int, int], dict[int, int]] = {}, {}
        """By topic's uid, the earliest due of recent hints, and that of a while before."""
        self._joined: tuple[dict[tuple[int, bytes], JoinedConsumer], dict[tuple[int, bytes], JoinedConsumer]] = {}, {}
        """Consumers that connected here, by topic's uid and id: of a while, and of a while before."""
        self._turned_ms = 0.0
        self._others: frozenset[str] = frozenset()
        """The other brokers' names at the last change."""

    # ── what it hosts ──

    def host(self, topic: Topic, consumers: Collection[bytes]) -> None:
        """Register the topic's healthy consumers here. A broker that does not serve hosts none."""
        self.membership.host(topic.uid, topic.name, consumers if self._serving else ())

    def stand(self, mono_ms: float, serving: bool) -> bool:
        """Note whether this broker can dispatch at all. Return whether that has changed: then all that it hosts must be
        registered again."""
        if mono_ms - self._turned_ms >= self._retell_ms:
            self._turned_ms, self._lately, self._joined = mono_ms, ({}, self._lately[0]), ({}, self._joined[0])
        changed, self._serving = serving != self._serving, serving
        return changed

    def buckets(self, topic: Topic) -> Sequence[int] | None:
        """Return the buckets of the topic that this broker dispatches. None: all."""
        return self.membership.buckets(topic.uid, topic.settings.buckets)

    def dealt(self, topic: Topic) -> int:
        """Return how many these are."""
        mine = self.buckets(topic)
        return topic.settings.buckets if mine is None else len(mine)

    # ── what comes due ──

    def scheduled(self, topic: Topic, ids: Ragged, due_ms: Int64, which: Bools, commit_seq: int) -> None:
        """Hint to the dispatchers of their buckets that messages, those `which`, have new due times, or may have."""
        at = np.flatnonzero(which)
        if not len(at):
            return
        soonest_ms = int(due_ms[at].min())
        self._keep(topic.uid, soonest_ms)
        if self.all_ours(topic):
            self._wake(topic.uid, soonest_ms, commit_seq)
            return
        many = topic.settings.buckets
        buckets = buckets_of(ids.take(at), many)
        earliest_ms: dict[int, int] = {}
        for bucket, when_ms in zip(buckets.tolist(), due_ms[at].tolist(), strict=True):
            known_ms = earliest_ms.get(bucket)
            if known_ms is None or when_ms < known_ms:
                earliest_ms[bucket] = when_ms
        told: dict[str, int] = {}
        for bucket, when_ms in earliest_ms.items():
            owner = self.membership.owner(topic.uid, bucket, many)
            if owner is not None and when_ms < told.get(owner.name, when_ms + 1):
                told[owner.name] = when_ms
        self._tell(topic, told, commit_seq)

    def scheduled_somewhere(self, topic: Topic, due_ms: int) -> None:
        """Hint to all hosts of the topic's consumers that messages in any bucket may be due at `due_ms`."""
        self._keep(topic.uid, due_ms)
        self._tell(topic, dict.fromkeys([*self.membership.hosting(topic.uid), self.name], due_ms), 0)

    def changed(self) -> None:
        """Repeat recent hints after brokers, or what they host, have changed.

        A bucket's new dispatcher may have looked into the store before a message was put, and nobody told it of that
        message. So all hosts hear again of what was due lately, and new brokers of who connected.
        """
        members = self.membership.members()
        self.peers.keep(members)
        others = {member.name: member for member in members if member.name != self.name}
        new, self._others = others.keys() - self._others, frozenset(others)
        for uid in {uid: None for dues in self._lately for uid in dues}:
            due_ms = min(dues[uid] for dues in self._lately if uid in dues)
            hosting = self.membership.hosting(uid)
            for name, member in others.items():
                if name in hosting:
                    self.peers.tell(member, uid, due_ms)
        for name in sorted(new):
            for (uid, _), consumer in (self._joined[1] | self._joined[0]).items():
                self.peers.tell(others[name], uid, consumer)

    def _keep(self, uid: int, due_ms: int) -> None:
        known_ms = self._lately[0].get(uid)
        if known_ms is None or due_ms < known_ms:
            self._lately[0][uid] = due_ms

    def alone(self) -> bool:
        """Return whether there is no other broker."""
        return all(member.name == self.name for member in self.membership.members())

    def all_ours(self, topic: Topic) -> bool:
        """Return whether no other broker dispatches any of it."""
        return all(name == self.name for name in self.membership.hosting(topic.uid))

    def _tell(self, topic: Topic, told: dict[str, int], commit_seq: int) -> None:
        if self.name in told:
            self._wake(topic.uid, told.pop(self.name), commit_seq)
        if told:
            for member in self.membership.members():
                if member.name in told:
                    self.peers.tell(member, topic.uid, told[member.name])

    def joined(self, topic: Topic, consumer: JoinedConsumer) -> None:
        """Tell all other brokers that a consumer of the topic has connected here. An earlier session of it ends there,
        also one that is silent or suspended, which makes a broker no host."""
        self._joined[0][topic.uid, consumer.id] = consumer
        for member in self.membership.members():
            if member.name != self.name:
                self.peers.tell(member, topic.uid, consumer)

    def hinted(self, hint: Hint) -> Hinted:
        """Take another broker's hints of what comes due here, and of who connected there."""
        self.peers.count("received", len(hint.topic_uid))
        known = 0
        ids = [b""] * len(hint.topic_uid) if hint.consumers is None else hint.consumers.tolist()
        for at, (uid, at_ms, id) in enumerate(zip(hint.topic_uid.tolist(), hint.due_ms.tolist(), ids, strict=True)):
            if not id:
                known += self._wake(uid, at_ms, 0)
            elif hint.sessions is not None and hint.bearers is not None:
                self._supersede(uid, JoinedConsumer(id, int(hint.sessions[at]), hint.bearers[at].decode(), at_ms))
        return Hinted(known)

    # ── who is there ──

    def addresses(self) -> tuple[str, ...]:
        """Return where drivers find the brokers that are there."""
        return tuple(member.address for member in self.membership.members() if member.address)

    def shown(self) -> str:
        """Return in words how this broker stands among the others."""
        state, members = self.membership.state, len(self.membership.members())
        counted = f"{state.join_state}, {members} broker{'' if members == 1 else 's'}"
        return f"{counted}: {state.reason}" if state.reason else counted


class MembershipLog:
    """Logs each change of who is there, once. Consumers that come and go also move buckets; that is not logged."""

    def __init__(self, membership: Membership, name: str) -> None:
        self._membership, self._name = membership, name
        self._there: set[str] | None = None
        self._hosting: dict[int, Mapping[str, int]] = {}

    def look(self, topics: Collection[Topic]) -> set[int] | None:
        """Log changes since the last look. The first look only learns who is there.

        Return None if no broker is gone, else the uids of the topics of which this broker has more buckets now.
        """
        there = {member.name for member in self._membership.members()} - {self._name}
        hosting = {topic.uid: self._membership.hosting(topic.uid) for topic in topics}
        before, self._there = self._there, there
        hosted, self._hosting = self._hosting, hosting
        if before is None or there == before:
            return None
        moved, gained = self._moved(topics, hosted, hosting)
        ours = sum(gained.values())
        said = f"{moved:,} bucket{'' if moved == 1 else 's'} changed hands, {ours:,} of them to this broker"
        for names, became, level in ((before - there, "gone", logging.WARNING), (there - before, "here", logging.INFO)):
            if names:
                who = f"broker{'' if len(names) == 1 else 's'} {', '.join(sorted(names))}"
                log.log(level, "%s %s %s: %s", who, "is" if len(names) == 1 else "are", became, said)
        return None if before <= there else set(gained)

    def _moved(self, topics: Collection[Topic], hosted: Hosting, hosting: Hosting) -> tuple[int, dict[int, int]]:
        """Return how many buckets have another dispatcher than before, and by topic how many of them this broker."""
        moved, gained = 0, {}
        for topic in topics:
            was, now = hosted.get(topic.uid, {}), hosting[topic.uid]
            if was == now:
                continue
            many = topic.settings.buckets
            before, after = assign(topic.uid, many, was), assign(topic.uid, many, now)
            changed = [after.owner(bucket) for bucket in range(many) if before.owner(bucket) != after.owner(bucket)]
            moved += len(changed)
            if self._name in changed:
                gained[topic.uid] = changed.count(self._name)
        return moved, gained
