"""A consumer with a backlog is lent the credit of a settle, so that settle and lease may share a transaction."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.broker.link import PATIENT, Link, Pipe, broker, statuses
from tests.broker.slow import SlowStore
from timeline.model import Operation, State, Status
from timeline.storage_plugins.sqlite.writer import SqliteWriter
from timeline.wire import Credit, Deliver, Settle, Settled, SettleFlag

CREDIT, BACKLOG = 4, 20


async def begun(link: Link, backlog: int = BACKLOG) -> tuple[Pipe, Deliver]:
    """A consumer that has all its credit in hand, with a backlog behind it."""
    await link.put([f"m{number:02}" for number in range(backlog)])
    pipe = await link.consume(credit=CREDIT)
    got = await pipe.down(Deliver)
    assert len(got.birth) == CREDIT
    return pipe, got


def acks(link: Link, got: Deliver) -> Settle:
    return link.settles(
        got, Operation.ACK, 0, SettleFlag(0), request=7, credit_messages=CREDIT, credit_bytes=got.payloads.nbytes
    )


async def called(store: SlowStore, call: str, times: int) -> None:
    while store.calls[call] < times:
        await asyncio.sleep(0)


async def available(link: Link, count: int) -> None:
    """Returns once so many messages wait for a consumer."""
    while len(await link.ids(State.AVAILABLE)) != count:
        await asyncio.sleep(0)


async def acked_ahead(link: Link, store: SlowStore) -> Pipe:
    """Returns once a lease began beside the settle of all that came, which is not answered."""
    pipe, got = await begun(link)
    store.hold("settle")
    leases = store.calls["lease_due"]
    pipe.up(acks(link, got))
    await called(store, "lease_due", leases + 1)
    return pipe


async def test_the_lease_begins_before_the_settle_is_answered_and_its_messages_come_after_the_answer() -> None:
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        pipe = await acked_ahead(link, store)
        assert len(await link.ids(State.LEASED)) == CREDIT  # those acked are gone, as many others are leased
        assert pipe.from_broker.empty()
        store.release("settle")
        assert statuses(await pipe.down()) == [Status.OK] * CREDIT
        assert len((await pipe.down()).birth) == CREDIT


@pytest.mark.parametrize("first", ["settle", "lease_due"])
async def test_what_was_dealt_for_credit_that_does_not_come_goes_back_unseen(first: str) -> None:
    """Whichever of the two calls is answered first."""
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        pipe, got = await begun(link)
        for call in ("settle", "lease_due"):
            store.hold(call)
        frame = acks(link, got)
        frame.operation[1], frame.time_ms[1] = Operation.RELEASE, np.int64(1) << 60  # beyond any horizon
        frame.op[1] = 5
        pipe.up(frame)
        for call in ("settle", "lease_due"):
            await store.arrived(call)
        store.release(first)
        if first == "lease_due":
            store.release("settle")
        answer = await pipe.down(Settled)
        assert statuses(answer) == [Status.OK, Status.INVALID, Status.OK, Status.OK]
        if first == "settle":
            store.release("lease_due")
        await available(link, BACKLOG - CREDIT)
        assert pipe.from_broker.empty()
        pipe.up(Credit(CREDIT - 1, got.payloads.nbytes))
        assert len((await pipe.down(Deliver)).birth) == CREDIT - 1


async def test_what_waits_for_an_answer_goes_back_when_the_stream_ends() -> None:
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        pipe = await acked_ahead(link, store)
        pipe.cancel()
        store.release("settle")
        await available(link, BACKLOG - CREDIT)


async def test_frames_one_after_the_other_keep_their_order() -> None:
    """Two settles on their way, each with a loan: an answer, its messages, the next answer, its messages."""
    store = SlowStore()
    async with broker(store, PATIENT) as link:
        pipe, got = await begun(link)
        seen = set(got.ids.tolist())
        for _ in range(BACKLOG // CREDIT - 1):
            pipe.up(acks(link, got))
            assert isinstance(await pipe.down(), Settled)
            got = await pipe.down(Deliver)
            assert not seen & set(got.ids.tolist())
            seen |= set(got.ids.tolist())
        assert len(seen) == BACKLOG


@pytest.mark.slow
async def test_on_sqlite_a_settle_and_the_lease_that_follows_share_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one turn of the loop both reach the writer's line, and it takes what is in line."""
    transactions: list[int] = []
    begin = SqliteWriter._transact

    def counted(writer: SqliteWriter, acts: object) -> object:
        transactions.append(0)

        def each() -> object:
            for act in acts:  # type: ignore[attr-defined]
                transactions[-1] += 1
                yield act

        return begin(writer, each())  # type: ignore[arg-type]

    async with broker(f"sqlite:///{tmp_path / 't.db'}", PATIENT) as link:
        rounds = 50
        pipe, got = await begun(link, (rounds + 2) * CREDIT)
        monkeypatch.setattr(SqliteWriter, "_transact", counted)
        for _ in range(rounds):
            pipe.up(acks(link, got))
            assert isinstance(await pipe.down(), Settled)
            got = await pipe.down(Deliver)
        assert 2 in transactions and sum(transactions) >= 2 * rounds
