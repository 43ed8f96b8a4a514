"""The Spark session of the commands, and the parts of a session that all jobs use."""

from __future__ import annotations

import os
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from pyspark import InheritableThread
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from timeline.pipeline.source import PushingSource

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
WORKERS = "spark.pyspark.python"
Progress = Callable[[str, int, int], None]
"""Receives a job's step, how many are done, and of how many (0: unknown)."""

EVERY_S = 0.25
T = TypeVar("T")


def quiet(what: str, done: int, total: int) -> None:
    """Ignore the progress of a job."""


def register(spark: SparkSession) -> SparkSession:
    """Register `format("timeline")`, and let `spark` push filters down to it. Return `spark`."""
    spark.dataSource.register(PushingSource)
    spark.conf.set(PUSHDOWN, "true")
    return spark


def spark_session(name: str, master: str = "", settings: Mapping[str, str] | None = None) -> SparkSession:
    """Return a session called `name`, with `timeline` registered. Default master: this machine, or spark-submit's.

    On this machine, workers run this process's Python, unless PYSPARK_PYTHON or a setting names another."""
    builder = SparkSession.builder.appName(name)
    if master:
        builder = builder.master(master)
    defaults = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.python.daemon.module": "timeline.pipeline.daemon",
        "spark.log.level": "ERROR",
    }
    asked = dict(settings or {})
    if _is_here(master or asked.get("spark.master", "")):
        # Another python3 on the PATH need not have this package.
        os.environ.setdefault("PYSPARK_PYTHON", asked.get(WORKERS, sys.executable))
    for key, value in (defaults | asked).items():
        builder = builder.config(key, value)
    before = processes()
    try:
        return register(builder.getOrCreate())
    except KeyboardInterrupt:
        # The engine ignores SIGINT. If it is cut off before it reports its port, it would stay for ever.
        for pid, (parent, _) in processes().items():
            if parent == os.getpid() and pid not in before:
                with suppress(ProcessLookupError, ChildProcessError):  # another wait has taken its exit code
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        raise


def processes() -> dict[int, tuple[int, str]]:
    """Return all processes of this machine by id, each with its parent's id and its name."""
    found: dict[int, tuple[int, str]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            head, _, rest = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            continue  # it has just ended, or is not ours to read
        found[int(entry)] = int(rest.split()[1]), head.partition("(")[2]
    return found


def _is_here(master: str) -> bool:
    """Return whether this process starts Spark's workers on this machine. spark-submit decides by itself."""
    return "PYSPARK_GATEWAY_PORT" not in os.environ and (not master or master.startswith("local"))


def read_topic(spark: SparkSession, addresses: str, topic: str, columns: str | StructType, **options: str) -> DataFrame:
    """Return the messages of `topic`, by default in all states. `columns`: as DDL or a schema."""
    told = {"addresses": addresses, "topic": topic, "state": "all"} | options
    return spark.read.format("timeline").options(**told).schema(columns).load()


def watched(spark: SparkSession, action: Callable[[], T], progress: Callable[[int, int], None]) -> T:
    """Return the result of `action`. Meanwhile another thread calls `progress(done, total)` with its tasks."""
    # Spark looks up data sources in the session of the thread that writes. Only the thread that made the session has
    # one. Creating a frame is the public call that gives this thread its session.
    spark.createDataFrame([], StructType([]))
    context, group = spark.sparkContext, f"timeline-{uuid.uuid4().hex[:12]}"
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            progress(*_tasks(spark, group))

    watcher = InheritableThread(target=watch, name="timeline-pipeline", daemon=True)
    context.setJobGroup(group, "timeline pipeline", interruptOnCancel=True)
    watcher.start()
    try:
        return action()
    finally:
        over.set()
        watcher.join()


def _tasks(spark: SparkSession, group: str) -> tuple[int, int]:
    """Return how many tasks of the group's stages are done, and how many there are."""
    tracker = spark.sparkContext.statusTracker()
    done = total = 0
    for job in tracker.getJobIdsForGroup(group):
        told = tracker.getJobInfo(job)
        for stage in told.stageIds if told is not None else ():
            found = tracker.getStageInfo(stage)
            if found is not None:
                done, total = done + found.numCompletedTasks, total + found.numTasks
    return done, max(1, total)
