"""How much room is left where a store keeps its data, for stores that can tell."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Room:
    """In bytes: what is left, and what there is in all."""

    free_bytes: int
    size_bytes: int


@runtime_checkable
class Roomy(Protocol):
    """A store that knows where its data lies. One that does not, has no such method; one that stands before another
    answers None where that does not know."""

    async def room(self) -> Room | None:
        """Raises StoreError, as every call."""


def room_of(path: str | os.PathLike[str]) -> Room:
    """The room of the file system that `path` is on, as a process without privileges finds it. Raises OSError."""
    found = os.statvfs(path)
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
