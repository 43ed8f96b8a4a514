"""Rounds of dealing. Pure. `NextDue` and `RateLimit` say when the next one begins. `LeaseAhead` says how long before
the next due, and for how many messages.

A hint that comes while a round asks the store may be of something that the round did not see. So it outlives the
round's answer. A store that numbers its commits says in which; a round that has seen that commit needs no hint.

A round ahead of the next due must be back by then, and a store takes longer if it is asked for more. So the first round
of a hot instant takes few, which go out on time. While rounds come back full, each takes more, until they have full
size. A slow store spends little of that time on each message: so a round takes more if it has more time.

A round for one message takes along what comes due soon after it. At a steady rate each message would else have a round,
and a commit, of its own. It also takes along what comes due while it runs: the next round begins when this one is back,
and is back as long after that.

The time of a store's leases counts as messages meet it. One lease of 40 ms among a hundred of 2 ms holds up a sixth of
them, not a hundredth. A shorter lead would have all of those late.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from timeline.broker.limits import Limits
from timeline.model import LEASE_AHEAD_AUTO, TopicSettings

ALONG_OF_ASKED = 4
"""If a topic says how far ahead, a round begins a quarter of that later, and takes along what comes due in that
quarter. At a steady rate there would else be a round for each message, or as many as the store can take."""
GROWTH = 4
"""How much more than a full round the next one takes."""
SHORT_MS = 50
USUAL = 4
"""Auto goes further ahead than SHORT_MS only if the store's leases take long as a rule: at most this many times their
mean. A store that stood still once is not slow, and leased messages cannot be moved."""
REMEMBERED_MS = 10_000.0
FEWEST, MOST = 128, 4_096
"""Fewest leases that are remembered, however old, and most, however recent."""


DUE_RATE_KEPT = 0.9
"""How much the rounds before weigh in the rate of messages, for each later one."""
BURST_MS = 100.0
"""A rate is a token bucket of a tenth of a second, so that it is even, not a burst each second."""


@dataclass(slots=True)
class NextDue:
    """`at_ms`: the next due time. None: nothing is due, as far as is known. 0: a round has to find out."""

    at_ms: int | None = 0
    _hinted_ms: int | None = None
    _hinted_seq: float = 0.0
    _seen_seq: int = 0

    def hint(self, due_ms: int, commit_seq: int) -> bool:
        """Note that a message came to be due at `due_ms`, in the store's `commit_seq` (0: unknown). Return whether that
        is sooner than what was known."""
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
        """Note that anything may be due. It counts as a hint, too: a round under way, which began before, does not have
        the last word."""
        self._hinted_ms = self.at_ms = 0
        self._hinted_seq = math.inf

    def ask(self) -> None:
        """A round asks the store now."""
        self._hinted_ms, self._hinted_seq = None, 0.0

    def told(self, due_ms: int | None, commit_seq: int) -> None:
        """The store answered `due_ms` to the round, in its `commit_seq`."""
        self._seen_seq = commit_seq
        if self._hinted_seq <= commit_seq:
            self._hinted_ms = None
        times = [due for due in (due_ms, self._hinted_ms) if due is not None]
        self.at_ms = min(times, default=None)

    def not_told(self, now_ms: int) -> None:
        """The round that asked at about `now_ms` got no answer."""
        self.at_ms = min(self.at_ms or 0, now_ms)


class RateLimit:
    """Messages per second. A limit of 0 is none."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at_ms: float | None = None

    def _fill(self, per_s: int, mono_ms: float) -> None:
        full = max(1.0, per_s * BURST_MS / 1000.0)
        if self._at_ms is None:
            self._tokens = full
        else:
            self._tokens = min(full, self._tokens + (mono_ms - self._at_ms) * per_s / 1000.0)
        self._at_ms = mono_ms

    def wait_ms(self, per_s: int, mono_ms: float) -> float:
        """Return how long until one message may go. 0: now."""
        if per_s == 0:
            self._at_ms = None
            return 0.0
        self._fill(per_s, mono_ms)
        return 0.0 if self._tokens >= 1.0 else (1.0 - self._tokens) * 1000.0 / per_s

    def allowance(self, per_s: int, mono_ms: float, most: int) -> int:
        """Return how many may go now, at most `most`."""
        if per_s == 0:
            return most
        self._fill(per_s, mono_ms)
        return max(0, min(most, int(self._tokens)))

    def took(self, per_s: int, count: int) -> None:
        """Note that `count` went."""
        if per_s:
            self._tokens -= count


class DueRate:
    """How fast a topic's messages came due in the last rounds."""

    def __init__(self) -> None:
        self._count = self._ms = 0.0
        self._at_ms: float | None = None

    def took(self, count: int, mono_ms: float) -> None:
        """Note that a round which began at `mono_ms` leased `count`."""
        if self._at_ms is not None:
            self._count = self._count * DUE_RATE_KEPT + count
            self._ms = self._ms * DUE_RATE_KEPT + mono_ms - self._at_ms
        self._at_ms = mono_ms

    def time_ms(self, count: float) -> int:
        """Return in which time about `count` messages come due. 0: not known."""
        return int(count * self._ms / self._count) if self._count and count > 0 else 0


class LeaseTimes:
    """Times of the store's leases in the last ten seconds."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float]] = deque()  # when it was back, how long it took
        self._ordered: list[float] = []  # kept in order: sorting at each lease cost a lone message 10 µs
        self._sum_ms = 0.0
        self.p99_ms: float | None = None
        """99 of 100 messages meet a lease that takes no longer. None until one has been measured."""

    @property
    def lead_ms(self) -> float | None:
        """The time of a lease for leasing ahead: the p99, within bounds. None until one has been measured."""
        if self.p99_ms is None:
            return None
        return min(self.p99_ms, max(SHORT_MS, USUAL * self._sum_ms / len(self._ordered)))

    def took(self, ms: float, mono_ms: float) -> None:
        """Note a lease that took `ms` and was back at `mono_ms`."""
        self._taken.append((mono_ms, ms))
        insort(self._ordered, ms)
        self._sum_ms += ms
        while len(self._taken) > FEWEST and (len(self._taken) > MOST or self._taken[0][0] < mono_ms - REMEMBERED_MS):
            _, forgotten_ms = self._taken.popleft()
            del self._ordered[bisect_left(self._ordered, forgotten_ms)]
            self._sum_ms -= forgotten_ms
        spare_ms = self._sum_ms * 0.01
        at = len(self._ordered) - 1
        while at > 0 and self._ordered[at] < spare_ms:
            spare_ms -= self._ordered[at]
            at -= 1
        self.p99_ms = self._ordered[at]


class LeaseAhead:
    """One topic's leasing ahead. `cap_ms`: the most where the topic says `auto`."""

    def __init__(self, limits: Limits, cap_ms: int) -> None:
        self._limits = limits
        self._cap_ms = cap_ms
        self._most = limits.ahead_messages

    def lead_ms(self, settings: TopicSettings, lease_ms: float | None) -> int:
        """Return how long before the next due a round begins. 0: at the due.

        `auto`: the time of a lease, and the cap until one has been measured (None). Else three quarters of the topic's
        setting. The cap lets a round take something along. Otherwise rounds would follow each other, each for what came
        into the window during the one before.
        """
        asked_ms = settings.lease_ahead_ms
        if asked_ms != LEASE_AHEAD_AUTO:
            return asked_ms - asked_ms // ALONG_OF_ASKED
        cap_ms = self._auto_cap_ms(settings)
        return cap_ms if lease_ms is None else min(max(cap_ms - self._limits.lease_along_ms, 0), math.ceil(lease_ms))

    def window_ms(self, settings: TopicSettings, lease_ms: float | None) -> int:
        """Return how far ahead of its due a round may lease a message. 0: not at all."""
        if settings.lease_ahead_ms != LEASE_AHEAD_AUTO:
            return settings.lease_ahead_ms
        lead_ms = self.lead_ms(settings, lease_ms)
        return min(self._auto_cap_ms(settings), lead_ms + max(lead_ms, self._limits.lease_along_ms))

    def _auto_cap_ms(self, settings: TopicSettings) -> int:
        # A rate counts what is leased: what was leased long before its due goes out beside what is leased then.
        return min(self._cap_ms, SHORT_MS) if settings.max_rate_per_s else self._cap_ms

    def most(self, next_due_ms: int | None, now_ms: int) -> int:
        """Return how many messages a round at `now_ms` may lease."""
        if next_due_ms is None or next_due_ms <= now_ms:
            self._most = self._limits.ahead_messages
            return self._limits.lease_messages
        in_time = self._limits.ahead_messages_per_ms * (next_due_ms - now_ms)
        return min(max(self._most, in_time), self._limits.lease_messages)

    def took(self, asked: int, leased: int) -> None:
        """Note that a round which might lease `asked` leased `leased`."""
        self._most = max(self._limits.ahead_messages, asked * GROWTH if leased >= asked else 0)
