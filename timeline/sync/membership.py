"""The membership contract. Membership makes delivery fast; safety never rests on it, only on the store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    """A broker: its name, unique in the cluster, and the address that drivers and other brokers reach it under."""

    name: str
    address: str


class Membership(ABC):
    """Who is there, and who deals which bucket. All methods run on the broker's event loop."""

    @abstractmethod
    async def start(self, member: Member) -> None:
        """Joins as `member`."""

    @abstractmethod
    async def stop(self) -> None:
        """Leaves; others notice at once."""

    @abstractmethod
    def members(self) -> Sequence[Member]:
        """The brokers that are there, this one too."""

    @abstractmethod
    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        """Which of a topic's buckets this broker deals; None: all of them."""

    @abstractmethod
    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back whenever members, buckets or topic records may have changed."""
