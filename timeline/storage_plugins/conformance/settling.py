"""Settles: fenced by birth, version and holder. Late acks, releases, buries, and a repeat of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from timeline.model import Operation, Status
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import T0, WORKER, Trial, expect_equal, named, statuses

SETTLES = (Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.BURY, Operation.REGRANT)


@check()
async def check_ack_deletes(trial: Trial) -> None:
    """An ack deletes the message. Its id is free, its token dead, and a repeat answers NOT_FOUND."""
    topic = await trial.topic_with([b"a", b"b"])
    leased = await trial.lease(topic)
    one = leased.rows.take(np.arange(1))
    answers = await trial.settle(topic, Operation.ACK, one)
    expect_equal((statuses(answers), answers.late.tolist()), ([Status.OK], [0]), "(status, late) of an ack")
    await trial.settle(topic, Operation.ACK, one, wanted=Status.NOT_FOUND)
    expect_equal(len(await trial.everything(topic)), 1, "number of rows left")
    await trial.put(topic, one.ids.tolist(), wanted=Status.OK)
    await trial.settle(topic, Operation.ACK, one, wanted=Status.FENCED)


@check()
async def check_late_ack(trial: Trial) -> None:
    """An ack after the lease ran out counts, marked as late, until another call changes the message."""
    topic = await trial.topic_with([b"a", b"b"])
    first = await trial.lease(topic, lease_ms=10)
    await trial.lease(topic, 1, now_ms=T0 + 10, holder=b"worker-2")
    answers = await trial.settle(topic, Operation.ACK, first.rows, now_ms=T0 + 10)
    expect_equal(sorted(statuses(answers)), [Status.FENCED, Status.OK], "statuses of late acks")
    late = [bool(late) for late, code in zip(answers.late, answers.status, strict=True) if code == Status.OK.code]
    expect_equal(late, [True], "marks of late acks")


@check()
async def check_fencing(trial: Trial) -> None:
    """A settle with another birth, version or holder answers FENCED and changes nothing, for each operation."""
    for operation in SETTLES:
        topic = await trial.topic_with(named(4))
        rows = (await trial.lease(topic)).rows
        before = await trial.everything(topic)
        wrong: dict[str, Any] = {
            "version": rows.version + np.array([-1, 1, 0, 0]),
            "birth": rows.birth + np.array([0, 0, 1, 0], dtype=np.uint64),
            "holder": [WORKER, WORKER, WORKER, b"worker-2"],
        }
        await trial.settle(topic, operation, rows, **wrong, time_ms=T0 + 90_000, wanted=Status.FENCED)
        expect_equal(await trial.everything(topic), before, f"rows after {operation.name} with wrong tokens")


@check()
async def check_stale_tokens(trial: Trial) -> None:
    """A token from before a release, a redelivery or a move is stale for ever."""
    topic = await trial.topic_with(named(3))
    first = (await trial.lease(topic, lease_ms=10)).rows
    ids = first.ids.tolist()
    await trial.settle(topic, Operation.RELEASE, first.take(np.array([0])), time_ms=T0 + 5)
    await trial.mutate(topic, Operation.MOVE, ids[1:2], T0 + 900, now_ms=T0 + 10)
    again = await trial.lease(topic, now_ms=T0 + 10, wanted=(ids[0], ids[2]))
    for operation in SETTLES:
        await trial.settle(topic, operation, first, now_ms=T0 + 10, time_ms=T0 + 99_000, wanted=Status.FENCED)
    await trial.settle(topic, Operation.ACK, again.rows, now_ms=T0 + 10, wanted=Status.OK)


@check()
async def check_nobody_settles_what_nobody_holds(trial: Trial) -> None:
    """A message without holder cannot be settled, even with its birth, its version and an empty holder."""
    topic = await trial.topic_with(named(2), [T0, T0 + 500])
    rows = await trial.scan(topic)
    before = await trial.everything(topic)
    for operation in SETTLES:
        for holder in (b"", WORKER):
            await trial.settle(topic, operation, rows, holder=holder, time_ms=T0 + 900, wanted=Status.FENCED)
    expect_equal(await trial.everything(topic), before, "rows afterwards")


@check()
async def check_extend(trial: Trial) -> None:
    """An extend sets the lease's end to the later of its own and the asked one, and keeps the token. This also holds
    after the lease ran out, until another call changes the message."""
    topic = await trial.topic_with(named(2))
    rows = (await trial.lease(topic, lease_ms=1_000)).rows
    answers = await trial.settle(topic, Operation.EXTEND, rows, time_ms=[T0 + 500, T0 + 2_000])
    expect_equal(answers.due_ms.tolist(), [T0 + 1_000, T0 + 2_000], "ends of the leases")
    expect_equal(answers.version.tolist(), [2, 2], "versions")
    await trial.settle(topic, Operation.EXTEND, rows, now_ms=T0 + 3_000, time_ms=T0 + 4_000, wanted=Status.OK)
    await trial.lease(topic, now_ms=T0 + 3_999, wanted=0)
    await trial.lease(topic, now_ms=T0 + 4_000, wanted=2)


@check()
async def check_release(trial: Trial) -> None:
    """A release frees the message at the asked due, not below now, with the next version. A repeat of it is known and
    changes nothing, though the token is stale by then."""
    topic = await trial.topic_with(named(2))
    rows = (await trial.lease(topic)).rows
    ops = trial.numbers(2)
    answers = await trial.settle(
        topic, Operation.RELEASE, rows, now_ms=T0 + 5, time_ms=[T0 + 500, T0 - 500], op=ops, wanted=Status.OK
    )
    expect_equal(answers.due_ms.tolist(), [T0 + 500, T0 + 5], "dues")
    expect_equal(answers.version.tolist(), [3, 3], "versions")
    before = await trial.everything(topic)
    for at, id in enumerate(rows.ids):
        row, due_ms = before[id], (T0 + 500, T0 + 5)[at]
        found = [row[name] for name in ("due_ms", "scheduled_ms", "asked_ms", "holders", "deliveries")]
        expect_equal(found, [due_ms, due_ms, T0 + 5, b"", 1], "the released row")
    again = await trial.settle(topic, Operation.RELEASE, rows, now_ms=T0 + 9, time_ms=T0 + 700, op=ops)
    expect_equal((statuses(again), again.repeat.tolist()), ([Status.OK] * 2, [1, 1]), "(statuses, repeat) of a repeat")
    expect_equal(await trial.everything(topic), before, "rows after the repeat")
    await trial.settle(topic, Operation.RELEASE, rows, now_ms=T0 + 9, time_ms=T0 + 700, wanted=Status.FENCED)


@check()
async def check_release_unseen(trial: Trial) -> None:
    """A message that no user's code saw goes back as if it had not been delivered. It has one delivery less, its
    scheduled time stays, and it is due then or now."""
    topic = await trial.topic_with([b"ahead", b"due"], [T0 + 40, T0 - 7])
    rows = (await trial.lease(topic, due_before_ms=T0 + 50)).rows
    await trial.settle(topic, Operation.RELEASE, rows, now_ms=T0 + 3, time_ms=T0 + 9_000, unseen=True)
    found = await trial.everything(topic)
    for id, due_ms, scheduled_ms in ((b"ahead", T0 + 40, T0 + 40), (b"due", T0 + 3, T0 - 7)):
        row = found[id]
        wanted = [due_ms, scheduled_ms, T0, 0, 3, b""]
        names = ("due_ms", "scheduled_ms", "asked_ms", "deliveries", "version", "holders")
        expect_equal([row[name] for name in names], wanted, f"{id!r} after being handed back unseen")


@check()
async def check_release_beyond_expiry(trial: Trial) -> None:
    """A release to or past the expiry answers EXPIRED and removes the message."""
    topic = await trial.topic_with(named(3), expires_ms=T0 + 100)
    rows = (await trial.lease(topic)).rows
    times, wanted = [T0 + 99, T0 + 100, T0 + 101], [Status.OK, Status.EXPIRED, Status.EXPIRED]
    await trial.settle(topic, Operation.RELEASE, rows, time_ms=times, wanted=wanted)
    expect_equal(list(await trial.everything(topic)), [rows.ids[0]], "ids left")


@check()
async def check_expired_after_its_lease(trial: Trial) -> None:
    """After the end of both the lease and the expiry, extend, regrant and release answer EXPIRED and remove the
    message. An ack counts, and a bury makes a dead letter."""
    topic = await trial.topic_with(named(5), expires_ms=T0 + 100)
    rows = (await trial.lease(topic, lease_ms=50)).rows
    operations = [Operation.EXTEND, Operation.REGRANT, Operation.RELEASE, Operation.ACK, Operation.BURY]
    await trial.settle(
        topic, operations, rows, now_ms=T0 + 100, time_ms=T0 + 900, wanted=[Status.EXPIRED] * 3 + [Status.OK] * 2
    )
    expect_equal(list(await trial.everything(topic, now_ms=T0 + 100)), rows.ids.tolist()[4:], "ids left")


@check()
async def check_bury(trial: Trial) -> None:
    """A bury makes a dead letter with reason and time. It keeps id, payload and token. A repeat is known. Other settles
    answer DEAD."""
    topic = await trial.topic_with([b"a"], payload=b"gate closes")
    rows = (await trial.lease(topic)).rows
    await trial.settle(topic, Operation.BURY, rows, now_ms=T0 + 4, reason="no gate “7”".encode(), wanted=Status.OK)
    row = await trial.row(topic, b"a")
    found = [row[name] for name in ("dead", "died_ms", "version", "payloads")]
    expect_equal(found, ["no gate “7”".encode(), T0 + 4, 2, b"gate closes"], "the dead letter")
    again = await trial.settle(topic, Operation.BURY, rows, now_ms=T0 + 9, reason=b"other")
    expect_equal((statuses(again), again.repeat.tolist()), ([Status.OK], [1]), "(status, repeat) of a bury repeated")
    for operation in (Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.REGRANT):
        await trial.settle(topic, operation, rows, time_ms=T0 + 90_000, wanted=Status.DEAD)
    expect_equal(await trial.row(topic, b"a"), row, "the dead letter afterwards")
    await trial.put(topic, [b"a"], payload=b"x", wanted=Status.EXISTS)


@check()
async def check_regrant(trial: Trial) -> None:
    """A regrant to the same holder raises version and deliveries, so that the earlier session's token is stale. A
    message delivered max_deliveries times is not granted again."""
    topic = await trial.topic_with([b"a"], max_deliveries=2)
    rows = (await trial.lease(topic, lease_ms=1_000)).rows
    answers = await trial.settle(topic, Operation.REGRANT, rows, time_ms=T0 + 1_500)
    expect_equal((statuses(answers), answers.version.tolist()), ([Status.OK], [3]), "(status, version) of a regrant")
    expect_equal(answers.due_ms.tolist(), [T0 + 1_500], "end of the lease")
    row = await trial.row(topic, b"a")
    expect_equal((row["deliveries"], row["holders"]), (2, WORKER), "(deliveries, holder)")
    await trial.settle(topic, Operation.ACK, rows, wanted=Status.FENCED)
    await trial.settle(topic, Operation.REGRANT, rows, version=3, time_ms=T0 + 2_000, wanted=Status.DEAD)


@check()
async def check_next_due_after_a_late_extend(trial: Trial) -> None:
    """A lease that had run out and was extended is the next to run out, though longer leases were granted before."""
    for operation in (Operation.EXTEND, Operation.REGRANT):
        topic = await trial.topic_with([b"long"])
        await trial.lease(topic, lease_ms=600_000)
        await trial.stored(topic, [b"short"])
        rows = (await trial.lease(topic, lease_ms=1_000)).rows
        await trial.lease(topic, now_ms=T0 + 2_000, max_bytes=1, wanted=0, next_due_ms=T0 + 1_000)
        await trial.settle(topic, operation, rows, now_ms=T0 + 2_100, time_ms=T0 + 7_000, wanted=Status.OK)
        await trial.stored(topic, [b"other"], T0 + 2_150)
        await trial.lease(topic, now_ms=T0 + 2_200, wanted=[b"other"], next_due_ms=T0 + 7_000)


@check()
async def check_mixed_settles(trial: Trial) -> None:
    """Operations and statuses mix freely in one batch. An id that comes twice meets the result of the first one."""
    topic = await trial.topic_with(named(6))
    rows = (await trial.lease(topic)).rows
    rows = rows.take(np.array([0, 0, 1, 2, 3, 4, 4, 5]))
    operations = [
        *(Operation.ACK, Operation.ACK, Operation.EXTEND, Operation.RELEASE),
        *(Operation.BURY, Operation.RELEASE, Operation.ACK, Operation.ACK),
    ]
    version = rows.version.copy()
    version[7] += 1
    answers = await trial.settle(topic, operations, rows, version=version, time_ms=T0 + 60_000)
    ok, fenced, not_found = Status.OK, Status.FENCED, Status.NOT_FOUND
    expect_equal(statuses(answers), [ok, not_found, ok, ok, ok, ok, fenced, fenced], "statuses of a mixed batch")
    expect_equal(len(await trial.everything(topic)), 5, "number of rows left")


@check()
async def check_settles_of_what_is_not_there(trial: Trial) -> None:
    """Settling an id that never was, or is gone, answers NOT_FOUND."""
    topic = await trial.topic_with([b"a"])
    rows = (await trial.lease(topic)).rows
    await trial.mutate(topic, Operation.CANCEL, [b"a"], leased=True)
    for operation in SETTLES:
        answers = await trial.settle(topic, operation, rows, time_ms=T0 + 9, wanted=Status.NOT_FOUND)
        expect_equal((answers.version.tolist(), answers.due_ms.tolist()), ([0], [0]), "(version, due) of what is gone")


@check()
async def check_remembered_ids_are_not_there(trial: Trial) -> None:
    """A remembered id is there for puts alone. All other calls answer NOT_FOUND, and it is never leased."""
    topic = await trial.topic_with([b"a"], remember_ms=600_000)
    rows = (await trial.lease(topic)).rows
    await trial.settle(topic, Operation.ACK, rows)
    for operation in SETTLES:
        answers = await trial.settle(topic, operation, rows, time_ms=T0 + 9)
        found = (statuses(answers), answers.settled.tolist(), answers.version.tolist())
        expect_equal(found, ([Status.NOT_FOUND], [1], [0]), f"(status, settled, version) of {operation.name}")
    for mutation in (Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE):
        answers = await trial.mutate(topic, mutation, [b"a"], T0 + 9, leased=True)
        found = (statuses(answers), answers.settled.tolist(), answers.version.tolist())
        expect_equal(found, ([Status.NOT_FOUND], [1], [0]), f"(status, settled, version) of {mutation.name}")
    await trial.lease(topic, now_ms=T0 + 90_000, due_before_ms=T0 + 99_000, wanted=0, next_due_ms=None)
    expect_equal(await trial.everything(topic), {}, "rows")
