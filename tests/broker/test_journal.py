"""The event journal: what a broker did stands in it, whole files only; what it could not take is counted and said."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import timeline
from tests.broker.journalled import SERVE, broker, events, wait_for
from timeline.broker.journal.events import EventBatch, EventKind, Journal
from timeline.broker.journal.files import Folder, folder_name, parts, split_url
from timeline.broker.journal.pipe import encoded
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import Answers, Displaced, Status, Topic, TopicSettings
from timeline.storage_plugins import open_store
from timeline.storage_plugins.contract import Puts

TOPIC = Topic("t", 1, TopicSettings())


def puts(count: int) -> Puts:
    return Puts.filled(
        count,
        ids=Ragged.of([b"m%d" % at for at in range(count)]),
        birth=np.arange(1, count + 1, dtype=np.uint64),
        due_ms=np.full(count, 1_700_000_000_000),
        groups=Ragged.repeat(b"default", count),
    )


def test_only_what_happened_is_told() -> None:
    told: list[EventBatch] = []
    journal = Journal(told.append, lambda: 5)
    answers = Answers.blank(4)
    answers.status[:] = [Status.OK.code, Status.EXISTS.code, Status.OK.code, Status.DUPLICATE.code]
    answers.version[:] = [1, 3, 2, 1]
    journal.put(TOPIC, puts(4), answers)
    assert [(part.kind, part.count) for part in told] == [(EventKind.PUT, 1), (EventKind.MOVED, 1)]
    ids = [part.columns["id"] for part in told]
    assert [column.tolist() for column in ids if isinstance(column, Ragged)] == [[b"m0"], [b"m2"]]
    assert "birth" not in told[1].columns, "a put that moves is of another birth than the message"
    told.clear()
    answers = Answers.blank(2)
    answers.version[:] = 1
    answers.displaced = {0: Displaced(70, 3, True), 1: Displaced(71, 4, False)}
    journal.put(TOPIC, puts(2), answers)
    assert [(part.kind, part.columns.get("birth")) for part in told[:2]] == [
        (EventKind.EXPIRED, 70),
        (EventKind.REPLACED, 71),
    ]
    assert [part.kind for part in told[2:]] == [EventKind.PUT]
    told.clear()
    journal.put(TOPIC, puts(2), Answers.blank(2, Status.EXISTS))
    journal.expired(TOPIC, 0)
    assert told == []


def test_a_part_comes_through_the_pipe_as_it_was() -> None:
    read, write = os.pipe()
    part = EventBatch(
        EventKind.PUT,
        "té",
        7,
        2,
        {"id": Ragged.of([b"a", b"bc"]), "birth": np.array([1, 2**63], np.uint64), "count": 3},
    )
    with os.fdopen(write, "wb") as pipe:
        for view in encoded(part):
            pipe.write(view)
        pipe.write(b"\x09\x00")  # and one that was cut off
    with os.fdopen(read, "rb") as pipe:
        ((kind, topic, time_ms, count, columns),) = parts(pipe)
    assert (kind, topic, time_ms, count, columns["count"]) == ("put", "té", 7, 2, 3)
    data, offsets = columns["id"]
    assert (bytes(data), offsets.tolist(), columns["birth"].tolist()) == (b"abc", [0, 1, 3], [1, 2**63])


@pytest.mark.parametrize("url", ["file:///x?roll=1ms", "file:///x?size=3", "file:///x?rows=0", "?roll=1s"])
def test_a_url_that_cannot_be_meant_is_refused(url: str) -> None:
    with pytest.raises(Invalid):
        split_url(url)


@pytest.mark.slow
def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(Invalid, match="credentials are not taken from a URL") as refused:
        Folder("s3://key:hunter2@bucket/journal")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (
            "postgresql://u:hunter2@h/db",
            "^INVALID: no files can be kept at postgresql://. Give a folder, such as file:///",
        ),
        ("gcs://b/j", "^INVALID: gcs:// needs a package that is not installed: .*gcsfs"),
    ],
)
def test_what_a_journal_may_be_is_said(url: str, said: str) -> None:
    with pytest.raises(Invalid, match=said) as refused:
        Folder(url)
    assert "hunter2" not in str(refused.value) and "Protocol" not in str(refused.value)


async def _live(address: str) -> None:
    """One of everything."""
    async with timeline.connect(address, timeout="30s") as tl:
        await tl.create_topic("jobs/é", lease="1s")
        async with tl.producer("jobs/é", group="ops") as p:
            await p.produce(b"x", in_=0, id="acked", tag="spring")
            await p.produce(b"x", in_="1h", id="moved")
            await p.move("moved", in_="2h")
            await p.produce(b"x", in_="1h", id="cancelled")
            await p.cancel("cancelled")
            await p.produce(b"x", in_="1h", id="tagged", tag="autumn")
            await p.cancel_tag("autumn")
            async with tl.consumer("jobs/é", id="worker") as c:
                await (await _next(c)).ack()
                await p.produce(b"x", in_=0, id="released")
                d = await _next(c)
                await d.release(reason="not yet")
                d = await _next(c)
                await d.bury("no use")
                await p.purge("released")
                await p.produce(b"x", in_=0, id="lost")
                await _next(c)
                d = await _next(c)  # its lease ran out
                await d.ack()
        await tl.create_topic("brief")
        await tl.drop_topic("brief")


async def _named_by_older_rules(url: str) -> None:
    """Creates a topic whose name its folder cannot have as it stands."""
    store = await open_store(url)
    await store.create_topic(Topic("jobs/é", 7, TopicSettings(lease_ms=1_000)))
    await store.close()


async def _next(c: timeline.Consumer) -> timeline.Delivery:
    taken = await asyncio.wait_for(c.take(), 60)
    assert taken is not None
    return taken


@pytest.mark.processes
def test_what_a_broker_did_stands_in_whole_files(tmp_path: Path) -> None:
    folder, store = tmp_path / "journal", f"sqlite:///{tmp_path}/t.db"
    asyncio.run(_named_by_older_rules(store))
    with broker(tmp_path, "--store", store, "--name", "b/1", "--journal", f"file://{folder}") as (address, _):
        asyncio.run(_live(address))
    told = events(folder)
    kinds: dict[str, list[str]] = {}
    for row in told:
        if row["id"]:
            kinds.setdefault(row["id"], []).append(row["kind"])
    assert kinds["acked"] == ["put", "delivered", "acked"]
    assert kinds["moved"] == ["put", "moved"]
    assert kinds["cancelled"] == ["put", "cancelled"]
    assert kinds["released"] == ["put", "delivered", "released", "delivered", "buried", "purged"]
    assert kinds["lost"][:1] == ["put"] and Counter(kinds["lost"]) == Counter(put=1, delivered=2, ran_out=1, acked=1)
    put = next(row for row in told if row["kind"] == "put" and row["id"] == "acked")
    assert (put["tag"], put["group"], put["version"], put["payload_bytes"], put["broker"]) == (
        "spring",
        "ops",
        1,
        1,
        "b/1",
    )
    delivered = next(row for row in told if row["kind"] == "delivered")
    assert (delivered["consumer"], delivered["deliveries"], delivered["again"], delivered["birth"]) == (
        "worker", 1, False, put["birth"],
    )  # fmt: skip
    assert 0 <= delivered["lateness"] < 60_000 and delivered["until"] > delivered["time"]
    assert [row["cause"] for row in told if row["kind"] in ("released", "buried")] == ["not yet", "no use"]
    by_tag = next(row for row in told if row["kind"] == "tag_cancelled")
    assert (by_tag["tag"], by_tag["count"], by_tag["topic"]) == ("autumn", 1, "jobs%2Fé")
    assert [row["topic"] for row in told if row["kind"] == "topic_dropped"] == ["brief"]
    own = [row["kind"] for row in told if row["topic"] == "__HIVE_DEFAULT_PARTITION__"]
    assert own == ["started", "stopped"]
    assert not [path for path in folder.rglob("*") if path.name.endswith(".part")]


@pytest.mark.processes
def test_a_broker_that_is_killed_leaves_what_it_had_said(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    with broker(tmp_path, "--store", "memory://", "--journal", f"file://{folder}?roll=1h&rows=5000") as (
        address,
        process,
    ):
        with timeline.connect_sync(address) as tl:
            tl.create_topic("t")
            with tl.producer("t") as p:
                p.produce_many(timeline.Batch([b"x"] * 5_000, in_="1h"), timeout="60s").raise_failed()
        wait_for(lambda: len(events(folder)) == 5_000)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        # The process that writes had one more event in hand: what it has it writes, and that the end came unsaid.
        wait_for(lambda: len(events(folder)) == 5_002)
    told = Counter(row["kind"] for row in events(folder))
    assert told == Counter(put=5_000, started=1, dropped=1)
    (gap,) = (row for row in events(folder) if row["kind"] == "dropped")
    assert gap["count"] is None and gap["due"] <= gap["time"], "nobody knows what was in its queue"


@pytest.mark.processes
def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("no folder")
    command = [*SERVE, "--store", "memory://", "--journal", f"file://{taken}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the journal cannot be written" in done.stderr


def test_what_a_store_did_not_say_is_noted() -> None:
    told: list[EventBatch] = []
    journal = Journal(told.append, lambda: 5)
    journal.unknown(TOPIC, puts(3))
    assert [(part.kind, part.count, "birth" in part.columns) for part in told] == [(EventKind.UNKNOWN, 3, True)]


def test_a_folder_is_named_as_hive_reads_it() -> None:
    assert folder_name("jobs/é=1 [x]") == "jobs%2Fé%3D1%20%5Bx%5D"
