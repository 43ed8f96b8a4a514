"""The job `compact`: the many small files that brokers write → few large ones, a partition (date, hour, topic) at a
time.

First a note that says which files the new one stands for, then the new one, whole or not at all, then the old ones go,
then the note. Readers of ours (`journal.live_files`) count each event once at any moment in between; a run that died is
finished by the next."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from timeline.clock import Clock
from timeline.pipeline.files import at, write_bytes
from timeline.pipeline.jobs.journal import NOTE, live_files

LEAST_FILES = 2
SETTLED_MS = 2 * 3_600_000
"""A partition whose hour began so long ago gets nothing more, but from a broker whose clock is wrong."""


@dataclass
class Compacted:
    """What was done: `partitions` with `files` before and one each now, and their events."""

    partitions: int = 0
    files: int = 0
    events: int = 0


def compact(spark: SparkSession, url: str, older_ms: int = SETTLED_MS) -> Compacted:
    """Compacts the partitions whose hour began longer ago than `older_ms`."""
    finish(url)
    todo = _partitions(url, Clock().now_ms() - older_ms)
    done = Compacted(partitions=len(todo))
    if not todo:
        return done
    tasks = spark.sparkContext.parallelize(list(todo.items()), len(todo))
    for files, events in tasks.mapPartitions(lambda some: _compact_some(url, some)).collect():
        done.files += files
        done.events += events
    return done


def _partitions(url: str, before_ms: int) -> dict[str, list[str]]:
    """Folders with several files, and these."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in live_files(url):
        found[path.rpartition("/")[0]].append(path)
    return {
        folder: files for folder, files in found.items() if len(files) >= LEAST_FILES and _hour_ms(folder) <= before_ms
    }


def _hour_ms(folder: str) -> int:
    said = dict(part.split("=", 1) for part in folder.split("/") if "=" in part)
    began = datetime.strptime(f"{said['date']} {said['hour']}", "%Y-%m-%d %H").replace(tzinfo=UTC)
    return int(began.timestamp() * 1000)


def _compact_some(url: str, some: Iterable[tuple[str, list[str]]]) -> Iterator[tuple[int, int]]:
    filesystem, _ = at(url)
    for folder, files in some:
        tables = [pq.read_table(pa.BufferReader(filesystem.cat_file(file))) for file in files]
        table = pa.concat_tables(tables).sort_by("time")
        name = f"c-{hashlib.sha256(' '.join(files).encode()).hexdigest()[:16]}"
        note = f"{folder}/{NOTE}{name}.json"
        _write(filesystem, note, json.dumps([file.rpartition("/")[2] for file in files]).encode())
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        _write(filesystem, f"{folder}/{name}.parquet", sink.getvalue().to_pybytes())
        _retire(filesystem, note, files)
        yield len(files), table.num_rows


def _write(filesystem: Any, path: str, data: bytes) -> None:
    write_bytes(filesystem.unstrip_protocol(path), data)


def finish(url: str) -> None:
    """Takes away what compacted files stand for, where a run died before it did. A note whose file is not there yet may
    be of a run that is at work: it stays, and says nothing until then."""
    filesystem, path = at(url)
    if filesystem.exists(path):
        for note in [name for name in filesystem.find(path) if name.rpartition("/")[2].startswith(NOTE)]:
            folder, _, name = note.rpartition("/")
            if filesystem.exists(f"{folder}/{name.removeprefix(NOTE).removesuffix('.json')}.parquet"):
                _retire(filesystem, note, [f"{folder}/{old}" for old in json.loads(filesystem.cat_file(note))])


def _retire(filesystem: Any, note: str, files: Sequence[str]) -> None:
    """The files go, and then the note that names them; another run may be at the same."""
    for path in [*files, note]:
        try:
            filesystem.rm_file(path)
        except FileNotFoundError:
            pass  # it is gone: that was all
