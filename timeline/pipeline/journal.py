"""The event journal as a table: which of its files count, and what its columns are in Spark."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.errors import Invalid
from timeline.pipeline.files import at, joined, names_in
from timeline.storage_plugins import shown

EVENTS = """
time timestamp, kind string, id string, birth long, version long, due timestamp, until timestamp, expires timestamp,
consumer string, `group` string, tag string, lateness long, deliveries int, again boolean, cause string,
payload_bytes long, payload_sum long, count long, broker string, session string, date string, hour int, topic string
"""
NOTE = "_replaces-"
"""Beside a compacted file, while the files that it replaces may still be there: a JSON list of their names."""
_SCHEMES = {"file": "file://", "local": "file://", "s3": "s3a://", "s3a": "s3a://", "gcs": "gs://", "gs": "gs://"}


def live_files(url: str) -> list[str]:
    """The paths of the files that count: all but those that a compacted one stands for already."""
    filesystem, _ = at(url)
    there = names_in(url)
    files = {name for name in there if name.endswith(".parquet") and not name.rpartition("/")[2].startswith("_")}
    for note in there:
        folder, _, name = note.rpartition("/")
        if name.startswith(NOTE) and f"{folder}/{name.removeprefix(NOTE).removesuffix('.json')}.parquet" in files:
            files -= {f"{folder}/{old}" for old in json.loads(filesystem.cat_file(note))}
    return sorted(files)


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


__all__ = ["NOTE", "is_kind", "joined", "journal", "live_files", "rows_of", "spark_path"]
