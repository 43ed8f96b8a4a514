"""Sweeps: what expired, what is remembered no longer, dead letters past their retention; bounded, and nothing else."""

from __future__ import annotations

from timeline.model import Operation, Status
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import T0, Trial, expect, expect_equal, named, statuses


@check()
async def check_sweep_of_nothing(trial: Trial) -> None:
    """A sweep removes nothing of what lives, is leased, dead for ever or remembered within its time."""
    topic = await trial.topic_with(
        named(6), [T0] * 3 + [T0 + 500] * 3, expires_ms=[0, T0 + 900, 0] * 2, remember_ms=60_000
    )
    leased = await trial.lease(topic)
    await trial.settle(topic, [Operation.BURY, Operation.EXTEND, Operation.ACK], leased.rows, reason=b"x")
    before = await trial.everything(topic)
    swept = await trial.store.sweep(topic, T0 + 899, 1_000)
    expect_equal((swept.expired, swept.forgotten, swept.dead_purged), (0, 0, 0), "what a sweep removed")
    expect_equal(await trial.everything(topic), before, "rows afterwards")


@check()
async def check_sweep_expired(trial: Trial) -> None:
    """A sweep removes what expired and nobody holds, also where a lease has run out; not what is under a live lease,
    nor a dead letter; what it spared is swept when its lease has ended."""
    topic = await trial.topic_with([b"held", b"ran out", b"dead"], expires_ms=T0 + 100, remember_ms=1_000_000)
    leased = await trial.lease(topic, lease_ms=1_000)
    operations = [Operation.BURY if id == b"dead" else Operation.EXTEND for id in leased.rows.ids]
    regrant = [T0 + 50 if id == b"ran out" else T0 + 3_000 for id in leased.rows.ids]
    await trial.settle(topic, operations, leased.rows, time_ms=regrant, reason=b"x")
    await trial.stored(topic, [b"waiting", b"moved", b"stays"], T0 + 90, expires_ms=[T0 + 100, T0 + 100, T0 + 5_000])
    await trial.mutate(topic, Operation.MOVE, [b"moved"], T0 + 95)
    first = await trial.store.sweep(topic, T0 + 100, 1_000)
    expect_equal(first.expired, 2, "expired messages swept at the expiry")
    rows = await trial.everything(topic, now_ms=T0 + 100)
    expect_equal(sorted(rows), sorted([b"held", b"ran out", b"dead", b"stays"]), "ids left")
    second = await trial.store.sweep(topic, T0 + 1_000, 1_000)
    third = await trial.store.sweep(topic, T0 + 3_000, 1_000)
    expect_equal((second.expired, third.expired), (1, 1), "expired messages swept as leases end")
    rows = await trial.everything(topic, now_ms=T0 + 3_000)
    expect_equal(sorted(rows), [b"dead", b"stays"], "ids left in the end")
    again = await trial.put(topic, [b"waiting"], T0 + 4_000)
    expect_equal((statuses(again), again.settled.tolist()), ([Status.DUPLICATE], [1]), "put of what was swept")


@check()
async def check_sweep_dead_letters(trial: Trial) -> None:
    """Dead letters are purged when the topic's retention is past, and kept for ever when it is 0."""
    for retention_ms in (0, 1_000):
        topic = await trial.topic_with(named(2), dead_retention_ms=retention_ms)
        leased = await trial.lease(topic)
        await trial.settle(topic, Operation.BURY, leased.rows, reason=b"x")
        await trial.mutate(topic, Operation.REVIVE, named(1), T0 + 10)
        early = await trial.store.sweep(topic, T0 + 999, 1_000)
        expect_equal(early.dead_purged, 0, "dead letters purged before their time")
        late = await trial.store.sweep(topic, T0 + 1_001, 1_000)
        expect_equal(late.dead_purged, 1 if retention_ms else 0, "dead letters purged after their time")
        left = named(1) if retention_ms else named(2)
        expect_equal(sorted(await trial.everything(topic)), left, "ids left")


@check()
async def check_sweep_is_bounded(trial: Trial) -> None:
    """A sweep removes at most its limit of each kind and says when there is more; more sweeps remove all."""
    topic = await trial.topic_with(named(50), T0, expires_ms=T0 + 100, remember_ms=10_000)
    expired = forgotten = 0
    while expired < 50:
        swept = await trial.store.sweep(topic, T0 + 100, 7)
        expect(0 < swept.expired <= 7, f"a sweep of at most 7, with {50 - expired} to remove, removed {swept.expired}")
        expired += swept.expired
        expect(swept.more or expired == 50, f"a sweep says that there is no more, with {50 - expired} left")
    while forgotten < 50:
        swept = await trial.store.sweep(topic, T0 + 20_101, 7)
        expect(0 < swept.forgotten <= 7, f"a sweep of at most 7, with {50 - forgotten} left, forgot {swept.forgotten}")
        forgotten += swept.forgotten
        expect(swept.more or forgotten == 50, f"a sweep says that there is no more, with {50 - forgotten} left")
    expect_equal((expired, forgotten), (50, 50), "(expired, forgotten) in all")
    await trial.put(topic, named(50), wanted=Status.OK)
