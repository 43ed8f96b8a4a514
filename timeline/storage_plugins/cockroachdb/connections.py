"""Connections at work: a transaction that another one made impossible is done again, later and later, never in step."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import ClassVar

from timeline.storage_plugins.cockroachdb.words import Worded
from timeline.storage_plugins.postgresql.connections import Connection, Connections, Qualified
from timeline.storage_plugins.postgresql.location import Location
from timeline.storage_plugins.postgresql.numbers import Numbers

FIRST_MS, CAP_MS = 10, 500
SETTINGS = {"application_name": "timeline", "default_transaction_isolation": "serializable"}
_ROW_BITS = 63


class RandomNumbers(Numbers):
    """Row numbers without a sequence, which all nodes would have to agree on: random ones, which also spread new rows
    over all ranges of the table."""

    async def take(self, connection: Connection, count: int) -> list[int]:
        """`count` of them, each used once."""
        return [secrets.randbits(_ROW_BITS) for _ in range(count)]


class CockroachConnections(Connections):
    """The pool at work, on a server whose every transaction is SERIALIZABLE and may be refused (40001) for another's
    sake: it has been undone, and is done again after a random wait that grows, as often as `tries`. Where the server
    does not know whether it was done (40003), the call is unknown."""

    settings: dict[str, str] = SETTINGS
    apart: ClassVar[bool] = True
    wording: ClassVar[type[Qualified]] = Worded
    tries: ClassVar[int] = 12
    timelines: ClassVar[bool] = False

    def __init__(self, location: Location, renumber: Callable[[], None]) -> None:
        super().__init__(location, renumber)
        # Steps of a migration name tables as the SQL family does, without a schema.
        self.settings = self.settings | {"search_path": location.schema}

    async def _again(self, error: BaseException, attempt: int) -> bool:
        again = await super()._again(error, attempt)
        if again:
            most_ms = min(CAP_MS, FIRST_MS << attempt)
            await asyncio.sleep(secrets.randbelow(most_ms * 1_000) / 1_000_000)
        return again
