"""A server process: prepared, started, awaited, killed, stopped and started again on the same data."""

from __future__ import annotations

import errno
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

START_S = 90.0
"""A server that is not ready by then has failed; nothing is measured by it."""
STOP_S = 30.0
LOOK_S = 0.02
LOG_SHOWN_LINES = 15

LEAST_PORT, MOST_PORT = 12_000, 32_767
MOST_WORKERS = 16
_given: set[int] = set()


def free_port() -> int:
    """A port that nobody uses now, below those that the kernel gives to connections: what is to listen there in a
    while, or again after a kill, does not find somebody's connection on it. No port is given twice, and each test
    worker has a share of its own: between this look and the listening nobody else takes it."""
    share = (MOST_PORT + 1 - LEAST_PORT) // MOST_WORKERS
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_WORKERS
    while True:
        port = LEAST_PORT + worker * share + secrets.randbelow(share)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as taken:
                if taken.errno != errno.EADDRINUSE:
                    raise
            else:
                _given.add(port)
                return port


class Server(ABC):
    """One server. Subclasses say what to run, how its folder is prepared, and when it is ready. `user`: who runs it,
    where the tests run as root and the server refuses that. `stop_signal`: what ends it in order without
    waiting for those who are connected."""

    name: ClassVar[str]
    user: ClassVar[str] = ""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.is_prepared = False

    @property
    @abstractmethod
    def url(self) -> str:
        """The store's URL of a fresh, empty database of this server."""

    @property
    @abstractmethod
    def command(self) -> Sequence[str]:
        """What runs in the foreground."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether it answers now; must not raise for one that does not yet."""

    def prepare(self) -> None:  # noqa: B027 (most need nothing)
        """Makes what the first start needs in `folder`."""

    @property
    def environment(self) -> dict[str, str]:
        """What it finds in its environment besides ours."""
        return {}

    @property
    def log(self) -> Path:
        """Where its output goes."""
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    def run(self, *command: str) -> None:
        """Runs a preparing command as the server's user. Raises with what it said."""
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, **self._as_user())
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")

    def start(self) -> Self:
        """Starts it and returns once it is ready. Raises with the end of its log when it ends or does not get ready."""
        self.launch()
        return self.await_ready()

    def launch(self) -> None:
        """Starts it, where it does not run, and does not wait."""
        if self.process is not None and self.process.poll() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.is_prepared:
            if self._as_user():
                shutil.chown(self.folder, self.user)
            self.prepare()
            self.is_prepared = True
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                list(self.command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.folder,
                env={**os.environ, **self.environment},
                start_new_session=True,
                **self._as_user(),
            )

    def await_ready(self) -> Self:
        """Returns once it is ready; raises as `start` does."""
        assert self.process is not None
        for _ in range(int(START_S / LOOK_S)):
            if self._ended(LOOK_S):
                raise RuntimeError(f"{self.name} ended with {self.process.returncode}: {self.last_words()}")
            if self.ready():
                return self
        self.kill()
        raise RuntimeError(f"{self.name} was not ready after {START_S:g} s: {self.last_words()}")

    def stop(self) -> None:
        """Ends it in order; kills it when that takes too long. Harmless when it is not running."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(self.stop_signal)
            if not self._ended(STOP_S):
                self.kill()

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to this process alone."""
        os.kill(self.pid, number)

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join(lines[-LOG_SHOWN_LINES:]) or "it said nothing"

    def accepts(self) -> bool:
        """Whether its port takes a connection."""
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def _as_user(self) -> dict[str, str]:
        if not self.user or os.getuid() != 0:
            return {}
        pwd.getpwnam(self.user)  # says whose account is missing
        return {"user": self.user, "group": self.user}

    def _ended(self, within_s: float) -> bool:
        assert self.process is not None
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True
