"""Rows whose payloads lie apart: which they are, and their payloads read and checked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import numpy as np

from timeline.columns import Indexes, Ragged
from timeline.model import Answers, Rows, Status, Topic, payload_sum
from timeline.storage_plugins.payloads import (
    PayloadGone,
    PayloadStore,
    PayloadsUnavailable,
    Place,
    place_of_pointer,
)


@dataclass(slots=True)
class Read:
    """What became of the payloads of rows, by the index of the row: `found` whole (or empty, where what was read is not
    what was put), `gone`, or `unread` with the reason because their place did not answer."""

    found: dict[int, bytes] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    unread: dict[int, str] = field(default_factory=dict)


def places_of(rows: Rows) -> dict[int, Place]:
    """By index, the places of those rows whose payload lies apart. Rows without payloads have none."""
    if rows.payloads is None:
        return {}
    places: dict[int, Place] = {}
    for at in np.flatnonzero(rows.payloads.sizes != rows.payload_bytes).tolist():
        place = place_of_pointer(rows.ids[at], int(rows.birth[at]), rows.payloads[at])
        if place is not None:
            places[at] = place
    return places


async def read_all(
    payloads: PayloadStore, topic: Topic, rows: Rows, places: dict[int, Place], patience_s: float | None = None
) -> Read:
    """Reads the payloads of `rows` at `places` and compares each with its checksum. What is not read after
    `patience_s` is unread."""
    read = Read()

    async def one(at: int, place: Place) -> None:
        try:
            async with asyncio.timeout(patience_s):
                data = await payloads.read(place.name(topic.uid))
        except TimeoutError:
            read.unread[at] = f"not read within {patience_s:g} s"
        except PayloadGone:
            read.gone.append(at)
        except PayloadsUnavailable as trouble:
            read.unread[at] = str(trouble)
        else:
            whole = payload_sum(data) == int(rows.payload_sum[at]) & 0xFFFFFFFF
            read.found[at] = data if whole and len(data) == int(rows.payload_bytes[at]) else b""

    await asyncio.gather(*(one(at, place) for at, place in places.items()))
    read.gone.sort()
    return read


def fill(rows: Rows, read: Read) -> None:
    """Puts what was read in the place of the pointers; what is gone or damaged is empty."""
    assert rows.payloads is not None
    payloads = rows.payloads.tolist()
    for at in read.gone:
        payloads[at] = b""
    for at, data in read.found.items():
        payloads[at] = data
    rows.payloads = Ragged.of(payloads)


def spread(answers: Answers, places: Indexes, count: int) -> Answers:
    """The answers to some of `count` messages at their places; the others are UNAVAILABLE."""
    whole = Answers.blank(count, Status.UNAVAILABLE)
    whole.assign(places, answers)
    return whole
