"""A message's way from a producer to a consumer and its end, over real gRPC."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

import timeline
from tests.driver.broker import Broker
from timeline import Batch, Message, Status
from timeline.wire import codec


async def test_a_message_is_put_delivered_and_acknowledged(tl: timeline.Timeline) -> None:
    when = datetime.now(UTC) + timedelta(milliseconds=30)
    async with tl.producer("t", group="ops") as p:
        receipt = await p.produce(b"gate closes", at=when, id="UA1545", tag="spring", headers={"a": "ü"})
    assert (receipt.id, receipt.status, receipt.version, receipt.settled) == ("UA1545", Status.OK, 1, False)
    assert receipt.due is not None and timedelta(0) <= receipt.due - when < timedelta(milliseconds=1)
    async with tl.consumer("t", id="w1") as c:
        async for d in c:
            assert (d.id, d.payload, d.headers, d.tag) == ("UA1545", b"gate closes", {"a": "ü"}, "spring")
            assert bytes(d.payload_view) == b"gate closes"
            assert (d.deliveries, d.version, d.due_ms, d.scheduled_ms) == (1, 2, receipt.due_ms, receipt.due_ms)
            assert d.due == d.scheduled == receipt.due
            assert d.lateness >= timedelta(milliseconds=-1)
            assert not d.lost
            assert d.lease_until - d.due >= timedelta(seconds=29)
            await d.ack()
            break
        assert await tl.get("t", "UA1545") is None
        assert c.stats.delivered == 1


async def test_single_calls_of_many_tasks_travel_together(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        receipts = await asyncio.gather(*(p.produce(b"%d" % n, in_="1h", id=f"m{n}") for n in range(500)))
        assert [r.id for r in receipts] == [f"m{n}" for n in range(500)]
        assert all(r.ok for r in receipts)
        assert p._stream.queue._request < 50
        again = await p.produce(b"7", in_="1h", id="m7")
        assert again.status is Status.DUPLICATE
        with pytest.raises(timeline.Exists) as taken:
            await p.produce(b"other", in_="1h", id="m7")
        assert taken.value.id == "m7"
        moved = await p.produce(b"other", at=1_900_000_000_000, id="m7", if_exists="move")
        assert (moved.status, moved.due_ms, moved.moved) == (Status.OK, 1_900_000_000_000, True)
        stored = await p.produce(b"other", in_="1h", id="new", if_exists="move")
        assert (stored.status, stored.moved) == (Status.OK, False)


async def test_a_put_replaces_a_message_whole(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce(b"first", in_="1h", id="a", tag="old", headers={"old": "1"}, expires="2h")
        receipt = await p.produce(b"second", at=1_900_000_000_000, id="a", tag="new", if_exists="replace")
        assert (receipt.status, receipt.version, receipt.moved) == (Status.OK, 1, False)
        found = await tl.get("t", "a")
        assert found is not None
        assert (found.payload, found.tag, found.headers, found.expires) == (b"second", "new", {}, None)
        batch = Batch([b"x", b"y"], in_="1h", ids=["a", "b"])
        assert (await p.produce_many(batch, if_exists="replace")).counts == {Status.OK: 2}
        found = await tl.get("t", "a")
        assert found is not None and found.payload == b"x"
        moved = await p.produce_many(
            [Message(b"z", in_="1h", id="a"), Message(b"z", in_="1h", id="c")], if_exists="move"
        )
        assert [one.moved for one in moved] == moved.moved.tolist() == [True, False]
        with pytest.raises(timeline.Forbidden):
            await tl.producer("t", group="other").produce(b"z", in_="1h", id="a", if_exists="replace")


async def test_a_broker_that_does_not_know_replace_is_not_asked(
    tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "MINOR", 2)  # its frames say so, as do the driver's
    async with tl.producer("t") as p:
        await p.produce(b"first", in_="1h", id="a")
        with pytest.raises(timeline.Invalid, match=r"too old for if_exists=.replace") as old:
            await p.produce(b"second", in_="1h", id="a", if_exists="replace")
        assert old.value.id == "a"
        both = await asyncio.gather(
            p.produce(b"second", in_="1h", id="a", if_exists="replace"), p.produce(b"other", in_="1h", id="b"),
            return_exceptions=True,
        )  # fmt: skip
        assert isinstance(both[0], timeline.Invalid) and isinstance(both[1], timeline.Receipt)
        found = await tl.get("t", "a")
        assert found is not None and found.payload == b"first"


async def test_ids_that_are_not_given_are_made(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        first, second = await p.produce(b"", in_=60), await p.produce(b"", in_=60)
        assert len(first.id) == 36 and first.id < second.id


async def test_a_batch_keeps_its_columns_there_and_back(tl: timeline.Timeline) -> None:
    payloads = [b"payload %d" % n for n in range(3_000)]
    batch = Batch(payloads, in_=0, ids=[f"id{n:05}" for n in range(3_000)], tags="x")
    async with tl.producer("t") as p:
        receipts = await p.produce_many(batch)
        assert len(receipts) == 3_000 and not receipts.failed and receipts.counts == {Status.OK: 3_000}
        assert receipts[0].id == "id00000" and receipts[-1].id == "id02999"
    got: dict[bytes, bytes] = {}
    async with tl.consumer("t", id="w1", credit=1_000) as c:
        async for b in c.batches():
            assert len(b.ids) == len(b) == len(b.payloads) == len(b.due_ms)
            got.update(zip(b.ids, b.payloads, strict=True))
            assert b[0].payload == b.payloads[0]
            receipts = await b.ack()
            assert not receipts.failed and len(receipts) == len(b)
            if len(got) == 3_000:
                break
    assert sorted(got.values()) == sorted(payloads)
    assert [m async for m in tl.scan("t")] == []


async def test_a_batch_larger_than_a_frame_is_cut(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        receipts = await p.produce_many(Batch([b"x" * 100_000] * 50, in_="1h"))
        assert receipts.counts == {Status.OK: 50}
        again = await p.produce_many(Batch([b"x"] * 25_000, in_="1h"))
        assert again.counts == {Status.OK: 25_000}


async def test_a_batch_never_fails_because_one_message_does(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce(b"here", in_="1h", id="b")
        receipts = await p.produce_many(
            [
                Message(b"1", in_="1h", id="a"),
                Message(b"2", in_="1h", id="b"),
                Message(b"3", in_="20000d", id="c"),
                Message(b"x" * 2_000_000, in_="1h", id="d"),
                Message(b"5", in_="1h"),
            ]
        )
    assert [r.status for r in receipts] == ["OK", "EXISTS", "INVALID", "TOO_LARGE", "OK"]
    assert [r.id for r in receipts.failed] == ["b", "c", "d"]
    assert "horizon" in receipts[2].detail
    with pytest.raises(timeline.Exists, match="2 more of 5 failed"):
        receipts.raise_failed()


async def test_a_payload_that_is_too_large_is_refused_with_what_to_do(tl: timeline.Timeline) -> None:
    await tl.update_topic("t", max_payload_bytes=5)
    async with tl.producer("t") as p:
        with pytest.raises(timeline.TooLarge) as refused:
            await p.produce(b"123456", in_="1h", id="a")
    said = "TOO_LARGE 'a': a payload of this topic may take 5 bytes, not 6; "
    assert str(refused.value).startswith(said) and "raise the topic's max_payload_bytes" in str(refused.value)


@pytest.mark.slow
async def test_a_stream_of_messages_yields_receipts_in_order(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        many = (Message(b"%d" % n, in_="1h", id=f"s{n}") for n in range(12_000))
        told = [r.id async for r in p.produce_iter(many)]
        assert told == [f"s{n}" for n in range(12_000)]

        async def coming() -> object:
            for n in range(3):
                await asyncio.sleep(0)
                yield Message(b"other", in_="1h", id=f"s{n}")

        refused = [r async for r in p.produce_iter(coming())]
        assert [r.status for r in refused] == ["EXISTS"] * 3


async def test_move_and_cancel(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.producer("t", group="other") as q:
        for n in range(4):
            await p.produce(b"", in_="1h", id=f"m{n}")
        moved = await p.move("m0", in_="2h")
        assert moved.version == 2
        with pytest.raises(timeline.Fenced):
            await p.move("m0", in_="3h", if_version=1)
        with pytest.raises(timeline.Forbidden):
            await q.cancel("m0")
        with pytest.raises(timeline.NotFound) as absent:
            await p.move("absent", in_="1h")
        assert absent.value.id == "absent"
        assert (await p.cancel("m0", if_version=2)).status is Status.OK
        receipts = await p.move_many(["m1", "m2", "nope"], at=[1_900_000_000_000, 1_900_000_000_001, 1_900_000_000_002])
        assert [(r.status, r.due_ms) for r in receipts] == [
            ("OK", 1_900_000_000_000),
            ("OK", 1_900_000_000_001),
            ("NOT_FOUND", 0),
        ]
        assert (await p.cancel_many(["m1", "m2", "m3"])).counts == {Status.OK: 3}


async def test_by_tag(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        base = 1_900_000_000_000
        await p.produce_many(Batch([b""] * 100, at=base, tags="spring"))
        await p.produce(b"", at=base, id="other")
        seen: list[int] = []
        dry = await p.move_tag("spring", by="2h", dry_run=True)
        assert dry.counts == {Status.OK: 100}
        done = await p.move_tag("spring", by="-2h", progress=lambda told: seen.append(told.done))
        assert done.finished and done.counts == {Status.OK: 100} and seen[-1] == 100
        assert {m.due_ms async for m in tl.scan("t", tag="spring")} == {base - 7_200_000}
        assert (await p.cancel_tag("spring")).counts == {Status.OK: 100}
        assert [m.id async for m in tl.scan("t")] == ["other"]
        for nothing in (None, ""):
            with pytest.raises(timeline.Invalid, match="tag"):
                await p.cancel_tag(nothing)  # type: ignore[arg-type]


async def test_release_extend_and_bury(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        await p.produce(b"x", in_=0, id="m")
        d = await c.take()
        assert d is not None
        until = await d.extend("1m")
        assert until == d.lease_until and until - d.due > timedelta(seconds=50)
        await d.release(in_="20ms", reason="not yet")
        again = await c.take()
        assert again is not None
        assert (again.deliveries, again.version) == (2, 4)
        assert again.scheduled_ms == again.due_ms > d.due_ms
        with pytest.raises(timeline.Fenced) as stale:
            await d.ack()
        assert stale.value.id == "m"
        await again.bury("cannot be read")
        (letter,) = [m async for m in tl.dead("t")]
        assert (letter.dead, letter.state, letter.deliveries) == ("cannot be read", "dead", 2)
        assert (await p.revive("m")).counts == {Status.OK: 1}  # default: now
        third = await c.take()
        assert third is not None and third.deliveries == 1
        await third.bury("again")
        assert (await p.purge(["m"])).counts == {Status.OK: 1}


async def test_ack_soon_does_not_wait_and_tells_failures(tl: timeline.Timeline) -> None:
    told: list[tuple[str, str]] = []
    heard = asyncio.Event()
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        await p.produce_many(Batch([b""] * 1_000, in_=0))
        c.on_settle_error = lambda d, error: (told.append((d.id, error.code)), heard.set())
        for _ in range(1_000):
            d = await c.take()
            assert d is not None
            d.ack_soon()
        d.ack_soon()
        await heard.wait()
        assert told == [(d.id, "NOT_FOUND")] and c.stats.settle_errors == 1
    assert [m async for m in tl.scan("t")] == []


async def test_what_nobody_took_goes_back_unseen(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce_many(Batch([b""] * 10, in_=0))
        async with tl.consumer("t", id="w1") as c:
            first = await c.take()
            assert first is not None
            await first.ack()
        assert c.stats.released_unseen == 9
        rest = [m async for m in tl.scan("t")]
        assert len(rest) == 9 and {(m.state, m.deliveries) for m in rest} == {("available", 0)}
        assert [d async for d in c] == []
        with pytest.raises(timeline.Closed):
            await first.ack()


async def test_credit_bounds_what_is_in_hand(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1", credit=5) as c:
        await p.produce_many(Batch([b""] * 20, in_=0))
        held = [await c.take() for _ in range(5)]
        states = [m.state async for m in tl.scan("t")]
        assert states.count(timeline.State.LEASED) == 5
        for d in held:
            assert d is not None
            await d.ack()
        assert await c.take() is not None


async def test_two_of_one_id_the_older_is_told_and_stays_away(tl: timeline.Timeline, broker: Broker) -> None:
    async with timeline.connect(broker.address) as other:
        old, new = tl.consumer("t", id="w1"), other.consumer("t", id="w1")
        old.open()
        waiting = asyncio.ensure_future(old.take())
        async with tl.producer("t") as p:
            await p.produce(b"1", in_=0, id="m1")
            d = await waiting
            assert d is not None and not d.lost
            await p.produce(b"2", in_=0, id="m2")
            while not old._in_flight.ready:
                await asyncio.sleep(0)
            took = [asyncio.ensure_future(new.take()) for _ in range(2)]
            while old._session.failure is None:
                await asyncio.sleep(0)
            # Not even what it had waiting: another has that now.
            with pytest.raises(timeline.Superseded):
                await old.take()
            with pytest.raises(timeline.Superseded):
                await old.take()
            assert d.lost and (old.stats.lost, old.stats.dropped) == (1, 1)
            for again in await asyncio.gather(*took):
                assert again is not None and again.version == 3
                await again.ack()
        await new.aclose()
        await old.aclose()


async def test_reading(tl: timeline.Timeline) -> None:
    base = 1_900_000_000_000
    async with tl.producer("t", group="g") as p:
        await p.produce(b"payload", at=base, id="m", tag="x", headers={"k": "v"}, expires=base + 1)
        await p.produce_many(Batch([b""] * 5, in_=["1m", "1m", "2m", "3m", "59m"]))
    m = await tl.get("t", "m")
    assert m is not None
    assert (m.payload, m.headers, m.tag, m.group, m.holder) == (b"payload", {"k": "v"}, "x", "g", None)
    assert (m.state, m.due_ms, m.expires_ms, m.dead) == (timeline.State.WAITING, base, base + 1, None)
    assert [one.id async for one in tl.scan("t", due=(base, base + 1))] == ["m"]
    assert len([one async for one in tl.scan("t", limit=3)]) == 3
    outlook = await tl.forecast("t", window="1h", step="10m")
    assert len(outlook) == 6 and int(np.sum(outlook.counts)) == 5 and outlook[0].count == 4
    assert [t.name for t in await tl.topics()] == ["t"]
    pong = await tl.ping()
    assert pong.broker == "b1" and abs(pong.offset_ms) <= pong.error_ms + 1
    assert (await tl.late("1h")).unreachable == ()


async def test_topics_are_created_changed_and_dropped(tl: timeline.Timeline) -> None:
    topic = await tl.create_topic("other", lease="10s", remember="1h", lease_ahead="auto", buckets=8)
    assert (topic.settings.lease_ms, topic.settings.remember_ms, topic.settings.buckets) == (10_000, 3_600_000, 8)
    assert (await tl.create_topic("other", lease="10s", remember="1h", buckets=8)).uid == topic.uid
    with pytest.raises(timeline.Exists):
        await tl.create_topic("other", lease="11s", buckets=8)
    with pytest.raises(timeline.Invalid, match="did you mean 'lease'"):
        await tl.create_topic("third", leese="11s")
    assert (await tl.pause_topic("other")).settings.paused
    assert not (await tl.resume_topic("other")).settings.paused
    with pytest.raises(timeline.Invalid, match="buckets"):
        await tl.update_topic("other", buckets=9)
    await tl.drop_topic("other")
    with pytest.raises(timeline.NotFound):
        await tl.drop_topic("other")
    with pytest.raises(timeline.NotFound, match=r"create it first \(create_topic, "):
        await tl.producer("other").produce(b"", in_=0)
    with pytest.raises(timeline.NotFound, match=r"create it first \(create_topic, "):
        await tl.consumer("other").take()


async def test_some_of_a_batch_by_their_places_or_by_a_mask(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        await p.produce_many(Batch([b"%d" % n for n in range(6)], in_=0, ids=list("abcdef")))
        b = await c.take_batch()
        assert b is not None and len(b) == 6
        wanted = [n for n, id in enumerate(b.ids) if id in (b"b", b"e")]
        mask = np.array([id in (b"b", b"e") for id in b.ids])
        assert [one.id for one in b[::-1]] == [one.id for one in b][::-1]
        assert (await b.extend("1m", mask)).ids.tolist() == [b.ids[n] for n in wanted]
        receipts = await b.ack(only=mask)
        assert sorted(receipts.ids.tolist()) == [b"b", b"e"] and not receipts.failed
        assert sorted([m.id async for m in tl.scan("t")]) == list("acdf")
        b[2:].ack_soon(only=[False] * 4)
        rest = [n for n in range(6) if n not in wanted]
        assert not (await b.ack(only=rest)).failed
        for wrong in (mask[:3], [True], [0.5], ["a"], object(), iter([1])):
            with pytest.raises(timeline.Invalid, match="only="):
                await b.ack(only=wrong)  # type: ignore[arg-type]
        for outside in ([6], [-1], np.array([2**40])):
            with pytest.raises(IndexError, match="batch of 6"):
                await b.ack(only=outside)
        assert len(await b.ack(only=[])) == 0
    assert [m async for m in tl.scan("t")] == []


async def test_tags_and_headers_of_a_batch_are_sequences_with_and_without(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        await p.produce_many(Batch([b"a", b"b"], in_=0, ids=["a", "b"]))
        bare = await c.take_batch()
        assert bare is not None and list(bare.tags) == [b"", b""] and list(bare.headers) == [{}, {}]
        assert list(bare[1:].tags) == [b""] and list(bare[1:].headers) == [{}]
        await bare.ack()
        await p.produce_many(Batch([b"a", b"b"], in_=0, ids=["c", "d"], tags=["x", None], headers=[{"k": "v"}, {}]))
        b = await c.take_batch()
        assert b is not None and len(b) == 2
        told = {id: (tag, headers) for id, tag, headers in zip(b.ids, b.tags, b.headers, strict=True)}
        assert told == {b"c": (b"x", {"k": "v"}), b"d": (b"", {})}
        place = list(b.ids).index(b"c")
        assert b.headers[place] == b[place].headers == {"k": "v"} and b.headers[place:][0] == {"k": "v"}
        again = Batch(b.payloads, in_="1h", tags=b.tags, headers=b.headers)
        assert not (await p.produce_many(again)).failed
        assert {(m.payload, m.tag, str(m.headers)) async for m in tl.scan("t", state="waiting", payload=True)} == {
            (d.payload, d.tag, str(d.headers)) for d in b
        }
        await b.ack()


async def test_columns_of_ids_and_times_are_taken_as_they_come(tl: timeline.Timeline) -> None:
    base = 1_900_000_000_000
    async with tl.producer("t") as p:
        receipts = await p.produce_many(Batch([b""] * 4, at=np.arange(base, base + 4), expires=np.full(4, base + 9)))
        assert [m.expires_ms async for m in tl.scan("t")] == [base + 9] * 4
        moved = await p.move_many(receipts.ids, at=receipts.due_ms - 1_000)
        assert moved.due_ms.tolist() == [base - 1_000 + n for n in range(4)]
        assert (await p.cancel_many(np.array([r.id for r in receipts][:2]))).counts == {Status.OK: 2}
        assert (await p.cancel_many({r.id: r for r in receipts[2:]})).counts == {Status.OK: 2}
    assert [m async for m in tl.scan("t")] == []
