"""What a `postgresql://` URL says."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from timeline.storage_plugins import shown
from timeline.storage_plugins.contract import StoreRefused

SCHEMA = "timeline"
POOL, POOL_RANGE = 8, (2, 1_000)
TIMEOUT_MS, TIMEOUT_RANGE_MS = 10_000, (10, 3_600_000)
_PASSED_ON = frozenset(
    ("sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "passfile", "target_session_attrs")
)
_WRITABLE = ("read-write", "primary")
_FILES = ("sslcert", "sslkey", "sslrootcert", "sslcrl")


@dataclass(frozen=True, slots=True)
class PostgresqlLocation:
    """`dsn`: what the driver is given. `hosts`: the same for each host, where the one that takes writes is to be found
    among several. `schema`: the schema of our tables. `pool`: most connections at once.
    `timeout_ms`: a call's deadline."""

    dsn: str
    shown: str
    schema: str = SCHEMA
    pool: int = POOL
    timeout_ms: int = TIMEOUT_MS
    hosts: tuple[str, ...] = ()

    @classmethod
    def of(cls, url: str, scheme: str = "postgresql", port: int = 5432) -> PostgresqlLocation:
        """Reads `postgresql://user:password@host:port,host:port/database?schema=&pool=&timeout_ms=&sslmode=`. What is
        not in it comes from PGHOST, PGUSER, PGPASSWORD, PGSSLMODE and so on. Raises StoreRefused with what to write
        instead."""
        try:
            parts = urlsplit(url)
            options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
        except ValueError as bad:
            raise StoreRefused(f"{shown(url)!r} is no URL: write {scheme}://user@host:{port}/database") from bad
        schema = options.pop("schema", SCHEMA)
        if not re.fullmatch(r"[a-z_][a-z0-9_]{0,62}", schema):
            raise StoreRefused(f"schema must be small letters, digits and _, not {schema!r:.80}")
        pool = _number(options, "pool", POOL, POOL_RANGE)
        timeout_ms = _number(options, "timeout_ms", TIMEOUT_MS, TIMEOUT_RANGE_MS)
        unknown = sorted(set(options) - _PASSED_ON)
        if unknown:
            known = ", ".join(sorted({"schema", "pool", "timeout_ms", *_PASSED_ON}))
            raise StoreRefused(f"{unknown[0]!r:.80} is no option of {scheme}://; known are {known}")
        for name in _FILES:
            if options.get(name) and not os.path.isfile(options[name]):
                raise StoreRefused(f"{name} names a file; {options[name]!r:.200} is none")
        # Of several hosts, the one that can be written to; where a fail-over moved it, the next connection finds it.
        user, at, hosts = parts.netloc.rpartition("@")
        wanted = options.setdefault("target_session_attrs", "read-write" if "," in hosts else "any")

        def dsn(hosts: str) -> str:
            return urlunsplit(("postgresql", f"{user}{at}{hosts}", parts.path, urlencode(options), ""))

        several = "," in hosts and wanted in _WRITABLE
        each = tuple(dsn(host) for host in hosts.split(",")) if several else ()
        return cls(dsn(hosts), shown(url), schema, pool, timeout_ms, each)


def _number(options: dict[str, str], name: str, default: int, allowed: tuple[int, int]) -> int:
    value = options.pop(name, str(default))
    low, high = allowed
    if not value.isascii() or not value.isdigit() or not low <= int(value[:9]) <= high:
        raise StoreRefused(f"{name} must be a whole number from {low} to {high}, not {value!r:.80}")
    return int(value)
