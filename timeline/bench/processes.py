"""The processes that are measured: brokers, feeders and peers, on free ports, and where their time goes.

Each process is ended by its own id. py-spy samples them where a profile is asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from timeline.child import Child, send_signal
from timeline.errors import TimelineError

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SAMPLES_PER_S = 250
LONGEST_PROFILE_S = 3_600
HOT_SHOWN = 10
_FRAME = re.compile(r"(.+) \((?:.*(?:site-packages/|lib/python3))?(.+?)(?::\d+)?\)$")


class CannotMeasure(TimelineError):
    """A measurement is impossible: a process did not start or died, or the settings do not fit."""

    code = "CANNOT_MEASURE"


@asynccontextmanager
async def within(patience_s: float, what: str) -> AsyncIterator[None]:
    """Bound what is awaited inside. Raises CannotMeasure, which names `what`."""
    try:
        async with asyncio.timeout(patience_s):
            yield
    except TimeoutError:
        raise CannotMeasure(f"{what} never came within {patience_s:g} s") from None


class Measured(Child):
    """A process that is measured."""

    trouble = CannotMeasure

    def cpu_s(self) -> float:
        """Return the processor time that it has used."""
        return cpu_s(self.pid)

    def resident_bytes(self) -> int:
        """Return its memory that is in RAM now."""
        try:
            return resident_bytes(self.pid)
        except CannotMeasure as ended:
            raise CannotMeasure(f"{self.name} has ended: {self.last_words()}") from ended


def resident_bytes(pid: int) -> int:
    """Return the memory of a process that is in RAM now. Raises CannotMeasure if it has ended."""
    found = re.search(r"^VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise CannotMeasure(f"process {pid} has ended")
    return int(found[1]) * 1024


def cpu_s(pid: int) -> float:
    """Return the processor time of a process: its own, and the system's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def disk_stalled_s() -> float | None:
    """Return for how long all work has waited for a disk since the machine started. None: the kernel does not report.

    Linux reports it in `/proc/pressure/io` from 4.20 on, unless that is turned off.
    """
    try:
        return stalled_s(Path("/proc/pressure/io").read_text(encoding="utf-8"))
    except OSError:
        return None


def stalled_s(pressure: str) -> float | None:
    """Return the time in which no work went on, from one of the kernel's pressure files."""
    found = re.search(r"^full .*total=(\d+)", pressure, re.MULTILINE)
    return int(found[1]) / 1e6 if found else None


@asynccontextmanager
async def started(name: str, folder: Path, *command: str) -> AsyncIterator[Measured]:
    """Run a process until the context is left."""
    child = await Measured.start(name, folder, *command)
    try:
        yield child
    finally:
        await child.end()


def started_module(name: str, folder: Path, module: str, *arguments: str) -> AbstractAsyncContextManager[Measured]:
    """Run `python -m module` likewise."""
    return started(name, folder, sys.executable, "-m", module, *arguments)


@asynccontextmanager
async def serving(folder: Path, store: str, *options: str) -> AsyncIterator[tuple[Measured, dict[str, Any]]]:
    """Run `serve` on `store`, with more `options`; yield the process and its first line of JSON."""
    where = ("--listen", "127.0.0.1:0", "--metrics", "off", "--store", store)
    command = ("serve", *where, *options, "--json", "--log-level", "warning")
    async with started("broker", folder, sys.executable, "-m", "timeline", *command) as child:
        yield child, json.loads(await child.line())


@asynccontextmanager
async def broker(folder: Path, store: str, *options: str) -> AsyncIterator[tuple[Measured, str]]:
    """Run a broker likewise; yield the process and its address."""
    async with serving(folder, store, *options) as (child, ready):
        yield child, str(ready["listen"])


@dataclass(frozen=True, slots=True)
class Hot:
    """A function, with its own share of a process's samples, and that of all that it calls."""

    function: str
    own: float
    whole: float


@dataclass(slots=True)
class Profile:
    """Samples of processes. `hottest`: functions by process name, largest own share first."""

    folder: Path
    hottest: dict[str, list[Hot]] = field(default_factory=dict)

    @asynccontextmanager
    async def of(self, processes: dict[str, int]) -> AsyncIterator[None]:
        """Sample `processes` (name → pid) inside the context. Raises CannotMeasure without py-spy."""
        spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if spy is None:
            raise CannotMeasure("--profile needs py-spy, which is not installed: pip install py-spy")
        spies = {
            name: await asyncio.create_subprocess_exec(
                spy, "record", "--nonblocking", "--format", "raw", "--rate", str(SAMPLES_PER_S), "--pid", str(pid),
                "--duration", str(LONGEST_PROFILE_S), "--output", str(self._file(name)),
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
        """Return a line for each of the hottest functions, and for a process without samples."""
        found = []
        for name, hot in self.hottest.items():
            found += [f"{name}: {one.own:.1%} own, {one.whole:.1%} in all: {one.function}" for one in hot[:HOT_SHOWN]]
            if not hot:
                found.append(f"{name}: py-spy took no samples: it needs the right to trace processes (ptrace, root)")
        return found

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.stacks"


def hottest(file: Path) -> list[Hot]:
    """Return the functions of a file of raw stacks (`a;b;c count` per line), largest own share first."""
    own: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        stack, _, count = line.rpartition(" ")
        # Without line numbers, and without folders that say nothing.
        frames = [_FRAME.sub(r"\1 (\2)", frame) for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        for frame in set(frames):
            whole[frame] += int(count)
    total = own.total()
    return [Hot(name, many / total, whole[name] / total) for name, many in own.most_common()]
