"""The context that all parts of one client share: channel, clock, randomness, timeout, and process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Protocol

from timeline.clock import Clock
from timeline.driver.consume.broker_clock import Drift
from timeline.driver.message import Ids, Randomness
from timeline.driver.tasks import all_of, keep
from timeline.driver.times import Duration, duration_ms
from timeline.driver.transport.channel import Channel, Deadline
from timeline.errors import Closed, Invalid, Unavailable

_left_behind: list[object] = []
"""Objects of the process that this one was forked from."""

CLIENT_CLOSED = "the client was closed. Connect again"
FORKED = "this delivery belongs to the process that this one was forked from"


class Leaver(Protocol):
    """A session that can leave its broker in order."""

    async def stop(self, timeout_ms: float) -> None: ...


class ClientContext:
    """Shared by a client and its producers and consumers.

    `epoch` grows in a forked child, and in another event loop after the first one has ended. New connections and tasks
    are made then; those of the epoch before are left alone.
    """

    def __init__(self, channel: Channel, clock: Clock, random: Randomness, timeout_ms: float) -> None:
        self.channel = channel
        self.clock = clock
        self.random = random
        self.ids = Ids(clock, random)
        self.timeout_ms = timeout_ms
        self.drift = Drift()
        self.epoch = 0
        self.closed = False
        self._parting: set[Leaver] = set()
        self._pid = os.getpid()
        self._forked = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def closed_error(self, otherwise: str = "") -> Closed:
        """Return the error of a call on something closed: the client, or what `otherwise` says."""
        return Closed(CLIENT_CLOSED if self.closed else otherwise)

    def check(self) -> None:
        """Check each use. Raise Closed after `aclose`, and Invalid in a second event loop while the first one runs."""
        if self.closed:
            raise self.closed_error()
        loop = asyncio.get_running_loop()
        pid = os.getpid()
        if loop is self._loop and pid == self._pid:
            return
        if self._loop is not None:
            if pid == self._pid and not self._loop.is_closed():
                raise Invalid(
                    "this client is used in another event loop already: make one client for each loop, "
                    "or use timeline.connect_sync, which serves all threads"
                )
            if pid != self._pid:
                self.leave_behind(self.channel.transports, self._parting)
            self._parting = set()
            self.channel.abandon()
            self.epoch += 1
            self._forked = self._forked or pid != self._pid
        self._loop, self._pid = loop, pid

    @property
    def here(self) -> bool:
        """Whether this is the process of its last use, and no child of it."""
        return os.getpid() == self._pid

    def part(self, session: Leaver) -> None:
        """Have `session` leave in order, though its producer or consumer is not used any more. Closing the client waits
        for it. Any thread may call."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        self._parting.add(session)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: keep(self._leave(session), "an abandoned producer or consumer leaves"))

    async def _leave(self, session: Leaver) -> None:
        try:
            await session.stop(self.timeout_ms)
        finally:
            self._parting.discard(session)

    async def parted(self) -> None:
        """Return once all sessions of `part` have left."""
        await all_of(*(self._leave(session) for session in list(self._parting)))

    def trouble(self) -> Unavailable:
        """Return why nothing can be sent."""
        return self.channel.unreached()

    def leave_behind(self, *things: object) -> None:
        """Keep `things` alive in a forked child. Their end would call into the parent's gRPC."""
        if self._forked or os.getpid() != self._pid:
            _left_behind.extend(things)

    def deadline(self, timeout: Duration | None) -> Deadline:
        """Return the deadline of a call with `timeout=`."""
        return Deadline.after(self.clock, self.patience_ms(timeout))

    def patience_ms(self, timeout: Duration | None) -> float:
        """Return `timeout=` of a call in ms. None: the client's."""
        return self.timeout_ms if timeout is None else float(duration_ms(timeout, "timeout", least_ms=1))
