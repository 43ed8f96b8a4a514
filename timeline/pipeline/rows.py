"""Any table as rows to put, and what is to be known of it before anything is put: all as expressions that Spark
computes where the data lies; what comes back is counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from timeline.errors import Invalid
from timeline.model import MAX_ID_BYTES, MAX_TAG_BYTES, MAX_TIME_MS, TopicSettings
from timeline.pipeline.schema import check_written

COLUMNS = ("due", "payload", "id", "tag", "headers", "expires")
SPIKES = 5
STEPS_SHOWN = 10_000
DIGITS = 32


def mapped(table: DataFrame, expressions: Mapping[str, str]) -> DataFrame:
    """The table's rows with the columns of messages. `expressions`: SQL for the columns that are not there under their
    names; those without one are taken as they are, when they are there. Raises Invalid naming the column."""
    chosen: list[Column] = []
    for name in COLUMNS:
        if name in expressions:
            chosen.append(F.expr(expressions[name]).alias(name))
        elif name in table.columns:
            chosen.append(F.col(name))
    rows = table.select(*chosen)
    check_written(rows.schema)
    return rows


def earliest_ms(rows: DataFrame) -> int:
    """The earliest due; 0 when there is none."""
    found = rows.agg(F.min(_millis("due"))).head()
    return int(found[0] or 0) if found is not None else 0


def shifted(rows: DataFrame, by_ms: int) -> DataFrame:
    """The same rows, all moved in time by `by_ms`."""
    if not by_ms:
        return rows
    moved = {"due": F.timestamp_millis(_millis("due") + F.lit(by_ms))}
    if "expires" in rows.columns:
        moved["expires"] = F.timestamp_millis(_millis("expires") + F.lit(by_ms))
    return rows.withColumns(moved)


def with_ids(rows: DataFrame) -> DataFrame:
    """The same rows with an id where there is no such column: made of all that a row says, so that the same row has the
    same id whenever it is loaded."""
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
    """A timestamp in ms, rounded up."""
    return F.ceil(F.unix_micros(name) / 1000).cast("long")


@dataclass
class Spike:
    """A step in which more comes due than usual."""

    start_ms: int
    count: int


@dataclass
class Checked:
    """What a look at all rows found. `bad`: rows by why they cannot be put. `identical`: rows that say the same as
    another (without an id of their own); `conflicts`: rows whose id another row has with another content. `curve`: how
    many come due per `step_ms`, by start."""

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
        """The steps with most, when that is at least three times the mean of all steps with any."""
        if not self.curve:
            return []
        usual = sum(count for _, count in self.curve) / len(self.curve)
        most = sorted(self.curve, key=lambda step: -step[1])[:SPIKES]
        return [Spike(start, count) for start, count in most if count >= 3 * usual]


def check(rows: DataFrame, settings: TopicSettings, now_ms: int, past: str, own_ids: bool) -> Checked:
    """Looks at all rows in two passes: one for values, one for ids. `own_ids`: the table came with them."""
    checked = Checked()
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
        ("due lies beyond the topic's horizon", due_ms > now_ms + settings.horizon_ms),
        ("payload is null", F.col("payload").isNull()),
        (f"payload is above the topic's {most} bytes", F.octet_length("payload") > most),
    ]
    if past == "reject":
        found.insert(2, ("due is past", due_ms <= now_ms))
    if "id" in rows.columns:
        sizes = F.octet_length(F.coalesce("id", F.lit("")))
        found.append((f"id is null, empty or above {MAX_ID_BYTES} bytes", (sizes < 1) | (sizes > MAX_ID_BYTES)))
    if "tag" in rows.columns:
        found.append((f"tag is above {MAX_TAG_BYTES} bytes", F.octet_length("tag") > MAX_TAG_BYTES))
    if "expires" in rows.columns:
        found.append(("expires before it is due", _millis("expires") <= due_ms))
    return found


def _check_ids(rows: DataFrame, checked: Checked, own_ids: bool) -> None:
    """How many rows share an id with another one, and say the same or not."""
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


def _draw(good: DataFrame, checked: Checked) -> None:
    """The load curve, in steps of a minute or of more where that would be too many."""
    span_ms = max(1, checked.last_ms - checked.first_ms)
    checked.step_ms = next(step for step in _STEPS_MS if span_ms / step <= STEPS_SHOWN or step == _STEPS_MS[-1])
    start = (F.col("due_ms") - F.col("due_ms") % checked.step_ms).alias("start")
    found = good.groupBy(start).count().orderBy("start").limit(STEPS_SHOWN).collect()
    checked.curve = [(int(row["start"]), int(row["count"])) for row in found]


_STEPS_MS = (60_000, 300_000, 900_000, 3_600_000, 86_400_000)


def refuse_bad(checked: Checked, max_rejects: int, allow_identical: bool) -> None:
    """Raises Invalid when the rows are not as they must be; nothing was put yet."""
    if checked.rejected > max_rejects:
        told = [f"{count:,} × {reason}" for reason, count in sorted(checked.bad.items(), key=lambda each: -each[1])]
        if checked.conflicts:
            told.append(f"{checked.conflicts:,} × the id is another row's, too")
        raise Invalid(
            f"{checked.rejected:,} of {checked.rows:,} rows cannot be put, more than the {max_rejects:,} allowed: "
            f"{'; '.join(told)}. Mend them, or allow them to be left out (--max-rejects, --rejects URL keeps them)"
        )
    if checked.identical and not allow_identical:
        raise Invalid(
            f"{checked.identical:,} of {checked.rows:,} rows are identical to another and have no id of their own: "
            "give rows an id (--id EXPRESSION), or let them collapse into one (--allow-identical)"
        )
