"""What crosses the wire, as values: one dataclass a frame, columns inside. Driver and broker meet here
and nowhere else.

`timeline.wire.encode(frame)` makes bytes of any of these, `timeline.wire.decode(data)` verifies bytes and makes the
frame; `schemas/fbs/timeline.fbs` says the same for authors in other languages. Byte strings (ids, tags, headers,
payloads, reasons) are `Ragged`; absent items are empty. A decoded frame's columns have equal lengths and every value
is in its range; whether an operation is legal is not the wire's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import TypeAlias

from timeline.columns import Int64, Ragged, UInt8, UInt32, UInt64
from timeline.model import Answers, LateCause, LeavingReason, Operation
from timeline.wire.questions import (
    Consumers,
    Forecast,
    Forecasted,
    Health,
    Hint,
    Hinted,
    Late,
    LateList,
    LatenessCounts,
    Ping,
    Pong,
    Scan,
    ScanPage,
    Stand,
    Standing,
    TopicAction,
    TopicList,
    TopicLoads,
    Topics,
)

MAJOR = 1
MINOR = 3
"""Version of this wire. Frames of a newer minor are read (what is not known in them is passed over); another major is
refused with a sentence."""

SERVICE = "timeline.v1.Timeline"
METHODS = {
    "Produce": "stream_stream",
    "Mutate": "unary_unary",
    "Consume": "stream_stream",
    "Scan": "unary_stream",
    "Forecast": "unary_unary",
    "Topics": "unary_unary",
    "Late": "unary_unary",
    "Ping": "unary_unary",
    "Stand": "unary_unary",
    "Hint": "unary_unary",
}
"""gRPC methods of `SERVICE`; requests and responses are frames."""

AIM_BYTES = 1024 * 1024
"""Frames aim at no more than this; only one large payload makes a larger one."""
MAX_FRAME_BYTES = 64 * 1024 * 1024 + 256 * 1024
"""No frame is larger: the largest payload and what goes with it."""
MAX_COUNT = 2**53 - 1
"""Counts and credits: what a double still holds exactly, for languages that have nothing else."""


REPLACE_MINOR = 3


class PutFlag(IntFlag):
    """Per message of a Produce. IN: `time_ms` counts from the broker's now. EXPIRES_IN: `expires_ms` does. MOVE:
    if_exists="move". REPLACE: if_exists="replace", which a broker below minor REPLACE_MINOR passes over."""

    IN = 1
    EXPIRES_IN = 2
    MOVE = 4
    REPLACE = 8


class SettleFlag(IntFlag):
    """Per settle. AT: `time_ms` of a RELEASE is absolute (without: from the broker's now). UNSEEN: RELEASE of what no
    person's code saw."""

    AT = 1
    UNSEEN = 2


class MutateFlag(IntFlag):
    """Per message of a Mutate. IN: `time_ms` counts from the broker's now. LEASED: CANCEL also what is leased."""

    IN = 1
    LEASED = 2


@dataclass(slots=True)
class Produce:
    """Up the Produce stream: n messages to put. `request` numbers the frame within its stream; answers may come in any
    order. `time_ms`: the due, or from now where the flag says IN. `expires_ms` 0: none. `headers` are encoded
    (`model.encode_headers`). `timeout_ms`: what the caller will wait; the broker drops what it did not start by then
    (UNAVAILABLE), 0: no limit."""

    request: int
    topic: str
    group: str
    ids: Ragged
    birth: UInt64
    time_ms: Int64
    flags: UInt8
    payloads: Ragged
    expires_ms: Int64 | None = None
    tags: Ragged | None = None
    headers: Ragged | None = None
    timeout_ms: int = 0


@dataclass(slots=True)
class Produced:
    """Down the Produce stream: an answer for each message of `request`. `retry_after_ms` > 0: wait that long before
    repeating what answered THROTTLED or UNAVAILABLE."""

    request: int
    answers: Answers
    retry_after_ms: int = 0


@dataclass(slots=True)
class Mutate:
    """MOVE, CANCEL, REVIVE or PURGE by ids. `op`: operation ids, kept when a call is repeated. `if_version` 0: any.
    `timeout_ms`: as of `Produce`."""

    topic: str
    group: str
    operation: Operation
    ids: Ragged
    time_ms: Int64
    flags: UInt8
    if_version: Int64
    op: UInt64
    timeout_ms: int = 0


@dataclass(slots=True)
class MutateTag:
    """A chunk of MOVE or CANCEL by tag. `at_ms` (0: none) or `by_ms`, for MOVE. First call: `cursor` empty and
    `started_ms` 0; later ones hand back what the answer said. `timeout_ms`: as of `Produce`; a chunk that was not
    started by then is not done, and the call is refused as NOT_READY."""

    topic: str
    group: str
    operation: Operation
    tag: bytes
    op: int
    at_ms: int = 0
    in_ms: int = -1
    by_ms: int = 0
    leased: bool = False
    dry_run: bool = False
    cursor: bytes = b""
    started_ms: int = 0
    limit: int = 5_000
    timeout_ms: int = 0


@dataclass(slots=True)
class Mutated:
    """Answers to a Mutate."""

    answers: Answers
    retry_after_ms: int = 0


@dataclass(slots=True)
class TagMutated:
    """A chunk is done: how many messages got each status code; `cursor` empty: the walk is over. `at_ms`: the absolute
    due that an `in_ms` was resolved to, to be handed back as `at_ms` with the next chunk."""

    counts: dict[int, int]
    cursor: bytes
    started_ms: int
    at_ms: int = 0


@dataclass(slots=True)
class Hello:
    """First frame up a Consume stream. `session`: random, one for the life of a consumer object; its tokens stay valid
    across reconnects. `ids birth version`: the leases it has in hand. `lease_ms` 0: the topic's. Credit is what the
    consumer has room for besides what it has in hand, `room_…` what it has room for once nothing is (0: the credit)."""

    topic: str
    consumer: str
    session: int
    lease_ms: int
    credit_messages: int
    credit_bytes: int
    ids: Ragged
    birth: UInt64
    version: Int64
    room_messages: int = 0
    room_bytes: int = 0


@dataclass(slots=True)
class Credit:
    """More credit, up a Consume stream; adds up. With nothing in it, a heartbeat: answered by Beat. Consumers send one
    at least every `Welcome.heartbeat_ms`. `echo` comes back in the Beat. `ahead_ms`: by how much the consumer's clock
    is ahead of the broker's, give or take `error_ms` (below 0: it does not know)."""

    messages: int = 0
    bytes: int = 0
    echo: int = 0
    ahead_ms: float = 0.0
    error_ms: float = -1.0


@dataclass(slots=True)
class Settle:
    """n settles, up a Consume stream, of messages of the stream's topic held by the stream's consumer. `operation`:
    EXTEND, ACK, RELEASE or BURY. `time_ms`: EXTEND, more lease from now; RELEASE, see SettleFlag. `op`: operation ids.
    `reasons`: BURY, RELEASE. The credit of what they end rides along, and counts by `crediting.credit_counts`."""

    request: int
    ids: Ragged
    birth: UInt64
    version: Int64
    operation: UInt8
    time_ms: Int64
    flags: UInt8
    op: UInt64
    reasons: Ragged | None = None
    credit_messages: int = 0
    credit_bytes: int = 0


@dataclass(slots=True)
class Welcome:
    """First frame down a Consume stream. `now_ms`: the broker's time. `lease_ms`, `max_lease_ms`: what this stream's
    leases last and may last. `max_payload_bytes`: the topic's. `brokers`: addresses to reconnect to, this one's too
    (may be empty)."""

    broker: str
    now_ms: int
    lease_ms: int
    max_lease_ms: int
    max_payload_bytes: int
    heartbeat_ms: int
    brokers: tuple[str, ...] = ()


@dataclass(slots=True)
class Deliver:
    """n messages, down a Consume stream. `due_ms`: when each came due; `lease_until_ms`: when its lease ends; both on
    the broker's clock, as are `leased_ms` (when the store call that leased them returned) and `pushed_ms` (when this
    frame was made), so that a consumer knows each lease's remaining time and lateness can be taken apart.
    `max_deliveries`: how many the topic permits; 0: any number."""

    leased_ms: int
    pushed_ms: int
    ids: Ragged
    birth: UInt64
    version: Int64
    due_ms: Int64
    scheduled_ms: Int64
    lease_until_ms: Int64
    deliveries: UInt32
    payload_sum: UInt64
    payloads: Ragged
    headers: Ragged | None = None
    tags: Ragged | None = None
    max_deliveries: int = 0


@dataclass(slots=True)
class Settled:
    """Answers to a Settle. For EXTEND, `answers.due_ms` is the lease's end."""

    request: int
    answers: Answers
    now_ms: int


@dataclass(slots=True)
class Beat:
    """Answer to a heartbeat, with the broker's time."""

    now_ms: int
    echo: int = 0


@dataclass(slots=True)
class Leaving:
    """Last frame down a Consume or Produce stream before the broker ends it. Up a Consume stream, with DRAINING: the
    consumer takes nothing more; the broker says it back behind all that it has sent, and still answers settles."""

    reason: LeavingReason
    text: str = ""


Frame: TypeAlias = (
    Produce
    | Produced
    | Mutate
    | MutateTag
    | Mutated
    | TagMutated
    | Hello
    | Credit
    | Settle
    | Welcome
    | Deliver
    | Settled
    | Beat
    | Leaving
    | Scan
    | ScanPage
    | Forecast
    | Forecasted
    | Topics
    | TopicList
    | Late
    | LateList
    | Ping
    | Pong
    | Stand
    | Standing
    | Hint
    | Hinted
)

__all__ = [
    "AIM_BYTES",
    "MAJOR",
    "MAX_COUNT",
    "MAX_FRAME_BYTES",
    "METHODS",
    "MINOR",
    "SERVICE",
    "Beat",
    "Consumers",
    "Credit",
    "Deliver",
    "Forecast",
    "Forecasted",
    "Frame",
    "Health",
    "Hello",
    "Hint",
    "Hinted",
    "Late",
    "LateCause",
    "LateList",
    "LatenessCounts",
    "Leaving",
    "LeavingReason",
    "Mutate",
    "MutateFlag",
    "MutateTag",
    "Mutated",
    "Ping",
    "Pong",
    "Produce",
    "Produced",
    "PutFlag",
    "Scan",
    "ScanPage",
    "Settle",
    "SettleFlag",
    "Settled",
    "Stand",
    "Standing",
    "TagMutated",
    "TopicAction",
    "TopicList",
    "TopicLoads",
    "Topics",
    "Welcome",
]
