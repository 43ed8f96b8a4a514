"""Offloaded payloads: the contract of their place, and their names.

An offloaded payload is a file, written once under a name of its own, before its row, and deleted after it. The row has
a *pointer* of a few bytes instead. A row's `payload_bytes` is the payload's true size: if the row's content has another
size, it is a pointer.
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
from timeline.storage_plugins.errors import StoreRefused, StoreUnavailable

MARK = b"\x00timeline payload\x01"
NONCE_BYTES = 8
POINTER_BYTES = len(MARK) + NONCE_BYTES
LEAST_OFFLOAD_BYTES = 1024
"""Below this, a pointer and a file cost more than they save."""
OFFLOAD_BYTES = 256 * 1024
"""Default: larger payloads are offloaded. Up to this size databases are fast."""
SHARDS = 256
_PIECE = 200
"""Hex digits of an id in one part of a name. File systems allow 255 bytes."""


class PayloadGone(Exception):
    """There is no such payload."""


class PayloadsUnavailable(StoreUnavailable):
    """The place does not answer now. Whether it has a payload is not known."""


class PayloadsRefused(StoreRefused):
    """The place cannot be used as configured; the text says what to change."""


class PayloadStore(ABC):
    """A place for payloads. Names are relative, with slashes between parts. Calls may run concurrently. Each call
    raises PayloadsUnavailable if the place does not answer."""

    durable: bool
    """Whether written payloads survive a kill -9 of this process."""
    described: str
    """The place in words, without secrets."""
    fresh = False
    """Once it is open: whether it has no mark. Then no store has used it yet, or it is not mounted."""

    @abstractmethod
    async def open(self) -> None:
        """Prove that the place can be written. Raise PayloadsRefused or PayloadsUnavailable."""

    @abstractmethod
    async def claim(self, cluster_uid: str) -> None:
        """Mark a fresh place with the cluster's uuid. A place that lost its mark is unavailable from then on, and does
        not look empty."""

    @abstractmethod
    async def in_place(self) -> bool:
        """Return whether the mark is still the one that the opening found or made."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything. Twice is harmless."""

    @abstractmethod
    async def check(self) -> None:
        """Return if a write would work now; raise otherwise."""

    @abstractmethod
    async def write(self, name: str, data: bytes) -> None:
        """Store `data` whole or not at all. When this returns, `data` is as safe as the place makes it."""

    @abstractmethod
    async def read(self, name: str) -> bytes:
        """Return the payload written under `name`. Raise PayloadGone if there is none."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Delete these. A missing one is no error."""

    @abstractmethod
    async def names(self, folder: str) -> list[str]:
        """Return all names below `folder`, in any order."""

    @abstractmethod
    async def delete_folder(self, folder: str) -> None:
        """Delete all below `folder`, which need not exist."""


@dataclass(frozen=True, slots=True)
class Place:
    """The payload of a file: that of the message `id`, born as `birth`, put under `nonce`."""

    id: bytes
    birth: int
    nonce: bytes

    @property
    def pointer(self) -> bytes:
        """The content of the row, instead of the payload."""
        return MARK + self.nonce

    def name(self, topic_uid: int) -> str:
        """Return the name of the file."""
        digits = self.id.hex()
        pieces = [digits[at : at + _PIECE] for at in range(0, len(digits), _PIECE)]
        folder = shard_folder(topic_uid, zlib.crc32(self.id) % SHARDS)
        return f"{folder}/{'/'.join(pieces)}-{self.birth:016x}-{self.nonce.hex()}"


def topic_folder(topic_uid: int) -> str:
    """Return the folder of all payloads of a topic."""
    return f"{topic_uid:016x}"


def shard_folder(topic_uid: int, shard: int) -> str:
    """Return the folder of a share of them, by the checksum of the id."""
    return f"{topic_folder(topic_uid)}/{shard:02x}"


def is_pointer(content: bytes) -> bool:
    """Return whether the content of a row is a pointer."""
    return len(content) == POINTER_BYTES and content.startswith(MARK)


def place_of_pointer(id: bytes, birth: int, pointer: bytes) -> Place | None:
    """Return the place that a row's pointer means; None: it is no pointer."""
    if not is_pointer(pointer):
        return None
    return Place(id, birth, pointer[len(MARK) :])


def place_of_name(name: str) -> Place | None:
    """Return the place whose file has this name; None: the file is not ours."""
    parts = "".join(name.split("/")[2:]).split("-")
    if len(parts) != 3 or len(parts[1]) != 16 or len(parts[2]) != 2 * NONCE_BYTES:
        return None
    try:
        return Place(bytes.fromhex(parts[0]), int(parts[1], 16), bytes.fromhex(parts[2]))
    except ValueError:
        return None


@dataclass(slots=True)
class Read:
    """Payloads by the index of their row. `found`: whole, or empty if it is not what was put. `unread`: the reason, if
    the place did not answer. `gone`: they are there no more."""

    found: dict[int, bytes] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)
    unread: dict[int, str] = field(default_factory=dict)


def places_of(rows: Rows) -> dict[int, Place]:
    """Return, by index, the places of rows with an offloaded payload. Rows read without payloads have none."""
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
    """Read the payloads of `rows` at `places`, and compare each with its checksum. A payload that is not read within
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
            read.unread[at] = trouble.reason
        else:
            whole = payload_sum(data) == int(rows.payload_sum[at]) & 0xFFFFFFFF
            read.found[at] = data if whole and len(data) == int(rows.payload_bytes[at]) else b""

    await asyncio.gather(*(one(at, place) for at, place in places.items()))
    read.gone.sort()
    return read


def fill(rows: Rows, read: Read) -> None:
    """Replace the pointers by the payloads that were read. A payload that is gone or damaged is empty."""
    assert rows.payloads is not None
    payloads = rows.payloads.tolist()
    for at in read.gone:
        payloads[at] = b""
    for at, data in read.found.items():
        payloads[at] = data
    rows.payloads = Ragged.of(payloads)
