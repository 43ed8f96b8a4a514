"""What went wrong in the depths of Spark is one line that says it."""

from __future__ import annotations

import pytest

from timeline.pipeline.connection import first_line

BRIDGED = """An error occurred while calling o226.save.
: org.apache.spark.SparkException: Job aborted due to stage failure
\tat org.apache.spark.scheduler.DAGScheduler.abortStage(DAGScheduler.scala:1)
Caused by: java.io.IOException: middle
\tat java.base/java.lang.Thread.run(Thread.java:840)
Caused by: java.io.IOException: No space left on device
\t... 26 more
"""
RAISED = """[PYTHON_DATA_SOURCE_ERROR] Failed to initialize the writer: Traceback (most recent call last):
  File "/site/timeline/driver/produce/ids.py", line 7, in <module>
    import numpy as np
ModuleNotFoundError: No module named 'numpy'
 SQLSTATE: 38000
"""


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (BRIDGED, "java.io.IOException: No space left on device"),
        (BRIDGED.split("Caused by")[0], "org.apache.spark.SparkException: Job aborted due to stage failure"),
        ("An error occurred while calling o1.save.", "An error occurred while calling o1.save."),
        (
            RAISED,
            "[PYTHON_DATA_SOURCE_ERROR] Failed to initialize the writer: ModuleNotFoundError: No module named 'numpy'",
        ),
        ("[PATH_NOT_FOUND] Path does not exist: file:/x.\n\tat y", "[PATH_NOT_FOUND] Path does not exist: file:/x."),
        ("", "RuntimeError"),
    ],
)
def test_the_line_is_the_cause(said: str, line: str) -> None:
    assert first_line(RuntimeError(said)) == line
