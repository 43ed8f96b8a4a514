"""Ctrl-C while Spark starts leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import require_service

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

LAUNCHER = """#!/bin/sh
# As Spark's: the engine takes the shell's place, ignores SIGINT, and says nothing for long.
echo $$ > "$PID_FILE.new" && mv "$PID_FILE.new" "$PID_FILE"
echo up > "$UP"
exec sleep 3000
"""


def test_an_interrupt_while_spark_starts_ends_its_engine(tmp_path: Path) -> None:
    require_service("spark")
    launcher = tmp_path / "bin" / "spark-submit"
    launcher.parent.mkdir()
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    told, up = tmp_path / "pid", tmp_path / "up"
    os.mkfifo(up)
    environment = os.environ | {"SPARK_HOME": str(tmp_path), "PID_FILE": str(told), "UP": str(up)}
    command = [sys.executable, "-m", "timeline", "pipeline", "compact", "file:///nowhere"]
    # A file, not a pipe: an engine that stayed would hold a pipe open.
    with (tmp_path / "said").open("w") as said:
        asked = subprocess.Popen(command, env=environment, stderr=said, start_new_session=True)
    try:
        assert up.read_text() == "up\n"  # waits for the launcher
        os.killpg(asked.pid, signal.SIGINT)
        assert (asked.wait(), (tmp_path / "said").read_text().strip()) == (130, "timeline: interrupted")
        with pytest.raises(ProcessLookupError):
            os.kill(int(told.read_text()), 0)
    finally:
        if asked.poll() is None:
            asked.kill()
            asked.wait()
        if told.exists() and (Path("/proc") / told.read_text().strip()).exists():
            os.kill(int(told.read_text()), signal.SIGKILL)
