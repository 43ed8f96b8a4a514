"""Scans while messages are replaced: each row comes with its own payload."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import numpy as np

from tests.broker.link import broker, statuses
from timeline.columns import Ragged
from timeline.model import Operation, Rows, Status, Topic
from timeline.storage_plugins.contract import Page, ScanFilter
from timeline.storage_plugins.memory import MemoryStore
from timeline.wire import PutFlag, Scan, ScanPage, decode_as, encode


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
