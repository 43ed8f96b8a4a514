"""Walks and sweeps. Walks by tag, scans and holders' messages can be resumed, and miss nothing that is there
throughout. Sweeps are bounded, and remove nothing else."""

from __future__ import annotations

from timeline.columns import Ragged
from timeline.model import Operation, Rows, State, Status, bucket_of
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import (
    T0,
    WORKER,
    Trial,
    by_id,
    expect,
    expect_equal,
    named,
    walked,
)
from timeline.storage_plugins.contract import Page, ScanFilter, TagMutation, TagStep


@check()
async def check_move_by_tag(trial: Trial) -> None:
    """A move by tag takes all of the tag, compared as bytes, to a due or by a shift from scheduled, in chunks."""
    ids = named(60)
    tags = [(b"spring", b"Spring", b"spring ", b"")[at % 4] for at in range(60)]
    topic = await trial.topic_with(ids, [T0 + at for at in range(60)], tag=tags)
    expect_equal(await trial.by_tag(topic, Operation.MOVE, b"spring", due_ms=T0 + 900), {Status.OK: 15}, "counts")
    expect_equal(await trial.by_tag(topic, Operation.MOVE, b"Spring", by_ms=5_000), {Status.OK: 15}, "counts")
    expect_equal(await trial.by_tag(topic, Operation.MOVE, b"autumn", by_ms=5_000), {}, "counts of an unknown tag")
    rows = await trial.everything(topic)
    wanted = [T0 + 900 if at % 4 == 0 else T0 + at + (5_000 if at % 4 == 1 else 0) for at in range(60)]
    expect_equal([rows[id]["due_ms"] for id in ids], wanted, "dues after moves by tag")
    expect_equal([rows[id]["version"] for id in ids], [2, 2, 1, 1] * 15, "versions after moves by tag")
    await trial.lease(topic, now_ms=T0 + 900, wanted=45)


@check()
async def check_shift_by_tag_beyond_the_latest(trial: Trial) -> None:
    """A shift by tag that would carry a message beyond the latest due allowed answers INVALID and leaves it. A chunk
    repeated later still counts what it had shifted as done."""
    topic = await trial.topic_with(
        named(3), [T0 + 10, T0 + 11, T0 + 12], tag=b"t", group=[b"default", b"default", b"ops"]
    )
    wanted = {Status.OK: 1, Status.INVALID: 2}
    shift: dict[str, int] = {"by_ms": 500, "op": trial.number()}
    for dry_run, latest_ms in ((True, T0 + 510), (False, T0 + 510), (False, T0 + 509)):
        counts = await trial.by_tag(topic, Operation.MOVE, b"t", latest_ms=latest_ms, dry_run=dry_run, **shift)
        expect_equal(counts, wanted, f"counts with {latest_ms - T0} as the latest due")
    rows = await trial.everything(topic)
    expect_equal([rows[id]["due_ms"] for id in named(3)], [T0 + 510, T0 + 11, T0 + 12], "dues afterwards")


@check()
async def check_cancel_by_tag(trial: Trial) -> None:
    """A cancel by tag removes free messages and counts each status. It spares leased ones unless asked to take them."""
    topic = await trial.topic_with(named(10), [T0] * 4 + [T0 + 500] * 6, tag=b"t")
    leased = await trial.lease(topic)
    await trial.settle(topic, [Operation.BURY] + [Operation.EXTEND] * 3, leased.rows, reason=b"x")
    wanted = {Status.OK: 6, Status.LEASED: 3, Status.DEAD: 1}
    expect_equal(await trial.by_tag(topic, Operation.CANCEL, b"t", limit=3), wanted, "counts")
    counts = await trial.by_tag(topic, Operation.CANCEL, b"t", leased=True)
    expect_equal(counts, {Status.OK: 3, Status.DEAD: 1}, "counts with leased=True")
    expect_equal(len(await trial.everything(topic)), 1, "number of rows left")


@check()
async def check_tag_dry_run(trial: Trial) -> None:
    """A dry run counts what would be answered and changes nothing."""
    topic = await trial.topic_with(
        named(10), [T0] * 4 + [T0 + 500] * 6, tag=b"t", group=[b"ops"] * 2 + [b"default"] * 8
    )
    await trial.lease(topic, 100)
    before = await trial.everything(topic)
    wanted = {Status.OK: 6, Status.LEASED: 2, Status.FORBIDDEN: 2}
    for operation in (Operation.MOVE, Operation.CANCEL):
        counts = await trial.by_tag(topic, operation, b"t", due_ms=T0 + 900, dry_run=True)
        expect_equal(counts, wanted, f"counts of a dry {operation.name}")
        expect_equal(await trial.everything(topic), before, f"rows after a dry {operation.name}")


@check()
async def check_tag_started(trial: Trial) -> None:
    """A tag operation takes messages put at or before it started, and leaves later ones uncounted."""
    topic = await trial.topic_with(named(5), T0 + 500, tag=b"t")
    await trial.stored(topic, named(5, "new"), T0 + 500, tag=b"t", now_ms=T0 + 11)
    counts = await trial.by_tag(topic, Operation.CANCEL, b"t", now_ms=T0 + 20, started_ms=T0 + 10)
    expect_equal(counts, {Status.OK: 5}, "counts")
    expect_equal(sorted(await trial.everything(topic)), named(5, "new"), "ids left")


@check()
async def check_tag_ownership(trial: Trial) -> None:
    """Another group's messages under the tag are counted as FORBIDDEN and stay."""
    topic = await trial.topic_with(named(9), T0 + 500, tag=b"t", group=[b"ops", b"default", b"Ops"] * 3)
    counts = await trial.by_tag(topic, Operation.CANCEL, b"t", group=b"ops")
    expect_equal(counts, {Status.OK: 3, Status.FORBIDDEN: 6}, "counts")
    expect_equal(len(await trial.everything(topic)), 6, "number of rows left")


@check()
async def check_tag_chunk_repeated(trial: Trial) -> None:
    """A chunk of a tag operation sent again with its operation id shifts nothing twice and still counts as done. The
    walk goes on from either answer."""
    topic = await trial.topic_with(named(40), T0 + 500, tag=b"t")
    mutation = TagMutation(Operation.MOVE, b"t", b"default", T0, trial.number(), by_ms=100)
    done = 0

    async def chunk(cursor: bytes) -> TagStep:
        first = await trial.store.mutate_tag(topic, T0, mutation, cursor, 7)
        again = await trial.store.mutate_tag(topic, T0, mutation, cursor, 7)
        expect_equal(again.counts, first.counts, "counts of a chunk repeated")
        if first.counts:
            expect_equal(first.earliest_due_ms, T0 + 600, "the earliest due among the moved")
        return again

    async for step in walked(chunk):
        done += step.counts.get(Status.OK.code, 0)
    expect_equal(done, 40, "messages counted as moved")
    rows = await trial.everything(topic)
    expect_equal({row["due_ms"] for row in rows.values()}, {T0 + 600}, "dues after each chunk was sent twice")
    expect_equal({row["version"] for row in rows.values()}, {2}, "versions")


@check()
async def check_shift_by_tag_once(trial: Trial) -> None:
    """A shift by tag leaves the dues that were asked for since it started. Repeated, it shifts no message twice that
    was moved, or leased and released, meanwhile."""
    topic = await trial.topic_with([b"moved", b"released", b"unseen", b"waits"], T0 + 500, tag=b"t")
    mutation = TagMutation(Operation.MOVE, b"t", b"default", T0, trial.number(), by_ms=100)

    async def shift(now_ms: int) -> dict[int, int]:
        return (await trial.store.mutate_tag(topic, now_ms, mutation, b"", 9)).counts

    expect_equal(await shift(T0 + 1), {Status.OK.code: 4}, "counts of the shift")
    await trial.mutate(topic, Operation.MOVE, [b"waits"], due_ms=T0 + 950, now_ms=T0 + 2)
    leased = (await trial.lease(topic, now_ms=T0 + 600)).rows
    unseen = [id == b"unseen" for id in leased.ids.tolist()]
    await trial.settle(topic, Operation.RELEASE, leased, now_ms=T0 + 601, time_ms=T0 + 700, unseen=unseen)
    await trial.mutate(topic, Operation.MOVE, [b"moved"], due_ms=T0 + 900, now_ms=T0 + 603)
    before = await trial.everything(topic)
    expect_equal(await shift(T0 + 604), {}, "counts of the shift repeated")
    expect_equal(await trial.everything(topic), before, "rows after the shift was repeated")


@check()
async def check_tag_while_messages_go(trial: Trial) -> None:
    """While a walk by tag is under way, messages may be acked, cancelled and moved. Each that stays is met once."""
    ids = named(100)
    topic = await trial.topic_with(ids, T0 + 500, tag=b"t")
    mutation = TagMutation(Operation.MOVE, b"t", b"default", T0, trial.number(), by_ms=1_000)
    met = 0
    gone: list[bytes] = []
    async for step in walked(lambda cursor: trial.store.mutate_tag(topic, T0, mutation, cursor, 30)):
        met += sum(step.counts.values())
        if not gone:
            untouched = [id for id, row in (await trial.everything(topic)).items() if row["version"] == 1]
            expect_equal(len(untouched), 100 - met, "rows that the first chunk did not meet")
            gone = untouched[::2]
            await trial.mutate(topic, Operation.CANCEL, gone)
    expect_equal(met, 100 - len(gone), "messages met in all")
    rows = await trial.everything(topic)
    expect_equal({row["due_ms"] for row in rows.values()}, {T0 + 1_500}, "dues of those that stayed")


@check()
async def check_scan_by_state(trial: Trial) -> None:
    """A scan returns the states that it is asked for. Without any, it returns all that live: waiting, available,
    leased."""
    topic = await trial.topic_with([b"dead", b"leased", b"ran out"], buckets=1)
    first = (await trial.lease(topic, wanted=3)).rows
    times = [T0 + 90_000, T0 + 90_000, T0 + 20]
    short = await trial.settle(topic, Operation.REGRANT, first, time_ms=times)
    operations = [Operation.BURY, Operation.EXTEND, Operation.EXTEND]
    await trial.settle(topic, operations, first, version=short.version, time_ms=times, reason=b"x", wanted=Status.OK)
    await trial.stored(topic, [b"waiting", b"available"], [T0 + 70_000, T0 + 10])
    wanted: dict[tuple[State, ...], list[bytes]] = {
        (State.WAITING,): [b"waiting"],
        (State.AVAILABLE,): [b"available", b"ran out"],
        (State.LEASED,): [b"leased"],
        (State.DEAD,): [b"dead"],
        (): [b"available", b"leased", b"ran out", b"waiting"],
        (State.DEAD, State.WAITING): [b"dead", b"waiting"],
    }
    for states, ids in wanted.items():
        await trial.scan(topic, now_ms=T0 + 30_000, states=frozenset(states), wanted=ids)


@check()
async def check_scan_filters(trial: Trial) -> None:
    """A scan filters by tag, by due (from included, to not), by both and by ids."""
    ids = named(40)
    topic = await trial.topic_with(ids, [T0 + at for at in range(40)], tag=[b"t", b"T"] * 20)
    await trial.scan(topic, limit=7, tag=b"t", due_from_ms=T0 + 10, due_to_ms=T0 + 20, wanted=ids[10:20:2])
    await trial.scan(topic, limit=7, due_from_ms=T0 + 35, wanted=ids[35:])
    await trial.scan(topic, limit=7, tag=b"x", wanted=[])
    asked = Ragged.of([ids[3], b"absent", ids[7], ids[3], b"M-000001"])
    await trial.scan(topic, ids=asked, wanted=[ids[3], ids[7]])
    for limit in (3, 1_000):
        rows = await trial.scan(topic, ids=Ragged.of(ids), tag=b"T", payload=True, limit=limit, wanted=ids[1::2])
        expect_equal(rows.payloads, Ragged.repeat(b"payload", 20), "their payloads")


@check()
async def check_scan_walks_in_order(trial: Trial) -> None:
    """A scan walks (bucket, id). Pages of any size give the same rows in that order, each once."""
    ids = [f"{(at * 7919) % 500:03}".encode() for at in range(500)]
    topic = await trial.topic_with(ids, [T0 + at % 9 for at in range(500)], buckets=8)
    wanted = sorted(ids, key=lambda id: (bucket_of(id, 8), id))
    for limit in (1, 7, 500, 10_000):
        rows = await trial.scan(topic, limit=limit)
        expect_equal(rows.ids.tolist(), wanted, f"ids in pages of {limit}")


@check()
async def check_scan_under_moves(trial: Trial) -> None:
    """A message that is there throughout a scan is seen at least once, though it is moved, leased and released
    meanwhile."""
    ids = named(200)
    topic = await trial.topic_with(ids, [T0 + at for at in range(200)], buckets=4)
    seen: list[bytes] = []
    turn = 0
    async for part in walked(lambda cursor: trial.store.scan(topic, T0 + 50, ScanFilter(), cursor, 17, False)):
        seen += part.rows.ids.tolist()
        turn += 1
        await trial.mutate(topic, Operation.MOVE, ids[turn % 3 :: 3], T0 + 100 * turn, now_ms=T0 + 50)
        leased = await trial.lease(topic, 20, now_ms=T0 + 50)
        await trial.settle(topic, Operation.RELEASE, leased.rows, now_ms=T0 + 50, time_ms=T0 + 40 * turn)
        await trial.stored(topic, [f"new-{turn}".encode()], now_ms=T0 + 50)
        await trial.mutate(topic, Operation.CANCEL, [f"new-{turn - 1}".encode()], now_ms=T0 + 50)
    expect(set(ids) <= set(seen), f"never seen: {sorted(set(ids) - set(seen))[:10]}")
    expect_equal(len(seen), len(set(seen)), "number of ids seen, each counted once")


@check()
async def check_scan_that_starts_later(trial: Trial) -> None:
    """A scan sees all that was there when it started, whatever an unfinished scan before it had seen."""
    topic = await trial.topic_with(named(20), buckets=1)
    left = await trial.store.scan(topic, T0, ScanFilter(), b"", 5, False)
    expect(left.cursor is not None, "a page of 5 of 20 rows says that the scan is done")
    await trial.stored(topic, named(20, "n"))
    rows = await trial.scan(topic, limit=5)
    expect_equal(len(rows), 40, "rows that the later scan saw")


@check()
async def check_scan_pages_with_payloads_stay_small(trial: Trial) -> None:
    """A page with payloads ends near 1 MiB of them, with at least one row, also of a scan by ids. All rows come."""
    payloads = [bytes([at]) * 300_000 for at in range(20)]
    topic = await trial.topic_with(named(20), payload=payloads)
    for where in (ScanFilter(), ScanFilter(ids=Ragged.of(named(25)[::-1]))):
        found: list[Rows] = []

        async def page(cursor: bytes, where: ScanFilter = where) -> Page:
            return await trial.store.scan(topic, T0, where, cursor, 1_000, True)

        async for part in walked(page):
            sizes = int(part.rows.payload_bytes.sum())
            expect(sizes <= 2 * 1024 * 1024, f"a page carries {sizes} bytes of payloads")
            found.append(part.rows)
        rows = by_id(Rows.concat(found))
        expect_equal([rows[id]["payloads"] == payloads[at] for at, id in enumerate(named(20))], [True] * 20, "payloads")


@check()
async def check_held_by(trial: Trial) -> None:
    """held_by pages through the messages that a holder has under a live lease, with payloads. It returns no other
    holder's messages, none whose lease ran out, and no dead ones."""
    topic = await trial.topic_with(named(30), payload=named(30), headers=b"\x01\x00k\x01\x00v")
    mine = (await trial.lease(topic, 20, lease_ms=1_000)).rows
    theirs = (await trial.lease(topic, holder=b"Worker-1", lease_ms=1_000)).rows
    operations = [Operation.BURY, Operation.RELEASE, Operation.ACK] + [Operation.EXTEND] * 17
    times = [T0 + 50] * 10 + [T0 + 5_000] * 10
    await trial.settle(topic, operations, mine, time_ms=times)
    wanted = {T0: sorted(mine.ids.tolist()[3:]), T0 + 1_000: sorted(mine.ids.tolist()[10:]), T0 + 5_000: []}
    for now_ms, ids in wanted.items():
        found: list[Rows] = []

        async def page(cursor: bytes, now_ms: int = now_ms) -> Page:
            return await trial.store.held_by(topic, now_ms, WORKER, cursor, 4)

        async for part in walked(page):
            expect(len(part.rows) <= 4, f"a page of at most 4 rows has {len(part.rows)}")
            found.append(part.rows)
        rows = by_id(Rows.concat(found))
        expect_equal(sorted(rows), ids, f"ids held at T0 + {now_ms - T0}")
        expect(all(row["payloads"] == id for id, row in rows.items()), "payloads of what is held differ")
        expect_equal({row["holders"] for row in rows.values()} - {WORKER}, set(), "other holders")
    other = await trial.store.held_by(topic, T0, b"Worker-1", b"", 100)
    expect_equal(sorted(other.rows.ids.tolist()), sorted(theirs.ids.tolist()), "ids that the other holder has")
    expect_equal(len((await trial.store.held_by(topic, T0, b"nobody", b"", 100)).rows), 0, "rows that nobody has")
    await trial.settle(topic, Operation.ACK, theirs, wanted=Status.OK)


@check()
async def check_scan_from_a_bucket(trial: Trial) -> None:
    """A cursor begins with the bucket that the walk is in, 4 bytes big endian. These alone start a walk there."""
    ids = named(60)
    topic = await trial.topic_with(ids, T0 + 500, tag=[(b"t", b"")[at % 2] for at in range(60)], buckets=5)
    for start in range(6):
        for tag in (b"", b"t"):
            wanted = {id for at, id in enumerate(ids) if bucket_of(id, 5) >= start and (not tag or at % 2 == 0)}
            found: list[bytes] = []
            cursor: bytes | None = start.to_bytes(4, "big")
            while cursor is not None:
                page = await trial.store.scan(topic, T0, ScanFilter(tag=tag), cursor, 7, False)
                found += page.rows.ids.tolist()
                cursor = page.cursor
                if cursor is not None and len(page.rows):
                    reached = int.from_bytes(cursor[:4], "big")
                    last = max(bucket_of(id, 5) for id in page.rows.ids.tolist())
                    expect(last <= reached, f"a cursor in bucket {reached} after a row of bucket {last}")
            expect_equal(sorted(found), sorted(wanted), f"what a walk from bucket {start} finds")


# ── sweeps ──


@check()
async def check_sweep_of_nothing(trial: Trial) -> None:
    """A sweep removes nothing that lives, is leased, is dead for ever or is remembered within its time."""
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
    """A sweep removes expired messages without a live lease, also if a lease has run out. It spares dead letters and
    live leases, and sweeps these when they have ended."""
    ids = [b"dead", b"held", b"ran out"]
    topic = await trial.topic_with(ids, expires_ms=T0 + 100, remember_ms=1_000_000, buckets=1)
    rows = (await trial.lease(topic, lease_ms=1_000, wanted=ids)).rows
    operations = [Operation.BURY, Operation.EXTEND, Operation.EXTEND]
    await trial.settle(topic, operations, rows, time_ms=[T0, T0 + 3_000, T0 + 50], reason=b"x", wanted=Status.OK)
    await trial.stored(topic, [b"waiting", b"moved", b"stays"], T0 + 90, expires_ms=[T0 + 100, T0 + 100, T0 + 5_000])
    await trial.mutate(topic, Operation.MOVE, [b"moved"], T0 + 95)
    left = {
        T0 + 100: (2, [*ids, b"stays"]),
        T0 + 1_000: (1, [b"dead", b"held", b"stays"]),
        T0 + 3_000: (1, [b"dead", b"stays"]),
    }
    for now_ms, (expired, there) in left.items():
        swept = await trial.store.sweep(topic, now_ms, 1_000)
        rows_left = await trial.everything(topic, now_ms=now_ms)
        expect_equal((swept.expired, sorted(rows_left)), (expired, there), f"(expired, ids left) at T0 + {now_ms - T0}")
    again = await trial.put(topic, [b"waiting"], T0 + 4_000, wanted=Status.DUPLICATE)
    expect_equal(again.settled.tolist(), [1], "the mark of what was swept")


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
    """A sweep removes at most its limit of each kind and says when there is more. More sweeps remove all."""
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
