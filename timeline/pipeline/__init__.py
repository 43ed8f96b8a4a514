"""Data in and out at scale, on Spark: the data source `timeline`, and the jobs around it.

    from timeline.pipeline import register

    register(spark)
    reminders.write.format("timeline").mode("append").options(addresses="b1:9000,b2:9000", topic="reminders").save()
    pending = spark.read.format("timeline").options(addresses="b1:9000", topic="reminders").load()

Rows travel as Arrow batches between Spark and the wire's columns. Executors talk to the brokers themselves.

Only `timeline.cli` imports this package, so `import timeline` needs no Spark. The extra `spark` brings it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from timeline.pipeline.session import register, spark_session
    from timeline.pipeline.source import TimelineSource

# Looked up on first use: the help of a job needs no Spark.
_HOMES = {"TimelineSource": "source", "register": "session", "spark_session": "session"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'timeline.pipeline' has no attribute {name!r}")
    return getattr(import_module(f"timeline.pipeline.{home}"), name)


__all__ = ["TimelineSource", "register", "spark_session"]
