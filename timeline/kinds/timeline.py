"""The kind `timeline`: each message is due at a time of its own, and messages are leased in that order."""

from __future__ import annotations

import numpy as np

from timeline.columns import Bools, Int64
from timeline.kinds.kind import Scheduled
from timeline.model import TopicSettings


class TimelineKind:
    """The rules of a timeline; see `kinds.Kind`."""

    in_batches = True

    def due_of_put(self, asked_ms: int, now_ms: int) -> int:
        return asked_ms

    def order(self, message: Scheduled, id: bytes) -> tuple[int, bytes]:
        return message.due_ms, id

    def due_of_release(self, message: Scheduled, asked_ms: int, now_ms: int, unseen: bool) -> int:
        return max(now_ms, message.scheduled_ms if unseen else asked_ms)

    def due_after_expiry(self, message: Scheduled, settings: TopicSettings) -> int:
        return message.due_ms + settings.redelivery_backoff_ms

    def late_from(self, was_due_ms: Int64, scheduled_ms: Int64, again: Bools) -> Int64:
        # A message that nobody saw yet is as late as its scheduled time says, though it was returned in between.
        late_from: Int64 = np.where(again, was_due_ms, np.minimum(was_due_ms, scheduled_ms))
        return late_from
