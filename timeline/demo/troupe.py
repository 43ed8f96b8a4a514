"""The demo's processes: starts them, tells them to begin, notices how they end, and leaves none behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from timeline.demo.part import GO, READY
from timeline.errors import TimelineError

START_S = 30.0
"""What a process may take to say that it is ready."""
END_S = 15.0
"""What it may take to end after SIGTERM."""
LOG_SHOWN_LINES = 5


class CannotPlay(TimelineError):
    """A process of the demo could not be started, or died; the text says which, and what it said last."""

    code = "CANNOT_PLAY"


@dataclass(slots=True)
class Player:
    """One child process. `log`: the file that has its standard error."""

    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    def last_words(self) -> str:
        """The end of its log, on one line."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " / ".join(line.strip() for line in lines[-LOG_SHOWN_LINES:]) or "it said nothing"

    async def line(self) -> str:
        """The next line of its standard output. Raises CannotPlay when it ends or says nothing for START_S."""
        assert self.process.stdout is not None
        try:
            said = await asyncio.wait_for(self.process.stdout.readline(), START_S)
        except TimeoutError:
            raise CannotPlay(f"{self.name} did not get ready within {START_S:g} s: {self.last_words()}") from None
        if not said:
            await self.process.wait()
            raise CannotPlay(f"{self.name} ended with code {self.process.returncode}: {self.last_words()}")
        return said.decode().strip()

    async def go(self) -> None:
        """Lets it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{GO}\n".encode())
        await self.process.stdin.drain()

    async def end(self, within_s: float = END_S) -> int:
        """Asks it to end; its exit code. What does not end in time is killed (and answers -9)."""
        if self.running:
            self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), within_s)
            except TimeoutError:
                await self.kill()
        assert self.process.returncode is not None
        return self.process.returncode

    async def kill(self) -> None:
        """Ends it at once."""
        if self.running:
            self.process.kill()
            await self.process.wait()


class Troupe:
    """All child processes of one demo, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.players: list[Player] = []

    async def broker(self, store: str) -> tuple[Player, str]:
        """Starts a broker on free ports; the process and the address it listens on."""
        free = "127.0.0.1:0"
        player = await self._start(
            "broker", "timeline.demo.broker", "serve", "--listen", free, "--metrics", free, "--store", store, "--json"
        )
        return player, str(json.loads(await player.line())["listen"])

    async def part(self, name: str, module: str, *arguments: object) -> Player:
        """Starts `python -m timeline.demo.<module> FOLDER <arguments>`."""
        return await self._start(name, f"timeline.demo.{module}", str(self.folder), *map(str, arguments))

    async def ready(self, *players: Player) -> None:
        """Waits until all of them could begin. Raises CannotPlay."""
        for player in players:
            said = await player.line()
            if said != READY:
                raise CannotPlay(f"{player.name} said {said!r} instead of {READY}")

    async def kill(self) -> None:
        """Ends all that still runs, at once."""
        for player in self.players:
            await player.kill()

    async def _start(self, name: str, module: str, *arguments: str) -> Player:
        log = self.folder / f"{name}.log"
        # A session of its own: Ctrl-C in the terminal reaches the conductor alone, which ends the others in order. What
        # the environment says about other brokers is not meant for the demo's.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIMELINE_")}
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                start_new_session=True, env=environment,
            )  # fmt: skip
        player = Player(name, process, log)
        self.players.append(player)
        return player
