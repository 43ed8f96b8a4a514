"""Moves, cancels, revives and purges by id: who may, when, and the effect of a repeat."""

from __future__ import annotations

from timeline.columns import Ragged
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import T0, Trial, expect_equal, named, statuses

MUTATIONS = (Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE)
WAITING, AVAILABLE, LEASED, RAN_OUT, DEAD = b"waiting", b"available", b"leased", b"ran out", b"dead"


async def _one_of_each(trial: Trial) -> Topic:
    topic = await trial.topic_with([RAN_OUT], T0 - 50)
    await trial.lease(topic, now_ms=T0 - 50, lease_ms=50)
    await trial.stored(topic, [DEAD], T0 - 40)
    dead = await trial.lease(topic, now_ms=T0 - 40)
    await trial.settle(topic, Operation.BURY, dead.rows, now_ms=T0 - 30, reason=b"bad")
    await trial.stored(topic, [LEASED], T0 - 20)
    await trial.lease(topic, now_ms=T0 - 20)
    await trial.stored(topic, [WAITING, AVAILABLE], [T0 + 500, T0 - 5])
    return topic


@check()
async def check_mutations_by_state(trial: Trial) -> None:
    """Each of move, cancel, revive and purge answers by the message's state as the operation table says. A refused
    message stays as it is."""
    ids = [WAITING, AVAILABLE, LEASED, RAN_OUT, DEAD, b"absent"]
    ok, leased, dead, exists, absent = Status.OK, Status.LEASED, Status.DEAD, Status.EXISTS, Status.NOT_FOUND
    wanted = {
        Operation.MOVE: [ok, ok, leased, ok, dead, absent],
        Operation.CANCEL: [ok, ok, leased, ok, dead, absent],
        Operation.REVIVE: [exists, exists, leased, exists, ok, absent],
        Operation.PURGE: [exists, exists, leased, exists, ok, absent],
    }
    for operation, answers_wanted in wanted.items():
        topic = await _one_of_each(trial)
        before = await trial.everything(topic)
        await trial.mutate(topic, operation, ids, T0 + 900, wanted=answers_wanted)
        after = await trial.everything(topic)
        for id, status in zip(ids, answers_wanted, strict=True):
            if status is not ok:
                expect_equal(after.get(id), before.get(id), f"{id!r} after a refused {operation.name}")
            elif operation in (Operation.CANCEL, Operation.PURGE):
                expect_equal(after.get(id), None, f"{id!r} after a {operation.name}")
            else:
                row, version = after[id], before[id]["version"] + 1
                found = [row[name] for name in ("due_ms", "scheduled_ms", "asked_ms", "version", "holders", "dead")]
                expect_equal(found, [T0 + 900, T0 + 900, T0, version, b"", b""], f"{id!r} after a {operation.name}")


@check()
async def check_move_holds_back(trial: Trial) -> None:
    """A moved message is leased at its new due and not before, whether that is earlier or later than the old one."""
    topic = await trial.topic_with([b"sooner", b"later"], [T0 + 500, T0 + 10])
    answers = await trial.mutate(topic, Operation.MOVE, [b"sooner", b"later"], [T0 + 20, T0 + 30])
    expect_equal(answers.version.tolist(), [2, 2], "versions after a move")
    expect_equal(answers.due_ms.tolist(), [T0 + 20, T0 + 30], "dues after a move")
    for now_ms, wanted in ((T0 + 19, []), (T0 + 20, [b"sooner"]), (T0 + 29, []), (T0 + 30, [b"later"])):
        leased = await trial.lease(topic, now_ms=now_ms)
        expect_equal(leased.rows.ids.tolist(), wanted, f"ids leased at T0 + {now_ms - T0}")


@check()
async def check_repeated_move(trial: Trial) -> None:
    """A move sent again with its operation id moves nothing twice and is marked. With another id it moves."""
    topic = await trial.topic_with([b"a"], T0 + 500)
    op = trial.number()
    await trial.mutate(topic, Operation.MOVE, [b"a"], T0 + 600, op=op, if_version=1)
    before = await trial.everything(topic)
    again = await trial.mutate(topic, Operation.MOVE, [b"a"], T0 + 600, now_ms=T0 + 5, op=op, if_version=1)
    found = (statuses(again), again.repeat.tolist(), again.version.tolist(), again.due_ms.tolist())
    expect_equal(found, ([Status.OK], [1], [2], [T0 + 600]), "(status, repeat, version, due) of a move repeated")
    expect_equal(await trial.everything(topic), before, "rows after the repeat")
    other = await trial.mutate(topic, Operation.MOVE, [b"a"], T0 + 700)
    expect_equal((statuses(other), other.version.tolist()), ([Status.OK], [3]), "(status, version) of another move")
    await trial.mutate(topic, Operation.MOVE, [b"a"], T0 + 600, op=op, if_version=1, wanted=Status.FENCED)


@check()
async def check_repeated_revive(trial: Trial) -> None:
    """A revive sent again with its operation id changes nothing twice and is marked, also after a lease."""
    topic = await _one_of_each(trial)
    op = trial.number()
    await trial.mutate(topic, Operation.REVIVE, [DEAD], T0 + 5, op=op)
    before = await trial.everything(topic)
    again = await trial.mutate(topic, Operation.REVIVE, [DEAD], T0 + 5, op=op)
    expect_equal((statuses(again), again.repeat.tolist()), ([Status.OK], [1]), "(status, repeat) of a revive repeated")
    expect_equal(await trial.everything(topic), before, "rows after the repeat")


@check()
async def check_ownership(trial: Trial) -> None:
    """Another group's message answers FORBIDDEN to move, cancel, revive and purge, and stays as it is."""
    topic = await _one_of_each(trial)
    before = await trial.everything(topic)
    for operation in MUTATIONS:
        await trial.mutate(
            topic, operation, sorted(before), T0 + 900, group=b"Default", leased=True, wanted=Status.FORBIDDEN
        )
    expect_equal(await trial.everything(topic), before, "rows afterwards")


@check()
async def check_if_version(trial: Trial) -> None:
    """If a version is given, another one answers FENCED; the same one passes."""
    for operation in MUTATIONS:
        topic = await _one_of_each(trial)
        before = await trial.everything(topic)
        id = DEAD if operation in (Operation.REVIVE, Operation.PURGE) else WAITING
        version = before[id]["version"]
        for other in (version + 1, version + 5):
            await trial.mutate(topic, operation, [id], T0 + 900, if_version=other, wanted=Status.FENCED)
        expect_equal(await trial.everything(topic), before, "rows afterwards")
        await trial.mutate(topic, operation, [id], T0 + 900, if_version=version, wanted=Status.OK)


@check()
async def check_cancel_leased(trial: Trial) -> None:
    """A cancel with leased=True takes leased messages too. Their holder's settles then answer NOT_FOUND."""
    topic = await trial.topic_with(named(2))
    rows = (await trial.lease(topic)).rows
    await trial.mutate(topic, Operation.CANCEL, named(2), wanted=Status.LEASED)
    await trial.mutate(topic, Operation.CANCEL, named(2), leased=True, wanted=Status.OK)
    await trial.settle(topic, Operation.ACK, rows, wanted=Status.NOT_FOUND)
    await trial.lease(topic, now_ms=T0 + 99_999, wanted=0)


@check()
async def check_move_and_expiry(trial: Trial) -> None:
    """A move or revive to or past the expiry is INVALID. A move or cancel of an expired message answers EXPIRED and
    removes it, whatever due time is asked for."""
    topic = await trial.topic_with(named(5), expires_ms=T0 + 100)
    await trial.mutate(topic, Operation.MOVE, named(2), [T0 + 100, T0 + 99], wanted=[Status.INVALID, Status.OK])
    leased = await trial.lease(topic, 1)
    await trial.settle(topic, Operation.BURY, leased.rows, reason=b"bad")
    await trial.mutate(topic, Operation.REVIVE, leased.rows.ids.tolist(), T0 + 100, wanted=Status.INVALID)
    living = [id for id in named(5) if id not in leased.rows.ids.tolist()]
    for operation, id, due_ms in (
        (Operation.MOVE, living[0], T0 + 50),
        (Operation.CANCEL, living[1], 0),
        (Operation.MOVE, living[2], T0 + 900),
    ):
        await trial.mutate(topic, operation, [id], due_ms, now_ms=T0 + 100, wanted=Status.EXPIRED)
    rows = await trial.everything(topic, now_ms=T0 + 100)
    expect_equal(sorted(rows), sorted([living[3], *leased.rows.ids.tolist()]), "ids left")


@check()
async def check_revived_letters_live(trial: Trial) -> None:
    """A revived dead letter counts its deliveries from 0, is leased at its due with its payload, and expires again."""
    topic = await trial.topic_with([b"a"], expires_ms=T0 + 500, payload=b"gate closes", max_deliveries=1)
    leased = await trial.lease(topic, lease_ms=5)
    expect_equal(len((await trial.lease(topic, now_ms=T0 + 5)).buried), 1, "number buried")
    answers = await trial.mutate(topic, Operation.REVIVE, [b"a"], T0 + 50)
    expect_equal(answers.version.tolist(), [leased.rows.version.tolist()[0] + 1], "version after a revive")
    again = await trial.lease(topic, now_ms=T0 + 50, lease_ms=5)
    expect_equal(again.rows.deliveries.tolist(), [1], "deliveries after a revive")
    expect_equal((again.rows.payloads or Ragged.of([])).tolist(), [b"gate closes"], "payload after a revive")
    await trial.settle(topic, Operation.BURY, again.rows, now_ms=T0 + 51, reason=b"x")
    await trial.mutate(topic, Operation.REVIVE, [b"a"], T0 + 400, now_ms=T0 + 60)
    swept = await trial.store.sweep(topic, T0 + 500, 100)
    expect_equal((swept.expired, await trial.everything(topic)), (1, {}), "(expired, rows left) after a sweep")


@check()
async def check_id_twice_in_a_mutation(trial: Trial) -> None:
    """An id that comes twice in one batch is asked twice, one after the other."""
    topic = await trial.topic_with([b"a", b"b"])
    answers = await trial.mutate(topic, Operation.MOVE, [b"a", b"b", b"a"], [T0 + 10, T0 + 20, T0 + 30])
    expect_equal((statuses(answers), answers.version.tolist()), ([Status.OK] * 3, [2, 2, 3]), "(statuses, versions)")
    await trial.mutate(topic, Operation.CANCEL, [b"a", b"a", b"b"], wanted=[Status.OK, Status.NOT_FOUND, Status.OK])
