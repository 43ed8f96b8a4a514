"""The job `load`: what it checks, says and puts, and that running it again changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import LATER, MAPPING, Serving, stored
from timeline.errors import Invalid
from timeline.pipeline.load import Asked, load

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_dry_run_says_what_would_be_and_puts_nothing(spark: Any, broker: Serving, topic: str, table: Any) -> None:
    found = load(spark, table, Asked(broker.address, topic, dry_run=True), MAPPING)
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
    asked = Asked(broker.address, topic, state=f"file://{tmp_path}/state.json")
    found = load(spark, table, asked, MAPPING)
    assert (found.put, found.there, found.warnings[:0]) == (300, 0, [])
    one = next(each for each in stored(broker.address, topic) if each.id == "F0003")
    assert json.loads(one.payload or b"")["flight_id"] == "F0003" and one.tag == "UA"
    assert not (tmp_path / "state.json").exists(), "a load that is done leaves no state behind"
    # From another thread than the session's, as where a scheduler or an event loop runs jobs.
    with ThreadPoolExecutor(1) as other:
        again = other.submit(load, spark, table, asked, MAPPING).result()
    assert (again.put, again.there) == (0, 300)


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
        load(spark, rows, Asked(broker.address, topic))
    twins = spark.createDataFrame([(LATER, "x"), (LATER, "x")], "due timestamp, payload string")
    with pytest.raises(Invalid, match="1 of 2 rows are identical to another"):
        load(spark, twins, Asked(broker.address, topic))
    with pytest.raises(Invalid, match="column 'due' must be a timestamp, not bigint"):
        load(spark, table, Asked(broker.address, topic), MAPPING | {"due": "sched_dep_ms"})
    assert stored(broker.address, topic) == []
    found = load(spark, twins, Asked(broker.address, topic, allow_identical=True))
    assert found.put == 1 and len(stored(broker.address, topic)) == 1


def test_a_state_of_another_load_is_refused(
    spark: Any, broker: Serving, topic: str, table: Any, tmp_path: Path
) -> None:
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"fingerprint": "other", "run": "x", "done": [], "shift_by_ms": 0, "checked_ms": 1}))
    with pytest.raises(Invalid, match="is of another load"):
        load(spark, table, Asked(broker.address, topic, state=f"file://{state}"), MAPPING)
