"""The membership contract. Membership makes delivery fast; safety never rests on it, only on the store.

A broker joins under its name (`start`) and says which consumers it hosts (`host`). It asks which buckets it dispatches
(`buckets`), and which broker dispatches another one (`owner`). Only `start` and `stop` wait. All else answers at once
from what is believed now, which may be old. A broker that is wrong loses a race at the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, StrEnum, auto


@dataclass(frozen=True, slots=True)
class Member:
    """A broker: its name, unique in the cluster; its address for drivers and other brokers; its program's version."""

    name: str
    address: str
    version: str = ""


class MembershipRefused(Exception):
    """This broker cannot join as it is configured. The message says what to change."""


class JoinState(StrEnum):
    """The state of a broker in its cluster.

    APART: it has not started, or has left. JOINING: it waits until it can join; `reason` says for what. JOINED: what it
    believes is confirmed again and again. FROZEN: it is no longer confirmed, as etcd does not answer or has no quorum.
    REFUSED: it had joined, and cannot come back as it is configured, as its name or prefix is another's by now; it
    tries again. In both states what was believed last holds, and delivery goes on.
    """

    APART = "apart"
    JOINING = "joining"
    JOINED = "joined"
    FROZEN = "frozen"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class MembershipState:
    """For /readyz, metrics and `timeline cluster`. `revision`: this broker's own count, which grows by one with each
    change of what it believes. `stale_ms`: time since all of it was confirmed; 0 before the first time and for a
    cluster of one. `reason`: why it is not JOINED, in words; empty if it is."""

    join_state: JoinState
    revision: int = 0
    stale_ms: int = 0
    reason: str = ""


class MembershipChange(Flag):
    """The part that may have changed. MEMBERS: the members, or the buckets they dispatch. TOPICS: topic records, which
    are to be read again from the store. JOIN_STATE: this broker's state."""

    MEMBERS = auto()
    TOPICS = auto()
    JOIN_STATE = auto()


class Membership(ABC):
    """The members, and which of them dispatches which bucket. All methods run on the broker's event loop.

    `on_change` may be called before `start`. A membership starts once; a stopped one stays stopped.
    """

    @abstractmethod
    async def start(self, member: Member, cluster_uid: str) -> None:
        """Join, as `member`, the cluster whose store is `cluster_uid`. Return once it has; may be cancelled.

        While etcd is unreachable or without quorum, it waits: `state` is JOINING and says why. It also waits while a
        dead broker of this name is still listed. Raise MembershipRefused if waiting does not help: the cluster belongs
        to another store, or to a version that this one does not understand; another living broker has this name; or
        user, password or certificate are wrong.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Leave. Others notice at once; if they cannot be told within a second or two, they notice when the broker's
        lease runs out. Harmless before `start` and a second time."""

    @property
    @abstractmethod
    def state(self) -> MembershipState:
        """Return this broker's state."""

    @abstractmethod
    def on_change(self, callback: Callable[[MembershipChange], None]) -> None:
        """Have `callback` called on the event loop whenever something may have changed that this broker did not say by
        `host`. It may be called without a change. Several may be given. `members`, `buckets` and `owner` know of the
        change already."""

    @abstractmethod
    def members(self) -> Sequence[Member]:
        """Return the members by name, this broker too once it has joined."""

    @abstractmethod
    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        """Set which healthy consumers (ids) of the topic this broker hosts; with none it dispatches nothing of it. It
        counts here at once, and for others as soon as they can be told. Several calls within a moment are told once.
        `topic`: its name, for people."""

    @abstractmethod
    def hosting(self, topic_uid: int) -> Mapping[str, int]:
        """Return how many healthy consumers of the topic each broker hosts, by name. Brokers with none are left out."""

    @abstractmethod
    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        """Return which of a topic's buckets this broker dispatches, in order; None: all of them. Empty if it hosts no
        consumer of the topic. Cheap: calculated only after a change."""

    @abstractmethod
    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        """Return the broker that dispatches `bucket` of the topic, to be told of puts there; it may be this one. None
        if and only if no broker is known to host a consumer of the topic. `buckets`: the topic's number of buckets."""

    @abstractmethod
    def topics_changed(self) -> None:
        """Tell all other brokers, as soon as possible, to read topic records again: one was changed here."""
