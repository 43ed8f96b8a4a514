"""The URL of a Cassandra store."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

from timeline.storage_plugins import shown
from timeline.storage_plugins.contract import StoreRefused

DEFAULT_PORT = 9042
USER, PASSWORD = "TIMELINE_CASSANDRA_USER", "TIMELINE_CASSANDRA_PASSWORD"
_KEYSPACE = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,47}")
_OPTIONS = ("datacenter", "replication", "timeout_s", "tls", "ca")


@dataclass(frozen=True, slots=True)
class CassandraLocation:
    """`cassandra://[user:password@]host[:port],host[:port]/keyspace?option=value`.

    `datacenter`: the one to talk to, if there are several. `replication`: replicas of a keyspace that is created if it
    is missing (0: a missing keyspace is refused). `timeout_s`: the deadline of each request. `tls`, `ca`: whether to
    use TLS, and the file of trusted certificates. User and password may come from the environment.
    """

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    user: str = ""
    password: str = field(default="", repr=False)
    datacenter: str = ""
    replication: int = 0
    timeout_s: float = 10.0
    tls: bool = False
    ca: str = ""

    @classmethod
    def of(cls, url: str) -> CassandraLocation:
        """Return the location that `url` names. Raise StoreRefused with what is wrong with it."""
        try:
            parts = urlsplit(url)
        except ValueError:
            raise _refused(url, "is no URL: special characters in a password are percent-encoded, [ is %5B") from None
        account, _, hosts = parts.netloc.rpartition("@")
        user, _, password = account.partition(":")
        keyspace = parts.path.removeprefix("/")
        if not _KEYSPACE.fullmatch(keyspace):
            raise _refused(url, "needs a keyspace of letters, digits and _: cassandra://host,host/keyspace")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(given) - set(_OPTIONS))
        if unknown:
            raise _refused(url, f"knows no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}")
        try:
            replication, timeout_s = int(given.get("replication", "0")), float(given.get("timeout_s", "10"))
        except ValueError as bad:
            raise _refused(url, f"has an option that is no number: {bad}") from bad
        if not 0 <= replication <= 99 or not 0.1 <= timeout_s <= 600:
            raise _refused(url, "takes replication from 0 to 99 and timeout_s from 0.1 to 600")
        if given.get("tls", "0") not in ("0", "1"):
            raise _refused(url, "takes tls=1 or tls=0")
        return cls(
            hosts=tuple(_host(url, host) for host in hosts.split(",")),
            keyspace=keyspace,
            user=unquote(user) or os.environ.get(USER, ""),
            password=unquote(password) or os.environ.get(PASSWORD, ""),
            datacenter=given.get("datacenter", ""),
            replication=replication,
            timeout_s=timeout_s,
            tls=given.get("tls", "0") == "1" or "ca" in given,
            ca=given.get("ca", ""),
        )

    @property
    def port(self) -> int:
        """Return the port of all hosts (the driver knows one)."""
        return self.hosts[0][1]

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return how to talk TLS, None without TLS."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as missing:
            raise StoreRefused(f"ca={self.ca}: {missing.strerror}") from missing
        context.check_hostname = False  # The driver uses the addresses that the nodes announce.
        return context


def _refused(url: str, why: str) -> StoreRefused:
    return StoreRefused(f"{shown(url)} {why}")


def _host(url: str, text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    if not host or (port and not port.isdigit()):
        raise _refused(url, "needs host[:port], several separated by commas: cassandra://h1,h2:9042/keyspace")
    return host, int(port) if port else DEFAULT_PORT
