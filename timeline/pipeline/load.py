"""The job `load`: any table that Spark reads → a topic's timeline.

It looks at all rows first, and says what they would add to the load and what cannot be put, before anything is written.
A run that died is run again as it was: with `state` it goes on after the files that were done; what was put is there,
and what was delivered meanwhile is not put again as long as the topic remembers."""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from timeline.clock import Clock
from timeline.driver.times import as_datetime
from timeline.errors import Invalid
from timeline.model import DEFAULT_GROUP, Topic
from timeline.pipeline.connection import Connection
from timeline.pipeline.files import read_json, remove, write_json
from timeline.pipeline.options import Options
from timeline.pipeline.rows import Checked, check, earliest_ms, mapped, refuse_bad, shifted, with_ids
from timeline.pipeline.watching import watched

FILES_A_STEP = 16
Said = Callable[[str, int, int], None]
"""Told of what is being done, how many of it are done, and of how many."""


@dataclass
class Asked:
    """What to load where. `past`: reject, now. `shift_to_ms`: the whole table is moved in time so that its earliest due
    is then. `state`: a JSON file (any fsspec URL) by which a run that died goes on. `where`: SQL, only these rows."""

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
class Loaded:
    """What a load did, or, `dry_run`, would do."""

    checked: Checked
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
        """Rows that are done with."""
        return self.put + self.there + self.settled + self.collapsed + self.rejected

    def add(self, report: Mapping[str, int]) -> None:
        """Counts what one step's report says."""
        for name in ("put", "there", "settled", "rejected", "collapsed"):
            setattr(self, name, getattr(self, name) + int(report[name]))


def load(
    spark: SparkSession,
    table: DataFrame,
    asked: Asked,
    expressions: Mapping[str, str] | None = None,
    said: Said = lambda what, done, total: None,
) -> Loaded:
    """Puts the rows of `table`. `expressions`: SQL for the columns of messages, see `rows.mapped`. Raises Invalid when
    the rows are not as they must be, NotFound, Forbidden, Unavailable; what was put by then stays, and the same call
    goes on."""
    Options.of({"addresses": asked.addresses, "topic": asked.topic, "past": asked.past, "timeout": asked.timeout})
    with Connection(asked.addresses) as connection:
        topic = connection.topic(asked.topic)
        connection.check_put(asked.topic, asked.group)
    table = table.where(asked.where) if asked.where else table
    state = _State.of(asked, topic, table, expressions or {})
    rows = mapped(table, expressions or {})
    own_ids = "id" in rows.columns
    said("looking at the rows", 0, 0)
    if not state.resumed:
        state.checked_ms = Clock().now_ms()
        state.shift_by_ms = asked.shift_to_ms - earliest_ms(rows) if asked.shift_to_ms else 0
    rows = with_ids(shifted(rows, state.shift_by_ms))
    # What came due after the first try is no mistake of the table's.
    checked = check(rows, topic.settings, state.checked_ms, asked.past, own_ids)
    loaded = Loaded(checked, resumed=state.resumed, dry_run=asked.dry_run)
    loaded.warnings = _warnings(topic, loaded.checked)
    if asked.dry_run:
        return loaded
    refuse_bad(loaded.checked, asked.max_rejects, asked.allow_identical)
    _put(spark, table, expressions or {}, asked, state, loaded, said)
    return loaded


def _warnings(topic: Topic, checked: Checked) -> list[str]:
    found: list[str] = []
    if not topic.settings.remember_ms:
        found.append(
            f"topic {topic.name!r} remembers nothing: a run that dies and is run again sends what was delivered "
            f"meanwhile once more (timeline topic update {topic.name} --remember 1d)"
        )
    for spike in checked.spikes[:3]:
        found.append(f"{spike.count:,} come due within {checked.step_ms // 1000} s from {_shown(spike.start_ms)}")
    return found


def _shown(millis: int) -> str:
    return as_datetime(millis).isoformat(timespec="minutes")


@dataclass
class _State:
    """What a run that died had done: kept in a JSON file, when one is named. `rows`: of the files that are done."""

    url: str
    fingerprint: str
    run: str
    shift_by_ms: int = 0
    checked_ms: int = 0
    rows: int = 0
    done: list[str] = field(default_factory=list)
    resumed: bool = False

    @classmethod
    def of(cls, asked: Asked, topic: Topic, table: DataFrame, expressions: Mapping[str, str]) -> _State:
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
                f"the state in {asked.state} is of another load (another table, topic or mapping): name another "
                "file, or remove it"
            )
        try:
            shift_by_ms, checked_ms, rows = (int(kept[name]) for name in ("shift_by_ms", "checked_ms", "rows"))
            done = [str(file) for file in kept["done"]]
            return cls(asked.state, fingerprint, str(kept["run"]), shift_by_ms, checked_ms, rows, done, True)
        except (KeyError, TypeError, ValueError) as wrong:
            raise Invalid(f"the state in {asked.state} was changed or is damaged: {wrong}. Remove it") from wrong

    def keep(self) -> None:
        """Writes it down."""
        if self.url:
            names = ("fingerprint", "run", "shift_by_ms", "checked_ms", "rows", "done")
            told = {name: getattr(self, name) for name in names}
            write_json(self.url, told)


def _put(
    spark: SparkSession,
    table: DataFrame,
    expressions: Mapping[str, str],
    asked: Asked,
    state: _State,
    loaded: Loaded,
    said: Said,
) -> None:
    """Writes; where a state is kept, some of the table's files at a time: those that are done are not read again."""
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
    for step in steps:
        part = _only(table, step) if state.done or len(steps) > 1 else table
        rows = with_ids(shifted(mapped(part, expressions), state.shift_by_ms))
        before = loaded.looked_at
        # Each step has names of its own for what it keeps: the same again when it is run again.
        run = {"run": "|".join([state.run, *step[:1]])}
        loaded.add(write(spark, rows, options | run, partial(_tell, said, before, total)))
        state.rows += loaded.looked_at - before
        state.done += step
        state.keep()
    if files and state.rows != loaded.checked.rows:
        raise Invalid(
            f"{state.rows:,} rows of {loaded.checked.rows:,} were put or set aside: the table is not what it was when "
            f"it was looked at. Remove {state.url}, and run it again"
        )
    if state.url:
        remove(state.url)


def _tell(said: Said, before: int, total: int, done: int, of: int) -> None:
    """`done` tasks of the step, `of` so many, as rows."""
    said("rows", before + (total - before) * done // of, total)


def write(
    spark: SparkSession, rows: DataFrame, options: Mapping[str, str], said: Callable[[int, int], None]
) -> dict[str, int]:
    """Writes `rows` to the source; the report's counts."""
    with tempfile.TemporaryDirectory(prefix="timeline-") as folder:  # where Spark's driver is, which commits
        report = f"file://{folder}/report.json"
        told = {name: value for name, value in options.items() if value} | {"reportPath": report}
        writer = rows.write.format("timeline").mode("append").options(**told)
        watched(spark, writer.save, said)
        counts: dict[str, int] = read_json(report)
    return counts


def _only(table: DataFrame, files: list[str]) -> DataFrame:
    """The rows of some of the table's files. Spark spells local ones in two ways."""
    spelt = {*files, *(f"file:/{file[8:]}" for file in files if file.startswith("file:///"))}
    return table.where(F.col("_metadata.file_path").isin(sorted(spelt)))
