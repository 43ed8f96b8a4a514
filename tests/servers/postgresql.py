"""PostgreSQL as a process: as Debian ships it, with its own durable settings."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from tests.servers.process import Server

_STARTUP = b"user\0postgres\0database\0postgres\0\0"


def program(name: str) -> str:
    """Where a program of the server is: Debian keeps them off the path."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    return str(found[-1]) if found else shutil.which(name) or name


class PostgresqlServer(Server):
    """One PostgreSQL. `settings`: more of its settings, as `name=value`."""

    name = "postgresql"
    user = "postgres"
    stop_signal = signal.SIGINT

    def __init__(self, folder: Path, *settings: str) -> None:
        super().__init__(folder)
        self.settings = settings

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def command(self) -> Sequence[str]:
        plain = ["-D", str(self.folder / "data"), "-p", str(self.port), "-k", "", "-c", "listen_addresses=127.0.0.1"]
        return [program("postgres"), *plain, *(part for setting in self.settings for part in ("-c", setting))]

    def prepare(self) -> None:
        data = str(self.folder / "data")
        self.run(program("initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")

    def standby(self, *settings: str) -> PostgresqlServer:
        """A streaming standby, yet to start: it begins as a copy of this server, taken while this one runs."""
        return _Standby(self, settings)

    def promote(self) -> None:
        """Makes a standby the primary, and returns once it takes writes."""
        self.run(program("pg_ctl"), "promote", "-w", "-D", str(self.folder / "data"))

    def freeze(self) -> None:
        """It stands still with all its children: what reaches it is not answered, as where its machine is gone."""
        self.signal(signal.SIGSTOP)
        self._tell_children(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on, as if nothing had been."""
        self._tell_children(signal.SIGCONT)
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Waits for its children too: while one of them holds its memory, none other starts in its folder."""
        held = self._children() if self.process is not None and self.process.poll() is None else []
        super().kill()
        for child in held:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGCONT)  # one that stands still sees nothing end
            select.select([child], [], [])
            os.close(child)

    def stop(self) -> None:
        """Also where it stands still."""
        if self.process is not None and self.process.poll() is None:
            self.thaw()
        super().stop()

    def _tell_children(self, number: signal.Signals) -> None:
        for child in self._children():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, number)
            os.close(child)

    def _children(self) -> list[int]:
        """Descriptors of its children, to wait for."""
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii")
        held: list[int] = []
        for child in listed.split():
            with contextlib.suppress(ProcessLookupError):  # It is gone already.
                held.append(os.pidfd_open(int(child)))
        return held

    def ready(self) -> bool:
        """It answers a startup message with what it wants for authentication, or with an error while it starts."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as asked:
                asked.sendall(struct.pack("!ii", 8 + len(_STARTUP), 196608) + _STARTUP)
                return asked.recv(1) == b"R"
        except OSError:
            return False


class _Standby(PostgresqlServer):
    """Follows another server from the moment it is first started."""

    def __init__(self, primary: PostgresqlServer, settings: tuple[str, ...]) -> None:
        super().__init__(primary.folder.with_name("standby"), *settings)
        self._primary = primary

    def prepare(self) -> None:
        primary, data = f"host=127.0.0.1 port={self._primary.port} user=postgres", str(self.folder / "data")
        self.run(program("pg_basebackup"), "-d", primary, "-D", data, "-R", "-c", "fast", "--no-sync")
