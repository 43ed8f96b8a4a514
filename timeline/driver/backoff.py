"""What becomes of a message whose handler did not do it: again after a backoff, again when it says, or never."""

from __future__ import annotations

from dataclasses import dataclass

from timeline.driver.message import Randomness
from timeline.driver.times import Duration, When, duration_ms, shown
from timeline.errors import Invalid


@dataclass(frozen=True)
class Backoff:
    """How long a message whose handler failed waits: `first`, then `factor` times as long with each delivery, at most
    `cap`, give or take the share `jitter`. Raises Invalid for values out of range, and for a `first` above `cap`."""

    first: Duration = "1s"
    factor: float = 2.0
    cap: Duration = "1h"
    jitter: float = 0.2

    def __post_init__(self) -> None:
        first_ms, cap_ms = duration_ms(self.first, "first"), duration_ms(self.cap, "cap")
        if first_ms > cap_ms:
            said = f"first must be at most cap, not {shown(self.first)} with cap={shown(self.cap)}"
            raise Invalid(f"{said}. Give a longer cap")
        if not _is_number(self.factor) or not 1.0 <= self.factor <= 1_000.0:
            raise Invalid(f"factor must be from 1 to 1000, not {shown(self.factor)}")
        if not _is_number(self.jitter) or not 0.0 <= self.jitter <= 1.0:
            raise Invalid(f"jitter must be from 0 to 1, not {shown(self.jitter)}")

    def delay_ms(self, deliveries: int, random: Randomness) -> int:
        """The wait in ms after the `deliveries`-th delivery failed."""
        first_ms, cap_ms = duration_ms(self.first, "first"), duration_ms(self.cap, "cap")
        # Beyond 2^64 times the first wait every cap is reached; larger powers would only overflow.
        grown = min(float(cap_ms), first_ms * min(self.factor ** min(deliveries - 1, 64), 2.0**64))
        return max(0, round(grown * (1.0 + self.jitter * (2.0 * random.random() - 1.0))))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Retry(Exception):
    """Raised by a handler: not now, again `in_` a while or `at` a time (at once when neither is given)."""

    def __init__(self, in_: Duration | None = None, at: When | None = None, reason: str = "") -> None:
        self.in_, self.at, self.reason = in_, at, str(reason)  # often the exception itself
        super().__init__(self.reason or "retry")


class Bury(Exception):
    """Raised by a handler: this message can never be handled; make it a dead letter with this reason."""

    def __init__(self, reason: str) -> None:
        self.reason = str(reason)  # often the exception itself
        super().__init__(self.reason)
