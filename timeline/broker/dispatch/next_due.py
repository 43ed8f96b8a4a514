"""When a topic's next message is due, of what the store said last and what was hinted since. Pure.

A hint that comes while a round asks the store may be of something that the round did not see: it outlives what the
round is told. A store that numbers its commits says in which, and what a round has seen
needs no hint."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class NextDue:
    """`at_ms`: when; None: nothing is due, as far as is known; 0: a round has to find out."""

    at_ms: int | None = 0
    _hinted_ms: int | None = None
    _hinted_seq: float = 0.0
    _seen_seq: int = 0

    def hint(self, due_ms: int, commit_seq: int) -> bool:
        """A message came to be due at `due_ms`, in the store's `commit_seq` (0: it did not say). Return whether that is
        sooner than what was known."""
        if 0 < commit_seq <= self._seen_seq:
            return False  # the last round has seen it
        self._hinted_seq = max(self._hinted_seq, commit_seq or math.inf)
        if self._hinted_ms is None or due_ms < self._hinted_ms:
            self._hinted_ms = due_ms
        sooner = self.at_ms is None or due_ms < self.at_ms
        if sooner:
            self.at_ms = due_ms
        return sooner

    def look(self) -> None:
        """Anything may be due. Counts as a hint too, so that a round under way, which began before, does not have the
        last word."""
        self._hinted_ms = self.at_ms = 0
        self._hinted_seq = math.inf

    def ask(self) -> None:
        """A round asks the store now."""
        self._hinted_ms, self._hinted_seq = None, 0.0

    def told(self, due_ms: int | None, commit_seq: int) -> None:
        """The round that asked was told so, in the store's `commit_seq`."""
        self._seen_seq = commit_seq
        if self._hinted_seq <= commit_seq:
            self._hinted_ms = None
        times = [due for due in (due_ms, self._hinted_ms) if due is not None]
        self.at_ms = min(times, default=None)

    def not_told(self, now_ms: int) -> None:
        """The round that asked at about `now_ms` got no answer."""
        self.at_ms = min(self.at_ms or 0, now_ms)
