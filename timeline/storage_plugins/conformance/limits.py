"""Values at their limits: far times, largest fields, names that collations confuse, large batches with most
statuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from timeline.model import (
    MAX_BUCKETS,
    MAX_DURATION_MS,
    MAX_GROUP_BYTES,
    MAX_HEADERS_BYTES,
    MAX_HOLDER_BYTES,
    MAX_ID_BYTES,
    MAX_REASON_BYTES,
    MAX_TAG_BYTES,
    MAX_TIME_MS,
    MAX_TOPIC_CHARS,
    Operation,
    Status,
    TopicSettings,
    bucket_of,
    encode_headers,
)
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import T0, WORKER, Trial, expect, expect_equal, named, statuses

LARGEST = (1 << 64) - 1
ALIKE = (b"worker", b"Worker", b"worker ", b" worker", "wörker".encode(), "wo\u0308rker".encode(), b"worker\t", b"w")
"""Names that some collation takes for one another."""


@check()
async def check_clock_is_passed_in(trial: Trial) -> None:
    """The caller alone says what time it is. In 1970 and in the year 5000, whatever the server's clock says, leases run
    and messages expire just as today. So do remembered ids and dead letters."""
    for now_ms in (10_000_000, 95_617_584_000_000):
        ids = [b"a", b"b", b"c", b"d", b"e"]
        topic = await trial.topic(remember_ms=60_000, dead_retention_ms=60_000, redelivery_backoff_ms=50, buckets=1)
        await trial.stored(topic, ids, now_ms, expires_ms=[0, 0, 0, now_ms + 5_000, 0], now_ms=now_ms)
        await trial.lease(topic, now_ms=now_ms - 1, wanted=0)
        rows = (await trial.lease(topic, now_ms=now_ms, lease_ms=1_000)).rows
        expect_equal(sorted(rows.ids.tolist()), ids, f"ids leased at {now_ms}")
        operations = [Operation.ACK, Operation.BURY, Operation.EXTEND]
        first = rows.take(np.arange(3))
        await trial.settle(topic, operations, first, now_ms=now_ms, time_ms=now_ms + 30_000, reason=b"bad")
        await trial.lease(topic, now_ms=now_ms + 1_049, wanted=0, next_due_ms=now_ms + 1_050)
        again = await trial.lease(topic, now_ms=now_ms + 5_000, lease_ms=100_000)
        expect_equal((again.rows.ids.tolist(), again.expired), ([b"e"], 1), "(ids leased again, expired)")
        known = await trial.put(topic, [b"a"], now_ms + 59_999, now_ms=now_ms + 59_999)
        expect_equal((statuses(known), known.settled.tolist()), ([Status.DUPLICATE], [1]), "put of what is remembered")
        early = await trial.store.sweep(topic, now_ms + 59_999, 100)
        expect_equal((early.forgotten, early.dead_purged), (0, 0), "(ids forgotten, dead letters purged) too early")
        rows_left = await trial.everything(topic, now_ms=now_ms + 59_999)
        expect_equal(sorted(rows_left), [b"b", b"c", b"e"], "ids left")
        late = await trial.store.sweep(topic, now_ms + 65_001, 100)
        expect_equal((late.forgotten, late.dead_purged), (2, 1), "(ids forgotten, dead letters purged) in time")


@check()
async def check_fields_at_their_limits(trial: Trial) -> None:
    """Every field takes the largest value that it may have, and gives it back as it was."""
    id, group, tag = b"i" * MAX_ID_BYTES, b"g" * MAX_GROUP_BYTES, b"t" * MAX_TAG_BYTES
    holder, reason = b"h" * MAX_HOLDER_BYTES, ("é" * (MAX_REASON_BYTES // 2)).encode()
    headers = encode_headers({"k": "v" * (MAX_HEADERS_BYTES - 5)})
    more: dict[str, Any] = {"group": group, "tag": tag, "headers": headers, "birth": LARGEST}
    topic = await trial.topic_with(
        [id], MAX_TIME_MS - 1, expires_ms=MAX_TIME_MS, **more, horizon_ms=MAX_DURATION_MS, max_lease_ms=MAX_DURATION_MS
    )
    row = await trial.row(topic, id)
    found = [row[name] for name in ("due_ms", "expires_ms", "groups", "tags", "headers", "birth")]
    expect_equal(found, [MAX_TIME_MS - 1, MAX_TIME_MS, group, tag, headers, LARGEST], "the stored row")
    moved = await trial.mutate(topic, Operation.MOVE, [id], T0, group=group, op=LARGEST)
    expect_equal((statuses(moved), (await trial.row(topic, id))["last_op"]), ([Status.OK], LARGEST), "a move")
    again = await trial.mutate(topic, Operation.MOVE, [id], T0, group=group, op=LARGEST)
    expect_equal(again.repeat.tolist(), [1], "the mark of its repeat")
    rows = (await trial.lease(topic, holder=holder, lease_ms=MAX_DURATION_MS)).rows
    found = [rows.holders.tolist(), rows.due_ms.tolist(), rows.birth.tolist()]
    expect_equal(found, [[holder], [T0 + MAX_DURATION_MS], [LARGEST]], "what was leased")
    held = await trial.store.held_by(topic, T0, holder, b"", 10)
    expect_equal(held.rows.ids.tolist(), [id], "ids that the holder has")
    buried = await trial.settle(topic, Operation.BURY, rows, now_ms=T0 + 1, reason=reason)
    expect_equal((statuses(buried), (await trial.row(topic, id))["dead"]), ([Status.OK], reason), "a bury")


@check()
async def check_checksums_of_64_bits(trial: Trial) -> None:
    """Births, operation ids and checksums are 64 bits without a sign: the highest bit counts, none is rounded."""
    topic = await trial.topic()
    births = [1, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, LARGEST - 1, LARGEST]
    ids = named(len(births))
    headers = [encode_headers({"k": str(at)}) for at in range(len(births))]
    puts = trial.puts(ids, T0 + 100, birth=births, headers=headers)
    sums = puts.payload_sum.tolist()
    await trial.store.put(topic, T0, puts)
    await trial.mutate(topic, Operation.MOVE, ids, T0, op=births)
    rows = await trial.everything(topic)
    found = [(rows[id]["birth"], rows[id]["payload_sum"], rows[id]["last_op"]) for id in ids]
    expect_equal(found, list(zip(births, sums, births, strict=True)), "(birth, payload_sum, last_op)")
    leased = (await trial.lease(topic)).rows
    await trial.settle(topic, Operation.ACK, leased, birth=leased.birth ^ np.uint64(1), wanted=Status.FENCED)
    await trial.settle(topic, Operation.ACK, leased, birth=leased.birth ^ np.uint64(1 << 63), wanted=Status.FENCED)
    await trial.settle(topic, Operation.ACK, leased, wanted=Status.OK)


@check()
async def check_topics_at_their_limits(trial: Trial) -> None:
    """A topic takes the longest name, the largest uid, the most buckets and the longest durations. Its messages come
    from all of its buckets."""
    settings = TopicSettings(
        buckets=MAX_BUCKETS,
        max_lease_ms=MAX_DURATION_MS,
        horizon_ms=MAX_DURATION_MS,
        remember_ms=MAX_DURATION_MS,
        dead_retention_ms=MAX_DURATION_MS,
        redelivery_backoff_ms=MAX_DURATION_MS,
        max_deliveries=1_000_000,
        max_rate_per_s=1_000_000_000,
    ).check()
    plain = trial.record()
    name = plain.name + "日" * (MAX_TOPIC_CHARS - len(plain.name))
    record = dataclasses.replace(plain, name=name, uid=(1 << 63) - 1 - plain.uid % 1_000_003, settings=settings)
    trial.drop_later(record)
    expect_equal(await trial.store.create_topic(record), record, "the record that create_topic answers")
    listed = [topic for topic in await trial.store.topics() if topic.name == name]
    expect_equal(listed, [record], "the listed record")
    ids = named(3_000)
    await trial.stored(record, ids)
    last = max(bucket_of(id, MAX_BUCKETS) for id in ids)
    expected = sorted(id for id in ids if bucket_of(id, MAX_BUCKETS) == last)
    expect_equal((await trial.lease(record, buckets=[last])).rows.ids.tolist(), expected, "ids leased from one bucket")
    rest = await trial.lease(record, buckets=list(range(MAX_BUCKETS)))
    expect_equal(sorted(rest.rows.ids.tolist() + expected), ids, "ids leased from all buckets")
    await trial.settle(record, Operation.ACK, rest.rows, wanted=Status.OK)


@check()
async def check_ids_that_look_alike(trial: Trial) -> None:
    """A call finds, moves, settles and cancels only the very id that it names, whatever ids some collation takes for
    it."""
    topic = await trial.topic_with(ALIKE[:1])
    others = list(ALIKE[1:])
    before = await trial.everything(topic)
    for operation in (Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE):
        await trial.mutate(topic, operation, others, T0 + 9, leased=True, wanted=Status.NOT_FOUND)
    await trial.scan(topic, ids=trial.puts(others).ids, wanted=[])
    expect_equal(await trial.everything(topic), before, "rows afterwards")
    await trial.stored(topic, others)
    rows = (await trial.lease(topic)).rows
    part = rows.take(np.array([at for at, id in enumerate(rows.ids) if id == ALIKE[0]]))
    await trial.settle(topic, Operation.ACK, part)
    expect_equal(sorted(await trial.everything(topic)), sorted(others), "ids left after one was acknowledged")


@check()
async def check_holders_that_look_alike(trial: Trial) -> None:
    """A holder is compared as bytes: another that looks alike settles nothing and holds nothing."""
    topic = await trial.topic_with(named(len(ALIKE)))
    for holder in ALIKE:
        await trial.lease(topic, 1, holder=holder)
    rows = await trial.scan(topic, payload=True)
    for holder in ALIKE:
        page = await trial.store.held_by(topic, T0, holder, b"", 10)
        expect_equal(page.rows.holders.tolist(), [holder], f"holders of what {holder!r} holds")
    others = [ALIKE[(ALIKE.index(holder) + 1) % len(ALIKE)] for holder in rows.holders]
    for operation in (Operation.EXTEND, Operation.RELEASE, Operation.BURY, Operation.REGRANT, Operation.ACK):
        await trial.settle(topic, operation, rows, holder=others, time_ms=T0 + 90_000, wanted=Status.FENCED)
    await trial.settle(topic, Operation.ACK, rows, wanted=Status.OK)


@check()
async def check_groups_and_tags_that_look_alike(trial: Trial) -> None:
    """Groups and tags are compared as bytes: of those that look alike, each owns and names its own messages alone."""
    ids = named(len(ALIKE))
    topic = await trial.topic_with(ids, T0 + 500, group=list(ALIKE), tag=list(ALIKE))
    others = list(ALIKE[1:] + ALIKE[:1])
    await trial.mutate(topic, Operation.MOVE, ids, T0 + 600, group=others, wanted=Status.FORBIDDEN)
    for id, name in zip(ids, ALIKE, strict=True):
        expect_equal((await trial.scan(topic, tag=name)).ids.tolist(), [id], f"ids with the tag {name!r}")
        counts = await trial.by_tag(topic, Operation.MOVE, name, group=name, due_ms=T0 + 700)
        expect_equal(counts, {Status.OK: 1}, f"counts of a move by the tag {name!r}")
    await trial.mutate(topic, Operation.MOVE, ids, T0 + 600, group=list(ALIKE), wanted=Status.OK)


@check()
async def check_large_mixed_batches(trial: Trial) -> None:
    """In batches of thousands in which most statuses occur, in any order, each message gets its own answer."""
    count = 4_000
    ids = [f"{(at * 7_919) % count:06}".encode() for at in range(count)]
    topic = await trial.topic_with(
        ids, T0 + 500, group=[b"ops" if at % 8 == 7 else b"default" for at in range(count)], remember_ms=600_000
    )
    kinds = [at % 8 for at in range(count)]
    of = [[id for id, kind in zip(ids, kinds, strict=True) if kind == number] for number in range(8)]
    await trial.mutate(topic, Operation.CANCEL, of[0])
    await trial.mutate(topic, Operation.MOVE, of[1] + of[2], T0)
    rows = (await trial.lease(topic)).rows
    expect_equal(sorted(rows.ids.tolist()), sorted(of[1] + of[2]), "ids leased")
    dead = set(of[2])
    buried = rows.take(np.array([at for at, id in enumerate(rows.ids) if id in dead]))
    await trial.settle(topic, Operation.BURY, buried, reason=b"bad")
    absent = [b"x" + id for id in ids[: count // 8]]
    asked = [id for group in zip(*of, absent, strict=True) for id in group]
    kept = Status.OK
    wanted = [
        *(Status.NOT_FOUND, Status.LEASED, Status.DEAD, kept, kept, kept, kept, Status.FORBIDDEN, Status.NOT_FOUND)
    ] * (count // 8)
    answers = await trial.mutate(topic, Operation.MOVE, asked, T0 + 900, wanted=wanted)
    expect_equal(answers.settled.tolist(), [1, *[0] * 8] * (count // 8), "marks of what is settled")
    await trial.scan(topic, ids=trial.puts(asked).ids, wanted=sorted(id for part in of[1:2] + of[3:] for id in part))
    puts = trial.puts(asked, T0 + 900, payload=[b"payload", b"other"] * (len(asked) // 2))
    answers = await trial.store.put(topic, T0, puts)
    new, settled = Status.OK, Status.DUPLICATE
    for at, status in enumerate(statuses(answers)):
        place = at % 9
        there = Status.FORBIDDEN if place == 7 else Status.DUPLICATE if at % 2 == 0 else Status.EXISTS
        expect_equal(status, new if place == 8 else settled if place == 0 else there, f"status of put {at}")
    leased = rows.take(np.array([at for at, id in enumerate(rows.ids) if id not in dead]))
    half = len(leased) // 2
    mixed = leased.take(np.concatenate([np.arange(len(leased)), np.arange(half)]))
    await trial.settle(topic, Operation.ACK, mixed, wanted=[Status.OK] * len(leased) + [Status.NOT_FOUND] * half)


@check()
async def check_scan_by_many_ids(trial: Trial) -> None:
    """A scan by 10,000 ids finds each that is there once, though most are not there."""
    topic = await trial.topic_with(named(500))
    asked = [*named(500), *named(9_500, "x")]
    asked = [asked[(at * 7_919) % len(asked)] for at in range(len(asked))]
    await trial.scan(topic, ids=trial.puts(asked).ids, wanted=named(500))


@check()
async def check_payload_limit(trial: Trial) -> None:
    """A payload as large as the store declares (or 16 MiB, where it takes more) is stored and delivered as it was."""
    size = min(trial.store.capabilities.payload_limit_bytes, 16 * 1024 * 1024)
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    topic = await trial.topic_with([b"large", b"small"], payload=[payload, b"s"], max_payload_bytes=size)
    leased = await trial.lease(topic)
    payloads = leased.rows.payloads
    expect(payloads is not None, "leased without payloads")
    found = dict(zip(leased.rows.ids.tolist(), payloads or [], strict=True))
    expect(found.get(b"large") == payload, f"the payload of {size} bytes came back otherwise")
    expect_equal(found.get(b"small"), b"s", "the payload beside it")


@check()
async def check_payloads_that_lie_apart(trial: Trial) -> None:
    """If a put has the sizes of offloaded payloads (`Puts.payload_bytes`), rows have that size, and bytes of a grant
    and of a page count it. The pointers come back as they were put."""
    topic = await trial.topic(buckets=1)
    puts = trial.puts(named(4), payload=[b"pointer-1", b"inside", b"pointer-2", b"pointer-3"])
    puts.payload_bytes = np.array([700_000, 6, 900_000, 1_000], dtype=np.int64)
    await trial.send(topic, puts, T0, wanted=Status.OK)
    rows = await trial.everything(topic)
    expect_equal([row["payload_bytes"] for row in rows.values()], puts.payload_bytes.tolist(), "payload_bytes")
    expect_equal([row["payloads"] for row in rows.values()], puts.payloads.tolist(), "what lies in their stead")
    leased = await trial.lease(topic, max_bytes=700_100)
    expect_equal(leased.rows.ids.tolist(), named(4)[:2], "ids leased into 700,100 bytes")
    expect_equal((leased.rows.payloads, leased.damaged), (puts.payloads[:2], ()), "(payloads leased, damaged)")
    rest = await trial.lease(topic)
    expect_equal((rest.rows.payloads, rest.damaged), (puts.payloads[2:], ()), "(payloads leased, damaged)")
    page = await trial.store.held_by(topic, T0, WORKER, b"", 10)
    expect(len(page.rows) < 4 and page.cursor is not None, "a page of held messages counts what lies in their stead")
