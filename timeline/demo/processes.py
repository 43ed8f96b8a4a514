"""The demo's processes: starts them, tells them to begin, notices how they end, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from timeline.child import Child
from timeline.demo.plan import GO, READY
from timeline.errors import TimelineError

START_S = 30.0
"""What a process may take to say that it is ready."""


class CannotPlay(TimelineError):
    """A process of the demo could not be started, or died; the text says which, and what it said last."""

    code = "CANNOT_PLAY"


class DemoChild(Child):
    """A process of the demo."""

    trouble = CannotPlay

    async def first_line(self) -> str:
        """What it says first. Raises CannotPlay."""
        return await self.line(START_S)

    async def go(self) -> None:
        """Lets it begin."""
        await self.tell(GO)


class ServerChild(DemoChild):
    """A server that brokers need, and what runs it."""

    async def kill(self) -> None:
        """Ends both at once."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                os.killpg(self.pid, signal.SIGKILL)
            await self.process.wait()


class DemoProcesses:
    """All child processes of one demo, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[DemoChild] = []

    async def broker(self, store: str, name: str = "broker", *options: str) -> tuple[DemoChild, str]:
        """Starts a broker on free ports, with more `options` of serve; the process and the address it listens on."""
        free = "127.0.0.1:0"
        flags = ("serve", "--listen", free, "--metrics", free, "--store", store, "--json", *options)
        child = await self._start(DemoChild, name, "timeline.demo.servers", *flags)
        return child, str(json.loads(await child.first_line())["listen"])

    async def server(self, name: str, *command: str) -> DemoChild:
        """Starts a server that brokers need."""
        return await self._start(ServerChild, name, "timeline.demo.servers", *command)

    async def role(self, name: str, role: str, *numbers: int) -> DemoChild:
        """Starts `python -m timeline.demo.roles ROLE FOLDER NUMBER …`."""
        return await self._start(DemoChild, name, "timeline.demo.roles", role, str(self.folder), *map(str, numbers))

    async def ready(self, *children: DemoChild) -> None:
        """Waits until all of them could begin. Raises CannotPlay."""
        for child in children:
            said = await child.first_line()
            if said != READY:
                raise CannotPlay(f"{child.name} said {said!r} instead of {READY}")

    async def kill(self) -> None:
        """Ends all that still runs, at once."""
        for child in self.children:
            await child.kill()

    async def _start(self, kind: type[DemoChild], name: str, module: str, *arguments: str) -> DemoChild:
        child = await kind.start(name, self.folder, sys.executable, "-m", module, *arguments)
        self.children.append(child)
        return child
