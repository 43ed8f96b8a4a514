"""Checkpoints beside the writer: what stands in the write-ahead log is carried to its place by a thread of its own.

A checkpoint inside a commit holds up every lease behind it; measured here with 1 M pending messages, 24 ms for 8,000
pages, which was a lease's p99.9 and is 2 ms this way. A passive one on another connection disturbs no writer and no
reader. It cannot start the log anew while the writer goes on adding to it: so each pass carries what was added during
the one before, and once little is left the writer carries that between two of its transactions. SQLite syncs the file
only with a checkpoint that leaves nothing: the thread does so after each of its own, or the writer would wait for all
of it (25 ms here, 7 this way).
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

PASS_PAGES = 6_000
"""Pages in the log that make a pass worth its two fsyncs. With random ids the same page is written again and again,
and is carried once: measured with 1 M pending, 18k cycles/s with 1,000 pages, 26k with 8,000, 27k with 32,000."""
REST_PAGES = 600
"""So many the writer carries by itself: 2 to 4 ms, where all of a log took it 40 to 50 inside a commit."""
LOG_PAGES = 60_000
"""The writer's own limit (`wal_autocheckpoint`), should no pass ever come so far."""
LOG_BYTES = 256 * 1024 * 1024
"""The file is cut back to this when the log starts anew."""
FEWEST_CHANGES, MOST_CHANGES = 2_000, 300_000
TRIES = 8
SALTS = slice(16, 24)
"""Where the log's header has what is new each time the log starts anew (SQLite's file format, section 4.1)."""


class Checkpointer:
    """Carries pages after so many changed rows as lately made PASS_PAGES. Owns its connection once it is started.
    `carry_rest` asks the writer to carry what is left."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._log = Path(f"{path}-wal")
        self._salts = b""
        self._carry_rest: Callable[[], None] | None = None
        self._ready = threading.Condition()
        self._changes = 0
        self._enough = FEWEST_CHANGES
        self._carried = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="timeline-sqlite-checkpoints", daemon=True)

    def start(self, carry_rest: Callable[[], None]) -> None:
        self._carry_rest = carry_rest
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the connection. Blocks until then."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        self._thread.join()

    def close(self) -> None:
        """Closes the file. Not before every connection of this process is closed: the first descriptor that is closed
        gives back the locks of all."""
        os.close(self._file)

    def note(self, changes: int) -> None:
        """The writer has committed `changes` rows more."""
        with self._ready:
            self._changes += changes
            if self._changes >= self._enough:
                self._ready.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._ready:
                    while self._changes < self._enough and not self._stopping:
                        self._ready.wait()
                    if self._stopping:
                        return
                self._pass()
        finally:
            self._connection.close()

    def _taken(self) -> int:
        with self._ready:
            changes, self._changes = self._changes, 0
        return changes

    def _pass(self) -> None:
        """Carries what is there, then what was added meanwhile, until so little was that the writer may carry it."""
        changes = self._taken()
        pages = self._carry()
        for _ in range(TRIES):
            # How many pages came meanwhile is not told: what they changed is.
            added = self._taken()
            if added * pages <= REST_PAGES * changes:
                if added and self._carry_rest is not None:
                    self._carry_rest()
                break
            changes += added
            pages += self._carry()
        if pages:
            enough = min(max(changes * PASS_PAGES / pages, FEWEST_CHANGES), MOST_CHANGES)
            # One pass that met few pages, because the same were changed again and again, says little of the next.
            self._enough = int(min(enough, 2 * self._enough))

    def _carry(self) -> int:
        """Pages carried by one checkpoint."""
        try:
            before = self._carried if self._same_log() else 0
            _, _, self._carried = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            os.fdatasync(self._file)
        except (sqlite3.Error, OSError):
            # A full or broken disk: the writer meets it too, and it is the one to tell. The log keeps everything.
            return 0
        return self._carried - before if self._carried >= before else self._carried

    def _same_log(self) -> bool:
        """Whether the log has not started anew since this was asked last: SQLite counts what it carried from there."""
        with self._log.open("rb", buffering=0) as log:
            header = log.read(SALTS.stop)
        salts, self._salts = self._salts, header[SALTS]
        return salts == self._salts
