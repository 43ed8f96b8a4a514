"""Whether a broker serves now, and if not, why."""

from __future__ import annotations

import asyncio

from timeline.broker.lanes.metered_store import MeteredStore
from timeline.sync import Membership

STARTING = "the broker is starting"
JOINING = "the broker waits to join its cluster"


class Readiness:
    """`state`: why it does not serve whatever its store says, empty while it may. `quarantined`: why it does not go by
    its own clock, empty while it does. `started_ms`: when it was started. `changed` is set whenever `not_ready` may
    have changed."""

    def __init__(self, store: MeteredStore, membership: Membership, changed: asyncio.Event) -> None:
        self._store, self._membership = store, membership
        self.changed = changed
        self.state = STARTING
        self.started_ms = 0
        self.quarantined = ""

    def say(self, state: str) -> None:
        """From now on this is why it does not serve; empty: it does, as far as its store permits."""
        self.state = state
        self.changed.set()

    @property
    def _keeps_off(self) -> str:
        if self.state == JOINING and self._membership.state.reason:
            return f"{JOINING}: {self._membership.state.reason}"
        return self.state or self.quarantined or self._store.refused

    @property
    def not_ready(self) -> str:
        """Why it does not serve now, in words; empty while it does."""
        if why := self._keeps_off:
            return why
        what = "takes no puts" if self._store.full else "is down"
        return f"the store {what}: {self._store.down}" if self._store.down else ""

    @property
    def no_calls(self) -> str:
        """Why it takes no calls, in words: what `not_ready` says, unless the store lacks nothing but room. That takes
        no puts, but answers whoever reads, and may take what frees some."""
        return "" if self._store.full and not self._keeps_off else self.not_ready
