"""The URL of a Redis store: `redis://user:password@host:port,host:port/db?setting=value`."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

from timeline.storage_plugins.contract import StoreRefused

PORT = 6379
SETTINGS = {
    "prefix": "the first part of every key, so that several clusters share a server (timeline)",
    "connections": "most connections to each server (16)",
    "timeout_ms": "how long a call may take (5000)",
    "wait_replicas": "replicas that must have a write before it is answered (0)",
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


__all__ = ["SETTINGS", "RedisLocation"]
