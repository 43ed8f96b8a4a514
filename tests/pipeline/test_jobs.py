"""The jobs: load, backup, restore, forecast, audit, compact, with what people get wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import timeline
from tests.conditions import until
from tests.pipeline.conftest import LATER, MAPPING, Serving, serving, stored, write_events
from timeline.errors import Invalid, Unavailable
from timeline.model import TopicSettings
from timeline.pipeline import connection
from timeline.pipeline.jobs.audit import audit, audit_page, pending_in
from timeline.pipeline.jobs.backup import backup, restore, verify
from timeline.pipeline.jobs.forecast import forecast, forecast_page
from timeline.pipeline.jobs.journal import compact, live_files
from timeline.pipeline.jobs.load import LoadRequest, check, load
from timeline.pipeline.jobs.measure import measure

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def kept(spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A topic with messages of all kinds, and where its backup is."""
    topic = make_topic(buckets=5, lease="7s", remember="1h", max_lease="1h")
    with timeline.connect_sync(broker.address) as tl, tl.producer(topic, group="ops") as p:
        p.produce_many(
            timeline.Batch([b"\x00%d" % at for at in range(200)], at=LATER, ids=[f"k{at}" for at in range(200)])
        )
        p.produce(b"with", in_="2h", id="full", tag="spring", headers={"a": "1"}, expires="9h")
        p.produce(b"dead", in_=0, id="dead")
        with tl.consumer(topic) as c:
            taken = c.take()
            assert taken is not None
            taken.bury("no gate")
    url = f"file://{tmp_path}/backup"
    manifest = backup(spark, broker.address, topic, url, chunks=3)
    assert (manifest.messages, manifest.dead, len(manifest.chunks)) == (202, 1, 3)
    yield topic, url


@pytest.mark.prove
def test_a_backup_is_restored_into_another_store_and_is_the_same(
    spark: Any, kept: tuple[str, str], tmp_path: Path
) -> None:
    topic, url = kept
    with serving(tmp_path, "--store", f"sqlite:///{tmp_path}/other.db") as other:
        done = restore(spark, other.address, url)
        assert (done.put, done.dead, done.made, done.topic) == (201, 1, True, topic)
        full = next(one for one in stored(other.address, topic) if one.id == "full")
        assert (full.payload, full.headers, full.tag, full.group) == (b"with", {"a": "1"}, "spring", "ops")
        with timeline.connect_sync(other.address) as tl:
            settings = tl.topics()[0].settings
            assert (settings.buckets, settings.lease_ms, settings.remember_ms) == (5, 7_000, 3_600_000)
            compared = verify(spark, other.address, url)
            assert compared.well and compared.same == 201
            again = restore(spark, other.address, url)
            assert (again.put, again.there, again.made) == (0, 201, False)
            with tl.producer(topic, group="ops") as p:
                p.cancel("k7")
            cancelled = restore(spark, other.address, url)  # its id is remembered, and so it does not come back
            assert (cancelled.there, cancelled.settled) == (200, 1)
            assert "remembers 1 of these ids as settled or cancelled" in cancelled.warnings[0]
            with tl.producer(topic, group="ops") as p:
                p.move("k8", in_="1h")
                p.move("k9", in_=0)
                p.produce(b"x", in_="1h", id="stranger")
            with tl.consumer(topic, credit=1) as c:
                taken = c.take()
                assert taken is not None and taken.id == "k9"
                taken.bury("no such gate")
        compared = verify(spark, other.address, url)
        assert (compared.missing, compared.differing, compared.extra, compared.well) == (1, 2, 1, False)
        assert compared.examples == {"k7": "missing", "k8": "scheduled", "k9": "dead scheduled", "stranger": "extra"}
        with pytest.raises(Invalid, match="has messages that are not of this backup, such as 'stranger'"):
            restore(spark, other.address, url)


def test_a_backup_that_died_goes_on_after_the_last_chunk_that_it_had_written(
    spark: Any, broker: Serving, kept: tuple[str, str], topic: str
) -> None:
    before, url = kept
    folder = Path(url.removeprefix("file://"))
    whole = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    with pytest.raises(Invalid, match=f"has part of a backup of topic '{before}': name another place"):
        backup(spark, broker.address, topic, url)
    # As if it had been killed while it wrote the last chunk.
    (folder / "chunks" / "0002.json").unlink()
    victim = next((folder / "data" / "chunk=0002").glob("*.parquet"))
    victim.write_bytes(b"half of it")
    written = {path: path.stat().st_mtime_ns for path in folder.glob("data/chunk=000[01]/*.parquet")}
    told = json.loads((folder / "topic.json").read_text())
    (folder / "topic.json").write_text(json.dumps(told | {"taken_ms": 1_700_000_000_000}))
    backup(spark, broker.address, before, url, chunks=3)
    again = json.loads((folder / "manifest.json").read_text())
    assert again["chunks"] == whole["chunks"] and again["complete"]
    assert again["taken_ms"] == 1_700_000_000_000, "it was begun when the run that died was"
    assert again["until_ms"] >= whole["until_ms"] >= whole["taken_ms"] > 1_700_000_000_000
    assert written == {path: path.stat().st_mtime_ns for path in folder.glob("data/chunk=000[01]/*.parquet")}
    assert not victim.exists()
    compared = verify(spark, broker.address, url)  # the dead letter is still there, too
    assert compared.well and (compared.same, compared.extra) == (201, 0)


def test_a_job_says_that_no_broker_answers(
    spark: Any, table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ASK_MS", 500)
    for job in (
        lambda: load(spark, table, LoadRequest("127.0.0.1:1", "t"), MAPPING),
        lambda: backup(spark, "127.0.0.1:1", "t", f"file://{tmp_path}/b"),
    ):
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
            job()
    assert not (tmp_path / "b").exists()


@pytest.mark.prove
def test_what_is_due_by_now_is_refused_unless_it_is_said_what_for(
    spark: Any, broker: Serving, make_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, into = make_topic(), make_topic()
    with timeline.connect_sync(broker.address) as tl, tl.producer(topic) as p:
        p.produce(b"x", in_=0, id="due")
        p.produce(b"x", in_="1h", id="later")
    url = f"file://{tmp_path}/backup"
    backup(spark, broker.address, topic, url)
    with pytest.raises(Invalid, match=r"1 of 2 messages are due by now.*--past now"):
        restore(spark, broker.address, url, into)
    assert restore(spark, broker.address, url, into, past="skip").put == 1
    assert restore(spark, broker.address, url, into, past="now").put == 1


def test_a_backup_that_is_unfinished_or_was_tampered_with_is_not_restored(
    spark: Any, broker: Serving, kept: tuple[str, str], topic: str
) -> None:
    _, url = kept
    folder = Path(url.removeprefix("file://"))
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").unlink()
    with pytest.raises(Invalid, match=r"has no manifest.*not finished"):
        restore(spark, broker.address, url, topic)
    damaged = {
        manifest[:-20]: "is no JSON, it was changed or is damaged",
        manifest.replace('"checksum"', '"sum"'): "was changed or is damaged",
        manifest.replace('"uid"', '"id"'): "was changed or is damaged",
        manifest.replace('"lease_ms"', '"leash_ms"'): "was changed or is damaged",
    }
    for text, sentence in damaged.items():
        (folder / "manifest.json").write_text(text)
        with pytest.raises(Invalid, match=sentence):
            restore(spark, broker.address, url, topic)
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(Invalid, match="has a finished backup already"):
        backup(spark, broker.address, kept[0], url)
    victim = next(path for path in sorted(folder.rglob("*.parquet")) if pq.ParquetFile(path).metadata.num_rows > 1)
    rows = pq.ParquetFile(victim).read()
    payload = rows.column("payload").to_pylist()
    payload[0] = b"forged"
    at = rows.schema.names.index("payload")
    # Times as Spark writes them: what is forged is content, and nothing else.
    forged = rows.set_column(at, rows.schema.field(at), pa.array(payload, pa.binary()))
    pq.write_table(forged, victim, use_deprecated_int96_timestamps=True)
    with pytest.raises(Invalid, match="cannot be read"):
        restore(spark, broker.address, url, topic)
    for sums in folder.rglob("*.crc"):  # who forges forges these, too
        sums.unlink()
    with pytest.raises(Invalid, match="is not what its manifest says"):
        restore(spark, broker.address, url, topic)
    assert stored(broker.address, topic) == []


@pytest.fixture(scope="module")
def journalled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, str]]:
    """A broker with a journal in which something of everything happened."""
    folder = tmp_path_factory.mktemp("journalled")
    url = f"file://{folder}/journal"
    with serving(folder, "--store", "memory://", "--journal", f"{url}?roll=200ms&rows=40") as one:
        asyncio.run(_live(one.address))
        # The last events are in the files once the next roll has come.
        until(lambda: sum(acked_in(path) for path in live_files(url)) >= 100)
        yield one, url


def acked_in(path: str) -> int:
    """How many acks a file of the journal tells of."""
    return pq.ParquetFile(path).read(columns=["kind"]).column("kind").to_pylist().count("acked")


async def _live(address: str) -> None:
    async with timeline.connect(address, timeout="60s") as tl:
        await tl.create_topic("jobs", lease="2s")
        async with tl.producer("jobs") as p, tl.consumer("jobs", id="worker", credit=1_000) as c:
            (
                await p.produce_many(timeline.Batch([b"x"] * 100, in_=0, ids=[f"a{at}" for at in range(100)]))
            ).raise_failed()
            (
                await p.produce_many(timeline.Batch([b"x"] * 30, in_="1h", ids=[f"w{at}" for at in range(30)]))
            ).raise_failed()
            await p.cancel_many([f"w{at}" for at in range(7)])
            await p.move_many([f"w{at}" for at in range(10, 15)], in_="2h")
            acked = 0
            async for d in c:
                if d.id == "a5" and d.deliveries == 1:
                    await d.release()
                    continue
                if d.id == "a6" and d.deliveries == 1:
                    continue
                await d.ack()
                acked += 1
                if acked == 100:
                    break


def test_the_audit_knows_what_happened_to_each_and_that_every_promise_was_kept(
    spark: Any, journalled: tuple[Serving, str], tmp_path: Path
) -> None:
    one, url = journalled
    there = pending_in(spark, one.address, ["jobs"], "")
    found = audit(spark, url, ["jobs"], there, ids=["w3"])
    assert found.messages == {
        "put": 130, "delivered": 100, "redelivered": 2, "acked": 100, "acked_late": 0, "moved": 5, "cancelled": 7,
        "buried": 0, "open": 23,
    }  # fmt: skip
    assert (found.broken, found.gaps, found.pending, found.exit_code) == ({}, [], 23, 0)
    assert found.redelivered["ran_out"] == 1 and found.redelivered["released"] == 1
    assert [event["kind"] for event in found.stories["w3"]] == ["put", "cancelled"]
    assert [event["kind"] for event in found.stories["a6"]].count("delivered") == 2
    written = audit_page(found, url)
    assert "Kept for every message: S1 never early" in written and "<svg" in written
    assert "http" not in written.replace("http://www.w3.org", "") and "<script" not in written


def test_what_is_missing_or_wrong_in_a_journal_shows(
    spark: Any, journalled: tuple[Serving, str], tmp_path: Path
) -> None:
    """Events taken out of a journal, or changed, break promises; a drop makes them not known."""
    one, url = journalled
    there = pending_in(spark, one.address, ["jobs"], "")
    forged = tmp_path / "forged"
    source = Path(url.removeprefix("file://"))
    for path in live_files(url):
        rows = pq.ParquetFile(path).read()
        keep = [not (row["kind"] == "acked" and row["id"] == "a9") for row in rows.to_pylist()]
        rows = rows.filter(pa.array(keep))
        late = [-5 if row["id"] == "a8" and row["kind"] == "delivered" else row["lateness"] for row in rows.to_pylist()]
        at = rows.schema.names.index("lateness")
        rows = rows.set_column(at, rows.schema.field(at), pa.array(late, pa.int64()))
        if "started" in rows.column("kind").to_pylist():  # a broker that runs may not have written what is missing
            stopped = [rows.slice(0, 1).to_pylist()[0] | {"kind": "stopped"}]
            rows = pa.concat_tables([rows, pa.Table.from_pylist(stopped, schema=rows.schema)])
        into = forged / Path(path).relative_to(source)
        into.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, into)
    found = audit(spark, f"file://{forged}", ["jobs"], there)
    assert found.broken == {"early": 1, "lost": 1} and found.exit_code == 1
    assert {row["id"] for row in found.examples} == {"a8", "a9"}
    assert "Broken for 1 messages: S8 no loss" in audit_page(found, "x")


def test_small_files_become_few_and_each_event_counts_once(
    spark: Any, journalled: tuple[Serving, str], tmp_path: Path
) -> None:
    _, url = journalled
    copy = tmp_path / "copy"
    source = Path(url.removeprefix("file://"))
    for path in live_files(url):
        into = copy / Path(path).relative_to(source)
        into.parent.mkdir(parents=True, exist_ok=True)
        into.write_bytes(Path(path).read_bytes())
    place = f"file://{copy}"
    before = sum(pq.ParquetFile(path).metadata.num_rows for path in live_files(place))
    assert compact(spark, place).partitions == 0, "an hour that may still get events is left alone"
    old = live_files(place)
    done = compact(spark, place, older_ms=0)
    files = live_files(place)
    assert done.files == len(old) - (len(files) - done.partitions)
    assert sum(pq.ParquetFile(path).metadata.num_rows for path in files) == before
    # As if it had died before the old files went.
    name = next(Path(path) for path in files if Path(path).name.startswith("c-"))
    victim = name.parent / "old.parquet"
    victim.write_bytes(name.read_bytes())
    (name.parent / f"_replaces-{name.stem}.json").write_text(json.dumps(["old.parquet"]))
    assert str(victim) not in live_files(place)
    compact(spark, place, older_ms=0)
    assert not victim.exists() and not list(copy.rglob("_replaces-*"))
    # Another run has written its note, and is about to write its file: whoever cleans up leaves it the note.
    note = name.parent / "_replaces-c-another.json"
    note.write_text(json.dumps([name.name]))
    compact(spark, place, older_ms=0)
    assert note.exists() and str(name) in live_files(place)


def test_the_forecast_counts_what_is_pending_and_learns_what_is_still_to_be_put(
    spark: Any, broker: Serving, topic: str, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    hour = now.replace(minute=0, second=0, microsecond=0) + timedelta(hours=5)
    with timeline.connect_sync(broker.address) as tl, tl.producer(topic) as p:
        p.produce_many(timeline.Batch([b"x"] * 40, at=hour + timedelta(minutes=1))).raise_failed()
    events: list[dict[str, Any]] = []
    for week in (1, 2, 3):
        due = hour - timedelta(weeks=week) + timedelta(minutes=2)
        events += [
            {"time": due - timedelta(hours=1), "due": due, "kind": "put", "id": f"{week}-{at}"}
            for at in range(10 * week)
        ]
        events += [
            {"time": due - timedelta(days=9), "due": due, "kind": "put", "id": f"{week}-early{at}"} for at in range(50)
        ]
    oldest = now - timedelta(weeks=3, hours=2)
    events.append({"time": oldest, "due": oldest, "kind": "put", "id": "oldest"})
    acks = [
        {"time": now - timedelta(days=1, milliseconds=at), "kind": "acked", "id": f"x{at}", "consumer": "w"}
        for at in range(500)
    ]
    write_events(tmp_path / "journal", topic, [*events, *acks])
    ahead = forecast(spark, broker.address, topic, 24 * 3_600_000, 3_600_000, f"file://{tmp_path}/journal")
    step = next(one for one in ahead.steps if one.pending)
    assert (step.pending, round(step.expected), step.low, step.high, step.peak_per_s) == (40, 60, 50, 70, 40)
    assert ahead.weeks == 3 and ahead.spikes[0] is step
    assert ahead.measured and ahead.per_consumer_s > 100 and ahead.consumers == 1
    assert "<polygon" in forecast_page(ahead)
    with pytest.raises(Invalid, match="there is no journal in"):
        audit(spark, f"file://{tmp_path}/none")
    with pytest.raises(Invalid, match="steps are asked for"):
        forecast(spark, broker.address, topic, 10**10, 1)


@pytest.mark.prove
def test_a_measurement_gets_all_rows_in_and_out(spark: Any, tmp_path: Path) -> None:
    found = asyncio.run(measure(spark, tmp_path, "memory://", "memory://", 2_000, 100, 2))
    assert found.wrong == []
    assert list(found.steps) == ["parquet", "load", "scan", "scan with payload", "back up", "restore"]
    load_step = found.steps["load"]
    assert load_step.rows_per_s > 0 and load_step.engine_us > 0 and load_step.engine_mib and load_step.driver_mib


def test_a_check_finds_what_brokers_would_refuse(spark: Any) -> None:
    """Otherwise a load would break off in its middle."""
    now = datetime.now(UTC)
    due = now + timedelta(hours=1)
    rows = [
        (due, "p", "good", None, {"a": "b"}),
        (due, "p", "nul\0", None, None),
        (due, "p", "null", None, {"a": None}),
        (due, "p", "long", None, {"a": "x" * 5_000, "b": "y" * 3_200}),
        (due, "p", "fits", None, {"a": "x" * 5_000, "b": "y" * 3_182}),
        (now - timedelta(hours=2), "p", "over", now - timedelta(hours=1), None),
    ]
    schema = "due timestamp, payload string, id string, expires timestamp, headers map<string,string>"
    frame = spark.createDataFrame(rows, schema)
    checked = check(frame, TopicSettings(), round(now.timestamp() * 1_000), "now", own_ids=True)
    assert checked.bad == {
        "id has a NUL": 1, "a header is null": 1, "headers are above 8192 bytes": 1, "expires is past": 1,
    }  # fmt: skip
