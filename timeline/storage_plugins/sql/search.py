"""What a lease may have: looked for along the timeline, and what has expired or was delivered out put away on the
way."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Ask, Decision, Message, decide
from timeline.leases.table import DELIVERED_OUT
from timeline.model import Operation, Rows, Status, TopicSettings
from timeline.storage_plugins.sql.changes import Changes
from timeline.storage_plugins.sql.rows import Part

MOST_REMOVED = 10_000
"""Expired and delivered-out messages that one call removes before it stops looking further, so that it does not hold up
everybody; what is left is due at once (`next_due_ms`)."""

C = TypeVar("C", bound=Changes)


class Search(ABC, Generic[C]):
    """Looks for what may be leased, and removes or buries what it meets that has expired or was delivered out.
    `at_once`: how many messages one look asks for at most."""

    at_once = 1 << 62

    def __init__(self, changes: C, buckets: Sequence[int] | None, due_before_ms: int, overdue_ms: int) -> None:
        self.changes = changes
        self.buckets = buckets
        self._overdue_ms = overdue_ms
        self._due_before_ms = due_before_ms
        self.expired = 0
        self.buried: list[Rows] = []

    @property
    def free_until_ms(self) -> int:
        """Up to which due a message that nobody holds may be leased."""
        now_ms = self.changes.now_ms
        return now_ms - self._overdue_ms if self._overdue_ms else max(now_ms, self._due_before_ms)

    @abstractmethod
    def look(self, held: bool, until_ms: int, after: tuple[int, bytes] | None, limit: int) -> Part:
        """The first `limit` messages by (due, id) beyond `after`, up to due `until_ms`: those nobody holds, or those
        with a holder."""

    @abstractmethod
    def first_held_ms(self) -> int | None:
        """The earliest due of messages with a holder."""

    def first(self, wanted: int) -> Part:
        """The first `wanted` eligible messages by (due, id). What nobody holds comes from one index, what a lease
        that ran out left from another; both are read in order and merged."""
        changes, settings = self.changes, self.changes.topic.settings
        if not wanted:
            return Part.concat([])
        until: tuple[tuple[bool, int], ...] = (
            (False, self.free_until_ms),
            (True, changes.now_ms - max(settings.redelivery_backoff_ms, self._overdue_ms)),
        )
        ran_out_ms = self.first_held_ms()
        if ran_out_ms is None or ran_out_ms > until[1][1]:
            until = until[:1]  # No lease ran out, as is most often so: asking for all of their columns costs more.
        eligible: list[Part] = []
        after: tuple[int, bytes] | None = None
        left, removed = wanted, 0
        while left and removed < MOST_REMOVED:
            asked = min(left, self.at_once)
            looks = (self.look(held, until_ms, after, asked) for held, until_ms in until)
            found = [part for part in looks if len(part)]
            if not found:
                break
            part = Part.merged(found, asked)
            after = (int(part.rows.due_ms[-1]), part.rows.ids[-1])
            chosen = self._chosen(part)
            if len(chosen):
                eligible.append(chosen)
            removed += len(part) - len(chosen)
            left -= len(chosen)
            if len(part) < asked:
                break
        changes.write()
        return Part.concat(eligible)

    def _chosen(self, part: Part) -> Part:
        """What of `part` may be leased. Plain messages by a glance at the columns, the others by the rules."""
        now_ms, most = self.changes.now_ms, self.changes.topic.settings.max_deliveries
        rows = part.rows
        plain = (rows.expires_ms == 0) | (rows.expires_ms > now_ms)
        if most:
            plain &= rows.deliveries < most
        if plain.all():
            return part
        for at in np.flatnonzero(~plain).tolist():
            plain[at] = self._by_rules(part, at)
        return part.take(np.flatnonzero(plain))

    def _by_rules(self, part: Part, at: int) -> bool:
        """Whether one message may be leased; removes it when it expired, buries it when it was delivered out."""
        changes, settings = self.changes, self.changes.topic.settings
        one = part.take(np.array([at], dtype=np.intp))
        stored = one.stored()
        status = met(stored.message, self._due_before_ms, changes.now_ms, settings)
        if status is Status.EXPIRED:
            changes.remove(one.rows.ids[0], stored)
            self.expired += 1
        elif status is Status.DEAD:
            ask, decision = burial(stored.message, changes.now_ms, settings)
            if decision.status is Status.OK and decision.message is not None:
                changes.apply(stored, one.rows.ids[0], ask, decision)
                self.buried.append(buried(one.rows, decision.message))
        return status is Status.OK


def met(message: Message, due_before_ms: int, now_ms: int, settings: TopicSettings) -> Status:
    """What becomes of a message that a search meets: OK: it may be leased; EXPIRED: it goes; DEAD: it is buried."""
    ask = Ask(Operation.LEASE, time_ms=1, holder=b"?", due_before_ms=due_before_ms)
    return decide(message, ask, now_ms, settings).status


def burial(message: Message, now_ms: int, settings: TopicSettings) -> tuple[Ask, Decision]:
    """The burial of a message that was delivered out."""
    ask = Ask(
        Operation.BURY,
        birth=message.birth,
        version=message.version,
        holder=message.holder,
        reason=DELIVERED_OUT,
    )
    return ask, decide(message, ask, now_ms, settings)


def buried(rows: Rows, message: Message) -> Rows:
    """The row of a message, as `message` stands now that it is buried."""
    died_ms = np.array([message.died_ms], dtype=np.int64)
    return dataclasses.replace(rows, dead=Ragged.of([message.dead]), died_ms=died_ms)


__all__ = ["MOST_REMOVED", "Search", "burial", "buried", "met"]
