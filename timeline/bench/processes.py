"""The processes that are measured: brokers, feeders and peers, on free ports, each ended by its own id."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from timeline.errors import TimelineError

START_S = 120.0
"""What a process may take to say that it is ready: a broker reads a store of many million messages first."""
END_S = 15.0
LOG_SHOWN_LINES = 5
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


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Child:
    """A process of ours. `log`: the file that has its standard error."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.process, self.log = name, process, log

    @classmethod
    async def start(cls, name: str, folder: Path, *command: str) -> Child:
        """Starts `command`. What the environment says about other brokers is not meant for it."""
        log = folder / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TIMELINE_")}
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=environment,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self.process.pid

    def last_words(self) -> str:
        """The end of its log, on one line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-LOG_SHOWN_LINES:]) or "it said nothing"

    async def line(self, within_s: float = START_S) -> str:
        """The next line of its standard output. Raises CannotMeasure when it ends, or says nothing in time."""
        assert self.process.stdout is not None
        try:
            said = await asyncio.wait_for(self.process.stdout.readline(), within_s)
        except TimeoutError:
            raise CannotMeasure(f"{self.name} said nothing within {within_s:g} s: {self.last_words()}") from None
        if not said:
            await self.process.wait()
            raise CannotMeasure(f"{self.name} ended with code {self.process.returncode}: {self.last_words()}")
        return said.decode().strip()

    def tell(self, line: str) -> None:
        """A line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    async def end(self) -> None:
        """Asks it to end, and kills it when it does not."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), END_S)
            except TimeoutError:
                self.process.kill()
        await self.process.wait()

    def cpu_s(self) -> float:
        """Processor time it has used."""
        return cpu_s(self.pid)

    def resident_bytes(self) -> int:
        """Memory of it that is in RAM now."""
        for line in Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise CannotMeasure(f"{self.name} has ended: {self.last_words()}")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, its own and the system's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def start_broker(folder: Path, store: str, listen: str = "127.0.0.1:0") -> tuple[Child, str]:
    """A broker on `store`; the process and its address."""
    command = (sys.executable, "-m", "timeline", "serve", "--listen", listen, "--metrics", "off", "--store", store)
    child = await Child.start("broker", folder, *command, "--json", "--log-level", "warning")
    try:
        return child, str(json.loads(await child.line())["listen"])
    except BaseException:
        await child.end()
        raise


@asynccontextmanager
async def broker(folder: Path, store: str) -> AsyncIterator[tuple[Child, str]]:
    """A broker for the length of a measurement."""
    child, address = await start_broker(folder, store)
    try:
        yield child, address
    finally:
        await child.end()
