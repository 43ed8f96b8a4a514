"""The data source `timeline` for Spark.

    spark.dataSource.register(TimelineSource)
    spark.read.format("timeline").option("addresses", "b1:9000").option("topic", "reminders").load()

Executors need this package and reach the brokers themselves. Nothing that is secret is an option: what a connection
needs beyond an address comes from the environment of driver and executors, so that no plan shows it."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from timeline.errors import Invalid
from timeline.pipeline.source.columns import STREAMED, read_schema
from timeline.pipeline.source.options import SourceOptions
from timeline.pipeline.source.reading import PushingReader, TimelineReader
from timeline.pipeline.source.streaming import TimelineStreamReader
from timeline.pipeline.source.writing import TimelineStreamWriter, TimelineWriter


class TimelineSource(DataSource):
    """Batch write, batch read, stream write and stream read of a topic's timeline; see `SourceOptions` for what may be
    asked."""

    reads: ClassVar[type[TimelineReader]] = TimelineReader

    @classmethod
    def name(cls) -> str:
        """What `format` says."""
        return "timeline"

    @cached_property
    def _asked(self) -> SourceOptions:
        return SourceOptions.of(dict(self.options))

    def schema(self) -> StructType:
        """The columns of a message. A person may ask for some of them only: `.schema("id string, due timestamp")`."""
        return read_schema(self._asked.payload)

    def reader(self, schema: StructType) -> TimelineReader:
        """For `spark.read`."""
        return self.reads(self._asked, schema)

    def writer(self, schema: StructType, overwrite: bool) -> TimelineWriter:
        """For `df.write`, with mode "append"."""
        if overwrite:
            raise Invalid(
                "a timeline is not overwritten: use .mode('append'), and cancel what is to go (timeline cancel)"
            )
        return TimelineWriter(self._asked, schema)

    def streamReader(self, schema: StructType) -> TimelineStreamReader:
        """For `spark.readStream`."""
        return TimelineStreamReader(self._asked, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TimelineStreamWriter:
        """For `df.writeStream`."""
        return TimelineStreamWriter(self._asked, schema)


class PushingSource(TimelineSource):
    """The same where Spark hands down what a query asks, which it refuses to readers that could take it while
    `spark.sql.python.filterPushdown.enabled` is off. `timeline.pipeline.register` sets that, and registers this one."""

    reads = PushingReader


__all__ = ["STREAMED", "PushingSource", "TimelineSource"]
