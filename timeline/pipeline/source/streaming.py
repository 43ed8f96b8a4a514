"""Messages of a timeline as a stream: each micro-batch is what came due, leased until the query has done with it.

The offset says which micro-batch of which query. Its messages stand on the timeline, under one holder for each of its
partitions, named by query, batch and partition. A query that is started again from its checkpoint reads the batch that
it had not finished again, as far as its leases last; what it never committed comes back when they run out. At least
once, with `id` and `version` to tell repeats apart.

A micro-batch is what its partitions leased, and that is settled before anybody reads it: whatever a holder has when a
task has read it is what any other try of the task reads, and what `commit` acknowledges, no more. So only the first try
of a task leases, and only until `lease_by_ms` on the broker's clock. Any other looks, without being in its way, until
something is held or that time is over, and then takes the holder over: that ends a lease under way, and what is held
from then on is all there will be. Who was taken over leases nothing more. A broker takes over at itself alone: where
there are several, what another try finds may not be all yet, and it waits until that time is over.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from timeline.clock import Clock
from timeline.driver.client import Timeline
from timeline.errors import Invalid, Superseded, TimelineError, Unavailable
from timeline.model import PAYLOAD_DAMAGED, Operation, Rows, Topic, payload_sums
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.source.columns import CONTENT, READ, PageRows, arrow_schema, check_read, record_batch
from timeline.pipeline.source.options import MAX_ROWS, SourceOptions

LEASING_MS = 30_000
"""After a batch was planned, its tasks may lease for so long."""
LATE_MS = 10_000
"""A lease that began in time is over by then."""
MORE_MS = 50.0
"""What comes due later than so long after the last part is the next batch's."""
LOOK_MS = 250
"""A try that may not lease looks so often whether the one that may has."""

log = logging.getLogger("timeline.pipeline")
DEFAULT_LEASE_MS = 600_000
LOOK_EVERY_S = 0.02
BLIND_EVERY_MS = 15_000
"""What a lease that ran out left is not counted as due: so often a batch is tried without knowing of any."""
COMMIT_TRIES = 5
Offset = dict[str, Any]


@dataclass
class HolderPartition(InputPartition):
    """One partition of a micro-batch. `most`: rows it may lease. `again`: the batch was planned before, by a query that
    ended; nothing is leased for it any more."""

    topic: str
    holder: str
    most: int
    lease_ms: int
    lease_by_ms: int
    again: bool


def holder_of(query: str, batch: int, part: int) -> str:
    """The holder of a partition of a micro-batch."""
    return f"spark/{query}/{batch}/{part}"


async def gather(client: Timeline, share: HolderPartition, first_try: bool) -> None:
    """What the partition is to have is under its holder, and will not be more. `first_try`: of the task."""
    if first_try and not share.again and await _leased(client, share):
        return
    while True:
        found, now_ms = await _look(client, share)
        left_ms = share.lease_by_ms + LATE_MS - now_ms
        over = left_ms <= 0
        if (found or over) and (await _brokers(client, share) <= 1 or over):
            return
        # Where there are several, the first try may be at another broker, where nobody has taken it over.
        await asyncio.sleep((left_ms if found else min(left_ms, LOOK_MS)) / 1000.0)


async def _brokers(client: Timeline, share: HolderPartition) -> int:
    """Takes the holder over, which ends a lease under way at the broker that is reached; how many brokers there are."""
    try:
        async with client.holding(share.topic, share.holder, f"{share.lease_ms}ms") as holding:
            assert holding.welcome is not None
            return len(holding.welcome.brokers)
    except Superseded:
        return 1  # by another try at this broker, which leases no more than this one does


async def _leased(client: Timeline, share: HolderPartition) -> bool:
    """Leases for the partition, unless that was done or it is too late; False: another try took the holder over."""
    try:
        async with client.holding(share.topic, share.holder, f"{share.lease_ms}ms") as holding:
            found, now_ms = await _look(client, share)
            if not found and now_ms < share.lease_by_ms:
                await holding.lease(share.most, first_ms=2 * MORE_MS, more_ms=MORE_MS)
            return True
    except Superseded:
        return False


async def _look(client: Timeline, share: HolderPartition) -> tuple[bool, int]:
    """Whether the holder has anything, and when the broker said so, by its clock."""
    now_ms = 0
    async for page in client.scan_pages(share.topic, holder=share.holder, limit=1):
        now_ms = page.now_ms
        if len(page.rows):
            return True, now_ms
    return False, now_ms


async def held(client: Timeline, topic: str, holder: str, payload: bool) -> AsyncIterator[PageRows]:
    """What a holder has. Due is what was asked for, not the end of the lease."""
    async for page in client.scan_pages(topic, holder=holder, payload=payload):
        if len(page.rows):
            yield PageRows(page.rows, page.now_ms)


def sound(rows: Rows) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Which rows have the payload that was put."""
    assert rows.payloads is not None
    whole: np.ndarray[tuple[int], np.dtype[np.bool_]] = payload_sums(rows.payloads, rows.headers) == rows.payload_sum
    return whole


async def bury(client: Timeline, topic: str, holder: str, rows: Rows) -> None:
    """Makes dead letters of what arrived damaged."""
    async with client.holding(topic, holder) as holding:
        await holding.settle(Operation.BURY, rows, reason=PAYLOAD_DAMAGED)


async def settle_all(client: Timeline, topic: str, holder: str, operation: Operation, time_ms: int = 0) -> int:
    """ACK or EXTEND all that a holder has; how many messages it had. Raises Unavailable when the brokers did not do all
    of it: the same again goes on."""
    parts: list[Rows] = [page.rows async for page in held(client, topic, holder, payload=False)]
    rows = Rows.concat(parts)
    if not len(rows):
        return 0
    async with client.holding(topic, holder) as holding:
        counts = await holding.settle(operation, rows, time_ms)
    undone = sum(many for status, many in counts.items() if status in ("THROTTLED", "UNAVAILABLE", "UNKNOWN"))
    if undone:
        raise Unavailable(f"{undone} of {len(rows)} messages of {holder} could not be settled")
    return len(rows)


class TimelineStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches, reads their partitions, extends their leases meanwhile, acknowledges them when committed."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_read(schema, READ)
        self._options = options
        self._schema = arrow_schema(schema)
        self._content = any(name in schema.names for name in CONTENT)
        self._query: _RunningQuery | None = None
        self._left: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_query": None}  # tasks only read

    # On the driver.

    def _our_query(self) -> _RunningQuery:
        if self._query is None:
            self._query = _RunningQuery(self._options)
        return self._query

    def initialOffset(self) -> Offset:
        """Before the first micro-batch of a new query."""
        topic = self._our_query().topic
        return {"topic": topic.name, "uid": str(topic.uid), "query": uuid.uuid4().hex[:16], "batch": 0, "planned_ms": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """So many rows a micro-batch."""
        return ReadMaxRows(self._options.max_rows_per_batch)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """The next micro-batch when something is due, else `start`. Spark commits a batch when it begins the next: so
        that what is done does not stay leased until more comes, an empty one closes it."""
        query = self._our_query()
        query.check(start)
        rows = self._rows(limit)
        if self._left is None:
            due = query.due() > 0
        else:
            due, self._left = self._left > 0, self._left - rows
        if not due and query.has_open(start):
            return query.next_offset(start, 0, partitions=0)
        if not due and (self._left is not None or not query.something_due(self._options.wait_ms)):
            return start
        return query.next_offset(start, -(-rows // self._options.partitions), self._options.partitions)

    def _rows(self, limit: ReadLimit) -> int:
        if isinstance(limit, ReadMaxRows):
            return max(1, min(limit.max_rows, self._options.partitions * MAX_ROWS))
        if isinstance(limit, ReadAllAvailable):
            return self._options.partitions * MAX_ROWS
        return self._options.max_rows_per_batch

    def prepareForTriggerAvailableNow(self) -> None:
        """What is due now is read, in as many micro-batches as that takes, and no more."""
        self._left = self._our_query().due()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """A share for each holder of the micro-batch."""
        query = self._our_query()
        query.check(end)
        if end["batch"] <= start["batch"]:
            return []
        if query.has_open(start):
            # What Spark reads on from is done; a query that ended just then could not say so, and nobody else will.
            query.commit(start)
        return query.shares(start, end)

    def commit(self, end: Offset) -> None:
        """The micro-batch is done: its messages are acknowledged."""
        self._our_query().commit(end)

    def stop(self) -> None:
        """The query ends. What is held comes back by its leases."""
        if self._query is not None:
            self._query.close()

    # On the executors.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a share."""
        assert isinstance(partition, HolderPartition)
        context = TaskContext.get()
        first_try = context is None or context.attemptNumber() == 0
        with SparkConnection(self._options.addresses, self._options.timeout_ms) as connection:
            client = connection.client
            connection.run(gather(client, partition, first_try))
            for page in connection.iterate(held(client, partition.topic, partition.holder, payload=self._content)):
                whole = self._whole(connection, partition, page)
                if len(whole.rows):
                    yield record_batch(whole, self._schema)

    def _whole(self, connection: SparkConnection, share: HolderPartition, page: PageRows) -> PageRows:
        """The page without what arrived damaged, with each message's due as it was asked for."""
        rows = page.rows
        if self._content:
            good = sound(rows)
            if not good.all():
                log.error("%d messages of %s arrived damaged and are buried", int((~good).sum()), share.topic)
                connection.run(bury(connection.client, share.topic, share.holder, rows.take(np.flatnonzero(~good))))
                rows = rows.take(np.flatnonzero(good))
        return PageRows(replace(rows, due_ms=rows.scheduled_ms), page.now_ms)


class _RunningQuery:
    """The driver's side of a query: its connection, and the thread that extends what is not committed yet."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._connection = SparkConnection(options.addresses, options.timeout_ms)
        self._clock = Clock()
        self.topic: Topic = self._connection.topic(options.topic)
        most_ms = self.topic.settings.max_lease_ms
        if options.lease_ms > most_ms:
            raise Invalid(f"lease is above the topic's max_lease of {most_ms} ms")
        self._lease_ms = options.lease_ms or min(DEFAULT_LEASE_MS, most_ms)
        self._planned: set[int] = set()
        self._committed = -1
        self._open: dict[int, list[HolderPartition]] = {}
        """Micro-batches that are planned and not committed."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._keeper: threading.Thread | None = None
        self._blind_ms = 0.0

    def check(self, offset: Offset) -> None:
        """Raises Invalid for an offset of another topic: a checkpoint that is not this query's."""
        if offset.get("topic") != self.topic.name:
            raise Invalid(
                f"the checkpoint is of topic {offset.get('topic')!r}, this query reads {self.topic.name!r}: "
                "give each query a checkpoint of its own"
            )
        if offset.get("uid") != str(self.topic.uid):
            raise Invalid(
                f"topic {self.topic.name!r} was dropped and made anew since the checkpoint was written: start with a "
                "new checkpointLocation"
            )

    def due(self) -> int:
        """How many messages that nobody holds are due now."""
        return self._connection.run(self._connection.client.forecast(self.topic.name, "1ms", "1ms")).overdue

    def something_due(self, wait_ms: int) -> bool:
        """Whether something nobody holds is due, now or within `wait_ms`."""
        until_ms = self._clock.monotonic_ms() + wait_ms
        while True:
            now_ms = self._clock.monotonic_ms()
            if self.due():
                return True
            if wait_ms and now_ms - self._blind_ms > BLIND_EVERY_MS:
                self._blind_ms = now_ms
                return True
            if now_ms >= until_ms:
                return False
            self._over.wait(LOOK_EVERY_S)

    def has_open(self, start: Offset) -> bool:
        """Whether the micro-batch up to `start` may still be held."""
        return bool(start.get("partitions")) and int(start["batch"]) > self._committed

    def next_offset(self, start: Offset, rows: int, partitions: int) -> Offset:
        """The offset of the micro-batch after `start`, whose `partitions` may have `rows` each."""
        batch = int(start["batch"]) + 1
        self._planned.add(batch)
        now_ms = round(self._clock.now_ms() + self._connection.run(self._connection.client.ping()).offset_ms)
        return start | {"batch": batch, "planned_ms": now_ms, "partitions": partitions, "rows": rows}

    def shares(self, start: Offset, end: Offset) -> list[HolderPartition]:
        """The partitions of the micro-batches after `start` up to `end`."""
        found: list[HolderPartition] = []
        for batch in range(int(start["batch"]) + 1, int(end["batch"]) + 1):
            shares = self._shares_of(end, batch)
            with self._lock:
                self._open[batch] = shares
            found += shares
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="timeline-leases", daemon=True)
            self._keeper.start()
        return found

    def _shares_of(self, end: Offset, batch: int) -> list[HolderPartition]:
        return [
            HolderPartition(
                topic=self.topic.name,
                holder=holder_of(end["query"], batch, part),
                most=int(end["rows"]),
                lease_ms=self._lease_ms,
                lease_by_ms=int(end["planned_ms"]) + LEASING_MS,
                again=batch not in self._planned,
            )
            for part in range(int(end.get("partitions", 0)))
        ]

    def commit(self, end: Offset) -> None:
        """Acknowledges what the holders of the batch have. Raises Unavailable when that could not be done: the query
        ends, and does it when it is started again."""
        self.check(end)
        for share in self._shares_of(end, int(end["batch"])):
            for tries_left in reversed(range(COMMIT_TRIES)):
                try:
                    with self._lock:
                        work = settle_all(self._connection.client, share.topic, share.holder, Operation.ACK)
                        self._connection.run(work)
                    break
                except TimelineError as trouble:
                    if not tries_left or not (trouble.retryable or trouble.code == "SUPERSEDED"):
                        raise
        self._committed = int(end["batch"])
        with self._lock:
            for batch in [batch for batch in self._open if batch <= int(end["batch"])]:
                del self._open[batch]

    def _keep(self) -> None:
        """Extends, three times a lease, what is planned and not committed."""
        while not self._over.wait(self._lease_ms / 3_000):
            with self._lock:
                shares = [share for shares in self._open.values() for share in shares]
            for share in shares:
                try:
                    with self._lock:
                        client = self._connection.client
                        work = settle_all(client, share.topic, share.holder, Operation.EXTEND, self._lease_ms)
                        self._connection.run(work)
                except TimelineError as trouble:
                    log.warning("could not extend what %s holds: %s", share.holder, trouble)

    def close(self) -> None:
        """Ends the thread and the connection."""
        self._over.set()
        if self._keeper is not None:
            self._keeper.join()
        self._connection.close()
