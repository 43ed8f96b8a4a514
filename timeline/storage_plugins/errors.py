"""The errors of a store. The code says what became of the call, and whether it may be repeated."""

from __future__ import annotations

from collections.abc import Iterable

from timeline.errors import TimelineError


class StoreError(TimelineError):
    """Base of all errors of a store."""

    @property
    def detail(self) -> str:
        """The reason without the code, for answers whose status says the code."""
        return self.reason or self.advice or self.code


class StoreUnavailable(StoreError):
    """Nothing of the call happened; it may be repeated."""

    code = "UNAVAILABLE"
    retryable = True
    advice = "the store cannot be used now; nothing happened"


class StoreFull(StoreUnavailable):
    """Nothing of the call happened, for want of space. Calls that only read still work, as may those that free some."""

    advice = "the store has no room; nothing happened"


class StoreUnknown(StoreError):
    """The call may have happened: the store's answer was lost."""

    code = "UNKNOWN"
    retryable = True
    advice = "the store's answer was lost; it may have happened"


class StoreRefused(StoreError):
    """The store cannot be opened as configured: a wrong URL, a newer schema, a file in use, or settings that lose data.
    Not retryable: the text says what to change."""

    code = "REFUSED"


class TopicConflict(StoreError):
    """A topic record exists with other settings, or changed since it was read (compare-and-set lost)."""

    code = "EXISTS"


def gravest(errors: Iterable[StoreError], done: bool = False) -> StoreError:
    """Return the error of a call whose parts failed with `errors`. `done`: other parts were done, so that something
    happened."""
    failed = list(errors)
    worst = next((error for error in failed if not isinstance(error, StoreUnavailable)), failed[0])
    if done and isinstance(worst, StoreUnavailable):
        return StoreUnknown(f"a part of it was done, then: {worst.reason}")
    return worst
