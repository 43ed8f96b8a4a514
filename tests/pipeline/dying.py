"""A source whose writing process ends itself, hard, in the middle of its partition, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql.types import StructType

from timeline.pipeline.source import TimelineSource
from timeline.pipeline.source.writing import TimelineWriter, WriteCounts

BATCHES_BEFORE = 5


def dying(batches: Iterator[pa.RecordBatch], mark: Path) -> Iterator[pa.RecordBatch]:
    """The batches, unless this process is the first one to have come so far: then the end."""
    for number, batch in enumerate(batches):
        if number == BATCHES_BEFORE:
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                pass  # somebody has died already
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        yield batch


class DyingWriter(TimelineWriter):
    """Its `run` is the path of the mark."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts:
        return super().write(dying(iterator, Path(self._plan.run)))


class DyingSource(TimelineSource):
    """`format("dying")`."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def writer(self, schema: StructType, overwrite: bool) -> DyingWriter:
        return DyingWriter(self._asked, schema)
