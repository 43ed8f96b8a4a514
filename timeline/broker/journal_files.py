"""The process that writes the journal: parts in by a pipe, Parquet files out, below a folder or a bucket.

    URL/date=2026-11-21/hour=19/topic=departures/b1-3f2a90c4-000017.parquet

A file appears whole or not at all. It is written when it has `rows` events (500,000) or is `roll` old (60 s), both
settable in the URL: `file:///var/journal?roll=10s&rows=100000`; and when the broker ends, however it ends. `timeline
pipeline compact` makes few large files of many small ones. Columns stand in `FIELDS`; the schema's version in each
file's metadata."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, quote

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from timeline.broker.journal import SCHEMA_VERSION
from timeline.broker.journal_pipe import DROPPED, HEAD, URL_VARIABLE
from timeline.clock import Clock
from timeline.config import parse_count, parse_duration_ms
from timeline.errors import Invalid
from timeline.wire.frames import Cause

log = logging.getLogger("timeline.journal")
ROLL_MS, ROWS = 60_000, 500_000
RETRY_MS = 5_000.0
MOST_KEPT = 4
"""So many files' events wait for a disk that takes none; then they are dropped."""
NO_TOPIC = "__HIVE_DEFAULT_PARTITION__"
TIMES = pa.timestamp("ms", tz="UTC")
FIELDS: dict[str, pa.DataType] = {
    "time": TIMES,
    "kind": pa.string(),
    "id": pa.string(),
    "birth": pa.int64(),
    "version": pa.int64(),
    "due": TIMES,
    "until": TIMES,
    "expires": TIMES,
    "consumer": pa.string(),
    "group": pa.string(),
    "tag": pa.string(),
    "lateness": pa.int64(),
    "deliveries": pa.int32(),
    "again": pa.bool_(),
    "cause": pa.string(),
    "payload_bytes": pa.int64(),
    "payload_sum": pa.int64(),
    "count": pa.int64(),
    "broker": pa.string(),
    "session": pa.string(),
}
_CAUSES = pa.array([cause.name.lower() for cause in Cause])


def split_url(url: str) -> tuple[str, int, int]:
    """The place, after how many ms and after how many events a file is written. Raises Invalid."""
    place, _, asked = url.partition("?")
    settings = dict(parse_qsl(asked, keep_blank_values=True))
    roll_ms = parse_duration_ms(settings.pop("roll", ROLL_MS / 1000))
    rows = parse_count(settings.pop("rows", ROWS))
    if settings:
        raise Invalid(f"the journal's URL has no setting {next(iter(settings))!r}; there are roll and rows")
    if not place or roll_ms < 100 or not 1 <= rows <= 100_000_000:
        raise Invalid("a journal is a URL such as file:///var/journal?roll=60s&rows=500000, rolled at 100 ms or later")
    return place, roll_ms, rows


class Folder:
    """Where the files go."""

    def __init__(self, url: str) -> None:
        try:
            self._filesystem, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as missing:
            raise Invalid(f"{url.partition('://')[0]}: {missing}") from missing
        self._local = isinstance(self._filesystem, LocalFileSystem)

    def check(self) -> None:
        """Raises OSError when nothing can be written."""
        name = f"{self._path}/_probe-{os.getpid()}"
        if self._local:
            os.makedirs(self._path, exist_ok=True)
        self._filesystem.pipe_file(name, b"")
        self._filesystem.rm_file(name)

    def write(self, name: str, table: pa.Table) -> None:
        """Writes a file, whole or not at all."""
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", compression_level=1)
        data = sink.getvalue()
        path = f"{self._path}/{name}"
        if not self._local:
            self._filesystem.pipe_file(path, data.to_pybytes())
            return
        folder, _, last = path.rpartition("/")
        os.makedirs(folder, exist_ok=True)
        part = f"{folder}/_{last}.part"
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):  # what is half written would keep a full disk full
                os.remove(part)
            raise


class Partition:
    """The events of one topic in one hour that are not written yet."""

    def __init__(self, since_ms: float) -> None:
        self.since_ms, self.not_before_ms = since_ms, 0.0
        self.parts: list[tuple[str, int, int, dict[str, Any]]] = []
        self.rows = 0

    def add(self, kind: str, time_ms: int, count: int, columns: dict[str, Any]) -> None:
        self.parts.append((kind, time_ms, count, columns))
        self.rows += count

    def table(self, broker: str, session: str) -> pa.Table:
        """Its events as the file has them, in order of time."""
        columns = {name: self._column(name, kind) for name, kind in FIELDS.items() if name not in _OWN}
        counts = [count for _, _, count, _ in self.parts]
        columns["time"] = pa.array(np.repeat([time_ms for _, time_ms, _, _ in self.parts], counts), pa.int64()).cast(
            TIMES
        )
        kinds = pa.array([kind for kind, _, _, _ in self.parts])
        columns["kind"] = kinds.take(pa.array(np.repeat(np.arange(len(counts)), counts)))
        columns["broker"] = pa.repeat(broker, self.rows)
        columns["session"] = pa.repeat(session, self.rows)
        table = pa.table({name: columns[name] for name in FIELDS}, schema=pa.schema(list(FIELDS.items())))
        return table.replace_schema_metadata({"timeline.journal": str(SCHEMA_VERSION)})

    def _column(self, name: str, kind: pa.DataType) -> pa.ChunkedArray:
        chunks = [_array(name, kind, count, columns) for _, _, count, columns in self.parts]
        return pa.chunked_array(chunks, kind)


_OWN = ("time", "kind", "broker", "session")


def _array(name: str, kind: pa.DataType, count: int, columns: dict[str, Any]) -> pa.Array:
    """A part's column as Arrow has it; null where the part has none, and for empty texts and times of 0."""
    column = columns.get(name)
    if column is None:
        if name == "cause" and "late_cause" in columns:
            codes = columns["late_cause"]
            return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes == 255), _CAUSES).cast(pa.string())
        return pa.nulls(count, kind)
    if isinstance(column, tuple):
        data, offsets = column
        return _texts(bytes(data), offsets)
    if isinstance(column, bytes):
        return pa.repeat(pa.scalar(column.decode() or None, kind), count)
    if isinstance(column, int):
        if kind == TIMES and not column:
            return pa.nulls(count, kind)
        return pa.repeat(pa.scalar(column, pa.int64()), count).cast(kind)
    if kind == TIMES:
        return pa.array(column, pa.int64(), mask=column == 0).cast(TIMES)
    if kind == pa.bool_():
        return pa.array(column.astype(np.bool_))
    return pa.array(column.view(np.int64) if column.dtype == np.uint64 else column).cast(kind)


def _texts(data: bytes, offsets: np.ndarray[Any, Any]) -> pa.Array:
    first, marks = int(offsets[0]), np.ascontiguousarray(offsets - offsets[0], dtype=np.int32)
    there = np.diff(marks) > 0
    mask = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little").tobytes())
    buffers = [mask, pa.py_buffer(marks), pa.py_buffer(data[first : first + int(marks[-1])])]
    return pa.Array.from_buffers(pa.string(), len(marks) - 1, buffers)


class Writer:
    """Gathers parts and writes files. `dropped` is told how many events a place that took nothing for long cost."""

    def __init__(
        self,
        folder: Folder,
        broker: str,
        session: str,
        roll_ms: int,
        rows: int,
        dropped: Callable[[int], None] = lambda events: None,
    ) -> None:
        self._folder, self._broker, self._session = folder, broker, session
        self._roll_ms, self._rows, self._dropped = roll_ms, rows, dropped
        self._clock = Clock()
        self._partitions: dict[str, Partition] = {}
        self._files = 0
        self._lock = threading.Lock()

    def add(self, kind: str, topic: str, time_ms: int, count: int, columns: dict[str, Any]) -> None:
        """Gathers a part; writes its file when that is full."""
        with self._lock:
            name = self._gather(kind, topic, time_ms, count, columns)
            partition = self._partitions[name]
            if partition.rows >= self._rows and partition.not_before_ms <= self._clock.monotonic_ms():
                self._write(name)

    def _gather(self, kind: str, topic: str, time_ms: int, count: int, columns: dict[str, Any]) -> str:
        at = datetime.fromtimestamp(time_ms / 1000, UTC)
        name = f"date={at:%Y-%m-%d}/hour={at:%H}/topic={quote(topic, safe='') or NO_TOPIC}"
        partition = self._partitions.get(name)
        if partition is None:
            partition = self._partitions[name] = Partition(self._clock.monotonic_ms())
        partition.add(kind, time_ms, count, columns)
        return name

    def roll(self) -> None:
        """Writes what is old enough."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            for name, partition in list(self._partitions.items()):
                due_ms = max(partition.since_ms + self._roll_ms, partition.not_before_ms)
                if due_ms <= now_ms:
                    self._write(name)

    def finish(self) -> None:
        """Writes all there is, the broker's own events last: what cannot be written is told there as dropped."""
        with self._lock:
            while self._partitions:
                self._write(min(self._partitions, key=lambda name: name.endswith(NO_TOPIC)), last=True)

    def _write(self, name: str, last: bool = False) -> None:
        """Writes a file; keeps its events for another try where that fails, unless this was the `last`."""
        partition = self._partitions.pop(name)
        self._files += 1
        file = f"{name}/{quote(self._broker, safe='')}-{self._session}-{self._files:06d}.parquet"
        try:
            self._folder.write(file, partition.table(self._broker, self._session))
        except Exception as trouble:  # each kind of place has errors of its own
            log.error("the journal cannot write %s: %s", file, trouble)
            partition.not_before_ms = self._clock.monotonic_ms() + RETRY_MS
            if partition.rows < MOST_KEPT * self._rows and not last:
                self._partitions[name] = partition
            elif not (last and name.endswith(NO_TOPIC)):
                # A disk that stays full ends in events that are missing, and said to be, not in memory that runs out.
                _, since_ms, _, _ = partition.parts[0]
                _, until_ms, _, _ = partition.parts[-1]
                self._gather("dropped", "", until_ms, 1, {"count": partition.rows, "due": since_ms})
                self._dropped(partition.rows)


def parts(pipe: BinaryIO) -> Iterator[tuple[str, str, int, int, dict[str, Any]]]:
    """What comes through the pipe, until it ends; a part that was cut off is left out."""
    while len(start := pipe.read(HEAD.size)) == HEAD.size:
        length, count = HEAD.unpack(start)
        lengths = pipe.read(8 * count)
        head = pipe.read(length)
        buffers = (
            [pipe.read(size) for size in struct.unpack(f"<{count}Q", lengths)] if len(lengths) == 8 * count else []
        )
        whole = len(head) == length and len(buffers) == count
        if not whole or any(
            len(one) < size for one, size in zip(buffers, struct.unpack(f"<{count}Q", lengths), strict=True)
        ):
            return
        yield pickle.loads(head, buffers=buffers)


def _tell_dropped(events: int) -> None:
    with contextlib.suppress(OSError):  # the broker is gone: nobody counts any more
        os.write(sys.stdout.fileno(), DROPPED + b"%d\n" % events)


def _rolling(writer: Writer, over: threading.Event, every_s: float) -> None:
    while not over.wait(every_s):
        writer.roll()


def main(arguments: list[str]) -> int:
    """Writes parts from standard input, until it ends, to the place that the variable `URL_VARIABLE` names. Says
    `ready` once it can write, or why it cannot."""
    broker, session = arguments
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when the broker has
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        place, roll_ms, rows = split_url(os.environ[URL_VARIABLE])
        folder = Folder(place)
        folder.check()
    except Exception as trouble:  # each kind of place has errors of its own
        said = getattr(trouble, "reason", "") or str(trouble) or repr(trouble)
        print(" ".join(str(said).split()), flush=True)
        return 1
    writer = Writer(folder, broker, session, roll_ms, rows, _tell_dropped)
    writer.add("started", "", Clock().now_ms(), 1, {})
    print("ready", flush=True)
    over = threading.Event()
    rolling = threading.Thread(target=_rolling, args=(writer, over, min(1.0, roll_ms / 2_000)), daemon=True)
    rolling.start()
    for kind, topic, time_ms, count, columns in parts(sys.stdin.buffer):
        writer.add(kind, topic, time_ms, count, columns)
    over.set()
    rolling.join()
    writer.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
