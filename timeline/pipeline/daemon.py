"""The process that Spark forks its Python workers from, with what they need imported already: a worker is ready in
milliseconds rather than in a second. All but gRPC, which does not go through a fork.

Set by `spark_session`; elsewhere: `spark.python.daemon.module=timeline.pipeline.daemon`.
"""

from __future__ import annotations

import pyspark.daemon

import timeline.driver.consume.holding
import timeline.pipeline.source  # noqa: F401

if __name__ == "__main__":
    pyspark.daemon.manager()
