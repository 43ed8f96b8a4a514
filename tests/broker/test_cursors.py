"""Cursors that come back otherwise than they went out: refused, never taken for the end of a walk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from tests.broker.link import Link, broker
from timeline.columns import Ragged
from timeline.model import Operation, State
from timeline.storage_plugins.contract import ScanFilter
from timeline.wire import Fault, MutateTag, Scan, ScanPage, TagMutated, TopicAction, TransportError, decode_as, encode

MANY = 2_500


def damaged(cursor: bytes) -> Iterator[bytes]:
    """What is no cursor of this walk, most of it much like it."""
    yield from (b"x", bytes(8), b"\xff" * 8, cursor[:-1], cursor + b"\0", cursor[4:])
    for place in range(len(cursor)):
        yield cursor[:place] + bytes([cursor[place] ^ 1]) + cursor[place + 1 :]


async def first_page(link: Link, asked: Scan) -> ScanPage:
    async with aclosing(link.node.service.unary_stream("Scan", encode(asked))) as stream:
        async for data in stream:
            return decode_as(data, ScanPage)
    raise AssertionError("a scan has a page")


async def tagged(link: Link, **more: Any) -> TagMutated:
    asked = MutateTag("t", "default", Operation.CANCEL, b"spring", 5, limit=1_000, dry_run=True, **more)
    return decode_as(await link.node.service.unary("Mutate", encode(asked)), TagMutated)


async def filled(link: Link) -> None:
    await link.topic(TopicAction.CREATE, "other")
    await link.put([f"m{n}" for n in range(MANY)], 3_600_000, tags=Ragged.repeat(b"spring", MANY))


async def test_a_scan_goes_on_from_its_own_cursor_alone():
    async with broker() as link:
        await filled(link)
        first = await first_page(link, Scan("t"))
        second = await first_page(link, Scan("t", cursor=first.cursor))
        assert first.cursor and second.cursor != first.cursor and len(second.rows)
        for other in damaged(first.cursor):
            with pytest.raises(TransportError, match="begin a new call") as refused:
                await first_page(link, Scan("t", cursor=other))
            assert refused.value.fault is Fault.REFUSED_FRAME
        for elsewhere in (Scan("other", cursor=first.cursor), Scan("t", cursor=first.cursor, holder="w")):
            with pytest.raises(TransportError, match="begin a new call"):
                await first_page(link, elsewhere)


async def test_a_broker_that_knows_no_sums_goes_on_right_behind_the_last():
    """In a rolling upgrade it gets cursors with a sum. Taken for a place behind all, it would end the walk."""
    async with broker() as link:
        await filled(link)
        first = await first_page(link, Scan("t"))
        topic = await link.node.catalog.find("t")
        assert topic is not None
        everything = ScanFilter(frozenset({State.WAITING}))
        page = await link.node.store.store.scan(topic, link.node.clock.now_ms(), everything, first.cursor, MANY, False)
        assert len(first.rows) + len(page.rows) == MANY


async def test_a_walk_by_tag_goes_on_from_its_own_cursor_alone():
    async with broker() as link:
        await filled(link)
        first = await tagged(link)
        assert first.cursor
        await tagged(link, cursor=first.cursor, started_ms=first.started_ms)
        scanned = await first_page(link, Scan("t"))
        for other in (*damaged(first.cursor), scanned.cursor):
            with pytest.raises(TransportError, match="begin a new call"):
                await tagged(link, cursor=other, started_ms=first.started_ms)
