"""What a `mysql://` URL says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from timeline.storage_plugins.contract import StoreRefused

PORT = 3306
RANGES = {"pool": (2, 64), "timeout_ms": (100, 600_000), "tls": (0, 1)}
OPTIONS = (*RANGES, "ca")
_SHAPE = "mysql://user:password@host:3306/database"


@dataclass(frozen=True, slots=True, repr=False)
class MysqlLocation:
    """Where the database is, who asks, and within what bounds. `pool`: most connections at once. `timeout_ms`: a
    call's deadline. `ca`: the file of certificates that TLS trusts; empty: the system's."""

    host: str
    port: int
    user: str
    password: str
    database: str
    pool: int = 8
    timeout_ms: int = 10_000
    tls: bool = False
    ca: str = ""

    @property
    def shown(self) -> str:
        """As it may be logged."""
        return f"{self.host}:{self.port}/{self.database}"

    @classmethod
    def of(cls, url: str) -> MysqlLocation:
        """Reads `mysql://user:password@host:port/database?pool=&timeout_ms=&tls=&ca=`. User and password may stand in
        TIMELINE_MYSQL_USER and TIMELINE_MYSQL_PASSWORD instead. Raises StoreRefused with what to write instead; the
        text never says the password."""
        try:
            parts = urlsplit(url)
            port = parts.port or PORT
        except ValueError:
            # Its own text may hold what stands behind a colon: a part of a password with a "/", "?" or "#" in it.
            raise StoreRefused(
                f"this mysql:// URL cannot be read: write {_SHAPE}, special characters in a password as %2F and so on"
            ) from None
        database = unquote(parts.path.removeprefix("/"))
        if not parts.hostname or not database or "/" in database:
            raise StoreRefused(f"a mysql:// URL names a host and a database: write {_SHAPE}")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := [option for option in options if option not in OPTIONS]:
            raise StoreRefused(f"{unknown[0]!r:.80} is no option of mysql://; known are {', '.join(OPTIONS)}")
        ca = options.pop("ca", "")
        if ca and not os.path.isfile(ca):
            raise StoreRefused(f"ca names a file of certificates; {ca!r:.200} is none")
        numbers = {option: _number(option, text) for option, text in options.items()}
        return cls(
            parts.hostname,
            port,
            unquote(parts.username or "") or os.environ.get("TIMELINE_MYSQL_USER", "root"),
            unquote(parts.password or "") or os.environ.get("TIMELINE_MYSQL_PASSWORD", ""),
            database,
            tls=bool(numbers.pop("tls", bool(ca))),
            ca=ca,
            **numbers,
        )


def _number(option: str, text: str) -> int:
    low, high = RANGES[option]
    if not text.isascii() or not text.isdigit() or not low <= int(text[:9]) <= high:
        raise StoreRefused(f"{option} must be a whole number from {low} to {high}, not {text!r:.80}")
    return int(text)
