"""Topic records: create, list, update by revision, drop. Also the declarations of the store as a whole."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable

import numpy as np

from timeline.model import Operation, PushSecret, Status, Topic
from timeline.storage_plugins.conformance.suite import check
from timeline.storage_plugins.conformance.trial import T0, StoreViolation, Trial, expect, expect_equal, named, statuses
from timeline.storage_plugins.contract import (
    ScanFilter,
    Store,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    TopicConflict,
)


async def _find(store: Store, name: str) -> Topic | None:
    return next((topic for topic in await store.topics() if topic.name == name), None)


async def _expect_conflict(update: Awaitable[Topic], what: str) -> None:
    try:
        answer = await update
    except TopicConflict:
        return
    raise StoreViolation(f"{what} answered {answer}")


@check()
async def check_topic_is_stored_as_given(trial: Trial) -> None:
    """A created topic is listed as it was given, and its name may be any printable text, compared exactly."""
    record = trial.record(buckets=3, lease_ms=5_000, remember_ms=60_000, paused=True, max_rate_per_s=7, push_rate=9)
    settings = dataclasses.replace(record.settings, push_url="https://a/?b=%27")
    secrets = (PushSecret("whsec_/+8="), PushSecret("whsec_AA==", T0))
    record = dataclasses.replace(record, settings=settings, secrets=secrets)
    odd = [dataclasses.replace(record, name=record.name + end, uid=record.uid + at) for at, end in enumerate(_ENDS, 1)]
    for topic in (record, *odd):
        trial.drop_later(topic)
        expect_equal(await trial.store.create_topic(topic), topic, "the record that create_topic answers")
    for topic in (record, *odd):
        expect_equal(await _find(trial.store, topic.name), topic, "the listed record")
    names = [topic.name for topic in await trial.store.topics()]
    expect_equal(names, sorted(names), "order of the listed topics by name")


_ENDS = ("A", "a", "é", "e", " x y", "'\";--%_\\", "日本", "🛫")


@check()
async def check_opening_again(trial: Trial) -> None:
    """A store is opened again after it was closed, after it could not be opened, and while it is open. Each time the
    same object works, on the same cluster."""
    other = trial.make()
    try:
        opened = await other.open()
    except StoreError:
        # The one that is open has it for itself: with that out of the way, nothing must be left of the failure.
        await trial.store.close()
        opened = await other.open()
    try:
        for again in (False, True):
            if again:
                await other.close()
                opened = await other.open()
            expect_equal((await other.open()).cluster_uid, opened.cluster_uid, "the cluster's uid when it was open")
            await other.check()
            topic = trial.record()
            expect_equal(await other.create_topic(topic), topic, "a record created after it was opened again")
            expect(await other.drop_topic(topic), "the record was not there to be dropped")
    finally:
        await other.close()
    await trial.store.open()
    await trial.store.check()


@check()
async def check_creating_a_topic_twice(trial: Trial) -> None:
    """Creating a topic again with the same settings answers the record that stands. Other settings are a TopicConflict
    that names the difference and changes nothing."""
    first = await trial.topic(lease_ms=5_000)
    again = dataclasses.replace(first, uid=first.uid + 1, created_ms=first.created_ms + 1)
    expect_equal(await trial.store.create_topic(again), first, "the record that a second create answers")
    other = dataclasses.replace(again, settings=dataclasses.replace(first.settings, lease_ms=6_000))
    try:
        await trial.store.create_topic(other)
    except TopicConflict as conflict:
        expect("lease_ms" in str(conflict), f"the conflict does not name lease_ms: {conflict}")
    else:
        raise StoreViolation("creating a topic with other settings raised nothing")
    expect_equal(await _find(trial.store, first.name), first, "the record afterwards")


@check()
async def check_topic_updates_by_revision(trial: Trial) -> None:
    """One of two updates from the same revision wins and raises the revision. The other is a TopicConflict."""
    read = await trial.topic()
    ours = dataclasses.replace(read, settings=dataclasses.replace(read.settings, paused=True))
    theirs = dataclasses.replace(read, settings=dataclasses.replace(read.settings, lease_ms=1_000))
    answers = await asyncio.gather(
        trial.store.update_topic(ours), trial.store.update_topic(theirs), return_exceptions=True
    )
    won = [answer for answer in answers if isinstance(answer, Topic)]
    lost = [answer for answer in answers if isinstance(answer, TopicConflict)]
    expect(len(won) == len(lost) == 1, f"two updates of one revision answered {answers}")
    expect_equal(won[0].revision, read.revision + 1, "the revision after an update")
    expect_equal(await _find(trial.store, read.name), won[0], "the record afterwards")
    again = await trial.store.update_topic(dataclasses.replace(won[0], settings=read.settings))
    expect_equal(again.revision, read.revision + 2, "the revision after another update")


@check()
async def check_updating_a_topic_that_is_gone(trial: Trial) -> None:
    """An update of a topic that was dropped, or dropped and created again, is a TopicConflict."""
    gone = await trial.topic()
    expect(await trial.store.drop_topic(gone), "dropping a topic answered False")
    await _expect_conflict(trial.store.update_topic(gone), "updating a dropped topic")
    anew = dataclasses.replace(gone, uid=gone.uid + 1)
    trial.drop_later(anew)
    await trial.store.create_topic(anew)
    await _expect_conflict(trial.store.update_topic(gone), "updating the earlier life of a topic")


@check()
async def check_dropped_rows_are_never_seen_again(trial: Trial) -> None:
    """A topic dropped and created again under its name is empty. The earlier record drops nothing and sees nothing."""
    first = await trial.topic_with([b"a", b"b"], tag=b"t", expires_ms=T0 + 50, remember_ms=60_000)
    leased = await trial.lease(first, 1)
    await trial.settle(first, Operation.ACK, leased.rows)
    expect(await trial.store.drop_topic(first), "dropping a topic answered False")
    expect(not await trial.store.drop_topic(first), "dropping a topic twice answered True")
    anew = dataclasses.replace(first, uid=first.uid + 1)
    trial.drop_later(anew)
    await trial.store.create_topic(anew)
    expect(not await trial.store.drop_topic(first), "the earlier record dropped the topic's next life")
    expect_equal(await trial.everything(anew), {}, "rows of the topic made anew")
    await trial.lease(anew, wanted=0)
    expect_equal(await trial.by_tag(anew, Operation.CANCEL, b"t"), {}, "counts by tag in the topic made anew")
    await trial.put(anew, [b"a", b"b"], wanted=Status.OK)
    expect_equal(await trial.everything(first), {}, "rows that the earlier record sees")
    late = await trial.put(first, [b"c"])
    expect(b"c" not in await trial.everything(anew), f"a put into the earlier life ({statuses(late)}) is in the next")


@check()
async def check_topics_keep_apart(trial: Trial) -> None:
    """The same ids in two topics are different messages."""
    one, two = await trial.topic(), await trial.topic()
    ids = named(20)
    await trial.stored(one, ids, T0, payload=b"one")
    await trial.stored(two, ids, T0 + 60_000, payload=b"two")
    leased = await trial.lease(one, wanted=ids)
    await trial.settle(one, Operation.ACK, leased.rows)
    rows = await trial.everything(two)
    expect_equal({row["payloads"] for row in rows.values()}, {b"two"}, "payloads of the other topic")
    expect_equal(len(rows), 20, "number of rows of the other topic")


@check()
async def check_cluster_uid(trial: Trial) -> None:
    """`open` answers the cluster's uuid (32 hex digits) and the server in words. A declared failover needs durability.
    The payload limit is at least 1 MiB. The clock answers if declared, and only then."""
    uid, capabilities = trial.opened.cluster_uid, trial.store.capabilities
    expect(len(uid) == 32 and set(uid) <= set("0123456789abcdef"), f"cluster_uid is {uid!r}")
    expect(trial.opened.server, "the server is not described")
    expect(capabilities.durable or not capabilities.survives_failover, "it survives a failover, yet is not durable")
    expect(capabilities.payload_limit_bytes >= 1024 * 1024, "the payload limit is below 1 MiB")
    clock_ms = await trial.store.clock_ms()
    expect((clock_ms is not None) is capabilities.own_clock, f"own_clock is {capabilities.own_clock}, but {clock_ms}")
    await trial.store.check()


@check()
async def check_inspecting(trial: Trial) -> None:
    """`inspect` answers what `open` did, and changes nothing. A store that is not open raises StoreUnavailable."""
    topic = await trial.topic_with([b"a"])
    before = await trial.everything(topic)
    for _ in range(2):
        expect_equal(await trial.store.inspect(), trial.opened, "what `inspect` answers")
    expect_equal(await trial.everything(topic), before, "rows after it was inspected")
    other = trial.make()
    try:
        await other.inspect()
    except StoreUnavailable:
        return
    expect(False, "a store that was never opened was inspected")


@check(needs=lambda capabilities: capabilities.durable)
async def check_durable_store_keeps_everything(trial: Trial) -> None:
    """A durable store that is closed and opened again has the same cluster, topics, rows and payloads. It also has the
    same remembered ids and dead letters."""
    ids = named(50)
    topic = await trial.topic_with(
        ids, [T0 + 10 * at for at in range(50)], tag=b"t", headers=b"\x01\x00k\x01\x00v", remember_ms=600_000
    )
    leased = await trial.lease(topic, now_ms=T0 + 95, wanted=10)
    part = leased.rows.take(np.arange(4))
    each = [Operation.ACK, Operation.BURY, Operation.RELEASE, Operation.EXTEND]
    await trial.settle(topic, each, part, time_ms=T0, wanted=Status.OK)
    await trial.mutate(topic, Operation.MOVE, ids[20:25], T0 + 900_000)
    before, uid = await trial.everything(topic), trial.opened.cluster_uid
    await trial.reopen()
    expect_equal(trial.opened.cluster_uid, uid, "the cluster's uuid")
    expect_equal(await _find(trial.store, topic.name), topic, "the topic's record")
    expect_equal(await trial.everything(topic), before, "rows after opening again")
    again = await trial.put(topic, part.ids.tolist()[:1])
    expect(again.settled[0], "an id that was remembered before is not any more")


@check(needs=lambda capabilities: not capabilities.durable)
async def check_volatile_store_says_so(trial: Trial) -> None:
    """A store that is not durable comes back with everything or with nothing of a topic, and takes new topics."""
    topic = await trial.topic_with([b"a"])
    await trial.reopen()
    found = await _find(trial.store, topic.name)
    if found is None:
        await trial.store.create_topic(topic)
        expect_equal(await trial.everything(topic), {}, "rows of a topic whose record was lost")
    else:
        expect_equal(list(await trial.everything(topic)), [b"a"], "rows of a topic whose record was kept")


@check(needs=lambda capabilities: capabilities.shared)
async def check_shared_store_is_one(trial: Trial) -> None:
    """Two openings of a shared store at once are the same store."""
    topic = await trial.topic()
    other = trial.make()
    try:
        opened = await other.open()
        expect_equal(opened.cluster_uid, trial.opened.cluster_uid, "the cluster's uuid of a second opening")
        await trial.stored(topic, [b"a"])
        page = await other.scan(topic, T0, ScanFilter(), b"", 10, False)
        expect_equal(page.rows.ids.tolist(), [b"a"], "ids that the second opening sees")
        await other.update_topic(topic)
        await _expect_conflict(trial.store.update_topic(topic), "a lost update")
    finally:
        await other.close()


@check(needs=lambda capabilities: not capabilities.shared)
async def check_unshared_store_is_not_opened_twice(trial: Trial) -> None:
    """A store that is not shared refuses a second opening with StoreRefused, or the second one is a store apart."""
    topic = await trial.topic()
    other = trial.make()
    try:
        await other.open()
    except StoreRefused as refused:
        expect(len(str(refused)) > 20, f"the refusal does not say what to change: {refused}")
    else:
        expect(await _find(other, topic.name) is None, "a second opening sees the topics of the first")
    finally:
        await other.close()
    await trial.stored(topic, [b"a"])


@check()
async def check_closing_twice(trial: Trial) -> None:
    """Closing a store twice is harmless, and so is closing one that was never opened."""
    await trial.store.close()
    await trial.store.close()
    await trial.make().close()
    trial.store = trial.make()
    trial.opened = await trial.store.open()
