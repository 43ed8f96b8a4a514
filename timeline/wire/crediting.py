"""Whether the credit that came with a Settle counts: the one rule that broker and driver both go by, each from the same
answers, so that neither has to tell the other."""

from __future__ import annotations

import numpy as np

from timeline.columns import Bools, UInt8
from timeline.model import Operation, Status

_HELD = np.ones(256, dtype=np.bool_)
for _status in Status:
    _HELD[_status.code] = _status in (
        Status.INVALID,
        Status.TOO_LARGE,
        Status.THROTTLED,
        Status.UNAVAILABLE,
        Status.UNKNOWN,
    )


def still_held(status: UInt8) -> Bools:
    """Where an answer to a settle leaves the message with its consumer: nothing of it happened, or nobody knows. A
    number that this version does not know reads as UNKNOWN. After any other the consumer has it no longer, but for an
    extend that was answered OK."""
    held: Bools = _HELD[status]
    return held


def credit_counts(operation: UInt8, status: UInt8) -> bool:
    """Whether the credit of a Settle with these operations, answered so, counts: none of its acks, releases and burials
    left its message where it was. Otherwise none of it does. Extends neither give credit nor hold it back."""
    return not status.any() or not bool((still_held(status) & (operation != Operation.EXTEND)).any())
