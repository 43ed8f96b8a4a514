"""What carries the journal off: a bounded queue, a thread that does nothing but write to a pipe, and behind it a
process of the lowest priority that makes the files (`journal_files.py`). Compressing takes neither the broker's
interpreter nor, while the machine is busy, its processor; the broker's end costs a copy.

When the queue is full, parts are dropped and counted, and how many were lost between when and when stands in the
journal. When the broker is killed the process writes what it has, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from timeline.broker.journal import Kind, Part
from timeline.columns import Ragged
from timeline.errors import Invalid

log = logging.getLogger("timeline.broker")
QUEUE_BYTES = 64 * 1024 * 1024
HEAD = struct.Struct("<II")
"""Before each part: how long its description is, and how many buffers follow, whose lengths come next."""
PIPE_BYTES = 1024 * 1024
GATHER_S = 0.02
"""Between two looks at the queue: each takes the interpreter from the broker, so that a few are better than many."""
START_S = 60.0
"""How long the process may take to say that it can write."""
URL_VARIABLE = "TIMELINE_JOURNAL"
DROPPED = b"dropped "
"""What the process says before how many events it had to drop."""
T = TypeVar("T")


class JournalPipe:
    """Carries parts to the process that writes them below `url`. `counted(dropped, events)` is called for each part
    from the broker's thread. Made by `start`; `carry` never waits."""

    def __init__(
        self, process: subprocess.Popen[bytes], now_ms: Callable[[], int], counted: Callable[[bool, int], None]
    ):
        self._process, self._now_ms, self._counted = process, now_ms, counted
        self._parts: deque[Part] = deque()
        self._queued_bytes = 0
        self._something, self._hurry = threading.Event(), threading.Event()
        self._closing = False
        self._lost = 0
        self._lost_since_ms = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="timeline-journal", daemon=True)
        self._thread.start()
        hear = partial(self._hear, asyncio.get_running_loop())
        threading.Thread(target=hear, name="timeline-journal-hear", daemon=True).start()

    @classmethod
    async def start(
        cls, url: str, name: str, session: str, now_ms: Callable[[], int], counted: Callable[[bool, int], None]
    ) -> JournalPipe:
        """Starts the process; returns once it can write. Raises Invalid with why it cannot."""
        # Nothing of the folder we are in is imported, and a secret in the URL stands where only our user reads it.
        command = [sys.executable, "-P", "-m", "timeline.broker.journal_files", name, session]
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": path, URL_VARIABLE: url}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=environment
        )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # more than this user may have: then it is 64 KiB, and a switch for each
            fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        said = b""
        try:
            said = (await asyncio.wait_for(_in_thread(process.stdout.readline), START_S)).strip()
        except TimeoutError:
            said = f"its place has not answered within {START_S:g} s".encode()
        finally:
            if said != b"ready":
                process.kill()
        if said != b"ready":
            await _in_thread(process.wait)
            raise Invalid(f"the journal cannot be written: {said.decode(errors='replace') or 'it ended at once'}")
        return cls(process, now_ms, counted)

    def carry(self, part: Part) -> None:
        """Takes a part, or drops it when the queue is full."""
        nbytes = part.nbytes
        with self._lock:
            full = self._closing or self._queued_bytes + nbytes > QUEUE_BYTES
            if full:
                self._lost_since_ms = self._lost_since_ms or part.time_ms
                self._lost += part.count
            else:
                self._parts.append(part)
                self._queued_bytes += nbytes
        self._counted(full, part.count)
        if not full:
            self._something.set()

    def _work(self) -> None:
        assert self._process.stdin is not None
        pipe = self._process.stdin.fileno()
        try:
            while (part := self._next()) is not None:
                _write_all(pipe, encoded(part))
        except OSError as broken:
            log.error("the journal's process is gone (%s): what happens from now on is not journalled", broken)
            with self._lock:
                self._closing = True
                self._parts.clear()
        finally:
            self._process.stdin.close()

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        """What the process had to drop, since its place took nothing for long, counts as dropped too."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(DROPPED):
                with contextlib.suppress(RuntimeError):  # the loop was closed: nobody counts any more
                    loop.call_soon_threadsafe(self._counted, True, int(line.removeprefix(DROPPED)))

    def _next(self) -> Part | None:
        """The next part, None when it is closing and all are written. What was dropped is told before what came
        later."""
        while True:
            with self._lock:
                if self._lost and self._queued_bytes < QUEUE_BYTES // 2:
                    lost, since_ms, self._lost, self._lost_since_ms = self._lost, self._lost_since_ms, 0, 0
                    return Part(Kind.DROPPED, "", self._now_ms(), 1, {"count": lost, "due": since_ms})
                if self._parts:
                    part = self._parts.popleft()
                    self._queued_bytes -= part.nbytes
                    return part
                if self._closing:
                    return None
                self._something.clear()
            self._something.wait()
            self._hurry.wait(GATHER_S)

    async def close(self, timeout_s: float) -> None:
        """Writes what is queued and ends the process; after `timeout_s` it is left to end by itself."""
        with self._lock:
            self._parts.append(Part(Kind.STOPPED, "", self._now_ms(), 1))
            self._closing = True
        self._hurry.set()
        self._something.set()
        try:
            await asyncio.wait_for(_in_thread(self._ended), timeout_s)
        except TimeoutError:
            log.warning("the journal is still writing after %g s: it goes on by itself", timeout_s)

    def _ended(self) -> None:
        self._thread.join()
        self._process.wait()


async def _in_thread(call: Callable[[], T]) -> T:
    """What `call` answers. In a thread that nobody waits for at our end: those of asyncio's pool are, however long."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(result: T) -> None:
        if not answer.done():
            answer.set_result(result)

    def run() -> None:
        result = call()
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(tell, result)

    threading.Thread(target=run, name="timeline-journal-wait", daemon=True).start()
    return await answer


def encoded(part: Part) -> list[memoryview]:
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


def _write_all(pipe: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(pipe, views[:512])
        while views and written >= views[0].nbytes:
            written -= views[0].nbytes
            views = views[1:]
        if written:
            views = [views[0][written:], *views[1:]]
