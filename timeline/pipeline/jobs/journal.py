"""The event journal as a table, what is missing in it, and the job `compact`.

`compact` makes few large files of the many small ones that brokers write, a partition (date, hour, topic) at a time.
First a note says which files the new one stands for. Then the new file appears, whole or not at all. Then the old ones
go, and then the note. `live_files` counts each event once at any moment in between. The next run finishes one that
died.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.broker.journal.events import IDLE_MS
from timeline.clock import Clock
from timeline.errors import Invalid
from timeline.pipeline.files import at, names_in, write_bytes, write_table
from timeline.storage_plugins import shown

EVENTS = """
time timestamp, kind string, id string, birth long, version long, due timestamp, until timestamp, expires timestamp,
consumer string, `group` string, tag string, lateness long, deliveries int, again boolean, cause string,
payload_bytes long, payload_sum long, count long, broker string, session string, date string, hour int, topic string
"""
NOTE = "_replaces-"
"""Beside a compacted file, while the files that it replaces may still be there: a JSON list of their names."""
_SCHEMES = {"file": "file://", "local": "file://", "s3": "s3a://", "s3a": "s3a://", "gcs": "gs://", "gs": "gs://"}

ROLL_MS = 60_000
"""How long an event waits for its file where its broker has not said so."""
SLACK_MS = 5_000
"""Writing a file takes so long, or less."""
EVER_MS = 253_402_300_800_000
MOST = 1_000
LEAST_FILES = 2
SETTLED_MS = 2 * 3_600_000
"""A partition whose hour began so long ago gets nothing more, but from a broker whose clock is wrong."""


def live_files(url: str) -> list[str]:
    """The paths of the files that count: all but those that a compacted one stands for already."""
    filesystem, _ = at(url)
    there = names_in(url)
    files = {name for name in there if name.endswith(".parquet") and not name.rpartition("/")[2].startswith("_")}
    return sorted(files.difference(*_replaced(filesystem, there).values()))


def _replaced(filesystem: Any, there: Sequence[str]) -> dict[str, list[str]]:
    """Of each note whose new file is there, the files that it stands for. A note whose file is not there yet may be of
    a run that is at work: it says nothing until then."""
    found: dict[str, list[str]] = {}
    files = set(there)
    for note in there:
        folder, _, name = note.rpartition("/")
        if name.startswith(NOTE) and f"{folder}/{name.removeprefix(NOTE).removesuffix('.json')}.parquet" in files:
            found[note] = [f"{folder}/{old}" for old in json.loads(filesystem.cat_file(note))]
    return found


def spark_path(url: str, path: str) -> str:
    """A path of `url`'s filesystem as Spark names it."""
    filesystem, _ = at(url)
    scheme = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    return _SCHEMES.get(scheme, f"{scheme}://") + path


def journal(spark: SparkSession, url: str) -> DataFrame:
    """All events. Raises Invalid when there are none."""
    files = live_files(url)
    if not files:
        raise Invalid(
            f"there is no journal in {shown(url)}: brokers write one with --journal URL, its first file within a minute"
        )
    _, path = at(url)
    reader = spark.read.schema(EVENTS).option("basePath", spark_path(url, path))
    return reader.parquet(*(spark_path(url, file) for file in files))


def is_kind(*kinds: str) -> Column:
    """Whether an event is of one of `kinds`."""
    return F.col("kind").isin(*kinds)


def rows_of(found: DataFrame) -> list[dict[str, Any]]:
    """A small result as plain values."""
    return [row.asDict(recursive=True) for row in found.collect()]


@dataclass
class Gap:
    """From when until when `events` events are missing of a broker; 0: nobody knows how many, for it was killed."""

    broker: str
    since_ms: int
    until_ms: int
    events: int


@dataclass
class Gaps:
    """`missing`: what will never be known. `coming`: since when a broker that is running has not written. `unended`:
    sessions of brokers that never said that they ended."""

    missing: list[Gap] = field(default_factory=list)
    coming: list[Gap] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """From when until when of all of it."""
        return [(gap.since_ms, gap.until_ms) for gap in (*self.missing, *self.coming)]


def gaps(events: DataFrame, now_ms: int) -> Gaps:
    """The gaps in a journal that is looked at now."""
    dropped = events.where(is_kind("dropped"))
    columns = ("broker", F.unix_millis("due").alias("since_ms"), F.unix_millis("time").alias("until_ms"), "count")
    found = Gaps()
    for row in rows_of(dropped.select(*columns).orderBy("since_ms").limit(MOST)):
        since_ms = row["until_ms"] if row["since_ms"] is None else row["since_ms"]
        found.missing.append(Gap(row["broker"], since_ms, row["until_ms"], row["count"] or 0))
    for _, sessions in groupby(_sessions(events), key=lambda row: row["broker"]):
        _judge(list(sessions), now_ms, found)
    found.missing.sort(key=lambda gap: gap.since_ms)
    return found


def _sessions(events: DataFrame) -> list[dict[str, Any]]:
    """Each run of a broker that the journal knows the beginning of, by broker and time. `cut`: its end was noted by
    others, and with it what is missing."""
    wait = F.when(is_kind("started"), F.unix_millis("until") - F.unix_millis("time"))
    told = events.where(F.col("session").isNotNull()).groupBy("broker", "session").agg(
        F.bool_or(is_kind("started")).alias("began_here"),
        F.bool_or(is_kind("stopped")).alias("ended"),
        F.bool_or(is_kind("dropped") & F.col("count").isNull()).alias("cut"),
        F.unix_millis(F.min("time")).alias("began_ms"),
        F.unix_millis(F.max("time")).alias("last_ms"),
        F.coalesce(F.max(wait), F.lit(ROLL_MS)).alias("wait_ms"),
    )  # fmt: skip
    recent = told.where("began_here").orderBy(F.desc("began_ms")).limit(10 * MOST)
    return sorted(rows_of(recent), key=lambda row: (row["broker"], row["began_ms"]))


def _judge(sessions: Sequence[dict[str, Any]], now_ms: int, found: Gaps) -> None:
    """What is missing of those of a broker's sessions that have not ended."""
    for row in sessions:
        if row["ended"]:
            continue
        found.unended.append(row["broker"])
        if row["cut"]:
            continue
        # Other topics' files may not have come as far as the one that did.
        since_ms = row["last_ms"] - row["wait_ms"] - SLACK_MS
        silent_ms = row["last_ms"] + row["wait_ms"] + SLACK_MS + IDLE_MS
        after = min((other["began_ms"] for other in sessions if other["began_ms"] > row["last_ms"]), default=0)
        if after or silent_ms < now_ms:
            found.missing.append(Gap(row["broker"], since_ms, after or silent_ms, 0))
        else:
            found.coming.append(Gap(row["broker"], since_ms, EVER_MS, 0))


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
        named = [file.rpartition("/")[2] for file in files]
        write_bytes(filesystem.unstrip_protocol(note), json.dumps(named).encode())
        write_table(filesystem.unstrip_protocol(f"{folder}/{name}.parquet"), table)
        _retire(filesystem, note, files)
        yield len(files), table.num_rows


def finish(url: str) -> None:
    """Takes away what compacted files stand for, where a run died before it did."""
    filesystem, _ = at(url)
    for note, files in _replaced(filesystem, names_in(url)).items():
        _retire(filesystem, note, files)


def _retire(filesystem: Any, note: str, files: Sequence[str]) -> None:
    """The files go, and then the note that names them; another run may be at the same."""
    for path in [*files, note]:
        try:
            filesystem.rm_file(path)
        except FileNotFoundError:
            pass  # it is gone: that was all
