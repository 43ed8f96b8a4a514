"""The carrier of the journal: a bounded queue, a thread that writes to a pipe, and the process behind the pipe.

The process has the lowest priority and makes the files (`files.py`). Compression takes neither the broker's interpreter
nor, while the machine is busy, its processor. The broker's end costs a copy. Back comes, line by line, how many events
are in files by now. So it is known what was lost whenever the process ends.

A full queue drops parts. The journal says how many were lost, and between when and when. The same holds for events of a
process that ended early. Another one is started, after a pause that grows while that does not help. When the broker is
killed, the process writes what it has, and ends.
"""

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
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from typing import Any, Self, TypeVar

import numpy as np

from timeline.broker.journal.events import IDLE_MS, EventBatch, EventKind
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.metrics import Metrics
from timeline.wording import install_command

log = logging.getLogger("timeline.broker")
HEAD = struct.Struct("<II")
"""Before each part: the size of its description, and how many buffers follow. Their sizes come next."""
PIPE_BYTES = 1024 * 1024
START_S = 60.0
NEEDED = ("fsspec", "pyarrow")
URL_VARIABLE = "TIMELINE_JOURNAL"
"""Not an argument of the process: a URL may carry secrets, and others see arguments."""


class JournalProcess:
    """A process that writes below a URL. Made by `start`."""

    def __init__(self, process: subprocess.Popen[bytes], news: Callable[[], None]) -> None:
        self._process, self._news = process, news
        self._lock = threading.Lock()
        self._sent = self._since_ms = 0
        self.written = self.dropped = self.unsaid = 0
        """Counts of events: in files, dropped because the place took nothing for long, and missing."""
        self._ended = threading.Event()
        threading.Thread(target=self._listen, name="timeline-journal-process", daemon=True).start()

    @classmethod
    def start(cls, url: str, name: str, session: str, run: int, news: Callable[[], None]) -> Self:
        """Start it, for the broker `name`. Return once it can write.

        `run`: earlier processes of this session. `news` is called from another thread when it had to drop something,
        and when it has ended. Raise Invalid with why it cannot write.
        """
        for package in NEEDED:
            if find_spec(package) is None:
                raise Invalid(f"a journal needs {package}, which is not installed: {install_command('journal')}")
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
        """Whether it has ended, and all that it printed was read."""
        return self._ended.is_set()

    @property
    def unwritten(self) -> tuple[int, int]:
        """How many events it was handed that are in no file yet, and since when there may be such."""
        with self._lock:
            return self._sent - self.written, self._since_ms

    def hand(self, part: EventBatch) -> None:
        """Hand it a part, and wait until it takes it. Raise OSError if it has ended; the part counts as handed all the
        same."""
        assert self._process.stdin is not None
        with self._lock:
            self._sent += weight(part)
            self._since_ms = self._since_ms or part.time_ms
        write_all(self._process.stdin.fileno(), encoded(part))

    def _listen(self) -> None:
        """Read what it prints until it has ended."""
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                told = line.split()
                if len(told) != 4 or not all(one.isdigit() for one in told):
                    continue  # a filesystem's package has said something of its own
                dropped = self.dropped
                with self._lock:
                    self.written, self._since_ms, self.dropped, self.unsaid = map(int, told)
                if self.dropped != dropped:
                    self._news()
        self._process.wait()
        self._ended.set()
        self._news()

    def end(self) -> int:
        """Tell it that nothing more comes, and wait until it has written what it has. Return its exit code."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._ended.wait()
        return self._process.wait()


def weight(part: EventBatch) -> int:
    """Return how many events are gone with a part. A part that counts lost ones takes these along."""
    count = part.columns.get("count")
    return count if part.kind is EventKind.DROPPED and isinstance(count, int) else part.count


def encoded(part: EventBatch) -> list[memoryview]:
    """Return a part as buffers to write one after the other, with numbers and texts as they lie in memory."""
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
    """Write all of `views`."""
    while views:
        written = os.writev(pipe, views[:512])
        while views and written >= views[0].nbytes:
            written -= views[0].nbytes
            views = views[1:]
        if written:
            views = [views[0][written:], *views[1:]]


log = logging.getLogger("timeline.broker")
EVENTS, DROPPED = "timeline_journal_events_total", "timeline_journal_dropped_total"
QUEUE_BYTES = 64 * 1024 * 1024
GATHER_S = 0.02
"""Pause between two looks at the queue. Each look takes the interpreter from the broker."""
AGAIN_S, AGAIN_MOST_S = 1.0, 60.0
"""Pause before a process is started again. It doubles each time that one ends with nothing written."""
T = TypeVar("T")


class JournalPipe:
    """Carries parts to the process that writes them. Made by `start`, in the broker's thread, like all its calls.
    `carry` never waits."""

    process: JournalProcess
    """The process that writes now."""
    _thread: threading.Thread

    def __init__(
        self,
        start: Callable[[int, Callable[[], None]], JournalProcess],
        now_ms: Callable[[], int],
        metrics: Metrics,
    ) -> None:
        self._start, self._now_ms, self._metrics = start, now_ms, metrics
        self._loop = asyncio.get_running_loop()
        self._parts: deque[EventBatch] = deque()
        self._queued_bytes = 0
        self._something, self._hurry = threading.Event(), threading.Event()
        self._closing = False
        self._lost = 0
        self._lost_since_ms = 0
        self._runs = 0
        self._dropped = 0
        """Drops of the process that writes now, as far as they are counted."""
        self._lock = threading.Lock()

    @classmethod
    async def start(cls, url: str, name: str, session: str, now_ms: Callable[[], int], metrics: Metrics) -> JournalPipe:
        """Start the process. Return once it can write. Raise Invalid with why it cannot."""
        pipe = cls(partial(JournalProcess.start, url, name, session), now_ms, metrics)
        pipe.process = await _aside(pipe._started)
        pipe._thread = threading.Thread(target=pipe._work, name="timeline-journal", daemon=True)
        pipe._thread.start()
        return pipe

    def _started(self) -> JournalProcess:
        process = self._start(self._runs, self._something.set)
        self._runs += 1
        return process

    def carry(self, part: EventBatch) -> None:
        """Take a part, or drop it if the queue is full."""
        nbytes = part.nbytes
        with self._lock:
            full = self._closing or self._queued_bytes + nbytes > QUEUE_BYTES
            if full:
                self._lost_since_ms = self._lost_since_ms or part.time_ms
                self._lost += part.count
            else:
                self._parts.append(part)
                self._queued_bytes += nbytes
        self._metrics.count(DROPPED if full else EVENTS, by=part.count)
        if not full:
            self._something.set()

    def _work(self) -> None:
        """Hand parts on until it is closing and all are handed on."""
        pause_s = AGAIN_S
        while not self._handed_on():
            lost, since_ms = self.process.unwritten
            log.error(
                "the journal's process ended before it should, with %d events that are in no file: they are missing in "
                "the journal, which will say so", lost,
            )  # fmt: skip
            if lost:
                with self._lock:
                    self._lost_since_ms = min(since_ms, self._lost_since_ms or since_ms)
                    self._lost += lost
                self._tell(DROPPED, lost - self.process.unsaid)
            pause_s = AGAIN_S if self.process.written else pause_s
            while not self._restarted(pause_s):
                if self._closing:
                    log.error("the journal ends without what its broker did last, and cannot say so")
                    return
                pause_s = min(2 * pause_s, AGAIN_MOST_S)
            pause_s = min(2 * pause_s, AGAIN_MOST_S)
        code = self.process.end()
        self._count_dropped()
        if code:
            log.error("the journal's process could not write all that it had: its own words say how much")

    def _handed_on(self) -> bool:
        """Hand parts to the process. Return False once that has ended, True once it is closing and has them all."""
        while (part := self._next()) is not None:
            if self.process.ended:
                if part.kind is not EventKind.IDLE:
                    self._put_back(part)
                break
            try:
                self.process.hand(part)
            except OSError:
                break
        else:
            if not self.process.ended:
                return True
        self.process.end()
        self._count_dropped()
        return False

    def _count_dropped(self) -> None:
        """Count the drops of the process, too."""
        more, self._dropped = self.process.dropped - self._dropped, self.process.dropped
        if more > 0:
            self._tell(DROPPED, more)

    def _restarted(self, pause_s: float) -> bool:
        """Start another process, after a pause (none while closing). Return whether it is there."""
        self._hurry.wait(pause_s)
        try:
            self.process, self._dropped = self._started(), 0
        except (Invalid, OSError) as cannot:
            log.error("the journal's process cannot be started again: %s", cannot)
            return False
        self._tell("timeline_journal_restarts_total", 1)
        return True

    def _tell(self, counter: str, by: int) -> None:
        try:
            self._loop.call_soon_threadsafe(partial(self._metrics.count, counter, by=by))
        except RuntimeError:
            pass  # the broker's loop has ended: nobody reads its counters any more

    def _put_back(self, part: EventBatch) -> None:
        with self._lock:
            self._parts.appendleft(part)
            self._queued_bytes += part.nbytes

    def _next(self) -> EventBatch | None:
        """Return the next part. None: it is closing, and all are written. Drops come before what came later."""
        while True:
            with self._lock:
                if self._lost and self._queued_bytes < QUEUE_BYTES // 2:
                    lost, since_ms, self._lost, self._lost_since_ms = self._lost, self._lost_since_ms, 0, 0
                    return EventBatch(EventKind.DROPPED, "", self._now_ms(), 1, {"count": lost, "due": since_ms})
                if self._parts:
                    part = self._parts.popleft()
                    self._queued_bytes -= part.nbytes
                    return part
                if self._closing:
                    return None
                self._something.clear()
            self._count_dropped()
            if self.process.ended or not self._something.wait(IDLE_MS / 1000):
                return EventBatch(EventKind.IDLE, "", self._now_ms(), 1)
            self._hurry.wait(GATHER_S)

    async def close(self, timeout_s: float) -> None:
        """Write what is queued and end the process. After `timeout_s` it is left to end by itself."""
        with self._lock:
            stopped = EventBatch(EventKind.STOPPED, "", self._now_ms(), 1)
            self._parts.append(stopped)
            self._queued_bytes += stopped.nbytes
            self._closing = True
        self._hurry.set()
        self._something.set()
        try:
            await asyncio.wait_for(_aside(self._thread.join), timeout_s)
        except TimeoutError:
            log.warning("the journal is still writing after %g s: it goes on by itself", timeout_s)


async def _aside(work: Callable[[], T]) -> T:
    """Return what `work` returns in a daemon thread. Unlike a pool's threads, it does not keep a process from
    ending if a file system stalls."""
    done: Future[T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            answer = work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(answer)

    threading.Thread(target=run, name="timeline-journal-aside", daemon=True).start()
    return await asyncio.wrap_future(done)
