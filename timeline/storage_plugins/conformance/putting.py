"""Puts: stored once, repeats known, refused puts harmless. Ids compared as bytes. Payloads kept as they are."""

from __future__ import annotations

from typing import Any

import numpy as np

from timeline.model import Displaced, Operation, Status, encode_headers
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import T0, WORKER, Trial, expect, expect_equal, named, statuses


@check()
async def check_put_stores_every_field(trial: Trial) -> None:
    """A put message stands with version 1 and without holder. It has its due as scheduled, the time of the put, and its
    group, tag, expiry, checksum, payload and headers."""
    topic = await trial.topic()
    headers = encode_headers({"gate": "A1", "seat": "é"})
    given: dict[str, Any] = {"group": b"ops", "tag": b"spring", "payload": b"gate closes", "headers": headers}
    puts = trial.puts([b"UA1545"], T0 + 500, expires_ms=T0 + 900, **given)
    answers = await trial.send(topic, puts, wanted=Status.OK)
    expect_equal((int(answers.version[0]), int(answers.due_ms[0])), (1, T0 + 500), "(version, due) that a put answers")
    row = await trial.row(topic, b"UA1545")
    wanted = {
        "version": 1, "due_ms": T0 + 500, "scheduled_ms": T0 + 500, "put_ms": T0, "asked_ms": T0, "deliveries": 0,
        "last_op": 0, "expires_ms": T0 + 900, "died_ms": 0, "dead": b"", "holders": b"", "groups": b"ops",
        "tags": b"spring", "payloads": b"gate closes", "payload_bytes": 11, "headers": headers,
        "birth": int(puts.birth[0]), "payload_sum": int(puts.payload_sum[0]),
    }  # fmt: skip
    expect_equal({name: row[name] for name in wanted}, wanted, "the stored row")


@check()
async def check_repeated_put(trial: Trial) -> None:
    """The same put again answers DUPLICATE with the message as it stands, marked as a repeat. It changes nothing, also
    after a move or a lease."""
    topic = await trial.topic()
    puts = trial.puts([b"a", b"b", b"c"], T0 + 100)
    await trial.store.put(topic, T0, puts)
    await trial.mutate(topic, Operation.MOVE, [b"b"], T0 + 700)
    await trial.lease(topic, now_ms=T0 + 100)
    before = await trial.everything(topic)
    answers = await trial.send(topic, puts, T0 + 200, wanted=Status.DUPLICATE)
    expect_equal(answers.repeat.tolist(), [1, 1, 1], "marks of repeats")
    expect_equal(answers.version.tolist(), [2, 2, 2], "versions as they stand")
    expect_equal(answers.due_ms.tolist(), [T0 + 30_100, T0 + 700, T0 + 30_100], "dues as they stand")
    expect_equal(await trial.everything(topic), before, "rows after a repeat")


@check()
async def check_repeated_put_beyond_its_expiry(trial: Trial) -> None:
    """A repeated put may be so late that its due, counted again, is not before its expiry. It is known as a repeat all
    the same, whether it stored, moved or was settled. Another put under the id is INVALID."""
    topic = await trial.topic_with([b"moved"], remember_ms=60_000)
    late: dict[str, Any] = {"expires_ms": T0 + 300, "move": [False, True, False]}
    births, ids = trial.numbers(3), [b"stored", b"moved", b"settled"]
    await trial.put(topic, ids, [T0 + 200, T0 + 200, T0 - 1], birth=births, **late, wanted=Status.OK)
    leased = await trial.lease(topic)
    await trial.settle(topic, Operation.ACK, leased.rows)
    before = await trial.everything(topic)
    known = [Status.DUPLICATE, Status.OK, Status.DUPLICATE]
    again = await trial.put(topic, ids, T0 + 300, now_ms=T0 + 100, birth=births, **late, wanted=known)
    found = (again.repeat.tolist(), again.settled.tolist(), again.version.tolist())
    expect_equal(found, ([1, 1, 0], [0, 0, 1], [1, 2, 0]), "(marks of repeats, of what is settled, versions)")
    others = await trial.put(topic, ids, T0 + 300, now_ms=T0 + 100, **late)
    refused = (statuses(others), others.settled.tolist())
    expect_equal(refused, ([Status.INVALID] * 3, [0, 0, 1]), "(statuses, settled) of other puts")
    expect_equal(await trial.everything(topic), before, "rows afterwards")


@check()
async def check_put_of_a_taken_id(trial: Trial) -> None:
    """Under a taken id the same payload answers DUPLICATE, another one EXISTS. Neither harms the message there."""
    topic = await trial.topic_with([b"a", b"b"], payload=b"first")
    before = await trial.everything(topic)
    payloads, wanted = [b"first", b"second", b"third"], [Status.DUPLICATE, Status.EXISTS, Status.OK]
    answers = await trial.put(topic, [b"a", b"b", b"c"], T0 + 5, payload=payloads, wanted=wanted)
    expect_equal(answers.repeat.tolist(), [0, 0, 0], "marks of repeats, which these are not")
    after = await trial.everything(topic)
    expect_equal({id: after[id] for id in before}, before, "rows under the taken ids")
    leased = await trial.lease(topic, now_ms=T0 + 5)
    delivered = dict(zip(leased.rows.ids.tolist(), leased.rows.payloads or [], strict=True))
    expect_equal(delivered, {b"a": b"first", b"b": b"first", b"c": b"third"}, "payloads delivered after rejected puts")


@check()
async def check_put_that_moves(trial: Trial) -> None:
    """With if_exists="move" a put of a taken id moves the message there, if it is not leased, and keeps its payload.
    Its repeat moves nothing twice. A leased one answers LEASED, a dead one DEAD, another group's FORBIDDEN. A move
    beyond the message's own expiry is INVALID."""
    ids, groups = [b"a", b"b", b"c", b"d"], [b"default", b"default", b"default", b"ops"]
    topic = await trial.topic_with(ids, group=groups, buckets=1)
    rows = (await trial.lease(topic, 3, wanted=ids[:3])).rows
    await trial.settle(topic, [Operation.RELEASE, Operation.EXTEND, Operation.BURY], rows, time_ms=T0 + 9)
    wanted = [Status.OK, Status.LEASED, Status.DEAD, Status.FORBIDDEN]
    puts = trial.puts(ids, T0 + 500, payload=b"other payload", move=True)
    await trial.send(topic, puts, wanted=wanted)
    before = await trial.everything(topic)
    found = before[b"a"]["due_ms"], before[b"a"]["payloads"]
    expect_equal(found, (T0 + 500, b"payload"), "(due, payload) after a put that moves")
    again = await trial.send(topic, puts, T0 + 10, wanted=wanted)
    expect(again.repeat[0], "a repeat of a put that moved is not known")
    expect_equal(await trial.everything(topic), before, "rows after the repeat")
    await trial.stored(topic, [b"brief"], T0, expires_ms=T0 + 100)
    due_ms, around = [T0 + 100, T0 + 99], [Status.INVALID, Status.OK]
    await trial.put(topic, [b"brief", b"brief"], due_ms, now_ms=T0 + 1, move=True, wanted=around)


@check()
async def check_id_twice_in_a_put(trial: Trial) -> None:
    """An id that comes twice in one batch is stored once. The later one meets the earlier one."""
    topic = await trial.topic()
    ids = [b"a", b"b", b"a", b"c", b"b", b"a"]
    answers = await trial.put(topic, ids, payload=[b"1", b"2", b"1", b"3", b"other", b"9"], move=[False] * 5 + [True])
    ok, duplicate, exists = Status.OK, Status.DUPLICATE, Status.EXISTS
    expect_equal(statuses(answers), [ok, ok, duplicate, ok, exists, ok], "statuses")
    expect_equal(answers.version.tolist(), [1, 1, 1, 1, 1, 2], "versions")
    rows = await trial.everything(topic)
    expect_equal({id: row["payloads"] for id, row in rows.items()}, {b"a": b"1", b"b": b"2", b"c": b"3"}, "payloads")
    await trial.lease(topic, wanted=3)


@check()
async def check_mixed_batch_of_puts(trial: Trial) -> None:
    """A batch never fails because one message in it does: each gets its own status."""
    old = named(300, "old")
    topic = await trial.topic_with(old)
    ids = [id for pair in zip(old, named(300, "new"), strict=True) for id in pair]
    expires = [T0 if at % 100 == 1 else 0 for at in range(600)]
    answers = await trial.put(topic, ids, expires_ms=expires)
    wanted = [Status.INVALID if expires[at] else Status.OK if at % 2 else Status.DUPLICATE for at in range(600)]
    expect_equal(statuses(answers), wanted, "statuses of a mixed batch")
    expect_equal(len(await trial.everything(topic)), 300 + 294, "number of rows")


@check()
async def check_put_beyond_its_expiry(trial: Trial) -> None:
    """A put whose expiry is not after its due and after now is INVALID. It stores nothing and harms nothing there. Its
    repeat is known before that."""
    topic = await trial.topic()
    ids, due_ms = [b"a", b"b", b"c", b"d"], [T0 - 1, T0 + 1, T0 - 1, T0]
    puts = trial.puts(ids, due_ms, expires_ms=[T0, T0 + 1, T0 + 1, T0 + 1])
    await trial.send(topic, puts, T0, wanted=[Status.INVALID, Status.INVALID, Status.OK, Status.OK])
    before = await trial.everything(topic)
    expect_equal(sorted(before), [b"c", b"d"], "ids stored")
    await trial.send(topic, puts, T0 + 1, wanted=[Status.INVALID] * 2 + [Status.DUPLICATE] * 2)
    for more in ({}, {"move": True}, {"replace": True}):
        await trial.put(topic, ids, T0 - 1, expires_ms=[T0, T0 - 9, T0, T0 - 9], **more, wanted=Status.INVALID)
    expect_equal(await trial.everything(topic), before, "rows afterwards")


@check()
async def check_put_of_an_expired_id(trial: Trial) -> None:
    """A put under the id of an expired message without a live lease stores as if the id were free. It has its own due
    and expiry. This holds for each group and each if_exists. The expired message's own repeat is DUPLICATE, as before
    it expired."""
    topic = await trial.topic()
    ids = named(8)
    old = trial.puts(ids, [T0 + at % 2 * 900 for at in range(8)], expires_ms=T0 + 1_000, group=b"ops", tag=b"old")
    await trial.send(topic, old, T0, wanted=Status.OK)
    again = await trial.store.put(topic, T0 + 1_000, old)
    expect_equal((statuses(again), again.repeat.tolist()), ([Status.DUPLICATE] * 8, [1] * 8), "repeats once expired")
    wanted: dict[str, Any] = {
        "payload": [b"payload", b"other"] * 4, "group": [b"ops", b"ops", b"ops", b"ops", *[b"default"] * 4],
        "move": [at in (2, 6) for at in range(8)], "replace": [at in (3, 7) for at in range(8)],
        "expires_ms": [0, T0 + 2_500] * 4, "tag": b"new",
    }  # fmt: skip
    puts = trial.puts(ids, T0 + 2_000, **wanted)
    answers = await trial.send(topic, puts, T0 + 1_000, wanted=Status.OK)
    expired = {at: Displaced(int(old.birth[at]), 1, True) for at in range(8)}
    expect_equal(answers.displaced, expired, "what they displaced")
    rows = await trial.everything(topic, now_ms=T0 + 1_000)
    for at, id in enumerate(ids):
        found = {name: rows[id][name] for name in ("birth", "version", "due_ms", "groups", "payloads", "tags")}
        says = (int(puts.birth[at]), 1, T0 + 2_000, wanted["group"][at], wanted["payload"][at], b"new")
        expect_equal(tuple(found.values()), says, f"{', '.join(found)} of {id!r}")
    expect_equal(await trial.by_tag(topic, Operation.CANCEL, b"old", group=b"ops"), {}, "what still has the old tag")
    swept = await trial.store.sweep(topic, T0 + 1_500, 100)
    expect_equal(swept.expired, 0, "messages that a sweep found expired")
    leased = (await trial.lease(topic, now_ms=T0 + 2_500)).rows
    expect_equal(leased.ids.tolist(), [id for at, id in enumerate(ids) if at % 2 == 0], "ids that did not expire")


@check()
async def check_put_of_an_expired_id_that_is_remembered(trial: Trial) -> None:
    """On a topic that remembers, a put under an expired id answers DUPLICATE, settled, whether or not a sweep came
    first. It leaves the id as a sweep does."""
    for swept in (False, True):
        topic = await trial.topic(remember_ms=60_000)
        ids = named(4)
        old = trial.puts(ids, T0, expires_ms=T0 + 10, payload=b"first")
        await trial.send(topic, old, T0, wanted=Status.OK)
        if swept:
            expect_equal((await trial.store.sweep(topic, T0 + 10, 100)).expired, 4, "messages that a sweep removed")
        more: dict[str, Any] = {"move": [False, False, True, False], "replace": [False, False, False, True]}
        puts = trial.puts(ids, T0 + 50, payload=[b"first", b"other"] * 2, **more)
        answers = await trial.store.put(topic, T0 + 10, puts)
        found = (statuses(answers), answers.settled.tolist(), answers.repeat.tolist(), answers.version.tolist())
        expect_equal(found, ([Status.DUPLICATE] * 4, [1] * 4, [0] * 4, [0] * 4), f"answers, swept: {swept}")
        gone = {} if swept else {at: Displaced(int(old.birth[at]), 1, True) for at in range(4)}
        expect_equal(answers.displaced, gone, f"what was displaced, swept: {swept}")
        expect_equal(await trial.everything(topic, now_ms=T0 + 10), {}, f"rows, swept: {swept}")
        expect_equal((await trial.store.sweep(topic, T0 + 11, 100)).expired, 0, "messages expired by then")
        await trial.put(topic, ids, T0 + 80_000, now_ms=T0 + 60_010, wanted=Status.OK)


@check()
async def check_put_of_an_expired_id_that_is_kept(trial: Trial) -> None:
    """A live lease and a dead letter outlive expiry: a put under their ids finds them there."""
    ids = named(4)
    topic = await trial.topic_with(ids, T0, expires_ms=T0 + 10)
    rows = (await trial.lease(topic, lease_ms=100)).rows
    await trial.settle(topic, Operation.BURY, rows.take(np.arange(2)))
    before = await trial.everything(topic)
    taken, held = [Status.DUPLICATE, Status.EXISTS] * 2, [Status.DEAD] * 2 + [Status.LEASED] * 2
    await trial.put(topic, ids, T0 + 500, now_ms=T0 + 50, payload=[b"payload", b"other"] * 2, wanted=taken)
    for name in ("move", "replace"):
        await trial.put(topic, ids, T0 + 5, now_ms=T0 + 50, **{name: True}, wanted=held)
    expect_equal(await trial.everything(topic), before, "rows afterwards")
    await trial.put(topic, ids[2:], T0 + 500, now_ms=T0 + 100, wanted=Status.OK)


@check()
async def check_put_of_another_groups_id(trial: Trial) -> None:
    """Another group's message answers FORBIDDEN to every put except its own repeat, whatever its payload and state. A
    remembered id belongs to no group."""
    topic = await trial.topic(remember_ms=60_000, buckets=1)
    ids = named(5)
    own = trial.puts(ids, [T0 + 900, T0, T0, T0, T0], group=b"ops")
    await trial.send(topic, own, wanted=Status.OK)
    rows = (await trial.lease(topic, 3, wanted=ids[1:4])).rows
    await trial.settle(topic, [Operation.BURY, Operation.ACK, Operation.EXTEND], rows, wanted=Status.OK)
    before = await trial.everything(topic)
    wanted = [Status.FORBIDDEN, Status.FORBIDDEN, Status.DUPLICATE, Status.FORBIDDEN, Status.FORBIDDEN]
    for more in ({}, {"payload": b"other"}, {"move": True}, {"replace": True}):
        answers = await trial.put(topic, ids, T0 + 500, **more, wanted=wanted)
        expect_equal(answers.settled.tolist(), [0, 0, 1, 0, 0], "marks of what is settled")
    await trial.send(topic, own, wanted=Status.DUPLICATE)
    expect_equal(await trial.everything(topic), before, "rows afterwards")


@check()
async def check_put_that_replaces(trial: Trial) -> None:
    """With if_exists="replace" a put takes the place of a message that is not leased, with a new birth at version 1.
    Payload, headers, tag, expiry and due are its own. A leased one answers LEASED, a dead one DEAD. Under a free id it
    stores."""
    ids = [b"absent", b"dead", b"held", b"ran out", b"released", b"waiting"]
    old: dict[str, Any] = {"tag": b"old", "headers": encode_headers({"old": "1"}), "payload": b"first"}
    topic = await trial.topic_with(ids[1:], [T0, T0, T0, T0, T0 + 900], expires_ms=T0 + 9_000, **old, buckets=1)
    held = (await trial.lease(topic, 2, wanted=[b"dead", b"held"])).rows
    short = (await trial.lease(topic, 2, lease_ms=50, wanted=[b"ran out", b"released"])).rows
    await trial.settle(topic, [Operation.BURY, Operation.EXTEND], held, wanted=Status.OK)
    await trial.settle(topic, [Operation.EXTEND, Operation.RELEASE], short, time_ms=T0 + 20, wanted=Status.OK)
    puts = trial.puts(
        ids, T0 + 400, expires_ms=T0 + 500, tag=b"new", headers=encode_headers({"new": "22"}), payload=b"the second",
        replace=True,
    )  # fmt: skip
    before = await trial.everything(topic)
    ok, duplicate = Status.OK, Status.DUPLICATE
    answers = await trial.send(topic, puts, T0 + 100, wanted=[ok, Status.DEAD, Status.LEASED, ok, ok, ok])
    replaced = {at: Displaced(before[ids[at]]["birth"], before[ids[at]]["version"], False) for at in (3, 4, 5)}
    expect_equal(answers.displaced, replaced, "what they displaced")
    after = await trial.everything(topic)
    kept = {id: before[id] for id in (b"dead", b"held")}
    expect_equal({id: after[id] for id in kept}, kept, "what was refused")
    for at in (0, 3, 4, 5):
        says = {
            "birth": int(puts.birth[at]), "version": 1, "due_ms": T0 + 400, "scheduled_ms": T0 + 400,
            "put_ms": T0 + 100, "asked_ms": T0 + 100, "deliveries": 0, "last_op": 0, "holders": b"",
            "expires_ms": T0 + 500, "payload_sum": int(puts.payload_sum[at]), "groups": b"default",
            "tags": b"new", "payloads": b"the second", "payload_bytes": 10, "headers": puts.headers[at],
        }  # fmt: skip
        expect_equal({name: after[ids[at]][name] for name in says}, says, f"the row that replaced {ids[at]!r}")
    known = [duplicate, Status.DEAD, Status.LEASED, duplicate, duplicate, duplicate]
    await trial.send(topic, puts, T0 + 150, wanted=known)
    await trial.settle(topic, Operation.ACK, short.take(np.arange(1)), now_ms=T0 + 150, wanted=Status.FENCED)
    expect_equal(await trial.everything(topic), after, "rows after repeats and a stale ack")
    tagged = await trial.by_tag(topic, Operation.MOVE, b"old", due_ms=T0 + 300, dry_run=True)
    expect_equal(tagged, {Status.LEASED: 1, Status.DEAD: 1}, "what has the old tag")
    moved = await trial.by_tag(topic, Operation.MOVE, b"new", now_ms=T0 + 200, due_ms=T0 + 300)
    expect_equal(moved, {Status.OK: 4}, "what has the new tag")
    leased = (await trial.lease(topic, now_ms=T0 + 300, wanted=4)).rows
    expect_equal(set(leased.payloads or []), {b"the second"}, "payloads delivered")


@check()
async def check_replaced_payload_sizes(trial: Trial) -> None:
    """Payloads of any size replace payloads of any other. A refused put leaves the message as it is."""
    sizes = (0, 10, 5_000, 60_000, 400_000)
    pairs = [(old, new) for old in sizes for new in sizes]
    ids = named(len(pairs))
    topic = await trial.topic_with(ids, payload=[b"a" * old for old, _ in pairs], headers=encode_headers({"a": "1"}))
    puts = trial.puts(ids, T0, payload=[b"b" * new for _, new in pairs], replace=True)
    await trial.send(topic, puts, T0, wanted=Status.OK)
    await trial.put(
        topic, ids, payload=[b"c" * old for old, _ in pairs], replace=True, group=b"ops", wanted=Status.FORBIDDEN
    )
    leased = (await trial.lease(topic)).rows
    await trial.put(topic, ids, payload=[b"d" * old for old, _ in pairs], replace=True, wanted=Status.LEASED)
    found = dict(zip(leased.ids.tolist(), zip(leased.payloads or [], leased.headers or [], strict=True), strict=True))
    rows = await trial.everything(topic)
    for id, (old, new) in zip(ids, pairs, strict=True):
        expect(found[id] == (b"b" * new, b""), f"of {new} bytes that replaced {old}, others were delivered")
        expect(rows[id]["payloads"] == b"b" * new, f"of {new} bytes that replaced {old}, others stand")


@check()
async def check_replaced_expiries(trial: Trial) -> None:
    """A message that replaced another expires by its own expiry alone, and never without one."""
    ids = [b"ever", b"later", b"sooner"]
    topic = await trial.topic_with(ids, T0, expires_ms=[T0 + 100, T0 + 100, 0])
    puts = trial.puts(ids, T0 + 1, expires_ms=[0, T0 + 300, T0 + 200], replace=True)
    await trial.send(topic, puts, T0, wanted=Status.OK)
    for now_ms, left in ((T0 + 150, ids), (T0 + 250, ids[:2]), (T0 + 350, ids[:1])):
        await trial.store.sweep(topic, now_ms, 100)
        expect_equal(sorted(await trial.everything(topic, now_ms=now_ms)), left, f"ids at {now_ms - T0} ms")


@check()
async def check_many_puts_that_replace(trial: Trial) -> None:
    """A batch of thousands that replace is done like any other. An id that comes twice is replaced twice."""
    ids = named(3_000)
    topic = await trial.topic_with(ids, [T0 + at % 7 for at in range(3_000)], payload=b"first", tag=b"old")
    puts = trial.puts(
        [*ids, *ids[:100]], T0 + 50, payload=[*[b"second"] * 3_000, *[b"third"] * 100], replace=True, tag=b"new"
    )
    answers = await trial.send(topic, puts, T0, wanted=Status.OK)
    expect_equal(set(answers.version.tolist()), {1}, "versions")
    rows = await trial.scan(topic, payload=True)
    thirds = {id for id, payload in zip(rows.ids.tolist(), rows.payloads or [], strict=True) if payload == b"third"}
    expect_equal((len(rows), thirds), (3_000, set(ids[:100])), "(rows, ids that were replaced twice)")
    await trial.lease(topic, now_ms=T0 + 49, wanted=0)
    await trial.lease(topic, now_ms=T0 + 50, wanted=3_000)


@check()
async def check_id_replaced_often(trial: Trial) -> None:
    """An id that comes hundreds of times in one batch is replaced each time. The last message stands, whole."""
    topic = await trial.topic(buckets=1)
    payloads = [b"payload %d" % at for at in range(250)]
    puts = trial.puts([b"a"] * 250, T0, payload=payloads, replace=True)
    answers = await trial.send(topic, puts, T0, wanted=Status.OK)
    replaced = {at + 1: Displaced(birth, 1, False) for at, birth in enumerate(puts.birth.tolist()[:-1])}
    expect_equal(answers.displaced, replaced, "what they displaced")
    row, leased = await trial.row(topic, b"a"), (await trial.lease(topic)).rows
    found = (row["birth"], row["payload_sum"], row["payloads"])
    expect_equal(found, (int(puts.birth[-1]), int(puts.payload_sum[-1]), payloads[-1]), "what stands")
    expect_equal(list(leased.payloads or []), payloads[-1:], "what is delivered")


@check()
async def check_ids_are_bytes(trial: Trial) -> None:
    """Ids are compared and ordered as bytes: case, accents, spaces, normal forms and lengths make them different."""
    topic = await trial.topic(buckets=1)
    ids = [b"a", b"A", b"a ", b" a", "á".encode(), "a\u0301".encode(), "ä".encode(), b"a\t", b"a\x01", b"ab", b"aB"]
    ids += ["ß".encode(), b"ss", "İ".encode(), b"i", "ı".encode(), "🛫".encode(), "\uffff".encode(), b"0", b"00"]
    ids += [b"x" * 255, b"x" * 254, b"x" * 254 + b"y", b"%", b"_", b"\\", b"'", b'"', "日本".encode(), b"1e3", b"1000"]
    await trial.stored(topic, ids, payload=ids)
    rows = await trial.everything(topic)
    expect_equal(list(rows), sorted(ids), "order of a scan of one bucket")
    expect_equal([row["payloads"] for row in rows.values()], sorted(ids), "payloads under their ids")
    leased = await trial.lease(topic)
    expect_equal(leased.rows.ids.tolist(), sorted(ids), "order of a lease of one instant")
    await trial.mutate(topic, Operation.CANCEL, [b"A"], leased=True, wanted=Status.OK)
    expect_equal(sorted(await trial.everything(topic)), sorted(set(ids) - {b"A"}), "ids after one was cancelled")


@check()
async def check_empty_batches(trial: Trial) -> None:
    """Empty batches are answered with nothing and do nothing."""
    topic = await trial.topic_with([b"a"])
    expect_equal(len(await trial.put(topic, [])), 0, "answers to an empty put")
    none = (await trial.lease(topic, now_ms=T0 - 1)).rows
    expect_equal(len(none), 0, "number leased before the due")
    expect_equal(len(await trial.settle(topic, Operation.ACK, none)), 0, "answers to an empty settle")
    for operation in (Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE):
        expect_equal(len(await trial.mutate(topic, operation, [])), 0, f"answers to an empty {operation.name}")
    expect_equal(len(await trial.scan(topic, ids=none.ids)), 0, "rows of a scan of no ids")
    expect_equal(list(await trial.everything(topic)), [b"a"], "ids afterwards")


@check()
async def check_large_batches(trial: Trial) -> None:
    """Batches of 10,000 rows are put, leased, extended and released, moved, and acked like any other."""
    ids = named(10_000)
    topic = await trial.topic_with(ids, [T0 + at % 977 for at in range(10_000)])
    leased = await trial.lease(topic, now_ms=T0 + 2_000, wanted=10_000)
    operations = [Operation.EXTEND, Operation.RELEASE] * 5_000
    await trial.settle(topic, operations, leased.rows, now_ms=T0 + 2_000, time_ms=T0 + 90_000, wanted=Status.OK)
    answers = await trial.mutate(topic, Operation.MOVE, ids, T0 + 3_000, now_ms=T0 + 2_000)
    expect_equal(statuses(answers).count(Status.LEASED), 5_000, "number of moves refused as LEASED")
    more = await trial.lease(topic, now_ms=T0 + 3_000, wanted=5_000)
    await trial.settle(topic, Operation.ACK, more.rows, now_ms=T0 + 3_000, wanted=Status.OK)
    expect_equal(len(await trial.scan(topic)), 5_000, "number of rows left")


@check()
async def check_payload_sizes(trial: Trial) -> None:
    """Payloads from nothing to 1 MiB, and one of 10 MiB, come back as they were put, whatever happens in between.
    Headers up to 8 KiB do so too."""
    topic = await trial.topic(max_payload_bytes=64 * 1024 * 1024)
    sizes = [0, 1, 100, 4_096, 65_535, 65_536, 1_000_000, 1024 * 1024]
    if trial.store.capabilities.payload_limit_bytes >= 10 * 1024 * 1024:
        sizes.append(10 * 1024 * 1024)
    block = bytes(range(256)) * (10 * 4096)
    payloads = [block[:size] for size in sizes]
    header = encode_headers({f"k{at}": "v" * 800 for at in range(10)})
    ids = named(len(sizes))
    await trial.stored(
        topic, ids, payload=payloads, headers=[header, b""] * (len(sizes) // 2) + [b""] * (len(sizes) % 2)
    )
    await trial.mutate(topic, Operation.MOVE, ids, T0 + 10)
    leased = await trial.lease(topic, now_ms=T0 + 10)
    await trial.settle(topic, Operation.RELEASE, leased.rows, now_ms=T0 + 10, time_ms=T0 + 20)
    leased = await trial.lease(topic, now_ms=T0 + 20)
    await trial.settle(topic, Operation.EXTEND, leased.rows, now_ms=T0 + 20, time_ms=T0 + 60_000)
    found = dict(zip(leased.rows.ids.tolist(), leased.rows.payloads or [], strict=True))
    for id, payload in zip(ids, payloads, strict=True):
        expect(found[id] == payload, f"the payload of {len(payload)} bytes came back otherwise")
    rows = await trial.everything(topic)
    for at, id in enumerate(ids):
        expect(rows[id]["payloads"] == payloads[at], f"the scanned payload of {len(payloads[at])} bytes differs")
        expect_equal(rows[id]["payload_bytes"], len(payloads[at]), "payload_bytes")
        expect_equal(rows[id]["headers"], header if at % 2 == 0 and at < len(ids) // 2 * 2 else b"", "headers")
    expect_equal({row["holders"] for row in rows.values()}, {WORKER}, "holders")


@check()
async def check_payloads_ride_only_where_asked(trial: Trial) -> None:
    """A scan without payloads carries none, though it has their sizes. Buried rows carry none."""
    topic = await trial.topic_with(named(5), payload=b"x" * 1000)
    rows = await trial.scan(topic, payload=False)
    expect(rows.payloads is None and rows.headers is None, "a scan without payloads carries them")
    expect_equal(set(rows.payload_bytes.tolist()), {1000}, "payload_bytes")


@check()
async def check_remembered_ids(trial: Trial) -> None:
    """On a topic that remembers, a put of an acked or cancelled id answers DUPLICATE, settled, and a repeated cancel
    OK. This lasts for that time, not a millisecond longer, swept or not. On other topics the id is free at once."""
    for remember_ms in (0, 60_000):
        topic = await trial.topic_with([b"acked", b"quiet", b"cancelled"], [T0, T0, T0 + 900], remember_ms=remember_ms)
        leased = await trial.lease(topic)
        acked = await trial.settle(topic, Operation.ACK, leased.rows)
        op = trial.number()
        cancelled = await trial.mutate(topic, Operation.CANCEL, [b"cancelled"], op=op)
        expect_equal(statuses(acked) + statuses(cancelled), [Status.OK] * 3, "statuses of acks and cancel")
        again = await trial.mutate(topic, Operation.CANCEL, [b"cancelled"], op=op)
        await trial.mutate(topic, Operation.CANCEL, [b"cancelled", b"acked"], wanted=Status.NOT_FOUND)
        expect_equal(await trial.everything(topic), {}, "rows after all were settled")
        known = statuses(again) == [Status.OK] and bool(again.repeat[0]) and bool(again.settled[0])
        expect_equal(known, remember_ms > 0, "a repeated cancel is recognised")
        if not remember_ms:
            await trial.put(topic, [b"acked", b"cancelled"], wanted=Status.OK)
            continue
        swept = await trial.store.sweep(topic, T0 + 59_999, 100)
        expect_equal(swept.forgotten, 0, "ids forgotten before their time")
        answers = await trial.put(topic, [b"acked", b"cancelled"], now_ms=T0 + 59_999, wanted=Status.DUPLICATE)
        expect_equal(answers.settled.tolist(), [1, 1], "marks of what is settled")
        await trial.mutate(topic, Operation.CANCEL, [b"cancelled"], op=op, now_ms=T0 + 60_000, wanted=Status.NOT_FOUND)
        answers = await trial.put(topic, [b"acked"], now_ms=T0 + 60_000)
        expect_equal(
            (statuses(answers), answers.settled.tolist()), ([Status.OK], [0]), "a put after the time, not swept"
        )
        swept = await trial.store.sweep(topic, T0 + 60_001, 100)
        expect(swept.forgotten >= 1, "a sweep after the time forgot nothing")
        await trial.put(topic, [b"cancelled", b"quiet"], now_ms=T0 + 60_001, wanted=Status.OK)
