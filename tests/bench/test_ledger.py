"""The ledger of a benchmark must notice what a broker could do wrong: it is what makes a figure worth something."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from timeline.bench.ledger import Ledger, earliest_ahead_ms
from timeline.bench.load import ID_BYTES, PENDING_FROM_MS, PENDING_SPREAD_MS, payloads_for, pending_dues, random_ids
from timeline.bench.processes import CannotMeasure, within
from timeline.bench.suite import OWN_SERVERS
from timeline.columns import Ragged
from timeline.errors import Unavailable
from timeline.model import buckets_of


async def _put(count: int = 10) -> tuple[Ledger, Ragged]:
    ids = random_ids(count)
    ledger = Ledger(count, count)
    await ledger.admit(ids.tolist())
    return ledger, ids


async def test_all_well() -> None:
    ledger, ids = await _put()
    ledger.met_with(ids, payloads_for(ids, 100))
    ledger.settle(10)
    assert ledger.finished.is_set()
    assert ledger.verdict() == []


async def test_a_lost_message_is_noticed() -> None:
    ledger, ids = await _put()
    ledger.met(ids.tolist()[1:])
    assert ledger.verdict() == ["1 messages were never delivered"]


async def test_a_doubled_message_is_noticed() -> None:
    ledger, ids = await _put()
    ledger.met(ids.tolist())
    ledger.met(ids.tolist()[:2])
    assert ledger.verdict() == ["2 deliveries were doubled or never put"]


async def test_a_message_twice_in_one_batch_is_noticed() -> None:
    ledger, ids = await _put()
    ledger.met([*ids.tolist(), ids[0]])
    assert ledger.verdict() == ["1 deliveries were doubled or never put"]


async def test_a_message_nobody_put_is_noticed() -> None:
    ledger, ids = await _put()
    ledger.met([*ids.tolist(), b"somebody else's"])
    assert ledger.verdict()


async def test_another_messages_payload_is_noticed() -> None:
    ledger, ids = await _put()
    listed = payloads_for(ids, 100).tolist()
    ledger.met_with(ids, Ragged.of([listed[1], listed[0], *listed[2:]]))
    assert ledger.verdict() == ["a payload was handed out with another message's id"]


async def test_refused_acks_are_noticed() -> None:
    ledger, ids = await _put()
    ledger.met(ids.tolist())
    ledger.settle(10, failed=3)
    assert ledger.verdict() == ["3 acks were refused"]


async def test_acks_that_fail_are_noticed_and_waited_for_no_more() -> None:
    ledger, ids = await _put()
    ledger.met(ids.tolist())
    ledger.unsettled(10, Unavailable("nobody there"))
    assert ledger.finished.is_set()
    assert ledger.verdict() == ["acks failed: UNAVAILABLE: nobody there", "10 acks were refused"]


async def test_a_run_that_loses_messages_ends_and_says_so() -> None:
    ledger, ids = await _put()
    ended = asyncio.Event()

    async def wait_for_more() -> None:
        ledger.met(ids.tolist()[1:])
        ledger.settle(9)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await ledger.through(wait_for_more(), stalled_s=0.01)
    assert ended.is_set()
    assert ledger.verdict() == ["nothing more came for 0.01 s: 9 of 10 settled", "1 messages were never delivered"]


async def test_what_goes_wrong_on_the_way_ends_a_run() -> None:
    ledger = Ledger(10, 10)
    others = asyncio.ensure_future(asyncio.Event().wait())

    async def fail() -> None:
        raise CannotMeasure("the peer is gone")

    with pytest.raises(CannotMeasure, match="the peer is gone"):
        await ledger.through(others, fail())
    assert others.cancelled()


async def test_a_run_ends_when_all_is_settled() -> None:
    ledger, ids = await _put()

    async def deliver() -> None:
        ledger.met(ids.tolist())
        ledger.settle(10)

    await ledger.through(deliver())
    assert ledger.verdict() == []


async def test_a_peer_that_ends_a_connection_ends_the_run() -> None:
    for server in OWN_SERVERS.values():
        connection = server.connection("memory")
        connection.connection_lost(ConnectionResetError("reset by peer"))
        with pytest.raises(CannotMeasure, match=f"{server.name} ended a connection: reset by peer"):
            await connection.lost


async def test_what_never_comes_is_waited_for_in_bounds() -> None:
    with pytest.raises(CannotMeasure, match="the first delivery never came"):
        async with within(0.001, "the first delivery"):
            await asyncio.Event().wait()


async def test_putting_waits_for_room() -> None:
    ledger = Ledger(30, window=10)
    await ledger.admit(random_ids(10).tolist())
    more = asyncio.ensure_future(ledger.admit(random_ids(10).tolist()))
    await asyncio.sleep(0)
    assert not more.done()
    ledger.settle(10)
    await more
    assert ledger.put == 20


def test_what_came_before_its_due() -> None:
    assert earliest_ahead_ms(np.array([90, 100]), 99.5) == 0.5
    assert earliest_ahead_ms(np.array([90, 99]), 99.5) < 0


def test_random_ids_are_distinct_plain_and_over_all_buckets() -> None:
    ids = random_ids(5_000)
    assert len(set(ids.tolist())) == 5_000
    assert all(len(id) == ID_BYTES and id.isalnum() for id in ids)
    assert set(buckets_of(ids, 64).tolist()) == set(range(64))


def test_payloads_carry_their_id() -> None:
    ids = random_ids(3)
    assert [payload[:ID_BYTES] for payload in payloads_for(ids, 100)] == ids.tolist()
    assert payloads_for(ids, 100).sizes.tolist() == [100] * 3
    with pytest.raises(CannotMeasure, match="at least 16 bytes"):
        payloads_for(ids, 15)


def test_pending_messages_lie_over_30_days_and_none_soon() -> None:
    ahead_ms = pending_dues(10_000, 1_000_000) - 1_000_000
    assert ahead_ms.min() >= PENDING_FROM_MS
    assert ahead_ms.max() < PENDING_FROM_MS + PENDING_SPREAD_MS
    counts, _ = np.histogram(ahead_ms, bins=30)
    assert counts.min() > 200
