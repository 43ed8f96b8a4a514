"""The job `backup`: a topic, payloads and dead letters included, → Parquet with a manifest.

    URL/manifest.json               what the backup is of, what is in it, and checksums
    URL/chunks/0003.json            what chunk 3 has; there once it is written
    URL/data/chunk=0003/*.parquet   messages of some buckets

The job goes through the topic's buckets in chunks. A chunk that is written stays, and a backup that died goes on with
the next one. A backup without a manifest was never finished; one whose manifest does not fit its files was tampered
with or is damaged. What a topic does meanwhile shows as it stood when its bucket was read: to have one instant of it,
pause it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.errors import Invalid, TimelineError
from timeline.model import TopicSettings
from timeline.pipeline.connection import SparkConnection, first_line
from timeline.pipeline.files import joined, read_json, write_json
from timeline.pipeline.session import Progress, quiet, watched
from timeline.pipeline.source.columns import read_schema
from timeline.storage_plugins import shown

VERSION = 1
CHUNKS = 8
KEPT = ("id", "scheduled", "tag", "group", "expires", "died", "dead", "payload_sum", "payload", "headers")
"""What must be the same after a restore; the rest of a row tells how it stood."""


@dataclass
class Chunk:
    """What a part of a backup has: messages of the buckets from `first` to before `end`."""

    number: int
    first: int
    end: int
    messages: int = 0
    dead: int = 0
    payload_bytes: int = 0
    checksum: str = ""


@dataclass
class Manifest:
    """What a backup has. `taken_ms`, `until_ms`: when it was begun, and when it was over."""

    topic: str
    uid: str
    settings: dict[str, Any]
    taken_ms: int
    chunks: list[Chunk] = field(default_factory=list)
    until_ms: int = 0
    version: int = VERSION
    complete: bool = False

    @property
    def messages(self) -> int:
        """How many messages it has, dead letters included."""
        return sum(chunk.messages for chunk in self.chunks)

    @property
    def dead(self) -> int:
        """How many dead letters."""
        return sum(chunk.dead for chunk in self.chunks)

    @property
    def payload_bytes(self) -> int:
        """Bytes of payloads."""
        return sum(chunk.payload_bytes for chunk in self.chunks)

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return asdict(self) | {"messages": self.messages, "dead": self.dead, "payload_bytes": self.payload_bytes}

    def topic_settings(self) -> TopicSettings:
        """The topic's settings when it was taken."""
        return TopicSettings(**self.settings).check()


def read_manifest(url: str) -> Manifest:
    """The manifest of a finished backup. Raises Invalid for what is none."""
    told = read_json(joined(url, "manifest.json"))
    if told is None:
        raise Invalid(
            f"{shown(url)} has no manifest: it is no backup, or one that was not finished "
            "(the same again goes on with it)"
        )
    if not isinstance(told, dict) or told.get("version") != VERSION or not told.get("complete"):
        raise Invalid(f"the manifest of {shown(url)} is not one of version {VERSION} of a finished backup")
    names = ("topic", "uid", "settings", "taken_ms", "until_ms")
    try:
        chunks = [chunk for told_of in told["chunks"] if (chunk := chunk_of(told_of, url))]
        read = Manifest(**{name: told[name] for name in names}, chunks=chunks, complete=True)
        read.topic_settings()
    except (KeyError, TypeError, TimelineError) as bad:
        raise Invalid(f"the manifest of {shown(url)} was changed or is damaged: {bad}") from bad
    return read


def chunk_of(told: Any, url: str) -> Chunk | None:
    """The chunk that the JSON in `url` tells of; None where it tells of none. Raises Invalid for what cannot be
    meant."""
    if told is None:
        return None
    try:
        chunk = Chunk(**told)
    except TypeError as bad:
        raise Invalid(f"{shown(url)} is damaged: it tells of no chunk") from bad
    numbers = (chunk.number, chunk.first, chunk.end, chunk.messages, chunk.dead, chunk.payload_bytes)
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(chunk.checksum, str):
        raise Invalid(f"{shown(url)} is damaged: its chunk has {chunk}")
    return chunk


def measure(rows: DataFrame, chunk: Chunk) -> Chunk:
    """Return `chunk` with what `rows` amount to: messages, dead letters, bytes of payload, and a checksum over all that
    is kept."""
    one = F.xxhash64(*(F.col(name) if name != "headers" else F.to_json("headers") for name in KEPT))
    # Two sums: of rows that were exchanged for others, or are there twice, one of them shows.
    found = rows.agg(
        F.count("*").alias("messages"),
        F.count("died").alias("dead"),
        F.coalesce(F.sum(F.octet_length("payload").cast("long")), F.lit(0)).alias("payload_bytes"),
        F.coalesce(F.hex(F.bit_xor(one)), F.lit("0")).alias("xor"),
        F.coalesce(F.sum(one.cast("decimal(38,0)")), F.lit(0)).cast("string").alias("sum"),
    ).head()
    assert found is not None
    counts = {name: found[name] for name in ("messages", "dead", "payload_bytes")}
    return replace(chunk, **counts, checksum=f"{found['xor']}-{found['sum']}")


def data_of(spark: SparkSession, url: str, chunks: Sequence[Chunk]) -> DataFrame:
    """The messages of these chunks."""
    schema = read_schema(payload=True)
    if not chunks:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*(chunk_path(url, chunk) for chunk in chunks))


def chunk_path(url: str, chunk: Chunk) -> str:
    """Where a chunk's files are."""
    return joined(url, "data", f"chunk={chunk.number:04d}")


def check_files(spark: SparkSession, url: str, manifest: Manifest) -> None:
    """Raises Invalid where the files are not those that the manifest tells of."""
    for chunk in manifest.chunks:
        if not chunk.messages:
            continue
        try:
            found = measure(data_of(spark, url, [chunk]), chunk)
        except (PySparkException, Py4JError) as trouble:
            raise Invalid(f"chunk {chunk.number} of {shown(url)} cannot be read: {first_line(trouble)}") from trouble
        if found != chunk:
            raise Invalid(
                f"chunk {chunk.number} of {shown(url)} is not what its manifest says: {found.messages} messages "
                f"with checksum {found.checksum}, not {chunk.messages} with {chunk.checksum}. "
                "The backup was changed or is damaged"
            )


def backup(
    spark: SparkSession, addresses: str, topic: str, url: str, chunks: int = CHUNKS, progress: Progress = quiet
) -> Manifest:
    """Writes the topic's messages below `url`; answers the manifest. Raises Invalid when another backup is there,
    NotFound or Unavailable; the same call goes on after the last chunk that was written."""
    with SparkConnection(addresses) as connection:
        record = connection.topic(topic)
    manifest = Manifest(record.name, str(record.uid), asdict(record.settings), Clock().now_ms())
    manifest.taken_ms = _check_place(url, manifest)
    begun = {"topic": manifest.topic, "uid": manifest.uid, "taken_ms": manifest.taken_ms}
    write_json(joined(url, "topic.json"), begun)
    buckets = record.settings.buckets
    count = min(chunks, buckets)
    edges = [buckets * part // count for part in range(count + 1)]
    for number, (first, end) in enumerate(itertools.pairwise(edges)):
        progress("chunks written", number, count)
        marker = joined(url, "chunks", f"{number:04d}.json")
        done, chunk = chunk_of(read_json(marker), marker), Chunk(number, first, end)
        if done is None or (done.first, done.end) != (first, end):
            chunk = _write(spark, addresses, topic, url, chunk)
            write_json(marker, asdict(chunk))
        else:
            chunk = done
        manifest.chunks.append(chunk)
    progress("chunks written", count, count)
    manifest.until_ms, manifest.complete = Clock().now_ms(), True
    write_json(joined(url, "manifest.json"), manifest.as_json())
    return manifest


def _check_place(url: str, manifest: Manifest) -> int:
    """When the backup at `url` was begun: now, or when the run did that died. Raises Invalid for another one's."""
    if read_json(joined(url, "manifest.json")) is not None:
        raise Invalid(f"{shown(url)} has a finished backup already: name another place")
    there = read_json(joined(url, "topic.json"))
    if there is not None and not isinstance(there, dict):
        raise Invalid(f"{shown(url)} has something else than a backup: name another place")
    if there is not None and (there.get("topic"), there.get("uid")) != (manifest.topic, manifest.uid):
        raise Invalid(f"{shown(url)} has part of a backup of topic {there.get('topic')!r}: name another place")
    return int(there.get("taken_ms", manifest.taken_ms)) if there is not None else manifest.taken_ms


def _write(spark: SparkSession, addresses: str, topic: str, url: str, chunk: Chunk) -> Chunk:
    options = {
        "addresses": addresses, "topic": topic, "state": "all", "payload": "true",
        "buckets": f"{chunk.first}-{chunk.end}",
    }  # fmt: skip
    rows = spark.read.format("timeline").options(**options).load()
    writer = rows.write.mode("overwrite").option("compression", "zstd")
    watched(spark, lambda: writer.parquet(chunk_path(url, chunk)), lambda done, total: None)
    # What is measured is what is in the files, not what was on its way to them.
    return measure(data_of(spark, url, [chunk]), chunk)
