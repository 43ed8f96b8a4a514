"""The event journal as a table, what is missing in it, and the job `compact`.

`compact` joins the many small files that brokers write, one partition (date, hour, topic) at a time. First a note lists
the files that the new one replaces. Then the new file appears, whole or not at all. Then the old files go, and the note
last. `live_files` counts each event once at any moment in between. The next run finishes one that died.
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
"""Prefix of a note beside a compacted file: a JSON list of the replaced files, which may still be there."""
_SCHEMES = {"file": "file://", "local": "file://", "s3": "s3a://", "s3a": "s3a://", "gcs": "gs://", "gs": "gs://"}

ROLL_MS = 60_000
"""How long an event waits for its file, if its broker has not reported it."""
SLACK_MS = 5_000
"""The longest time that writing a file takes."""
EVER_MS = 253_402_300_800_000
MOST = 1_000
LEAST_FILES = 2
SETTLED_MS = 2 * 3_600_000
"""Age of an hour after which its partition gets no more events, except from a broker whose clock is wrong."""


def live_files(url: str) -> list[str]:
    """Return the paths of the files that count: all except those that a compacted file has replaced."""
    filesystem, _ = at(url)
    there = names_in(url)
    files = {name for name in there if name.endswith(".parquet") and not name.rpartition("/")[2].startswith("_")}
    return sorted(files.difference(*_replaced(filesystem, there).values()))


def _replaced(filesystem: Any, there: Sequence[str]) -> dict[str, list[str]]:
    """Return the replaced files per note. A note whose new file is not there yet does not count: its run may be at
    work."""
    found: dict[str, list[str]] = {}
    files = set(there)
    for note in there:
        folder, _, name = note.rpartition("/")
        if name.startswith(NOTE) and f"{folder}/{name.removeprefix(NOTE).removesuffix('.json')}.parquet" in files:
            found[note] = [f"{folder}/{old}" for old in json.loads(filesystem.cat_file(note))]
    return found


def spark_path(url: str, path: str) -> str:
    """Return a path of `url`'s filesystem as Spark names it."""
    filesystem, _ = at(url)
    scheme = filesystem.protocol if isinstance(filesystem.protocol, str) else filesystem.protocol[0]
    return _SCHEMES.get(scheme, f"{scheme}://") + path


def journal(spark: SparkSession, url: str) -> DataFrame:
    """Return all events. Raise Invalid if there are none."""
    files = live_files(url)
    if not files:
        raise Invalid(
            f"there is no journal in {shown(url)}. Brokers write one with --journal URL, its first file within a minute"
        )
    _, path = at(url)
    reader = spark.read.schema(EVENTS).option("basePath", spark_path(url, path))
    return reader.parquet(*(spark_path(url, file) for file in files))


def is_kind(*kinds: str) -> Column:
    """Whether an event is of one of `kinds`."""
    return F.col("kind").isin(*kinds)


def rows_of(found: DataFrame) -> list[dict[str, Any]]:
    """Return a small result as plain values."""
    return [row.asDict(recursive=True) for row in found.collect()]


@dataclass
class Gap:
    """An interval in which `events` of a broker are missing; 0: an unknown number, because it was killed."""

    broker: str
    since_ms: int
    until_ms: int
    events: int


@dataclass
class Gaps:
    """`missing`: lost events. `coming`: events that running brokers have not written yet. `unended`: the broker of each
    session without an end."""

    missing: list[Gap] = field(default_factory=list)
    coming: list[Gap] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """All intervals, as (from, to) in ms."""
        return [(gap.since_ms, gap.until_ms) for gap in (*self.missing, *self.coming)]


def gaps(events: DataFrame, now_ms: int) -> Gaps:
    """Return the gaps in a journal, as of now."""
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
    """Return each broker session whose start is in the journal, by broker and time. `cut`: another process has reported
    its end, with the missing events."""
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
    """Add the gaps of a broker's sessions that have no end."""
    for row in sessions:
        if row["ended"]:
            continue
        found.unended.append(row["broker"])
        if row["cut"]:
            continue
        # The files of other topics may reach less far.
        since_ms = row["last_ms"] - row["wait_ms"] - SLACK_MS
        silent_ms = row["last_ms"] + row["wait_ms"] + SLACK_MS + IDLE_MS
        after = min((other["began_ms"] for other in sessions if other["began_ms"] > row["last_ms"]), default=0)
        if after or silent_ms < now_ms:
            found.missing.append(Gap(row["broker"], since_ms, after or silent_ms, 0))
        else:
            found.coming.append(Gap(row["broker"], since_ms, EVER_MS, 0))


@dataclass
class Compacted:
    """The result: `partitions` that had `files` before and have one each now, and their events."""

    partitions: int = 0
    files: int = 0
    events: int = 0


def compact(spark: SparkSession, url: str, older_ms: int = SETTLED_MS) -> Compacted:
    """Compact the partitions whose hour began longer ago than `older_ms`."""
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
    """Return the folders with several files, and the files."""
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
    """Remove replaced files that a run left when it died."""
    filesystem, _ = at(url)
    for note, files in _replaced(filesystem, names_in(url)).items():
        _retire(filesystem, note, files)


def _retire(filesystem: Any, note: str, files: Sequence[str]) -> None:
    """Remove the files, and then the note that names them. Another run may do the same at once."""
    for path in [*files, note]:
        try:
            filesystem.rm_file(path)
        except FileNotFoundError:
            pass  # another run has removed it
