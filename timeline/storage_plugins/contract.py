"""The storage contract: all that a broker asks of a store.

Small, batched, columnar. `now_ms` is always an argument: a store never reads a clock to decide. Every call is atomic
per message and never assumed to be atomic per batch; each message gets its own status. `timeline.leases` is the one
table of legal operations. Stores express it in their own way, and the conformance suite (`timeline check-store URL`)
holds them to it.

Failures. A call raises `StoreUnavailable` when nothing of it happened, and `StoreUnknown` when it may have happened.
Servers, disks and networks cause no other error. One message's trouble is its status.

Repeats. Each put carries a birth. Each move, cancel, release and revive carries an operation id (`op`, 64 random bits,
never 0). The same call sent again changes nothing twice: `Answers.repeat` says it was recognised.
"""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from timeline.columns import Bools, ColumnBatch, Indexes, Int64, Ragged, UInt8, UInt32, UInt64
from timeline.errors import Invalid
from timeline.kinds import kind_of
from timeline.model import MAX_TIME_MS, ROW_DTYPES, Answers, Operation, Rows, State, Topic, TopicSettings
from timeline.storage_plugins.errors import (
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
    TopicConflict,
)
from timeline.storage_plugins.versions import Versions


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The declarations of a plugin. The suite asserts both answers. Nothing else may be opted out of.

    `durable`: answered calls survive a kill -9 of the process that holds the data. `survives_failover`: and the loss of
    one of its servers. `shared`: several brokers may open it at once. `payload_limit_bytes`: largest payload.
    `own_clock`: `clock_ms` answers. `exact_counts`: `count_due` is exact, not an estimate.

    `lease_ahead_ms` is advice: how far ahead a broker may lease; longer if leases take long. `every_kind`: it asks
    `leases.decide` about each message of a kind of topic that is not `in_batches`, and so can hold all kinds.
    """

    durable: bool
    survives_failover: bool
    shared: bool
    payload_limit_bytes: int
    own_clock: bool
    exact_counts: bool
    lease_ahead_ms: int = 50
    every_kind: bool = False

    def check_kind(self, settings: TopicSettings) -> None:
        """Raise Invalid for a kind of topic that the store cannot hold."""
        if not (self.every_kind or kind_of(settings).in_batches):
            raise Invalid(f"this store holds no topics of kind {settings.kind!r}. Choose another kind or store")


@dataclass(frozen=True, slots=True)
class Opened:
    """The findings of `open` or `inspect`. `cluster_uid`: 32 hex digits, made once with the store. `server`: in words.
    `warnings`: a sentence for each server setting that weakens the declared durability."""

    cluster_uid: str
    server: str
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Puts(ColumnBatch):
    """A batch to put, n messages as columns. Ids may repeat; a later one meets the earlier one.

    `move`: True for `if_exists="move"`. `replace`: True for `if_exists="replace"`; never both. `due_ms` and
    `expires_ms` are absolute (0: no expiry). `headers` are encoded (`model.encode_headers`). `payload_sum` is
    `model.payload_sums`.

    `payload_bytes`: the sizes of payloads if some are offloaded and `payloads` has only pointers to them (see
    `offload`); None if `payloads` has them all.
    """

    ids: Ragged
    birth: UInt64
    due_ms: Int64
    expires_ms: Int64
    groups: Ragged
    tags: Ragged
    payload_sum: UInt64
    payloads: Ragged
    headers: Ragged
    move: Bools
    replace: Bools
    payload_bytes: Int64 | None = None

    @property
    def sizes(self) -> Int64:
        """The size of each payload, wherever it lies: rows' `payload_bytes`, and the bytes that count in a grant."""
        return self.payloads.sizes if self.payload_bytes is None else self.payload_bytes

    def never_deliverable(self, now_ms: int) -> Bools:
        """Return which puts have an expiry that is not after their due and after `now_ms`: INVALID, unless they are
        repeats."""
        return (self.expires_ms > 0) & (self.expires_ms <= np.maximum(self.due_ms, now_ms))


PUT_NUMBERS = tuple(field.name for field in Puts.columns if field.name in ROW_DTYPES and not field.optional)
"""The numeric columns of `Puts` that are stored as they are, under the names that they have in `Rows`."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Permission to lease for one consumer: at most `count` messages and `max_bytes` of payloads and headers,
    `lease_ms` each. If `alone` is True (the consumer has nothing in flight), one larger message may be leased by
    itself."""

    holder: bytes
    count: int
    lease_ms: int
    max_bytes: int
    alone: bool = False

    def less(self, count: int, spent_bytes: int) -> Grant:
        """Return what it still allows once `count` messages of `spent_bytes` were leased by it."""
        max_bytes, alone = self.max_bytes - spent_bytes, self.alone and not count
        return replace(self, count=self.count - count, max_bytes=max_bytes, alone=alone)


@dataclass(slots=True)
class LeasedRows:
    """The result of `lease_due`.

    `rows`: the leased messages as they stand now, with payloads and headers: version and deliveries raised, `due_ms` at
    the lease's end, holder set. `grant`: for each row the index into the call's grants. `was_due_ms`: its due before.
    `prior_holders`: the holder whose lease ran out; empty otherwise.

    `next_due_ms`: the earliest time at which more may become leasable in these buckets; None when nothing is pending. A
    message that was not leased for want of grants counts with its own due, which may be past. `expired`: how many
    expired messages were met and removed. `buried`: rows, without payloads, that this call buried after
    `max_deliveries`. `damaged`: indexes of rows whose payload is gone: its bytes are empty, and the broker buries them.
    `commit_seq`: see `Store.tells_commit_seq`.
    """

    rows: Rows
    grant: UInt32
    was_due_ms: Int64
    prior_holders: Ragged
    next_due_ms: int | None
    expired: int = 0
    buried: Rows = field(default_factory=Rows.empty)
    damaged: tuple[int, ...] = ()
    commit_seq: int = 0

    def take(self, at: Indexes) -> LeasedRows:
        """Return the rows at these indexes, in that order."""
        place = {old: new for new, old in enumerate(at.tolist())}
        return replace(
            self,
            rows=self.rows.take(at),
            grant=self.grant[at],
            was_due_ms=self.was_due_ms[at],
            prior_holders=self.prior_holders.take(at),
            damaged=tuple(sorted(place[old] for old in self.damaged if old in place)),
        )

    @classmethod
    def empty(cls, next_due_ms: int | None = None) -> LeasedRows:
        """Return the answer of a lease that leased nothing."""
        none = np.zeros(0, dtype=np.int64)
        return cls(Rows.empty(payload=True), none.astype(np.uint32), none, Ragged.of([]), next_due_ms)


@dataclass(slots=True)
class Settles(ColumnBatch):
    """A batch of settles, n as columns, operations mixed freely.

    `operation`: `Operation` numbers out of `model.SETTLES`. `holders`: who settles. `time_ms`, absolute: the lease's
    new end (EXTEND, REGRANT) or the due that is asked (RELEASE). `reasons`: for BURY and RELEASE; empty is none.
    `unseen`: RELEASE of a message that no user's code saw. It counts one delivery less, `scheduled_ms` stays, and due =
    max(now, scheduled).
    """

    ids: Ragged
    birth: UInt64
    version: Int64
    holders: Ragged
    operation: UInt8
    time_ms: Int64
    op: UInt64
    unseen: Bools
    reasons: Ragged


@dataclass(slots=True)
class Mutations(ColumnBatch):
    """A batch of one producer operation (MOVE, CANCEL, REVIVE or PURGE) over n ids. `groups`: who asks, each.
    `due_ms`: the asked due (MOVE, REVIVE). `if_version`: what it must have, 0: any. `leased`: CANCEL the leased too."""

    operation: Operation
    ids: Ragged
    groups: Ragged
    due_ms: Int64
    if_version: Int64
    leased: Bools
    op: UInt64


@dataclass(frozen=True, slots=True)
class TagMutation:
    """MOVE or CANCEL of all messages with `tag` of `group`, put at or before `started_ms`.

    A MOVE goes to `due_ms` (absolute). If that is 0, it goes by `by_ms` from each message's scheduled time. Beyond
    `latest_ms`, the topic's horizon as the caller counts it, it is INVALID.

    The same `op` serves the whole walk: a message that carries it already counts as done. A shift takes only dues that
    were asked for at or before `started_ms`. Messages moved, released or revived since then stay as they are,
    uncounted. So a repeated chunk changes nothing twice. `dry_run`: count, change nothing.
    """

    operation: Operation
    tag: bytes
    group: bytes
    started_ms: int
    op: int
    due_ms: int = 0
    by_ms: int = 0
    latest_ms: int = MAX_TIME_MS
    leased: bool = False
    dry_run: bool = False

    @property
    def shifts(self) -> bool:
        """Whether each message moves by a shift, from its own due."""
        return self.operation is Operation.MOVE and self.by_ms != 0

    def meets(self, put_ms: int, asked_ms: int, last_op: int) -> bool:
        """Return whether it takes a message that was put at `put_ms`, its due asked for at `asked_ms`."""
        asked_since = self.shifts and asked_ms > self.started_ms and last_op != self.op
        return put_ms <= self.started_ms and not asked_since


@dataclass(frozen=True, slots=True)
class TagStep:
    """A chunk of a tag operation. `counts`: how many answered each status code. `cursor`: None when the walk is done.
    `earliest_due_ms`: the earliest due among the moved; None: none moved."""

    counts: dict[int, int]
    cursor: bytes | None
    earliest_due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ScanFilter:
    """The filter of a scan. `states`: empty for all that live. `tag`: empty for any. Due in [due_from_ms, due_to_ms),
    to 0: no bound. `ids`: if not None, only these."""

    states: frozenset[State] = frozenset()
    tag: bytes = b""
    due_from_ms: int = 0
    due_to_ms: int = 0
    ids: Ragged | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Rows of a scan. `cursor`: where to go on; None: the scan is done. A page may be empty and not the last."""

    rows: Rows
    cursor: bytes | None


@dataclass(frozen=True, slots=True)
class Swept:
    """How many of each kind a sweep removed. `more`: whether there are more."""

    expired: int = 0
    forgotten: int = 0
    dead_purged: int = 0
    orphans: int = 0
    more: bool = False


class Store(ABC):
    """A store. Made by `timeline.storage_plugins.open_store(url)`; calls may run concurrently on one event loop.

    `topic` arguments are the record as the caller knows it; rows belong to `topic.uid`, rules read `topic.settings`.
    `buckets`: the bucket numbers to look into, None for all.
    """

    capabilities: Capabilities
    tells_commit_seq = False
    """Whether calls are done one by one and numbered: a put in `Answers.commit_seq`, a lease in `LeasedRows.commit_seq`
    (0: none). A lease has seen every put with a lower number. A broker may then call for it while the put is on its
    way."""
    file: Path | None = None
    """The file that keeps everything, which `open` makes if it is missing. None for a store elsewhere."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "in_turn" in vars(cls):
            warn_renamed(f"{cls.__name__}.in_turn", "tells_commit_seq, and `turn` in answers commit_seq")

    @abstractmethod
    async def open(self) -> Opened:
        """Connect, create or migrate the schema, and read server settings. While the store is open, return the same
        again.

        Raise StoreRefused with what to change, or StoreUnavailable when the server cannot be reached now. It then holds
        no lock and no connection. It may be called again on this object, as after `close`.
        """

    async def inspect(self) -> Opened:
        """Return what is there now, of a store that is open: ask what `open` asks, make and change nothing.
        `cluster_uid` is empty if the store has none: another server, or one that lost everything. `capabilities` follow
        the settings.

        Raise StoreRefused for a setting with which `open` would raise it. Raise StoreUnavailable when the server does
        not answer or the store is not open. This default only repeats what the opening found: `timeline check-store`
        says so.
        """
        return await self.open()

    @abstractmethod
    async def close(self) -> None:
        """Finish running calls and release everything. Twice is harmless."""

    @abstractmethod
    async def check(self) -> None:
        """Return if a write would work now; else raise StoreUnavailable with the reason."""

    async def migrate(self, contract: bool) -> Versions | None:
        """Return the schema's versions, None without a schema. `contract`: remove what only the version before
        needed."""
        return None

    async def clock_ms(self) -> float | None:
        """Return the server's own wall clock in milliseconds UTC; None if it has none (capability `own_clock`)."""
        return None

    @abstractmethod
    async def topics(self) -> list[Topic]:
        """Return all topic records, by name."""

    @abstractmethod
    async def create_topic(self, topic: Topic) -> Topic:
        """Store the record, and return the one that stands. The same settings under an existing name return the
        existing record; other settings raise TopicConflict, which names the difference."""

    @abstractmethod
    async def update_topic(self, topic: Topic) -> Topic:
        """Replace the record whose revision is `topic.revision` by `topic` with revision + 1, and return that. Raise
        TopicConflict when it changed since or is gone."""

    @abstractmethod
    async def drop_topic(self, topic: Topic) -> bool:
        """Remove the record, then the topic's rows and payloads. Return False when no such record (name and uid) stood.
        Rows of a dropped topic are never seen again, whether or not they are gone yet."""

    @abstractmethod
    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        """Store each message whose id is absent: OK with version 1. An expired message without a live lease is removed
        first, as `sweep` would, and `Answers.displaced` says so.

        For other ids `leases` decides: DUPLICATE (with version and due as it stands), FORBIDDEN, EXISTS, or the answer
        of the move. A remembered id answers DUPLICATE with `settled`, for `remember_ms`, swept or not. `replace` puts
        the whole new message in the place of the old one, payload included. At each moment exactly one of them is
        there. A message that can never be delivered is INVALID.

        When the call returns, each OK is as safe as the store makes it. Payloads are written first, metadata second. A
        topic that was dropped answers NOT_FOUND for each message, here and everywhere.
        """

    @abstractmethod
    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        """Lease what is due, earliest first, dealt round-robin over the grants (`leases.deal`).

        `overdue_ms` > 0 (the sweep over buckets of other brokers): only what is due by now_ms − overdue_ms, nothing
        ahead of its time. `next_due_ms` then says nothing.

        Eligible: due ≤ now_ms, not dead, not expired. If a holder is left from a lease that ran out: due ≤ now_ms −
        redelivery_backoff_ms. Ahead of its time: now_ms < due ≤ due_before_ms, without a holder. Effect: due = max(now,
        due) + lease_ms, holder, version + 1, deliveries + 1, atomically against version and due as read.

        Within a bucket rows come by (due, id). More than granted is never allowed. Fewer is allowed when no more is
        eligible or bytes ran out. It is also allowed when very much had to be removed or buried on the way; then
        `next_due_ms` is past already. Messages delivered `max_deliveries` times (0: no limit) are buried instead, with
        that reason. Expired messages are removed. Neither uses up a grant. Empty grants just answer `next_due_ms`.
        """

    @abstractmethod
    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        """Settle each message whose birth, version and holder match. Others answer FENCED, NOT_FOUND and so on.

        EXTEND: `due_ms` is the lease's end. ACK: `late` if the lease had run out. RELEASE, BURY and REGRANT follow
        `leases`. Version and due are answered as they stand afterwards.
        """

    @abstractmethod
    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        """Move, cancel, revive or purge by id, with a status for each."""

    @abstractmethod
    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        """Do one chunk of at most `limit` messages of a tag operation, walking (bucket, id) from `cursor` (empty: from
        the start). Messages that are there from the start until the walk passes get their status counted."""

    @abstractmethod
    async def held_by(self, topic: Topic, now_ms: int, holder: bytes, cursor: bytes, limit: int) -> Page:
        """Return what `holder` has under a live lease (due > now_ms), with payloads; paged like `scan`."""

    @abstractmethod
    async def scan(
        self, topic: Topic, now_ms: int, where: ScanFilter, cursor: bytes, limit: int, payload: bool
    ) -> Page:
        """Return rows that match, walking (bucket, id) from `cursor`. A row that is there throughout is seen at least
        once, though it moves. Expired messages are rows until they are removed: brokers leave them out. `payload`: with
        payloads and headers; then a page also ends near 1 MiB of payloads.

        A cursor begins with the bucket that the walk is in, 4 bytes big endian. These alone start a walk at that
        bucket, unless there are `ids`.
        """

    @abstractmethod
    async def count_due(self, topic: Topic, edges_ms: Int64, held: bool = False) -> Int64:
        """Return for m ascending edges m − 1 counts of living rows without holder with edge[i] ≤ due < edge[i + 1].

        `held`: of those with a holder instead. Their due is the end of their lease."""

    @abstractmethod
    async def next_due(self, topic: Topic, buckets: Sequence[int] | None, after_ms: int) -> int | None:
        """Return the earliest due > after_ms of living rows, held ones too; None when there is none."""

    async def next_dues(self) -> dict[int, int] | None:
        """Return the earliest due of each topic that has living rows, by the topic's uid, as `next_due` answers it.
        None, the default: the store would have to look at each topic by itself."""
        return None

    @abstractmethod
    async def sweep(self, topic: Topic, now_ms: int, limit: int) -> Swept:
        """Remove up to `limit` of each kind: expired messages without a live lease, remembered ids past their time, and
        dead letters past retention. Also payloads without metadata that are older than any put's deadline."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """In bytes: what is left, and what there is in all."""

    free_bytes: int
    size_bytes: int


@runtime_checkable
class TellsDiskSpace(Protocol):
    """A store that knows where its data lies. A store that stands before another one answers None if that does not
    know."""

    async def room(self) -> DiskSpace | None:
        """Return the disk space. Raise StoreError, as every call."""


def disk_space_of(path: str | os.PathLike[str]) -> DiskSpace:
    """Return the space of the file system of `path`, as a process without privileges has it. Raise OSError."""
    found = os.statvfs(path)
    return DiskSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def __getattr__(name: str) -> type:
    if name == "Leased":
        warn_renamed("contract.Leased", "LeasedRows")
        return LeasedRows
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def warn_renamed(old: str, new: str) -> None:
    """Warn a plugin that it uses an old name, which the next version will not have."""
    warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=3)


__all__ = [
    "Answers", "Capabilities", "DiskSpace", "Grant", "Indexes", "LeasedRows", "Mutations", "Opened", "Page", "Puts",
    "ScanFilter", "Settles", "Store", "StoreError", "StoreFull", "StoreRefused", "StoreUnavailable", "StoreUnknown",
    "Swept", "TagMutation", "TagStep", "TellsDiskSpace", "TopicConflict", "disk_space_of",
]  # fmt: skip
