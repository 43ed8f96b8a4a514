"""The day's clock: real time mapped onto a day of 2013, `speed` times as fast."""

from __future__ import annotations

import datetime as dt
import math
from dataclasses import dataclass

from timeline.demo.flights import NEW_YORK


@dataclass(frozen=True, slots=True)
class DayClock:
    """At `real_ms` (milliseconds UTC, now) it is `day_ms` (milliseconds UTC, in 2013)."""

    real_ms: int
    day_ms: int
    speed: float

    def real(self, day_ms: float) -> int:
        """The real time at which the day's clock says `day_ms`, rounded up."""
        return math.ceil(self.real_ms + (day_ms - self.day_ms) / self.speed)

    def day(self, real_ms: float) -> int:
        """What the day's clock says at `real_ms`."""
        return int(self.day_ms + (real_ms - self.real_ms) * self.speed)

    def text(self, day_ms: float, seconds: bool = False) -> str:
        """New York's wall time at `day_ms`, such as 07:42."""
        return dt.datetime.fromtimestamp(day_ms / 1000, NEW_YORK).strftime("%H:%M:%S" if seconds else "%H:%M")
