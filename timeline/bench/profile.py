"""Where the time goes: py-spy beside the processes that are measured, and the hottest functions out of its samples."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from timeline.bench.processes import CannotMeasure
from timeline.child import send_signal

SAMPLES_PER_S = 250
LONGEST_S = 3_600
HOT_SHOWN = 10
_FRAME = re.compile(r"(.+) \((.+?)(?::\d+)?\)$")


@dataclass(frozen=True, slots=True)
class Hot:
    """A function and its share of a process's samples: its own, and with what it calls."""

    function: str
    own: float
    whole: float


@dataclass(slots=True)
class Profile:
    """Samples processes for the length of a measurement. `hottest`: by process name, most of its own time first."""

    folder: Path
    hottest: dict[str, list[Hot]] = field(default_factory=dict)

    @property
    def own_pid(self) -> int:
        """This process."""
        return os.getpid()

    @asynccontextmanager
    async def of(self, processes: dict[str, int]) -> AsyncIterator[None]:
        """Samples `processes` (name → pid) until it is left. Raises CannotMeasure without py-spy."""
        spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if spy is None:
            raise CannotMeasure("--profile needs py-spy, which is not installed: pip install py-spy")
        spies = {
            name: await asyncio.create_subprocess_exec(
                spy, "record", "--nonblocking", "--format", "raw", "--rate", str(SAMPLES_PER_S), "--pid", str(pid),
                "--duration", str(LONGEST_S), "--output", str(self._file(name)),
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )
            for name, pid in processes.items()
        }  # fmt: skip
        try:
            yield
        finally:
            for child in spies.values():
                send_signal(child, signal.SIGINT)
            for name, child in spies.items():
                await child.wait()
                self.hottest[name] = hottest(self._file(name)) if self._file(name).exists() else []

    def lines(self) -> list[str]:
        """The hottest functions of each process, a line each; of a process that could not be sampled, that."""
        told = []
        for name, hot in self.hottest.items():
            told += [f"{name}: {one.own:.1%} own, {one.whole:.1%} in all: {one.function}" for one in hot[:HOT_SHOWN]]
            if not hot:
                told.append(f"{name}: py-spy took no samples: it needs the right to trace processes (ptrace, root)")
        return told

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.stacks"


def hottest(file: Path) -> list[Hot]:
    """The functions of a file of raw stacks (`a;b;c count` a line), by their own share."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    total = 0
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        frames = [_short(frame) for frame in stack.split(";")]
        many = int(count)
        total += many
        own[frames[-1]] += many
        for frame in set(frames):
            whole[frame] += many
    return [Hot(name, many / total, whole[name] / total) for name, many in own.most_common()] if total else []


def _short(frame: str) -> str:
    """`function (timeline/…/file.py)`: no line numbers, and no folders that say nothing."""
    match = _FRAME.match(frame)
    if match is None:
        return frame
    path = match[2]
    for mark in ("site-packages/", "lib/python3"):
        path = path.rpartition(mark)[2]
    return f"{match[1]} ({path})"
