"""The job `load`: any table that Spark reads → a topic's timeline.

It checks all rows before anything is written: which cannot be put, and the load that they add. Spark computes this
where the data lies, and returns counts. A run that died is started again in the same way. With `state` it continues
after the finished files. Messages that were put are there. Delivered ones are not put again, as long as the topic
remembers them.
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from timeline.clock import Clock
from timeline.driver.times import as_datetime
from timeline.errors import Invalid
from timeline.model import (
    DEFAULT_GROUP,
    MAX_HEADERS_BYTES,
    MAX_ID_BYTES,
    MAX_TAG_BYTES,
    MAX_TIME_MS,
    Topic,
    TopicSettings,
)
from timeline.pipeline.connection import SparkConnection
from timeline.pipeline.files import read_json, remove, write_json
from timeline.pipeline.session import Progress, quiet, watched
from timeline.pipeline.source.columns import check_written
from timeline.pipeline.source.options import SourceOptions

COLUMNS = ("due", "payload", "id", "tag", "headers", "expires")
SPIKES = 5
STEPS_SHOWN = 10_000
DIGITS = 32

_STEPS_MS = (60_000, 300_000, 900_000, 3_600_000, 86_400_000)
FILES_A_STEP = 16


def mapped(table: DataFrame, expressions: Mapping[str, str]) -> DataFrame:
    """Return the table's rows with the columns of messages. `expressions`: SQL for columns; without one, a column of
    that name is taken. Raise Invalid, which names the column."""
    rows = table.select(
        *(
            F.expr(expressions[name]).alias(name) if name in expressions else F.col(name)
            for name in COLUMNS
            if name in expressions or name in table.columns
        )
    )
    check_written(rows.schema)
    return rows


def earliest_ms(rows: DataFrame) -> int:
    """Return the earliest due time; 0 if there is none."""
    found = rows.agg(F.min(_millis("due"))).head()
    return int(found[0] or 0) if found is not None else 0


def shifted(rows: DataFrame, by_ms: int) -> DataFrame:
    """Return the same rows, all moved in time by `by_ms`."""
    names = [name for name in ("due", "expires") if by_ms and name in rows.columns]
    return rows.withColumns({name: F.timestamp_millis(_millis(name) + F.lit(by_ms)) for name in names})


def with_ids(rows: DataFrame) -> DataFrame:
    """Return the same rows with ids. If there is no such column, an id is made of the row's whole content, so the same
    row always has the same id."""
    if "id" in rows.columns:
        return rows
    said = [F.coalesce(_text(rows.schema, name), F.lit("\0")) for name in rows.columns]
    return rows.withColumn("id", F.substring(F.sha2(F.concat_ws("\1", *said), 256), 1, DIGITS))


def _text(schema: StructType, name: str) -> Column:
    kind = schema[name].dataType.typeName()
    if kind == "map":
        return F.to_json(F.array_sort(F.map_entries(name)))
    if kind == "timestamp":
        return F.unix_micros(name).cast("string")
    return F.hex(name) if kind == "binary" else F.col(name).cast("string")


def _millis(name: str) -> Column:
    """Return a timestamp in ms, rounded up."""
    return F.ceil(F.unix_micros(name) / 1000).cast("long")


@dataclass
class Spike:
    """A step in which more messages than usual come due."""

    start_ms: int
    count: int


@dataclass
class TableCheck:
    """The result of checking all rows. `bad`: rows that cannot be put, by reason. `identical`: rows without an id that
    are the same as another. `conflicts`: rows whose id another row has, with other content. `curve`: (start, rows due)
    per `step_ms`."""

    rows: int = 0
    payload_bytes: int = 0
    first_ms: int = 0
    last_ms: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    identical: int = 0
    conflicts: int = 0
    step_ms: int = 60_000
    curve: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rejected(self) -> int:
        """Rows that cannot be put."""
        return sum(self.bad.values()) + self.conflicts

    @property
    def spikes(self) -> list[Spike]:
        """The fullest steps, if they have at least three times the mean of the steps that are not empty."""
        if not self.curve:
            return []
        usual = sum(count for _, count in self.curve) / len(self.curve)
        most = sorted(self.curve, key=lambda step: -step[1])[:SPIKES]
        return [Spike(start, count) for start, count in most if count >= 3 * usual]


def check(rows: DataFrame, settings: TopicSettings, now_ms: int, past: str, own_ids: bool) -> TableCheck:
    """Check all rows in two passes: values, then ids. `own_ids`: the table has ids."""
    checked = TableCheck()
    reasons = _reasons(rows, settings, now_ms, past)
    one = F.coalesce(*(F.when(wrong, F.lit(reason)) for reason, wrong in reasons))
    payload_bytes = F.octet_length("payload").cast("long")
    judged = rows.select(_millis("due").alias("due_ms"), payload_bytes.alias("bytes"), one.alias("why"))
    found = judged.groupBy("why").agg(
        F.count("*").alias("rows"), F.sum("bytes").alias("bytes"),
        F.min("due_ms").alias("first"), F.max("due_ms").alias("last"),
    ).collect()  # fmt: skip
    for row in found:
        checked.rows += row["rows"]
        if row["why"] is not None:
            checked.bad[row["why"]] = row["rows"]
        else:
            checked.payload_bytes, checked.first_ms, checked.last_ms = row["bytes"] or 0, row["first"], row["last"]
    _check_ids(rows, checked, own_ids)
    _draw(judged.where("why IS NULL"), checked)
    return checked


def _reasons(rows: DataFrame, settings: TopicSettings, now_ms: int, past: str) -> Sequence[tuple[str, Column]]:
    due_ms = _millis("due")
    most = settings.max_payload_bytes
    found = [
        ("due is null", F.col("due").isNull()),
        ("due is no time in this epoch", (due_ms < 100_000_000_000) | (due_ms > MAX_TIME_MS)),
        ("due time lies beyond the topic's horizon", due_ms > now_ms + settings.horizon_ms),
        ("payload is null", F.col("payload").isNull()),
        (f"payload is above the topic's {most} bytes", F.octet_length("payload") > most),
    ]
    if past == "reject":
        found.insert(2, ("due is past", due_ms <= now_ms))
    if "id" in rows.columns:
        sizes = F.octet_length(F.coalesce("id", F.lit("")))
        found.append((f"id is null, empty or above {MAX_ID_BYTES} bytes", (sizes < 1) | (sizes > MAX_ID_BYTES)))
        found.append(("id has a NUL", F.instr("id", "\0") > 0))
    if "tag" in rows.columns:
        found.append((f"tag is above {MAX_TAG_BYTES} bytes", F.octet_length("tag") > MAX_TAG_BYTES))
    if "expires" in rows.columns:
        found.append(("expires before it is due", _millis("expires") <= due_ms))
        found.append(("expires is past", _millis("expires") <= now_ms))
    if "headers" in rows.columns:
        pairs = F.map_entries("headers")
        size = F.aggregate(
            pairs, F.lit(0), lambda sum, pair: sum + 4 + F.octet_length(pair.key) + F.octet_length(pair.value)
        )
        found.append(("a header is null", F.exists(F.map_values("headers"), lambda value: value.isNull())))
        found.append((f"headers are above {MAX_HEADERS_BYTES} bytes", size > MAX_HEADERS_BYTES))
    return found


def _check_ids(rows: DataFrame, checked: TableCheck, own_ids: bool) -> None:
    """Count the rows that share an id with another one, with the same content or not."""
    said = F.xxhash64(*(name if name != "headers" else F.to_json("headers") for name in rows.columns if name != "id"))
    counted = (
        rows.where("id IS NOT NULL").groupBy("id").agg(F.count("*").alias("rows"), F.count_distinct(said).alias("said"))
    )
    found = counted.where("rows > 1").agg(
        F.sum(F.when(F.col("said") > 1, F.col("rows") - 1)).alias("conflicts"),
        F.sum(F.when(F.col("said") == 1, F.col("rows") - 1)).alias("same"),
    ).head()  # fmt: skip
    assert found is not None
    checked.conflicts = int(found["conflicts"] or 0)
    checked.identical = 0 if own_ids else int(found["same"] or 0)


def _draw(good: DataFrame, checked: TableCheck) -> None:
    """Add the load curve, in steps of a minute, or longer ones if there would be too many."""
    span_ms = max(1, checked.last_ms - checked.first_ms)
    checked.step_ms = next(step for step in _STEPS_MS if span_ms / step <= STEPS_SHOWN or step == _STEPS_MS[-1])
    start = (F.col("due_ms") - F.col("due_ms") % checked.step_ms).alias("start")
    found = good.groupBy(start).count().orderBy("start").limit(STEPS_SHOWN).collect()
    checked.curve = [(int(row["start"]), int(row["count"])) for row in found]


def refuse_bad(checked: TableCheck, max_rejects: int, allow_identical: bool) -> None:
    """Raise Invalid if more rows are bad or identical than allowed. Nothing was put yet."""
    if checked.rejected > max_rejects:
        told = [f"{count:,} × {reason}" for reason, count in sorted(checked.bad.items(), key=lambda each: -each[1])]
        if checked.conflicts:
            told.append(f"{checked.conflicts:,} × the id is another row's, too")
        raise Invalid(
            f"{checked.rejected:,} of {checked.rows:,} rows cannot be put, more than the {max_rejects:,} allowed: "
            f"{'; '.join(told)}. Fix them, or allow them to be left out (--max-rejects; --rejects URL keeps them)"
        )
    if checked.identical and not allow_identical:
        raise Invalid(
            f"{checked.identical:,} of {checked.rows:,} rows are identical to another and have no id of their own. "
            "Give rows an id (--id EXPRESSION), or let them collapse into one (--allow-identical)"
        )


@dataclass
class LoadRequest:
    """A load to be done. `past`: reject or now. `shift_to_ms`: the time to which the earliest due time moves, and all
    others with it. `state`: a JSON file (any fsspec URL) that lets a run that died continue. `where`: SQL, only these
    rows."""

    addresses: str
    topic: str
    group: str = DEFAULT_GROUP
    past: str = "reject"
    max_rejects: int = 0
    rejects: str = ""
    allow_identical: bool = False
    shift_to_ms: int = 0
    state: str = ""
    timeout: str = "60s"
    dry_run: bool = False
    where: str = ""


@dataclass
class LoadResult:
    """The result of a load. With `dry_run`, nothing was put."""

    checked: TableCheck
    warnings: list[str] = field(default_factory=list)
    put: int = 0
    there: int = 0
    settled: int = 0
    rejected: int = 0
    collapsed: int = 0
    resumed: bool = False
    dry_run: bool = False

    @property
    def looked_at(self) -> int:
        """Rows that are finished."""
        return self.put + self.there + self.settled + self.collapsed + self.rejected

    def add(self, report: Mapping[str, int]) -> None:
        """Add the counts of a step's report."""
        for name in ("put", "there", "settled", "rejected", "collapsed"):
            setattr(self, name, getattr(self, name) + int(report[name]))


def load(
    spark: SparkSession,
    table: DataFrame,
    asked: LoadRequest,
    expressions: Mapping[str, str] | None = None,
    progress: Progress = quiet,
) -> LoadResult:
    """Put the rows of `table`. `expressions`: SQL for the columns of messages, as `mapped` takes it. Raise Invalid for
    bad rows, NotFound, Forbidden, or Unavailable. Rows that were put stay, and the same call continues."""
    SourceOptions.of({"addresses": asked.addresses, "topic": asked.topic, "past": asked.past, "timeout": asked.timeout})
    with SparkConnection(asked.addresses) as connection:
        topic = connection.topic(asked.topic)
        connection.check_put(asked.topic, asked.group)
    table = table.where(asked.where) if asked.where else table
    state = _State.of(asked, topic, table, expressions or {})
    rows = mapped(table, expressions or {})
    own_ids = "id" in rows.columns
    progress("checking the rows", 0, 0)
    if not state.resumed:
        state.checked_ms = Clock().now_ms()
        state.shift_by_ms = asked.shift_to_ms - earliest_ms(rows) if asked.shift_to_ms else 0
    rows = with_ids(shifted(rows, state.shift_by_ms))
    # Rows that came due after the first try are no mistake of the table.
    checked = check(rows, topic.settings, state.checked_ms, asked.past, own_ids)
    loaded = LoadResult(checked, resumed=state.resumed, dry_run=asked.dry_run)
    loaded.warnings = _warnings(topic, loaded.checked)
    if asked.dry_run:
        return loaded
    refuse_bad(loaded.checked, asked.max_rejects, asked.allow_identical)
    _put(spark, table, expressions or {}, asked, state, loaded, progress)
    return loaded


def _warnings(topic: Topic, checked: TableCheck) -> list[str]:
    found: list[str] = []
    if not topic.settings.remember_ms:
        found.append(
            f"topic {topic.name!r} remembers nothing. A run that dies and is run again sends messages that were "
            f"delivered meanwhile once more (timeline topic update {topic.name} --remember 1d)"
        )
    for spike in checked.spikes[:3]:
        start = as_datetime(spike.start_ms).isoformat(timespec="minutes")
        found.append(f"{spike.count:,} come due within {checked.step_ms // 1000} s from {start}")
    return found


@dataclass
class _State:
    """The progress of a load, kept in a JSON file if one is named. `rows`: of the files in `done`."""

    url: str
    fingerprint: str
    run: str
    shift_by_ms: int = 0
    checked_ms: int = 0
    rows: int = 0
    done: list[str] = field(default_factory=list)
    resumed: bool = False

    @classmethod
    def of(cls, asked: LoadRequest, topic: Topic, table: DataFrame, expressions: Mapping[str, str]) -> _State:
        said = [
            str(topic.uid),
            asked.group,
            repr(sorted(expressions.items())),
            asked.where,
            table.schema.json(),
            *sorted(table.inputFiles()),
        ]
        fingerprint = hashlib.sha256("\0".join(said).encode()).hexdigest()
        fresh = cls(asked.state, fingerprint, uuid.uuid4().hex)
        kept = read_json(asked.state) if asked.state else None
        if kept is None:
            return fresh
        if not isinstance(kept, dict) or kept.get("fingerprint") != fingerprint:
            raise Invalid(
                f"the state in {asked.state} is of another load (another table, topic or mapping). Name another "
                "file, or remove it"
            )
        try:
            shift_by_ms, checked_ms, rows = (int(kept[name]) for name in ("shift_by_ms", "checked_ms", "rows"))
            done = [str(file) for file in kept["done"]]
            return cls(asked.state, fingerprint, str(kept["run"]), shift_by_ms, checked_ms, rows, done, True)
        except (KeyError, TypeError, ValueError) as wrong:
            raise Invalid(f"the state in {asked.state} was changed or is damaged: {wrong}. Remove it") from wrong

    def keep(self) -> None:
        """Write the file."""
        if self.url:
            names = ("fingerprint", "run", "shift_by_ms", "checked_ms", "rows", "done")
            write_json(self.url, {name: getattr(self, name) for name in names})


def _put(
    spark: SparkSession,
    table: DataFrame,
    expressions: Mapping[str, str],
    asked: LoadRequest,
    state: _State,
    loaded: LoadResult,
    progress: Progress,
) -> None:
    """Write the rows. With a state, write some of the table's files at a time, and skip those that are done."""
    state.keep()
    files = sorted(table.inputFiles()) if asked.state else []
    left = [file for file in files if file not in state.done]
    steps = [left[at : at + FILES_A_STEP] for at in range(0, len(left), FILES_A_STEP)] or ([[]] if not files else [])
    total = loaded.checked.rows - loaded.checked.rejected
    options = {
        "addresses": asked.addresses, "topic": asked.topic, "group": asked.group, "timeout": asked.timeout,
        "past": str(state.checked_ms) if asked.past == "reject" else "now", "maxRejects": str(asked.max_rejects),
        "rejectsPath": asked.rejects, "allowIdentical": "true",
    }  # fmt: skip

    def tell(before: int, done: int, tasks: int) -> None:
        progress("rows", before + (total - before) * done // tasks, total)

    for step in steps:
        part = _only(table, step) if state.done or len(steps) > 1 else table
        rows = with_ids(shifted(mapped(part, expressions), state.shift_by_ms))
        before = loaded.looked_at
        # Each step has a run of its own, which is the same when the step runs again.
        run = {"run": "|".join([state.run, *step[:1]])}
        loaded.add(write(spark, rows, options | run, partial(tell, before)))
        state.rows += loaded.looked_at - before
        state.done += step
        state.keep()
    if files and state.rows != loaded.checked.rows:
        raise Invalid(
            f"{state.rows:,} rows of {loaded.checked.rows:,} were put or rejected: the table has changed since it was "
            f"checked. Remove {state.url}, and run the load again"
        )
    if state.url:
        remove(state.url)


def write(
    spark: SparkSession, rows: DataFrame, options: Mapping[str, str], progress: Callable[[int, int], None]
) -> dict[str, int]:
    """Write `rows` to the source. Return the report's counts."""
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder:  # on Spark's driver, which commits
        report = f"file://{folder}/report.json"
        told = {name: value for name, value in options.items() if value} | {"reportPath": report}
        writer = rows.write.format("timeline").mode("append").options(**told)
        watched(spark, writer.save, progress)
        counts: dict[str, int] = read_json(report)
    return counts


def _only(table: DataFrame, files: list[str]) -> DataFrame:
    """Return the rows of some of the table's files. Spark spells local ones in two ways."""
    spelt = {*files, *(f"file:/{file[8:]}" for file in files if file.startswith("file:///"))}
    return table.where(F.col("_metadata.file_path").isin(sorted(spelt)))
