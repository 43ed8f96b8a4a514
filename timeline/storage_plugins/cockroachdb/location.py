"""What a `cockroachdb://` URL says: what a `postgresql://` one says, on another port."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from timeline.storage_plugins import shown
from timeline.storage_plugins.contract import StoreRefused
from timeline.storage_plugins.postgresql.location import Location

PORT = 26257


def location_of(url: str) -> Location:
    """Reads `cockroachdb://user:password@host:port,host:port/database?schema=&pool=&timeout_ms=&sslmode=`. Any node
    takes writes: of several hosts the first that answers is used. Raises StoreRefused with what to write instead."""
    try:
        parts = urlsplit(url)
        user, at, hosts = parts.netloc.rpartition("@")
        if hosts and not any(host.rpartition("]")[2].partition(":")[2] for host in hosts.split(",")):
            hosts = ",".join(f"{host}:{PORT}" for host in hosts.split(","))
            url = urlunsplit(parts._replace(netloc=f"{user}{at}{hosts}"))
    except ValueError:
        pass  # what is wrong with it is said below
    if "target_session_attrs" not in url:
        url += f"{'&' if '?' in url else '?'}target_session_attrs=any"
    try:
        found = Location.of(url)
    except StoreRefused as refused:
        reason = refused.reason.replace("postgresql://", "cockroachdb://").replace(":5432", f":{PORT}")
        raise StoreRefused(reason) from refused
    return Location(found.dsn, shown(url), found.schema, found.pool, found.timeout_ms)
