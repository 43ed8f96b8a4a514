"""A write on two executors with speculation on: the first try of a task stops half-way until a copy of it has begun.
Run as a program, for its Spark is not the session's: `ADDRESS TOPIC FOLDER`.

Says as JSON what the write reported and which tries began."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import SparkContext, TaskContext
from pyspark.java_gateway import launch_gateway
from pyspark.sql.types import StructType

from tests.conditions import until
from timeline.pipeline import spark_session
from timeline.pipeline.source import TimelineSource
from timeline.pipeline.source.writing import TimelineWriter, WriteCounts

ROWS, PARTS, BATCHES_BEFORE = 12_000, 8, 3
STALLED = 0
HOSTS = ("127.0.0.2", "127.0.0.3")


def stalling(batches: Iterator[pa.RecordBatch], folder: Path) -> Iterator[pa.RecordBatch]:
    """The batches; the first try of one task waits in their midst until another try of it is under way."""
    context = TaskContext.get()
    assert context is not None
    part, attempt = context.partitionId(), context.attemptNumber()
    (folder / f"{part}-{attempt}").touch()
    for number, batch in enumerate(batches):
        if number == BATCHES_BEFORE and part == STALLED and attempt == 0:
            until((folder / f"{part}-1").exists, within_s=600.0)
        yield batch


class StallingWriter(TimelineWriter):
    """Its `run` is the folder of the marks."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriteCounts:
        return super().write(stalling(iterator, Path(self._plan.run)))


class StallingSource(TimelineSource):
    """`format("stalling")`."""

    @classmethod
    def name(cls) -> str:
        return "stalling"

    def writer(self, schema: StructType, overwrite: bool) -> StallingWriter:
        return StallingWriter(self._asked, schema)


def cluster(folder: str) -> str:
    """A master and two workers in the engine's process; the master's URL. Each worker has a host of its own, for Spark
    starts no copy of a task on the host that the task is on, and its `local-cluster` knows one host."""
    gateway = launch_gateway()
    SparkContext._ensure_initialized(gateway=gateway)
    jvm = gateway.jvm
    conf, deploy = jvm.org.apache.spark.SparkConf(), jvm.org.apache.spark.deploy
    url = deploy.master.Master.startRpcEnvAndEndpoint("127.0.0.1", 0, 0, conf)._1().address().toSparkURL()
    masters = gateway.new_array(jvm.java.lang.String, 1)
    masters[0] = url
    for host in HOSTS:
        place, none = f"{folder}/{host}", jvm.scala.Option.empty()
        deploy.worker.Worker.startRpcEnvAndEndpoint(host, 0, 0, 1, 512, masters, place, none, conf, none)
    return str(url)


def main(address: str, topic: str, folder: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable  # a cluster's workers run what is on the PATH otherwise
    spark = spark_session(
        "speculating",
        cluster(folder),
        {
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.multiplier": "1.1",
            "spark.speculation.minTaskRuntime": "100ms",
            "spark.executor.memory": "512m",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
        },
    )
    spark.dataSource.register(StallingSource)
    rows = spark.range(ROWS, numPartitions=PARTS).selectExpr(
        "timestamp_millis(1940000000000 + id) AS due", "concat('payload ', id) AS payload"
    )
    marks = Path(folder) / "tries"
    marks.mkdir()
    told = {"addresses": address, "topic": topic, "run": str(marks), "reportPath": f"file://{folder}/report.json"}
    rows.write.format("stalling").mode("append").options(**told).save()
    report = json.loads((Path(folder) / "report.json").read_text())
    print(json.dumps({"report": report, "tries": sorted(one.name for one in marks.iterdir())}))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
