"""Messages of a timeline as rows: batch read, split by ranges of buckets, with what a query asks pushed down to
Scan."""

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
from timeline.pipeline.source.columns import CONTENT, READ, PageRows, arrow_schema, check_read, record_batch
from timeline.pipeline.source.options import SourceOptions

MOST_IDS = 10_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLI = timedelta(milliseconds=1)
_NEVER_NULL = frozenset(field.name for field in READ.fields if not field.nullable)


@dataclass(frozen=True)
class PushedFilter:
    """What of a topic is asked for: of `states`, of `tag` (empty: any), due in [from_ms, to_ms) (to 0: no bound), or
    just `ids`. `nothing`: no message can match."""

    states: tuple[State, ...]
    tag: str = ""
    from_ms: int = 0
    to_ms: int = 0
    ids: tuple[str, ...] | None = None
    nothing: bool = False

    def due_from(self, millis: int) -> PushedFilter:
        """Only what is due at `millis` or later."""
        return replace(
            self, from_ms=max(self.from_ms, min(millis, MAX_TIME_MS)), nothing=self.nothing or millis > MAX_TIME_MS
        )

    def due_before(self, millis: int) -> PushedFilter:
        """Only what is due before `millis`."""
        if millis > MAX_TIME_MS:
            return self
        to_ms = min(self.to_ms, millis) if self.to_ms else millis
        return replace(self, to_ms=max(to_ms, 1), nothing=self.nothing or to_ms <= 0)

    def of_states(self, states: Iterable[str]) -> PushedFilter:
        """Only what is in one of `states`, too."""
        wanted = set(states)
        left = tuple(state for state in self.states if state.value in wanted)
        return replace(self, states=left, nothing=self.nothing or not left)

    def of_tag(self, tag: str) -> PushedFilter:
        """Only what carries `tag`, too."""
        return replace(self, tag=tag, nothing=self.nothing or not tag or (bool(self.tag) and self.tag != tag))

    def of_ids(self, ids: Iterable[str]) -> PushedFilter:
        """Only those of `ids`, too."""
        wanted = {id for id in ids if id}
        left = wanted if self.ids is None else wanted & set(self.ids)
        return replace(self, ids=tuple(sorted(left)), nothing=self.nothing or not left)

    @property
    def empty(self) -> bool:
        """Whether nothing can match."""
        return self.nothing or (bool(self.to_ms) and self.from_ms >= self.to_ms)


def pushed(where: PushedFilter, wanted: Filter) -> PushedFilter | None:
    """`where` with `wanted` added, when a Scan can do all of it; None: Spark must."""
    path: tuple[str, ...] = getattr(wanted, "attribute", ())
    name = path[0] if len(path) == 1 else ""
    value = getattr(wanted, "value", None)
    if isinstance(wanted, IsNotNull):
        return where if name in _NEVER_NULL else None
    if name == "due" and isinstance(value, datetime):
        return _by_due(where, wanted, value)
    if isinstance(wanted, EqualTo) and isinstance(value, str):
        one = {"id": where.of_ids, "state": where.of_states}.get(name)
        if one is not None:
            return one([value])
        return where.of_tag(value) if name == "tag" else None
    if isinstance(wanted, In) and value and all(isinstance(item, str) for item in value):
        if name == "state":
            return where.of_states(value)
        if name == "id" and len(value) <= MOST_IDS:
            return where.of_ids(value)
    return None


def _by_due(where: PushedFilter, wanted: Filter, value: datetime) -> PushedFilter | None:
    since = (value if value.tzinfo else value.replace(tzinfo=UTC)) - _EPOCH
    floor, exact = since // _MILLI, not since % _MILLI
    ceiling = floor if exact else floor + 1
    if isinstance(wanted, GreaterThanOrEqual):
        return where.due_from(ceiling)
    if isinstance(wanted, GreaterThan):
        return where.due_from(floor + 1)
    if isinstance(wanted, LessThan):
        return where.due_before(ceiling)
    if isinstance(wanted, LessThanOrEqual):
        return where.due_before(floor + 1)
    if isinstance(wanted, EqualTo):
        return where.due_from(ceiling).due_before(floor + 1) if exact else replace(where, nothing=True)
    return None


@dataclass
class BucketRange(InputPartition):
    """The buckets from `first` to before `end`; (0, 0): all."""

    first: int
    end: int


class TimelineReader(DataSourceReader):
    """Batch read of what lies on a timeline. Columns are those of `schema`: fewer of them cost less, and payloads and
    headers are fetched only when they are among them."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        check_read(schema, READ)
        self._options = options
        self._schema = arrow_schema(schema)
        self._content = any(name in schema.names for name in CONTENT)
        self._where = PushedFilter(options.states, options.tag)

    def partitions(self) -> list[InputPartition]:
        """Ranges of buckets, one task each."""
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
        """The rows of a range of buckets; a broker that goes away is followed by another."""
        assert isinstance(partition, BucketRange)
        where = self._where
        if where.empty:
            return
        asked: dict[str, Any] = {
            "state": where.states,
            "tag": where.tag or None,
            "due": (where.from_ms or None, where.to_ms or None),
            "payload": self._content,
        }
        if where.ids is not None:
            asked["ids"] = where.ids
        elif partition.end:
            asked["buckets"] = (partition.first, partition.end)
        with SparkConnection(self._options.addresses, self._options.timeout_ms) as connection:
            for page in connection.iterate(connection.client.scan_pages(self._options.topic, **asked)):
                if len(page.rows):
                    yield record_batch(PageRows(page.rows, page.now_ms), self._schema)


class PushingReader(TimelineReader):
    """The same where Spark hands down what a query asks (`spark.sql.python.filterPushdown.enabled`)."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Takes what a Scan can do by itself; the rest is Spark's."""
        for wanted in filters:
            narrowed = pushed(self._where, wanted)
            if narrowed is None:
                yield wanted
            else:
                self._where = narrowed
