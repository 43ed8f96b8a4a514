"""One worker of `serve --workers`: its settings come from its supervisor through standard input, and so does what it
hears of the others. When that ends, the supervisor is gone, and the worker drains."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from timeline.config import ServeConfig
from timeline.sync import Membership, make_membership
from timeline.sync.workers import BEAT_S, Message, WorkerMembership

log = logging.getLogger("timeline.broker")
MOST_UNSENT_BYTES = 1 << 20
LINE_BYTES = 1 << 26


class WorkerProcess:
    """This process as a worker. `config`: its own settings."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self._local = config.sync.startswith("local://")
        self.membership: Membership = WorkerMembership(self.tell) if self._local else make_membership(config.sync)
        self._out: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, supervisor_gone: Callable[[], None]) -> None:
        """Hears and tells from now on. `supervisor_gone` is called once standard input ends."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout.buffer)
        self._out = asyncio.StreamWriter(transport, protocol, None, loop)
        self._tasks = [loop.create_task(self._hear(reader, supervisor_gone)), loop.create_task(self._beat())]

    async def stop(self) -> None:
        """Hears nothing more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._out is not None:
            self._out.close()

    def tell(self, message: Message) -> None:
        """A line to the supervisor; lost when that has stopped reading, or is gone."""
        if self._out is not None and self._out.transport.get_write_buffer_size() < MOST_UNSENT_BYTES:
            self._out.write(json.dumps(message).encode() + b"\n")

    async def _hear(self, reader: asyncio.StreamReader, supervisor_gone: Callable[[], None]) -> None:
        try:
            while line := await reader.readline():
                if isinstance(self.membership, WorkerMembership):
                    self.membership.hear(json.loads(line))
            log.warning("the supervisor is gone: this worker drains")
        except Exception:
            log.exception("what the supervisor says cannot be followed: it drains, and another takes its place")
        if isinstance(self.membership, WorkerMembership):
            self.membership.lost()
        supervisor_gone()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self.tell({"say": "beat"})


def settings_from_supervisor() -> ServeConfig:
    """The first line of standard input. Raises ValueError for anything but a supervisor's."""
    # Unbuffered, byte by byte: what comes behind the line is the event loop's to read.
    line = bytearray()
    descriptor = sys.stdin.fileno()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise ValueError("standard input ended before the settings")
        line += byte
    return ServeConfig(**json.loads(line))


def settings_line(config: ServeConfig) -> bytes:
    """What `settings_from_supervisor` reads."""
    said: dict[str, Any] = dataclasses.asdict(config)
    return json.dumps(said).encode() + b"\n"
