"""`Timeline.take` and `settle`: single calls without a consumer, and receipts that work anywhere."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

import timeline
from tests.driver.broker import Broker, FewerMethods
from timeline import Batch, Fenced, Invalid, NotFound, Status
from timeline.driver.consume import pull
from timeline.driver.consume.pull import LeaseToken
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import MAJOR, MINOR, Fault, TransportError


async def _put(tl: Any, *ids: str, **more: Any) -> None:
    async with tl.producer("t") as p:
        for id in ids:
            await p.produce(b"p" + id.encode(), id=id, **(more or {"in_": 0}))


async def _left(tl: Any, **more: Any) -> list[str]:
    return sorted([m.id async for m in tl.scan("t", **more)])


async def test_taken_messages_have_all_that_deliveries_have_and_are_acknowledged_by_receipt(
    tl: timeline.Timeline,
) -> None:
    await _put(tl, "a", in_=0, tag="red", headers={"k": "v"})
    (d,) = await tl.take("t")
    assert (d.id, d.payload, d.tag, d.headers) == ("a", b"pa", "red", {"k": "v"})
    assert (d.deliveries, d.version, d.lost) == (1, 2, False)
    assert d.lease_until > d.due >= d.scheduled
    receipts = await tl.settle(d.receipt, "ack")
    assert [(r.id, r.status) for r in receipts] == [("a", Status.OK)]
    assert await _left(tl) == []


async def test_a_take_returns_when_a_message_comes_due(tl: timeline.Timeline) -> None:
    taking = asyncio.ensure_future(tl.take("t", wait="60s"))
    await _put(tl, "a", in_="20ms")
    assert [d.id for d in await taking] == ["a"]


async def test_a_take_without_a_message_is_an_empty_list(tl: timeline.Timeline) -> None:
    assert await tl.take("t", wait=0) == await tl.take("t", wait="30ms") == []


async def test_takes_are_bounded_in_messages_and_bytes(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce_many(Batch([b"x" * 100] * 5, in_=0))
    assert len(await tl.take("t", 2)) == 2
    assert len(await tl.take("t", 5, max_bytes=150)) == 1
    assert len(await tl.take("t", 5, max_bytes=1)) == 1
    assert len(await tl.take("t", 5)) == 1


async def test_every_verb_by_receipt(tl: timeline.Timeline) -> None:
    await _put(tl, "a", "b", "c", "d", "e")
    of = {d.id: d for d in await tl.take("t", lease="10s")}
    (extended,) = await tl.settle(of["a"].receipt, "extend", lease="1h")
    assert extended.due_ms > of["a"].lease_until_ms + 3_000_000
    (released,) = await tl.settle(of["b"].receipt, "release", in_="1h", reason="later")
    assert released.ok and released.version == of["b"].version + 1
    assert (await tl.settle([of["c"].receipt], "bury", reason="broken"))[0].ok
    assert (await tl.settle([of["d"].receipt], "ack"))[0].ok
    assert (await tl.settle([of["e"].receipt], "return"))[0].ok
    back = await tl.get("t", "e")
    assert back is not None and (back.deliveries, str(back.state)) == (0, "available")
    assert await _left(tl, state="waiting") == ["b"]
    assert await _left(tl, state="leased") == ["a"]
    assert [m.id async for m in tl.dead("t")] == ["c"]


async def test_a_settle_has_one_answer_each_in_order(tl: timeline.Timeline) -> None:
    await tl.create_topic("u")
    await _put(tl, "a", "b", "c")
    async with tl.producer("u") as p:
        await p.produce(b"", in_=0, id="z")
    of = {d.id: d.receipt for d in (*await tl.take("t"), *await tl.take("u"))}
    (stale,) = [of["b"]]
    await tl.settle(stale, "release")
    (again,) = await tl.take("t")
    answers = await tl.settle([of["z"], stale, "nonsense", of["a"], of["c"][:-1], again.receipt], "ack")
    assert [r.status for r in answers] == [
        Status.OK, Status.FENCED, Status.INVALID, Status.OK, Status.INVALID, Status.OK,
    ]  # fmt: skip
    assert [r.id for r in answers] == ["z", "b", "", "a", "", "b"]
    assert "damaged or cut off" in answers[2].detail
    with pytest.raises(Fenced):
        answers.raise_failed()
    assert (await tl.settle([of["a"]], "ack"))[0].status is Status.NOT_FOUND


async def test_a_settle_of_nothing_is_nothing(tl: timeline.Timeline) -> None:
    assert list(await tl.settle([], "ack")) == []
    assert [r.status for r in await tl.settle(["?"], "ack")] == [Status.INVALID]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"verb": "nack"}, "verb must be one of ack, extend, release, return, bury, not 'nack'"),
        ({"verb": "ack", "in_": "1s"}, "ack does not take in_=. It takes nothing"),
        ({"verb": "return", "in_": "1s"}, "return does not take in_=. It takes nothing"),
        ({"verb": "bury"}, "a reason to bury"),
        ({"verb": "bury", "reason": "x", "lease": 3}, "bury does not take lease=. It takes reason="),
        ({"verb": "extend"}, "extend needs lease="),
        ({"verb": "release", "in_": 1, "at": 2_000_000_000_000}, "in_= or at="),
    ],
)
async def test_a_wrong_settle_is_refused_with_what_to_do(
    tl: timeline.Timeline, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Invalid, match=sentence):
        await tl.settle([], **asked)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"max": 0}, "max must be a whole number from 1 to 1000"),
        ({"max": 1_001}, "max must be a whole number from 1 to 1000"),
        ({"max_bytes": 0}, "max_bytes must be a whole number from 1 to 4194304"),
        ({"lease": "13h"}, "max_lease"),
        ({"wait": -1}, "wait"),
    ],
)
async def test_a_wrong_take_is_refused_with_what_to_do(
    tl: timeline.Timeline, asked: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Invalid, match=sentence):
        await tl.take("t", **asked)


async def test_a_take_of_no_topic_is_not_found(tl: timeline.Timeline) -> None:
    with pytest.raises(NotFound):
        await tl.take("nowhere", wait=0)


async def test_a_cancelled_take_takes_nothing(tl: timeline.Timeline, broker: Broker) -> None:
    taking = asyncio.ensure_future(tl.take("t", wait="60s"))
    assert broker.node is not None
    streams = broker.node.service.streams
    while not len(streams):
        await asyncio.sleep(0)
    taking.cancel()
    while len(streams):
        await asyncio.sleep(0)
    await _put(tl, "a")
    (d,) = await tl.take("t")
    assert (d.id, d.deliveries) == ("a", 1)


async def test_a_receipt_works_at_another_broker_and_in_another_client() -> None:
    store = MemoryStore()
    async with Broker(store, "b1") as first, timeline.connect(first.address) as tl:
        await tl.create_topic("t")
        await _put(tl, "a", "b")
        receipts = [d.receipt for d in await tl.take("t")]
        await first.drain_streams()
    async with Broker(store, "b2") as second, timeline.connect(second.address) as tl:
        assert [r.status for r in await tl.settle(receipts, "ack")] == [Status.OK] * 2
        assert await _left(tl) == []


async def test_a_draining_broker_sends_takes_to_another() -> None:
    store = MemoryStore()
    async with Broker(store, "b1") as first, timeline.connect(first.address) as tl:
        await tl.create_topic("t")
        async with Broker(store, "b2") as second, timeline.connect(second.address) as other:
            taking = asyncio.ensure_future(tl.take("t", wait="60s"))
            assert first.node is not None
            while not len(first.node.service.streams):
                await asyncio.sleep(0)
            tl._context.channel.learn([second.address])
            await first.drain_streams()
            await _put(other, "a")
            assert [d.id for d in await taking] == ["a"]


def losing_one_settle(broker: Broker) -> list[str]:
    """The answer of the next Settle is lost on its way. The list tells of it then."""
    assert broker.node is not None
    service, unary = broker.node.service, broker.node.service.unary
    lost: list[str] = []

    async def losing(method: str, *given: Any) -> bytes:
        answer = await unary(method, *given)
        if method == "Settle" and not lost:
            lost.append(method)
            raise TransportError(Fault.BROKEN, "lost")
        return answer

    service.unary = losing  # type: ignore[method-assign]
    return lost


async def test_an_ack_whose_answer_was_lost_is_repeated_and_is_ok(tl: timeline.Timeline, broker: Broker) -> None:
    await _put(tl, "a")
    (d,) = await tl.take("t")
    lost = losing_one_settle(broker)
    assert [r.status for r in await tl.settle(d.receipt, "ack")] == [Status.OK]
    assert lost == ["Settle"]


async def test_a_release_whose_answer_was_lost_is_recognised(tl: timeline.Timeline, broker: Broker) -> None:
    await _put(tl, "a")
    (d,) = await tl.take("t")
    lost = losing_one_settle(broker)
    (released,) = await tl.settle(d.receipt, "release", in_="1h")
    assert (released.status, released.version) == (Status.OK, d.version + 1)
    assert lost == ["Settle"]


async def test_damaged_payloads_are_buried_and_not_handed_out(
    tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    await _put(tl, "a", "b")
    sums = pull.payload_sums
    monkeypatch.setattr(
        pull, "payload_sums", lambda *columns: sums(*columns) ^ [p == b"pa" for p in columns[0].tolist()]
    )
    assert [d.id for d in await tl.take("t")] == ["b"]
    assert [(m.id, m.dead) async for m in tl.dead("t")] == [("a", "payload damaged")]


async def test_an_older_broker_is_recognised_with_the_version_that_it_takes(
    tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "minor_of", lambda _: 2)
    for call in (tl.take("t"), tl.settle(LeaseToken("t", "h", b"a", 1, 1).receipt(), "ack")):
        with pytest.raises(Invalid, match=r"speaks version 1\.2 of the wire, and they need 1\.3\. Upgrade the broker"):
            await call


@pytest.fixture
async def older() -> AsyncIterator[Broker]:
    """A broker that says the same version of the wire, and does not know these methods."""
    running = Broker()
    running.handlers = FewerMethods
    async with running:
        yield running


async def test_a_broker_of_the_same_version_without_these_methods_is_named_with_it(older: Broker) -> None:
    speaks = f"It speaks version {MAJOR}.{MINOR} of the wire. "
    said = f"the broker does not know this call: it is older than this driver. {speaks}"
    async with timeline.connect(older.address, timeout="10s") as tl:
        await tl.create_topic("t")
        with pytest.raises(Invalid, match=re.escape(said + "Upgrade the broker")):
            await tl.take("t")
        settled = await tl.settle(LeaseToken("t", "h", b"a", 1, 1).receipt(), "ack")
        assert [(r.status, r.detail) for r in settled] == [(Status.INVALID, said + "Upgrade the broker")]
        await _put(tl, "a")
        async with tl.consumer("t") as c:
            assert [d.id for d in await c.take(1, "60s")] == ["a"]


def test_both_calls_from_a_plain_thread(served: str) -> None:
    with timeline.connect_sync(served) as tl:
        tl.create_topic("t")
        with tl.producer("t") as p:
            p.produce(b"x", in_=0, id="a")
        (d,) = tl.take("t", max=5, wait="10s")
        assert (d.id, d.payload) == ("a", b"x")
        tl.settle([d.receipt], "ack").raise_failed()
        assert list(tl.scan("t")) == []


# ── receipts ──


LEASE = LeaseToken("départs", "pull:b1:5ad0c1e2", "é1".encode(), 2**64 - 1, 2**63 - 1)


def test_a_receipt_is_plain_text_without_padding() -> None:
    text = LEASE.receipt()
    assert LeaseToken.of(text) == LEASE
    assert LeaseToken.of(f"  {text}\n") == LEASE
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    longest = LeaseToken("€" * 255, "h" * 255, b"i" * 255, 1, 1)
    assert LeaseToken.of(longest.receipt()) == longest


def test_a_receipt_that_is_damaged_anywhere_is_no_receipt() -> None:
    text = LEASE.receipt()
    for at in range(len(text) - 1):  # the last character has bits that say nothing
        other = "A" if text[at] != "A" else "B"
        for damaged in (text[:at] + other + text[at + 1 :], text[:at], text[:at] + text[at + 1 :], text[:at] + "é"):
            with pytest.raises(Invalid, match="this is no receipt"):
                LeaseToken.of(damaged)
    for strange in ("", "=", text * 40, base64.urlsafe_b64encode(b"\0" * 40).decode()):
        with pytest.raises(Invalid, match="this is no receipt"):
            LeaseToken.of(strange)
    with pytest.raises(Invalid, match="a receipt is a text"):
        LeaseToken.of(b"bytes")


NO_LEASES = [
    {"topic": ""}, {"topic": "a\nb"}, {"topic": "x" * 256}, {"holder": ""}, {"holder": "a\0"}, {"id": b""},
    {"id": b"a\0"}, {"id": b"\xff"}, {"version": 0}, {"version": -(2**63)},
]  # fmt: skip


@pytest.mark.parametrize("wrong", NO_LEASES, ids=str)
def test_a_forged_receipt_of_what_no_lease_has_is_no_receipt(wrong: dict[str, Any]) -> None:
    with pytest.raises(Invalid, match="this is no receipt"):
        LeaseToken.of(LEASE._replace(**wrong).receipt())


async def test_a_forged_receipt_fails_alone(tl: timeline.Timeline) -> None:
    await _put(tl, "a")
    (d,) = await tl.take("t")
    lease = LeaseToken.of(d.receipt)
    forged = [lease._replace(**wrong).receipt() for wrong in NO_LEASES]
    answers = await tl.settle([*forged, d.receipt], "ack")
    assert [r.status for r in answers] == [*[Status.INVALID] * len(forged), Status.OK]
    assert {r.id for r in answers} == {"", "a"}
