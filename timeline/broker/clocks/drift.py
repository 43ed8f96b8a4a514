"""How far this broker's clock is from others', and what follows: a step confirmed or denied, a warning, a quarantine.

Pure: whatever was read of clocks is handed in. Four readings of an exchange place another's clock on our *monotonic*
one, with a bound of what may be wrong; so nothing that is done to our wall clock spoils what was measured. Of several
exchanges the one that is known best counts, and that is the quickest: an error is half a round trip.

    sound ──off by 50 ms──▶ warned ──off by 500 ms from most──▶ quarantined ──within 250 ms──▶ returning ──5 s──▶ sound

Each offset is a range that the truth lies in. Only what is off by the whole of its range counts as off, so that a slow
network alone never looks like a wrong clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

from timeline.clock import ALONE_MS, CRITICAL_MS, STEP_MS, WARN_MS, StepVerdict

CALM_MS = WARN_MS / 2
"""A warning ends below it."""
BACK_MS = CRITICAL_MS / 2
"""A quarantine ends below it, once that has stood for RETURN_MS."""
RETURN_MS = 5_000.0
CLOCKS = 3
"""So many at least, our own among them, for most of them to be told from one that is wrong."""
WANDER = 0.006
"""By how much a clock may go faster or slower than ours: 5 ms a second while a broker's is slewed, and what crystals
are apart."""
GRAIN_MS = 0.001
"""What a float of milliseconds since 1970, made of seconds, may be wrong by."""
SAMPLES = 16
FRESH_MS = 10_000.0
"""A clock that was not read for so long is not counted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Another's clock less our monotonic clock, in ms, give or take `error_ms`, as measured at monotonic `at_ms`."""

    less_ours_ms: float
    error_ms: float
    at_ms: float

    def error_at(self, mono_ms: float) -> float:
        """Its error by now: both clocks went on, each at its own pace."""
        return self.error_ms + WANDER * abs(mono_ms - self.at_ms)


def sample(sent_ms: float, received_ms: float, answered_ms: float, arrived_ms: float) -> Sample | None:
    """What one exchange says: sent and arrived by our monotonic clock, received and answered by the other's. None when
    that cannot be, because the other was set in between."""
    held_ms = answered_ms - received_ms
    travelled_ms = arrived_ms - sent_ms - held_ms
    wandered_ms = WANDER * (arrived_ms - sent_ms) + GRAIN_MS
    if held_ms < 0 or travelled_ms < -wandered_ms:
        return None
    less_ours_ms = ((received_ms - sent_ms) + (answered_ms - arrived_ms)) / 2
    return Sample(less_ours_ms, max(0.0, travelled_ms) / 2 + wandered_ms, arrived_ms)


class ClockSamples:
    """What was measured lately of one clock. `set_at_ms`: when it was last seen to have been set (monotonic)."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.set_at_ms: float | None = None

    def take(self, new: Sample) -> None:
        """Another measurement. Those that it contradicts are of before the clock was set."""
        agreeing = [old for old in self._samples if _agree(old, new)]
        if len(agreeing) < len(self._samples):
            self.set_at_ms = new.at_ms
            self._samples = deque(agreeing, maxlen=SAMPLES)
        self._samples.append(new)

    def best(self, mono_ms: float) -> Sample | None:
        """What is known best at `mono_ms`: the least error by now. None before anything is."""
        return min(self._samples, key=lambda one: one.error_at(mono_ms), default=None)

    def fresh(self, mono_ms: float) -> bool:
        """Whether the clock was read lately."""
        return bool(self._samples) and mono_ms - self._samples[-1].at_ms <= FRESH_MS

    def steady(self, mono_ms: float) -> bool:
        """Whether it has gone on without being set, for as long as we have watched or a minute."""
        return self.set_at_ms is None or mono_ms - self.set_at_ms >= ALONE_MS

    def offset(self, mono_ms: float, now_ms: float) -> Offset | None:
        """How far it is ahead of a clock of ours that says `now_ms` at monotonic `mono_ms`."""
        best = self.best(mono_ms)
        if best is None:
            return None
        return Offset.about(best.less_ours_ms - (now_ms - mono_ms), best.error_at(mono_ms))


def _agree(one: Sample, other: Sample) -> bool:
    """Whether one clock, never set, can have been measured as both."""
    return abs(one.less_ours_ms - other.less_ours_ms) <= one.error_at(other.at_ms) + other.error_ms


@dataclass(frozen=True, slots=True)
class Offset:
    """By how much another clock is ahead of ours, in ms, negative: behind. It lies in [`low_ms`, `high_ms`];
    `ahead_ms` is the likeliest."""

    ahead_ms: float
    low_ms: float
    high_ms: float

    @classmethod
    def about(cls, ahead_ms: float, error_ms: float) -> Offset:
        """`ahead_ms`, give or take `error_ms`."""
        return cls(ahead_ms, ahead_ms - error_ms, ahead_ms + error_ms)

    @property
    def error_ms(self) -> float:
        """The most that `ahead_ms` can be wrong by."""
        return max(self.high_ms - self.ahead_ms, self.ahead_ms - self.low_ms)

    @property
    def sure_ms(self) -> float:
        """By how much it is off at least, whichever way."""
        return max(0.0, self.low_ms, -self.high_ms)


OURS = Offset(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our clock among `clocks`, itself counted. `lower` and `upper`: the two in the middle, which are one where the
    number is odd, ahead of ours by so much."""

    clocks: int
    lower: Offset
    upper: Offset

    @property
    def median(self) -> Offset:
        """The one in the middle; of two, that which is further from ours."""
        return max(self.lower, self.upper, key=lambda one: (one.sure_ms, abs(one.ahead_ms)))

    @property
    def outvoted_ms(self) -> float:
        """By how much more than half of all clocks are off ours at least, all to the same side: where two halves
        disagree, neither is outvoted."""
        return max(0.0, self.lower.low_ms, -self.upper.high_ms)


def compare(others: Sequence[Offset]) -> Comparison:
    """Our clock against the median. The kth of all lies between the kth of the least and the kth of the most that they
    can be, so the median's range holds whatever the errors are."""
    every = [OURS, *others]
    columns = [
        sorted(one.ahead_ms for one in every),
        sorted(one.low_ms for one in every),
        sorted(one.high_ms for one in every),
    ]
    lower, upper = (Offset(*(column[at] for column in columns)) for at in ((len(every) - 1) // 2, len(every) // 2))
    return Comparison(len(every), lower, upper)


class ClockFinding(StrEnum):
    """What a comparison says. ALONE: there is nobody to compare with. CLOSE, NEARLY, OFF, FAR: further and further from
    the median. OUTVOTED: off by 500 ms from most of three clocks or more."""

    ALONE = auto()
    CLOSE = auto()
    NEARLY = auto()
    OFF = auto()
    FAR = auto()
    OUTVOTED = auto()


def find(compared: Comparison) -> ClockFinding:
    """The finding."""
    if compared.clocks < 2:
        return ClockFinding.ALONE
    if compared.clocks >= CLOCKS and compared.outvoted_ms >= CRITICAL_MS:
        return ClockFinding.OUTVOTED
    off_ms = compared.median.sure_ms
    for least_ms, finding in ((BACK_MS, ClockFinding.FAR), (WARN_MS, ClockFinding.OFF), (CALM_MS, ClockFinding.NEARLY)):
        if off_ms >= least_ms:
            return finding
    return ClockFinding.CLOSE


class Trust(StrEnum):
    """Whether this broker goes by its clock. SOUND, WARNED: it does. QUARANTINED: it leases nothing. RETURNING: still
    so, but the clock is close again."""

    SOUND = auto()
    WARNED = auto()
    QUARANTINED = auto()
    RETURNING = auto()

    @property
    def quarantined(self) -> bool:
        return self in (Trust.QUARANTINED, Trust.RETURNING)


TRANSITIONS: dict[tuple[Trust, ClockFinding], tuple[Trust, float]] = {
    (Trust.SOUND, ClockFinding.OFF): (Trust.WARNED, 0.0),
    (Trust.SOUND, ClockFinding.FAR): (Trust.WARNED, 0.0),
    (Trust.SOUND, ClockFinding.OUTVOTED): (Trust.QUARANTINED, 0.0),
    (Trust.WARNED, ClockFinding.ALONE): (Trust.SOUND, 0.0),
    (Trust.WARNED, ClockFinding.CLOSE): (Trust.SOUND, 0.0),
    (Trust.WARNED, ClockFinding.OUTVOTED): (Trust.QUARANTINED, 0.0),
    (Trust.QUARANTINED, ClockFinding.ALONE): (Trust.RETURNING, ALONE_MS),
    (Trust.QUARANTINED, ClockFinding.CLOSE): (Trust.RETURNING, 0.0),
    (Trust.QUARANTINED, ClockFinding.NEARLY): (Trust.RETURNING, 0.0),
    (Trust.QUARANTINED, ClockFinding.OFF): (Trust.RETURNING, 0.0),
    (Trust.RETURNING, ClockFinding.FAR): (Trust.QUARANTINED, 0.0),
    (Trust.RETURNING, ClockFinding.OUTVOTED): (Trust.QUARANTINED, 0.0),
    (Trust.RETURNING, ClockFinding.ALONE): (Trust.SOUND, RETURN_MS),
    (Trust.RETURNING, ClockFinding.CLOSE): (Trust.SOUND, RETURN_MS),
    (Trust.RETURNING, ClockFinding.NEARLY): (Trust.WARNED, RETURN_MS),
    (Trust.RETURNING, ClockFinding.OFF): (Trust.WARNED, RETURN_MS),
}
"""(state, finding) → the next state, and how long the state must have lasted. What is absent changes nothing."""


class ClockJudgement:
    """The state that the findings have led to. `since_ms`: monotonic, since when."""

    def __init__(self, mono_ms: float) -> None:
        self.trust = Trust.SOUND
        self.since_ms = mono_ms

    def meet(self, finding: ClockFinding, mono_ms: float) -> bool:
        """A finding, at `mono_ms`; whether it changed the state."""
        trust, after_ms = TRANSITIONS.get((self.trust, finding), (self.trust, 0.0))
        if trust is self.trust or mono_ms - self.since_ms < after_ms:
            return False
        self.trust, self.since_ms = trust, mono_ms
        return True


@dataclass(frozen=True, slots=True)
class Witness:
    """Another clock, asked about a step of our wall. `able`: it was not set itself of late, nor waits to be: one that
    jumped along with ours knows nothing of it."""

    offset: Offset
    able: bool = True


def judge_step(step_ms: float, store: Witness | None, peers: Sequence[Witness]) -> StepVerdict:
    """What others say of a jump that put our wall `step_ms` ahead of our clock. CONFIRMED: the store's clock is with
    the wall, or a majority of our wall and the peers is. DENIED: more are with our clock. OPEN: nobody can say."""
    by_store = _side(step_ms, store)
    by_peers = [_side(step_ms, peer) for peer in peers]
    with_wall = by_peers.count(1)
    if by_store > 0 or (with_wall and 2 * (1 + with_wall) > 1 + len(peers)):
        return StepVerdict.CONFIRMED
    against = by_peers.count(-1) + (by_store < 0)
    return StepVerdict.DENIED if against > with_wall else StepVerdict.OPEN


def _side(step_ms: float, witness: Witness | None) -> int:
    """1: it is with the wall. -1: with our clock. 0: it cannot say, or is with neither."""
    if witness is None or not witness.able or witness.offset.error_ms >= abs(step_ms) / 2:
        return 0
    from_ours_ms = abs(witness.offset.ahead_ms)
    from_wall_ms = abs(witness.offset.ahead_ms - step_ms)
    if min(from_ours_ms, from_wall_ms) > STEP_MS + witness.offset.error_ms:
        return 0
    return 1 if from_wall_ms < from_ours_ms else -1
