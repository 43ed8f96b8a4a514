"""A child process: started with pipes, read line by line, ended by its own id. The demo and the benchmarks start their
brokers, clients and peers this way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path
from typing import ClassVar, Self

from timeline.errors import TimelineError

START_S = 120.0
"""Time for a process to say that it is ready. A broker reads a store of many million messages first."""
END_S = 15.0
"""Time for it to end after SIGTERM."""
LOG_SHOWN_LINES = 5


def send_signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Send a signal to a process, unless it has ended.

    `Process.send_signal` looks first whether the process has ended and, if so, takes its exit code from the kernel.
    Then asyncio's own thread, which waits for it, reports 255 for the code.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended this moment
            os.kill(process.pid, number)


def free_ports(count: int) -> list[int]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


URLS = ("--store", "--sync", "--journal")
"""Options of `serve` that may hold a password, which others would read in the list of processes."""


class Child:
    """A child process. `log`: the file with its standard error. Subclasses name in `trouble` the error of its
    failures."""

    trouble: ClassVar[type[TimelineError]] = TimelineError

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.process, self.log = name, process, log

    @classmethod
    async def start(cls, name: str, folder: Path, *command: str) -> Self:
        """Start `command`, its log in `folder`.

        It has a session of its own: Ctrl-C in the terminal reaches only us, who end it in order. TIMELINE_* variables
        of the environment are left out. URLs of a broker's settings become variables.
        """
        log = folder / f"{name}.log"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TIMELINE_")}
        command, urls = _apart(command)
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=environment | urls,
            )
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def last_words(self) -> str:
        """Return the end of its log, on one line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-LOG_SHOWN_LINES:]) or "it said nothing"

    async def line(self, within_s: float = START_S) -> str:
        """Return the next line of its standard output. Raise `trouble` if it ends, or prints nothing in time."""
        assert self.process.stdout is not None
        try:
            said = await asyncio.wait_for(self.process.stdout.readline(), within_s)
        except TimeoutError:
            raise self.trouble(f"{self.name} said nothing within {within_s:g} s: {self.last_words()}") from None
        if not said:
            await self.process.wait()
            raise self.trouble(f"{self.name} ended with code {self.process.returncode}: {self.last_words()}")
        return said.decode().strip()

    async def tell(self, line: str) -> None:
        """Send a line to its standard input. Raise ConnectionError if it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()

    async def end(self, within_s: float = END_S) -> int:
        """Ask it to end, and return its exit code. It is killed if it does not end in time (-9)."""
        if self.running:
            send_signal(self.process, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), within_s)
            except TimeoutError:
                await self.kill()
        assert self.process.returncode is not None
        return self.process.returncode

    async def kill(self) -> None:
        """End it at once."""
        if self.running:
            send_signal(self.process, signal.SIGKILL)
            await self.process.wait()


def _apart(command: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command without the URLs of `serve`, and these as its variables."""
    kept: list[str] = []
    urls: dict[str, str] = {}
    words = iter(command)
    for word in words:
        if word in URLS and "serve" in kept:
            urls[f"TIMELINE_{word.removeprefix('--').upper()}"] = next(words)
        else:
            kept.append(word)
    return tuple(kept), urls
