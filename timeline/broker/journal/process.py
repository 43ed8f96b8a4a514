"""The process that makes the journal's files (`journal_files.py`), as its broker sees it: parts in by a pipe, and back,
line by line, how many of their events are in files by now. So that whenever it ends, it is known what was lost."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Self

import numpy as np

from timeline.broker.journal.events import EventBatch, EventKind
from timeline.columns import Ragged
from timeline.errors import Invalid

log = logging.getLogger("timeline.broker")
HEAD = struct.Struct("<II")
"""Before each part: how long its description is, and how many buffers follow, whose lengths come next."""
PIPE_BYTES = 1024 * 1024
START_S = 60.0
NEEDED = ("fsspec", "pyarrow")
URL_VARIABLE = "TIMELINE_JOURNAL"
"""Not an argument of the process: what a URL may carry is nobody's to see."""


class JournalProcess:
    """A process that writes below a URL. Made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], news: Callable[[], None]) -> None:
        self._process, self._news = process, news
        self._lock = threading.Lock()
        self._sent = self._written = self._since_ms = self._dropped = self._unsaid = 0
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="timeline-journal-process", daemon=True).start()

    @classmethod
    def start(cls, url: str, name: str, session: str, run: int, news: Callable[[], None]) -> Self:
        """Starts it, as the broker `name`; returns once it can write. `run`: how many there were before it in this
        session. `news` is called from another thread when it had to drop something, and when it has ended. Raises
        Invalid with why it cannot write."""
        for package in NEEDED:
            if find_spec(package) is None:
                raise Invalid(f"a journal needs {package}, which is not installed: pip install 'timeline[journal]'")
        # -P: nothing of the folder that we are in is imported.
        command = [sys.executable, "-P", "-m", "timeline.broker.journal.files", name, session, str(run)]
        path = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=dict(os.environ) | {"PYTHONPATH": path, URL_VARIABLE: url},
        )
        assert process.stdin is not None and process.stdout is not None
        # Not everywhere known, or more than this user may have: then it is 64 KiB, and a switch for each.
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        patience = threading.Timer(START_S, process.kill)
        patience.daemon = True
        patience.start()
        said = process.stdout.readline().strip()
        patience.cancel()
        if said == b"ready":
            return cls(process, news)
        process.kill()
        process.stdin.close()
        process.stdout.close()
        code = process.wait()
        why = said.decode(errors="replace") or f"its process ended with {code} or said nothing for {START_S:g} s"
        raise Invalid(f"the journal cannot be written: {why}")

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has ended, and all is known that it said."""
        return self._ended.is_set()

    @property
    def unwritten(self) -> tuple[int, int]:
        """How many events it was handed that are in no file yet, and since when there may be such."""
        with self._lock:
            return self._sent - self._written, self._since_ms

    @property
    def dropped(self) -> int:
        """How many events it had to drop, since its place took nothing for long."""
        with self._lock:
            return self._dropped

    @property
    def unsaid(self) -> int:
        """How many of the unwritten ones were missing, and counted so, before it had them or by it."""
        with self._lock:
            return self._unsaid

    @property
    def wrote(self) -> bool:
        """Whether anything that it was handed is in a file."""
        with self._lock:
            return self._written > 0

    def hand(self, part: EventBatch) -> None:
        """Hands it a part, waiting until it takes it. Raises OSError when it has ended: what it was handed counts as
        handed all the same."""
        assert self._process.stdin is not None
        with self._lock:
            self._sent += weight(part)
            self._since_ms = self._since_ms or part.time_ms
        write_all(self._process.stdin.fileno(), encoded(part))

    def _listen(self) -> None:
        """Notes what it says until it has ended."""
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                told = line.split()
                if len(told) != 4 or not all(one.isdigit() for one in told):
                    continue  # a filesystem's package has said something of its own
                with self._lock:
                    dropped = self._dropped
                    self._written, self._since_ms, self._dropped, self._unsaid = (int(one) for one in told)
                if self._dropped != dropped:
                    self._news()
        self._process.wait()
        self._ended.set()
        self._news()

    def end(self) -> int:
        """Tells it that nothing more comes, and waits until it has written what it has; its exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._ended.wait()
        return self._process.wait()


def weight(part: EventBatch) -> int:
    """How many events are gone with a part: one that says how many others are takes these along."""
    count = part.columns.get("count")
    return count if part.kind is EventKind.DROPPED and isinstance(count, int) else part.count


def encoded(part: EventBatch) -> list[memoryview]:
    """A part as buffers to write one after the other; numbers and texts as they lie in memory."""
    buffers: list[pickle.PickleBuffer] = []
    columns: dict[str, Any] = {}
    for name, column in part.columns.items():
        if isinstance(column, Ragged):
            columns[name] = (pickle.PickleBuffer(column.data), np.ascontiguousarray(column.offsets))
        else:
            columns[name] = np.ascontiguousarray(column) if isinstance(column, np.ndarray) else column
    said = (str(part.kind), part.topic, part.time_ms, part.count, columns)
    head = pickle.dumps(said, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    lengths = b"".join(struct.pack("<Q", view.nbytes) for view in raw)
    return [memoryview(HEAD.pack(len(head), len(raw)) + lengths + head), *raw]


def write_all(pipe: int, views: list[memoryview]) -> None:
    """Writes all of `views`."""
    while views:
        written = os.writev(pipe, views[:512])
        while views and written >= views[0].nbytes:
            written -= views[0].nbytes
            views = views[1:]
        if written:
            views = [views[0][written:], *views[1:]]
