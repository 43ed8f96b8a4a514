"""The data source `timeline` for Spark.

    spark.dataSource.register(TimelineSource)
    spark.read.format("timeline").option("addresses", "b1:9000").option("topic", "reminders").load()

Executors need this package and reach the brokers themselves. Nothing that is secret is an option: what a connection
needs beyond an address comes from the environment of driver and executors, so that no plan shows it."""

from __future__ import annotations

import sys
from functools import cached_property

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from timeline.errors import Invalid
from timeline.pipeline.source.columns import STREAMED, read_schema
from timeline.pipeline.source.options import SourceOptions
from timeline.pipeline.source.reading import PushingReader, TimelineReader
from timeline.pipeline.source.streaming import TimelineStreamReader
from timeline.pipeline.source.writing import TimelineStreamWriter, TimelineWriter

_PUSHDOWN = "pyspark.sql.worker.data_source_pushdown_filters"


class TimelineSource(DataSource):
    """Batch write, batch read, stream write and stream read of a topic's timeline; see `SourceOptions` for what may be
    asked."""

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
        kind = PushingReader if _pushing() else TimelineReader
        return kind(self._asked, schema)

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


def _pushing() -> bool:
    """Whether this process is the worker of Spark that asks which filters a reader takes: anywhere else Spark refuses a
    reader that could take some while its configuration does not let them through."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return _PUSHDOWN in sys.modules or getattr(spec, "name", "") == _PUSHDOWN


__all__ = ["STREAMED", "TimelineSource"]
