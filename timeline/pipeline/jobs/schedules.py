"""The job `load-schedules`: any table that Spark reads → recurring schedules of a topic.

Each row is a schedule; its columns are the arguments of `tl.schedule`. It checks all rows before it creates any: which
are no schedule, and which have the name of another one. The same load again changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import islice
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from timeline.driver.client import Timeline
from timeline.driver.schedules import specification_fields
from timeline.errors import Exists, Invalid, TooLarge
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.session import Progress, quiet, watched
from timeline.schedules import Specification

_TEXT, _TEXTS = ("string",), ("string", "array<string>")
_NUMBER = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")
_LENGTH = ("string", *_NUMBER, "interval")
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "name": (_TEXT, "a string"),
    "cron": (_TEXTS, "a string or an array of strings"),
    "every": (_LENGTH, "a string such as '15m', a number of seconds, or an interval"),
    "rrule": (_TEXTS, "a string or an array of strings"),
    "exclude": (_TEXTS, "a string or an array of strings"),
    "start": (("timestamp",), "a timestamp"),
    "end": (("timestamp",), "a timestamp"),
    "count": (_NUMBER[:4], "a whole number"),
    "zone": (_TEXT, "a string"),
    "gap": (_TEXT, "a string"),
    "fold": (_TEXT, "a string"),
    "jitter": (_LENGTH, "a string such as '15m', a number of seconds, or an interval"),
    "catch_up": (_TEXT, "a string"),
    "window": (_LENGTH, "a string such as '15m', a number of seconds, or an interval"),
    "overlap": (_TEXT, "a string"),
    "payload": (("string", "binary"), "a string or binary"),
    "headers": (("map<string,string>",), "a map<string,string>"),
    "tag": (_TEXT, "a string"),
    "group": (_TEXT, "a string"),
    "expires": (_LENGTH, "a string such as '15m', a number of seconds, or an interval"),
    "paused": (("boolean",), "a boolean"),
}
"""By column: the beginnings of the types that it may have, and these in words."""
RULES = ("cron", "every", "rrule")
EXISTING = ("refuse", "replace")
CREATED, THERE, REPLACED, REJECTED = "created", "there", "replaced", "rejected"
TWICE = "another row has the same name, and says something else"
DIFFERS = "another schedule has this name. --if-exists replace changes it"
AT_ONCE = 16
"""Calls of one task at a time."""
ROWS_AT_ONCE = 1_000
REASONS = 20


@dataclass
class ScheduleLoad:
    """A load to be done. `if_exists`: what to do with a schedule that differs. `where`: SQL, only these rows.
    `rejects`: a folder for rows that are left out."""

    addresses: str
    topic: str
    if_exists: str = "refuse"
    max_rejects: int = 0
    rejects: str = ""
    where: str = ""
    dry_run: bool = False
    timeout_ms: int = 60_000


@dataclass
class LoadedSchedules:
    """The result of a load. `there`: schedules that stood so already. `reasons`: the most frequent ones of rejected
    rows. `ignored`: columns of the table that are no field. With `dry_run`, nothing was created."""

    rows: int = 0
    created: int = 0
    there: int = 0
    replaced: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    dry_run: bool = False


def schedule_rows(table: DataFrame, expressions: Mapping[str, str]) -> DataFrame:
    """Return the table's rows with the columns of schedules. `expressions`: SQL for columns; without one, a column of
    that name is taken. Raise Invalid, which names the column."""
    for name in expressions:
        if name not in COLUMNS:
            raise Invalid(f"a schedule has no field {name!r:.60}: there are {', '.join(COLUMNS)}")
    rows = table.select(
        *(
            F.expr(expressions[name]).alias(name) if name in expressions else F.col(f"`{name}`")
            for name in COLUMNS
            if name in expressions or name in table.columns
        )
    )
    for one in rows.schema:
        kinds, said = COLUMNS[one.name]
        told = one.dataType.simpleString()
        if not told.startswith(kinds) or told == "timestamp_ntz":
            raise Invalid(f"column {one.name!r} must be {said}, not {told}: say --column {one.name}=SQL")
    if "name" not in rows.columns:
        raise Invalid("a schedule needs a name: give the table a column name, or say --column name=SQL")
    if not any(name in rows.columns for name in RULES):
        raise Invalid("a schedule needs a rule: give the table a column cron, every or rrule, or say --column cron=SQL")
    return rows.withColumns({name: F.unix_millis(name) for name in ("start", "end") if name in rows.columns})


def load_schedules(
    spark: SparkSession,
    table: DataFrame,
    asked: ScheduleLoad,
    expressions: Mapping[str, str] | None = None,
    progress: Progress = quiet,
) -> LoadedSchedules:
    """Create the schedules of `table`. `expressions`: SQL for columns, as `schedule_rows` takes it. Raise Invalid for
    rows that are no schedules and for names of others, NotFound, Forbidden, or Unavailable. Schedules that were created
    stay, and the same call continues."""
    if asked.if_exists not in EXISTING:
        raise Invalid(f"if_exists is one of {', '.join(EXISTING)}, not {asked.if_exists!r}")
    with SparkConnection(asked.addresses) as connection:
        connection.topic(asked.topic)
        connection.run(connection.client.get_schedule(asked.topic, "any"))  # whether brokers know schedules
    rows = schedule_rows(table.where(asked.where) if asked.where else table, expressions or {})
    looked = _done(spark, asked, rows, False, lambda done, total: progress("rows checked", done, total))
    looked.ignored = [] if expressions else sorted(set(table.columns) - set(COLUMNS))
    if asked.dry_run:
        looked.dry_run = True
        return looked
    if looked.rejected > asked.max_rejects:
        told = "; ".join(f"{count:,} × {reason}" for reason, count in looked.reasons.items())
        raise Invalid(
            f"{looked.rejected:,} of {looked.rows:,} rows make no schedule, more than the {asked.max_rejects:,} "
            f"allowed: {told}. Fix them, or allow them to be left out (--max-rejects; --rejects URL keeps them)"
        )
    loaded = _done(spark, asked, rows, True, lambda done, total: progress("schedules", done, total))
    loaded.ignored = looked.ignored
    return loaded


def _done(
    spark: SparkSession, asked: ScheduleLoad, rows: DataFrame, write: bool, progress: Callable[[int, int], None]
) -> LoadedSchedules:
    """Return what became of all rows, or without `write` what would."""
    same_name = Window.partitionBy("name")
    content = F.xxhash64(*(_hashed(rows, name) for name in rows.columns if name != "name"))
    versions = F.size(F.collect_set(content).over(same_name))
    why = F.when(F.col("name").isNull(), F.lit("name is null")).when(versions > 1, F.lit(TWICE))
    told = rows.withColumn("reason", why)
    told = told.where(F.col("reason").isNotNull()).unionByName(
        told.where(F.col("reason").isNull()).dropDuplicates(["name"])
    )
    schema = StructType([*told.schema, StructField("outcome", StringType())])
    # What creates schedules is done once. Arrow's way to rows would need pandas.
    judged = spark.createDataFrame(told.rdd.mapPartitions(partial(_judge, asked, write)), schema)
    judged = judged.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        counted = judged.groupBy("outcome", "reason").count()
        found = watched(spark, counted.collect, progress)
        if write and asked.rejects and any(row["outcome"] == REJECTED for row in found):
            judged.where(F.col("outcome") == REJECTED).drop("outcome").write.mode("overwrite").parquet(asked.rejects)
    finally:
        judged.unpersist()
    loaded = LoadedSchedules(rows.count())
    reasons: dict[str, int] = {}
    for row in found:
        setattr(loaded, row["outcome"], getattr(loaded, row["outcome"]) + row["count"])
        if row["reason"] is not None:
            reasons[row["reason"]] = row["count"]
    loaded.reasons = dict(sorted(reasons.items(), key=lambda each: -each[1])[:REASONS])
    return loaded


def _hashed(rows: DataFrame, name: str) -> Column:
    return F.to_json(name) if rows.schema[name].dataType.typeName() == "map" else F.col(f"`{name}`")


def _judge(asked: ScheduleLoad, write: bool, rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
    """Yield rows with their reasons and outcomes. Spark's workers run this."""
    rows = iter(rows)
    with SparkConnection(asked.addresses, asked.timeout_ms) as connection:
        while some := list(islice(rows, ROWS_AT_ONCE)):
            told = connection.run(_outcomes(connection.client, asked, write, [row.asDict() for row in some]))
            for row, (outcome, reason) in zip(some, told, strict=True):
                yield *row[:-1], reason, outcome


async def _outcomes(
    client: Timeline, asked: ScheduleLoad, write: bool, rows: list[dict[str, Any]]
) -> list[tuple[str, str | None]]:
    free = asyncio.Semaphore(AT_ONCE)

    async def outcome(row: dict[str, Any]) -> tuple[str, str | None]:
        if row["reason"] is not None:
            return REJECTED, row["reason"]
        async with free:
            try:
                return await _outcome(client, asked, write, row), None
            except (Invalid, TooLarge, Exists) as wrong:
                return REJECTED, wrong.reason

    return list(await asyncio.gather(*(outcome(row) for row in rows)))


async def _outcome(client: Timeline, asked: ScheduleLoad, write: bool, row: dict[str, Any]) -> str:
    """Return what became of one row, or would. Raise Invalid, TooLarge or Exists for one that makes no schedule."""
    given = arguments(row)
    name = row["name"]
    wanted = Specification(asked.topic, name, **specification_fields(given))
    standing = await client.get_schedule(asked.topic, name)
    if standing is None:
        if write:
            await client.create_schedule(wanted)
        return CREATED
    if standing.specification == wanted:
        return THERE
    if asked.if_exists == "refuse":
        raise Exists(DIFFERS)
    if write:
        fields: dict[str, Any] = {field: given.get(field) for field in COLUMNS if field != "name"}
        await standing.update(**fields)
    return REPLACED


def arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the arguments of `tl.schedule`. Null is the default."""
    given = {name: row[name] for name in COLUMNS if name != "name" and row.get(name) is not None}
    for name in ("every", "jitter", "window", "expires"):
        if isinstance(given.get(name), Decimal):
            given[name] = float(given[name])
    if "headers" in given:
        given["headers"] = dict(given["headers"])
    return given
