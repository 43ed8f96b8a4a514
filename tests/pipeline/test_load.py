"""The job `load`: what it checks, says and puts, and that running it again changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.pipeline.conftest import LATER, MAPPING, Serving, stored
from timeline.errors import Invalid
from timeline.pipeline.jobs.load import LoadRequest, load

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_dry_run_says_what_would_be_and_puts_nothing(spark: Any, broker: Serving, topic: str, table: Any) -> None:
    found = load(spark, table, LoadRequest(broker.address, topic, dry_run=True), MAPPING)
    assert (found.checked.rows, found.checked.rejected, found.put) == (300, 0, 0)
    assert sum(count for _, count in found.checked.curve) == 300
    spike = found.checked.spikes[0]
    assert (spike.start_ms, spike.count) == (int((LATER + timedelta(minutes=7)).timestamp() * 1000), 33)
    assert any("remembers nothing" in warning for warning in found.warnings)
    assert any("33 come due within 60 s from 2031-05-06T00:07" in warning for warning in found.warnings)
    assert stored(broker.address, topic) == []


def test_any_table_is_loaded_and_again_changes_nothing(
    spark: Any, broker: Serving, make_topic: Callable[..., str], table: Any, tmp_path: Path
) -> None:
    topic = make_topic(remember="1h")
    asked = LoadRequest(broker.address, topic, state=f"file://{tmp_path}/state.json")
    found = load(spark, table, asked, MAPPING)
    assert (found.put, found.there, found.warnings[:0]) == (300, 0, [])
    one = next(each for each in stored(broker.address, topic) if each.id == "F0003")
    assert json.loads(one.payload or b"")["flight_id"] == "F0003" and one.tag == "UA"
    assert not (tmp_path / "state.json").exists(), "a load that is done leaves no state behind"
    # From another thread than the session's, as where a scheduler or an event loop runs jobs.
    with ThreadPoolExecutor(1) as other:
        again = other.submit(load, spark, table, asked, MAPPING).result()
    assert (again.put, again.there) == (0, 300)


@pytest.mark.prove
def test_rows_are_looked_at_before_any_is_put(spark: Any, broker: Serving, topic: str, table: Any) -> None:
    rows = spark.createDataFrame(
        [
            ("a", LATER, "x"),
            ("a", LATER, "y"),
            ("b", None, "x"),
            ("c", LATER - timedelta(days=20_000), "x"),
            ("d", LATER, "x"),
        ],
        "id string, due timestamp, payload string",
    )
    with pytest.raises(Invalid, match=r"3 of 5 rows cannot be put.*due is null.*the id is another row's, too"):
        load(spark, rows, LoadRequest(broker.address, topic))
    twins = spark.createDataFrame([(LATER, "x"), (LATER, "x")], "due timestamp, payload string")
    with pytest.raises(Invalid, match="1 of 2 rows are identical to another"):
        load(spark, twins, LoadRequest(broker.address, topic))
    with pytest.raises(Invalid, match="column 'due' must be a timestamp, not bigint"):
        load(spark, table, LoadRequest(broker.address, topic), MAPPING | {"due": "sched_dep_ms"})
    assert stored(broker.address, topic) == []
    found = load(spark, twins, LoadRequest(broker.address, topic, allow_identical=True))
    assert found.put == 1 and len(stored(broker.address, topic)) == 1


def test_a_state_of_another_load_is_refused(
    spark: Any, broker: Serving, topic: str, table: Any, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"fingerprint": "other", "run": "x", "done": [], "shift_by_ms": 0, "checked_ms": 1}))
    with pytest.raises(Invalid, match="is of another load"):
        load(spark, table, LoadRequest(broker.address, topic, state=f"file://{state}"), MAPPING)


def test_a_table_in_many_files_is_loaded_in_steps_and_what_each_leaves_out_is_kept(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of files and folders that are written otherwise in a URL, as people have them."""
    monkeypatch.setattr("timeline.pipeline.jobs.load.FILES_A_STEP", 1)
    topic = make_topic(remember="1h")
    folder = tmp_path / "last night's table 100%"
    folder.mkdir()
    for part in range(3):
        ids = [f"s{part}-{at}" for at in range(20)]
        due = pa.array([LATER] * 19 + [None], pa.timestamp("us", tz="UTC"))
        columns = {"id": ids, "due": due, "payload": ["x"] * 20, "half": [at % 2 for at in range(20)]}
        pq.write_table(pa.table(columns), folder / f"part #{part}+ä.parquet")
    table = spark.read.parquet(f"file://{folder}")
    state, rejects = tmp_path / "state.json", tmp_path / "rejects"
    asked = LoadRequest(
        broker.address, topic, max_rejects=3, rejects=f"file://{rejects}", state=f"file://{state}", where="half >= 0"
    )
    found = load(spark, table, asked, {})
    assert (found.put, found.rejected) == (57, 3)
    assert {one.id for one in stored(broker.address, topic)} == {
        f"s{part}-{at}" for part in range(3) for at in range(19)
    }
    kept = [row["id"] for path in rejects.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert sorted(kept) == ["s0-19", "s1-19", "s2-19"], "no step writes over what another one kept"


def test_a_load_that_was_done_but_for_its_last_word_is_done(
    spark: Any,
    broker: Serving,
    make_topic: Callable[..., str],
    table: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topic = make_topic(remember="1h")
    state = tmp_path / "state.json"
    asked = LoadRequest(broker.address, topic, state=f"file://{state}", where="carrier = 'UA'")

    def killed(url: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("timeline.pipeline.jobs.load.remove", killed)
    with pytest.raises(KeyboardInterrupt):
        load(spark, table, asked, MAPPING)
    monkeypatch.undo()
    with pytest.raises(Invalid, match="is of another load"):
        load(spark, table, replace(asked, where=""), MAPPING)
    told = state.read_text()
    state.write_text(told.replace('"rows": 300', '"rows": 299'))
    with pytest.raises(Invalid, match="299 rows of 300 were put or rejected: the table has changed"):
        load(spark, table, asked, MAPPING)
    for damaged, sentence in (
        (told[:-9], "is no JSON"),
        (told.replace('"rows"', '"row"'), "was changed or is damaged"),
    ):
        state.write_text(damaged)
        with pytest.raises(Invalid, match=sentence):
            load(spark, table, asked, MAPPING)
    state.write_text(told)
    found = load(spark, table, asked, MAPPING)
    assert (found.put, found.there, found.resumed, state.exists()) == (0, 0, True, False)


def test_times_are_moved_alike_however_far_off_they_are_and_whatever_zone_a_session_has(
    spark: Any, broker: Serving, make_topic: Callable[..., str]
) -> None:
    """And a day is not as long everywhere as it is in UTC."""
    topic = make_topic(horizon="36500d")
    far = datetime(2120, 1, 1, 2, 3, 4, 567_001, tzinfo=UTC)
    night = datetime(2031, 3, 30, 0, 59, 59, 999_001, tzinfo=UTC)  # a ms before clocks in Berlin go forward
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        rows = spark.createDataFrame([("far", "x"), ("night", "x")], "id string, payload string")
        micros = {one: (when - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) for one, when in
                  (("far", far), ("night", night))}  # fmt: skip
        due = f"timestamp_micros(IF(id = 'far', {micros['far']}L, {micros['night']}L))"
        asked = LoadRequest(broker.address, topic, shift_to_ms=int(night.timestamp() * 1000) + 1 + 7_200_000)
        load(spark, rows, asked, {"due": due})
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    found = {one.id: one.due for one in stored(broker.address, topic)}
    assert found["night"] == datetime(2031, 3, 30, 3, 0, tzinfo=UTC)
    assert found["far"] == far.replace(microsecond=568_000) + timedelta(hours=2)
