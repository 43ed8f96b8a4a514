"""The shared nouns: statuses, states, a message's fields as columns, topics with their settings, limits.

Nothing here reads a clock or talks to anybody. Times are int milliseconds UTC and end in `_ms`. If a time is optional,
0 means none.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, NamedTuple, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from timeline.columns import Bools, ColumnBatch, Form, Int64, Ragged, Range, Text, UInt8, UInt32, UInt64, fields_of
from timeline.errors import Invalid
from timeline.wording import above, out_of_range

MAX_ID_BYTES = 255
MAX_TAG_BYTES = 64
MAX_GROUP_BYTES = 255
MAX_HOLDER_BYTES = 255
MAX_TOPIC_CHARS = 255
TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]+")
"""The form of a new topic's name."""
MAX_HEADERS_BYTES = 8 * 1024
MAX_REASON_BYTES = 1024
MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
MAX_BUCKETS = 4096
MAX_BATCH = 100_000
"""Messages in one frame or one store call."""
MAX_TIME_MS = 253_402_300_799_999
"""Last millisecond of the year 9999: no due, expiry or duration is beyond it."""
MAX_DURATION_MS = 100 * 366 * 86_400_000
DEFAULT_GROUP = "default"
PULL_PREFIX = "pull:"
"""How the ids begin of consumers that a broker keeps for Takes. No other consumer may have such an id."""
DELIVERED_OUT = b"max_deliveries"
"""The reason of a dead letter that was delivered as often as its topic permits. If its handler failed, the driver adds
the error: `max_deliveries: ValueError: …`."""
PAYLOAD_GONE, PAYLOAD_DAMAGED, PAYLOAD_APART = b"payload gone", b"payload damaged", b"payload apart"
"""The reasons of dead letters whose payload is not what was put, or lies in a place that the broker was not told."""


class Status(StrEnum):
    """The one definite answer to each message of a call. `code` is its number on the wire and in columns."""

    code: int

    OK = "OK"
    INVALID = "INVALID"
    TOO_LARGE = "TOO_LARGE"
    THROTTLED = "THROTTLED"
    NOT_FOUND = "NOT_FOUND"
    FORBIDDEN = "FORBIDDEN"
    FENCED = "FENCED"
    LEASED = "LEASED"
    DEAD = "DEAD"
    EXISTS = "EXISTS"
    DUPLICATE = "DUPLICATE"
    EXPIRED = "EXPIRED"
    UNAVAILABLE = "UNAVAILABLE"
    UNKNOWN = "UNKNOWN"

    def __init__(self, _: str) -> None:
        self.code = len(type(self))  # of those before it

    @classmethod
    def of(cls, code: int) -> Status:
        """Return the status numbered `code`; UNKNOWN for a number that this version does not know."""
        return _STATUSES[code] if 0 <= code < len(_STATUSES) else cls.UNKNOWN


_STATUSES = tuple(Status)

PRECEDENCE = (
    Status.INVALID,
    Status.TOO_LARGE,
    Status.THROTTLED,
    Status.NOT_FOUND,
    Status.FORBIDDEN,
    Status.FENCED,
    Status.LEASED,
    Status.DEAD,
    Status.EXISTS,
    Status.DUPLICATE,
    Status.EXPIRED,
    Status.OK,
)
"""Where several apply, the first of these is the answer."""


class State(StrEnum):
    """Derived from a message's fields and the time, never stored (see `leases.state_of`)."""

    ABSENT = "absent"
    SETTLED = "settled"
    WAITING = "waiting"
    AVAILABLE = "available"
    LEASED = "leased"
    DEAD = "dead"


class Operation(IntEnum):
    """The operations on a message. The number is that of the wire and the columns."""

    PUT = 0
    LEASE = 1
    EXTEND = 2
    ACK = 3
    RELEASE = 4
    BURY = 5
    MOVE = 6
    CANCEL = 7
    REVIVE = 8
    PURGE = 9
    REGRANT = 10
    """A lease given again to the holder it has, for a new session under the same consumer id."""


SETTLES = (Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.BURY, Operation.REGRANT)
MUTATIONS = (Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE)


def bucket_of(id: bytes, buckets: int) -> int:
    """Return the bucket of `id`: zlib's CRC-32, unsigned, modulo `buckets`."""
    return zlib.crc32(id) % buckets


def buckets_of(ids: Ragged, buckets: int) -> UInt32:
    """Return `bucket_of` for a column of ids."""
    sums = np.fromiter(map(zlib.crc32, ids.tolist()), dtype=np.uint32, count=len(ids))
    return sums % np.uint32(buckets)


def payload_sum(payload: bytes | memoryview, headers: bytes | memoryview = b"") -> int:
    """Return the 64-bit checksum of a message's content: CRC-32 of the payload, that of the encoded headers above
    it."""
    return zlib.crc32(payload) | (zlib.crc32(headers) << 32 if headers else 0)


def payload_sums(payloads: Ragged, headers: Ragged | None) -> UInt64:
    """Return `payload_sum` for columns."""
    count = len(payloads)
    sums = np.fromiter(map(zlib.crc32, payloads.tolist()), dtype=np.uint64, count=count)
    if headers is not None:
        above = np.fromiter(map(zlib.crc32, headers.tolist()), dtype=np.uint64, count=count)
        sums |= above << np.uint64(32)
    return sums


def fitting_reason(reason: str) -> str:
    """Return a reason that fits: at most 1 KiB of UTF-8 without NUL."""
    encoded = reason.replace("\0", " ").encode("utf-8", "replace")
    return encoded[:MAX_REASON_BYTES].decode("utf-8", "ignore")


def encode_headers(headers: dict[str, str]) -> bytes:
    """Return headers as bytes, the same bytes for the same headers. Keys are in byte order. Each key and each value has
    its length (2 bytes, little endian), then UTF-8. No headers is no bytes. Raise Invalid for anything but text."""
    for part in (part for pair in headers.items() for part in pair):
        if not isinstance(part, str):
            raise Invalid(f"headers are strings by strings, not {type(part).__name__}: {part!r:.80}")
    try:
        pairs = sorted((key.encode(), value.encode()) for key, value in headers.items())
    except UnicodeEncodeError as bad:
        raise Invalid("headers hold half of a surrogate pair, which UTF-8 cannot carry") from bad
    if any(len(part) > 0xFFFF for pair in pairs for part in pair):
        raise Invalid(f"headers may take {MAX_HEADERS_BYTES} bytes in all; one key or value alone is longer")
    return b"".join(len(part).to_bytes(2, "little") + part for pair in pairs for part in pair)


def decode_headers(data: bytes) -> dict[str, str]:
    """Return the headers that `encode_headers` made `data` of. Raise Invalid unless it is a whole number of pairs of
    UTF-8 strings."""
    parts: list[str] = []
    at = 0
    try:
        while at < len(data):
            size = int.from_bytes(data[at : at + 2], "little")
            part = data[at + 2 : at + 2 + size]
            if at + 2 + size > len(data):
                raise Invalid("headers end in the middle of a string")
            parts.append(part.decode())
            at += 2 + size
    except UnicodeDecodeError as bad:
        raise Invalid("headers are not UTF-8") from bad
    if len(parts) % 2:
        raise Invalid("headers have a key without a value")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def canonical_headers(data: bytes) -> bool:
    """Return whether `encode_headers` would make just `data`: keys in byte order, each once. Raise like
    `decode_headers`."""
    return encode_headers(decode_headers(data)) == data


ID_TEXT = Text("an id", 1, MAX_ID_BYTES)
TAG_TEXT = Text("a tag", 0, MAX_TAG_BYTES, nul=True)
REASON_TEXT = Text("a reason", 0, MAX_REASON_BYTES, nul=True)
Version: TypeAlias = Annotated[Int64, Range(1)]
Times: TypeAlias = Annotated[Int64, Range(0, MAX_TIME_MS)]
Ids: TypeAlias = Annotated[Ragged, ID_TEXT]
Tags: TypeAlias = Annotated[Ragged, TAG_TEXT]
Holders: TypeAlias = Annotated[Ragged, Text("a holder", 0, MAX_HOLDER_BYTES)]
Headers: TypeAlias = Annotated[Ragged, Form("headers")]
Reasons: TypeAlias = Annotated[Ragged, REASON_TEXT]


@dataclass(slots=True)
class Rows(ColumnBatch):
    """n messages as columns: every field of `system.md`. The payload's bytes come with them if asked for.

    `holders` and `tags`: an empty item is none. `expires_ms`, `died_ms`: 0 is none. `put_ms`: the broker's time of the
    put. `asked_ms`: when `scheduled_ms` was last asked for, so that a message scheduled in the past is not called late.
    `payload_bytes`: the payload's length, known without reading it.
    """

    ids: Ids
    birth: UInt64
    version: Version
    due_ms: Times
    scheduled_ms: Times
    put_ms: Times
    asked_ms: Times
    deliveries: UInt32
    last_op: UInt64
    expires_ms: Times
    payload_sum: UInt64
    payload_bytes: Annotated[UInt32, Range(0, MAX_PAYLOAD_BYTES)]
    died_ms: Times
    groups: Annotated[Ragged, Text("a group", 1, MAX_GROUP_BYTES)]
    holders: Holders
    tags: Tags
    dead: Reasons
    payloads: Ragged | None = None
    headers: Headers | None = None

    @classmethod
    def empty(cls, payload: bool = False) -> Rows:
        """Return no rows."""
        rows = cls.blank(0)
        if payload:
            rows.payloads = rows.headers = rows.ids
        return rows

    def expired(self, now_ms: int) -> Bools:
        """Return which are expired: past their expiry, not dead, and not under a live lease."""
        leased = (self.holders.sizes > 0) & (self.due_ms > now_ms)
        gone: Bools = (self.expires_ms > 0) & (self.expires_ms <= now_ms) & (self.died_ms == 0) & ~leased
        return gone


ROW_DTYPES = {field.name: field.dtype for field in Rows.columns if field.dtype is not None}
"""The numeric columns of `Rows` and their types."""


class Displaced(NamedTuple):
    """A message that a put found under its id and removed: because it had `expired`, or to replace it."""

    birth: int
    version: int
    expired: bool


@dataclass(slots=True)
class Answers(ColumnBatch):
    """One definite answer per message of a call, as columns.

    `status`: `Status.code`. `version`, `due_ms`: the message as it stands afterwards, 0 for none. `settled`: 1 if the
    id is remembered as settled. `late`: 1 if an ack counted after its lease ran out. `repeat`: 1 if the call was done
    before. `details`: index → a sentence, for refusals. `commit_seq`: see `Store.tells_commit_seq`. `displaced`: index
    of a put → the message that it removed, expired or replaced.
    """

    status: UInt8
    version: Int64
    due_ms: Int64
    settled: UInt8
    late: UInt8
    repeat: UInt8
    details: dict[int, str] = dataclasses.field(default_factory=dict)
    commit_seq: int = 0
    displaced: dict[int, Displaced] = dataclasses.field(default_factory=dict)

    @classmethod
    def blank(cls, count: int, status: Status = Status.OK) -> Answers:
        """Return `count` answers of `status` with nothing else said."""
        answers = cls._zeros(count)
        if status is not Status.OK:
            answers.status.fill(status.code)
        return answers


class LateCause(IntEnum):
    """Why a delivery was late."""

    UNEXPLAINED = 0
    NO_CONSUMER = 1
    NO_CREDIT = 2
    STORE_SLOW = 3
    NO_BROKER = 4
    BROKER_DOWN = 5
    PAUSED = 6
    RATE_LIMITED = 7
    CLOCK = 8
    PRODUCED_LATE = 9
    LEASE_RAN_OUT = 10
    """Redelivered: a consumer had it and did not settle in time."""


class LeavingReason(IntEnum):
    """Why a broker ends a stream. DRAINING, QUARANTINED: go to another broker at once, keep the leases in hand.
    SUPERSEDED: another session has this consumer's id; do not reconnect. TOPIC_DROPPED: the topic is gone. STALLED: the
    consumer stopped reading; it may reconnect."""

    DRAINING = 1
    SUPERSEDED = 2
    TOPIC_DROPPED = 3
    STALLED = 4
    QUARANTINED = 5


LEASE_AHEAD_AUTO = -1
Length: TypeAlias = Annotated[int, Range(1, MAX_DURATION_MS)]
Duration: TypeAlias = Annotated[int, Range(0, MAX_DURATION_MS)]
RetryFactor: TypeAlias = Annotated[int, Range(100, 100_000)]
RetryJitter: TypeAlias = Annotated[int, Range(0, 100)]
MAX_PUSH_URL_BYTES = 1024
MAX_PUSH_TIMEOUT_MS = 3_600_000
KINDS = ("timeline",)
"""The kinds of topic there are; `timeline.kinds` says what each does."""


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """A topic's settings with their defaults. All but `buckets` and `kind` change live. Comments name the special
    values."""

    buckets: Annotated[int, Range(1, MAX_BUCKETS)] = 64
    lease_ms: Length = 30_000
    max_lease_ms: Length = 12 * 3_600_000
    max_payload_bytes: Annotated[int, Range(0, MAX_PAYLOAD_BYTES)] = 1024 * 1024
    horizon_ms: Length = 10 * 366 * 86_400_000
    max_deliveries: Annotated[int, Range(0, 1_000_000)] = 25  # 0: no limit
    redelivery_backoff_ms: Duration = 0
    dead_retention_ms: Duration = 0  # 0: for ever
    remember_ms: Duration = 0  # 0: not at all
    # -1: the store's own p99 lease time, within its capability; 0: off
    lease_ahead_ms: Annotated[int, Range(LEASE_AHEAD_AUTO, 60_000)] = LEASE_AHEAD_AUTO
    paused: bool = False
    max_rate_per_s: Annotated[int, Range(0, 1_000_000_000)] = 0  # 0: no limit
    kind: str = "timeline"
    # How long a message waits after its handler failed: first, times factor with each delivery, up to the cap.
    retry_first_ms: Duration = 1_000
    retry_factor_percent: RetryFactor = 200
    retry_cap_ms: Duration = 3_600_000
    retry_jitter_percent: RetryJitter = 20
    push_url: str = ""  # empty: the gateway does not push this topic
    push_timeout_ms: Annotated[int, Range(1, MAX_PUSH_TIMEOUT_MS)] = 30_000
    push_concurrency: Annotated[int, Range(1, 10_000)] = 32
    push_rate: Annotated[int, Range(0, 1_000_000)] = 0  # per second; 0: no limit

    def __repr__(self) -> str:
        return f"TopicSettings({', '.join(self.changed())})"

    def changed(self) -> list[str]:
        """Return the settings that differ from their defaults, each as `name=value`."""
        values = ((one, getattr(self, one.name)) for one in dataclasses.fields(self))
        return [f"{one.name}={value!r}" for one, value in values if value != one.default]

    def check(self) -> TopicSettings:
        """Return these settings. Raise Invalid, with the allowed range, if one is out of it."""
        for name, (low, high) in SETTING_RANGES.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise Invalid(out_of_range(name, low, high, value))
        if not isinstance(self.paused, bool):
            raise Invalid(f"paused must be true or false, not {self.paused!r}")
        if self.lease_ms > self.max_lease_ms:
            raise Invalid(above("lease_ms", self.lease_ms, "max_lease_ms", self.max_lease_ms))
        if self.retry_first_ms > self.retry_cap_ms:
            raise Invalid(above("retry_first_ms", self.retry_first_ms, "retry_cap_ms", self.retry_cap_ms))
        if self.push_url != "":
            check_push_url(self.push_url)
        if self.kind not in KINDS:
            only = " (the only kind there is)" if len(KINDS) == 1 else ""
            raise Invalid(f"kind must be {' or '.join(map(repr, KINDS))}{only}, not {self.kind!r}")
        return self


SETTING_RANGES = {
    field.name: (field.limit.least, field.limit.most)
    for field in fields_of(TopicSettings)
    if isinstance(field.limit, Range)
}
"""The least and the most of each setting that is a whole number."""
FIXED_SETTINGS = ("buckets", "kind")


PUSH_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


def check_push_url(url: object) -> str:
    """Return `url` if webhooks can be sent there, else raise Invalid. Addresses are judged when it is called."""
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or any(each in url for each in ' \\"<>'):
        raise Invalid(f"push_url takes printable ASCII without spaces, not {url!r:.80}. Encode other characters with %")
    if len(url) > MAX_PUSH_URL_BYTES:
        raise Invalid(f"push_url takes up to {MAX_PUSH_URL_BYTES} bytes, not {len(url)}. Give a shorter URL")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as bad:
        raise Invalid(f"push_url is no URL: {bad}. Give one such as https://example.com/hook") from bad
    if parts.scheme not in ("http", "https"):
        raise Invalid(f"push_url begins with https:// or http://, not {url!r:.40}. Give one of the two")
    if "@" in parts.netloc:
        raise Invalid("push_url has a user name. Remove it, and check the signature of each request instead")
    if not host or port == 0:
        raise Invalid("push_url has no host and port to connect to. Give one such as https://example.com/hook")
    if "#" in url:
        raise Invalid("push_url has a fragment, which no server gets. Remove the '#' and what follows it")
    return url


def check_new_push_url(url: object) -> str:
    """Return `url` if a topic may be given it, else raise Invalid. A topic of older rules keeps what it has."""
    checked = check_push_url(url)
    host = urlsplit(checked).hostname or ""
    if "%" in host or (":" not in host and not PUSH_HOST.fullmatch(host)):
        raise Invalid(
            f"push_url has a host that is no name: {host!r:.60}. A name has letters, digits, '.', '-' and '_', at most "
            "63 between two dots, and 253 in all"
        )
    return checked


class PushSecret(NamedTuple):
    """A secret with which a topic's webhooks are signed: `whsec_` and base64. `until_ms`: when it ends; 0: in use."""

    secret: str
    until_ms: int = 0

    def __repr__(self) -> str:
        return f"PushSecret(until_ms={self.until_ms})"


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the store records it.

    `uid`: random 63 bits, one life of this name. Rows are keyed by it, so a topic created again never sees old rows.
    `revision`: 1 at creation, +1 with each change, for compare-and-set. `newer`: a JSON object of settings that this
    version does not know, and keeps; empty: none. `secrets`: of its webhooks, the newest first; no listing has them.
    """

    name: str
    uid: int
    settings: TopicSettings
    revision: int = 1
    created_ms: int = 0
    newer: str = ""
    secrets: tuple[PushSecret, ...] = ()

    def __repr__(self) -> str:
        return f"Topic({', '.join([repr(self.name), *self.settings.changed()])})"


def check_topic_name(name: str) -> str:
    """Return `name` if it is 1 to 255 printable characters, else raise Invalid."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TOPIC_CHARS or not name.isprintable():
        raise Invalid(f"a topic's name is 1 to {MAX_TOPIC_CHARS} printable characters, not {name!r:.80}")
    return name


def fits_new_topic(name: str) -> bool:
    """Return whether a new topic may have `name`, which is a topic's name by older rules."""
    return TOPIC_NAME.fullmatch(name) is not None and name not in (".", "..")


def check_new_topic_name(name: str) -> str:
    """Return `name` if a topic may be created under it, else raise Invalid.

    A name stands in URLs, shells and metrics. Topics that older versions created under other names stay usable.
    """
    if not fits_new_topic(check_topic_name(name)):
        raise Invalid(
            f"{name!r:.80} cannot be a topic's name. Use letters, digits, '.', '_' and '-', so that it fits into a URL "
            "and a shell"
        )
    return name
