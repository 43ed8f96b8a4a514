"""A call in parts that are committed one after the other: what is put, cut up; what was answered, joined; what failed,
as the whole call has to say it."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from timeline.storage_plugins.contract import Puts, StoreUnavailable, StoreUnknown

Result = TypeVar("Result")

PUT_AT_ONCE = 1_000
PUT_BYTES_AT_ONCE = 4 * 1024 * 1024
"""A larger put is done in parts of this size, in one transaction or several, so that leases need not wait for all of
it."""


def whole(parts: list[Result | BaseException], begun: bool = False) -> list[Result]:
    """The parts of a call when all of them were done. Else raises what the whole call is to say: where something was
    done (`begun`: before these), that nothing happened would be untrue."""
    done = [part for part in parts if not isinstance(part, BaseException)]
    failed = [part for part in parts if isinstance(part, BaseException)]
    if not failed:
        return done
    graver = next((error for error in failed if not isinstance(error, StoreUnavailable)), None)
    if graver is None and (done or begun) and isinstance(failed[0], StoreUnavailable):
        raise StoreUnknown(f"a part of it was done, then: {failed[0].reason}") from failed[0]
    raise graver or failed[0]


def cut(puts: Puts, at_once: int = PUT_AT_ONCE) -> list[Puts]:
    """The puts themselves, or, where they are more than `at_once` or large, parts that are committed one after the
    other."""
    count = len(puts)
    if count <= at_once and puts.payloads.nbytes <= PUT_BYTES_AT_ONCE:
        return [puts]
    ends = np.cumsum(puts.payloads.sizes)
    parts: list[Puts] = []
    start = 0
    while start < count:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + PUT_BYTES_AT_ONCE, "right"))
        stop = min(max(stop, start + 1), start + at_once, count)
        parts.append(puts.slice(start, stop))
        start = stop
    return parts
