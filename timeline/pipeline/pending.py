"""What lies on timelines still, for an audit: of a backup, or of the brokers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.pipeline.manifest import data_of, read_manifest


def pending_in(spark: SparkSession, addresses: str, topics: Sequence[str], backup: str) -> DataFrame | None:
    """Topic, id and birth of the messages of a backup, or of `topics` as the brokers have them; None when neither is
    named."""
    if backup:
        manifest = read_manifest(backup)
        rows = data_of(spark, backup, manifest.chunks)
        return rows.select(F.lit(manifest.topic).alias("topic"), "id", "birth")
    if not topics:
        return None
    return reduce(DataFrame.unionByName, (_of(spark, addresses, topic) for topic in topics))


def _of(spark: SparkSession, addresses: str, topic: str) -> DataFrame:
    options = {"addresses": addresses, "topic": topic, "state": "all"}
    rows = spark.read.format("timeline").options(**options).schema("id string, birth long").load()
    return rows.select(F.lit(topic).alias("topic"), "id", "birth")
