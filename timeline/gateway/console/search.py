"""Messages that match, found in steps of bounded time: a list that grows by itself until a page of it is full."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from timeline.columns import Bools
from timeline.driver.message import StoredMessage
from timeline.driver.queries import messages_of
from timeline.gateway.console.rendering import link
from timeline.gateway.console.visit import Visit
from timeline.gateway.routes.reading import read_cursor, shown_cursor

ROWS = 50
"""Messages of a page of the list."""
FIRST_ROWS = 4 * ROWS
"""Rows of the first page that is read when not all of them are wanted. It often suffices."""
STEP_MS = 100.0
"""A step that has found too little ends after this time, with the page that it reads then."""


@dataclass(frozen=True, slots=True)
class Found:
    """The messages of one step. `shown`, `seen`: how many were found and read, of all steps. `following`: the address
    of the next step; empty: there is none. `waits`: a page is full, so the next step waits for its reader."""

    messages: list[StoredMessage]
    shown: int
    seen: int
    following: str
    waits: bool


Scanning = Callable[[int, bytes], AsyncIterator[Any]]
"""Returns the pages of a scan: at most so many rows (0: all), from a cursor on."""


async def search(
    visit: Visit,
    path: str,
    fields: Mapping[str, Any],
    scan: Scanning,
    chosen: Callable[[Any], Bools] | None = None,
) -> Found:
    """Return the messages of the next step of a list. `path`, `fields`: the address of its first step. `chosen`: which
    rows of a page are wanted. None: all."""
    before, query = visit.query.number("shown"), visit.query
    room = ROWS - before % ROWS
    messages: list[StoredMessage] = []
    after, read = b"", 0
    end_ms = visit.gateway.clock.monotonic_ms() + STEP_MS
    pages = _pages(scan, read_cursor(query.text("cursor")), chosen is None)
    async with aclosing(pages) as scanned:
        async for page in scanned:
            after, read = page.cursor, read + len(page.rows)
            if chosen is not None:
                page = replace(page, rows=page.rows.take(np.flatnonzero(chosen(page.rows))))
            messages += messages_of(page)
            if len(messages) >= room or visit.gateway.clock.monotonic_ms() >= end_ms:
                break
    shown, seen = before + len(messages), query.number("seen") + read
    following = link(path, **fields, cursor=shown_cursor(after), shown=shown, seen=seen) if after else ""
    return Found(messages, shown, seen, following, shown // ROWS > before // ROWS)


async def _pages(scan: Scanning, cursor: bytes, every: bool) -> AsyncGenerator[Any, None]:
    """Yield pages from a cursor on: one if every row is wanted, and else a small one before the others."""
    for limit in (ROWS,) if every else (FIRST_ROWS, 0):
        async with aclosing(scan(limit, cursor)) as pages:  # type: ignore[type-var]
            async for page in pages:
                cursor = page.cursor
                yield page
        if not cursor:
            return


def begins_with(rows: Any, prefix: bytes) -> Bools:
    """Return which rows have an id that begins with `prefix`."""
    return np.fromiter((id.startswith(prefix) for id in rows.ids.tolist()), np.bool_, len(rows))
