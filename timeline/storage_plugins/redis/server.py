"""The servers: one Redis or the masters of a cluster, each with a bounded pool of connections and a deadline per call.
Their settings are read when the store is opened: some are refused, some warned of.

Calls for the same server travel together. Nothing is sent twice. A write that was sent and not answered is
`StoreUnknown`. A call that a server refuses, or cannot be reached for, is `StoreUnavailable`. Redirects of a cluster
are followed: the node that redirects has done nothing.

A connection sends commands and reads answers in their order; hiredis packs and parses the bytes. One call at a time
uses it. One that failed in the middle is closed, so that no call reads another's answers.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import parse_qsl, unquote

import hiredis

from timeline.model import Topic
from timeline.storage_plugins.contract import (
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    StoreUnknown,
)
from timeline.storage_plugins.redis.scripts import BASES, PROBE, SUFFIXES, WRITING

PORT = 6379
SETTINGS = {
    "prefix": "the first part of every key, so that several clusters share a server (timeline)",
    "connections": "most connections to each server (16)",
    "timeout_ms": "how long a call may take (5000)",
    "wait_replicas": "replicas that must have a write, other than a lease, before it is answered (0)",
    "wait_ms": "how long to wait for them (1000)",
    "tls": "1: with TLS (0; 1 where ca is given)",
    "ca": "the file of certificates that TLS trusts (the system's)",
}


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """The checked parts of a URL."""

    addresses: tuple[tuple[str, int], ...]
    db: int = 0
    user: str = ""
    password: str = field(default="", repr=False)
    prefix: str = "timeline"
    connections: int = 16
    timeout_ms: int = 5000
    wait_replicas: int = 0
    wait_ms: int = 1000
    tls: bool = False
    ca: str = ""

    @property
    def record(self) -> bytes:
        """Return the key of the store's own record."""
        return f"{self.prefix}:store".encode()

    @classmethod
    def of(cls, url: str) -> RedisLocation:
        """Return the location that `url` names. Raise StoreRefused, which never repeats a password."""
        rest, _, query = url.removeprefix("redis://").partition("?")
        authority, _, path = rest.partition("/")
        userinfo, _, hosts = authority.rpartition("@")
        user, _, password = userinfo.partition(":")
        given = dict(parse_qsl(query, keep_blank_values=True))
        unknown = [name for name in given if name not in SETTINGS]
        if unknown and "@" in query and "@" not in rest:
            raise StoreRefused("redis://: write a ? in user or password as %3F, a / as %2F")
        if unknown:
            raise StoreRefused(f"redis:// knows no setting {unknown[0]!r}; it knows {', '.join(SETTINGS)}")
        if path and not path.isdigit():
            raise StoreRefused("redis://host:port/NUMBER: after the slash comes the number of a database")
        numbers = {
            name: _number(name, given[name], low, high)
            for name, low, high in (
                ("connections", 1, 1000),
                ("timeout_ms", 1, 600_000),
                ("wait_replicas", 0, 100),
                ("wait_ms", 1, 600_000),
            )
            if name in given
        }
        prefix = given.get("prefix", "timeline")
        if not prefix or "{" in prefix or "}" in prefix:
            raise StoreRefused("redis://: prefix must be some text without braces, which place keys in a cluster")
        return cls(
            addresses=tuple(_address(host) for host in hosts.split(",")),
            db=int(path or 0),
            user=unquote(user) or os.environ.get("TIMELINE_REDIS_USER", ""),
            password=unquote(password) or os.environ.get("TIMELINE_REDIS_PASSWORD", ""),
            prefix=prefix,
            tls=bool(_number("tls", given.get("tls", "0"), 0, 1)) or "ca" in given,
            ca=given.get("ca", ""),
            **numbers,
        )

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return how to talk TLS, None without TLS. Raise StoreRefused if `ca` cannot be read."""
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca or None)
        except OSError as unread:
            raise StoreRefused(f"redis://: ca={self.ca}: {unread.strerror or unread}") from unread


def _number(name: str, text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text) <= high:
        raise StoreRefused(f"redis://: {name} must be a whole number from {low} to {high}")
    return int(text)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(PORT)
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StoreRefused("redis:// needs a host and a port: redis://127.0.0.1:6379/0")
    return host, int(port)


Address = tuple[str, int]


class Refusal(Exception):
    """A server's answer that is an error. `greeting`: the command that it answers, where `connect` sent that."""

    greeting = ""

    @property
    def code(self) -> str:
        """Its first word, which is Redis's error code."""
        return str(self).partition(" ")[0]


class Broken(Exception):
    """The connection ended, or its server was silent for too long. `sent`: commands had been sent by then."""

    def __init__(self, reason: str, sent: bool = True) -> None:
        super().__init__(reason)
        self.sent = sent


class RedisConnection(asyncio.Protocol):
    """A connection, made by `connect`. A reply that is an error is a value, a `Refusal`."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(protocolError=Broken, replyError=Refusal)
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[None] | None = None
        self._answers: list[Any] = []
        self._wanted = 0
        self._end = ""

    @property
    def closed(self) -> bool:
        """Whether it can no longer be used."""
        return self._transport is None or self._transport.is_closing()

    async def exchange(self, commands: Sequence[Sequence[Any]], timeout_s: float) -> list[Any]:
        """Send the commands and return what each answers. Raise Broken."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise Broken(self._end or "the connection is closed", sent=False)
        self._answers, self._wanted = [], len(commands)
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            transport.write(b"".join([hiredis.pack_command(tuple(command)) for command in commands]))
            async with asyncio.timeout(timeout_s):
                await self._waiting
        except TimeoutError as error:
            self.close()
            raise Broken(f"no answer within {timeout_s:g} s") from error
        except BaseException:
            self.close()
            raise
        finally:
            self._waiting = None
        return self._answers

    def close(self) -> None:
        """Close it at once, without sending what is left."""
        if self._transport is not None:
            self._transport.abort()

    # ── asyncio's side ──

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        reader, answers = self._reader, self._answers
        try:
            reader.feed(data)
            while (answer := reader.gets()) is not False:
                answers.append(answer)
        except Broken as error:
            self._fail(f"it does not speak Redis' protocol: {error}")
            self.close()
            return
        if self._waiting is not None and len(answers) >= self._wanted and not self._waiting.done():
            self._waiting.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error or "the server closed the connection"))

    def _fail(self, reason: str) -> None:
        self._end = self._end or reason
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Broken(self._end))


async def connect(
    location: RedisLocation, address: Address, tls: ssl.SSLContext | None, cluster_uid: str = ""
) -> RedisConnection:
    """Return a connection that is authenticated and has chosen its database. Raise Broken, or Refusal.
    `cluster_uid`: what the store's own record must say, if this server has it."""
    timeout_s = location.timeout_ms / 1000
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await asyncio.get_running_loop().create_connection(RedisConnection, *address, ssl=tls)
    except TimeoutError as error:
        raise Broken(f"no connection within {timeout_s:g} s", sent=False) from error
    except OSError as error:
        raise Broken(str(error) or type(error).__name__, sent=False) from error
    hello: list[tuple[Any, ...]] = [("CLIENT", "SETNAME", "timeline")]
    if location.password or location.user:
        user = (location.user,) if location.user else ()
        hello.insert(0, ("AUTH", *user, location.password))
    if location.db:
        hello.append(("SELECT", location.db))
    if cluster_uid:
        hello.append(("HGET", location.record, "cluster_uid"))
    try:
        answers = await connection.exchange(hello, timeout_s)
    except Broken as error:
        raise Broken(str(error), sent=False) from error
    for command, answer in zip(hello, answers, strict=True):
        if command[0] == "HGET":
            # Another node of a cluster may have the record, and one that loads its data cannot tell yet.
            if not isinstance(answer, Refusal) and answer != cluster_uid.encode():
                connection.close()
                raise Broken("it does not have the data of the cluster that was opened", sent=False)
        # A user who may not name its connection can work all the same.
        elif isinstance(answer, Refusal) and not (command[0] == "CLIENT" and answer.code == "NOPERM"):
            connection.close()
            answer.greeting = command[0]
            raise answer
    return connection


class RedisPool:
    """The connections to one server: a bounded number, one call each, kept while they last. `cluster_uid`: see
    `connect`."""

    def __init__(
        self, location: RedisLocation, address: Address, tls: ssl.SSLContext | None, cluster_uid: str = ""
    ) -> None:
        self._location, self._address, self._tls = location, address, tls
        self._cluster_uid = cluster_uid
        self._free = asyncio.Semaphore(location.connections)
        self._idle: list[RedisConnection] = []
        self._used: set[RedisConnection] = set()
        self._closed = False

    async def exchange(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send commands on a connection of their own and return what each answers. Raise Broken, or Refusal if no
        connection could be made."""
        timeout_s = self._location.timeout_ms / 1000
        try:
            async with asyncio.timeout(timeout_s):
                await self._free.acquire()
        except TimeoutError as error:
            raise Broken(
                f"all {self._location.connections} connections were busy for {timeout_s:g} s; "
                "connections=… in the URL allows more",
                sent=False,
            ) from error
        connection: RedisConnection | None = None
        try:
            while self._idle and connection is None:
                kept = self._idle.pop()
                connection = None if kept.closed else kept
            connection = connection or await connect(self._location, self._address, self._tls, self._cluster_uid)
            if self._closed:
                connection.close()
                raise Broken("the store was closed", sent=False)
            self._used.add(connection)
            return await connection.exchange(commands, timeout_s)
        finally:
            if connection is not None:
                self._used.discard(connection)
                if not connection.closed and not self._closed:
                    self._idle.append(connection)
            self._free.release()

    def close(self) -> None:
        """Close all of them. Calls that wait for one, or for it to be made, raise Broken."""
        self._closed = True
        for connection in (*self._idle, *self._used):
            connection.close()
        self._idle.clear()


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

    async def run(self, script: str, keys: Sequence[bytes], args: Sequence[Any], waits: bool = True) -> Any:
        """Run a script where `keys` are: on a cluster, all of one slot. `waits`: see `run_each`."""
        return _raised((await self.run_each(script, [(keys, args)], waits))[0])

    async def run_each(
        self, script: str, calls: Sequence[tuple[Sequence[bytes], Sequence[Any]]], waits: bool = True
    ) -> list[Any]:
        """Run a script for each of `calls` (keys, arguments), those of one server together. Return what each answered,
        a StoreError if it failed. `waits`: a write waits for `wait_replicas`."""
        whole = BASES + script
        sha = _sha(whole)
        commands = []
        for given, args in calls:
            keys = given
            if self.cluster and b"{" in given[0]:
                keys = [given[0], *(given[0] + suffix for suffix in SUFFIXES)]
            words = (len(keys), *keys, *args)
            commands.append(_Command(("EVALSHA", sha, *words), keys[0], ("EVAL", whole, *words)))
        return await self._send(commands, script in WRITING, waits)

    async def _send(self, commands: list[_Command], writes: bool, waits: bool = True) -> list[Any]:
        """Send each to where its key is, and follow redirects. Return what each answered, or its StoreError."""
        answers: list[Any] = [None] * len(commands)
        pending = list(range(len(commands)))
        for _ in range(REDIRECTS):
            places: dict[Address, list[int]] = {}
            for at in pending:
                places.setdefault(commands[at].address or self.address_of(commands[at].key), []).append(at)
            done = await asyncio.gather(
                *(
                    self._send_to(address, [commands[at] for at in chosen], writes, waits)
                    for address, chosen in places.items()
                )
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

    async def _send_to(self, address: Address, commands: list[_Command], writes: bool, waits: bool) -> list[Any]:
        """Send these on one connection. Return the reply of each, which may be a Refusal, or the StoreError of all."""
        words: list[Sequence[Any]] = []
        places: list[int] = []
        for command in commands:
            if command.asking:
                words.append(("ASKING",))
            places.append(len(words))
            words.append(command.words)
        wait = self.location.wait_replicas if writes and waits else 0
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
