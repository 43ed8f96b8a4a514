"""What crosses the wire, as values: one dataclass a frame, columns inside. Driver and broker meet here
and nowhere else.

`timeline.wire.encode(frame)` makes bytes of any of these, `timeline.wire.decode(data)` verifies bytes and makes the
frame; `schemas/fbs/timeline.fbs` says the same for authors in other languages. Byte strings (ids, tags, headers,
payloads, reasons) are `Ragged`; absent items are empty. A decoded frame's columns have equal lengths and every value
is in its range; whether an operation is legal is not the wire's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import TypeAlias

import numpy as np

from timeline.columns import Bools, Int64, Ragged, UInt8, UInt32, UInt64
from timeline.model import Answers, LeavingReason, Operation, Rows, State, Status, Topic

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
    `reasons`: BURY, RELEASE. The credit of what they end rides along, and counts by `credit_counts`."""

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


_HELD = np.ones(256, dtype=np.bool_)
for _status in Status:
    _HELD[_status.code] = _status in (
        Status.INVALID,
        Status.TOO_LARGE,
        Status.THROTTLED,
        Status.UNAVAILABLE,
        Status.UNKNOWN,
    )


def still_held(status: UInt8) -> Bools:
    """Where an answer to a settle leaves the message with its consumer: nothing of it happened, or nobody knows. A
    number that this version does not know reads as UNKNOWN. After any other the consumer has it no longer, but for an
    extend that was answered OK."""
    held: Bools = _HELD[status]
    return held


def credit_counts(operation: UInt8, status: UInt8) -> bool:
    """Whether the credit of a Settle with these operations, answered so, counts: none of its acks, releases and burials
    left its message where it was. Otherwise none of it does. Extends neither give credit nor hold it back."""
    return not status.any() or not bool((still_held(status) & (operation != Operation.EXTEND)).any())


# ── questions and their answers ──


@dataclass(slots=True)
class Scan:
    """Rows that match: `states` (empty: all), `tag` (empty: any), due in [from, to) (to 0: no bound), or just `ids`.
    `limit` 0: all. `cursor`: where an earlier scan broke off. `bucket_from`, `bucket_to` (0: no bound): only those
    buckets. `holder`: only what it holds under a live lease; all but `payload`, `cursor` and `limit` is passed over
    then."""

    topic: str
    states: tuple[State, ...] = ()
    tag: bytes = b""
    due_from_ms: int = 0
    due_to_ms: int = 0
    ids: Ragged | None = None
    payload: bool = False
    cursor: bytes = b""
    limit: int = 0
    bucket_from: int = 0
    bucket_to: int = 0
    holder: str = ""


@dataclass(slots=True)
class ScanPage:
    """Some rows of a scan, with the broker's time (states are derived against it) and where to go on; empty: done."""

    rows: Rows
    now_ms: int
    cursor: bytes


@dataclass(slots=True)
class Forecast:
    """How many messages come due per step of a window from now. At most 10,000 steps."""

    topic: str
    window_ms: int
    step_ms: int


@dataclass(slots=True)
class Forecasted:
    """`counts[i]` come due in [edges_ms[i], edges_ms[i + 1]); `overdue` were due before edges_ms[0]."""

    edges_ms: Int64
    counts: Int64
    overdue: int
    exact: bool


class TopicAction(IntEnum):
    """What a Topics request asks for."""

    LIST = 0
    CREATE = 1
    UPDATE = 2
    DROP = 3


@dataclass(slots=True)
class Topics:
    """LIST all; CREATE `name` with `settings` (names and values of `model.TopicSettings`, those that are given);
    UPDATE those settings; DROP. `revision` 0: whatever stands."""

    action: TopicAction
    name: str = ""
    settings: Mapping[str, int | str | bool] = field(default_factory=dict)
    revision: int = 0


@dataclass(slots=True)
class TopicList:
    """Answer to Topics: a status code with a sentence where it is no OK, and the records concerned (LIST: all)."""

    status: int
    detail: str
    topics: tuple[Topic, ...]


@dataclass(slots=True)
class Late:
    """Late deliveries this broker remembers since `since_ms` (broker's clock), of `topic` and `id` when not empty."""

    since_ms: int = 0
    topic: str = ""
    id: bytes = b""
    limit: int = 1_000


@dataclass(slots=True)
class LateList:
    """Newest last. `dropped`: how many the ring had to forget since the broker started. One without a consumer is not
    delivered by `delivered_ms`, which is now."""

    topics: Ragged
    ids: Ragged
    consumers: Ragged
    due_ms: Int64
    delivered_ms: Int64
    cause: UInt8
    dropped: int
    now_ms: int


class Health(IntEnum):
    """How a connected consumer is. HEALTHY gets messages. SILENT: no heartbeat of late. STALLED: does not take what is
    pushed. SET_ASIDE: its leases ran out one after another, so it gets none for a while."""

    HEALTHY = 0
    SILENT = 1
    STALLED = 2
    SET_ASIDE = 3


@dataclass(slots=True)
class StatusRequest:
    """How does this broker stand? Of `topic` only, when not empty; at most `limit` consumers."""

    topic: str = ""
    limit: int = 1_000


@dataclass(slots=True)
class TopicLoads:
    """What a broker knows of n topics. `available`, `waiting`, `next_due_ms` (0: none): as the store counted them at
    `counted_ms` (0: not yet). `consumers`, `in_flight`, `credit`: of those connected here. `delivered`, `redelivered`:
    since it started. `buckets`: of the topic; `dealt`: how many of them this broker
    deals (None: a broker before 1.2)."""

    topics: Ragged
    available: Int64
    waiting: Int64
    next_due_ms: Int64
    counted_ms: Int64
    consumers: Int64
    in_flight: Int64
    credit: Int64
    delivered: Int64
    redelivered: Int64
    buckets: Int64 | None = None
    dealt: Int64 | None = None


@dataclass(slots=True)
class LatenessCounts:
    """`counts[k]` deliveries of `topics[k]` since the broker started were at most `up_to_ms[k]` late, and later than
    the next smaller bound. Grouped by topic, bounds ascending, the last one MAX_TIME_MS: no bound."""

    topics: Ragged
    up_to_ms: Int64
    counts: Int64


@dataclass(slots=True)
class Consumers:
    """n consumers connected to a broker, with their credit (room for more) and what they have in hand."""

    topics: Ragged
    consumers: Ragged
    health: UInt8
    credit_messages: Int64
    credit_bytes: Int64
    in_flight: Int64


@dataclass(slots=True)
class BrokerStatus:
    """How a broker stands. `trouble`: why it does not serve; empty while it does. `store`: where it keeps messages,
    without secrets; `store_ms`: the p99 of the store's leases, 0 when not known yet. `sync`: how it knows
    of the others, and what is wrong with that now. `warnings`: sentences on settings that weaken the store."""

    broker: str
    version: str
    now_ms: int
    started_ms: int
    trouble: str
    store: str
    store_ms: float
    topics: TopicLoads
    lateness: LatenessCounts
    consumers: Consumers
    sync: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Ping:
    """`sent_ms`: the client's clock when it sent."""

    sent_ms: float


@dataclass(slots=True)
class Pong:
    """Four readings make an offset: `sent_ms` as in the Ping, `received_ms` and `answered_ms` on the broker's clock;
    the client adds its own time of arrival. `brokers`: addresses of all of the cluster, this
    one's too (may be empty). `step_ms`: by how much its wall clock has jumped, not followed yet."""

    sent_ms: float
    received_ms: float
    answered_ms: float
    broker: str
    version: str
    brokers: tuple[str, ...] = ()
    step_ms: float = 0.0


@dataclass(slots=True)
class Hint:
    """Broker to broker: messages of topics, each by its uid, come due anew in buckets that the receiver deals; of each
    the earliest. `broker`: who says so."""

    broker: str
    topic_uid: Int64
    due_ms: Int64


@dataclass(slots=True)
class Hinted:
    """Of how many of the topics the receiver has a dealer."""

    known: int = 0


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
    | StatusRequest
    | BrokerStatus
    | Hint
    | Hinted
)
