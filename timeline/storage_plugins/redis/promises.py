"""What a server's own settings promise, read when the store is opened: what is refused, what is warned of."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from timeline.storage_plugins.contract import StoreError, StoreRefused
from timeline.storage_plugins.redis import scripts
from timeline.storage_plugins.redis.connection import Refusal
from timeline.storage_plugins.redis.server import Address, Server

OLDEST = (7, 0)


@dataclass(frozen=True, slots=True)
class Promises:
    """What all servers together promise. `durable`: what was answered survives a kill -9 of a server."""

    server: str
    durable: bool
    warnings: tuple[str, ...]


async def read(server: Server) -> Promises:
    """Reads each master's settings. Raises StoreRefused with the sentence that mends it."""
    warnings: list[str] = []
    durable = True
    words = ""
    for address in server.masters:
        said, safe, warned = await _read(server, address)
        words = words or said
        durable &= safe
        warnings += [text for text in warned if text not in warnings]
    if server.cluster:
        words += f", a cluster of {len(server.masters)} masters"
        warnings.append(
            "Redis Cluster replicates after it answers: a fail-over may lose what was answered last; "
            "wait_replicas in the URL makes that less likely, not impossible"
        )
    return Promises(words, durable, tuple(warnings))


async def _read(server: Server, address: Address) -> tuple[str, bool, list[str]]:
    where = f"{address[0]}:{address[1]}"
    info = _info(await server.ask(address, "INFO"))
    if "redis_version" not in info:
        raise StoreRefused(f"what answers at {where} is not Redis: its INFO names no redis_version")
    name = info.get("server_name", "redis")
    version = info.get(f"{name}_version", info["redis_version"])
    if tuple(map(int, info["redis_version"].split(".")[:2])) < OLDEST:
        raise StoreRefused(f"{name} at {where} is {version}: Timeline needs Redis 7.0 or later, or Valkey; upgrade it")
    if info.get("role") != "master":
        raise StoreRefused(f"{where} is a replica, which takes no writes: name its master in the URL")
    policy = info.get("maxmemory_policy", "noeviction")
    if int(info.get("maxmemory", "0")) and policy != "noeviction":
        raise StoreRefused(
            f"Redis at {where} evicts keys when its memory is full (maxmemory-policy {policy}), which would lose "
            "messages: CONFIG SET maxmemory-policy noeviction, and the same in redis.conf"
        )
    aof = await _fsync(server, address) if info.get("aof_enabled") == "1" else "off"
    return f"{name} {version}", aof == "always", [_LOSSES.get(aof, _LOSSES[""])] if aof != "always" else []


async def check_rights(server: Server) -> None:
    """Raises StoreRefused where this user may not do what calls do: they would fail one by one."""
    for address in server.masters:
        names = (f"{server.location.prefix}:{{probe.{number}}}".encode() for number in count())
        key = next(name for name in names if server.address_of(name) == address)
        refused = [name.decode() for name in await server.run(scripts.PROBE, [key], [])]
        if refused:
            user, keys = server.location.user or "default", f"{server.location.prefix}:*"
            raise StoreRefused(
                f"Redis at {address[0]}:{address[1]} does not let user {user} run {', '.join(refused)} on keys {keys}: "
                f"ACL SETUSER {user} ~{keys} +@all, "
                "or +@read +@write +@scripting +@connection +info +time +cluster +wait"
            )


_LOSSES = {
    "off": "Redis keeps no append-only file: its end loses what was written since its last snapshot, or everything; "
    "CONFIG SET appendonly yes, and the same in redis.conf",
    "everysec": "Redis syncs its append-only file each second (appendfsync everysec): power loss, and kill -9 while "
    "the disk is slow, may lose what was answered within the last second or two; appendfsync always loses nothing",
    "no": "Redis leaves it to the system when its append-only file is synced (appendfsync no): power loss may lose "
    "what was answered within some 30 seconds, kill -9 what Redis had not handed over; appendfsync always loses "
    "nothing",
    "": "Redis does not tell how it syncs its append-only file (this user may not CONFIG GET): power loss and kill -9 "
    "may lose what was answered within the last seconds; appendfsync always loses nothing",
}
"""What may be lost, by the setting of the append-only file."""


def _info(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode(errors="replace").splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in lines}


async def _fsync(server: Server, address: Address) -> str:
    """When the append-only file is synced; empty where this user may not ask."""
    try:
        found = await server.ask(address, "CONFIG", "GET", "appendfsync")
    except StoreError as error:
        if isinstance(error.__cause__, Refusal):
            return ""
        raise
    return found[1].decode() if len(found) == 2 else ""


__all__ = ["Promises", "check_rights", "read"]
