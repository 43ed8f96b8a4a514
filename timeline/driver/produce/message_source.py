"""What a program gives to be put, message by message: iterated where it may raise, and ended in order when it does."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any, TypeAlias

from timeline.driver.message import Message
from timeline.errors import Invalid

Pending: TypeAlias = deque[tuple[asyncio.Task[Any], int]]
"""Puts under way, the oldest first, and the bytes of each."""
YIELD_EVERY = 256


class MessageSource:
    """The messages of one `produce_iter`. What their iteration raises, or what is among them and no message, ends it;
    `check` raises it once what came before is told."""

    def __init__(self, messages: Any) -> None:
        if not isinstance(messages, AsyncIterable | Iterable):
            kind = type(messages).__name__
            raise Invalid(f"produce_iter takes an iterable, or async iterable, of timeline.Message, not {kind}")
        self._messages = messages
        self._broke: Exception | None = None

    def check(self) -> None:
        """Raises what broke it."""
        if self._broke is not None:
            raise self._broke

    def plainly(self) -> Iterator[Message]:
        """The messages of an iterable."""
        if not isinstance(self._messages, Iterable):
            raise Invalid("the synchronous produce_iter takes an iterable of timeline.Message, not an asynchronous one")
        try:
            for message in self._messages:
                yield _checked(message)
        except Exception as broke:
            self._broke = broke

    def each(self, pending: Pending) -> AsyncIterator[Message | None]:
        """The messages one by one; None whenever the oldest of `pending` is done before the next message is there."""
        if isinstance(self._messages, AsyncIterable):
            return self._awaited(aiter(self._messages), pending)
        return self._read()

    async def _read(self) -> AsyncIterator[Message | None]:
        for number, message in enumerate(self.plainly(), 1):
            yield message
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)  # lets what was made so far be sent

    async def _awaited(self, source: AsyncIterator[Message], pending: Pending) -> AsyncIterator[Message | None]:
        coming: asyncio.Future[Message] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(_next(source))
                waited: set[asyncio.Future[Any]] = {coming}
                if pending:
                    waited.add(pending[0][0])
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    yield None
                    continue
                try:
                    message = _checked(coming.result())
                except StopAsyncIteration:
                    return
                except Exception as broke:
                    self._broke = broke
                    return
                coming = None
                yield message
        finally:
            if coming is not None and not coming.done():
                coming.cancel()


async def _next(source: AsyncIterator[Message]) -> Message:
    """The next one. A coroutine of ours, so that what is wrong with the source comes where what it raises does."""
    coming = anext(source)
    if not inspect.isawaitable(coming):
        raise Invalid(f"produce_iter takes an async iterable, whose __anext__ is awaited; it gave {coming!r:.60}")
    return await coming


def _checked(message: object) -> Message:
    if not isinstance(message, Message):
        raise Invalid(f"produce_iter takes timeline.Message, not {type(message).__name__}")
    return message
