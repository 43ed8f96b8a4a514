"""The consumer that all Takes of one topic share at one broker, and the Takes that wait for a message.

The dealer meets a consumer like any other. Its credit is what the waiting Takes have room for, without what is on its
way to them. The Take that has waited longest is served first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from timeline.broker.dispatch.leased_batch import LeasedBatch
from timeline.broker.dispatch.roster import OwnConsumer
from timeline.model import LeavingReason


@dataclass(slots=True, eq=False)
class WaitingTake:
    """One Take. `messages`, `bytes`: its room that is left. `batches`: what it gets. `over`: set once it has something,
    or will get nothing."""

    messages: int
    bytes: int
    batches: list[LeasedBatch] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def fitting(self, batch: LeasedBatch) -> int:
        """Return how many of the first rows of `batch` it has room for. A row that is larger than its bytes comes
        alone."""
        count, left = 0, self.bytes
        for size in batch.sizes[: self.messages].tolist():
            if size > left and (count or self.batches):
                break
            count, left = count + 1, left - size
        return count

    def get(self, batch: LeasedBatch, bytes_: int) -> None:
        """Give it `batch`, which has `bytes_` of content."""
        self.batches.append(batch)
        self.messages -= len(batch)
        self.bytes -= bytes_
        self.over.set()


@dataclass(slots=True, eq=False)
class PullConsumer(OwnConsumer):
    """The shared consumer. It has no outbox. What is pushed to it goes to the waiting Takes at once."""

    release: Callable[[list[LeasedBatch]], None] = lambda _: None
    """Releases unseen what no Take waits for."""
    takes: dict[WaitingTake, None] = field(default_factory=dict)
    emptied_ms: float = 0.0
    """Since when (monotonic) no Take has waited."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it left the roster, or must leave it."""
    dropped: bool = False
    """Whether that is because its topic was dropped."""

    @property
    def credit_ahead(self) -> int:
        """One for each Take that waits. A Take is over with its first message, and what was leased beside it for later
        would go back."""
        return min(self.credit_messages, len(self.takes) - self.in_flight)

    def wait(self, take: WaitingTake) -> None:
        """Let `take` wait. Its room becomes credit."""
        self.takes[take] = None
        self.room_messages += take.messages
        self.room_bytes += take.bytes
        self.add_credit(take.messages, take.bytes)

    def end(self, take: WaitingTake, now_ms: float) -> None:
        """End the wait of `take` at monotonic `now_ms`. The room that it did not use is credit no more."""
        del self.takes[take]
        self.room_messages -= take.messages
        self.room_bytes -= take.bytes
        self.spend(take.messages, take.bytes)
        if not self.takes:
            self.emptied_ms = now_ms

    def push(self, item: object) -> None:
        """Give a batch to the waiting Takes, and release unseen what none of them has room for. Other items are not for
        Takes."""
        if not isinstance(item, LeasedBatch):
            return
        for take in self.takes:
            count = take.fitting(item)
            if count:
                part = item.slice(0, count)
                bytes_ = int(part.sizes.sum())
                self.room_messages -= count
                self.room_bytes -= bytes_
                take.get(part, bytes_)
                item = item.slice(count, len(item))
            if not len(item):
                return
        self.refund(item)
        self.release([item])

    def withdraw(self) -> list[LeasedBatch]:
        """End all waits. Nothing that was pushed is left here."""
        self.gone = True
        self.ended.set()
        for take in self.takes:
            take.over.set()
        return []

    def leave(self, reason: LeavingReason, text: str) -> list[LeasedBatch]:
        """End all waits, for `reason`."""
        self.dropped = reason is LeavingReason.TOPIC_DROPPED
        return self.withdraw()
