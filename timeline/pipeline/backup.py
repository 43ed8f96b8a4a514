"""The job `backup`: a topic, payloads and dead letters included, → Parquet with a manifest.

It goes through the topic's buckets in chunks; a chunk that is written stays, and a backup that died goes on with the
next one. What a topic does meanwhile shows as it stood when its bucket was read: to have one instant of it, pause it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict

from pyspark.sql import SparkSession

from timeline.clock import Clock
from timeline.errors import Invalid
from timeline.pipeline.connection import Connection
from timeline.pipeline.files import joined, read_json, write_json
from timeline.pipeline.manifest import Chunk, Manifest, chunk_of, chunk_path, data_of, manifest_of, measure
from timeline.pipeline.watching import watched
from timeline.storage_plugins import shown

CHUNKS = 8
Said = Callable[[str, int, int], None]


def backup(
    spark: SparkSession,
    addresses: str,
    topic: str,
    url: str,
    chunks: int = CHUNKS,
    said: Said = lambda what, done, total: None,
) -> Manifest:
    """Writes the topic's messages below `url`; answers the manifest. Raises Invalid when another backup is there,
    NotFound or Unavailable; the same call goes on after the last chunk that was written."""
    with Connection(addresses) as connection:
        record = connection.topic(topic)
    manifest = manifest_of(record, Clock().now_ms())
    manifest.taken_ms = _check_place(url, manifest)
    begun = {"topic": manifest.topic, "uid": manifest.uid, "taken_ms": manifest.taken_ms}
    write_json(joined(url, "topic.json"), begun)
    buckets = record.settings.buckets
    count = min(chunks, buckets)
    edges = [buckets * part // count for part in range(count + 1)]
    for number, (first, end) in enumerate(itertools.pairwise(edges)):
        said("chunks written", number, count)
        marker = joined(url, "chunks", f"{number:04d}.json")
        done, chunk = chunk_of(read_json(marker), marker), Chunk(number, first, end)
        if done is None or (done.first, done.end) != (first, end):
            chunk = _write(spark, addresses, topic, url, chunk)
            write_json(marker, asdict(chunk))
        else:
            chunk = done
        manifest.chunks.append(chunk)
    said("chunks written", count, count)
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
