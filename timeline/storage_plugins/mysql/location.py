"""What a `mysql://` URL says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

from timeline.storage_plugins.contract import StoreRefused

POOL = 8
POOL_RANGE = (2, 64)
TIMEOUT_S = 10
TIMEOUT_RANGE = (1, 300)
PASSWORD = "MYSQL_PWD"
"""The environment's password, where the URL has none; MySQL's own clients read it too."""


@dataclass(frozen=True, slots=True, repr=False)
class Location:
    """Where the database is, who asks, and within what bounds."""

    host: str
    port: int
    user: str
    password: str
    database: str
    pool: int = POOL
    timeout_s: int = TIMEOUT_S
    ssl_ca: str = ""

    @property
    def shown(self) -> str:
        """As it may be logged."""
        return f"{self.host}:{self.port}/{self.database}"

    @classmethod
    def of(cls, url: str) -> Location:
        """Reads `mysql://user:password@host:port/database?pool=&timeout_s=&ssl_ca=`. Raises StoreRefused with what to
        write instead; the text never says the password."""
        try:
            parts = urlsplit(url)
            port = parts.port or 3306
        except ValueError as error:
            raise StoreRefused(f"this mysql:// URL cannot be read ({error}): write {_SHAPE}") from None
        database = unquote(parts.path.removeprefix("/"))
        if not parts.hostname or not database or "/" in database:
            raise StoreRefused(f"a mysql:// URL names a host and a database: write {_SHAPE}")
        chosen = {"pool": POOL, "timeout_s": TIMEOUT_S}
        ranges = {"pool": POOL_RANGE, "timeout_s": TIMEOUT_RANGE}
        ssl_ca = ""
        for option, value in parse_qsl(parts.query, keep_blank_values=True):
            if option == "ssl_ca":
                ssl_ca = value
                continue
            if option not in ranges:
                raise StoreRefused(f"{option!r:.80} is no option of mysql://; known are pool, timeout_s, ssl_ca")
            low, high = ranges[option]
            if not value.isascii() or not value.isdigit() or not low <= int(value[:9]) <= high:
                raise StoreRefused(f"{option} must be a whole number from {low} to {high}, not {value!r:.80}")
            chosen[option] = int(value)
        user = unquote(parts.username or "root")
        password = unquote(parts.password) if parts.password is not None else os.environ.get(PASSWORD, "")
        return cls(parts.hostname, port, user, password, database, chosen["pool"], chosen["timeout_s"], ssl_ca)


_SHAPE = "mysql://user:password@host:3306/database"
