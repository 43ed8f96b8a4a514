"""The membership contract. Membership makes delivery fast; safety never rests on it, only on the store.

A broker joins under its name (`start`), says which consumers it hosts (`host`), and asks which buckets it deals
(`buckets`) and who deals another one (`owner`). Nothing but `start` and `stop` ever waits for anybody: all else answers
at once from what is believed now, which may be old. Whoever believes something wrong loses a race at the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, StrEnum, auto


@dataclass(frozen=True, slots=True)
class Member:
    """A broker: its name, unique in the cluster, the address that drivers and other brokers reach it under, and the
    version of its program."""

    name: str
    address: str
    version: str = ""


class MembershipRefused(Exception):
    """This broker cannot join as it is configured; the message is a sentence that says how to mend it."""


class JoinState(StrEnum):
    """How a broker stands in its cluster.

    APART: it has not started, or has left. JOINING: it waits until it can join; `reason` says for what. JOINED: what it
    believes is confirmed again and again. FROZEN: it is not confirmed any more (etcd does not answer, or has no
    quorum); what was believed last holds, and delivery goes on. REFUSED: it had joined, and cannot come back as
    it is configured (its name or its prefix is another's by now); what was believed last holds, and it tries again.
    """

    APART = "apart"
    JOINING = "joining"
    JOINED = "joined"
    FROZEN = "frozen"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class MembershipState:
    """For /readyz, metrics and `timeline cluster`. `revision`: grows by one with each change of what this broker
    believes; its own count, not to be compared with another's. `stale_ms`: so long ago all of it was confirmed last, 0
    before the first time and for a cluster of one. `reason`: why it is not JOINED, in words; empty where it is."""

    join_state: JoinState
    revision: int = 0
    stale_ms: int = 0
    reason: str = ""


class MembershipChange(Flag):
    """What may have changed. MEMBERS: who is there, or who deals what. TOPICS: records of topics, to be read again from
    the store. JOIN_STATE: how this broker stands."""

    MEMBERS = auto()
    TOPICS = auto()
    JOIN_STATE = auto()


class Membership(ABC):
    """Who is there, and who deals which bucket. All methods run on the broker's event loop.

    `on_change` may be called before `start`. A membership starts once; a stopped one stays stopped.
    """

    @abstractmethod
    async def start(self, member: Member, cluster_uid: str) -> None:
        """Joins as `member` the cluster whose store is `cluster_uid`, and returns once it has; may be cancelled.

        As long as nobody can be asked (etcd is unreachable or without quorum), it waits: `state` is JOINING and says
        why. The same while a broker of this name that has just died is still believed to be there. Raises
        MembershipRefused where waiting does not help: the cluster there belongs to another store, or to a
        version that this one does not understand; another living broker has this name; wrong user, password or
        certificate.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Leaves; others notice at once, or, where they cannot be told within a second or two, once the broker's lease
        runs out. Harmless before `start` and a second time."""

    @property
    @abstractmethod
    def state(self) -> MembershipState:
        """How this broker stands now."""

    @abstractmethod
    def on_change(self, callback: Callable[[MembershipChange], None]) -> None:
        """`callback` is called on the event loop whenever something may have changed that this broker did not say
        itself by `host`; once too often rather than once too rarely. Several may be given. `members`, `buckets` and
        `owner` answer by the change already."""

    @abstractmethod
    def members(self) -> Sequence[Member]:
        """The brokers that are there, by name, this one too once it has joined."""

    @abstractmethod
    def host(self, topic_uid: int, topic: str, consumers: Collection[bytes]) -> None:
        """From now on this broker hosts these healthy consumers (their ids) of the topic, and no others; none at all:
        it deals nothing of it. Counts here at once, for others as soon as they can be told: what is called several
        times within a moment is told once, what has not changed not at all. `topic`: its name, for people."""

    @abstractmethod
    def hosting(self, topic_uid: int) -> Mapping[str, int]:
        """How many healthy consumers of the topic each broker hosts, by its name; those with none are left out."""

    @abstractmethod
    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        """Which of a topic's buckets this broker deals, in order; None: all of them. Empty where it hosts no consumer
        of the topic. Cheap: nothing is reckoned again until something changes."""

    @abstractmethod
    def owner(self, topic_uid: int, bucket: int, buckets: int) -> Member | None:
        """Who deals `bucket` of a topic of so many `buckets`, and is to be told what is put there; this broker itself,
        perhaps. None exactly when no broker hosts a consumer of the topic, as far as is known here."""

    @abstractmethod
    def topics_changed(self) -> None:
        """A topic's record was created, updated or dropped here: tells all other brokers to read them again, as soon as
        they can be told."""
