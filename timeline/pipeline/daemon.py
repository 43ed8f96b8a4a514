"""The process from which Spark forks its Python workers. It has their modules imported, so a worker is ready in
milliseconds instead of a second. gRPC is not imported, since it does not survive a fork.

`spark_session` sets it. Elsewhere, set `spark.python.daemon.module=timeline.pipeline.daemon`.
"""

from __future__ import annotations

import pyspark.daemon

import timeline.driver.consume.holding
import timeline.pipeline.source  # noqa: F401

if __name__ == "__main__":
    pyspark.daemon.manager()
