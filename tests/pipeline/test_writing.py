"""Batch write: rows → messages, once each, whatever happens to tasks; what cannot be put is rejected with its
reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.pipeline.conftest import Serving, stored, taken
from tests.pipeline.dying import DyingSource

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]

LATER = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=UTC)
COLUMNS = "id string, due timestamp, payload string, tag string, headers map<string,string>, expires timestamp"


def rows_of(count: int, due: datetime = LATER) -> list[tuple[Any, ...]]:
    return [(f"m{at:05d}", due + timedelta(seconds=at), f"payload {at}") for at in range(count)]


def put(frame: Any, broker: Serving, topic: str, report: Path | None = None, **options: str) -> dict[str, Any]:
    told = {"addresses": broker.address, "topic": topic, **options}
    if report is not None:
        told["reportPath"] = f"file://{report}"
    frame.write.format("timeline").mode("append").options(**told).save()
    return json.loads(report.read_text()) if report is not None else {}


def test_a_thousand_flights_lie_on_the_timeline_with_all_they_said(
    spark: Any, broker: Serving, topic: str, tmp_path: Path
) -> None:
    rows = [
        (f"UA{at}", LATER + timedelta(minutes=at), f"gate {at}", "spring" if at % 2 else None,
         {"at": str(at)} if at % 3 else None,
         LATER + timedelta(days=400) if at % 5 else None)
        for at in range(1_000)
    ]  # fmt: skip
    report = put(spark.createDataFrame(rows, COLUMNS), broker, topic, tmp_path / "report.json", group="ops")
    assert (report["rows"], report["put"], report["rejected"]) == (1_000, 1_000, 0)
    found = stored(broker.address, topic)
    assert {one.id for one in found} == {row[0] for row in rows}
    by_id = {one.id: one for one in found}
    for id, due, payload, tag, headers, expires in rows:
        one = by_id[id]
        assert one.due == due.replace(microsecond=124_000), "a part of a millisecond rounds up"
        assert (one.payload, one.tag, one.headers, one.group) == (payload.encode(), tag, headers or {}, "ops")
        assert one.expires == (expires and expires.replace(microsecond=124_000))


def test_the_same_rows_again_are_there_and_nothing_doubles(
    spark: Any, broker: Serving, topic: str, tmp_path: Path
) -> None:
    frame = spark.createDataFrame(rows_of(500), "id string, due timestamp, payload string")
    put(frame, broker, topic)
    report = put(frame, broker, topic, tmp_path / "report.json")
    assert (report["put"], report["there"]) == (0, 500)
    assert len(stored(broker.address, topic)) == 500


def test_without_ids_identical_rows_collapse_only_where_that_is_allowed(
    spark: Any, broker: Serving, topic: str, tmp_path: Path
) -> None:
    rows = [row[1:] for row in rows_of(300)]
    frame = spark.createDataFrame([*rows, *rows[:40], *rows[:40]], "due timestamp, payload string").repartition(3)
    with pytest.raises(Exception, match="80 rows without an id are identical to others"):
        put(frame, broker, topic, run="tonight")
    assert len(stored(broker.address, topic)) == 300
    report = put(frame, broker, topic, tmp_path / "report.json", run="tonight", allowIdentical="true")
    assert (report["put"], report["rejected"]) == (0, 0)
    assert report["there"] + report["collapsed"] == 380
    assert len(stored(broker.address, topic)) == 300


def test_rows_that_cannot_be_put_are_kept_with_their_reasons(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = make_topic(max_payload_bytes=100, horizon="7300d")
    now = datetime.now(UTC)
    good = (LATER, "fine", "good", "t")
    bad = [
        (None, "p", "null-due", None, "due is null"),
        (now - timedelta(days=1), "p", "past", None, "due is past"),
        (datetime(9000, 1, 1, tzinfo=UTC), "p", "far", None, "beyond the topic's horizon"),
        (datetime(1970, 1, 12, tzinfo=UTC), "p", "seconds", None, "due lies before 1973"),
        (LATER, None, "null-payload", None, "payload is null"),
        (LATER, "x" * 101, "large", None, "TOO_LARGE"),
        (LATER, "p", None, None, "id is null"),
        (LATER, "p", "", None, "an id takes|id takes 1 to 255"),
        (LATER, "p", "i" * 256, None, "takes 1 to 255"),
        (LATER, "p", "nul\0", None, "NUL"),
        (LATER, "p", "tagged", "t" * 65, "takes 0 to 64"),
        (LATER, "other", "good", None, "EXISTS"),
        (LATER + timedelta(hours=1), "fine", "good", None, "another due"),
    ]
    schema = "due timestamp, payload string, id string, tag string"
    frame = spark.createDataFrame([good, *(row[:4] for row in bad)], schema).coalesce(1)
    rejects = tmp_path / "rejects"
    report = put(
        frame, broker, topic, tmp_path / "report.json", maxRejects=str(len(bad)), rejectsPath=f"file://{rejects}"
    )
    assert (report["put"], report["rejected"]) == (1, len(bad))
    kept = pq.read_table(rejects).to_pylist()
    assert len(kept) == len(bad)

    for row in bad:
        reasons = [
            one["reason"] for one in kept if one["id"] == row[2] and one["payload"] == row[1] and one["due"] == row[0]
        ]
        assert reasons and re.search(row[4], reasons[0]), (row, reasons)
    with pytest.raises(Exception, match=rf"more than maxRejects={len(bad) - 1}"):
        put(frame, broker, topic, maxRejects=str(len(bad) - 1))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ("id string, payload string", "there is no column 'due'"),
        ("due timestamp, id string", "there is no column 'payload'"),
        ("due bigint, payload string", "column 'due' must be a timestamp, not bigint: timestamp_millis"),
        (
            "due timestamp_ntz, payload string",
            "column 'due' must be a timestamp, not timestamp_ntz, which has no time zone",
        ),
        ("due timestamp, payload int", "column 'payload' must be binary or a string, not int"),
        ("due timestamp, payload string, Tag string", "column 'Tag' is none of .* If it is the tag, rename it"),
        ("due timestamp, payload string, headers map<string,int>", "column 'headers' must be a map<string,string>"),
    ],
)
def test_a_column_that_is_missing_or_mistyped_is_named(
    spark: Any, broker: Serving, topic: str, columns: str, sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        put(spark.createDataFrame([], columns), broker, topic)


def test_what_stands_in_the_way_is_said_before_anything_is_put(spark: Any, broker: Serving, topic: str) -> None:
    frame = spark.createDataFrame(rows_of(3), "id string, due timestamp, payload string")
    with pytest.raises(Exception, match=r"there is no topic 'nowhere'.*There are"):
        put(frame, broker, "nowhere")
    with pytest.raises(Exception, match="no option 'topik': did you mean topic"):
        put(frame, broker, topic, topik="x")
    with pytest.raises(Exception, match="a timeline is not overwritten"):
        frame.write.format("timeline").mode("overwrite").options(addresses=broker.address, topic=topic).save()
    with pytest.raises(Exception, match=r"no broker answers|cannot be reached|UNAVAILABLE"):
        frame.write.format("timeline").mode("append").options(addresses="127.0.0.1:1", topic=topic, timeout="1s").save()
    assert stored(broker.address, topic) == []


def test_a_python_worker_that_is_killed_in_the_middle_neither_doubles_nor_loses(
    spark: Any, broker: Serving, topic: str, tmp_path: Path
) -> None:
    spark.dataSource.register(DyingSource)
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "500")
    try:
        frame = spark.range(20_000, numPartitions=2).selectExpr(
            "timestamp_millis(1940000000000 + id) AS due", "concat('payload ', id) AS payload"
        )
        told = {"addresses": broker.address, "topic": topic, "run": str(tmp_path / "mark")}
        told["reportPath"] = f"file://{tmp_path}/report.json"
        frame.write.format("dying").mode("append").options(**told).save()
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert (tmp_path / "mark").exists()
    found = stored(broker.address, topic)
    assert sorted(one.payload or b"" for one in found) == sorted(f"payload {at}".encode() for at in range(20_000))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["put"] + report["there"] == 20_000
    assert report["there"] > 0, "what the dead process had put was recognised"
    assert report["collapsed"] == 0


def test_what_was_delivered_is_not_sent_again_where_the_topic_remembers(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = make_topic(remember="1d")
    frame = spark.createDataFrame(
        rows_of(50, datetime(2020, 1, 1, tzinfo=UTC)), "id string, due timestamp, payload string"
    )
    put(frame, broker, topic, past="now")
    assert len(taken(broker.address, topic, 50)) == 50
    report = put(frame, broker, topic, tmp_path / "report.json", past="now")
    assert (report["settled"], report["put"]) == (50, 0)
    assert stored(broker.address, topic) == []
