"""The parts of an `etcd://` URL: members of etcd, prefix of all keys, TLS, user and password."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from timeline.config import did_you_mean, joined, parse_duration_ms, split_address
from timeline.errors import Invalid

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "timeline"
USER, PASSWORD = "TIMELINE_ETCD_USER", "TIMELINE_ETCD_PASSWORD"
"""Variables for user and password, instead of the URL."""
TTL_MS = (2_000, 60_000)
"""With its defaults etcd grants no shorter lease. With a longer one a dead broker is listed for too long."""
EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379/prefix"
SETTINGS = ("ca", "cert", "key", "tls", "ttl")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM: the certificates that are trusted, and this broker's own certificate and key, if etcd asks."""

    ca: str
    cert: str = ""
    key: str = ""

    def check(self) -> None:
        """Raise Invalid if one of them cannot be read."""
        for name in filter(None, (self.ca, self.cert, self.key)):
            try:
                Path(name).read_bytes()
            except OSError as cannot:
                raise Invalid(f"sync: the file {name!r:.200} cannot be read: {cannot.strerror}") from cannot


@dataclass(frozen=True, slots=True)
class EtcdLocation:
    """The place of a cluster's membership. `endpoints`: host:port of etcd's members, of which any will do. `prefix`: of
    all keys, without slashes around it. `ttl_s`: how long a broker is listed after its last refresh."""

    endpoints: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    user: str = ""
    password: str = field(default="", repr=False)
    tls: Tls | None = None
    ttl_s: int = 5

    def __str__(self) -> str:
        """Return it as it may be shown: without the password."""
        return f"etcd://{self.user and f'{self.user}:…@'}{','.join(self.endpoints)}/{self.prefix}"


def parse(url: str, variables: Mapping[str, str] | None = None) -> EtcdLocation:
    """Return the location that `url` names. `variables`: the environment (default: the process's). Raise Invalid with
    what to change; it never contains a password."""
    variables = os.environ if variables is None else variables
    rest, _, query = url.removeprefix("etcd://").partition("?")
    authority, _, path = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    if "@" in path or "@" in query:
        raise Invalid(f"sync: a password with / or ? in it is percent-encoded in a URL, or given as {PASSWORD}")
    user, _, password = credentials.partition(":")
    user, password = unquote(user) or variables.get(USER, ""), unquote(password) or variables.get(PASSWORD, "")
    if bool(user) != bool(password):
        missing, given = ("password", "user") if user else ("user", "password")
        raise Invalid(
            f"sync: etcd's {given} is given without the {missing}: etcd://user:password@…, or {USER}, {PASSWORD}"
        )
    settings = _settings(query)
    return EtcdLocation(
        tuple(_endpoint(host) for host in hosts.split(",")) if hosts else _no_hosts(),
        _prefix(path),
        user,
        password,
        _tls(settings),
        _ttl_s(settings),
    )


def _no_hosts() -> tuple[str, ...]:
    raise Invalid(f"sync: etcd:// needs the addresses of etcd's members, such as {EXAMPLE}")


def _endpoint(text: str) -> str:
    with_port = text if re.search(r"(^[^:]*|\]):[0-9]+$", text) else f"{text}:{DEFAULT_PORT}"
    try:
        host, port = split_address(with_port)
    except Invalid as bad:
        raise Invalid(f"sync: {bad.reason}, several with commas between them") from None
    if not host or not port:
        raise Invalid(f"sync: {text!r:.80} is no address of etcd: host:port, such as {EXAMPLE}")
    return joined(host, port)


def _prefix(path: str) -> str:
    prefix = unquote(path).strip("/") or DEFAULT_PREFIX
    if not prefix.isprintable() or len(prefix.encode()) > 255 or "//" in prefix:
        raise Invalid(
            f"sync: the prefix is 1 to 255 bytes of printable characters, such as {EXAMPLE}, not {prefix!r:.80}"
        )
    return prefix


def _settings(query: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in SETTINGS:
            raise Invalid(
                f"sync: etcd:// takes {', '.join(SETTINGS)} behind the ?, not {name!r:.40}"
                f"{did_you_mean(name, SETTINGS)}"
            )
        settings[name] = unquote(value)
    return settings


def _tls(settings: Mapping[str, str]) -> Tls | None:
    ca, cert, key = (settings.get(name, "") for name in ("ca", "cert", "key"))
    asked = settings.get("tls", "1" if ca or cert or key else "0")
    if asked not in ("0", "1"):
        raise Invalid(f"sync: tls is 0 or 1, not {asked!r:.40}")
    if asked == "0":
        if ca or cert or key:
            raise Invalid(
                "sync: ca, cert and key are for TLS, and tls=0 says that there is none: leave one of them out"
            )
        return None
    if bool(cert) != bool(key):
        raise Invalid("sync: cert and key belong together: this broker's certificate and its key, both as files in PEM")
    trusted = ca or ssl.get_default_verify_paths().cafile
    if not trusted:
        raise Invalid("sync: this system has no file of trusted certificates: name one with ca=")
    return Tls(trusted, cert, key)


def _ttl_s(settings: Mapping[str, str]) -> int:
    low, high = TTL_MS
    try:
        ttl_ms = parse_duration_ms(settings.get("ttl", "5s"))
    except Invalid as bad:
        raise Invalid(f"sync: ttl: {bad.reason}") from None
    if not low <= ttl_ms <= high or ttl_ms % 1000:
        raise Invalid(f"sync: ttl is whole seconds from {low // 1000} to {high // 1000}, such as 5s")
    return ttl_ms // 1000
