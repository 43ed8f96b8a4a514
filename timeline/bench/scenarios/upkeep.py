"""What a server does for a while after millions of rows were put at once, awaited: a figure with many pending is of a
timeline that has grown over weeks, not of one filled a moment ago."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from timeline.bench.processes import CannotMeasure, within
from timeline.bench.topic import scheme
from timeline.errors import TimelineError

if TYPE_CHECKING:
    from timeline.storage_plugins.redis.connection import Address
    from timeline.storage_plugins.redis.server import Server

FROM_MESSAGES = 100_000
PATIENCE_S = 1_800.0
LOOK_S = 0.5
BUSY = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")


async def upkept(url: str) -> None:
    """Returns when Redis has rewritten its append-only file, and PostgreSQL has vacuumed and analysed the tables, as
    each of them would sooner or later. Raises CannotMeasure."""
    upkeep = {"postgresql": _vacuum, "redis": _rewrite, "rediss": _rewrite}.get(scheme(url))
    if upkeep is not None:
        async with within(PATIENCE_S, "the end of the server's upkeep after the fill"):
            await upkeep(url)


async def _vacuum(url: str) -> None:
    import asyncpg

    from timeline.storage_plugins.postgresql.location import Location

    location = Location.of(url)
    try:
        connection = await asyncpg.connect(location.dsn)
        try:
            for table in ("message", "payload"):
                await connection.execute(f"VACUUM (ANALYZE) {location.schema}.{table}")
        finally:
            await connection.close()
    except (OSError, asyncpg.PostgresError) as trouble:
        raise CannotMeasure(f"the tables cannot be vacuumed: {trouble}") from trouble


async def _rewrite(url: str) -> None:
    from timeline.storage_plugins.redis.location import Location
    from timeline.storage_plugins.redis.server import Server

    server = Server(Location.of(url))
    try:
        await server.connect()
        for address in server.masters:
            while await _busy(server, address):
                await asyncio.sleep(LOOK_S)
    except TimelineError as trouble:
        raise CannotMeasure(trouble.reason) from trouble
    finally:
        await server.close()


async def _busy(server: Server, address: Address) -> bool:
    """Whether it rewrites its file, is about to, or writes a snapshot."""
    told = bytes(await server.ask(address, "INFO", "persistence"))
    return any(f"{name}:1".encode() in told for name in BUSY)
