"""Rows that cannot be put: kept as they came, with the reason beside them, so that they can be mended and written
again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from timeline.pipeline.files import joined, write_table

EXAMPLES = 10
ROWS_A_FILE = 100_000


class Rejects:
    """A task's rejected rows. `path`: where to write them, empty: nowhere. `name`: that of this task's files, the same
    when the task runs again, so that it writes over what it wrote before."""

    def __init__(self, path: str, name: str) -> None:
        self._path, self._name = path, name
        self._tables: list[pa.Table] = []
        self._rows = 0
        self._files: list[str] = []
        self.examples: list[tuple[str, str]] = []

    def add(self, rows: pa.RecordBatch, bad: dict[int, str]) -> None:
        """The rows at the indexes in `bad`, each with its reason."""
        places = sorted(bad)
        for place in places[: EXAMPLES - len(self.examples)]:
            self.examples.append((_shown(rows, place), bad[place]))
        if not self._path:
            return
        reasons = pa.array([bad[place] for place in places], pa.string())
        table = pa.Table.from_batches([rows.take(pa.array(places, pa.int64()))]).append_column("reason", reasons)
        self._tables.append(table)
        self._rows += len(table)
        if self._rows >= ROWS_A_FILE:
            self._write()

    def _write(self) -> None:
        if self._tables:
            url = joined(self._path, f"{self._name}-{len(self._files):03d}.parquet")
            write_table(url, pa.concat_tables(self._tables))
            self._files.append(url)
            self._tables, self._rows = [], 0

    def close(self) -> list[str]:
        """Writes what is left; the files that there are."""
        self._write()
        return self._files


def _shown(rows: pa.RecordBatch, place: int) -> str:
    """A row in a few words."""
    said: list[str] = []
    for name in ("id", "due", "tag"):
        if name in rows.schema.names:
            value: Any = rows.column(name)[place].as_py()
            said.append(f"{name}={value!s:.60}")
    return " ".join(said)
