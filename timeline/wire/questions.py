"""Frames that ask a broker something and their answers: scan, forecast, topics, late deliveries, ping. `frames.py` has
those that a message travels in, and names these too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from timeline.columns import Int64, Ragged, UInt8
from timeline.model import Rows, State, Topic


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
class Stand:
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
class Standing:
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
