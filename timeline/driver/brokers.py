"""The status of brokers: the load of each, its lateness, and its consumers."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from timeline.columns import Int64
from timeline.model import MAX_TIME_MS
from timeline.wire import BrokerStatus, Consumers, Health, LatenessCounts, TopicLoads


@dataclass(frozen=True, slots=True)
class TopicLoad:
    """A broker's view of a topic.

    `available`, `waiting`, `next_due_ms` (0: nothing is pending): as counted at `counted_ms`, every few seconds; 0: not
    yet. `consumers`, `in_flight`, `credit`: of the consumers connected to it. `delivered`, `redelivered`: since it
    started. `buckets`: of the topic. `dealt`: how many of them it dispatches. Both are 0 from an older broker.
    """

    topic: str
    available: int
    waiting: int
    next_due_ms: int
    counted_ms: int
    consumers: int
    in_flight: int
    credit: int
    delivered: int
    redelivered: int
    buckets: int = 0
    dealt: int = 0


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """A connected consumer: its free credit, and its messages in flight."""

    topic: str
    id: str
    health: Health
    credit: int
    credit_bytes: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class LatenessHistogram:
    """How late deliveries were. `counts[k]` were at most `up_to_ms[k]` late, and later than the bound before. The last
    has no bound (None)."""

    up_to_ms: tuple[int | None, ...]
    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """The number of deliveries."""
        return sum(self.counts)

    def since(self, before: LatenessHistogram) -> LatenessHistogram:
        """Return the deliveries after `before`, an earlier answer of the same broker."""
        if before.up_to_ms != self.up_to_ms or any(
            now < then for now, then in zip(self.counts, before.counts, strict=True)
        ):
            return self  # the broker has restarted since
        counts = (now - then for now, then in zip(self.counts, before.counts, strict=True))
        return LatenessHistogram(self.up_to_ms, tuple(counts))

    def plus(self, other: LatenessHistogram) -> LatenessHistogram:
        """Return the sum of two brokers with the same bounds."""
        counts = (one + more for one, more in zip(self.counts, other.counts, strict=True))
        return LatenessHistogram(self.up_to_ms, tuple(counts))

    def at_most(self, share: float) -> timedelta | None:
        """Return the bound that `share` (0 to 1) of the deliveries kept. None: no deliveries. timedelta.max: above all
        bounds."""
        if not self.total:
            return None
        left = share * self.total
        for bound_ms, count in zip(self.up_to_ms, self.counts, strict=True):
            left -= count
            if left <= 0:
                return timedelta.max if bound_ms is None else timedelta(milliseconds=bound_ms)
        return timedelta.max

    def share_within(self, ms: int) -> float | None:
        """Return the share (0 to 1) of the deliveries that were surely at most `ms` milliseconds late. None: no
        deliveries."""
        if not self.total:
            return None
        bounds = zip(self.up_to_ms, self.counts, strict=True)
        return sum(count for up_to, count in bounds if up_to is not None and up_to <= ms) / self.total


@dataclass(frozen=True, slots=True)
class BrokerStanding:
    """The status of one broker.

    `trouble`: why it does not serve; empty while it does. `store`: where it keeps messages. `store_ms`: the p99 of its
    lease calls there, 0 if not known. `lateness`: by topic, since it started. `sync`: its place in the cluster.
    `warnings`: a sentence per setting of the store's server that weakens its promises; none from an older broker.
    """

    address: str
    broker: str
    version: str
    now_ms: int
    started_ms: int
    trouble: str
    store: str
    store_ms: float
    topics: tuple[TopicLoad, ...]
    lateness: dict[str, LatenessHistogram]
    consumers: tuple[ConsumerStatus, ...]
    sync: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Standings:
    """The status of all known brokers. `unreachable`: addresses that did not answer, with the reason. `found`: what is
    there, if no connection could be made; see `TimelineError.found`."""

    brokers: tuple[BrokerStanding, ...]
    unreachable: dict[str, str]
    found: dict[str, tuple[str, ...]] = field(default_factory=dict)


_ALIKE = ("broker", "version", "now_ms", "started_ms", "trouble", "store", "store_ms", "sync", "warnings")


def standing_of(address: str, told: BrokerStatus) -> BrokerStanding:
    """Return what the broker at `address` said."""
    return BrokerStanding(
        address=address,
        **{name: getattr(told, name) for name in _ALIKE},
        topics=_loads(told.topics),
        lateness=_lateness(told.lateness),
        consumers=_connected(told.consumers),
    )


def _loads(told: TopicLoads) -> tuple[TopicLoad, ...]:
    columns: tuple[Int64, ...] = (
        told.available, told.waiting, told.next_due_ms, told.counted_ms, told.consumers, told.in_flight, told.credit,
        told.delivered, told.redelivered,
    )  # fmt: skip
    if told.buckets is not None and told.dealt is not None:
        columns = (*columns, told.buckets, told.dealt)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(TopicLoad(name.decode(), *row) for name, row in zip(told.topics.tolist(), rows, strict=True))


def _lateness(told: LatenessCounts) -> dict[str, LatenessHistogram]:
    bounds: dict[str, list[int | None]] = {}
    counts: dict[str, list[int]] = {}
    for name, up_to_ms, count in zip(told.topics.tolist(), told.up_to_ms.tolist(), told.counts.tolist(), strict=True):
        bounds.setdefault(name.decode(), []).append(None if up_to_ms == MAX_TIME_MS else up_to_ms)
        counts.setdefault(name.decode(), []).append(count)
    return {name: LatenessHistogram(tuple(bounds[name]), tuple(counts[name])) for name in bounds}


def _connected(told: Consumers) -> tuple[ConsumerStatus, ...]:
    numbers = zip(told.credit_messages.tolist(), told.credit_bytes.tolist(), told.in_flight.tolist(), strict=True)
    names = zip(told.topics.tolist(), told.consumers.tolist(), told.health.tolist(), strict=True)
    return tuple(
        ConsumerStatus(topic.decode(), id.decode(), Health(health), *row)
        for (topic, id, health), row in zip(names, numbers, strict=True)
    )
