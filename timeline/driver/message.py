"""One message, to put and as stored. A message to put is checked when it is made, so that a mistake is reported where
it was written. `batch.py` has many messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeAlias, overload

import numpy as np

from timeline.clock import Clock
from timeline.columns import Ragged, UInt64
from timeline.driver.times import (
    Duration,
    Expiry,
    When,
    as_datetime,
    duration_ms,
    expiry_ms,
    instant_ms,
    shown,
    shown_utc,
)
from timeline.errors import FIXED_LIMIT, Invalid, TooLarge
from timeline.model import (
    MAX_HEADERS_BYTES,
    MAX_ID_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TAG_BYTES,
    State,
    decode_headers,
    encode_headers,
)
from timeline.tracing import TRACEPARENT
from timeline.wire.frames import PutFlag

_COUNTER_BITS = 12
_ID_LENGTH = 36
_DASHES, _VERSION = [8, 13, 18, 23], 14
_STAMP = [*range(8), *range(9, 13), *range(15, 18)]
"""The places of the 15 digits of time and counter in an id's text. Then come those of the random digits, the first of
which is the variant."""
_TAIL = [*range(19, 23), *range(24, 36)]
_HEX = np.array([[*f"{byte:02x}".encode()] for byte in range(256)], dtype=np.uint8)
_VARIANTS = np.array([*b"89ab"], dtype=np.uint8)
_FEW = 64
"""Fewer ids are made one by one: numpy's calls cost more."""

Payload: TypeAlias = bytes | bytearray | memoryview


class Randomness(Protocol):
    """The part of `random.Random` that the driver uses. Default: `random.SystemRandom`, so that a forked child does not
    repeat its parent's numbers."""

    def getrandbits(self, k: int, /) -> int: ...
    def random(self) -> float: ...
    def randbytes(self, n: int) -> bytes: ...


class Ids:
    """Makes ids that sort by their time: UUIDs of version 7 (RFC 9562). They have 48 bits of milliseconds, 12 bits that
    count within the millisecond, and 62 random bits. If a millisecond is full, ids take the next one."""

    def __init__(self, clock: Clock, random: Randomness) -> None:
        self._clock = clock
        self._random = random
        self._last = 0

    def _first_of(self, count: int) -> int:
        now = self._clock.now_ms() << _COUNTER_BITS | self._random.getrandbits(_COUNTER_BITS - 1)
        first = max(self._last + 1, now)
        self._last = first + count - 1
        return first

    def make(self) -> bytes:
        """Return a new id, 36 bytes of text."""
        return self.make_many(1)[0]

    def make_many(self, count: int) -> list[bytes]:
        """Return `count` new ids in ascending order."""
        first = self._first_of(count)
        random = self._random.randbytes(8 * count).hex()
        made: list[bytes] = []
        for at in range(count):
            stamp = f"{first + at:015x}"
            tail = random[16 * at : 16 * at + 16]
            variant = "89ab"[int(tail[0], 16) & 3]
            made.append(f"{stamp[:8]}-{stamp[8:12]}-7{stamp[12:]}-{variant}{tail[1:4]}-{tail[4:]}".encode())
        return made

    def make_column(self, count: int) -> Ragged:
        """Return `count` new ids as a column, the same as `make_many` would."""
        if count < _FEW:
            return Ragged.of(self.make_many(count))
        first = self._first_of(count)
        text = np.empty((count, _ID_LENGTH), dtype=np.uint8)
        text[:, _DASHES], text[:, _VERSION] = ord("-"), ord("7")
        stamps = np.arange(first, first + count, dtype=np.uint64).astype(">u8").view(np.uint8)
        text[:, _STAMP] = _HEX[stamps].reshape(count, 16)[:, 1:]
        drawn = np.frombuffer(self._random.randbytes(8 * count), dtype=np.uint8)
        text[:, _TAIL] = _HEX[drawn].reshape(count, 16)
        text[:, _TAIL[0]] = _VARIANTS[drawn[::8] >> 4 & 3]
        return Ragged(text.tobytes(), np.arange(0, _ID_LENGTH * count + 1, _ID_LENGTH))

    def number(self) -> int:
        """Return a random number of 64 bits, never 0: a birth, or the id of an operation or session."""
        return self._random.getrandbits(64) or 1

    def numbers(self, count: int) -> UInt64:
        """Return `count` such numbers as a column."""
        drawn = np.frombuffer(self._random.randbytes(8 * count), dtype="<u8").astype(np.uint64)
        drawn[drawn == 0] = 1
        return drawn


def encode_id(id: object) -> bytes:
    """Return an id as bytes. Raise Invalid unless it is text of 1 to 255 bytes of UTF-8 without NUL."""
    return _encoded(id, "an id", 1, MAX_ID_BYTES, id)


@contextmanager
def about(id: object) -> Iterator[None]:
    """Make refusals in a `with` block errors about the message `id`."""
    try:
        yield
    except (Invalid, TooLarge) as wrong:
        raise of_message(wrong, id) from None


def of_message(error: Invalid | TooLarge, id: object) -> Invalid | TooLarge:
    """Return `error` as one about the message `id`, if that is text and the error names no message."""
    if error.id is not None or not isinstance(id, str):
        return error
    return type(error)(error.reason, id=id, advice=error.advice)


def encode_tag(tag: object) -> bytes:
    """Return a tag as bytes. None or empty: no tag. Raise Invalid for more than 64 bytes."""
    return b"" if tag is None else _encoded(tag, "a tag", 0, MAX_TAG_BYTES)


def encode_text(text: object, name: str, most_bytes: int, least_bytes: int = 1) -> str:
    """Return `text` if it has the allowed length in UTF-8 and no NUL. Raise Invalid otherwise."""
    return _encoded(text, name, least_bytes, most_bytes).decode()


def _encoded(text: object, name: str, least: int, most: int, id: object = None) -> bytes:
    """Return `text` in UTF-8. Raise Invalid, about the message `id` if that is text."""
    if not isinstance(text, str):
        raise Invalid(f"{name} is text, not {type(text).__name__}: {shown(text)}")
    about = id if isinstance(id, str) else None
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        said = f"{name} holds half of a surrogate pair, which UTF-8 cannot carry: {text!a:.80}"
        raise Invalid(said, id=about) from None
    if not least <= len(encoded) <= most or b"\0" in encoded:
        allowed = f"{least} to {most}" if least else f"at most {most}"
        raise Invalid(f"{name} is {allowed} bytes of UTF-8 without NUL, not {len(encoded)}: {text!r:.80}", id=about)
    return encoded


def check_payload(payload: object) -> bytes:
    """Return a payload as bytes. Raise Invalid for other types, and TooLarge above 64 MiB."""
    if isinstance(payload, str):
        raise Invalid("the payload must be bytes, not str: say which encoding is meant, as in payload.encode()")
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise Invalid(
            f"the payload must be bytes, not {type(payload).__name__}: encode it first, json.dumps(…).encode()"
        )
    if type(payload) is not bytes and isinstance(payload, np.bytes_):
        raise Invalid(
            "the payload must not be numpy's bytes_: numpy drops the NULs at the end of an item of dtype S. "
            "Give the bytes as they were before they became an item; a list or an array of dtype object keeps them"
        )
    data = bytes(payload)
    if len(data) > MAX_PAYLOAD_BYTES:
        raise TooLarge(
            f"the payload has {len(data)} bytes; no topic takes more than {MAX_PAYLOAD_BYTES}", advice=FIXED_LIMIT
        )
    return data


def check_headers(headers: Mapping[str, str] | None) -> bytes:
    """Return encoded headers. Raise Invalid unless they map text to text, and TooLarge above 8 KiB."""
    if headers is None:
        return b""
    if not isinstance(headers, Mapping):
        raise Invalid(f"headers are a mapping of text to text, not {type(headers).__name__}")
    encoded = encode_headers(dict(headers))
    if len(encoded) > MAX_HEADERS_BYTES:
        raise TooLarge(
            f"headers take {len(encoded)} bytes encoded; at most {MAX_HEADERS_BYTES} are allowed", advice=FIXED_LIMIT
        )
    return encoded


class Headers(Sequence[dict[str, str]]):
    """The headers of many messages: a sequence of dicts, each decoded on access. `encoded`: the column as it crossed
    the wire."""

    __slots__ = ("encoded",)

    def __init__(self, encoded: Ragged) -> None:
        self.encoded = encoded

    def __len__(self) -> int:
        return len(self.encoded)

    @overload
    def __getitem__(self, index: int) -> dict[str, str]: ...
    @overload
    def __getitem__(self, index: slice) -> Headers: ...
    def __getitem__(self, index: int | slice) -> dict[str, str] | Headers:
        return Headers(self.encoded[index]) if isinstance(index, slice) else decode_headers(self.encoded[index])

    def __repr__(self) -> str:
        return f"<Headers of {len(self)}>"


def carried(headers: bytes, trace: Mapping[str, str]) -> bytes:
    """Return encoded headers with the context of a trace, unless they have one or have no room for it."""
    if not trace or TRACEPARENT in headers:
        return headers
    encoded = encode_headers({**decode_headers(headers), **trace})
    return encoded if len(encoded) <= MAX_HEADERS_BYTES else headers


def asked_time(at: When | None, in_: Duration | None) -> tuple[int, bool]:
    """Return `at=` or `in_=` as (milliseconds, whether they count from the broker's now)."""
    if (at is None) == (in_ is None):
        raise Invalid("say either at= (a point in time) or in_= (how long from now), one of the two")
    if at is not None:
        return instant_ms(at), False
    assert in_ is not None
    return duration_ms(in_), True


def move_flag(if_exists: str | None) -> int:
    """Return the put flag for `if_exists=`."""
    if if_exists is None:
        return 0
    if isinstance(if_exists, str) and if_exists in _IF_EXISTS:
        return _IF_EXISTS[if_exists]
    raise Invalid(f'if_exists is "move", "replace" or left out, not {shown(if_exists)}')


_IF_EXISTS = {"move": PutFlag.MOVE, "replace": PutFlag.REPLACE}


class Message:
    """One message to put: `Message(b"gate closes", at=when, id="UA1545")`.

    `payload`: bytes. `at`: the due time, an aware datetime or int milliseconds UTC. `in_`: instead, a duration from the
    broker's now. `id`: 1..255 bytes of UTF-8, unique in its topic (default: the driver makes a UUIDv7). `tag`: ≤ 64
    bytes. `headers`: text to text, ≤ 8 KiB. `expires`: a point in time as for `at`, or from now as a timedelta or text
    like "2h"; the message is not delivered at or after it.

    Raise Invalid or TooLarge for a value out of range, with the message's `id`.
    """

    __slots__ = ("at", "encoded", "expires", "headers", "id", "in_", "payload", "tag")

    def __init__(
        self,
        payload: Payload,
        at: When | None = None,
        in_: Duration | None = None,
        id: str | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        expires: Expiry | None = None,
    ) -> None:
        self.at, self.in_, self.id, self.tag, self.headers, self.expires = at, in_, id, tag, headers, expires
        try:
            self.payload = check_payload(payload)
            time_ms, relative = asked_time(at, in_)
            flags = int(PutFlag.IN) if relative else 0
            expires_ms = 0
            if expires is not None:
                expires_ms, from_now = expiry_ms(expires)
                flags |= PutFlag.EXPIRES_IN if from_now else 0
                if relative == from_now and expires_ms <= time_ms:
                    since = "; a length, such as 30m, counts from now" if from_now else ""
                    raise Invalid(f"expires must lie after the due time{since}")
            self.encoded = (
                b"" if id is None else encode_id(id),
                time_ms,
                flags,
                expires_ms,
                b"" if tag is None else encode_tag(tag),
                b"" if headers is None else check_headers(headers),
            )
        except (Invalid, TooLarge) as wrong:
            raise of_message(wrong, id) from None

    def __repr__(self) -> str:
        when = f"at={self.at!r}" if self.at is not None else f"in_={self.in_!r}"
        return f"Message({len(self.payload)} bytes, {when}, id={self.id!r})"


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as stored. Times are milliseconds UTC, 0 if there is none. `payload` and `headers` are None unless they
    were asked for. `state`: at the broker's time of reading."""

    id: str
    state: State
    due_ms: int
    scheduled_ms: int
    version: int
    deliveries: int
    group: str
    tag: str | None
    holder: str | None
    put_ms: int
    asked_ms: int
    expires_ms: int
    died_ms: int
    dead: str | None
    birth: int
    last_op: int
    payload_sum: int
    payload_bytes: int
    payload: bytes | None = None
    headers: dict[str, str] | None = None

    def __repr__(self) -> str:
        told = [repr(self.id), self.state.value, f"due {shown_utc(self.due_ms)}"]
        told += [
            f"{name} {value!r}" for name in ("tag", "holder", "dead") if (value := getattr(self, name)) is not None
        ]
        return f"StoredMessage({', '.join(told)})"

    @property
    def due(self) -> datetime:
        """Its position on the timeline. If it is leased: the end of the lease."""
        return as_datetime(self.due_ms)

    @property
    def scheduled(self) -> datetime:
        """The due time that a person asked for."""
        return as_datetime(self.scheduled_ms)

    @property
    def expires(self) -> datetime | None:
        """When it expires. None: never."""
        return as_datetime(self.expires_ms) if self.expires_ms else None

    @property
    def died(self) -> datetime | None:
        """When it became a dead letter. None: it is none."""
        return as_datetime(self.died_ms) if self.died_ms else None
