"""The store's own record in Redis: its uuid, and the versions of how things lie there (see `versions`)."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from timeline.storage_plugins.contract import StoreRefused
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.server import Server
from timeline.storage_plugins.versions import Step, Versions, migrate


@dataclass(slots=True)
class Runs:
    """What half a step may do: have scripts run, each on keys of one slot, that do no harm when they run again.
    `prefix`: with what every key begins."""

    prefix: bytes
    calls: list[tuple[str, list[bytes], list[Any]]] = field(default_factory=list)

    def __call__(self, script: str, keys: list[bytes], args: list[Any]) -> None:
        self.calls.append((script, keys, args))


MIGRATIONS: tuple[Step[Runs], ...] = ()
"""See `versions.migrate`."""


async def known_uid(server: Server) -> str:
    """The store's uuid; empty where there is none."""
    key = _key(server)
    uid: bytes = await server.at(key, "HGET", key, "cluster_uid") or b""
    return uid.decode()


async def cluster_uid(server: Server) -> str:
    """The store's uuid, made once, and its schema brought forward. Raises StoreRefused for one of a newer version."""
    key = _key(server)
    uid = await known_uid(server)
    if not uid:
        newest = str(1 + len(MIGRATIONS))
        for name in ("schema_version", "oldest_version"):
            await server.run(scripts.SWAP, [key], (name.encode(), b"", newest))
        await server.run(scripts.SWAP, [key], (b"cluster_uid", b"", secrets.token_hex(16)))
        uid = await known_uid(server)
    await migrated(server, contract=False)
    return uid


async def migrated(server: Server, contract: bool) -> Versions:
    """The schema's versions, once it is brought forward; `contract`: without what only the version before needed. Two
    that do it at once do the same."""
    key = _key(server)
    version, oldest = await server.at(key, "HMGET", key, "schema_version", "oldest_version")
    try:
        found = Versions.of(version or b"", oldest)
    except ValueError as damaged:
        raise StoreRefused(
            f"the store's own record, {key.decode(errors='replace')}, is damaged ({damaged}): restore it"
        ) from damaged
    runs = Runs(server.location.prefix.encode())
    reached = migrate(runs, found, MIGRATIONS, contract=contract)
    for script, keys, args in runs.calls:
        await server.run(script, keys, args)
    await server.run(scripts.SWAP, [key], (b"schema_version", version, str(reached.version)))
    await server.run(scripts.SWAP, [key], (b"oldest_version", oldest or b"", str(reached.oldest)))
    return reached


def _key(server: Server) -> bytes:
    return server.location.record
