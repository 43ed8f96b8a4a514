"""Redis as a process: with an append-only file that is synced each second, as its documentation recommends."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from tests.servers.process import Server


class RedisServer(Server):
    """One Redis. `settings`: more of its options, as they stand on a command line."""

    name = "redis"

    def __init__(self, folder: Path, *settings: str) -> None:
        super().__init__(folder)
        self.settings = settings

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def command(self) -> Sequence[str]:
        plain = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), "--save", "")
        return ["redis-server", *plain, "--appendonly", "yes", "--appendfsync", "everysec", *self.settings]

    def ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as asked:
                asked.sendall(b"PING\r\n")
                return asked.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False
