"""The data source `timeline` for Spark.

    spark.dataSource.register(TimelineSource)
    spark.read.format("timeline").option("addresses", "b1:9000").option("topic", "reminders").load()

Executors need this package, and talk to the brokers themselves. Secrets are no options, because plans show options.
They come from the environment of driver and executors."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from timeline.errors import Invalid
from timeline.pipeline.source.columns import read_schema
from timeline.pipeline.source.options import LIVING, SourceOptions
from timeline.pipeline.source.reading import PushingReader, TimelineReader
from timeline.pipeline.source.streaming import TimelineStreamReader
from timeline.pipeline.source.writing import TimelineStreamWriter, TimelineWriter


class TimelineSource(DataSource):
    """Batch write, batch read, stream write and stream read of a topic. `SourceOptions` lists the options."""

    reads: ClassVar[type[TimelineReader]] = TimelineReader

    @classmethod
    def name(cls) -> str:
        """Return the name for `format`."""
        return "timeline"

    @cached_property
    def _asked(self) -> SourceOptions:
        return SourceOptions.of(dict(self.options))

    def schema(self) -> StructType:
        """Return the columns of a message. Fewer may be asked for: `.schema("id string, due timestamp")`."""
        return read_schema(self._asked.payload)

    def reader(self, schema: StructType) -> TimelineReader:
        """Return the reader for `spark.read`."""
        return self.reads(self._asked, schema)

    def writer(self, schema: StructType, overwrite: bool) -> TimelineWriter:
        """Return the writer for `df.write`. Raise Invalid for any mode but "append"."""
        if overwrite:
            raise Invalid("a timeline is not overwritten. Use .mode('append'). `timeline cancel` removes messages")
        return TimelineWriter(self._asked, schema)

    def streamReader(self, schema: StructType) -> TimelineStreamReader:
        """Return the reader for `spark.readStream`. It takes whatever is due: raise Invalid if an option asks for
        less."""
        asked = self._asked
        less = {"state": asked.states != LIVING, "tag": asked.tag, "buckets": asked.buckets}
        if named := next((name for name, given in less.items() if given), ""):
            raise Invalid(
                f"a stream read takes and acknowledges whatever is due on the topic, and has no option {named!r}. "
                "Leave it out, and give these messages a topic of their own"
            )
        return TimelineStreamReader(asked, schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> TimelineStreamWriter:
        """Return the writer for `df.writeStream`."""
        return TimelineStreamWriter(self._asked, schema)


class PushingSource(TimelineSource):
    """The same source with filters pushed down to Scan, which `timeline.pipeline.register` registers.

    Spark refuses a reader with `pushFilters` while `spark.sql.python.filterPushdown.enabled` is false, its default. A
    source cannot see that setting. So `TimelineSource`, which works without it, pushes nothing down."""

    reads = PushingReader
