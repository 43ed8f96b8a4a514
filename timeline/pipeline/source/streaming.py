"""Messages of a timeline as a stream: each micro-batch is what came due, leased until the query commits it.

The offset names the query and the micro-batch. Each partition of a micro-batch has a holder, named by query, batch and
partition. Its messages stay on the timeline under that holder. A query that restarts from its checkpoint reads an
unfinished batch again, as far as its leases last. If it never commits, the messages come back when the leases run out.
Delivery is at least once; `id` and `version` tell repeats apart.

Every try of a task reads the same rows, and `commit` acknowledges exactly those:

- The rows of a partition are fixed before anybody reads them. Only the first try of a task leases, and only until
  `lease_by_ms` on the broker's clock.
- Any other try only looks, until something is held or that time is over. Then it takes the holder over. This ends a
  lease in flight, so nothing more is added. A try that was taken over leases nothing more.
- A take-over reaches one broker. If there are several, the other try waits until `lease_by_ms` is over.
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
from timeline.model import PAYLOAD_DAMAGED, Operation, Rows, Status, Topic, payload_sums
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.source.columns import CONTENT, READ, arrow_schema, check_read, record_batch
from timeline.pipeline.source.options import MAX_ROWS, SourceOptions
from timeline.wire.frames import ScanPage

LEASING_MS = 30_000
"""How long the tasks of a batch may lease after it was planned."""
LATE_MS = 10_000
"""A lease that began in time is over by then."""
MORE_MS = 50.0
"""Messages due later than this after the last part belong to the next batch."""
LOOK_MS = 250
"""How often a try that may not lease looks for what the first try has leased."""

log = logging.getLogger("timeline.pipeline")
DEFAULT_LEASE_MS = 600_000
LOOK_EVERY_S = 0.02
BLIND_EVERY_MS = 15_000
"""How often a batch is tried although nothing counts as due: messages whose lease ran out are not counted."""
COMMIT_TRIES = 5
Offset = dict[str, Any]


@dataclass
class HolderPartition(InputPartition):
    """One partition of a micro-batch. `most`: rows it may lease. `again`: a query that ended has planned the batch, so
    nothing more is leased for it."""

    topic: str
    holder: str
    most: int
    lease_ms: int
    lease_by_ms: int
    again: bool


def holder_of(query: str, batch: int, part: int) -> str:
    """Return the holder of a partition of a micro-batch."""
    return f"spark/{query}/{batch}/{part}"


async def gather(client: Timeline, share: HolderPartition, first_try: bool) -> None:
    """Return when all rows of the partition are under its holder, and no more will come. `first_try`: of the task."""
    if first_try and not share.again and await _leased(client, share):
        return
    while True:
        found, now_ms = await _look(client, share)
        left_ms = share.lease_by_ms + LATE_MS - now_ms
        over = left_ms <= 0
        if (found or over) and (await _brokers(client, share) <= 1 or over):
            return
        # If there are several brokers, the first try may be at another one, where nobody has taken it over.
        await asyncio.sleep((left_ms if found else min(left_ms, LOOK_MS)) / 1000.0)


async def _brokers(client: Timeline, share: HolderPartition) -> int:
    """Take the holder over, which ends a lease in flight at that broker. Return how many brokers there are."""
    try:
        async with client.holding(share.topic, share.holder, f"{share.lease_ms}ms") as holding:
            assert holding.welcome is not None
            return len(holding.welcome.brokers)
    except Superseded:
        return 1  # by another try at this broker, which leases nothing either


async def _leased(client: Timeline, share: HolderPartition) -> bool:
    """Lease for the partition, unless that is done or too late. Return False if another try took the holder over."""
    try:
        async with client.holding(share.topic, share.holder, f"{share.lease_ms}ms") as holding:
            found, now_ms = await _look(client, share)
            if not found and now_ms < share.lease_by_ms:
                await holding.lease(share.most, first_ms=2 * MORE_MS, more_ms=MORE_MS)
            return True
    except Superseded:
        return False


async def _look(client: Timeline, share: HolderPartition) -> tuple[bool, int]:
    """Return whether the holder has anything, and the broker's time."""
    now_ms = 0
    async for page in client.scan_pages(share.topic, holder=share.holder, limit=1):
        now_ms = page.now_ms
        if len(page.rows):
            return True, now_ms
    return False, now_ms


async def held(client: Timeline, topic: str, holder: str, payload: bool) -> AsyncIterator[ScanPage]:
    """Yield the messages of a holder."""
    async for page in client.scan_pages(topic, holder=holder, payload=payload):
        if len(page.rows):
            yield page


async def bury(client: Timeline, topic: str, holder: str, rows: Rows) -> None:
    """Make dead letters of messages that arrived damaged."""
    async with client.holding(topic, holder) as holding:
        await holding.settle(Operation.BURY, rows, reason=PAYLOAD_DAMAGED)


async def settle_all(client: Timeline, topic: str, holder: str, operation: Operation, time_ms: int = 0) -> int:
    """ACK or EXTEND all messages of a holder. Return how many it had. Raise Unavailable if some were not settled; the
    same call again settles the rest."""
    rows = Rows.concat([page.rows async for page in held(client, topic, holder, payload=False)])
    if not len(rows):
        return 0
    async with client.holding(topic, holder) as holding:
        counts = await holding.settle(operation, rows, time_ms)
    undone = sum(counts.get(status, 0) for status in (Status.THROTTLED, Status.UNAVAILABLE, Status.UNKNOWN))
    if undone:
        raise Unavailable(f"{undone} of {len(rows)} messages of {holder} could not be settled")
    return len(rows)


class TimelineStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plan micro-batches, read their partitions, extend their leases meanwhile, and acknowledge them on commit."""

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
        """Return the offset before the first micro-batch of a new query."""
        topic = self._our_query().topic
        return {"topic": topic.name, "uid": str(topic.uid), "query": uuid.uuid4().hex[:16], "batch": 0, "planned_ms": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the most rows of a micro-batch."""
        return ReadMaxRows(self._options.max_rows_per_batch)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the next micro-batch when something is due, else `start`.

        Spark commits a batch when it begins the next one. An empty batch therefore follows the last, so that finished
        messages do not stay leased until more come."""
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
        """Read only what is due now, in as many micro-batches as that takes."""
        self._left = self._our_query().due()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return one partition per holder of the micro-batch."""
        query = self._our_query()
        query.check(end)
        if end["batch"] <= start["batch"]:
            return []
        if query.has_open(start):
            # Spark continues after this batch, so it is done. A query that ended just then could not commit it.
            query.commit(start)
        return query.shares(start, end)

    def commit(self, end: Offset) -> None:
        """Acknowledge the messages of the micro-batch."""
        self._our_query().commit(end)

    def stop(self) -> None:
        """End the query. Messages that it holds come back when their leases run out."""
        if self._query is not None:
            self._query.close()

    # On the executors.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a partition."""
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

    def _whole(self, connection: SparkConnection, share: HolderPartition, page: ScanPage) -> ScanPage:
        """Return the page without damaged messages. Each due time is the scheduled one, not the lease's end."""
        rows = page.rows
        if self._content:
            assert rows.payloads is not None
            good = payload_sums(rows.payloads, rows.headers) == rows.payload_sum
            if not good.all():
                log.error("%d messages of %s arrived damaged and are buried", int((~good).sum()), share.topic)
                connection.run(bury(connection.client, share.topic, share.holder, rows.take(np.flatnonzero(~good))))
                rows = rows.take(np.flatnonzero(good))
        return replace(page, rows=replace(rows, due_ms=rows.scheduled_ms))


class _RunningQuery:
    """A query on Spark's driver: its connection, and the thread that extends uncommitted leases."""

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
        """Raise Invalid for an offset of another topic: the checkpoint is not this query's."""
        if offset.get("topic") != self.topic.name:
            raise Invalid(
                f"the checkpoint is of topic {offset.get('topic')!r}, this query reads {self.topic.name!r}. "
                "Give each query a checkpoint of its own"
            )
        if offset.get("uid") != str(self.topic.uid):
            raise Invalid(
                f"topic {self.topic.name!r} was dropped and created again after the checkpoint was written. Start with "
                "a new checkpointLocation"
            )

    def due(self) -> int:
        """Return how many messages without a live lease are due now."""
        return self._connection.run(self._connection.client.forecast(self.topic.name, "1ms", "1ms")).overdue

    def something_due(self, wait_ms: int) -> bool:
        """Return whether a message without a live lease is due, now or within `wait_ms`."""
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
        """Return whether the micro-batch up to `start` may still be held."""
        return bool(start.get("partitions")) and int(start["batch"]) > self._committed

    def next_offset(self, start: Offset, rows: int, partitions: int) -> Offset:
        """Return the offset of the micro-batch after `start`, with up to `rows` in each of its `partitions`."""
        batch = int(start["batch"]) + 1
        self._planned.add(batch)
        planned_ms = self._connection.broker_now_ms()
        return start | {"batch": batch, "planned_ms": planned_ms, "partitions": partitions, "rows": rows}

    def shares(self, start: Offset, end: Offset) -> list[HolderPartition]:
        """Return the partitions of the micro-batches after `start` up to `end`."""
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
        """Acknowledge all messages of the batch's holders. Raise Unavailable if that fails. The query then ends, and
        acknowledges them after its restart."""
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
        """Extend uncommitted leases, three times per lease."""
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
                    log.warning("could not extend the leases of %s: %s", share.holder, trouble)

    def close(self) -> None:
        """End the thread and the connection."""
        self._over.set()
        if self._keeper is not None:
            self._keeper.join()
        self._connection.close()
