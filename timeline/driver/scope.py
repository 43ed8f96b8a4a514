"""What part of a timeline a reader asks for, checked where it was written."""

from __future__ import annotations

from collections.abc import Iterable

from timeline.driver.times import When, instant_ms, shown
from timeline.errors import Invalid
from timeline.model import MAX_BUCKETS, State

MAX_LIMIT = 2**63 - 1
STATES = (State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD)


def wanted_states(state: str | Iterable[str] | None) -> tuple[State, ...]:
    """The states of a scan, none for all that live. Raises Invalid, as all of these do."""
    if state is None:
        return ()
    allowed = {one.value: one for one in STATES}
    wanted = [state] if isinstance(state, str) or not isinstance(state, Iterable) else list(state)
    for one in wanted:
        if not isinstance(one, str) or one not in allowed:
            raise Invalid(f"state must be one of {', '.join(allowed)}, not {one!r:.60}")
    return tuple(allowed[one] for one in wanted)


def wanted_due(due: tuple[When | None, When | None] | None) -> tuple[int, int]:
    """From when, and to before when, in milliseconds; 0: no bound."""
    if due is None:
        return 0, 0
    if not isinstance(due, tuple) or len(due) != 2:
        raise Invalid("due= is a pair (from, to) of points in time, either of them None for no bound")
    low, high = due
    from_ms = 0 if low is None else instant_ms(low, "due[0]")
    to_ms = 0 if high is None else instant_ms(high, "due[1]")
    if high is not None and to_ms <= from_ms:
        raise Invalid("due= is a pair (from, to) with from before to")
    return from_ms, to_ms


def wanted_buckets(buckets: tuple[int, int] | None) -> tuple[int, int]:
    """The first bucket, and the one behind the last; 0, 0: all."""
    if buckets is None:
        return 0, 0
    whole = isinstance(buckets, tuple) and len(buckets) == 2 and all(type(one) is int for one in buckets)
    if not whole or not 0 <= buckets[0] < buckets[1] <= MAX_BUCKETS:
        raise Invalid(f"buckets= is a pair (first, end) with 0 <= first < end <= {MAX_BUCKETS}, not {buckets!r:.60}")
    return buckets


def check_limit(limit: int) -> None:
    """Refuses what is no number of messages, 0 for all."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_LIMIT:
        raise Invalid(f"limit must be a whole number from 0 (all) to {MAX_LIMIT}, not {shown(limit)}")
