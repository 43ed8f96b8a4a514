"""Lease ahead: how long before its due a message may be leased, and how many a round takes that begins before.

A round that begins ahead of the next due has no time to lose: what it leases must be back by then, and a store takes
longer the more is asked for. So the first round of a hot instant takes few, which then go out on time, and while rounds
come back full each one takes more, until they are as large as any.

A round that begins for one message takes along what comes due soon after it: at a steady rate there would else be one
for each message, with a commit of its own. And as much as comes due while a round takes its time: the next one begins
when this one is back, and is back as long after that.
"""

from __future__ import annotations

import math

from timeline.broker.limits import Limits
from timeline.model import LEASE_AHEAD_AUTO

GROWTH = 4
"""How many times as much as a full round the next one takes."""


class Ahead:
    """One topic's way of leasing ahead."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._most = limits.ahead_messages

    def lead_ms(self, asked_ms: int, lease_p99_ms: float | None) -> int:
        """How long before the next due a round begins; 0: at the due. `auto`: the store's p99 lease time, capped, and
        the cap until a lease has been measured (None)."""
        if asked_ms != LEASE_AHEAD_AUTO:
            return asked_ms
        cap_ms = self._limits.lease_ahead_cap_ms
        return cap_ms if lease_p99_ms is None else min(cap_ms, math.ceil(lease_p99_ms))

    def window_ms(self, asked_ms: int, lease_p99_ms: float | None) -> int:
        """How far ahead of its due a message may be leased by a round that has begun; 0: not at all."""
        lead_ms = self.lead_ms(asked_ms, lease_p99_ms)
        if asked_ms != LEASE_AHEAD_AUTO:
            return lead_ms
        return min(self._limits.lease_ahead_cap_ms, lead_ms + max(lead_ms, self._limits.lease_along_ms))

    def most(self, next_due_ms: int | None, now_ms: int) -> int:
        """How many messages a round may lease that begins at `now_ms`."""
        if next_due_ms is None or next_due_ms <= now_ms:
            self._most = self._limits.ahead_messages
            return self._limits.lease_messages
        return min(self._most, self._limits.lease_messages)

    def took(self, asked: int, leased: int) -> None:
        """A round that might lease `asked` leased so many."""
        self._most = max(self._limits.ahead_messages, asked * GROWTH if leased >= asked else 0)
