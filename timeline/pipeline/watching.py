"""A Spark action, watched: how many of its tasks are done is told beside it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import TypeVar

from pyspark import InheritableThread
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

EVERY_S = 0.25
T = TypeVar("T")


def watched(spark: SparkSession, action: Callable[[], T], said: Callable[[int, int], None]) -> T:
    """What `action` answers. `said(done, total)` is told of its tasks meanwhile, from another thread."""
    # Spark looks for data sources in the session of the thread that writes, and a thread that did not make the session
    # has none. Making a frame is the public call that tells the thread its session.
    spark.createDataFrame([], StructType([]))
    context, group = spark.sparkContext, f"timeline-{uuid.uuid4().hex[:12]}"
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_S):
            said(*_tasks(spark, group))

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
