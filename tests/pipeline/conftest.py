"""One Spark session and one broker for all tests of the pipeline; each test has topics of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import timeline
from tests.services import require_service
from timeline.broker.journal.files import FIELDS, NO_TOPIC, folder_name

ROOT = Path(__file__).parents[2]

_numbers = itertools.count()
LATER = datetime(2031, 5, 6, tzinfo=UTC)
MAPPING = {
    "id": "flight_id",
    "due": "timestamp_millis(sched_dep_ms)",
    "payload": "to_json(struct(*))",
    "tag": "carrier",
}


class Serving:
    """`timeline serve` as a process."""

    def __init__(self, *options: str, log: Path) -> None:
        quiet = ("--listen", "127.0.0.1:0", "--metrics", "off", "--json")
        command = [sys.executable, "-m", "timeline", "serve", *quiet, *options]
        self.log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, log.read_text()
        self.address = json.loads(said)["listen"]

    def stop(self) -> None:
        """Drains it."""
        self.process.terminate()
        self.process.communicate(timeout=60)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Serving]:
    """A broker until the block ends."""
    broker = Serving(*options, log=folder / f"broker-{next(_numbers)}.log")
    try:
        yield broker
    finally:
        broker.stop()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The one session, on two threads."""
    require_service("spark")
    with pytest.MonkeyPatch.context() as environment:  # the JVM's, and through it the workers'; not later tests'
        environment.setenv("PYSPARK_PYTHON", sys.executable)
        environment.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        from timeline.pipeline import spark_session

        made = spark_session(
            "tests",
            "local[2,2]",
            {
                "spark.sql.shuffle.partitions": "2",
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.driver.memory": "1g",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
        )
    yield made
    made.stop()


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A broker on a memory store."""
    with serving(tmp_path_factory.mktemp("broker"), "--store", "memory://") as one:
        yield one


@pytest.fixture
def make_topic(broker: Serving) -> Callable[..., str]:
    """Makes a topic with these settings, and answers its name."""

    def make(**settings: Any) -> str:
        name = f"t{next(_numbers)}"
        with timeline.connect_sync(broker.address) as tl:
            tl.create_topic(name, **settings)
        return name

    return make


@pytest.fixture
def topic(make_topic: Callable[..., str]) -> str:
    """A topic of the test's own."""
    return make_topic()


def stored(address: str, topic: str, **where: Any) -> list[timeline.StoredMessage]:
    """What lies on a topic, by id."""
    with timeline.connect_sync(address) as tl:
        return sorted(tl.scan(topic, payload=True, **where), key=lambda one: one.id)


def taken(address: str, topic: str, count: int, **settings: Any) -> list[timeline.Delivery]:
    """Takes and acknowledges `count` messages."""

    async def take() -> list[timeline.Delivery]:
        found: list[timeline.Delivery] = []
        async with timeline.connect(address) as tl, tl.consumer(topic, credit=1_000, **settings) as consumer:
            async for batch in consumer.batches():
                found += list(batch)
                await batch.ack()
                if len(found) >= count:
                    return found
        raise AssertionError("the consumer ended")

    return asyncio.run(take())


@pytest.fixture
def table(spark: Any, tmp_path: Path) -> Any:
    """Flights as somebody else's table: other names, other types, in three files."""
    folder = tmp_path / "flights"
    folder.mkdir()
    for part in range(3):
        ids = [f"F{part}{at:03d}" for at in range(100)]
        times = [int((LATER + timedelta(minutes=at if at < 90 else 7)).timestamp() * 1000) for at in range(100)]
        pq.write_table(
            pa.table({"flight_id": ids, "sched_dep_ms": times, "carrier": ["UA"] * 100}), folder / f"{part}.parquet"
        )
    return spark.read.parquet(f"file://{folder}")


def write_events(folder: Path, topic: str, rows: list[dict[str, Any]]) -> None:
    """A journal of one file of `topic`; empty: what the journal says of itself."""
    schema = pa.schema(list(FIELDS.items()))
    into = folder / "date=2026-01-01" / "hour=00" / f"topic={folder_name(topic) or NO_TOPIC}"
    into.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), into / "a.parquet")
