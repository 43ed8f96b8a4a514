"""The one place where tests sleep: while they poll a condition that nothing announces."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.02


def until(holds: Callable[[], object], within_s: float = 60.0) -> None:
    """Return once `holds()` is true. Raise AssertionError if that takes longer than `within_s`, or if `holds` does.

    Use it for files, other processes and threads. Inside one event loop, await what brings the condition about.
    """
    over_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < over_s, f"the condition did not hold within {within_s:g} s"
        time.sleep(LOOK_S)
