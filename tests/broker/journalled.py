"""A broker with a journal, and what stands in it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests import conditions
from timeline.broker.journal.files import FIELDS
from timeline.metrics import Metrics

SERVE = (sys.executable, "-m", "timeline", "serve", "--listen", "127.0.0.1:0", "--metrics", "off")


@contextmanager
def broker(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [*SERVE, "--json", *options]
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        assert said, (folder / "log").read_text()
        yield json.loads(said)["listen"], process
    finally:
        process.terminate()
        process.communicate(timeout=60)


def events(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        assert set(table.schema.names) == set(FIELDS)
        assert table.schema.metadata[b"timeline.journal"] == b"1"
        found += [row | {"topic": path.parent.name.removeprefix("topic=")} for row in table.to_pylist()]
    return sorted(found, key=lambda row: row["time"])


def wait_for(happened: Callable[[], bool]) -> None:
    """Return once `happened`."""
    conditions.until(happened)


class Counts(Metrics):
    """What a broker would count."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[bool] = Counter()
        self.restarts = 0

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        if name == "timeline_journal_restarts_total":
            self.restarts += int(by)
        else:
            self.of[name == "timeline_journal_dropped_total"] += int(by)


async def until(happened: Callable[[], bool]) -> None:
    """Return once `happened`, and let others run meanwhile."""
    await asyncio.to_thread(wait_for, happened)
