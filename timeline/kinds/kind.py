"""The decisions of a kind of topic."""

from __future__ import annotations

from typing import Any, Protocol

from timeline.columns import Bools, Int64
from timeline.model import TopicSettings


class Scheduled(Protocol):
    """The part of a message that a kind may look at. `leases.Message` has it. Times are milliseconds UTC, 0 is none."""

    @property
    def due_ms(self) -> int: ...
    @property
    def scheduled_ms(self) -> int: ...
    @property
    def asked_ms(self) -> int: ...
    @property
    def deliveries(self) -> int: ...
    @property
    def expires_ms(self) -> int: ...


class Kind(Protocol):
    """The rules in which kinds differ. Pure: the time is an argument."""

    in_batches: bool
    """Whether its rules are those that stores apply to whole batches."""

    def due_of_put(self, asked_ms: int, now_ms: int) -> int:
        """Return when a message is due whose producer asks for `asked_ms`."""
        ...

    def order(self, message: Scheduled, id: bytes) -> Any:
        """Return the sort key by which a bucket is leased. The keys of one kind compare with each other."""
        ...

    def due_of_release(self, message: Scheduled, asked_ms: int, now_ms: int, unseen: bool) -> int:
        """Return when a released message is due. `asked_ms`: what its holder asks for. `unseen`: no code saw it."""
        ...

    def due_after_expiry(self, message: Scheduled, settings: TopicSettings) -> int:
        """Return when a message may be leased again whose lease runs out at `message.due_ms`."""
        ...

    def late_from(self, was_due_ms: Int64, scheduled_ms: Int64, again: Bools) -> Int64:
        """Return for each delivery the time from which its lateness counts. `again`: leased after a lease ran out."""
        ...
