"""Batch read: messages → rows, with what a query asks pushed down."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyspark.sql import datasource as ds

import timeline
from tests.pipeline.conftest import Serving
from timeline.model import State
from timeline.pipeline import TimelineSource, register
from timeline.pipeline.session import PUSHDOWN
from timeline.pipeline.source.options import LIVING
from timeline.pipeline.source.reading import PushedFilter, pushed

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(900)]
LATER = datetime(2031, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def stocked(broker: Serving) -> Iterator[str]:
    """A topic with messages of all states."""
    name = "read"
    with timeline.connect_sync(broker.address) as tl:
        tl.create_topic(name, buckets=7, max_lease="1h")
        with tl.producer(name, group="ops") as p:
            batch = timeline.Batch(
                [b"p%d" % at for at in range(600)],
                at=[LATER + timedelta(seconds=at) for at in range(600)],
                ids=[f"w{at:04d}" for at in range(600)],
                tags=["odd" if at % 2 else "" for at in range(600)],
            )
            p.produce_many(batch, timeout="30s").raise_failed()
            for at in range(2):
                p.produce(b"\x00\xff", in_=0, id=f"due{at}", headers={"k": "v"})
            with tl.consumer(name, id="worker", lease="1h", credit=2) as c:
                c.take()
                taken = c.take()
                assert taken is not None
                taken.bury("no such gate")
            p.produce(b"", in_=0, id="due2")
        yield name


def read(spark: Any, broker: Serving, topic: str, **options: str) -> Any:
    return spark.read.format("timeline").options(addresses=broker.address, topic=topic, **options)


def test_all_fields_come_as_rows_and_payloads_on_request(spark: Any, broker: Serving, stocked: str) -> None:
    rows = {row["id"]: row for row in read(spark, broker, stocked, state="all", payload="true").load().collect()}
    assert len(rows) == 603
    waiting = rows["w0003"]
    assert (waiting["state"], waiting["tag"], waiting["group"], waiting["version"]) == ("waiting", "odd", "ops", 1)
    assert waiting["due"].replace(tzinfo=UTC) == LATER + timedelta(seconds=3)
    assert (bytes(waiting["payload"]), waiting["headers"], waiting["holder"], waiting["dead"]) == (
        b"p3",
        None,
        None,
        None,
    )
    states = sorted(rows[f"due{at}"]["state"] for at in range(3))
    assert states == ["available", "dead", "leased"]
    leased = next(row for row in rows.values() if row["state"] == "leased")
    assert (leased["holder"], leased["deliveries"], bytes(leased["payload"]), leased["headers"]) == (
        "worker", 1, b"\x00\xff", {"k": "v"},
    )  # fmt: skip
    assert next(row for row in rows.values() if row["state"] == "dead")["dead"] == "no such gate"
    assert "payload" not in read(spark, broker, stocked).load().columns
    assert read(spark, broker, stocked).load().count() == 602, "dead letters only when they are asked for"


@pytest.mark.parametrize(
    ("asked", "left", "count"),
    [
        ("due >= timestamp'2031-01-01 00:05:00' AND due < timestamp'2031-01-01 00:06:00'", "", 60),
        ("due > timestamp'2031-01-01 00:09:58.5'", "", 1),
        ("due <= timestamp'2031-01-01 00:00:01' AND state = 'waiting'", "", 2),
        ("tag = 'odd'", "tag", 300),
        ("tag = 'odd' AND length(id) = 5 AND id > 'w0590'", "id", 5),
        ("id IN ('w0001', 'w0002', 'none')", "", 2),
        ("id = 'w0001' AND tag = 'even'", "tag", 0),
        ("state IN ('available', 'leased')", "", 2),
        ("state = 'dead'", "", 0),
        ("due = timestamp'2031-01-01 00:00:01'", "", 1),
        ("group = 'ops'", "group", 602),
    ],
)
def test_what_a_query_asks_is_pushed_down_and_right(
    spark: Any, broker: Serving, stocked: str, asked: str, left: str, count: int
) -> None:
    query = read(spark, broker, stocked).load().where(asked)
    assert query.count() == count
    plan = query._jdf.queryExecution().executedPlan().toString()
    filters = [
        line for line in plan.splitlines() if line.strip().startswith(("Filter", "*(1) Filter", "+- *(1) Filter"))
    ]
    for column in ("due", "state", "id"):
        if column != left:
            assert not any(f"{column}#" in line for line in filters), plan


@pytest.mark.parametrize("setting", ["false", "true"])
def test_the_plain_source_reads_the_same_and_leaves_filters_to_spark(
    spark: Any, broker: Serving, stocked: str, setting: str
) -> None:
    spark.dataSource.register(TimelineSource)
    spark.conf.set(PUSHDOWN, setting)
    try:
        query = read(spark, broker, stocked).load().where("tag = 'odd' AND due < timestamp'2031-01-01 00:01:00'")
        assert query.count() == 30
        plan = query._jdf.queryExecution().executedPlan().toString()
        assert "Filter" in plan and "tag#" in plan
    finally:
        register(spark)


def test_only_the_columns_that_are_asked_for_are_read(spark: Any, broker: Serving, stocked: str) -> None:
    frame = read(spark, broker, stocked).schema("id string, due timestamp").load()
    assert frame.columns == ["id", "due"]
    assert frame.count() == 602
    with pytest.raises(Exception, match="messages have no column 'dew': did you mean due"):
        read(spark, broker, stocked).schema("dew timestamp").load().count()
    with pytest.raises(Exception, match="column 'version' is bigint, not string"):
        read(spark, broker, stocked).schema("version string").load().count()


def test_buckets_are_split_over_tasks_and_nothing_is_read_twice(spark: Any, broker: Serving, stocked: str) -> None:
    for partitions in ("1", "3", "50"):
        frame = read(spark, broker, stocked, partitions=partitions).load()
        assert frame.rdd.getNumPartitions() == min(7, int(partitions))
        assert frame.select("id").distinct().count() == frame.count() == 602
    halves = [read(spark, broker, stocked, buckets=part).load().count() for part in ("0-3", "3-7")]
    assert sum(halves) == 602 and min(halves) > 0
    of_id = [read(spark, broker, stocked, buckets=part).load().where("id = 'w0001'").count() for part in ("0-3", "3-7")]
    assert sorted(of_id) == [0, 1]


def test_filters_that_cannot_both_hold_ask_nothing_of_a_broker() -> None:
    where = PushedFilter(LIVING)
    at = datetime(2031, 1, 1, 0, 0, 0, 500, tzinfo=UTC)
    odd = pushed(where, ds.EqualTo(("tag",), "a"))
    assert odd is not None and not odd.empty
    both = pushed(odd, ds.EqualTo(("tag",), "b"))
    assert both is not None and both.empty
    dead = pushed(where, ds.EqualTo(("state",), "dead"))
    assert dead is not None and dead.empty
    never = pushed(where, ds.EqualTo(("due",), at))
    assert never is not None and never.empty, "no due has a part of a millisecond"
    floor = int(at.timestamp() * 1000)
    after, before = pushed(where, ds.GreaterThan(("due",), at)), pushed(where, ds.LessThan(("due",), at))
    assert after is not None and after.from_ms == floor + 1
    assert before is not None and before.to_ms == floor + 1
    assert pushed(where, ds.StringStartsWith(("id",), "w")) is None
    assert pushed(where, ds.IsNotNull(("due",))) == where
    assert pushed(where, ds.IsNotNull(("tag",))) is None
    assert pushed(PushedFilter((State.DEAD,)), ds.In(("state",), ("dead", "waiting"))) == PushedFilter((State.DEAD,))
