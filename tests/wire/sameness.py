"""Whether two frames say the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


def same(one: Any, other: Any) -> bool:
    """Equal types and equal fields; arrays of equal dtype and values; absent columns only where both are."""
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one)
        )
    return type(one) is type(other) and bool(one == other)
