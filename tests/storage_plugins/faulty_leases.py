"""Stores that lease with one plausible mistake each, and the check that must find it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from timeline.columns import Ragged
from timeline.model import Topic
from timeline.storage_plugins.contract import Grant, LeasedRows, Store
from timeline.storage_plugins.memory import MemoryStore

FAULTS: dict[type[Store], str] = {}


def caught_by(check: str) -> Callable[[type[Store]], type[Store]]:
    """Registers a faulty store with the check that must fail on it."""

    def register(faulty: type[Store]) -> type[Store]:
        FAULTS[faulty] = check
        return faulty

    return register


@dataclass(frozen=True)
class Call:
    """The arguments of a lease."""

    topic: Topic
    buckets: Sequence[int] | None
    now_ms: int
    due_before_ms: int
    grants: Sequence[Grant]
    overdue_ms: int = 0

    def granting(self, **changes: int) -> Call:
        """With other grants."""
        return replace(self, grants=[replace(grant, **changes) for grant in self.grants])

    def setting(self, **changes: int) -> Call:
        """With other settings."""
        return replace(self, topic=replace(self.topic, settings=replace(self.topic.settings, **changes)))


class Plain(MemoryStore):
    """A store whose leases go through `lease`, so that a fault is a few lines."""

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        return await self.lease(Call(topic, buckets, now_ms, due_before_ms, grants, overdue_ms))

    async def lease(self, call: Call) -> LeasedRows:
        return await super().lease_due(
            call.topic, call.buckets, call.now_ms, call.due_before_ms, call.grants, call.overdue_ms
        )


@caught_by("lease_is_never_early")
class EarlyByAMillisecond(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        return await super().lease(replace(call, now_ms=call.now_ms + 1))


@caught_by("buckets_subset")
class LeasesFromAnyBucket(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        return await super().lease(replace(call, buckets=None))


@caught_by("grants_by_count")
class LeasesOneTooMany(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        more = [replace(grant, count=grant.count + 1) for grant in call.grants]
        return await super().lease(replace(call, grants=more))


@caught_by("grants_by_bytes")
class IgnoresBytes(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        return await super().lease(call.granting(max_bytes=1 << 40))


@caught_by("fairness")
class FillsTheFirstConsumer(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        leased = await super().lease(call)
        counts = [grant.count for grant in call.grants]
        whose = np.repeat(np.arange(len(counts), dtype=np.uint32), counts)
        leased.grant = whose[: len(leased.grant)]
        return leased


@caught_by("order_by_due_and_id")
class LeasesLatestFirst(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        leased = await super().lease(call)
        back = np.arange(len(leased.rows))[::-1]
        leased.rows, leased.grant = leased.rows.take(back), leased.grant[back]
        leased.was_due_ms, leased.prior_holders = leased.was_due_ms[back], leased.prior_holders.take(back)
        return leased


@caught_by("grants_by_count")
class ForgetsWhatIsLeftOver(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        leased = await super().lease(call)
        if leased.next_due_ms is not None and leased.next_due_ms <= call.now_ms:
            leased.next_due_ms = None
        return leased


@caught_by("lease_runs_out")
class ForgetsWhoHadIt(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        leased = await super().lease(call)
        leased.prior_holders = Ragged.repeat(b"", len(leased.rows))
        return leased


@caught_by("redelivery_backoff")
class NeverRests(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        return await super().lease(call.setting(redelivery_backoff_ms=0))


@caught_by("lease_ahead")
class NeverAhead(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        return await super().lease(replace(call, due_before_ms=0))


@caught_by("lease_of_what_is_overdue")
class SweepsWhatIsFresh(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        return await super().lease(replace(call, overdue_ms=0))


@caught_by("max_deliveries")
class DeliversForEver(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        return await super().lease(call.setting(max_deliveries=0))


@caught_by("expired_is_not_leased")
class ExpiryUncounted(Plain):
    async def lease(self, call: Call) -> LeasedRows:
        leased = await super().lease(call)
        leased.expired = 0
        return leased


@caught_by("racing_leases")
class LeasesByReadingFirst(Plain):
    """Callers that come while another one waits for its answer get the same rows."""

    waiting: LeasedRows | None = None

    async def lease(self, call: Call) -> LeasedRows:
        if self.waiting is not None:
            return self.waiting
        self.waiting = await super().lease(call)
        await asyncio.sleep(0)
        leased, self.waiting = self.waiting, None
        return leased
