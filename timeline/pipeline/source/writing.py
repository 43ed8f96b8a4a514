"""Rows to a timeline: batch write and stream write.

Rows are judged as columns. A row becomes an object only where it has headers, or where its id is derived. Rejected rows
are kept unchanged, each with its reason, so that they can be fixed and written again.

Each task has a connection of its own and a few calls in flight. THROTTLED slows the task down, and nothing piles up.
A task that runs again, or twice at once, puts the same ids. The broker answers DUPLICATE.
"""

from __future__ import annotations

import secrets
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from timeline.clock import Clock
from timeline.columns import Bools, Int64, Ragged, Text, UInt64
from timeline.driver.batch import Batch, arrow_column
from timeline.driver.message import check_headers
from timeline.driver.receipts import Receipts
from timeline.driver.times import LOOKS_LIKE_SECONDS
from timeline.errors import Invalid, NotFound, TimelineError
from timeline.model import MAX_ID_BYTES, MAX_PAYLOAD_BYTES, MAX_TAG_BYTES, MAX_TIME_MS, Status
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.files import joined, write_json, write_table
from timeline.pipeline.source.columns import check_written
from timeline.pipeline.source.options import SourceOptions
from timeline.wire.validate import validate_texts

CALLS_UNDER_WAY = 4
BYTES_UNDER_WAY = 32 * 1024 * 1024
ROWS_A_CALL = 10_000
"""Rows per call. A broker that refuses a whole call refuses no more rows than these."""
ROWS_A_FILE = 100_000
ID_BYTES = 16
"""A derived id is this many bytes of BLAKE2b, as hex digits."""
EXAMPLES = 10
_STREAMS = ("sql.streaming.queryId", "streaming.sql.batchId")
"""A task's local properties that name its query and its micro-batch."""
_AGAIN = [status.code for status in (Status.THROTTLED, Status.UNAVAILABLE, Status.UNKNOWN)]
_OK, _DUPLICATE = Status.OK.code, Status.DUPLICATE.code
_WORDS = {
    Status.EXISTS: "the id is taken by another message",
    Status.FORBIDDEN: "the message belongs to another group",
    Status.LEASED: "a consumer has it now",
    Status.DEAD: "it is a dead letter",
    Status.EXPIRED: "it expires before it is due",
    Status.TOO_LARGE: "the payload is above the topic's max_payload_bytes",
}
_REMEDIES = {Status.FORBIDDEN: ". Write such rows for the group that owns them (option group, --group NAME)"}


@dataclass(slots=True)
class JudgedRows:
    """One Arrow batch. `good`: indexes of the rows that can be put, as `batch`. `bad`: the reason per index of the
    others. `derived`: the ids are made of the rows' content. `repeated`: they were sent before."""

    rows: pa.RecordBatch
    good: np.ndarray[Any, np.dtype[np.intp]]
    batch: Batch
    bad: dict[int, str]
    derived: bool
    repeated: bool = False


class _BadRows:
    """Which rows cannot be put, with the first reason of each."""

    def __init__(self, count: int) -> None:
        self.mask: Bools = np.zeros(count, dtype=np.bool_)
        self.reasons: dict[int, str] = {}

    def add(self, which: Bools, reason: str) -> None:
        if which.any():
            fresh = which & ~self.mask
            self.reasons.update(dict.fromkeys(np.flatnonzero(fresh).tolist(), reason))
            self.mask |= which

    def add_one(self, at: int, reason: str) -> None:
        if not self.mask[at]:
            self.mask[at] = True
            self.reasons[at] = reason


def judge(rows: pa.RecordBatch, past_ms: int) -> JudgedRows:
    """Return the rows that can be put as a batch, and why the others cannot. Rows due by `past_ms` cannot; 0: no such
    limit."""
    bad = _BadRows(rows.num_rows)
    columns = {name: rows.column(name) for name in rows.schema.names}
    due_ms = _due_ms(columns["due"], past_ms, bad)
    _judge_payload(columns["payload"], bad)
    if "id" in columns:
        _judge_text(columns["id"], "id", 1, MAX_ID_BYTES, bad)
    if "tag" in columns:
        _judge_text(columns["tag"], "tag", 0, MAX_TAG_BYTES, bad)
    expires_ms = _expires_ms(columns.get("expires"), bad)
    headers = _encoded(columns.get("headers"), bad)
    good = np.flatnonzero(~bad.mask)
    if len(good) < rows.num_rows:
        picks = pa.array(good)
        columns = {name: column.take(picks) for name, column in columns.items()}
        due_ms, expires_ms = due_ms[good], expires_ms[good]
        headers = headers if headers is None else headers.take(good)
    tags = columns.get("tag")
    batch = Batch(
        payloads=columns["payload"],
        at=due_ms,
        ids=columns.get("id"),
        tags=None if tags is None or tags.null_count == len(tags) else pc.fill_null(tags, ""),
        headers=headers,
    )
    batch.expires_ms = expires_ms if expires_ms.any() else None
    derived = "id" not in columns
    if derived:
        batch.ids = content_ids(batch)
    return JudgedRows(rows, good, batch, bad.reasons, derived)


def _nulls(column: pa.Array) -> Bools:
    if not column.null_count:
        return np.zeros(len(column), dtype=np.bool_)
    marks: Bools = column.is_null().to_numpy(zero_copy_only=False)
    return marks


def _numbers(column: pa.Array) -> Int64:
    """64-bit numbers, with 0 for null."""
    numbers = column.cast("int64")
    found: Int64 = (pc.fill_null(numbers, 0) if numbers.null_count else numbers).to_numpy()
    return found


def _millis(column: pa.Array) -> Int64:
    """Timestamps of microseconds as milliseconds. They round up, so that nothing is early."""
    return -(-_numbers(column) // 1_000)


def _due_ms(column: pa.Array, past_ms: int, bad: _BadRows) -> Int64:
    due_ms = _millis(column)
    bad.add(_nulls(column), "due is null")
    bad.add(due_ms < LOOKS_LIKE_SECONDS, "due lies before 1973: was it read with the wrong unit?")
    bad.add(due_ms > MAX_TIME_MS, "due lies after the year 9999")
    if past_ms:
        bad.add(due_ms <= past_ms, "due is past")
    return due_ms


def _judge_payload(column: pa.Array, bad: _BadRows) -> None:
    bad.add(_nulls(column), "payload is null: an empty one is ''")
    if column.nbytes > MAX_PAYLOAD_BYTES:
        sizes = _numbers(pc.binary_length(column))
        bad.add(sizes > MAX_PAYLOAD_BYTES, f"payload is above {MAX_PAYLOAD_BYTES} bytes")


def _judge_text(column: pa.Array, name: str, least: int, most: int, bad: _BadRows) -> None:
    if least:
        bad.add(_nulls(column), f"{name} is null")
    texts = arrow_column(pc.fill_null(column, "") if column.null_count else column, name)
    for at, why in validate_texts(texts, Text(name, least, most)).items():
        bad.add_one(at, why)


def _expires_ms(column: pa.Array | None, bad: _BadRows) -> Int64:
    if column is None:
        return np.zeros(len(bad.mask), dtype=np.int64)
    expires_ms = _millis(column)
    present = ~_nulls(column)
    wrong = present & ((expires_ms < LOOKS_LIKE_SECONDS) | (expires_ms > MAX_TIME_MS))
    bad.add(wrong, "expires lies before 1973 or after the year 9999")
    return np.where(present, expires_ms, 0)


def _encoded(column: pa.Array | None, bad: _BadRows) -> Ragged | None:
    """Headers in the wire's encoding; None where no row has any."""
    if column is None or column.null_count == len(column) or not len(column.items):
        return None
    encoded: list[bytes] = []
    for at, pairs in enumerate(column.to_pylist()):
        try:
            encoded.append(check_headers(dict(pairs)) if pairs else b"")
        except (TimelineError, TypeError) as wrong:
            bad.add_one(at, f"headers: {getattr(wrong, 'reason', '') or wrong}")
            encoded.append(b"")
    return Ragged.of(encoded)


def content_ids(batch: Batch) -> Ragged:
    """Return an id per row, made of its whole content. The same row has the same id wherever and whenever it is
    written."""
    count = len(batch)
    fixed = np.zeros(count, dtype=[("due", "<i8"), ("expires", "<i8"), ("payload", "<u4"), ("tag", "<u2")])
    fixed["due"], fixed["payload"] = batch.time_ms, batch.payloads.sizes
    if batch.expires_ms is not None:
        fixed["expires"] = batch.expires_ms
    tags = headers = [b""] * count
    if batch.tags is not None:
        fixed["tag"], tags = batch.tags.sizes, batch.tags.tolist()
    if batch.headers is not None:
        headers = batch.headers.tolist()
    heads = np.frombuffer(fixed.tobytes(), dtype=f"V{fixed.itemsize}").tolist()
    rows = zip(heads, tags, batch.payloads.tolist(), headers, strict=True)
    return Ragged.of([blake2b(b"".join(row), digest_size=ID_BYTES).hexdigest().encode() for row in rows])


def births_of(ids: Sequence[bytes], salt: int) -> UInt64:
    """Return births made of derived ids and `salt`, by SplitMix64: the same for the same row of the same part of a
    run."""
    halves = np.frombuffer(bytes.fromhex(b"".join(id[:16] for id in ids).decode()), dtype="<u8") ^ np.uint64(salt)
    mixed = halves + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    mixed[mixed == 0] = 1
    return mixed


class SeenBirths:
    """The births that a part of a run has put, in few sorted runs. They tell a row's first occurrence from the next.
    A wrong guess, once in 2^64 pairs, costs nothing: the broker compares the whole."""

    def __init__(self) -> None:
        self._runs: list[UInt64] = []

    def again(self, keys: UInt64) -> Bools:
        """Return which of `keys` came before, in an earlier call or in this one. Keep them all."""
        found = np.zeros(len(keys), dtype=np.bool_)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            found |= run[at] == keys
        fresh, first = np.unique(keys, return_index=True)
        later = np.ones(len(keys), dtype=np.bool_)
        later[first] = False
        self._runs.append(fresh)
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs[-2:] = [np.union1d(*self._runs[-2:])]
        return found | later


class RejectedRows:
    """A task's rejected rows. `path`: where they are written; empty: nowhere. `name`: the start of the files' names. A
    task that runs again has the same name, so it replaces its files."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._files: list[str] = []
        self.examples: list[tuple[str, str]] = []

    def add(self, rows: pa.RecordBatch, bad: dict[int, str]) -> None:
        """Keep the rows at the indexes in `bad`, each with its reason."""
        places = sorted(bad)
        for place in places[: EXAMPLES - len(self.examples)]:
            self.examples.append((_shown(rows, place), bad[place]))
        if not self._path:
            return
        reasons = pa.array([bad[place] for place in places], pa.string())
        table = pa.Table.from_batches([rows.take(pa.array(places, pa.int64()))]).append_column("reason", reasons)
        self._tables.append(table)
        self._rows += len(table)
        if self._rows >= ROWS_A_FILE:
            self._write()

    def _write(self) -> None:
        if self._tables:
            url = joined(self._path, f"{self._name}-{len(self._files):03d}.parquet")
            write_table(url, pa.concat_tables(self._tables))
            self._files.append(url)
            self._tables, self._rows = [], 0

    def close(self) -> list[str]:
        """Write the rest. Return the URLs of all files."""
        self._write()
        return self._files


def _shown(rows: pa.RecordBatch, place: int) -> str:
    names = [name for name in ("id", "due", "tag") if name in rows.schema.names]
    return " ".join(f"{name}={rows.column(name)[place].as_py()!s:.60}" for name in names)


@dataclass
class WriteCounts(WriterCommitMessage):
    """The result of a task, in rows. `put`: new on the timeline. `there`: on it before, or put by an earlier try.
    `settled`: delivered before, on a topic that remembers. `collapsed`: identical to another, without an id.
    `rejected`: by reason, with a few `examples` of (row, reason)."""

    put: int = 0
    there: int = 0
    settled: int = 0
    collapsed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """All rows that were judged."""
        return self.put + self.there + self.settled + self.collapsed + self.rejected.total()

    def add(self, other: WriteCounts) -> None:
        """Add the counts of `other`."""
        self.put += other.put
        self.there += other.there
        self.settled += other.settled
        self.collapsed += other.collapsed
        self.rejected += other.rejected
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        self.files += other.files

    def as_json(self) -> dict[str, object]:
        """Return the report."""
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
    """The part of a write that all its tasks share. `past_ms`: rows due by then are rejected; 0: none."""

    options: SourceOptions
    run: str
    past_ms: int
    refuses_identical: bool


def plan_write(options: SourceOptions, schema: StructType, streaming: bool) -> WritePlan:
    """Return the plan, before any task starts. Raise Invalid for wrong columns, NotFound for a missing topic, and
    Unavailable where no broker answers."""
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
        self._past_ms = plan.past_ms
        self._salts = [int.from_bytes(_digest(run, str(part)), "little") for run in (plan.run, f"{plan.run}\0again")]
        self._seen = SeenBirths()
        self._done = WriteCounts()
        self._rejects = RejectedRows(options.rejects_path, f"{_digest(plan.run, batch_name()).hex()}-{part:05d}")
        self._under_way: deque[tuple[JudgedRows, int, Future[Receipts]]] = deque()
        self._bytes = 0
        self._connection = SparkConnection(options.addresses, options.timeout_ms)
        self._producer = self._connection.client.producer(options.topic, options.group)

    def write(self, batches: Iterator[pa.RecordBatch]) -> WriteCounts:
        """Put all rows. Raise where brokers did not take them all, or where too many are rejected."""
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

    def _put(self, rows: pa.RecordBatch, births: UInt64 | None = None) -> None:
        """Put rows. `births`: of rows that were sent before, and whose answer was lost."""
        judged = judge(rows, self._past_ms)
        judged.repeated = births is not None
        batch, nbytes = judged.batch, rows.nbytes
        if judged.derived and len(batch):
            self._give_births(batch)
        else:
            drawn = np.frombuffer(secrets.token_bytes(8 * len(batch)), dtype=np.uint64) | np.uint64(1)
            batch.births = drawn if births is None else births
        while self._under_way and (len(self._under_way) >= CALLS_UNDER_WAY or self._bytes + nbytes > BYTES_UNDER_WAY):
            self._take()
        asked = self._producer.produce_many(batch, if_exists=self._options.if_exists or None)
        self._under_way.append((judged, nbytes, self._connection.start(asked)))
        self._bytes += nbytes

    def _give_births(self, batch: Batch) -> None:
        """Derive each row's birth from its id, so that the broker recognises an earlier try of this task. The second
        and later copies of identical rows get another birth, so they are not taken for such a try."""
        assert batch.ids is not None
        first, later = (births_of(batch.ids, salt) for salt in self._salts)
        batch.births = np.where(self._seen.again(first), later, first)

    def _take(self) -> None:
        """Count the answers to the oldest call in flight."""
        judged, nbytes, future = self._under_way.popleft()
        self._bytes -= nbytes
        receipts = future.result()
        codes, done = receipts.status_codes, self._done
        if (codes == Status.NOT_FOUND.code).any():
            raise NotFound(f"the topic {self._options.topic!r} is gone")
        again = np.isin(codes, _AGAIN)
        unsure = np.flatnonzero(codes == Status.UNKNOWN.code)
        if again.any() and (judged.derived or judged.repeated or len(unsure) < again.sum()):
            receipts[int(np.flatnonzero(again)[0])].raise_failed()
        duplicate = codes == _DUPLICATE
        # The broker answers OK to the same birth again: an earlier try of this task has put it.
        repeats = receipts.repeats & (codes == _OK)
        settled = receipts.settled & duplicate
        there = duplicate & ~settled
        used_twice = np.zeros(len(codes), dtype=np.bool_)
        if judged.derived:
            done.collapsed += int(there.sum())
        else:
            if not self._options.if_exists:
                # Nobody has touched the message since it was put, and its due time is another.
                used_twice = there & (receipts.versions == 1) & (receipts.due_ms != judged.batch.time_ms)
            done.there += int((there & ~used_twice).sum())
        done.put += int(((codes == _OK) & ~repeats).sum())
        done.there += int(repeats.sum())
        done.settled += int(settled.sum())
        self._reject(judged, receipts, used_twice)
        if len(unsure):  # a call of its own gets definite answers
            assert judged.batch.births is not None
            self._put(judged.rows.take(pa.array(judged.good[unsure])), judged.batch.births[unsure])

    def _reject(self, judged: JudgedRows, receipts: Receipts, used_twice: Bools) -> None:
        bad, codes = judged.bad, receipts.status_codes
        failed = (codes != _OK) & (codes != _DUPLICATE) & (codes != Status.UNKNOWN.code)
        for at in np.flatnonzero(used_twice | failed).tolist():
            if used_twice[at]:
                why = "EXISTS: the id is there already with the same payload and another due"
            else:
                status, detail = receipts[at].status, receipts[at].detail
                why = f"{status}: {detail or _WORDS.get(status, 'refused')}{_REMEDIES.get(status, '')}"
            bad[int(judged.good[at])] = why
        if not bad:
            return
        self._rejects.add(judged.rows, bad)
        self._done.rejected.update(bad.values())
        self._done.examples = self._rejects.examples
        if self._done.rejected.total() > self._options.max_rejects:
            self._rejects.close()
            raise Invalid(too_many(self._done, self._options))


def too_many(done: WriteCounts, options: SourceOptions) -> str:
    """Return the sentences that end a write for its rejected rows. They name the source's options and those of
    `timeline pipeline load`."""
    told = "; ".join(f"{many} × {reason}" for reason, many in done.rejected.most_common(5))
    first = "; ".join(f"row {row}: {reason}" for row, reason in done.examples[:3])
    kept = f"They are in {options.rejects_path}" if options.rejects_path else "rejectsPath (--rejects URL) keeps them"
    return (
        f"{done.rejected.total()} rows are rejected, more than maxRejects={options.max_rejects} (--max-rejects): "
        f"{told}. The first: {first}. {kept}"
    )


def conclude(plan: WritePlan, messages: Sequence[WriterCommitMessage | None]) -> None:
    """Write the report of all tasks. Raise Invalid where more rows are rejected, or identical, than allowed."""
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
            f"{done.collapsed} rows without an id are identical to others, of this write or an earlier one, and "
            f"collapsed into them ({done.put} rows are new). Give rows an id, drop duplicates, or set "
            ".option('allowIdentical', 'true'). To resume a write that broke off, give both the same .option('run', …)"
        )


def batch_name() -> str:
    """Return the micro-batch that this task works on; empty for a batch write."""
    context = TaskContext.get()
    names = (context.getLocalProperty(name) or "" for name in _STREAMS) if context is not None else ()
    return "\0".join(names)


def _digest(*said: str) -> bytes:
    return blake2b("\0".join(said).encode(), digest_size=8).digest()


class _PlannedWriter:
    """A write that is planned once. Each task writes its part."""

    streaming: ClassVar[bool]

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._plan = plan_write(options, schema, self.streaming)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts:
        """Put the rows of the task that runs here."""
        context = TaskContext.get()
        return WriteTask(self._plan, context.partitionId() if context is not None else 0).write(iterator)


class TimelineWriter(_PlannedWriter, DataSourceArrowWriter):
    """Batch write: rows → put."""

    streaming = False

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Conclude the write."""
        conclude(self._plan, messages)


class TimelineStreamWriter(_PlannedWriter, DataSourceStreamArrowWriter):
    """Stream write: each micro-batch → put.

    Identical rows without an id collapse: they look like a micro-batch that is run again. Rows that are due already are
    delivered at once unless `past` says otherwise."""

    streaming = True

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Conclude a micro-batch."""
        conclude(self._plan, messages)
