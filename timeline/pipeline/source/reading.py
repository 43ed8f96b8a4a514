"""Messages of a timeline as rows: batch read, split by ranges of buckets. Scan applies a query's filters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from timeline.model import MAX_TIME_MS, State
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.source.columns import CONTENT, READ, arrow_schema, check_read, record_batch
from timeline.pipeline.source.options import SourceOptions

MOST_IDS = 10_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLI = timedelta(milliseconds=1)
_NEVER_NULL = frozenset(field.name for field in READ.fields if not field.nullable)


@dataclass(frozen=True)
class PushedFilter:
    """Which messages of a topic are asked for: in `states`, with `tag` (empty: any), due in [from_ms, to_ms), and with
    one of `ids` (None: any)."""

    states: tuple[State, ...]
    tag: str = ""
    from_ms: int = 0
    to_ms: int = MAX_TIME_MS + 1
    ids: tuple[str, ...] | None = None

    def due_within(self, from_ms: int, to_ms: int) -> PushedFilter:
        """Add: due in [from_ms, to_ms)."""
        return replace(self, from_ms=max(self.from_ms, from_ms), to_ms=min(self.to_ms, to_ms))

    def of_states(self, states: Iterable[str]) -> PushedFilter:
        """Add: in one of `states`."""
        wanted = set(states)
        return replace(self, states=tuple(state for state in self.states if state.value in wanted))

    def of_tag(self, tag: str) -> PushedFilter:
        """Add: with `tag`. An empty tag, or two, match nothing."""
        if not tag or self.tag not in ("", tag):
            return replace(self, states=())
        return replace(self, tag=tag)

    def of_ids(self, ids: Iterable[str]) -> PushedFilter:
        """Add: with one of `ids`."""
        wanted = {id for id in ids if id}
        return replace(self, ids=tuple(sorted(wanted if self.ids is None else wanted & set(self.ids))))

    @property
    def empty(self) -> bool:
        """Whether no message can match."""
        return not self.states or self.ids == () or self.from_ms >= self.to_ms


def pushed(where: PushedFilter, wanted: Filter) -> PushedFilter | None:
    """Return `where` with `wanted` added; None where Scan cannot apply all of it, so that Spark must."""
    path: tuple[str, ...] = getattr(wanted, "attribute", ())
    name = path[0] if len(path) == 1 else ""
    value = getattr(wanted, "value", None)
    if isinstance(wanted, IsNotNull):
        return where if name in _NEVER_NULL else None
    if name == "due" and isinstance(value, datetime):
        return _by_due(where, wanted, value)
    if isinstance(wanted, EqualTo) and name == "tag" and isinstance(value, str):
        return where.of_tag(value)
    values: Any = (value,) if isinstance(wanted, EqualTo) else value if isinstance(wanted, In) else ()
    if not values or not all(isinstance(item, str) for item in values):
        return None
    if name == "state":
        return where.of_states(values)
    return where.of_ids(values) if name == "id" and len(values) <= MOST_IDS else None


def _by_due(where: PushedFilter, wanted: Filter, value: datetime) -> PushedFilter | None:
    since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH
    after = since // _MILLI + 1
    at_or_after = after if since % _MILLI else after - 1
    bounds = {
        GreaterThanOrEqual: (at_or_after, where.to_ms),
        GreaterThan: (after, where.to_ms),
        LessThan: (where.from_ms, at_or_after),
        LessThanOrEqual: (where.from_ms, after),
        EqualTo: (at_or_after, after),
    }.get(type(wanted))
    return where.due_within(*bounds) if bounds is not None else None


@dataclass
class BucketRange(InputPartition):
    """The buckets in [first, end); (0, 0): all."""

    first: int
    end: int


class TimelineReader(DataSourceReader):
    """Batch read of a timeline, with the columns of `schema`. Fewer columns cost less. Payloads and headers are fetched
    only where they are among them."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_read(schema, READ)
        self._options = options
        self._schema = arrow_schema(schema)
        self._content = any(name in schema.names for name in CONTENT)
        self._where = PushedFilter(options.states, options.tag)

    def partitions(self) -> list[InputPartition]:
        """Return ranges of buckets, one per task."""
        with SparkConnection(self._options.addresses, self._options.timeout_ms) as connection:
            buckets = connection.topic(self._options.topic).settings.buckets
        if self._where.ids is not None or self._where.empty:
            return [BucketRange(0, 0)]
        first, end = self._options.buckets or (0, buckets)
        end = min(end, buckets)
        parts = max(1, min(self._options.partitions, end - first))
        edges = [first + (end - first) * part // parts for part in range(parts + 1)]
        return [BucketRange(low, high) for low, high in itertools.pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the rows of a range of buckets. If a broker goes away, another one continues."""
        assert isinstance(partition, BucketRange)
        where = self._where
        if where.empty:
            return
        asked: dict[str, Any] = {
            "state": where.states,
            "tag": where.tag or None,
            "due": (where.from_ms or None, where.to_ms if where.to_ms <= MAX_TIME_MS else None),
            "payload": self._content,
        }
        if where.ids is not None:
            asked["ids"] = where.ids
        elif partition.end:
            asked["buckets"] = (partition.first, partition.end)
        with SparkConnection(self._options.addresses, self._options.timeout_ms) as connection:
            for page in connection.iterate(connection.client.scan_pages(self._options.topic, **asked)):
                if len(page.rows):
                    yield record_batch(page, self._schema)


class PushingReader(TimelineReader):
    """The same reader for sessions with `spark.sql.python.filterPushdown.enabled`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that Scan can apply. Return the others to Spark."""
        for wanted in filters:
            narrowed = pushed(self._where, wanted)
            # Scan looks ids up in whatever buckets they are.
            if narrowed is None or (narrowed.ids is not None and self._options.buckets):
                yield wanted
            else:
                self._where = narrowed
