"""`local://`: one broker by itself. It is the only member and deals every bucket."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from timeline.sync.membership import Member, Membership


class LocalMembership(Membership):
    """A cluster of one; nothing ever changes."""

    def __init__(self) -> None:
        self._member: Member | None = None

    async def start(self, member: Member) -> None:
        self._member = member

    async def stop(self) -> None:
        self._member = None

    def members(self) -> Sequence[Member]:
        return (self._member,) if self._member else ()

    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        return None

    def on_change(self, callback: Callable[[], None]) -> None:
        """Nothing changes with one broker: `callback` is never called."""
