"""The process that writes the journal: parts in by a pipe, Parquet files out, below a folder or a bucket.

    URL/date=2026-11-21/hour=19/topic=departures/b1-3f2a90c4-000017.parquet

A file appears whole or not at all. It is written when it has `rows` events (500,000), or is `roll` old (60 s), or when
the broker ends. Both are set in the URL: `file:///var/journal?roll=10s&rows=100000`. `timeline pipeline compact` makes
few large files of many small ones. `FIELDS` has the columns; each file's metadata has the schema's version.
"""

from __future__ import annotations

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

from timeline.broker.journal.events import SCHEMA_VERSION
from timeline.broker.journal.pipe import HEAD, URL_VARIABLE
from timeline.clock import Clock
from timeline.config import parse_count, parse_duration_ms
from timeline.errors import Invalid
from timeline.files import no_filesystem, write_whole
from timeline.model import LateCause

log = logging.getLogger("timeline.journal")
ROLL_MS, ROWS = 60_000, 500_000
RETRY_MS = 5_000.0
LAST_TRIES = 3
MOST_KEPT = 4
"""Files whose events, of all topics together, wait for a disk that takes none. More are dropped."""
MOST_NAME = 100
"""Characters of a broker's name in a file's."""
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
OF_FEW_VALUES = ["kind", "version", "consumer", "group", "tag", "deliveries", "cause", "broker", "session"]
"""Columns with a dictionary. Ids, births and times differ for each event, and finding that out took three quarters of a
file's time."""
_CAUSES = pa.array([cause.name.lower() for cause in LateCause])


def split_url(url: str) -> tuple[str, int, int]:
    """Return the place, and after how many ms and how many events a file is written. Raise Invalid."""
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
            raise Invalid(no_filesystem(url, missing)) from missing
        if "@" in self._path.partition("/")[0]:
            raise Invalid(
                "credentials are not taken from a URL, which is shown and logged: put them into the environment, as "
                "the filesystem's documentation says"
            )
        self._local = isinstance(self._filesystem, LocalFileSystem)

    def check(self, session: str) -> None:
        """Raise OSError if nothing can be written. `session`: of this start; process ids are alike in containers."""
        name = f"{self._path}/_probe-{session}"
        if self._local:
            os.makedirs(self._path, exist_ok=True)
        self._filesystem.pipe_file(name, b"")
        self._filesystem.rm_file(name)

    def write(self, name: str, table: pa.Table) -> None:
        """Write a file, whole or not at all."""
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", compression_level=1, use_dictionary=OF_FEW_VALUES)
        data = sink.getvalue()
        path = f"{self._path}/{name}"
        if not self._local:
            self._filesystem.pipe_file(path, data.to_pybytes())
            return
        write_whole(path, memoryview(data))


class PendingFile:
    """The unwritten events of one topic in one hour. `missing`: how many of their weight are missing."""

    def __init__(self, since_ms: float) -> None:
        self.since_ms, self.not_before_ms = since_ms, 0.0
        self.parts: list[tuple[str, int, int, dict[str, Any]]] = []
        self.rows = self.weight = self.missing = self.oldest_ms = 0

    def add(self, kind: str, time_ms: int, count: int, columns: dict[str, Any], weight: int) -> None:
        """`weight`: how many of the broker's events are gone with it."""
        self.parts.append((kind, time_ms, count, columns))
        self.rows += count
        self.weight += weight
        # An event that counts missing ones says since when.
        began_ms = int(columns.get("due") or time_ms) if kind == "dropped" else time_ms
        self.oldest_ms = min(self.oldest_ms or began_ms, began_ms)

    def table(self, broker: str, session: str) -> pa.Table:
        """Return its events as the file has them, in order of time."""
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
    """Return a part's column for Arrow: null where the part has none, and for empty texts and times of 0."""
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
        return pa.repeat(pa.scalar(column.decode(errors="replace") or None, kind), count)
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


class JournalWriter:
    """Gathers parts, writes files, and counts what becomes of events.

    `told(written, since_ms, dropped, unsaid)` is called after each try:

    - `written`: how many of the added events are in files. `since_ms`: since when there may be others.
    - `dropped`: how many were dropped here.
    - `unsaid`: how many missing events, counted by the broker, no file mentions yet.

    `run`: earlier writers of this session, whose files stay.
    """

    def __init__(
        self,
        folder: Folder,
        broker: str,
        session: str,
        roll_ms: int,
        rows: int,
        run: int = 0,
        told: Callable[[int, int, int, int], None] = lambda written, since_ms, dropped, unsaid: None,
    ) -> None:
        self._folder, self._broker, self._session = folder, broker, session
        self._roll_ms, self._rows, self._told = roll_ms, rows, told
        named = quote(broker, safe="")[:MOST_NAME]
        named = f"%{ord(named[0]):02X}{named[1:]}" if named[0] in "_." else named  # else readers take it for hidden
        self._name = f"{named}-{session}{f'r{run}' if run else ''}"
        self._clock = Clock()
        self._partitions: dict[str, PendingFile] = {}
        self._files = self._held = self._written = self._dropped = self._last_ms = 0
        self._lock = threading.Lock()

    def began(self) -> None:
        """Write from now on. An event is in a file by `until`."""
        now_ms = self._clock.now_ms()
        with self._lock:
            self._gather("started", "", now_ms, 1, {"until": now_ms + self._roll_ms}, 0)

    def add(self, kind: str, topic: str, time_ms: int, count: int, columns: dict[str, Any]) -> None:
        """Gather a part, and write its file when that is full."""
        with self._lock:
            # A part that says how many others are missing takes these along.
            weight = int(columns.get("count", 1)) if kind == "dropped" else count
            name = self._gather(kind, topic, time_ms, count, columns, weight)
            if kind == "dropped":
                self._partitions[name].missing += weight
            self._last_ms = time_ms
            partition = self._partitions[name]
            if partition.rows >= self._rows and partition.not_before_ms <= self._clock.monotonic_ms():
                self._write(name)

    def _gather(self, kind: str, topic: str, time_ms: int, count: int, columns: dict[str, Any], weight: int) -> str:
        at = datetime.fromtimestamp(time_ms / 1000, UTC)
        name = f"date={at:%Y-%m-%d}/hour={at:%H}/topic={folder_name(topic) or NO_TOPIC}"
        partition = self._partitions.get(name)
        if partition is None:
            partition = self._partitions[name] = PendingFile(self._clock.monotonic_ms())
        partition.add(kind, time_ms, count, columns, weight)
        self._held += count
        return name

    def roll(self, everything: bool = False) -> None:
        """Write files that are old enough, or all. The journal's own events come last, and say what could not be
        written."""
        with self._lock:
            now_ms = self._clock.monotonic_ms()
            for name in sorted(self._partitions, key=lambda name: name.endswith(NO_TOPIC)):
                partition = self._partitions[name]
                due_ms = max(partition.since_ms + self._roll_ms, partition.not_before_ms)
                if everything or due_ms <= now_ms:
                    self._write(name)

    def _write(self, name: str) -> None:
        partition = self._partitions.pop(name)
        self._files += 1
        file = f"{name}/{self._name}-{self._files:06d}.parquet"
        try:
            self._folder.write(file, partition.table(self._broker, self._session))
        except Exception as trouble:  # what a filesystem raises is of any kind
            log.error("the journal cannot write %s: %s", file, trouble)
            partition.not_before_ms = self._clock.monotonic_ms() + RETRY_MS
            if self._held <= MOST_KEPT * self._rows:
                self._partitions[name] = partition
            else:
                # A disk that stays full ends in events that are missing, and said to be, not in memory that runs out.
                self._drop(partition)
        else:
            self._held -= partition.rows
            self._written += partition.weight
        left = self._partitions.values()
        since_ms = min([*(partition.oldest_ms for partition in left), self._last_ms])
        self._told(self._written, since_ms, self._dropped, sum(partition.missing for partition in left))

    def _drop(self, partition: PendingFile) -> None:
        """Keep one event instead of all of a partition's."""
        since_ms, until_ms, lost = partition.oldest_ms, partition.parts[-1][1], partition.weight
        self._held -= partition.rows
        missing = {"count": lost, "due": since_ms} if lost else {"due": since_ms}
        self._dropped += lost - partition.missing
        self._partitions[self._gather("dropped", "", until_ms, 1, missing, lost)].missing += lost

    def cut_off(self) -> None:
        """Note that nothing more comes, though the broker has not said that it ends. An unknown number of events is
        lost."""
        with self._lock:
            now_ms = self._clock.now_ms()
            self._gather("dropped", "", now_ms, 1, {"due": min(self._last_ms or now_ms, now_ms)}, 0)

    def close(self, pause: Callable[[float], object]) -> int:
        """Write all, with another try or two after `pause`. Return how many added events are in no file."""
        for _ in range(LAST_TRIES):
            self.roll(everything=True)
            if not self._partitions:
                return 0
            pause(RETRY_MS / 1000)
        with self._lock:
            for name in [name for name in self._partitions if not name.endswith(NO_TOPIC)]:
                self._drop(self._partitions.pop(name))
        self.roll(everything=True)
        return sum(partition.weight for partition in self._partitions.values())


def folder_name(topic: str) -> str:
    """Return a topic as a folder's name, as Hive and Spark read it: special ASCII characters as %XX."""
    return "".join(one if ord(one) > 127 or one.isalnum() or one in "_.-~" else f"%{ord(one):02X}" for one in topic)


def parts(pipe: BinaryIO) -> Iterator[tuple[str, str, int, int, dict[str, Any]]]:
    """Yield what comes through the pipe, until it ends. A part that was cut off is left out."""
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


def _rolling(writer: JournalWriter, over: threading.Event, every_s: float) -> None:
    while not over.wait(every_s):
        writer.roll()


def _step_back() -> None:
    """Run at the lowest priority that this system grants."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        os.nice(19)


def _tell(*said: int) -> None:
    try:
        print(*said, flush=True)
    except OSError:
        pass  # the broker is gone: nobody asks any more


def main(arguments: list[str]) -> int:
    """Read parts from standard input until it ends.

    Print `ready` once it can write, or why it cannot, then its progress. Return 1 if events are lost and the journal
    cannot say so.
    """
    broker, session, run = arguments
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when the broker has
    try:
        place, roll_ms, rows = split_url(os.environ[URL_VARIABLE])
        folder = Folder(place)
        folder.check(session)
    except Exception as trouble:  # each kind of place has errors of its own
        said = getattr(trouble, "reason", "") or str(trouble) or repr(trouble)
        print(" ".join(str(said).split()), flush=True)
        return 1
    _step_back()
    writer = JournalWriter(folder, broker, session, roll_ms, rows, int(run), _tell)
    writer.began()
    print("ready", flush=True)
    over = threading.Event()
    rolling = threading.Thread(target=_rolling, args=(writer, over, min(1.0, roll_ms / 2_000)), daemon=True)
    rolling.start()
    stopped = False
    for kind, topic, time_ms, count, columns in parts(sys.stdin.buffer):
        writer.add(kind, topic, time_ms, count, columns)
        stopped |= kind == "stopped"
    over.set()
    rolling.join()
    if not stopped:
        writer.cut_off()
    lost = writer.close(threading.Event().wait)
    if lost:
        log.error("%d events of the journal are in no file, and nothing in it says so", lost)
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
