"""The package itself needs no Spark."""

from __future__ import annotations

import subprocess
import sys

import pytest

FREE = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, Blocked())
"""


@pytest.mark.slow
def test_the_package_its_command_line_and_its_broker_need_no_spark() -> None:
    words = "import timeline, timeline.cli.data.pipeline, timeline.pipeline"
    words += "\nimport timeline.broker.server.service, timeline.broker.journal.files"
    subprocess.run([sys.executable, "-c", FREE + words + "\ntimeline.connect, timeline.Batch"], check=True)


@pytest.mark.slow
def test_without_spark_the_command_says_what_to_install() -> None:
    words = "from timeline.cli.app import run; sys.exit(run(['pipeline', 'compact', 'file:///nowhere']))"
    done = subprocess.run([sys.executable, "-c", FREE + words], capture_output=True, text=True)
    assert done.returncode == 4
    assert "pipelines need pyspark, which is not installed: pip install 'timeline-scheduler[spark]'" in done.stderr


@pytest.mark.slow
def test_workers_are_forked_from_a_process_without_grpc() -> None:
    """gRPC does not go through a fork: a worker that had it from its parent could not reach a broker."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys, timeline.pipeline.daemon; print('grpc' in sys.modules)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "False"
