"""The processes that are measured: brokers, feeders and peers, on free ports, each ended by its own id."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from timeline.child import Child
from timeline.errors import TimelineError

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class CannotMeasure(TimelineError):
    """A measurement could not be taken: a process did not start or died, or the settings make no sense here."""

    code = "CANNOT_MEASURE"


@asynccontextmanager
async def within(patience_s: float, what: str) -> AsyncIterator[None]:
    """What is awaited inside may take so long. Raises CannotMeasure, saying that `what` never came."""
    try:
        async with asyncio.timeout(patience_s):
            yield
    except TimeoutError:
        raise CannotMeasure(f"{what} never came, {patience_s:g} s were waited for it") from None


class Measured(Child):
    """A process that is measured."""

    trouble = CannotMeasure

    def cpu_s(self) -> float:
        """Processor time it has used."""
        return cpu_s(self.pid)

    def resident_bytes(self) -> int:
        """Memory of it that is in RAM now."""
        try:
            return resident_bytes(self.pid)
        except CannotMeasure as ended:
            raise CannotMeasure(f"{self.name} has ended: {self.last_words()}") from ended


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in RAM now. Raises CannotMeasure when it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise CannotMeasure(f"process {pid} has ended")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, its own and the system's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def disk_stalled_s() -> float | None:
    """For how long, since the machine started, all that had work waited for a disk. None where the kernel does not
    say: Linux does from 4.20 on, in `/proc/pressure/io`, unless that is turned off."""
    try:
        return stalled_s(Path("/proc/pressure/io").read_text(encoding="utf-8"))
    except OSError:
        return None


def stalled_s(told: str) -> float | None:
    """What one of the kernel's files on pressure says of times when nothing that had work went on; None: nothing."""
    for line in told.splitlines():
        kind, _, numbers = line.partition(" ")
        total_us = numbers.rpartition("total=")[2]
        if kind == "full" and total_us.isdecimal():
            return int(total_us) / 1e6
    return None


async def start_serving(
    folder: Path, store: str, listen: str = "127.0.0.1:0", *options: str
) -> tuple[Measured, dict[str, Any]]:
    """`serve` on `store`, with more `options`; the process and what it says of itself once it serves."""
    where = ("--listen", listen, "--metrics", "off", "--store", store)
    command = (sys.executable, "-m", "timeline", "serve", *where, *options)
    child = await Measured.start("broker", folder, *command, "--json", "--log-level", "warning")
    try:
        said: dict[str, Any] = json.loads(await child.line())
    except BaseException:
        await child.end()
        raise
    return child, said


async def start_broker(folder: Path, store: str, listen: str = "127.0.0.1:0", *options: str) -> tuple[Measured, str]:
    """A broker on `store`, with more `options` of serve; the process and its address."""
    child, said = await start_serving(folder, store, listen, *options)
    return child, str(said["listen"])


@asynccontextmanager
async def broker(folder: Path, store: str, *options: str) -> AsyncIterator[tuple[Measured, str]]:
    """A broker for the length of a measurement."""
    child, address = await start_broker(folder, store, "127.0.0.1:0", *options)
    try:
        yield child, address
    finally:
        await child.end()
