"""Leases: who is eligible, in which order, for how long. Grants, credit and fairness. When to look again."""

from __future__ import annotations

import numpy as np

from timeline.model import Operation, Status, bucket_of
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import (
    PLENTY,
    T0,
    WORKER,
    Trial,
    by_id,
    expect,
    expect_equal,
    named,
    statuses,
)
from timeline.storage_plugins.contract import Grant


@check()
async def check_lease_is_never_early(trial: Trial) -> None:
    """A message that is due later than now is not leased, not by a millisecond. A message that is due now is leased."""
    topic = await trial.topic_with(named(5), [T0 + at for at in range(5)])
    await trial.lease(topic, now_ms=T0 + 2, wanted=named(3), next_due_ms=T0 + 3)


@check()
async def check_lease_changes_the_row(trial: Trial) -> None:
    """A lease sets due = max(now, due) + lease and the holder, and raises version and deliveries. The scheduled time
    stays. The store then holds just what was answered."""
    topic = await trial.topic_with([b"late", b"now"], [T0 - 5_000, T0])
    leased = await trial.lease(topic, lease_ms=20_000)
    rows = by_id(leased.rows)
    for id, due_ms in ((b"late", T0 - 5_000), (b"now", T0)):
        row = rows[id]
        found = [row[name] for name in ("due_ms", "holders", "version", "deliveries", "scheduled_ms", "payloads")]
        expect_equal(found, [T0 + 20_000, WORKER, 2, 1, due_ms, b"payload"], f"{id!r} as leased")
    was_due = dict(zip(leased.rows.ids.tolist(), leased.was_due_ms.tolist(), strict=True))
    expect_equal(was_due, {b"late": T0 - 5_000, b"now": T0}, "was_due_ms")
    expect_equal(leased.prior_holders.tolist(), [b"", b""], "prior holders")
    expect_equal(leased.grant.tolist(), [0, 0], "indexes of grants")
    expect_equal(await trial.everything(topic), rows, "rows as stored")
    await trial.lease(topic, now_ms=T0 + 19_999, wanted=0)


@check()
async def check_lease_runs_out(trial: Trial) -> None:
    """A message is leased again at its lease's end, as last extended, and not before. The lease says who had it."""
    topic = await trial.topic_with([b"a"])
    first = await trial.lease(topic, lease_ms=1_000)
    await trial.settle(topic, Operation.EXTEND, first.rows, time_ms=T0 + 5_000)
    await trial.lease(topic, now_ms=T0 + 4_999, holder=b"worker-2", wanted=0, next_due_ms=T0 + 5_000)
    again = await trial.lease(topic, now_ms=T0 + 5_000, holder=b"worker-2")
    expect_equal(again.rows.version.tolist(), [3], "version of the second lease")
    expect_equal(again.prior_holders.tolist(), [WORKER], "prior holder")
    expect_equal(again.rows.deliveries.tolist(), [2], "deliveries")
    expect_equal(again.was_due_ms.tolist(), [T0 + 5_000], "was_due_ms")


@check()
async def check_what_ran_out_is_told_until_it_is_leased(trial: Trial) -> None:
    """While one lease still runs, messages whose leases ran out are leased one by one. next_due_ms names each that is
    left, also if bytes or credit left it before."""
    ids, leases_ms = named(5), [100, 101, 102, 103, 900_000]
    topic = await trial.topic_with(ids, buckets=1)
    for lease_ms in leases_ms:
        await trial.lease(topic, 1, lease_ms=lease_ms)
    ends_ms = [T0 + lease_ms for lease_ms in leases_ms]
    for at, (count, max_bytes) in enumerate(((4, 1), (1, PLENTY), (4, 1), (1, PLENTY))):
        leased = await trial.lease(topic, count, now_ms=T0 + 500, max_bytes=max_bytes, alone=True)
        next_ms = min(ends_ms[at + 1], T0 + 30_500)
        expect_equal((len(leased.rows), leased.next_due_ms), (1, next_ms), "(number leased, next_due_ms)")


@check()
async def check_redelivery_backoff(trial: Trial) -> None:
    """After a lease ran out, the message rests for the topic's backoff, and next_due_ms says until when. A released
    message does not rest."""
    topic = await trial.topic_with([b"a", b"b"], redelivery_backoff_ms=500, buckets=1)
    released = (await trial.lease(topic, lease_ms=1_000)).rows.take(np.array([1]))
    await trial.settle(topic, Operation.RELEASE, released, time_ms=T0 + 1)
    await trial.lease(topic, now_ms=T0 + 1_499, wanted=[b"b"], next_due_ms=T0 + 1_500)
    await trial.lease(topic, now_ms=T0 + 1_500, wanted=[b"a"])


@check()
async def check_lease_of_what_is_overdue(trial: Trial) -> None:
    """With overdue_ms, only messages that have been due for that long are leased, free or run out. None is leased ahead
    of its time."""
    topic = await trial.topic_with([b"ran out"], T0 - 6_000)
    await trial.lease(topic, now_ms=T0 - 6_000, lease_ms=3_000)
    await trial.stored(topic, [b"old", b"older", b"fresh", b"ahead"], [T0 - 2_000, T0 - 4_000, T0 - 1_999, T0 + 1])
    await trial.lease(topic, overdue_ms=2_000, due_before_ms=T0 + 50, wanted=[b"old", b"older", b"ran out"])
    await trial.lease(topic, now_ms=T0 + 1, overdue_ms=2_000, wanted=[b"fresh"])


@check()
async def check_lease_ahead(trial: Trial) -> None:
    """A free message is leased ahead of its time, within due_before, from its own due on. A held message is not. A
    due_before in the past leases nothing ahead."""
    topic = await trial.topic_with([b"held"])
    await trial.lease(topic, lease_ms=30)
    await trial.stored(topic, [b"near", b"far"], [T0 + 40, T0 + 51])
    await trial.lease(topic, due_before_ms=T0 - 1, wanted=0)
    ahead = await trial.lease(topic, due_before_ms=T0 + 50, lease_ms=1_000, wanted=[b"near"])
    expect_equal(ahead.rows.due_ms.tolist(), [T0 + 1_040], "end of a lease ahead of time")
    expect_equal(ahead.was_due_ms.tolist(), [T0 + 40], "was_due_ms")
    await trial.mutate(topic, Operation.MOVE, [b"near"], T0 + 90, wanted=Status.LEASED)
    expect_equal(ahead.next_due_ms, T0 + 30, "next_due_ms")


@check()
async def check_order_by_due_and_id(trial: Trial) -> None:
    """Within a bucket messages come by due, then by id as bytes, over as many calls as it takes."""
    topic = await trial.topic(buckets=1)
    ids = [f"{(at * 7919) % 1000:03}".encode() for at in range(1000)]
    dues = [T0 - (at * 31) % 7 for at in range(1000)]
    for start in range(0, 1000, 100):
        await trial.stored(topic, ids[start : start + 100], dues[start : start + 100])
    wanted = [id for _, id in sorted(zip(dues, ids, strict=True))]
    came: list[bytes] = []
    for _ in range(1000):
        leased = await trial.lease(topic, 37)
        if not len(leased.rows):
            break
        came += leased.rows.ids.tolist()
    expect_equal(came, wanted, "order in which messages came")


@check()
async def check_order_survives_changes(trial: Trial) -> None:
    """Order by (due, id) holds for what was moved, released and put later, too."""
    ids = named(300)
    topic = await trial.topic_with(ids, [T0 + at % 5 for at in range(300)], buckets=1)
    await trial.mutate(topic, Operation.MOVE, ids[::3], T0 + 2)
    leased = await trial.lease(topic, 50, now_ms=T0 + 4)
    await trial.settle(topic, Operation.RELEASE, leased.rows, now_ms=T0 + 4, time_ms=T0 + 4)
    await trial.stored(topic, named(100, "k"), [T0 + at % 6 for at in range(100)])
    rows = await trial.everything(topic)
    wanted = [id for _, id in sorted((row["due_ms"], id) for id, row in rows.items())]
    came: list[bytes] = []
    while len(came) < 400:
        part = (await trial.lease(topic, 64, now_ms=T0 + 10)).rows.ids.tolist()
        expect(part, f"nothing more was leased after {len(came)} of 400")
        came += part
    expect_equal(came, wanted, "order in which messages came")


@check()
async def check_buckets_subset(trial: Trial) -> None:
    """A lease from some buckets takes from these alone, and next_due_ms and next_due are theirs alone."""
    ids = named(200)
    topic = await trial.topic_with(ids, [T0 + at for at in range(200)], buckets=8)
    mine = [0, 3, 5]
    wanted = [id for id in ids if bucket_of(id, 8) in mine]
    leased = await trial.lease(topic, now_ms=T0 + 100, buckets=mine, wanted=[id for id in wanted if id <= ids[100]])
    after = next(id for id in wanted if id > ids[100])
    expect_equal(leased.next_due_ms, T0 + ids.index(after), "next_due_ms of these buckets")
    rest = [id for id in ids if id not in wanted]
    expect_equal(await trial.store.next_due(topic, [1, 2, 4, 6, 7], 0), T0 + ids.index(rest[0]), "next_due of others")
    await trial.lease(topic, buckets=[], now_ms=T0 + 500, wanted=0)
    await trial.lease(topic, now_ms=T0 + 500, buckets=[1, 2, 4, 6, 7], wanted=rest)


@check()
async def check_grants_by_count(trial: Trial) -> None:
    """Never more than granted; fewer only when no more is eligible; what is left over is leased next."""
    topic = await trial.topic_with(named(10))
    grants = [Grant(b"one", 2, 1_000, PLENTY), Grant(b"none", 0, 1_000, PLENTY), Grant(b"two", 3, 2_000, PLENTY)]
    leased = await trial.lease(topic, grants=grants)
    expect_equal(np.bincount(leased.grant, minlength=3).tolist(), [2, 0, 3], "messages by grant")
    for holder, due_ms, grant in zip(leased.rows.holders, leased.rows.due_ms, leased.grant, strict=True):
        wanted = (grants[int(grant)].holder, T0 + grants[int(grant)].lease_ms)
        expect_equal((holder, int(due_ms)), wanted, "(holder, end of the lease)")
    expect_equal(leased.next_due_ms, T0, "next_due_ms when credit ran out")
    more = await trial.lease(topic, 100, wanted=5)
    expect(not set(more.rows.ids) & set(leased.rows.ids), "something was leased twice")


@check()
async def check_no_grants(trial: Trial) -> None:
    """Without grants, or with grants of 0, nothing is leased, expired or buried. next_due_ms is answered."""
    topic = await trial.topic()
    await trial.lease(topic, grants=[], wanted=0, next_due_ms=None)
    await trial.stored(topic, [b"a", b"b"], [T0 + 5, T0 + 9])
    for grants in ([], [Grant(WORKER, 0, 1_000, PLENTY)]):
        for now_ms in (T0, T0 + 7):
            await trial.lease(topic, grants=grants, now_ms=now_ms, wanted=0, next_due_ms=T0 + 5)


@check()
async def check_fairness(trial: Trial) -> None:
    """Dealt round-robin: among grants with credit left, counts differ by at most one."""
    topic = await trial.topic_with(named(100), [T0 - at for at in range(100)])
    counts = [40, 7, 40, 40]
    grants = [Grant(f"w{at}".encode(), count, 1_000, PLENTY) for at, count in enumerate(counts)]
    leased = await trial.lease(topic, grants=grants)
    dealt = np.bincount(leased.grant, minlength=4).tolist()
    expect_equal(sum(dealt), 100, "number leased")
    expect_equal(dealt[1], 7, "messages of the grant that was used up")
    expect(max(dealt[0], *dealt[2:]) - min(dealt[0], *dealt[2:]) <= 1, f"messages by grant: {dealt}")


@check()
async def check_grants_by_bytes(trial: Trial) -> None:
    """Payloads and headers of a grant stay within its bytes. A message that does not fit waits, and is not overtaken in
    its bucket. A message that is too large goes only to a consumer that has nothing else."""
    topic = await trial.topic_with(
        named(6), payload=[b"x" * size for size in (400, 400, 400, 5_000, 10, 10)], buckets=1
    )
    leased = await trial.lease(topic, max_bytes=1_000)
    expect_equal(leased.rows.ids.tolist(), named(6)[:2], "ids leased into 1,000 bytes")
    expect_equal(leased.next_due_ms, T0, "next_due_ms when bytes ran out")
    leased = await trial.lease(topic, max_bytes=1_000)
    expect_equal(leased.rows.ids.tolist(), named(6)[2:3], "ids leased before the large one")
    await trial.lease(topic, max_bytes=1_000, wanted=0)
    leased = await trial.lease(topic, max_bytes=1_000, alone=True)
    expect_equal(leased.rows.ids.tolist(), named(6)[3:4], "ids leased alone")
    leased = await trial.lease(topic, max_bytes=1_000)
    expect_equal(leased.rows.ids.tolist(), named(6)[4:], "ids leased after the large one")


@check()
async def check_grants_by_bytes_count_headers(trial: Trial) -> None:
    """Headers count as bytes of a grant."""
    header = b"\x01\x00k" + (500).to_bytes(2, "little") + b"v" * 500
    topic = await trial.topic_with(named(3), payload=b"x" * 100, headers=header, buckets=1)
    await trial.lease(topic, max_bytes=1_300, wanted=2)


@check()
async def check_expired_is_not_leased(trial: Trial) -> None:
    """An expired message is removed when a lease meets it, is counted, and uses up no credit. Expiry does not end a
    running lease, whose ack counts."""
    topic = await trial.topic_with([b"held"], expires_ms=T0 + 10)
    held = await trial.lease(topic)
    await trial.stored(topic, named(4), [T0 + at for at in range(4)], expires_ms=[T0 + 5, 0, T0 + 6, 0])
    leased = await trial.lease(topic, 2, now_ms=T0 + 6, wanted=[named(4)[1], named(4)[3]])
    expect_equal(leased.expired, 2, "expired messages met")
    rows = await trial.everything(topic, now_ms=T0 + 6)
    expect_equal(sorted(rows), sorted([b"held", named(4)[1], named(4)[3]]), "ids left")
    extended = await trial.settle(topic, Operation.EXTEND, held.rows, now_ms=T0 + 20, time_ms=T0 + 40_000)
    acked = await trial.settle(topic, Operation.ACK, held.rows, now_ms=T0 + 39_000)
    expect_equal(statuses(extended) + statuses(acked), [Status.OK] * 2, "statuses under a lease that outlives expiry")


@check()
async def check_expired_is_not_leased_at_its_expiry(trial: Trial) -> None:
    """At its expiry to the millisecond a message is expired; one before it is not."""
    topic = await trial.topic_with([b"a", b"b"], expires_ms=[T0 + 10, T0 + 11])
    await trial.lease(topic, now_ms=T0 + 10, wanted=[b"b"])


@check()
async def check_max_deliveries(trial: Trial) -> None:
    """A message delivered max_deliveries times is buried instead of leased again, with the reason "max_deliveries". It
    does not matter whether its lease ran out or it was released. It uses up no credit. A limit of 0 is none."""
    topic = await trial.topic_with([b"a", b"b", b"c"], [T0, T0, T0 + 20], max_deliveries=2)
    await trial.lease(topic, now_ms=T0, lease_ms=5)
    second = await trial.lease(topic, now_ms=T0 + 5, lease_ms=5, wanted=[b"a", b"b"])
    await trial.settle(topic, Operation.RELEASE, second.rows.take(np.arange(1)), now_ms=T0 + 6, time_ms=T0 + 7)
    third = await trial.lease(topic, 1, now_ms=T0 + 20, wanted=[b"c"])
    expect_equal(sorted(third.buried.ids.tolist()), [b"a", b"b"], "ids buried")
    expect(third.buried.payloads is None, "buried rows carry payloads")
    expect_equal(set(third.buried.dead.tolist()), {b"max_deliveries"}, "reasons")
    rows = await trial.everything(topic, now_ms=T0 + 20)
    expect_equal({rows[id]["dead"] for id in (b"a", b"b")}, {b"max_deliveries"}, "reasons as stored")
    expect_equal({rows[id]["died_ms"] for id in (b"a", b"b")}, {T0 + 20}, "died_ms as stored")
    await trial.lease(topic, now_ms=T0 + 25, wanted=0)
    endless = await trial.topic_with([b"a"], max_deliveries=0)
    for at in range(40):
        await trial.lease(endless, now_ms=T0 + at, lease_ms=1, wanted=1)


@check()
async def check_max_deliveries_not_ahead(trial: Trial) -> None:
    """A message delivered max_deliveries times is buried when it is due, not ahead of its time."""
    topic = await trial.topic_with([b"a"], max_deliveries=1)
    leased = await trial.lease(topic)
    await trial.settle(topic, Operation.RELEASE, leased.rows, time_ms=T0 + 40)
    ahead = await trial.lease(topic, due_before_ms=T0 + 50)
    expect_equal((len(ahead.rows), len(ahead.buried)), (0, 0), "(leased, buried) ahead of time")
    expect_equal(ahead.next_due_ms, T0 + 40, "next_due_ms")
    due = await trial.lease(topic, now_ms=T0 + 40)
    expect_equal((len(due.rows), len(due.buried)), (0, 1), "(leased, buried) when due")
    expect_equal(due.next_due_ms, None, "next_due_ms when all are dead")


@check()
async def check_dead_letters_are_not_leased(trial: Trial) -> None:
    """A dead letter is off the timeline: never leased, whatever its due."""
    topic = await trial.topic_with([b"a"])
    leased = await trial.lease(topic)
    await trial.settle(topic, Operation.BURY, leased.rows, reason=b"bad gate")
    await trial.lease(topic, now_ms=T0 + 100_000, due_before_ms=T0 + 200_000, wanted=0, next_due_ms=None)
    expect_equal(await trial.store.next_due(topic, None, 0), None, "next_due")


@check()
async def check_next_due(trial: Trial) -> None:
    """next_due answers the earliest due after the given time, of what is held too, as rows come and go."""
    topic = await trial.topic()
    expect_equal(await trial.store.next_due(topic, None, 0), None, "next_due of an empty topic")
    await trial.stored(topic, [b"a", b"b", b"c"], [T0 + 10, T0 + 20, T0 + 30])
    for after_ms, wanted in ((0, 10), (T0 + 9, 10), (T0 + 10, 20), (T0 + 25, 30)):
        expect_equal(await trial.store.next_due(topic, None, after_ms), T0 + wanted, f"next_due after {after_ms - T0}")
    expect_equal(await trial.store.next_due(topic, None, T0 + 30), None, "next_due after the last")
    await trial.mutate(topic, Operation.MOVE, [b"a"], T0 + 25)
    expect_equal(await trial.store.next_due(topic, None, 0), T0 + 20, "next_due after a move")
    leased = await trial.lease(topic, now_ms=T0 + 20, lease_ms=4)
    expect_equal(await trial.store.next_due(topic, None, 0), T0 + 24, "next_due with a lease")
    await trial.settle(topic, Operation.ACK, leased.rows, now_ms=T0 + 21)
    expect_equal(await trial.store.next_due(topic, None, 0), T0 + 25, "next_due after an ack")
    await trial.mutate(topic, Operation.CANCEL, [b"a", b"c"])
    expect_equal(await trial.store.next_due(topic, None, 0), None, "next_due after all were cancelled")
    expect_equal((await trial.lease(topic, now_ms=T0 + 99)).next_due_ms, None, "next_due_ms of an emptied topic")


@check()
async def check_next_dues(trial: Trial) -> None:
    """next_dues answers for each topic with living rows what next_due does, or nothing at all."""
    names = (b"free", b"held", b"dead", b"gone", b"none")
    topics = {name: await trial.topic() for name in names}
    for name in names[:-1]:
        await trial.stored(topics[name], [b"a", b"b"], [T0 + 10, T0 + 20])
    await trial.lease(topics[b"held"], now_ms=T0 + 20, lease_ms=4)
    leased = await trial.lease(topics[b"dead"], now_ms=T0 + 20)
    await trial.settle(topics[b"dead"], Operation.BURY, leased.rows, now_ms=T0 + 21)
    await trial.mutate(topics[b"gone"], Operation.CANCEL, [b"a", b"b"])
    dues = await trial.store.next_dues()
    if dues is not None:
        for name, topic in topics.items():
            wanted = await trial.store.next_due(topic, None, -1)
            expect_equal(dues.get(topic.uid), wanted, f"next_dues of the topic with messages {name.decode()}")
        expect_equal(len(set(dues) & {topic.uid for topic in topics.values()}), 2, "topics with living messages")


@check(needs=lambda capabilities: capabilities.exact_counts)
async def check_count_due(trial: Trial) -> None:
    """count_due counts living messages by steps of due, lower edge in, upper edge out: the free, or the held."""
    topic = await trial.topic_with(named(100), [T0 + 10 * at for at in range(100)])
    await trial.lease(topic, 5, now_ms=T0 + 40)
    await trial.mutate(topic, Operation.CANCEL, named(100)[50:52])
    await trial.mutate(topic, Operation.MOVE, named(100)[52:54], T0 + 995)
    edges = np.array([T0, T0 + 100, T0 + 100, T0 + 500, T0 + 990, T0 + 1_000], dtype=np.int64)
    counts = await trial.store.count_due(topic, edges)
    expect_equal(counts.tolist(), [5, 0, 40, 45, 3], "counts by steps")
    expect_equal((await trial.store.count_due(topic, edges[:1])).tolist(), [], "counts of a single edge")
    ends = np.array([T0, T0 + 30_040, T0 + 30_041, T0 + 30_042], dtype=np.int64)
    held = await trial.store.count_due(topic, ends, held=True)
    expect_equal(held.tolist(), [0, 5, 0], "counts of held messages by the ends of their leases")


@check(needs=lambda capabilities: capabilities.exact_counts)
async def check_count_due_of_many_steps(trial: Trial) -> None:
    """Nothing is counted twice, or not at all, however many steps and buckets there are."""
    few = await trial.topic_with(named(100), [T0 + 10 * at for at in range(100)], buckets=130)
    many = await trial.topic_with(named(1_000), [T0 + at for at in range(1_000)], buckets=1)
    edges = np.linspace(T0, T0 + 1_000, 66).astype(np.int64)
    for topic, dues in ((few, np.arange(T0, T0 + 1_000, 10)), (many, np.arange(T0, T0 + 1_000))):
        counts = await trial.store.count_due(topic, edges)
        expect_equal(counts.tolist(), np.diff(np.searchsorted(dues, edges)).tolist(), f"counts of {len(dues)} messages")


@check(needs=lambda capabilities: not capabilities.exact_counts)
async def check_count_due_estimates(trial: Trial) -> None:
    """A store whose counts are estimates still answers one count for each step, none negative."""
    topic = await trial.topic_with(named(100), [T0 + 10 * at for at in range(100)])
    counts = await trial.store.count_due(topic, np.array([T0, T0 + 500, T0 + 1_000], dtype=np.int64))
    expect(len(counts) == 2 and min(counts.tolist()) >= 0, f"counts are {counts.tolist()}")


@check()
async def check_dues_far_apart(trial: Trial) -> None:
    """Messages from the past to thousands of years ahead come each at its due and in order, however they were put."""
    topic = await trial.topic(buckets=1)
    ahead = [0, 1, 999, 4_096, 60_000, 3_600_000, 86_400_000, 30 * 86_400_000, 10 * 366 * 86_400_000]
    dues = [T0 - 10 * 366 * 86_400_000, T0 - 1, *(T0 + step for step in ahead), 253_402_300_799_999]
    ids = named(len(dues))
    for at in [*range(1, len(dues), 2), *range(0, len(dues), 2)]:
        await trial.stored(topic, ids[at : at + 1], dues[at])
    for at in range(2, len(dues)):
        leased = await trial.lease(topic, now_ms=dues[at], lease_ms=1)
        fresh = [id for id, deliveries in zip(leased.rows.ids, leased.rows.deliveries, strict=True) if deliveries == 1]
        wanted = ids[:3] if at == 2 else [ids[at]]
        expect_equal(fresh, wanted, f"ids leased for the first time at {dues[at]}")
        await trial.settle(topic, Operation.ACK, leased.rows, now_ms=dues[at])
    expect_equal(await trial.everything(topic), {}, "rows at the end")


@check()
async def check_leases_in_turn(trial: Trial) -> None:
    """Where a store says in which turn it did what, turns grow, and a lease has seen what was put in earlier ones."""
    topic = await trial.topic()
    put = await trial.put(topic, [b"a"], T0)
    leased = await trial.lease(topic)
    expect_equal(
        (put.commit_seq > 0, leased.commit_seq > put.commit_seq),
        (trial.store.tells_commit_seq,) * 2,
        "turns told, and growing",
    )
