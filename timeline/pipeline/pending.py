"""What lies on timelines still, for an audit: of a backup, or of the brokers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.pipeline.connection import Connection
from timeline.pipeline.manifest import data_of, read_manifest


@dataclass
class Pending:
    """`rows`: topic, id and birth of what lay on `topics` when that was read, from `since_ms` to `until_ms` by a
    broker's clock. What was put later than it began, or is of another topic, may be missing in it."""

    rows: DataFrame
    topics: tuple[str, ...]
    since_ms: int
    until_ms: int


def pending_in(spark: SparkSession, addresses: str, topics: Sequence[str], backup: str) -> Pending | None:
    """The messages of a backup, or of `topics` as the brokers have them now: read at once, so that what is audited
    then is no older. None when neither is named."""
    if backup:
        manifest = read_manifest(backup)
        rows = data_of(spark, backup, manifest.chunks)
        named = rows.select(F.lit(manifest.topic).alias("topic"), "id", "birth")
        return Pending(named, (manifest.topic,), manifest.taken_ms, manifest.until_ms)
    if not topics:
        return None
    since_ms = _now_ms(addresses)
    rows = reduce(DataFrame.unionByName, (_of(spark, addresses, topic) for topic in topics))
    rows = rows.persist(StorageLevel.MEMORY_AND_DISK)
    rows.count()
    return Pending(rows, tuple(topics), since_ms, _now_ms(addresses))


def _now_ms(addresses: str) -> int:
    """By a broker's clock."""
    with Connection(addresses) as connection:
        return round(Clock().now_ms() + connection.run(connection.client.ping()).offset_ms)


def _of(spark: SparkSession, addresses: str, topic: str) -> DataFrame:
    options = {"addresses": addresses, "topic": topic, "state": "all"}
    rows = spark.read.format("timeline").options(**options).schema("id string, birth long").load()
    return rows.select(F.lit(topic).alias("topic"), "id", "birth")
