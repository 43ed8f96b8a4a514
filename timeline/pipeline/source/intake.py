"""Arrow batches of rows → columns to put: judged as columns, what cannot be put set aside with its reason.

Nothing here makes an object a row, but for headers, which are encoded one by one where a row has any, and for ids that
are derived from a row's content. Rejected rows are kept as they came, with the reason beside them, so that they can be
mended and written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeline.columns import Bools, Int64, Ragged, Text, UInt64
from timeline.driver.batch import Batch, arrow_column
from timeline.driver.message import check_headers
from timeline.driver.times import LOOKS_LIKE_SECONDS
from timeline.errors import TimelineError
from timeline.model import MAX_ID_BYTES, MAX_PAYLOAD_BYTES, MAX_TAG_BYTES, MAX_TIME_MS
from timeline.pipeline.files import joined, write_table
from timeline.wire.validate import validate_texts

ID_BYTES = 16
"""A derived id: so many bytes of BLAKE2b, as hex digits."""

EXAMPLES = 10
ROWS_A_FILE = 100_000


@dataclass(slots=True)
class JudgedRows:
    """One Arrow batch: `good`, the rows that can be put, with their `batch`; `bad` rows by index with their reasons."""

    rows: pa.RecordBatch
    good: np.ndarray[Any, np.dtype[np.intp]]
    batch: Batch
    bad: dict[int, str] = field(default_factory=dict)
    derived: bool = False


class Judge:
    """Judges rows. `past_ms`: what is due by then is rejected, 0: nothing is."""

    def __init__(self, past_ms: int) -> None:
        self._past_ms = past_ms

    def judge(self, rows: pa.RecordBatch) -> JudgedRows:
        """What of `rows` can be put, as a batch, and why the others cannot."""
        bad = _Bad(rows.num_rows)
        due_ms = self._due_ms(rows, bad)
        columns = {name: rows.column(name) for name in rows.schema.names}
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

    def _due_ms(self, rows: pa.RecordBatch, bad: _Bad) -> Int64:
        column = rows.column("due")
        due_ms = _millis(column)
        bad.add(_nulls(column), "due is null")
        bad.add(due_ms < LOOKS_LIKE_SECONDS, "due lies before 1973: was it read with the wrong unit?")
        bad.add(due_ms > MAX_TIME_MS, "due lies after the year 9999")
        if self._past_ms:
            bad.add(due_ms <= self._past_ms, "due is past")
        return due_ms


class _Bad:
    """Which rows cannot be put, and the first reason of each."""

    def __init__(self, count: int) -> None:
        self.mask: Bools = np.zeros(count, dtype=np.bool_)
        self.reasons: dict[int, str] = {}

    def add(self, which: Bools, reason: str) -> None:
        """The rows where `which` is True are bad, for `reason` where nothing was said of them yet."""
        if which.any():
            fresh = which & ~self.mask
            self.reasons.update(dict.fromkeys(np.flatnonzero(fresh).tolist(), reason))
            self.mask |= which

    def add_one(self, at: int, reason: str) -> None:
        """The row `at` is bad."""
        if not self.mask[at]:
            self.mask[at] = True
            self.reasons[at] = reason


def _nulls(column: pa.Array) -> Bools:
    if not column.null_count:
        return np.zeros(len(column), dtype=np.bool_)
    marks: Bools = column.is_null().to_numpy(zero_copy_only=False)
    return marks


def _millis(column: pa.Array) -> Int64:
    """Timestamps of microseconds as milliseconds, rounded up: nothing is early. Null is 0."""
    whole = pc.fill_null(column.cast("int64"), 0) if column.null_count else column.cast("int64")
    micros: Int64 = whole.to_numpy()
    return -(-micros // 1_000)


def _sizes(column: pa.Array) -> Int64:
    sizes = pc.binary_length(column)
    found: Int64 = (pc.fill_null(sizes, 0) if sizes.null_count else sizes).to_numpy().astype(np.int64)
    return found


def _judge_payload(column: pa.Array, bad: _Bad) -> None:
    bad.add(_nulls(column), "payload is null: an empty one is ''")
    if column.nbytes > MAX_PAYLOAD_BYTES:
        bad.add(_sizes(column) > MAX_PAYLOAD_BYTES, f"payload is above {MAX_PAYLOAD_BYTES} bytes")


def _judge_text(column: pa.Array, name: str, least: int, most: int, bad: _Bad) -> None:
    if least:
        bad.add(_nulls(column), f"{name} is null")
    texts = arrow_column(pc.fill_null(column, "") if column.null_count else column, name)
    for at, why in validate_texts(texts, Text(name, least, most)).items():
        bad.add_one(at, why)


def _expires_ms(column: pa.Array | None, bad: _Bad) -> Int64:
    if column is None:
        return np.zeros(len(bad.mask), dtype=np.int64)
    expires_ms = _millis(column)
    present = ~_nulls(column)
    wrong = present & ((expires_ms < LOOKS_LIKE_SECONDS) | (expires_ms > MAX_TIME_MS))
    bad.add(wrong, "expires lies before 1973 or after the year 9999")
    return np.where(present, expires_ms, 0)


def _encoded(column: pa.Array | None, bad: _Bad) -> Ragged | None:
    """Headers as the wire has them; None where no row has any."""
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
    """An id for each row, out of all that it says: the same row has the same id, wherever and whenever it is
    written."""
    count = len(batch)
    fixed = np.zeros(count, dtype=[("due", "<i8"), ("expires", "<i8"), ("payload", "<u4"), ("tag", "<u2")])
    fixed["due"], fixed["payload"] = batch.time_ms, batch.payloads.sizes
    if batch.expires_ms is not None:
        fixed["expires"] = batch.expires_ms
    none = [b""] * count
    tags, headers = none, none
    if batch.tags is not None:
        fixed["tag"], tags = batch.tags.sizes, batch.tags.tolist()
    if batch.headers is not None:
        headers = batch.headers.tolist()
    heads = np.frombuffer(fixed.tobytes(), dtype=f"V{fixed.itemsize}").tolist()
    rows = zip(heads, tags, batch.payloads.tolist(), headers, strict=True)
    return Ragged.of([blake2b(b"".join(row), digest_size=ID_BYTES).hexdigest().encode() for row in rows])


def births_of(ids: Sequence[bytes], salt: int) -> UInt64:
    """Births out of derived ids and `salt`: the same again for the same row of the same part of the same run."""
    halves = np.frombuffer(bytes.fromhex(b"".join(id[:16] for id in ids).decode()), dtype="<u8") ^ np.uint64(salt)
    mixed = halves + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    mixed[mixed == 0] = 1
    return mixed


def salt_of(run: str, part: int) -> int:
    """64 bits for a part of a run."""
    return int.from_bytes(blake2b(f"{run}\0{part}".encode(), digest_size=8).digest(), "little")


class SeenBirths:
    """The ids that a part of a run has had, by half of their digest, in few sorted runs: to tell a row's first
    occurrence from the next. A wrong guess, once in 2^64 pairs, costs nothing: the broker compares the whole."""

    def __init__(self) -> None:
        self._runs: list[UInt64] = []

    def again(self, keys: UInt64) -> Bools:
        """Which of `keys` were there before, in an earlier call or earlier in this one; all are there from now on."""
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
    """A task's rejected rows. `path`: where to write them, empty: nowhere. `name`: that of this task's files, the same
    when the task runs again, so that it writes over what it wrote before."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._files: list[str] = []
        self.examples: list[tuple[str, str]] = []

    def add(self, rows: pa.RecordBatch, bad: dict[int, str]) -> None:
        """The rows at the indexes in `bad`, each with its reason."""
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
        """Writes what is left; the files that there are."""
        self._write()
        return self._files


def _shown(rows: pa.RecordBatch, place: int) -> str:
    """A row in a few words."""
    said: list[str] = []
    for name in ("id", "due", "tag"):
        if name in rows.schema.names:
            value: Any = rows.column(name)[place].as_py()
            said.append(f"{name}={value!s:.60}")
    return " ".join(said)
