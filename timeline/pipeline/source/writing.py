"""Rows to a timeline: batch write and stream write.

Each task puts its rows by a connection of its own, a few calls under way at a time, so that a broker's THROTTLED slows
the task down and nothing piles up. A task that is run again, or twice at once, puts the same ids: the broker answers
DUPLICATE."""

from __future__ import annotations

import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from timeline.clock import Clock
from timeline.columns import Bools
from timeline.driver.batch import Batch
from timeline.driver.receipts import Receipts
from timeline.errors import Invalid, NotFound
from timeline.model import Status
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.files import write_json
from timeline.pipeline.source.columns import check_written
from timeline.pipeline.source.intake import EXAMPLES, Judge, JudgedRows, RejectedRows, SeenBirths, births_of, salt_of
from timeline.pipeline.source.options import SourceOptions

_STREAMS = ("sql.streaming.queryId", "streaming.sql.batchId")
"""Under these names Spark tells a task whose it is."""
CALLS_UNDER_WAY = 4
BYTES_UNDER_WAY = 32 * 1024 * 1024
ROWS_A_CALL = 10_000
"""A call that a broker refuses as a whole takes so many rows with it, and no more."""
_AGAIN = frozenset((Status.THROTTLED.code, Status.UNAVAILABLE.code, Status.UNKNOWN.code))
_OK, _DUPLICATE = Status.OK.code, Status.DUPLICATE.code


@dataclass
class WriteCounts(WriterCommitMessage):
    """What a task did. `put`: rows that are new on the timeline; `there`: rows that were on it before, or that an
    earlier try of this task had put; `settled`: rows that were delivered before (on a topic that remembers);
    `collapsed`: identical rows without an id; `rejected` by reason, with a few `examples` as (row, reason)."""

    put: int = 0
    there: int = 0
    settled: int = 0
    collapsed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """All rows that were looked at."""
        return self.put + self.there + self.settled + self.collapsed + self.rejected.total()

    def add(self, other: WriteCounts) -> None:
        """Counts `other`, too."""
        self.put += other.put
        self.there += other.there
        self.settled += other.settled
        self.collapsed += other.collapsed
        self.rejected += other.rejected
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        self.files += other.files

    def as_json(self) -> dict[str, object]:
        """The counts for machines."""
        return {
            "rows": self.rows,
            "put": self.put,
            "there": self.there,
            "settled": self.settled,
            "collapsed": self.collapsed,
            "rejected": self.rejected.total(),
            "reasons": dict(self.rejected.most_common()),
            "examples": [{"row": row, "reason": reason} for row, reason in self.examples],
            "files": sorted(self.files),
        }


@dataclass(frozen=True)
class WritePlan:
    """What every task of a write knows. `past_ms`: rows due by then are rejected, 0: none are."""

    options: SourceOptions
    run: str
    past_ms: int
    refuses_identical: bool


def plan_write(options: SourceOptions, schema: StructType, streaming: bool) -> WritePlan:
    """Checks the columns, that brokers answer and that the topic is there, before any task starts."""
    check_written(schema)
    with SparkConnection(options.addresses, options.timeout_ms) as connection:
        connection.topic(options.topic)
    past = options.past or ("now" if streaming else "reject")
    past_ms = int(past) if past.isdigit() else (Clock().now_ms() if past == "reject" else 0)
    return WritePlan(options, options.run or uuid.uuid4().hex, past_ms, not (streaming or options.allow_identical))


class WriteTask:
    """One task's part of a write."""

    def __init__(self, plan: WritePlan, part: int) -> None:
        options = self._options = plan.options
        self._judge = Judge(plan.past_ms)
        self._salts = salt_of(plan.run, part), salt_of(f"{plan.run}\0again", part)
        self._seen = SeenBirths()
        self._done = WriteCounts()
        self._rejects = RejectedRows(options.rejects_path, f"{_digest(plan.run, batch_name())}-{part:05d}")
        self._under_way: deque[tuple[JudgedRows, int, Future[Receipts]]] = deque()
        self._bytes = 0
        self._connection = SparkConnection(options.addresses, options.timeout_ms)
        self._producer = self._connection.client.producer(options.topic, options.group)

    def write(self, batches: Iterator[pa.RecordBatch]) -> WriteCounts:
        """Puts all rows; raises when the brokers did not take them all, or when too many are rejected."""
        try:
            for batch in batches:
                for start in range(0, batch.num_rows, ROWS_A_CALL):
                    self._put(batch.slice(start, ROWS_A_CALL))
            while self._under_way:
                self._take()
            self._done.files = self._rejects.close()
        finally:
            self._connection.close()
        return self._done

    def _put(self, rows: pa.RecordBatch) -> None:
        judged = self._judge.judge(rows)
        batch, nbytes = judged.batch, rows.nbytes
        if judged.derived and len(batch):
            self._give_births(batch)
        while self._under_way and (len(self._under_way) >= CALLS_UNDER_WAY or self._bytes + nbytes > BYTES_UNDER_WAY):
            self._take()
        asked = self._producer.produce_many(batch, if_exists=self._options.if_exists or None)
        self._under_way.append((judged, nbytes, self._connection.start(asked)))
        self._bytes += nbytes

    def _give_births(self, batch: Batch) -> None:
        """A row's birth is made of its id, so that an earlier try of this task is recognised by the broker; the second
        and later ones of identical rows get another, so that these are not."""
        assert batch.ids is not None
        first, later = (births_of(batch.ids, salt) for salt in self._salts)
        batch.births = np.where(self._seen.again(first), later, first)

    def _take(self) -> None:
        """The answers to the call that has waited longest."""
        judged, nbytes, future = self._under_way.popleft()
        self._bytes -= nbytes
        receipts = future.result()
        self._check_taken(receipts)
        codes, done = receipts.status_codes, self._done
        settled = receipts.settled & (codes == _DUPLICATE)
        there = (codes == _DUPLICATE) & ~settled
        # A put of the very same birth is answered OK: an earlier try of this task has put it.
        repeats, nobody = receipts.repeats & (codes == _OK), np.zeros(len(codes), dtype=np.bool_)
        collapsed = there if judged.derived else nobody
        elsewhere = nobody if judged.derived else self._elsewhere(judged, receipts, there)
        done.put += int(((codes == _OK) & ~repeats).sum())
        done.settled += int(settled.sum())
        done.collapsed += int(collapsed.sum())
        done.there += int(repeats.sum()) + int((there & ~collapsed & ~elsewhere).sum())
        self._reject(judged, receipts, elsewhere)

    def _elsewhere(self, judged: JudgedRows, receipts: Receipts, there: Bools) -> Bools:
        """Which of those that were `there` carry another due than the row says, though nobody has touched them
        since they were put: the id is used twice."""
        if self._options.if_exists:
            return np.zeros(len(there), dtype=np.bool_)
        elsewhere: Bools = there & (receipts.versions == 1) & (receipts.due_ms != judged.batch.time_ms)
        return elsewhere

    def _check_taken(self, receipts: Receipts) -> None:
        """Raises what is no row's fault: the same call may be made again."""
        codes = receipts.status_codes
        if (codes == Status.NOT_FOUND.code).any():
            raise NotFound(f"the topic {self._options.topic!r} is gone")
        if np.isin(codes, list(_AGAIN)).any():
            receipts.raise_failed()

    def _reject(self, judged: JudgedRows, receipts: Receipts, elsewhere: Bools) -> None:
        bad = dict(judged.bad)
        codes = receipts.status_codes
        for at in np.flatnonzero(elsewhere | ((codes != _OK) & (codes != _DUPLICATE))).tolist():
            if elsewhere[at]:
                why = "EXISTS: the id is there already with the same payload and another due"
            else:
                why = f"{receipts[at].status}: {receipts[at].detail or _WORDS.get(receipts[at].status, 'refused')}"
            bad[int(judged.good[at])] = why
        if not bad:
            return
        self._rejects.add(judged.rows, bad)
        self._done.rejected.update(bad.values())
        self._done.examples = self._rejects.examples
        if self._done.rejected.total() > self._options.max_rejects:
            self._rejects.close()
            raise Invalid(too_many(self._done, self._options))


_WORDS = {
    Status.EXISTS: "the id is taken by another message",
    Status.FORBIDDEN: "the message belongs to another group",
    Status.LEASED: "a consumer has it now",
    Status.DEAD: "it is a dead letter",
    Status.EXPIRED: "it expires before it is due",
    Status.TOO_LARGE: "the payload is above the topic's max_payload_bytes",
}


def too_many(done: WriteCounts, options: SourceOptions) -> str:
    """The sentence that ends a write for its rejected rows."""
    told = "; ".join(f"{many} × {reason}" for reason, many in done.rejected.most_common(5))
    first = "; ".join(f"row {row}: {reason}" for row, reason in done.examples[:3])
    where = f"; they are in {options.rejects_path}" if options.rejects_path else "; rejectsPath keeps them"
    return (
        f"{done.rejected.total()} rows are rejected, more than maxRejects={options.max_rejects}: {told}. "
        f"The first: {first}{where}"
    )


def conclude(plan: WritePlan, messages: Sequence[WriterCommitMessage | None]) -> WriteCounts:
    """All tasks' counts; raises Invalid where they are not what was allowed."""
    done = WriteCounts()
    for message in messages:
        if isinstance(message, WriteCounts):
            done.add(message)
    if plan.options.report_path:
        write_json(plan.options.report_path, done.as_json() | {"run": plan.run})
    if done.rejected.total() > plan.options.max_rejects:
        raise Invalid(too_many(done, plan.options))
    if done.collapsed and plan.refuses_identical:
        raise Invalid(
            f"{done.collapsed} rows without an id are identical to others, of this write or of an earlier one, and "
            f"collapsed into them ({done.put} rows are new). Give rows an id, drop duplicates, or allow it: "
            ".option('allowIdentical', 'true'). To go on with a write that broke off, give both the same "
            ".option('run', …)"
        )
    return done


def batch_name() -> str:
    """The micro-batch of a stream that this task works on; empty for a batch write."""
    context = TaskContext.get()
    names = (context.getLocalProperty(name) or "" for name in _STREAMS) if context is not None else ()
    return "\0".join(names)


def _digest(*said: str) -> str:
    """A name for files, which another run or micro-batch does not have."""
    return blake2b("\0".join(said).encode(), digest_size=8).hexdigest()


def part_number() -> int:
    """The number of the partition that this task works on."""
    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


class TimelineWriter(DataSourceArrowWriter):
    """Batch write: rows → put."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._plan = plan_write(options, schema, streaming=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts:
        """One task's rows."""
        return WriteTask(self._plan, part_number()).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are done."""
        conclude(self._plan, messages)


class TimelineStreamWriter(DataSourceStreamArrowWriter):
    """Stream write: each micro-batch → put. Identical rows without an id collapse, as a micro-batch that is run again
    cannot be told from them; rows that are due already are delivered now unless `past` says otherwise."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._plan = plan_write(options, schema, streaming=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts:
        """One task's rows of a micro-batch."""
        return WriteTask(self._plan, part_number()).write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """A micro-batch is done."""
        conclude(self._plan, messages)
