"""Real brokers and gateways as processes, for tests that speak HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMELINE = (sys.executable, "-m", "timeline")
JSON = {"Content-Type": "application/json"}


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TIMELINE_")}


@contextmanager
def process(folder: Path, *arguments: str, before: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """What a process of the command line announces; it must end in order on SIGTERM. `before`: a command that runs
    it."""
    log = folder / f"{arguments[0]}.log"
    with log.open("ab") as errors:
        started = subprocess.Popen(
            [*before, *TIMELINE, *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder,
            env=_environment(),
        )
    assert started.stdout is not None
    try:
        said = started.stdout.readline()
        assert said, log.read_text()
        yield json.loads(said) | {"pid": started.pid, "log": log, "process": started}
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGTERM)
        started.communicate(timeout=60)
    assert started.returncode in (0, -signal.SIGKILL), log.read_text()


def broker(folder: Path, *more: str) -> Any:
    """A broker on a free port."""
    return process(folder, "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--log-level", "warning", *more)


def gateway(folder: Path, brokers: str, *more: str, before: Sequence[str] = ()) -> Any:
    """A gateway on a free port."""
    return process(folder, "gateway", "--broker", brokers, "--listen", "127.0.0.1:0", *more, before=before)
