"""Pictures of numbers for a terminal: columns of eighths of a block."""

from __future__ import annotations

import math
from collections.abc import Sequence

EIGHTHS = " ▁▂▃▄▅▆▇█"
NICE_STEPS_MS = (
    100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000, 900_000, 1_800_000,
    3_600_000, 7_200_000, 10_800_000, 21_600_000, 43_200_000, 86_400_000, 172_800_000, 604_800_000, 2_592_000_000,
    7_776_000_000, 31_536_000_000,
)  # fmt: skip


def nice_step_ms(window_ms: int, most: int) -> int:
    """A round step that cuts `window_ms` into at most `most` steps."""
    for step_ms in NICE_STEPS_MS:
        if -(-window_ms // step_ms) <= most:
            return step_ms
    return -(-window_ms // most)


def columns(counts: Sequence[float], height: int, top: float | None = None) -> list[str]:
    """`counts` as columns `height` lines high, the highest line first, one character each. `top`: what fills a column
    (default: the largest). Whatever is above 0 shows at least an eighth."""
    top = max(counts, default=0) if top is None else top
    eighths = [0 if count <= 0 or not top else max(1, round(min(count / top, 1) * height * 8)) for count in counts]
    return [
        "".join(EIGHTHS[min(8, max(0, filled - 8 * line))] for filled in eighths) for line in reversed(range(height))
    ]


def widened(counts: Sequence[float], width: int) -> list[float]:
    """`counts` repeated so that they fill `width` characters as far as whole repeats go; summed when there are more."""
    if not counts:
        return []
    if len(counts) <= width:
        times = max(1, width // len(counts))
        return [float(count) for count in counts for _ in range(times)]
    per = math.ceil(len(counts) / width)
    return [float(sum(counts[at : at + per])) for at in range(0, len(counts), per)]
