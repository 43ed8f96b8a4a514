"""A coroutine that goes on whether or not somebody still waits for it, without a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Begun:
    """`work`, begun at once and carried on by the futures it waits for; `wait` for its end as often as you like.

    A task behind a shield promises the same, for three more turns of the event loop: it begins a turn later, its end
    is told a turn later, and the shield tells it on another later. A broker writes two frames a message at least, and
    each turn costs some 10 µs of them (`/design-docs/decisions.md`).
    """

    __slots__ = ("_error", "_waiters", "_work", "over")

    def __init__(self, work: Coroutine[Any, Any, object]) -> None:
        self._work = work
        self._waiters: list[asyncio.Future[None]] = []
        self._error: BaseException | None = None
        self.over = False
        self._step(None)

    def _step(self, _: object) -> None:
        """What a task does when it is woken: on with the coroutine, up to the next future that it waits for."""
        try:
            awaited = self._work.send(None)
        except StopIteration:
            self._end(None)
        except (Exception, asyncio.CancelledError) as error:
            self._end(error)
        else:
            if awaited is None:  # it only gives way for a turn
                asyncio.get_running_loop().call_soon(self._step, None)
            else:
                # A future that is waited for says so until whoever drives the coroutine has seen it.
                awaited._asyncio_future_blocking = False
                awaited.add_done_callback(self._step)

    def _end(self, error: BaseException | None) -> None:
        self.over, self._error = True, error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when it is over; raises what it ended with. Whoever waits may be cancelled: it goes on."""
        if not self.over:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
        if self._error is not None:
            raise self._error
