"""Many tasks at once on the same rows: each version is granted once, each message settled once."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter

import numpy as np

from timeline.history import Event
from timeline.model import Operation, Status, Topic
from timeline.storage_plugins.conformance.crowd import Crowd, brokers
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import T0, WORKER, Trial, by_id, expect, expect_equal, named, statuses
from timeline.storage_plugins.contract import TopicConflict


@check()
async def check_racing_puts(trial: Trial) -> None:
    """Of many puts of the same ids at once, each id is stored by exactly one, whose payload is delivered."""
    topic = await trial.topic()
    ids = named(50)

    async def put(at: int) -> list[Status]:
        return statuses(await trial.put(topic, ids, payload=f"from {at}".encode()))

    answers = await asyncio.gather(*(put(at) for at in range(8)))
    rows = await trial.everything(topic)
    for number, id in enumerate(ids):
        winners = [at for at, answer in enumerate(answers) if answer[number] is Status.OK]
        expect_equal(len(winners), 1, f"number of puts of {id!r} that were stored")
        expect_equal(rows[id]["payloads"], f"from {winners[0]}".encode(), f"payload of {id!r}")
    others = {answer[number] for answer in answers for number in range(50)} - {Status.OK}
    expect_equal(others, {Status.EXISTS}, "statuses of the others")


@check()
async def check_racing_replaces(trial: Trial) -> None:
    """While puts replace messages at once, each id has one message at every moment, with its own payload. Answers of a
    lease and of puts that replace fit some order of them."""
    ids = named(20)
    topic = await trial.topic_with(ids, payload=b"first")
    births: dict[int, bytes] = {int(row["birth"]): b"first" for row in (await trial.everything(topic)).values()}

    async def replace(at: int) -> None:
        for _ in range(5):
            payload = f"from {at}".encode()
            puts = trial.puts(ids, T0 + 1, payload=payload, replace=True)
            births.update(dict.fromkeys(puts.birth.tolist(), payload))
            await trial.send(topic, puts, T0, wanted=Status.OK)

    async def look() -> None:
        for _ in range(8):
            found = by_id(await trial.scan(topic))
            expect_equal(sorted(found), ids, "ids there while they are replaced")
            expect({row["birth"] for row in found.values()} <= births.keys(), "a message that nobody has put")

    await asyncio.gather(*(replace(at) for at in range(4)), look(), look())
    for id, row in (await trial.everything(topic)).items():
        expect_equal(row["payloads"], births[row["birth"]], f"payload of {id!r}")
    answers, leased = await asyncio.gather(
        trial.put(topic, ids, T0 + 1, payload=b"last", replace=True), trial.lease(topic, now_ms=T0 + 1)
    )
    after = await trial.everything(topic)
    held = dict(zip(leased.rows.ids.tolist(), leased.rows.birth.tolist(), strict=True))
    for id, status in zip(ids, statuses(answers), strict=True):
        expect(status in (Status.OK, Status.LEASED), f"a put that replaces {id!r} is {status}")
        expect_equal(after[id]["payloads"] == b"last", status is Status.OK, f"{id!r} is the last one's")
        expect(id not in held or held[id] == after[id]["birth"], f"{id!r} was replaced under a live lease")


@check()
async def check_racing_creates(trial: Trial) -> None:
    """Brokers that create one topic at the same time all get one record. If their settings differ, one wins, and the
    others get a conflict."""
    async with brokers(trial, 3) as stores:
        for leases_ms in ((5_000,), (5_000, 6_000)):
            record = trial.record()
            asked = [
                dataclasses.replace(
                    record, uid=record.uid + at, settings=dataclasses.replace(record.settings, lease_ms=ms)
                )
                for at, ms in enumerate(leases_ms * 6)
            ]
            for topic in asked:
                trial.drop_later(topic)
            creates = (stores[at % 3].create_topic(topic) for at, topic in enumerate(asked))
            answers = await asyncio.gather(*creates, return_exceptions=True)
            made = [answer for answer in answers if isinstance(answer, Topic)]
            expect(len(made) == 6, f"creates of one topic at once answered {answers}")
            expect_equal({topic.uid for topic in made}, {made[0].uid}, "uids of the one record")
            refused = [answer for answer in answers if isinstance(answer, TopicConflict)]
            expect_equal(len(made) + len(refused), len(asked), "creates that were answered, or a conflict")
            for store in stores:
                listed = [topic for topic in await store.topics() if topic.name == record.name]
                expect_equal(listed, made[:1], "the record that each of them lists")


@check()
async def check_racing_leases(trial: Trial) -> None:
    """Leases that race for the same messages never get the same one, and together get all."""
    ids = named(400)
    topic = await trial.topic_with(ids, [T0 - at % 50 for at in range(400)])

    async def take(worker: int) -> list[bytes]:
        mine: list[bytes] = []
        for _ in range(30):
            mine += (await trial.lease(topic, 17, holder=f"w{worker}".encode())).rows.ids.tolist()
        return mine

    got = await asyncio.gather(*(take(worker) for worker in range(8)))
    taken = [id for mine in got for id in mine]
    expect_equal(len(taken), len(set(taken)), "messages leased, each counted once")
    expect_equal(sorted(taken), ids, "messages leased by all together")


@check()
async def check_racing_settles(trial: Trial) -> None:
    """The answers of an ack, a release, an extend and a cancel that race for the same lease fit some order of them."""
    topic = await trial.topic_with(named(100))
    rows = (await trial.lease(topic)).rows
    acks, releases, _, cancels = await asyncio.gather(
        trial.settle(topic, Operation.ACK, rows),
        trial.settle(topic, Operation.RELEASE, rows, time_ms=T0 + 900),
        trial.settle(topic, Operation.EXTEND, rows, time_ms=T0 + 90_000),
        trial.mutate(topic, Operation.CANCEL, rows.ids.tolist(), leased=True),
    )
    left = await trial.everything(topic)
    ended = zip(rows.ids, statuses(acks), statuses(releases), statuses(cancels), strict=True)
    for id, ack, release, cancel in ended:
        expect((ack, cancel).count(Status.OK) == 1, f"{id!r}: ack {ack}, release {release}, cancel {cancel}")
        expect(ack is not Status.OK or release is not Status.OK, f"{id!r}: acked with a released token")
        expect(id not in left, f"{id!r} is there after an ack or a cancel")


@check()
async def check_racing_moves(trial: Trial) -> None:
    """Exactly one of the moves that race from the same version passes."""
    ids = named(60)
    topic = await trial.topic_with(ids, T0 + 500)
    answers = await asyncio.gather(
        *(trial.mutate(topic, Operation.MOVE, ids, T0 + 1_000 + at, if_version=1) for at in range(6))
    )
    rows = await trial.everything(topic)
    for number, id in enumerate(ids):
        won = [at for at, answer in enumerate(answers) if answer.status[number] == Status.OK.code]
        expect_equal(len(won), 1, f"number of moves of {id!r} that passed")
        expect_equal((rows[id]["due_ms"], rows[id]["version"]), (T0 + 1_000 + won[0], 2), f"(due, version) of {id!r}")


@check()
async def check_racing_everything(trial: Trial) -> None:
    """Workers lease, extend, release and ack while producers move and cancel. Each (birth, version) is granted once. An
    acked or cancelled message never comes back, and nothing is lost."""
    ids = named(150)
    topic = await trial.topic_with(ids, [T0 + at % 40 for at in range(150)], buckets=8)
    granted: list[tuple[int, int]] = []
    gone: dict[bytes, str] = {}
    clock = iter(range(T0, T0 + 10_000_000))

    async def work(worker: int) -> None:
        rng = random.Random(worker)
        for _ in range(40):
            now_ms, before = next(clock), dict(gone)
            leased = await trial.lease(topic, 9, now_ms=now_ms, holder=f"w{worker}".encode(), lease_ms=30)
            rows = leased.rows
            granted.extend(zip(rows.birth.tolist(), rows.version.tolist(), strict=True))
            for id in rows.ids:
                expect(id not in before, f"{id!r} was leased after its {before.get(id)}")
            if not len(rows):
                continue
            operation = rng.choice((Operation.ACK, Operation.RELEASE, Operation.EXTEND))
            part = rows.take(np.arange(rng.randint(1, len(rows))))
            answers = await trial.settle(topic, operation, part, now_ms=now_ms, time_ms=now_ms + 5)
            if operation is Operation.ACK:
                won = zip(part.ids, statuses(answers), strict=True)
                gone.update({id: "ack" for id, status in won if status is Status.OK})

    async def produce(number: int) -> None:
        rng = random.Random(1_000 + number)
        for _ in range(40):
            now_ms = next(clock)
            chosen = rng.sample(ids, 5)
            if rng.random() < 0.8:
                await trial.mutate(topic, Operation.MOVE, chosen, now_ms + rng.randint(0, 50), now_ms=now_ms)
            else:
                answers = await trial.mutate(topic, Operation.CANCEL, chosen[:1], now_ms=now_ms)
                gone.update({id: "cancel" for id in chosen[:1] if statuses(answers) == [Status.OK]})

    await asyncio.gather(*(work(worker) for worker in range(5)), *(produce(number) for number in range(3)))
    expect_equal(len(granted), len(set(granted)), "grants of (birth, version), each counted once")
    left = await trial.everything(topic)
    expect_equal(sorted(left), sorted(set(ids) - gone.keys()), "ids left, which are those neither acked nor cancelled")


@check()
async def check_extend_racing_a_lease(trial: Trial) -> None:
    """If an extend and a lease race for a message whose lease has run out, one wins. An extended message is not leased.
    A leased one answers FENCED to the extend."""
    ids = named(120)
    topic = await trial.topic_with(ids)
    first = (await trial.lease(topic, lease_ms=10)).rows
    parts = [first.take(np.arange(at, 120, 4)) for at in range(4)]
    extending = [trial.settle(topic, Operation.EXTEND, part, now_ms=T0 + 10, time_ms=T0 + 900) for part in parts]
    extends, second, third = await asyncio.gather(
        asyncio.gather(*extending),
        trial.lease(topic, 60, now_ms=T0 + 10, holder=b"worker-2"),
        trial.lease(topic, 60, now_ms=T0 + 10, holder=b"worker-3"),
    )
    extended = {
        id
        for part, answers in zip(parts, extends, strict=True)
        for id, status in zip(part.ids.tolist(), statuses(answers), strict=True)
        if status is Status.OK
    }
    leased = second.rows.ids.tolist() + third.rows.ids.tolist()
    expect_equal(len(leased), len(set(leased)), "messages leased, each counted once")
    expect(not extended & set(leased), f"extended and leased to another: {sorted(extended & set(leased))}")
    expect_equal(sorted(extended | set(leased)), ids, "messages extended or leased")
    rows = await trial.everything(topic, now_ms=T0 + 10)
    for id in extended:
        row = rows[id]
        expect_equal((row["holders"], row["version"], row["due_ms"]), (WORKER, 2, T0 + 900), f"{id!r} extended")


@check()
async def check_late_ack_racing_a_lease(trial: Trial) -> None:
    """If a late ack and a lease race for a message, one wins. An acknowledged message is not leased. A leased one
    stays, and answers FENCED to the ack."""
    ids = named(120)
    topic = await trial.topic_with(ids)
    first = (await trial.lease(topic, lease_ms=10)).rows
    part = first.take(np.arange(60, 120))
    leased, acks, more = await asyncio.gather(
        trial.lease(topic, 50, now_ms=T0 + 10, holder=b"worker-2"),
        trial.settle(topic, Operation.ACK, part, now_ms=T0 + 10),
        trial.lease(topic, 50, now_ms=T0 + 10, holder=b"worker-3"),
    )
    taken = leased.rows.ids.tolist() + more.rows.ids.tolist()
    acked = {id for id, status in zip(part.ids.tolist(), statuses(acks), strict=True) if status is Status.OK}
    expect_equal(len(taken), len(set(taken)), "messages leased, each counted once")
    expect(not acked & set(taken), f"acknowledged and leased: {sorted(acked & set(taken))}")
    expect_equal(sorted(await trial.everything(topic, now_ms=T0 + 10)), sorted(set(ids) - acked), "ids left")


@check()
async def check_cancel_racing_a_lease(trial: Trial) -> None:
    """If a cancel and a lease race for a message, one wins. A cancelled message is not leased. A leased one answers
    LEASED to the cancel, and the holder's ack counts."""
    ids = named(100)
    topic = await trial.topic_with(ids)
    leased, cancels, more = await asyncio.gather(
        trial.lease(topic, 40), trial.mutate(topic, Operation.CANCEL, ids), trial.lease(topic, 40)
    )
    gone = {id for id, status in zip(ids, statuses(cancels), strict=True) if status is Status.OK}
    for rows in (leased.rows, more.rows):
        taken = set(rows.ids.tolist())
        expect(not gone & taken, f"cancelled and leased: {sorted(gone & taken)}")
        acks = await trial.settle(topic, Operation.ACK, rows)
        expect_equal(set(statuses(acks)), {Status.OK} if len(rows) else set(), "statuses of the holder's acks")
        gone |= taken
    expect_equal(sorted(await trial.everything(topic)), sorted(set(ids) - gone), "ids left")


def is_new(put: Event) -> bool:
    """Return whether a put was answered as stored, not as met or moved."""
    return put.result.get("status") == "OK" and put.result["version"] == 1


WANTED = (
    *(("put", status) for status in ("OK", "EXISTS")),
    *(("ack", "OK"), ("release", "OK"), ("extend", "OK"), ("ack", "FENCED")),
    *(("move", "OK"), ("move", "LEASED"), ("move", "NOT_FOUND"), ("cancel", "OK")),
)


@check()
async def check_brokers_racing(trial: Trial) -> None:
    """Callers of three brokers put, move, cancel, lease and settle the same ids on one store. Each broker has an
    opening of its own if the store is shared. The history checker finds no promise broken."""
    async with brokers(trial, 3) as stores:
        crowd = Crowd(trial, await trial.topic(buckets=4, max_deliveries=0), stores)
        await crowd.run(30)
        await crowd.settle_all()
        await crowd.expect_kept(*WANTED)


@check()
async def check_brokers_racing_where_ids_are_remembered(trial: Trial) -> None:
    """Callers of three brokers race on a topic that remembers. Acknowledged and cancelled ids are not stored again."""
    async with brokers(trial, 3) as stores:
        topic = await trial.topic(buckets=4, max_deliveries=0, remember_ms=1_000_000_000)
        crowd = Crowd(trial, topic, stores, seed=1)
        await crowd.run(20)
        await crowd.settle_all()
        await crowd.expect_kept(("put", "OK"), ("put", "DUPLICATE"), ("ack", "OK"), ("cancel", "OK"))
        stored = Counter(event.arguments["id"] for event in crowd.events if event.operation == "put" and is_new(event))
        expect_equal({id for id, times in stored.items() if times > 1}, set(), "ids stored twice, though remembered")
