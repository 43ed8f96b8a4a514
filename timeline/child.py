"""A process of ours: started with pipes, heard line by line, ended by its own id. The demo and the benchmarks start
their brokers, clients and peers so."""

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
"""What a process may take to say that it is ready: a broker reads a store of many million messages first."""
END_S = 15.0
"""What it may take to end after SIGTERM."""
LOG_SHOWN_LINES = 5


def send_signal(process: asyncio.subprocess.Process, number: int) -> None:
    """Sends a signal to a process that has not ended; to one that has, nothing.

    Not by `Process.send_signal`: that looks first whether the process has ended and, if so, takes its exit code from
    the kernel, before asyncio's own thread that waits for it, which then tells 255 for the code."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended this moment
            os.kill(process.pid, number)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody uses now."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


URLS = ("--store", "--sync", "--journal")
"""Options of `serve` that may hold a password, which others would read in the list of processes."""


class Child:
    """A child process. `log`: the file that has its standard error. Subclasses say in `trouble` what is raised when it
    does not do what it is there for."""

    trouble: ClassVar[type[TimelineError]] = TimelineError

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name, self.process, self.log = name, process, log

    @classmethod
    async def start(cls, name: str, folder: Path, *command: str) -> Self:
        """Starts `command`, its log in `folder`. In a session of its own: Ctrl-C in the terminal reaches us alone, who
        end it in order. What the environment says about other brokers is not meant for it. URLs of a broker's settings
        are handed over as variables."""
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
        """The end of its log, on one line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-LOG_SHOWN_LINES:]) or "it said nothing"

    async def line(self, within_s: float = START_S) -> str:
        """The next line of its standard output. Raises `trouble` when it ends, or says nothing in time."""
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
        """A line to its standard input. Raises ConnectionError when it has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        await self.process.stdin.drain()

    async def end(self, within_s: float = END_S) -> int:
        """Asks it to end; its exit code. What does not end in time is killed (and answers -9)."""
        if self.running:
            send_signal(self.process, signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), within_s)
            except TimeoutError:
                await self.kill()
        assert self.process.returncode is not None
        return self.process.returncode

    async def kill(self) -> None:
        """Ends it at once."""
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
