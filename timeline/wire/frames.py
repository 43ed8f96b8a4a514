"""The frames of the wire, as values: one dataclass per frame, with columns. Driver and broker meet only here.

`timeline.wire.encode(frame)` makes bytes of any of these. `timeline.wire.decode(data)` verifies bytes and makes the
frame. `schemas/fbs/timeline.fbs` defines the same for other languages. Byte strings are `Ragged`; absent items are
empty. A decoded frame's columns have equal lengths and every value is in its range. The wire does not check whether an
operation is legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Annotated, TypeAlias

import numpy as np

from timeline.columns import Bools, ColumnBatch, Form, Int64, Ragged, Range, Text, UInt8, UInt32, UInt64
from timeline.model import (
    MAX_BATCH,
    MAX_BUCKETS,
    MAX_DURATION_MS,
    MAX_HOLDER_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_TIME_MS,
    MUTATIONS,
    Answers,
    Duration,
    Headers,
    Holders,
    Ids,
    LateCause,
    LeavingReason,
    Operation,
    RetryFactor,
    RetryJitter,
    Rows,
    State,
    Status,
    Tags,
    Times,
    Topic,
    TopicSettings,
    Version,
)

MAJOR = 1
MINOR = 4
"""Version of this wire. Frames of a newer minor are read; unknown parts of them are skipped. Another major is
refused."""

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
    "Put": "unary_unary",
    "Take": "unary_unary",
    "Settle": "unary_unary",
    "Schedules": "unary_unary",
}
"""gRPC methods of `SERVICE`; requests and responses are frames."""

AIM_BYTES = 1024 * 1024
"""Frames aim at no more than this; only one large payload makes a larger one."""
MAX_FRAME_BYTES = 64 * 1024 * 1024 + 256 * 1024
"""No frame is larger: the largest payload and what goes with it."""
MAX_COUNT = 2**53 - 1
"""Counts and credits: what a double still holds exactly, for languages that have nothing else."""

DEFAULTS = TopicSettings()

REPLACE_MINOR = 3
PULL_MINOR = 3
"""The first minor of the methods Put, Take and Settle."""
SCHEDULES_MINOR = 4
"""The first minor of the method Schedules."""
MAX_SCHEDULES_LIMIT = 1_000
MAX_TAKE_MESSAGES = 1_000
MAX_TAKE_BYTES = 4 * 1024 * 1024
MAX_TAKE_WAIT_MS = 60_000
"""Bounds of one Take. A message larger than its bytes comes alone."""


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


Time: TypeAlias = Annotated[int, Range(0, MAX_TIME_MS)]
Tally: TypeAlias = Annotated[int, Range(0, MAX_COUNT)]
BucketNumber: TypeAlias = Annotated[int, Range(0, MAX_BUCKETS)]
ClockReading: TypeAlias = Annotated[float, Form("reading")]
ClockDifference: TypeAlias = Annotated[float, Form("difference")]
TopicName: TypeAlias = Annotated[str, Form("topic")]
OptionalTopic: TypeAlias = Annotated[str, Form("optional_topic")]
Name: TypeAlias = Annotated[str, Form("name_of")]
OptionalName: TypeAlias = Annotated[str, Form("optional_name")]
Sentence: TypeAlias = Annotated[str, Form("sentence")]
Addresses: TypeAlias = Annotated[tuple[str, ...], Form("addresses")]
Cursor: TypeAlias = Annotated[bytes, Form("cursor")]
Counts: TypeAlias = Annotated[Int64, Range(0, MAX_COUNT)]
TopicNames: TypeAlias = Annotated[Ragged, Form("topic_names")]
PutFlags: TypeAlias = Annotated[UInt8, Form("flags", (sum(PutFlag),))]
SettleFlags: TypeAlias = Annotated[UInt8, Form("flags", (sum(SettleFlag),))]
MutateFlags: TypeAlias = Annotated[UInt8, Form("flags", (sum(MutateFlag),))]
SettleOperations: TypeAlias = Annotated[
    UInt8, Form("among", (bytes((Operation.EXTEND, Operation.ACK, Operation.RELEASE, Operation.BURY)),))
]
"""The types of frames' fields. Each form has the name of the method of `codec.Body` that reads it."""


@dataclass(slots=True)
class Produce(ColumnBatch):
    """Up the Produce stream: n messages to put.

    `request` numbers the frame within its stream; answers may come in any order. `time_ms`: the due, or from now if the
    flag says IN. `expires_ms` 0: none. `headers` are encoded (`model.encode_headers`). `timeout_ms`: how long the
    caller will wait; 0: no limit. The broker drops messages that it did not start by then (UNAVAILABLE).
    """

    request: int
    topic: TopicName
    group: Name
    ids: Ragged
    birth: UInt64
    time_ms: Int64
    flags: PutFlags
    payloads: Ragged
    expires_ms: Int64 | None = None
    tags: Ragged | None = None
    headers: Ragged | None = None
    timeout_ms: Duration = 0


@dataclass(slots=True)
class Produced:
    """Down the Produce stream: an answer for each message of `request`. `retry_after_ms` > 0: wait that long before
    repeating what answered THROTTLED or UNAVAILABLE."""

    request: int
    answers: Answers
    retry_after_ms: Duration = 0


@dataclass(slots=True)
class Mutate(ColumnBatch):
    """MOVE, CANCEL, REVIVE or PURGE by ids. `op`: operation ids, kept when a call is repeated. `if_version` 0: any.
    `timeout_ms`: as of `Produce`."""

    topic: TopicName
    group: Name
    operation: Annotated[Operation, Form("one_of", (Operation, MUTATIONS))]
    ids: Ragged
    time_ms: Int64
    flags: MutateFlags
    if_version: Int64
    op: UInt64
    timeout_ms: Duration = 0


@dataclass(slots=True)
class MutateTag:
    """A chunk of MOVE or CANCEL by tag. `at_ms` (0: none) or `by_ms`, for MOVE. In the first call `cursor` is empty and
    `started_ms` 0; later ones return what the answer said. `timeout_ms`: as of `Produce`. A chunk that was not started
    by then is not done, and the call is refused as NOT_READY."""

    topic: TopicName
    group: Name
    operation: Annotated[Operation, Form("one_of", (Operation, (Operation.MOVE, Operation.CANCEL)))]
    tag: Annotated[bytes, Form("tag", (1,))]
    op: int
    at_ms: Time = 0
    in_ms: Annotated[int, Range(-1, MAX_DURATION_MS)] = -1
    by_ms: Annotated[int, Range(-MAX_DURATION_MS, MAX_DURATION_MS)] = 0
    leased: bool = False
    dry_run: bool = False
    cursor: Cursor = b""
    started_ms: Time = 0
    limit: Annotated[int, Range(1, MAX_BATCH)] = 5_000
    timeout_ms: Duration = 0


@dataclass(slots=True)
class Mutated:
    """Answers to a Mutate."""

    answers: Answers
    retry_after_ms: Duration = 0


@dataclass(slots=True)
class TagMutated:
    """A chunk is done: how many messages got each status code. `cursor` empty: the walk is over. `at_ms`: the absolute
    due of an `in_ms`, to be returned as `at_ms` with the next chunk."""

    counts: dict[int, int]
    cursor: bytes
    started_ms: int
    at_ms: int = 0


@dataclass(slots=True)
class Hello(ColumnBatch):
    """First frame up a Consume stream. `session`: random, one per consumer object; its tokens stay valid across
    reconnects. `ids birth version`: the leases in flight. `lease_ms` 0: the topic's. Credit is what the consumer has
    room for besides those leases. `room_…` is what it has room for without them (0: the credit)."""

    topic: TopicName
    consumer: Name
    session: int
    lease_ms: Duration
    credit_messages: Tally
    credit_bytes: Tally
    ids: Ids
    birth: UInt64
    version: Version
    room_messages: Tally = 0
    room_bytes: Tally = 0


@dataclass(slots=True)
class Credit:
    """More credit, up a Consume stream; adds up. With nothing in it, a heartbeat: answered by Beat. Consumers send one
    at least every `Welcome.heartbeat_ms`. `echo` comes back in the Beat. `ahead_ms`: by how much the consumer's clock
    is ahead of the broker's, give or take `error_ms` (below 0: it does not know). `room_messages`: the new size of its
    room while nothing is in flight (0: as before)."""

    messages: Tally = 0
    bytes: Tally = 0
    echo: int = 0
    ahead_ms: ClockDifference = 0.0
    error_ms: ClockDifference = -1.0
    room_messages: Tally = 0


@dataclass(slots=True)
class Settle(ColumnBatch):
    """n settles, up a Consume stream, of messages of the stream's topic leased to the stream's consumer. `operation`:
    EXTEND, ACK, RELEASE or BURY. `time_ms`: for EXTEND the lease from now, for RELEASE see SettleFlag. `op`: operation
    ids. `reasons`: BURY, RELEASE. The credit of the ended leases comes along, and counts by `credit_counts`.

    A Settle that is a call of its own names `topic` and `holder`. On a stream both are empty.
    """

    request: int
    ids: Ragged
    birth: UInt64
    version: Version
    operation: SettleOperations
    time_ms: Int64
    flags: SettleFlags
    op: UInt64
    reasons: Ragged | None = None
    credit_messages: Tally = 0
    credit_bytes: Tally = 0
    topic: OptionalTopic = ""
    holder: OptionalName = ""


@dataclass(slots=True)
class Welcome:
    """First frame down a Consume stream. `now_ms`: the broker's time. `lease_ms`, `max_lease_ms`: what this stream's
    leases last and may last. `max_payload_bytes`: the topic's. `brokers`: addresses to reconnect to, this one's too
    (may be empty)."""

    broker: Sentence
    now_ms: Time
    lease_ms: Duration
    max_lease_ms: Duration
    max_payload_bytes: Annotated[int, Range(0, MAX_PAYLOAD_BYTES)]
    heartbeat_ms: Duration
    brokers: Addresses = ()


@dataclass(slots=True)
class Take:
    """Ask for up to `max_messages` messages that are due. The answer is a Deliver. It comes when there is a message, or
    without any after `wait_ms`. `max_bytes`: of payloads and headers. `lease_ms` 0: the topic's."""

    topic: TopicName
    max_messages: Annotated[int, Range(1, MAX_TAKE_MESSAGES)] = 1
    max_bytes: Annotated[int, Range(1, MAX_TAKE_BYTES)] = AIM_BYTES
    wait_ms: Annotated[int, Range(0, MAX_TAKE_WAIT_MS)] = 0
    lease_ms: Duration = 0


@dataclass(slots=True)
class Deliver(ColumnBatch):
    """n messages, down a Consume stream, or the answer to a Take.

    `due_ms`: when each came due. `lease_until_ms`: when its lease ends. `leased_ms`: when the store call that leased
    them returned. `pushed_ms`: when this frame was made. All are on the broker's clock. So a consumer knows each
    lease's remaining time, and lateness can be taken apart. `max_deliveries`: how many the topic permits; 0: any
    number. `holder`: who has the leases of a Take's answer; empty on a stream. `retry_…`: the topic's settings.
    """

    leased_ms: Time
    pushed_ms: Time
    ids: Ids
    birth: UInt64
    version: Version
    due_ms: Times
    scheduled_ms: Times
    lease_until_ms: Times
    deliveries: UInt32
    payload_sum: UInt64
    payloads: Ragged
    headers: Headers | None = None
    tags: Tags | None = None
    max_deliveries: int = 0
    holder: OptionalName = ""
    retry_first_ms: Duration = DEFAULTS.retry_first_ms
    retry_factor_percent: RetryFactor = DEFAULTS.retry_factor_percent
    retry_cap_ms: Duration = DEFAULTS.retry_cap_ms
    retry_jitter_percent: RetryJitter = DEFAULTS.retry_jitter_percent


@dataclass(slots=True)
class Settled:
    """Answers to a Settle. For EXTEND, `answers.due_ms` is the lease's end."""

    request: int
    answers: Answers
    now_ms: Time


@dataclass(slots=True)
class Beat:
    """Answer to a heartbeat, with the broker's time."""

    now_ms: Time
    echo: int = 0


@dataclass(slots=True)
class Leaving:
    """Last frame down a Consume or Produce stream before the broker ends it. Up a Consume stream, with DRAINING: the
    consumer takes nothing more. The broker returns it behind all that it has sent, and still answers settles."""

    reason: Annotated[LeavingReason, Form("leaving_reason")]
    text: Sentence = ""


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
    """Return for which settles the message stays with its consumer by these answers: nothing happened, or the outcome
    is unknown. A number that this version does not know reads as UNKNOWN. After any other answer the consumer has it no
    longer, except after an OK to an extend."""
    held: Bools = _HELD[status]
    return held


def credit_counts(operation: UInt8, status: UInt8) -> bool:
    """Return whether the credit of a Settle with these operations, answered so, counts. It counts unless one of its
    acks, releases and burials left its message where it was. Extends do not matter."""
    return not status.any() or not bool((still_held(status) & (operation != Operation.EXTEND)).any())


# ── questions and their answers ──


@dataclass(slots=True)
class Scan:
    """Rows that match. `states` empty: all. `tag` empty: any. Due in [from, to), to 0: no bound. `ids`: only these.
    `limit` 0: all. `cursor`: where an earlier scan broke off. `bucket_from`, `bucket_to` (0: no bound): only those
    buckets. `holder`: only its messages under a live lease; then only `payload`, `cursor` and `limit` count."""

    topic: TopicName
    states: Annotated[tuple[State, ...], Form("states")] = ()
    tag: Annotated[bytes, Form("tag")] = b""
    due_from_ms: Time = 0
    due_to_ms: Time = 0
    ids: Ids | None = None
    payload: bool = False
    cursor: Cursor = b""
    limit: Tally = 0
    bucket_from: BucketNumber = 0
    bucket_to: BucketNumber = 0
    holder: OptionalName = ""


@dataclass(slots=True)
class ScanPage:
    """Some rows of a scan, with the broker's time (states are derived against it) and where to go on; empty: done."""

    rows: Rows
    now_ms: Time
    cursor: Cursor


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
    """The actions of a Topics request."""

    LIST = 0
    CREATE = 1
    UPDATE = 2
    DROP = 3
    SECRETS = 4
    ROTATE = 5


@dataclass(slots=True)
class Topics:
    """LIST all, CREATE `name` with `settings`, UPDATE those settings, or DROP. SECRETS asks for the secrets of its
    webhooks, and ROTATE makes a new one. `settings`: given names and values of `model.TopicSettings`. `revision` 0:
    any."""

    action: TopicAction
    name: str = ""
    settings: Mapping[str, int | str | bool] = field(default_factory=dict)
    revision: int = 0


@dataclass(slots=True)
class TopicList:
    """Answer to Topics: a status code with a sentence where it is no OK, and the records concerned (LIST: all).
    `secrets`: the valid ones, the newest first, in answer to SECRETS and ROTATE alone."""

    status: int
    detail: str
    topics: tuple[Topic, ...]
    secrets: tuple[str, ...] = field(default=(), repr=False)


class ScheduleAction(IntEnum):
    """The actions of a ScheduleCall."""

    CREATE = 0
    GET = 1
    LIST = 2
    UPDATE = 3
    PAUSE = 4
    RESUME = 5
    TRIGGER = 6
    BACKFILL = 7
    DELETE = 8


@dataclass(slots=True)
class ScheduleCall:
    """Ask about recurring schedules. The schema says what each action takes and does.

    `topic`, `name`: which one; LIST may leave both empty. `body`: JSON, a specification (CREATE) or fields of one
    (UPDATE). `revision` 0: any. `keep`: messages that were put ahead of their time stay. `op`: an operation id, kept
    when the call is repeated. `limit`: how many schedules (LIST) or times (GET).
    """

    action: Annotated[ScheduleAction, Form("one_of", (ScheduleAction,))]
    topic: OptionalTopic = ""
    name: str = ""
    body: str = ""
    revision: Annotated[int, Range(0)] = 0
    from_ms: Time = 0
    to_ms: Time = 0
    keep: bool = False
    dry_run: bool = False
    op: int = 0
    cursor: Cursor = b""
    limit: Annotated[int, Range(0, MAX_SCHEDULES_LIMIT)] = 100


@dataclass(slots=True)
class ScheduleAnswer:
    """Answer to a ScheduleCall: a status code with a sentence where it is no OK. `body`: JSON, a list of the schedules
    concerned, or of the message that a TRIGGER put. `cursor` empty: the last page. `counts`: how many messages, by what
    happened to them."""

    status: int
    detail: Sentence = ""
    body: str = ""
    cursor: Cursor = b""
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Late:
    """Late deliveries this broker remembers since `since_ms` (broker's clock), of `topic` and `id` when not empty."""

    since_ms: Time = 0
    topic: OptionalTopic = ""
    id: Annotated[bytes, Form("optional_id")] = b""
    limit: Annotated[int, Range(1, MAX_BATCH)] = 1_000


@dataclass(slots=True)
class LateList(ColumnBatch):
    """Newest last. `dropped`: how many the ring had to forget since the broker started. One without a consumer is not
    delivered by `delivered_ms`, which is now."""

    topics: TopicNames
    ids: Ids
    consumers: Holders
    due_ms: Times
    delivered_ms: Times
    cause: Annotated[UInt8, Form("codes", (LateCause, LateCause.UNEXPLAINED))]
    dropped: Tally
    now_ms: Time


class Health(IntEnum):
    """How a connected consumer is. HEALTHY gets messages. SILENT: no heartbeat of late. STALLED: does not take what is
    pushed. SET_ASIDE: its leases ran out one after another, so it gets none for a while."""

    HEALTHY = 0
    SILENT = 1
    STALLED = 2
    SET_ASIDE = 3


@dataclass(slots=True)
class StatusRequest:
    """Ask for a broker's status. `topic`: only this one if not empty. At most `limit` consumers."""

    topic: OptionalTopic = ""
    limit: Annotated[int, Range(1, MAX_BATCH)] = 1_000


@dataclass(slots=True)
class TopicLoads:
    """A broker's view of n topics.

    `available`, `waiting`, `next_due_ms` (0: none) are as the store counted them at `counted_ms` (0: not yet).
    `consumers`, `in_flight`, `credit` are of consumers connected here. `delivered`, `redelivered`: since the broker
    started. `buckets`: of the topic. `dealt`: how many of them this broker dispatches; None: a broker before 1.2.
    """

    topics: TopicNames
    available: Counts
    waiting: Counts
    next_due_ms: Times
    counted_ms: Times
    consumers: Counts
    in_flight: Counts
    credit: Counts
    delivered: Counts
    redelivered: Counts
    buckets: Counts | None = None
    dealt: Counts | None = None


@dataclass(slots=True)
class LatenessCounts:
    """`counts[k]` deliveries of `topics[k]` since the broker started were at most `up_to_ms[k]` late, and later than
    the next smaller bound. Grouped by topic, bounds ascending, the last one MAX_TIME_MS: no bound."""

    topics: TopicNames
    up_to_ms: Times
    counts: Counts


@dataclass(slots=True)
class Consumers:
    """n consumers connected to a broker, with their credit (room for more) and what they have in hand."""

    topics: TopicNames
    consumers: Annotated[Ragged, Text("a consumer", 1, MAX_HOLDER_BYTES)]
    health: Annotated[UInt8, Form("codes", (Health, Health.SILENT))]
    credit_messages: Counts
    credit_bytes: Counts
    in_flight: Counts


@dataclass(slots=True)
class BrokerStatus:
    """A broker's status.

    `trouble`: why it does not serve; empty while it does. `store`: where it keeps messages, without secrets.
    `store_ms`: the p99 of the store's leases, 0 if not known yet. `sync`: how it knows of other brokers, and any
    trouble with that. `warnings`: sentences on settings that weaken the store.
    """

    broker: Sentence
    version: Sentence
    now_ms: Time
    started_ms: Time
    trouble: Sentence
    store: Sentence
    store_ms: ClockReading
    topics: TopicLoads
    lateness: LatenessCounts
    consumers: Consumers
    sync: Sentence = ""
    warnings: Annotated[tuple[str, ...], Form("sentences")] = ()


@dataclass(slots=True)
class Ping:
    """`sent_ms`: the client's clock when it sent."""

    sent_ms: ClockReading


@dataclass(slots=True)
class Pong:
    """Four readings make an offset: `sent_ms` as in the Ping, `received_ms` and `answered_ms` on the broker's clock;
    the client adds its own time of arrival. `brokers`: addresses of all of the cluster, this
    one's too (may be empty). `step_ms`: by how much its wall clock has jumped, not followed yet."""

    sent_ms: ClockReading
    received_ms: ClockReading
    answered_ms: ClockReading
    broker: Sentence
    version: Sentence
    brokers: Addresses = ()
    step_ms: ClockDifference = 0.0


@dataclass(slots=True)
class Hint:
    """Broker to broker: messages of topics, each by its uid, came due in buckets that the receiver dispatches. Only the
    earliest of each topic is named. `broker`: the sender.

    Where `consumers` has an id, that consumer connected to the sender at `due_ms`, in one of the `sessions`, with the
    token that `bearers` names.
    """

    broker: Sentence
    topic_uid: Annotated[Int64, Range(0)]
    due_ms: Times
    consumers: Holders | None = None
    sessions: UInt64 | None = None
    bearers: Holders | None = None


@dataclass(slots=True)
class Hinted:
    """`known`: how many of the topics the receiver dispatches."""

    known: Tally = 0


Frame: TypeAlias = (
    Produce | Produced | Mutate | MutateTag | Mutated | TagMutated | Hello | Credit | Settle | Welcome | Deliver |
    Settled | Beat | Leaving | Scan | ScanPage | Forecast | Forecasted | Topics | TopicList | Late | LateList | Ping |
    Pong | StatusRequest | BrokerStatus | Hint | Hinted | Take | ScheduleCall | ScheduleAnswer
)  # fmt: skip
