"""The Spark session that the jobs run in when they are commands, and what the source needs of anybody's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from subprocess import Popen, TimeoutExpired
from traceback import walk_tb

from pyspark.sql import SparkSession

from timeline.pipeline.source import TimelineSource

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
WORKERS = "spark.pyspark.python"
ENDS_WITHIN_S = 10.0


def register(spark: SparkSession) -> SparkSession:
    """Makes `format("timeline")` known to `spark`, and has it hand filters down. Answers `spark`."""
    spark.dataSource.register(TimelineSource)
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
    try:
        return register(builder.getOrCreate())
    except KeyboardInterrupt as interrupted:
        _end_engine(interrupted)
        raise


def _end_engine(interrupted: KeyboardInterrupt) -> None:
    """Ends the Java process that was being launched. It takes no SIGINT, and what it waits for, an end of its standard
    input, it only notices once it is up: by then the folder is gone in which it wanted to say where it listens, and it
    would stay for ever. Nobody but the launching function that was cut off knows the process."""
    for frame, _ in walk_tb(interrupted.__traceback__):
        if frame.f_globals.get("__name__") not in ("pyspark.java_gateway", "subprocess"):
            continue
        for value in [*frame.f_locals.values()]:
            if isinstance(value, Popen) and value.poll() is None:
                value.terminate()
                try:
                    value.wait(ENDS_WITHIN_S)
                except TimeoutExpired:
                    value.kill()
                    value.wait()


def _is_here(master: str) -> bool:
    """Whether Spark's workers run on this machine, started by this process. spark-submit has said where they run."""
    return "PYSPARK_GATEWAY_PORT" not in os.environ and (not master or master.startswith("local"))
