"""The servers: one Redis or the masters of a cluster, each with a bounded pool of connections and a deadline per call.
Their settings are read when the store is opened: some are refused, some warned of.

Calls for the same server travel together. Nothing is sent twice. A write that was sent and not answered is
`StoreUnknown`. A call that a server refuses, or cannot be reached for, is `StoreUnavailable`. Redirects of a cluster
are followed: the node that redirects has done nothing.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from timeline.model import Topic
from timeline.storage_plugins.contract import (
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
)
from timeline.storage_plugins.redis.connection import Address, Broken, RedisPool, Refusal
from timeline.storage_plugins.redis.location import RedisLocation
from timeline.storage_plugins.redis.scripts import BASES, PROBE, SUFFIXES, WRITING

REDIRECTS = 5
SLOTS = 16_384
_SHA: dict[str, str] = {}


def _sha(script: str) -> str:
    if script not in _SHA:
        _SHA[script] = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
    return _SHA[script]


def slot_of(key: bytes) -> int:
    """Return the slot of a key: the CRC-16 of the text between its first braces, or of all of it."""
    start = key.find(b"{") + 1
    end = key.find(b"}", start) if start else -1
    return binascii.crc_hqx(key[start:end] if end > start else key, 0) % SLOTS


@dataclass(slots=True)
class _Command:
    """A command on its way. `address`: where it was redirected to. `asking`: its slot is being moved there."""

    words: Sequence[Any]
    key: bytes
    whole: Sequence[Any] | None = None
    """The same with the script's text, for a server that does not know the script."""
    address: Address | None = None
    asking: bool = False


class Server:
    """Runs scripts and commands at the node that has a key. `cluster` is known after `connect`."""

    def __init__(self, location: RedisLocation) -> None:
        self.location = location
        self._tls = location.ssl_context()
        self.cluster = False
        self.cluster_uid = ""
        """The cluster whose data the servers must have once the store is open. From then on a refusal is the server's
        trouble, not the URL's."""
        self.records: dict[bytes, Topic] = {}
        """Topic records as they were last read, by their text: most have not changed since."""
        self._closed = False
        self._pools: dict[Address, RedisPool] = {}
        self._slots: dict[int, Address] = {}
        self._first: Address = location.addresses[0]

    # ── servers ──

    async def connect(self) -> None:
        """Find the first address that answers, and the masters if it is a cluster's."""
        trouble: StoreError | None = None
        for address in self.location.addresses:
            try:
                info = await self.ask(address, "INFO", "cluster")
            except StoreUnavailable as error:
                trouble = error
                continue
            self._first = address
            self.cluster = b"cluster_enabled:1" in info
            if self.cluster:
                await self._learn()
            return
        raise trouble or StoreUnavailable("no Redis was named")

    def serves(self, cluster_uid: str) -> None:
        """Make each new connection ask whose data is there. Called once the store is open."""
        self.cluster_uid = cluster_uid
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()

    async def close(self) -> None:
        """Close all connections; calls under way fail."""
        self._closed = True
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()

    @property
    def masters(self) -> list[Address]:
        """Return the servers that hold keys."""
        return sorted(set(self._slots.values())) if self.cluster else [self._first]

    async def _learn(self) -> None:
        """Read which node has which slot."""
        trouble: StoreError | None = None
        for address in dict.fromkeys([self._first, *self._slots.values(), *self.location.addresses]):
            try:
                listed = await self.ask(address, "CLUSTER", "SLOTS")
            except StoreUnavailable as error:
                trouble = error
                continue
            slots: dict[int, Address] = {}
            for first, last, master, *_ in listed:
                host = (master[0] or b"").decode() or address[0]
                slots.update(dict.fromkeys(range(first, last + 1), (host, int(master[1]))))
            if slots:
                self._slots = slots
                return
        raise trouble or StoreUnavailable("no node of the cluster knows who has which slots")

    def address_of(self, key: bytes) -> Address:
        """Return the server that has a key."""
        return self._slots.get(slot_of(key), self._first) if self.cluster else self._first

    # ── calls ──

    async def ask(self, address: Address, *command: Any) -> Any:
        """Run one command that only reads, at one server."""
        answer = (await self._exchange(address, [command], False))[0]
        if isinstance(answer, Refusal):
            raise self._answered(answer, False) from answer
        return answer

    async def at(self, key: bytes, *command: Any) -> Any:
        """Run a command that only reads, where `key` is."""
        return _raised((await self._send([_Command(command, key)], False))[0])

    async def at_each(self, commands: Sequence[tuple[bytes, tuple[Any, ...]]]) -> list[Any]:
        """Run commands that only read, each where its key is, those of one server together."""
        answers = await self._send([_Command(command, key) for key, command in commands], False)
        return [_raised(answer) for answer in answers]

    async def run(self, script: str, keys: Sequence[bytes], args: Sequence[Any]) -> Any:
        """Run a script where `keys` are: on a cluster, all of one slot."""
        return _raised((await self.run_each(script, [(keys, args)]))[0])

    async def run_each(self, script: str, calls: Sequence[tuple[Sequence[bytes], Sequence[Any]]]) -> list[Any]:
        """Run a script for each of `calls` (keys, arguments), those of one server together. Return what each answered,
        a StoreError if it failed."""
        whole = BASES + script
        sha = _sha(whole)
        commands = []
        for given, args in calls:
            keys = given
            if self.cluster and b"{" in given[0]:
                keys = [given[0], *(given[0] + suffix for suffix in SUFFIXES)]
            words = (len(keys), *keys, *args)
            commands.append(_Command(("EVALSHA", sha, *words), keys[0], ("EVAL", whole, *words)))
        return await self._send(commands, script in WRITING)

    async def _send(self, commands: list[_Command], writes: bool) -> list[Any]:
        """Send each to where its key is, and follow redirects. Return what each answered, or its StoreError."""
        answers: list[Any] = [None] * len(commands)
        pending = list(range(len(commands)))
        for _ in range(REDIRECTS):
            places: dict[Address, list[int]] = {}
            for at in pending:
                places.setdefault(commands[at].address or self.address_of(commands[at].key), []).append(at)
            done = await asyncio.gather(
                *(self._send_to(address, [commands[at] for at in chosen], writes) for address, chosen in places.items())
            )
            pending, down = [], False
            for (address, chosen), replies in zip(places.items(), done, strict=True):
                for at, reply in zip(chosen, replies, strict=True):
                    answers[at] = reply
                    if isinstance(reply, Refusal):
                        answers[at] = self._answered(reply, writes)
                        if self._again(commands[at], reply, address):
                            pending.append(at)
                    elif isinstance(reply, StoreUnavailable) and self.cluster:
                        down = True
                        commands[at].address, commands[at].asking = None, False
                        pending.append(at)
            if down:
                before = dict(self._slots)
                try:
                    await self._learn()
                except StoreUnavailable:
                    break
                if before == self._slots:
                    break
            if not pending:
                break
        return answers

    def _answered(self, refusal: Refusal, writes: bool) -> StoreError:
        error = _answered(refusal, writes)
        return StoreUnavailable(error.reason) if self.cluster_uid and isinstance(error, StoreRefused) else error

    def _again(self, command: _Command, refusal: Refusal, address: Address) -> bool:
        """Return whether to send a refused command again; note where and how."""
        if refusal.code == "NOSCRIPT" and command.whole is not None and command.words is not command.whole:
            command.words, command.address = command.whole, address
            return True
        if refusal.code not in ("MOVED", "ASK"):
            return False
        host, _, port = str(refusal).split()[2].rpartition(":")
        command.address = (host or address[0], int(port))
        command.asking = refusal.code == "ASK"
        if not command.asking:
            self._slots[slot_of(command.key)] = command.address
        return True

    async def _send_to(self, address: Address, commands: list[_Command], writes: bool) -> list[Any]:
        """Send these on one connection. Return the reply of each, which may be a Refusal, or the StoreError of all."""
        words: list[Sequence[Any]] = []
        places: list[int] = []
        for command in commands:
            if command.asking:
                words.append(("ASKING",))
            places.append(len(words))
            words.append(command.words)
        wait = self.location.wait_replicas if writes else 0
        if wait:
            words.append(("WAIT", wait, self.location.wait_ms))
        try:
            replies = await self._exchange(address, words, writes)
        except StoreError as error:
            return [error] * len(commands)
        chosen = [replies[place] for place in places]
        if wait and isinstance(replies[-1], Refusal):
            untold = StoreUnknown(f"written, but Redis does not tell how many replicas have it: {replies[-1]}")
            return [reply if isinstance(reply, Refusal) else untold for reply in chosen]
        if wait and replies[-1] < wait:
            missed = StoreUnknown(
                f"written, but only {replies[-1]} of {wait} replicas have it after {self.location.wait_ms} ms"
            )
            return [reply if isinstance(reply, Refusal) else missed for reply in chosen]
        return chosen

    async def _exchange(self, address: Address, commands: Sequence[Sequence[Any]], writes: bool) -> list[Any]:
        if self._closed:
            raise StoreUnavailable("the store was closed")
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = RedisPool(self.location, address, self._tls, self.cluster_uid)
        where = f"{address[0]}:{address[1]}"
        try:
            return await pool.exchange(commands)
        except Refusal as refusal:
            raise self._answered(refusal, False) from refusal
        except Broken as broken:
            if not broken.sent:
                raise StoreUnavailable(f"no connection to Redis at {where}: {broken}") from broken
            kind = StoreUnknown if writes else StoreUnavailable
            raise kind(f"Redis at {where} did not answer: {broken}") from broken


def _raised(answer: Any) -> Any:
    if isinstance(answer, StoreError):
        raise answer
    return answer


_PASSWORD = "give them in the URL (redis://user:password@host) or in TIMELINE_REDIS_USER and TIMELINE_REDIS_PASSWORD"
_NOTHING = frozenset(
    ("READONLY", "LOADING", "NOREPLICAS", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MOVED",
     "ASK", "NOSCRIPT")
)  # fmt: skip
"""Codes of a server that did not even begin."""
_ROOMLESS = {"OOM": "", "MISCONF": "; make room if its disk is full: it takes writes again once it can save"}
"""Codes of a server that still answers reads: no room in memory, or no way to save. The advice to add to its text."""
_RIGHTS = frozenset(("NOPERM", "NOAUTH", "WRONGPASS"))


def _answered(refusal: Refusal, writes: bool) -> StoreError:
    """Return what a server's refusal means for the call."""
    text = str(refusal).partition(" script: ")[0]
    if refusal.code in _RIGHTS or (refusal.code, refusal.greeting) == ("ERR", "AUTH"):
        return StoreRefused(f"Redis refuses user or password: {text}; {_PASSWORD}")
    if (refusal.code, refusal.greeting) == ("ERR", "SELECT"):
        return StoreRefused(f"Redis has no such database: {text}; a cluster has only 0, others what `databases` says")
    if refusal.code in _ROOMLESS:
        return StoreFull(f"Redis: {text}{_ROOMLESS[refusal.code]}")
    if refusal.code in _NOTHING or not writes:
        return StoreUnavailable(f"Redis: {text}")
    return StoreUnknown(f"Redis failed in the middle: {text}")


# ── what its settings promise ──

OLDEST = (7, 0)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The promise of all servers together. `durable`: what was answered survives a kill -9 of a server."""

    server: str
    durable: bool
    warnings: tuple[str, ...]


async def read_servers(server: Server) -> ServerSettings:
    """Read each master's settings. Raise StoreRefused with what to change."""
    warnings: list[str] = []
    durable = True
    words = ""
    for address in server.masters:
        said, safe, warned = await _read_node(server, address)
        words = words or said
        durable &= safe
        warnings += [text for text in warned if text not in warnings]
    if server.cluster:
        words += f", a cluster of {len(server.masters)} masters"
        warnings.append(
            "Redis Cluster replicates after it answers: a fail-over may lose what was answered last; "
            "wait_replicas in the URL makes that less likely, not impossible"
        )
    return ServerSettings(words, durable, tuple(warnings))


async def _read_node(server: Server, address: Address) -> tuple[str, bool, list[str]]:
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
    """Raise StoreRefused if this user lacks a right that calls need."""
    for address in server.masters:
        names = (f"{server.location.prefix}:{{probe.{number}}}".encode() for number in count())
        key = next(name for name in names if server.address_of(name) == address)
        refused = [name.decode() for name in await server.run(PROBE, [key], [])]
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
"""The possible losses by the setting of the append-only file."""


def _info(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode(errors="replace").splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in lines}


async def _fsync(server: Server, address: Address) -> str:
    """Return when the append-only file is synced; empty if this user may not ask."""
    try:
        found = await server.ask(address, "CONFIG", "GET", "appendfsync")
    except StoreError as error:
        if isinstance(error.__cause__, Refusal):
            return ""
        raise
    return found[1].decode() if len(found) == 2 else ""
