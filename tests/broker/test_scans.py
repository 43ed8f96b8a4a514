"""Scans while messages are replaced, when each row comes with its own payload, and of messages that have expired."""

from __future__ import annotations

import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.broker.link import PATIENT, Link, broker, statuses
from timeline.clock import Clock
from timeline.columns import Ragged
from timeline.model import Operation, Rows, State, Status, Topic
from timeline.storage_plugins.contract import Page, ScanFilter
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import Deliver, Late, LateList, PutFlag, Scan, ScanPage, decode_as, encode


class Torn(MemoryStore):
    """Reads rows first and payloads later, as servers do; `meanwhile` happens once, in between."""

    meanwhile: Any = None

    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        page = await super().scan(topic, now_ms, where, cursor, limit, payload)
        if payload and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            await meanwhile()
            late = await super().scan(topic, now_ms, ScanFilter(ids=page.rows.ids), b"", limit, True)
            assert late.rows.payloads is not None and page.rows.payloads is not None
            found = dict(zip(late.rows.ids.tolist(), late.rows.payloads.tolist(), strict=True))
            page.rows.payloads = Ragged.of([found.get(id, b"") for id in page.rows.ids.tolist()])
        return page


async def _scanned(link: Any, asked: Scan) -> Rows:
    pages = []
    async with aclosing(link.node.service.unary_stream("Scan", encode(asked))) as stream:
        async for data in stream:
            pages.append(decode_as(data, ScanPage).rows)
    return Rows.concat(pages)


async def test_a_message_replaced_while_it_is_read_comes_with_its_own_payload():
    store = Torn()
    async with broker(store) as link:
        assert set(statuses(await link.put(["a", "b", "c", "d"], 60_000))) == {Status.OK}
        before = await _scanned(link, Scan("t", payload=True))

        async def meanwhile() -> None:
            flags = np.full(2, PutFlag.IN | PutFlag.REPLACE, dtype=np.uint8)
            new = {"payloads": Ragged.of([b"new b", b"new d"]), "tags": Ragged.of([b"new", b"new"]), "flags": flags}
            assert set(statuses(await link.put(["b", "d"], 60_000, **new))) == {Status.OK}
            assert statuses(await link.mutate(Operation.CANCEL, ["c"])) == [Status.OK]

        store.meanwhile = meanwhile
        rows = await _scanned(link, Scan("t", payload=True))
        assert rows.payloads is not None and rows.ids.tolist() == [id for id in before.ids if id != b"c"]
        told = dict(zip(rows.ids, zip(rows.tags, rows.payloads, strict=True), strict=True))
        assert told[b"b"] == (b"new", b"new b") and told[b"d"] == (b"new", b"new d")


MINUTE_MS = 60_000
EXPIRING = PutFlag.IN | PutFlag.EXPIRES_IN


class _Hands:
    """The hands of a clock, which a test puts forward."""

    forward_s = 0.0

    def wall_s(self) -> float:
        return time.time() + self.forward_s

    def monotonic_s(self) -> float:
        return time.monotonic() + self.forward_s


async def _late(link: Link, id: bytes) -> list[bytes]:
    told = await link.node.service.unary("Late", encode(Late(topic="t", id=id)))
    return decode_as(told, LateList).ids.tolist()


async def _put_expiring(link: Link, id: str) -> None:
    flags = np.array([EXPIRING], dtype=np.uint8)
    assert statuses(await link.put([id], expires_ms=np.array([10 * MINUTE_MS]), flags=flags)) == [Status.OK]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
async def test_no_read_returns_a_message_that_has_expired_and_is_not_swept_yet(scheme: str, tmp_path: Path):
    store = "memory://" if scheme == "memory" else f"sqlite:///{tmp_path / 's.db'}"
    hands = _Hands()
    async with broker(store, PATIENT, Clock(hands.wall_s, hands.monotonic_s)) as link:
        consumer = await link.consume(credit=2, lease_ms=60 * MINUTE_MS)
        for id, operation in (("dead", Operation.BURY), ("leased", Operation.EXTEND)):
            await _put_expiring(link, id)
            await link.settle(consumer, await consumer.down(Deliver), operation, 60 * MINUTE_MS, credit=0)
        await _put_expiring(link, "over")
        await link.put(["lasting"])
        assert await link.ids(*State) == [b"dead", b"lasting", b"leased", b"over"]

        hands.forward_s = 20 * 60
        assert await link.ids(*State) == [b"dead", b"lasting", b"leased"]
        assert sorted((await _scanned(link, Scan("t", payload=True))).ids.tolist()) == [b"lasting", b"leased"]
        two = Ragged.of([b"over", b"leased"])
        assert (await _scanned(link, Scan("t", states=tuple(State), ids=two))).ids.tolist() == [b"leased"]
        assert len(await _scanned(link, Scan("t", limit=2))) == 2
        assert await _late(link, b"over") == [] and await _late(link, b"lasting") == [b"lasting"]
