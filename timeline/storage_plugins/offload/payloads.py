"""Where payloads lie that are apart from their rows: a contract, and how such a payload is named.

A payload in a place of its own is a file, written once under a name that nobody else ever uses, before its row, and
deleted after it. What the row has in its stead is a *pointer* of a few bytes. A row's `payload_bytes` tells the
payload's true size: where it is not the size of what the row has, that is a pointer.
"""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from timeline.columns import Ragged
from timeline.model import Rows, Topic, payload_sum

MARK = b"\x00timeline payload\x01"
NONCE_BYTES = 8
POINTER_BYTES = len(MARK) + NONCE_BYTES
LEAST_OFFLOAD_BYTES = 1024
"""Below, a pointer and a file cost more than they spare."""
OFFLOAD_BYTES = 256 * 1024
"""Payloads above lie apart, unless told otherwise: up to there databases are quick."""
SHARDS = 256
_PIECE = 200
"""Hex digits of an id in one part of a name: file systems take 255 bytes."""


class PayloadGone(Exception):
    """There is no such payload."""


class PayloadsUnavailable(Exception):
    """The place cannot be asked now; whether a payload is there is not known."""


class PayloadsRefused(Exception):
    """The place cannot be used as configured; the text says what to change."""


class PayloadStore(ABC):
    """A place for payloads. Names are relative, parts separated by slashes; calls may run concurrently. But for what
    `PayloadGone` says, each call raises PayloadsUnavailable when the place does not answer."""

    durable: bool
    """Whether what was written survives a kill -9 of this process."""
    described: str
    """The place in words, without secrets."""
    fresh = False
    """Once it is open: whether it has no mark, so that nobody has used it yet, or it is not mounted."""

    @abstractmethod
    async def open(self) -> None:
        """Proves that the place can be written to. Raises PayloadsRefused or PayloadsUnavailable."""

    @abstractmethod
    async def claim(self, cluster_uid: str) -> None:
        """Mark a fresh place with the cluster's uuid. One that has lost its mark does not answer any more, instead of
        having nothing."""

    @abstractmethod
    async def in_place(self) -> bool:
        """Return whether the mark is the one that was found, or made, when the place was opened."""

    @abstractmethod
    async def close(self) -> None:
        """Releases everything. Twice is harmless."""

    @abstractmethod
    async def check(self) -> None:
        """Whether a write would work now."""

    @abstractmethod
    async def write(self, name: str, data: bytes) -> None:
        """Stores `data` whole or not at all; when it returns, `data` is as safe as the place makes it."""

    @abstractmethod
    async def read(self, name: str) -> bytes:
        """What was written under `name`. Raises PayloadGone when nothing was, or was deleted."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Deletes these; those that are not there are no error."""

    @abstractmethod
    async def names(self, folder: str) -> list[str]:
        """All names below `folder`, in any order."""

    @abstractmethod
    async def delete_folder(self, folder: str) -> None:
        """Deletes all below `folder`, which may not be there."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which payload a file is: of the message `id`, born as `birth`, put under `nonce`."""

    id: bytes
    birth: int
    nonce: bytes

    @property
    def pointer(self) -> bytes:
        """What the row has in the payload's stead."""
        return MARK + self.nonce

    def name(self, topic_uid: int) -> str:
        """Where the file lies."""
        digits = self.id.hex()
        pieces = [digits[at : at + _PIECE] for at in range(0, len(digits), _PIECE)]
        folder = shard_folder(topic_uid, zlib.crc32(self.id) % SHARDS)
        return f"{folder}/{'/'.join(pieces)}-{self.birth:016x}-{self.nonce.hex()}"


def topic_folder(topic_uid: int) -> str:
    """Where all payloads of a topic lie."""
    return f"{topic_uid:016x}"


def shard_folder(topic_uid: int, shard: int) -> str:
    """Where a share of them lies, by the checksum of the id."""
    return f"{topic_folder(topic_uid)}/{shard:02x}"


def is_pointer(content: bytes) -> bool:
    """Whether what a row has in its payload's stead is a pointer."""
    return len(content) == POINTER_BYTES and content.startswith(MARK)


def place_of_pointer(id: bytes, birth: int, pointer: bytes) -> Place | None:
    """The place that a row's pointer means; None when it is no pointer."""
    if not is_pointer(pointer):
        return None
    return Place(id, birth, pointer[len(MARK) :])


def place_of_name(name: str) -> Place | None:
    """The place whose file is called `name`; None for a file that is not ours."""
    parts = "".join(name.split("/")[2:]).split("-")
    if len(parts) != 3 or len(parts[1]) != 16 or len(parts[2]) != 2 * NONCE_BYTES:
        return None
    try:
        return Place(bytes.fromhex(parts[0]), int(parts[1], 16), bytes.fromhex(parts[2]))
    except ValueError:
        return None


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
