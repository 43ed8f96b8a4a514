"""Plugins as their authors leave them half-way: `timeline check-store` says what is still to be done."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from timeline.model import Topic
from timeline.storage_plugins.contract import Capabilities, Opened, Store
from timeline.storage_plugins.memory import MemoryStore


class Incomplete(Store):
    """Some methods are not written yet."""

    def __init__(self, url: str) -> None:
        self.capabilities = Capabilities(False, False, False, 1 << 20, False, True)

    async def open(self) -> Opened:
        return Opened("0" * 32, "half a store")

    async def close(self) -> None:
        return None


class _Whole(MemoryStore):
    """All of the contract, for a URL of another scheme."""

    def __init__(self, url: str) -> None:
        super().__init__()


class Hangs(_Whole):
    """A put waits for what never comes."""

    async def put(self, *given: Any) -> Any:
        await asyncio.Event().wait()


class Blocks(_Whole):
    """A put blocks the event loop."""

    async def put(self, *given: Any) -> Any:
        threading.Event().wait()


class OpensNever(_Whole):
    """The server does not answer when it is opened."""

    async def open(self) -> Opened:
        await asyncio.Event().wait()
        return await super().open()


class ClosesNever(_Whole):
    """The server does not answer when it is closed."""

    async def close(self) -> None:
        await asyncio.Event().wait()


class Leaves(_Whole):
    """It ends the program where a store cannot be opened."""

    async def open(self) -> Opened:
        raise SystemExit(0)


class Raises(_Whole):
    """A mistake in a method."""

    async def drop_topic(self, topic: Topic) -> bool:
        raise NotImplementedError("to do: drop")


class Cancels(_Whole):
    """A task of its own is cancelled."""

    async def drop_topic(self, topic: Topic) -> bool:
        raise asyncio.CancelledError


class Plain(_Whole):
    """A method that is no coroutine function."""

    def next_due(self, *given: Any) -> Any:
        return None


def nothing(url: str) -> None:
    """A factory that forgot to return."""


def leaves(url: str) -> None:
    """It ends the program instead of raising."""
    raise SystemExit(0)


def mistaken(url: str) -> Store:
    """A factory with a mistake."""
    raise KeyError(url)
