"""The Spark session that the jobs run in when they are commands, and what all jobs use of one."""

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
"""Receives what a job is doing, how many of it are done, and of how many (0: unknown)."""

EVERY_S = 0.25
T = TypeVar("T")


def quiet(what: str, done: int, total: int) -> None:
    """Ignore the progress of a job."""


def register(spark: SparkSession) -> SparkSession:
    """Makes `format("timeline")` known to `spark`, and has it hand filters down. Answers `spark`."""
    spark.dataSource.register(PushingSource)
    spark.conf.set(PUSHDOWN, "true")
    return spark


def spark_session(name: str, master: str = "", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session called `name`, on this machine unless `master` or spark-submit says otherwise, with `timeline`
    registered. On this machine, Python workers are what runs here, unless PYSPARK_PYTHON or a setting says which."""
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
        # Whatever python3 is on the PATH need not have this package.
        os.environ.setdefault("PYSPARK_PYTHON", asked.get(WORKERS, sys.executable))
    for key, value in (defaults | asked).items():
        builder = builder.config(key, value)
    before = processes()
    try:
        return register(builder.getOrCreate())
    except KeyboardInterrupt:
        # The engine ignores SIGINT. Cut off before it could say where it listens, it would stay for ever.
        for pid, (parent, _) in processes().items():
            if parent == os.getpid() and pid not in before:
                with suppress(ProcessLookupError, ChildProcessError):  # somebody else has seen its end
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        raise


def processes() -> dict[int, tuple[int, str]]:
    """Return all processes of this machine by id: whose child each is, and its name."""
    found: dict[int, tuple[int, str]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            head, _, rest = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            continue  # it has ended this moment, or is not ours to see
        found[int(entry)] = int(rest.split()[1]), head.partition("(")[2]
    return found


def _is_here(master: str) -> bool:
    """Whether Spark's workers run on this machine, started by this process. spark-submit has said where they run."""
    return "PYSPARK_GATEWAY_PORT" not in os.environ and (not master or master.startswith("local"))


def read_topic(spark: SparkSession, addresses: str, topic: str, columns: str, **options: str) -> DataFrame:
    """Return the messages of `topic` in all states, unless `options` say otherwise; `columns` as DDL."""
    told = {"addresses": addresses, "topic": topic, "state": "all"} | options
    return spark.read.format("timeline").options(**told).schema(columns).load()


def watched(spark: SparkSession, action: Callable[[], T], progress: Callable[[int, int], None]) -> T:
    """What `action` answers. `progress(done, total)` is told of its tasks meanwhile, from another thread."""
    # Spark looks for data sources in the session of the thread that writes, and a thread that did not make the session
    # has none. Making a frame is the public call that tells the thread its session.
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
    """How many tasks of the group's stages are done, and how many there are."""
    tracker = spark.sparkContext.statusTracker()
    done = total = 0
    for job in tracker.getJobIdsForGroup(group):
        told = tracker.getJobInfo(job)
        for stage in told.stageIds if told is not None else ():
            found = tracker.getStageInfo(stage)
            if found is not None:
                done, total = done + found.numCompletedTasks, total + found.numTasks
    return done, max(1, total)
