"""Stream write and stream read: the timeline as a reorder buffer between two streams; replays read the same rows
again."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import timeline
from tests.pipeline.conftest import Serving, stored
from tests.pipeline.reordering import ordered
from timeline.errors import Invalid
from timeline.pipeline import TimelineSource
from timeline.pipeline.source.columns import READ

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
WAIT_S = 90


def events(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """A file for the file source, whole at once."""
    folder.mkdir(exist_ok=True)
    part = folder / f".{name}.part"
    part.write_text("\n".join(json.dumps(row) for row in rows))
    part.rename(folder / f"{name}.json")


def writing(spark: Any, broker: Serving, topic: str, source: Path, checkpoint: Path) -> Any:
    rows = (
        spark.readStream.schema("id string, at long, body string").option("maxFilesPerTrigger", "1").json(str(source))
    )
    rows = rows.selectExpr("id", "timestamp_millis(at) AS due", "body AS payload")
    return (
        rows.writeStream.format("timeline")
        .options(addresses=broker.address, topic=topic, checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def reading(
    spark: Any, broker: Serving, topic: str, checkpoint: Path, each: Callable[[Any, int], None], **options: str
) -> Any:
    told = {
        "addresses": broker.address,
        "topic": topic,
        "payload": "true",
        "partitions": "2",
        "wait": "200ms",
        **options,
    }
    frame = spark.readStream.format("timeline").options(**told).load()
    return frame.writeStream.foreachBatch(each).option("checkpointLocation", str(checkpoint)).start()


class Kept:
    """What a query was handed, by micro-batch; it fails in batch `fails`, once, after it has seen it."""

    def __init__(self, fails: int = -1) -> None:
        self.batches: list[tuple[int, list[tuple[str, int, datetime, bytes]]]] = []
        self._fails = fails

    def __call__(self, frame: Any, number: int) -> None:
        rows = [(row["id"], row["version"], row["due"], bytes(row["payload"])) for row in frame.collect()]
        self.batches.append((number, rows))
        if number == self._fails:
            self._fails = -1
            raise RuntimeError("the sink broke")

    @property
    def ids(self) -> list[str]:
        return [row[0] for _, rows in self.batches for row in rows]


def until(query: Any, done: Callable[[], bool]) -> None:
    """Waits for the query's own progress until `done`."""
    deadline = datetime.now(UTC) + timedelta(seconds=WAIT_S)
    while not done():
        assert query.isActive, query.exception()
        assert datetime.now(UTC) < deadline, query.lastProgress
        query.awaitTermination(0.2)


@pytest.mark.prove
def test_a_reorder_buffer_that_is_stopped_and_started_loses_nothing(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = make_topic(buckets=8)
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    rows = [{"id": f"e{at:03d}", "at": now_ms + 3_000 + at * 20, "body": f"b{at}"} for at in range(200)]
    shuffled = [rows[(at * 77) % 200] for at in range(200)]
    source = tmp_path / "in"
    events(source, "one", shuffled[:120])
    writing(spark, broker, topic, source, tmp_path / "w").awaitTermination()
    events(source, "two", [*shuffled[120:], *shuffled[:10]])
    writing(spark, broker, topic, source, tmp_path / "w").awaitTermination()

    kept = Kept()
    query = reading(spark, broker, topic, tmp_path / "r", kept, maxRowsPerBatch="60")
    until(query, lambda: len(kept.ids) >= 60)
    query.stop()
    query = reading(spark, broker, topic, tmp_path / "r", kept, maxRowsPerBatch="60")
    until(query, lambda: len(set(kept.ids)) == 200)
    until(query, lambda: not stored(broker.address, topic))
    query.stop()
    assert sorted(set(kept.ids)) == [row["id"] for row in rows]
    firsts: dict[str, tuple[int, datetime]] = {}
    for number, batch in kept.batches:
        for id, _, due, payload in batch:
            firsts.setdefault(id, (number, due))
            assert payload == b"b%d" % int(id[1:])
    order = sorted(firsts.values(), key=lambda one: one[0])
    for (one, _), (other, _) in itertools.pairwise(order):
        assert one <= other
    in_time = [due for _, due in sorted(firsts.values(), key=lambda one: (one[0], one[1]))]
    late = sum(1 for a, b in itertools.pairwise(in_time) if b < a)
    assert late <= 2, "out of micro-batches in order of time comes a stream in order of time"


def test_a_batch_that_was_not_committed_is_read_again_with_the_same_rows(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = make_topic()
    with timeline.connect_sync(broker.address) as tl, tl.producer(topic) as p:
        p.produce_many(
            # So many that both partitions of both batches have some: a share that is empty waits, when it is read
            # again, until nobody can lease for it any more.
            timeline.Batch([b"x"] * 40, at=1_700_000_000_000, ids=[f"r{at}" for at in range(40)])
        ).raise_failed()
        kept = Kept(fails=1)
        query = reading(spark, broker, topic, tmp_path / "r", kept, maxRowsPerBatch="20")
        with pytest.raises(Exception, match="the sink broke"):
            query.awaitTermination(WAIT_S)
        seen = dict(kept.batches)
        assert 1 in seen
        # More came due meanwhile: it must not slip into the batch that is read again.
        p.produce_many(
            timeline.Batch([b"y"] * 5, at=1_700_000_000_000, ids=[f"s{at}" for at in range(5)])
        ).raise_failed()
    query = reading(spark, broker, topic, tmp_path / "r", kept, maxRowsPerBatch="20")
    until(query, lambda: not stored(broker.address, topic))
    query.stop()
    again = [rows for number, rows in kept.batches if number == 1]
    assert len(again) == 2
    assert sorted(row[0] for row in again[0]) == sorted(row[0] for row in again[1])
    assert sorted(set(kept.ids)) == sorted([f"r{at}" for at in range(40)] + [f"s{at}" for at in range(5)])
    others = [id for number, rows in kept.batches if number != 1 for id, *_ in rows]
    assert len(others) == len(set(others))


@pytest.mark.prove
def test_a_job_that_is_killed_and_started_again_elsewhere_loses_nothing(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, out = make_topic(), tmp_path / "out"
    ids = [f"e{at:03d}" for at in range(300)]
    with timeline.connect_sync(broker.address) as tl, tl.producer(topic) as p:
        batch = timeline.Batch([b"x"] * 300, at=[1_700_000_000_000 + at for at in range(300)], ids=ids)
        p.produce_many(batch).raise_failed()
    command = [sys.executable, "-m", "tests.pipeline.reordering", broker.address, topic, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        # It says so when a batch is in the sink, and goes on with the next: the end comes anywhere in that.
        assert process.stdout.readline() == b"a batch is done\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert stored(broker.address, topic), "some are left for the second job"
    query = ordered(spark, broker.address, topic, str(tmp_path))
    until(query, lambda: not stored(broker.address, topic))
    query.stop()
    rows = spark.read.json(f"file://{out}").collect()
    assert sorted(row["id"] for row in rows) == ids


@pytest.mark.prove
def test_a_checkpoint_of_another_topic_is_refused(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    one, other = make_topic(), make_topic()
    with timeline.connect_sync(broker.address) as tl:
        for topic in (one, other):
            with tl.producer(topic) as p:
                p.produce(b"x", in_=0, id="a")
    kept = Kept()
    query = reading(spark, broker, one, tmp_path / "r", kept)
    until(query, lambda: kept.ids == ["a"] and not stored(broker.address, one))
    query.stop()
    query = reading(spark, broker, other, tmp_path / "r", kept)
    with pytest.raises(Exception, match=f"the checkpoint is of topic '{one}', this query reads '{other}'"):
        query.awaitTermination(WAIT_S)
    assert len(stored(broker.address, other)) == 1


def test_what_is_due_now_and_no_more_is_read_when_that_is_asked(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic = make_topic()
    with timeline.connect_sync(broker.address) as tl, tl.producer(topic) as p:
        p.produce_many(timeline.Batch([b"x"] * 25, in_=0, ids=[f"n{at}" for at in range(25)])).raise_failed()
        p.produce(b"later", in_="1h", id="later")
    kept = Kept()
    told = {"addresses": broker.address, "topic": topic, "payload": "true", "partitions": "2", "maxRowsPerBatch": "10"}
    frame = spark.readStream.format("timeline").options(**told).load()
    query = (
        frame.writeStream.foreachBatch(kept)
        .option("checkpointLocation", str(tmp_path / "r"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT_S)
    assert sorted(kept.ids) == sorted(f"n{at}" for at in range(25))
    assert [one.id for one in stored(broker.address, topic)] == ["later"]


@pytest.mark.parametrize("asked", [{"tag": "spring"}, {"state": "dead"}, {"buckets": "0-4"}])
def test_a_stream_that_would_take_more_than_was_asked_for_is_refused(asked: dict[str, str]) -> None:
    (name,) = asked
    with pytest.raises(Invalid, match=f"takes and acknowledges whatever is due.*has no option '{name}'"):
        TimelineSource({"topic": "t"} | asked).streamReader(READ)


def test_what_each_micro_batch_leaves_out_is_kept(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, rejects = make_topic(), tmp_path / "rejects"
    source = tmp_path / "in"
    for part in range(2):
        events(source, f"{part}", [{"id": f"e{part}{at}", "body": f"b{at}"} for at in range(3)])
    rows = spark.readStream.schema("id string, body string").option("maxFilesPerTrigger", "1").json(str(source))
    rows = rows.selectExpr("id", "IF(id LIKE '%2', NULL, timestamp_millis(1940000000000)) AS due", "body AS payload")
    told = {"addresses": broker.address, "topic": topic, "maxRejects": "1", "rejectsPath": f"file://{rejects}"}
    told["run"] = "nightly"
    writer = rows.writeStream.format("timeline").options(**told, checkpointLocation=str(tmp_path / "w"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert len(stored(broker.address, topic)) == 4
    kept = [row["id"] for path in rejects.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert sorted(kept) == ["e02", "e12"], "a micro-batch does not write over what another one kept"
