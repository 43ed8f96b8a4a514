"""Cursors as they go out and come back: where a walk over a topic goes on, with a sum by which a broker knows its own.

A store reads any bytes as a place: damaged ones, or those of another topic, would lie behind all that is there, and a
walk that began there would end at once, as if all were done. The sum stands behind the cursor: a broker of a version
that knows none takes it for a part of the last id, and goes on right behind that.
"""

from __future__ import annotations

import zlib
from enum import StrEnum

from timeline.errors import Invalid
from timeline.model import Topic

SUM_BYTES = 4


class Walk(StrEnum):
    """What a cursor belongs to."""

    SCAN = "scan"
    HELD = "held"
    TAG = "tag"


def sealed(topic: Topic, walk: Walk, cursor: bytes | None) -> bytes:
    """A store's cursor, as clients get it; empty, or None: the walk is over, and so it stays."""
    return cursor + _sum(topic, walk, cursor) if cursor else b""


def opened(topic: Topic, walk: Walk, told: bytes) -> bytes:
    """The store's cursor in what a client tells; empty: from the start. Raises Invalid for what no such walk gave."""
    cursor = told[:-SUM_BYTES]
    if told and told != sealed(topic, walk, cursor):
        raise Invalid(
            f"the cursor is none of a {walk} of {topic.name!r}: the topic was dropped and created again, or the cursor "
            "is damaged. Give the last one as it came, or begin a new call"
        )
    return cursor


def _sum(topic: Topic, walk: Walk, cursor: bytes) -> bytes:
    return zlib.crc32(cursor, zlib.crc32(f"{walk}/{topic.uid}".encode())).to_bytes(SUM_BYTES, "big")
