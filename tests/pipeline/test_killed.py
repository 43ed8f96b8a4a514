"""`timeline pipeline` as a person runs it: killed half-way and run again, exact; refused with a sentence; the year."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import timeline
from tests.conditions import until
from tests.pipeline import speculating
from tests.pipeline.conftest import Serving, serving, write_events
from tests.services import require_service

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
ROWS, FILES = 120_000, 24
FIRST_MS = 1_930_000_000_000
SETTINGS = (
    "spark.driver.memory=1g",
    "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.shuffle.partitions=2",
)
QUIET = ("--master", "local[2]", *(word for setting in SETTINGS for word in ("--set", setting)))


@pytest.fixture(autouse=True, scope="module")
def there() -> None:
    require_service("spark")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "timeline", "pipeline", *words, *QUIET]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), capture_output=True, text=True, timeout=800)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    ids = np.arange(ROWS)
    for part, some in enumerate(np.split(ids, FILES)):
        due = pa.array((FIRST_MS + some) * 1_000, pa.timestamp("us", tz="UTC"))
        payload = pa.array([f"payload {at}" for at in some.tolist()])
        columns = {"id": [f"k{at}" for at in some.tolist()], "due": due, "payload": payload}
        pq.write_table(pa.table(columns), folder / f"{part:02d}.parquet")
    return folder


def count(tl: timeline.SyncTimeline, topic: str) -> int:
    return sum(len(page.rows) for page in tl.scan_pages(topic))


def killed_when(happened: Callable[[], bool], *words: str) -> None:
    """Run the command, and kill it and all that it started as soon as something has happened."""
    process = subprocess.Popen(
        command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )

    def may_be_killed() -> bool:
        if happened():
            return True
        assert process.poll() is None, "it ended before it could be killed"
        return False

    try:
        until(may_be_killed, within_s=600.0)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def contents(tl: timeline.SyncTimeline, topic: str) -> set[tuple[bytes, bytes, int]]:
    pages = (page.rows for page in tl.scan_pages(topic, payload=True))
    return {
        one
        for rows in pages
        for one in zip(rows.ids.tolist(), rows.payloads or (), rows.scheduled_ms.tolist(), strict=True)
    }


@pytest.mark.prove
def test_a_load_that_is_killed_half_way_and_run_again_is_exact(table: Path, tmp_path: Path) -> None:
    with (
        serving(tmp_path, "--store", f"sqlite:///{tmp_path}/t.db") as broker,
        timeline.connect_sync(broker.address) as tl,
    ):
        tl.create_topic("t", remember="1d")
        state = tmp_path / "state.json"
        words = ("load", f"file://{table}", "t", "--address", broker.address, "--state", f"file://{state}", "--json")
        killed_when(lambda: state.exists() and bool(json.loads(state.read_text())["done"]), *words)
        before = count(tl, "t")
        assert 0 < before <= ROWS
        done = run(*words)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        assert told["resumed"] and told["put"] + before >= ROWS - told["there"] and told["rejected"] == 0
        assert told["put"] + told["there"] < ROWS, "files that were done are not put again"
        assert contents(tl, "t") == {(b"k%d" % at, b"payload %d" % at, FIRST_MS + at) for at in range(ROWS)}
        assert not state.exists()


@pytest.mark.prove
def test_a_backup_and_a_restore_that_are_killed_half_way_and_run_again_are_exact(tmp_path: Path) -> None:
    there = {(b"k%d" % at, b"payload %d" % at, FIRST_MS + at) for at in range(ROWS)}
    with (
        serving(tmp_path, "--store", f"sqlite:///{tmp_path}/t.db") as broker,
        timeline.connect_sync(broker.address) as tl,
    ):
        tl.create_topic("t")
        with tl.producer("t") as producer:
            ids, payloads, at = zip(*sorted(there), strict=True)
            for start in range(0, ROWS, 10_000):
                part = slice(start, start + 10_000)
                batch = timeline.Batch(payloads=payloads[part], at=at[part], ids=[one.decode() for one in ids[part]])
                producer.produce_many(batch).raise_failed()
        place, address = tmp_path / "backup", ("--address", broker.address)
        words = ("backup", "t", f"file://{place}", *address, "--json")
        killed_when((place / "chunks" / "0001.json").exists, *words)
        markers = {marker: marker.stat().st_mtime_ns for marker in (place / "chunks").glob("*.json")}
        assert not (place / "manifest.json").exists()
        refused = run("restore", f"file://{place}", "--topic", "u", *address)
        assert refused.returncode == 4 and "not finished" in refused.stderr, refused.stderr
        done = run(*words)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["messages"] == ROWS
        assert {marker: marker.stat().st_mtime_ns for marker in markers} == markers, "what was written is kept"

        words = ("restore", f"file://{place}", "--topic", "u", *address, "--json")
        killed_when(lambda: any(one.name == "u" for one in tl.topics()) and count(tl, "u") > 0, *words)
        before = count(tl, "u")
        assert 0 < before <= ROWS
        done = run(*words)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        assert (told["put"] + told["there"], told["made"]) == (ROWS, False)
        assert told["there"] >= before
        assert contents(tl, "u") == there
        verified = run("restore", f"file://{place}", "--topic", "u", "--verify", *address, "--json")
        assert verified.returncode == 0, verified.stderr
        assert json.loads(verified.stdout.splitlines()[-1])["same"] == ROWS


def test_what_cannot_be_done_is_one_line_and_an_exit_code(table: Path, broker: Serving) -> None:
    done = run("load", f"file://{table}", "nowhere", "--address", broker.address)
    assert (done.returncode, "there is no topic 'nowhere'" in done.stderr) == (4, True)


@pytest.mark.prove
def test_an_audit_ends_with_3_where_events_are_missing_and_with_1_where_a_promise_is_broken(tmp_path: Path) -> None:
    at = datetime(2026, 1, 1, 12, tzinfo=UTC)
    story = {"id": "a", "birth": 7, "broker": "b", "session": "one"}
    delivered = {"kind": "delivered", "version": 2, "due": at, "time": at + timedelta(seconds=1), "again": False}
    events = [story | {"kind": "put", "time": at, "version": 1, "due": at}, story | delivered | {"lateness": 1_000}]
    gap = {
        "kind": "dropped",
        "due": at,
        "time": at + timedelta(seconds=9),
        "count": 12,
        "broker": "b",
        "session": "one",
    }
    for name, more, code, said in (
        ("missing", {}, 3, "not known: 12 events of broker b are missing, from 2026-01-01"),
        ("early", {"lateness": -5}, 1, "early"),
    ):
        write_events(tmp_path / name, "t", [*events[:1], events[1] | more])
        write_events(tmp_path / name, "", [gap])
        page = tmp_path / f"{name}.html"
        done = run("audit", f"file://{tmp_path}/{name}", "--html", f"file://{page}", "--id", "a", "--id", "none")
        assert (done.returncode, said in done.stdout) == (code, True), (done.stdout, done.stderr)
        story_told = [line.split() for line in done.stdout.partition("none:")[0].splitlines()]
        assert story_told[0] == ["a:"] and [line[2] for line in story_told[2:4]] == ["put", "delivered"], done.stdout
        assert "the journal has no event of it" in done.stdout
        assert datetime.fromisoformat(" ".join(story_told[2][:2])) == at, "whatever the machine's zone"
        assert page.read_text().startswith("<!doctype html>")


@pytest.mark.prove
def test_copies_that_speculation_starts_put_each_row_once(tmp_path: Path, broker: Serving) -> None:
    with timeline.connect_sync(broker.address) as tl:
        tl.create_topic("speculated")
        words = ["-m", "tests.pipeline.speculating", broker.address, "speculated", str(tmp_path)]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        assert {"0-0", "0-1"} <= set(told["tries"]), "a second try of the task ran beside the first"
        found = [payload for page in tl.scan_pages("speculated", payload=True) for payload in page.rows.payloads or ()]
    assert sorted(found) == sorted(b"payload %d" % at for at in range(speculating.ROWS))
    report = told["report"]
    assert (report["put"] + report["there"], report["collapsed"], report["rejected"]) == (speculating.ROWS, 0, 0)


@pytest.mark.prove
def test_the_year_is_accounted_for(tmp_path: Path) -> None:
    data = Path(__file__).parent / "data" / "flights_2013.parquet"
    day = pq.read_table(data).slice(0, 8_000)
    pq.write_table(day, tmp_path / "part.parquet")
    soon = ("--begins-in", "15s", "--lasts", "5s")
    done = run("year", str(tmp_path / "part.parquet"), "--into", str(tmp_path / "year"), *soon, "--json")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["balanced"], told
    assert done.returncode == 0
    assert (tmp_path / "year" / "audit.html").read_text().startswith("<!doctype html>")
