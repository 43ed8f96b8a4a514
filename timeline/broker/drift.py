"""How far this broker's clock is from other clocks. This decides whether a step is followed, and whether the broker
warns or quarantines itself.

Pure: all readings are arguments. An exchange of four readings places another clock on our *monotonic* clock, with a
bound of the error. So nobody who sets our wall clock spoils a measurement. The quickest exchange is the best known: its
error is half a round trip.

    sound ──off by 50 ms──▶ warned ──off by 500 ms from most──▶ quarantined ──within 250 ms──▶ returning ──5 s──▶ sound

Each offset is a range that holds the truth. A clock is off only if its whole range is, so that a slow network alone
never looks like a wrong clock.
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
"""Fewest clocks, our own among them, in which a majority can outvote one."""
WANDER = 0.006
"""Most that another clock may go faster or slower than ours. A slewed broker's clock differs by 5 ms a second; crystals
differ a little more."""
GRAIN_MS = 0.001
"""Error of a float of milliseconds since 1970 that was made from seconds."""
SAMPLES = 16
FRESH_MS = 10_000.0
"""A clock that was not read for this long is not counted."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Another clock less our monotonic clock, in ms, give or take `error_ms`, measured at monotonic `at_ms`."""

    less_ours_ms: float
    error_ms: float
    at_ms: float

    def error_at(self, mono_ms: float) -> float:
        """Return its error by now. Both clocks went on, each at its own pace."""
        return self.error_ms + WANDER * abs(mono_ms - self.at_ms)


def sample(sent_ms: float, received_ms: float, answered_ms: float, arrived_ms: float) -> Sample | None:
    """Return the result of one exchange. Sent and arrived are by our monotonic clock, received and answered by the
    other.

    None: these times cannot be, because the other clock was set in between.
    """
    held_ms = answered_ms - received_ms
    travelled_ms = arrived_ms - sent_ms - held_ms
    wandered_ms = WANDER * (arrived_ms - sent_ms) + GRAIN_MS
    if held_ms < 0 or travelled_ms < -wandered_ms:
        return None
    less_ours_ms = ((received_ms - sent_ms) + (answered_ms - arrived_ms)) / 2
    return Sample(less_ours_ms, max(0.0, travelled_ms) / 2 + wandered_ms, arrived_ms)


class ClockSamples:
    """Latest measurements of one clock. `set_at_ms`: when it was last seen to have been set (monotonic)."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.set_at_ms: float | None = None

    def take(self, new: Sample) -> None:
        """Add a measurement. Those that it contradicts are older than a setting of the clock."""
        agreeing = [old for old in self._samples if _agree(old, new)]
        if len(agreeing) < len(self._samples):
            self.set_at_ms = new.at_ms
            self._samples = deque(agreeing, maxlen=SAMPLES)
        self._samples.append(new)

    def best(self, mono_ms: float) -> Sample | None:
        """Return the measurement with the least error by `mono_ms`. None: there is none."""
        return min(self._samples, key=lambda one: one.error_at(mono_ms), default=None)

    def fresh(self, mono_ms: float) -> bool:
        """Return whether the clock was read lately."""
        return bool(self._samples) and mono_ms - self._samples[-1].at_ms <= FRESH_MS

    def steady(self, mono_ms: float) -> bool:
        """Return whether it was not set for a minute, or since we watch it."""
        return self.set_at_ms is None or mono_ms - self.set_at_ms >= ALONE_MS

    def offset(self, mono_ms: float, now_ms: float) -> Offset | None:
        """Return how far it is ahead of a clock of ours that says `now_ms` at monotonic `mono_ms`."""
        best = self.best(mono_ms)
        if best is None:
            return None
        return Offset.about(best.less_ours_ms - (now_ms - mono_ms), best.error_at(mono_ms))


def _agree(one: Sample, other: Sample) -> bool:
    """Return whether one clock, never set, can have been measured as both."""
    return abs(one.less_ours_ms - other.less_ours_ms) <= one.error_at(other.at_ms) + other.error_ms


@dataclass(frozen=True, slots=True)
class Offset:
    """How far another clock is ahead of ours, in ms. It lies in [`low_ms`, `high_ms`]; `ahead_ms` is the likeliest."""

    ahead_ms: float
    low_ms: float
    high_ms: float

    @classmethod
    def about(cls, ahead_ms: float, error_ms: float) -> Offset:
        """Return the offset `ahead_ms`, give or take `error_ms`."""
        return cls(ahead_ms, ahead_ms - error_ms, ahead_ms + error_ms)

    @property
    def error_ms(self) -> float:
        """The largest error of `ahead_ms`."""
        return max(self.high_ms - self.ahead_ms, self.ahead_ms - self.low_ms)

    @property
    def sure_ms(self) -> float:
        """The least that it is off, in either direction."""
        return max(0.0, self.low_ms, -self.high_ms)


OURS = Offset(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our clock among `clocks`, itself counted. `lower` and `upper`: offsets of the two in the middle, the same if the
    number is odd."""

    clocks: int
    lower: Offset
    upper: Offset

    @property
    def median(self) -> Offset:
        """The one in the middle. Of two, the one further from ours."""
        return max(self.lower, self.upper, key=lambda one: (one.sure_ms, abs(one.ahead_ms)))

    @property
    def outvoted_ms(self) -> float:
        """The least by which more than half of all clocks are off ours, all on one side. If two halves disagree,
        neither is outvoted."""
        return max(0.0, self.lower.low_ms, -self.upper.high_ms)


def compare(others: Sequence[Offset]) -> Comparison:
    """Compare our clock with the median.

    The kth clock lies between the kth lowest bound and the kth highest bound. So the median's range holds whatever the
    errors are.
    """
    every = [OURS, *others]
    columns = [
        sorted(one.ahead_ms for one in every),
        sorted(one.low_ms for one in every),
        sorted(one.high_ms for one in every),
    ]
    lower, upper = (Offset(*(column[at] for column in columns)) for at in ((len(every) - 1) // 2, len(every) // 2))
    return Comparison(len(every), lower, upper)


class ClockFinding(StrEnum):
    """The result of a comparison. ALONE: no other clock is known. CLOSE, NEARLY, OFF, FAR: further and further from the
    median. OUTVOTED: off by 500 ms from most of three clocks or more."""

    ALONE = auto()
    CLOSE = auto()
    NEARLY = auto()
    OFF = auto()
    FAR = auto()
    OUTVOTED = auto()


def find(compared: Comparison) -> ClockFinding:
    """Return the finding of a comparison."""
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
    """Whether this broker goes by its clock. SOUND, WARNED: it does. QUARANTINED: it leases nothing. RETURNING: nothing
    yet, but the clock is close again."""

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
"""(state, finding) → the next state, and how long the state must have lasted. Other findings change nothing."""


class ClockJudgement:
    """The state to which the findings have led. `since_ms`: since when, monotonic."""

    def __init__(self, mono_ms: float) -> None:
        self.trust = Trust.SOUND
        self.since_ms = mono_ms

    def meet(self, finding: ClockFinding, mono_ms: float) -> bool:
        """Take a finding at `mono_ms`. Return whether it changed the state."""
        trust, after_ms = TRANSITIONS.get((self.trust, finding), (self.trust, 0.0))
        if trust is self.trust or mono_ms - self.since_ms < after_ms:
            return False
        self.trust, self.since_ms = trust, mono_ms
        return True


@dataclass(frozen=True, slots=True)
class Witness:
    """Another clock, asked about a step of our wall clock. `able`: it was not set lately and does not wait to be. A
    clock that jumped along with ours knows nothing of the step."""

    offset: Offset
    able: bool = True


def judge_step(step_ms: float, store: Witness | None, peers: Sequence[Witness]) -> StepVerdict:
    """Return what others say of a jump that put our wall clock `step_ms` ahead.

    CONFIRMED: the store's clock is with the wall, or a majority of our wall and the peers is. DENIED: more are with our
    clock. OPEN: no witness can say.
    """
    by_store = _side(step_ms, store)
    by_peers = [_side(step_ms, peer) for peer in peers]
    with_wall = by_peers.count(1)
    if by_store > 0 or (with_wall and 2 * (1 + with_wall) > 1 + len(peers)):
        return StepVerdict.CONFIRMED
    against = by_peers.count(-1) + (by_store < 0)
    return StepVerdict.DENIED if against > with_wall else StepVerdict.OPEN


def _side(step_ms: float, witness: Witness | None) -> int:
    """Return 1 if it is with the wall, -1 if it is with our clock, 0 if it cannot say or is with neither."""
    if witness is None or not witness.able or witness.offset.error_ms >= abs(step_ms) / 2:
        return 0
    from_ours_ms = abs(witness.offset.ahead_ms)
    from_wall_ms = abs(witness.offset.ahead_ms - step_ms)
    if min(from_ours_ms, from_wall_ms) > STEP_MS + witness.offset.error_ms:
        return 0
    return 1 if from_wall_ms < from_ours_ms else -1
