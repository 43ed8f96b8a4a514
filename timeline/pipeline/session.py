"""The Spark session that the jobs run in when they are commands, and what the source needs of anybody's."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import SparkSession

from timeline.pipeline.source import TimelineSource

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: SparkSession) -> SparkSession:
    """Makes `format("timeline")` known to `spark`, and has it hand filters down. Answers `spark`."""
    spark.dataSource.register(TimelineSource)
    spark.conf.set(PUSHDOWN, "true")
    return spark


def spark_session(name: str, master: str = "", settings: Mapping[str, str] | None = None) -> SparkSession:
    """A session called `name`, on this machine unless `master` or spark-submit says otherwise, with `timeline`
    registered."""
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
    for key, value in (defaults | dict(settings or {})).items():
        builder = builder.config(key, value)
    return register(builder.getOrCreate())
