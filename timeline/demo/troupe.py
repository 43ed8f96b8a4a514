"""The demo's processes: starts them, tells them to begin, notices how they end, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path

from timeline.child import Child
from timeline.demo.part import GO, READY
from timeline.errors import TimelineError

START_S = 30.0
"""What a process may take to say that it is ready."""


class CannotPlay(TimelineError):
    """A process of the demo could not be started, or died; the text says which, and what it said last."""

    code = "CANNOT_PLAY"


class Player(Child):
    """A process of the demo."""

    trouble = CannotPlay

    async def first_line(self) -> str:
        """What it says first. Raises CannotPlay."""
        return await self.line(START_S)

    async def go(self) -> None:
        """Lets it begin."""
        await self.tell(GO)


class Backstage(Player):
    """A server that brokers need, and what runs it."""

    async def kill(self) -> None:
        """Ends both at once."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):  # it has ended this moment
                os.killpg(self.pid, signal.SIGKILL)
            await self.process.wait()


class Troupe:
    """All child processes of one demo, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.players: list[Player] = []

    async def broker(self, store: str, name: str = "broker", *options: str) -> tuple[Player, str]:
        """Starts a broker on free ports, with more `options` of serve; the process and the address it listens on."""
        free = "127.0.0.1:0"
        flags = ("serve", "--listen", free, "--metrics", free, "--store", store, "--json", *options)
        player = await self._start(Player, name, "timeline.demo.broker", *flags)
        return player, str(json.loads(await player.first_line())["listen"])

    async def server(self, name: str, *command: str) -> Player:
        """Starts a server that brokers need."""
        return await self._start(Backstage, name, "timeline.demo.servers", *command)

    async def part(self, name: str, module: str, *arguments: object) -> Player:
        """Starts `python -m timeline.demo.<module> FOLDER <arguments>`."""
        return await self._start(Player, name, f"timeline.demo.{module}", str(self.folder), *map(str, arguments))

    async def ready(self, *players: Player) -> None:
        """Waits until all of them could begin. Raises CannotPlay."""
        for player in players:
            said = await player.first_line()
            if said != READY:
                raise CannotPlay(f"{player.name} said {said!r} instead of {READY}")

    async def kill(self) -> None:
        """Ends all that still runs, at once."""
        for player in self.players:
            await player.kill()

    async def _start(self, kind: type[Player], name: str, module: str, *arguments: str) -> Player:
        player = await kind.start(name, self.folder, sys.executable, "-m", module, *arguments)
        self.players.append(player)
        return player
