"""Checkpoints beside the writer: until so little is left that the writer may carry it and start the log anew."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from timeline.storage_plugins.sqlite.database import TRIES, Checkpointer


class _Table(Checkpointer):
    """Passes by hand. `meanwhile`: how many rows the writer adds during each of the next checkpoints."""

    def __init__(self, path: Path) -> None:
        self.writing = sqlite3.connect(path, isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 0"):
            self.writing.execute(f"PRAGMA {pragma}")
        self.writing.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, filler)")
        self.reading = sqlite3.connect(path, isolation_level=None)
        super().__init__(self.reading, path)
        self.meanwhile: list[int] = []
        self.checkpoints = self.asked = 0
        self._carry_rest = self._ask

    def _ask(self) -> None:
        self.asked += 1

    def write(self, rows: int) -> None:
        self.writing.execute("BEGIN")
        self.writing.executemany("INSERT INTO t (filler) VALUES (?)", [(b"." * 4_000,)] * rows)
        self.writing.execute("COMMIT")
        self.note(rows)

    def _carry(self) -> int:
        self.checkpoints += 1
        carried = super()._carry()
        if self.meanwhile:
            self.write(self.meanwhile.pop(0))
        return carried


@pytest.fixture
def table(tmp_path: Path) -> Iterator[_Table]:
    made = _Table(tmp_path / "t.db")
    yield made
    made.writing.close()
    made.reading.close()
    made.close()


FEW, MANY = 10, 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meanwhile", "checkpoints", "asked"),
    [
        ([], 1, 0),  # all of it is carried: the next transaction starts the log anew
        ([FEW], 1, 1),
        ([MANY, FEW], 2, 1),
        ([MANY, MANY], 3, 0),
        (list(range(2 * MANY, MANY, -50)), 1 + TRIES, 0),  # it gives way; the next pass goes on
    ],
)
def test_the_writer_is_asked_for_little_and_only_for_what_was_added(
    table: _Table, meanwhile: list[int], checkpoints: int, asked: int
) -> None:
    table.meanwhile = list(meanwhile)
    table.write(2 * MANY + 1)
    table._pass()
    assert (table.checkpoints, table.asked) == (checkpoints, asked)


def test_a_checkpoint_that_cannot_be_made_changes_nothing(table: _Table) -> None:
    table.write(2_000)
    enough = table._enough
    table.reading.execute("PRAGMA query_only = ON")
    table.reading.set_authorizer(lambda *_: sqlite3.SQLITE_DENY)
    table._pass()
    assert (table.asked, table._enough) == (0, enough)


@pytest.mark.slow
def test_pages_of_a_log_that_started_anew_are_counted_whole(table: _Table) -> None:
    """SQLite counts from the log's start: what it says next is no less only because the log was longer before."""
    table.write(MANY)
    table._pass()
    table.write(2 * MANY)  # all of the log was carried, so this begins another
    assert table._carry() >= 2 * MANY
    table.write(FEW)
    table._carry()
    table.write(FEW)
    assert FEW <= table._carry() < 4 * FEW


def test_one_pass_that_met_few_pages_does_not_put_the_next_off_for_long(table: _Table) -> None:
    table.write(MANY)
    table.note(100 * MANY)
    enough = table._enough
    table._pass()
    assert table._enough == 2 * enough
