"""The fixture `servers`: this test worker's one server of each kind, started when a test first asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from tests.servers.disk import server_folder
from tests.servers.process import Server
from tests.services import require_service

S = TypeVar("S", bound=Server)


class Running:
    """The servers of this worker."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[type[Server], Server] = {}
        self._tries = 0

    def url(self, kind: type[S]) -> str:
        """Where a server of this kind runs: the one that TIMELINE_TEST_<NAME>_URL names, else our own. Skips the test,
        or fails it where it is required, when it is not installed."""
        given = os.environ.get(f"TIMELINE_TEST_{kind.name.upper()}_URL")
        return given or self.server(kind).url

    def server(self, kind: type[S]) -> S:
        """Our own server of this kind."""
        server = self._servers.get(kind)
        if server is None:
            require_service(kind.name)
            server = self._started(kind)
        assert isinstance(server, kind)
        return server

    def _started(self, kind: type[S]) -> S:
        """A new server in a folder of its own. One that fails to start leaves nothing behind for the next try."""
        self._tries += 1
        server = kind(self._folder / f"{kind.name}-{self._tries}")
        try:
            self._servers[kind] = server.start()
        except BaseException:
            server.kill()
            raise
        return server

    def end(self) -> None:
        """Ends them all."""
        for server in self._servers.values():
            server.stop()


def running() -> Iterator[Running]:
    """The fixture `servers` of tests/conftest.py."""
    with server_folder() as folder:
        servers = Running(folder)
        try:
            yield servers
        finally:
            servers.end()
