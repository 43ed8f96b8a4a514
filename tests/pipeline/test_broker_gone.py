"""A broker that is killed in the middle of a task's write or read, and comes back: each row once, none left out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import timeline
from tests.pipeline.conftest import Serving
from timeline.errors import Unavailable, Unknown
from timeline.pipeline.source.columns import read_schema
from timeline.pipeline.source.options import SourceOptions
from timeline.pipeline.source.reading import BucketRange, TimelineReader
from timeline.pipeline.source.writing import WritePlan, WriteTask

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]
LATER_US = 1_930_000_000_000_000
ROWS, SIZE = 30_000, 1_000


class Mortal:
    """A broker on SQLite that is killed, and comes back at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._serving = self._started("127.0.0.1:0")
        self.address = self._serving.address
        with timeline.connect_sync(self.address) as tl:
            tl.create_topic("t", buckets=4)

    def _started(self, listen: str) -> Serving:
        options = ("--store", f"sqlite:///{self._folder}/t.db", "--name", "b")
        return Serving(*options, "--listen", listen, log=self._folder / "log")

    def fall(self) -> None:
        self._serving.process.kill()
        self._serving.process.communicate()

    def rise(self) -> None:
        self._serving = self._started(self.address)

    def stop(self) -> None:
        self._serving.stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mortal]:
    one = Mortal(tmp_path)
    yield one
    one.stop()


def batches(reached: threading.Event, on: threading.Event) -> Iterator[pa.RecordBatch]:
    for start in range(0, ROWS, SIZE):
        if start == ROWS // 2:
            reached.set()
            on.wait(60)
        due = pa.array([LATER_US + at for at in range(SIZE)], pa.timestamp("us", tz="UTC"))
        payload = pa.array([b"p%d" % at for at in range(start, start + SIZE)], pa.binary())
        yield pa.RecordBatch.from_arrays([due, payload], ["due", "payload"])


def test_a_write_goes_on_where_a_broker_was_killed(broker: Mortal) -> None:
    reached, on = threading.Event(), threading.Event()
    task = WriteTask(WritePlan(SourceOptions(broker.address, "t"), "run", 0, True), 0)
    with ThreadPoolExecutor(1) as other:
        writing = other.submit(task.write, batches(reached, on))
        assert reached.wait(60)
        broker.fall()
        on.set()
        broker.rise()
        done = writing.result(120)
    assert (done.put + done.there, done.collapsed, done.rejected.total()) == (ROWS, 0, 0)
    assert sorted(payloads(broker.address)) == sorted(b"p%d" % at for at in range(ROWS))


def payloads(address: str) -> list[bytes]:
    with timeline.connect_sync(address) as tl:
        return [one for page in tl.scan_pages("t", payload=True) for one in page.rows.payloads or ()]


@pytest.mark.prove
def test_a_write_to_a_broker_that_stays_away_says_so_and_the_same_again_is_exact(broker: Mortal) -> None:
    reached, on = threading.Event(), threading.Event()
    task = WriteTask(WritePlan(SourceOptions(broker.address, "t", timeout_ms=500), "run", 0, True), 0)
    with ThreadPoolExecutor(1) as other:
        writing = other.submit(task.write, batches(reached, on))
        assert reached.wait(60)
        broker.fall()
        on.set()
        with pytest.raises((Unavailable, Unknown)):
            writing.result(120)
    broker.rise()
    on.set()
    again = WriteTask(WritePlan(SourceOptions(broker.address, "t"), "run", 0, True), 0).write(batches(reached, on))
    assert again.put + again.there == ROWS and again.there > 0 and not again.collapsed
    assert sorted(payloads(broker.address)) == sorted(b"p%d" % at for at in range(ROWS))


def test_a_read_goes_on_where_a_broker_was_killed(broker: Mortal) -> None:
    with timeline.connect_sync(broker.address) as tl, tl.producer("t") as p:
        at = [LATER_US // 1_000 + at for at in range(ROWS)]
        batch = timeline.Batch([b"x"] * ROWS, at=at, ids=[f"r{one}" for one in range(ROWS)])
        p.produce_many(batch, timeout="60s").raise_failed()
    reader = TimelineReader(SourceOptions(broker.address, "t"), read_schema(payload=False))
    rows = reader.read(BucketRange(0, 4))
    found = [id for _ in range(3) for id in next(rows).column("id").to_pylist()]
    broker.fall()
    broker.rise()
    found += [id for page in rows for id in page.column("id").to_pylist()]
    assert sorted(found) == sorted(f"r{at}" for at in range(ROWS))
