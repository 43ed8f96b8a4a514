"""The addresses to which webhooks may go.

A name is looked up first, and each of its addresses judged. The connection then goes to one of those that passed: it is
not looked up again. So a name that changes its address in between reaches nothing else. Unusual forms of an address
(`0x7f.1`, `2130706433`) are names to us; the look-up turns them into addresses, and those are judged.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias
from urllib.parse import urlsplit

from timeline.config import network_of
from timeline.errors import Invalid
from timeline.model import check_new_push_url

Address: TypeAlias = IPv4Address | IPv6Address

LookUp: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host name for a port."""

REFUSED: tuple[tuple[str, str], ...] = (
    ("0.0.0.0/8", "this network"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "carrier-grade NAT"),
    ("127.0.0.0/8", "loopback"),
    ("168.63.129.16/32", "metadata of a cloud"),
    ("169.254.0.0/16", "link-local, metadata of clouds"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.2.0/24", "documentation"),
    ("192.88.99.0/24", "6to4 relay"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "benchmarking"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("::1/128", "loopback"),
    ("::/128", "unspecified"),
    ("::ffff:0:0/96", "IPv4 in IPv6"),
    ("::/96", "IPv4 in IPv6"),
    ("64:ff9b::/96", "NAT64"),
    ("64:ff9b:1::/48", "NAT64"),
    ("2001::/23", "reserved, Teredo"),
    ("2001:db8::/32", "documentation"),
    ("2002::/16", "6to4"),
    ("3fff::/20", "documentation"),
    ("fc00::/7", "private"),
    ("fe80::/10", "link-local"),
    ("ff00::/8", "multicast"),
)
"""Networks that webhooks do not reach unless they are allowed. The first that contains an address names it."""
_REFUSED = tuple((ip_network(network), kind) for network, kind in REFUSED)
_GLOBAL = IPv6Network("2000::/3")
_ISATAP = 0x5EFE


_NAMES = ThreadPoolExecutor(32, "names")
"""A look-up of a name whose servers are silent keeps its thread for a while, even if nobody waits for it any more."""


class AddressRefused(Invalid):
    """Webhooks must not go to this address."""


async def look_up(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host as this machine knows them. Raise OSError."""
    looking = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_NAMES, looking)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


class AddressGuard:
    """Judges addresses. `allowed`: networks in CIDR notation that are permitted although they are private."""

    def __init__(self, allowed: Iterable[str] = (), look_up: LookUp = look_up) -> None:
        self._allowed = tuple(network_of("--push-allow", one) for one in allowed)
        self._look_up = look_up

    def refusal(self, address: str) -> str:
        """Return why no webhook may go to an address. Empty: it may."""
        try:
            found = ip_address(address)
        except ValueError:
            return f"{address!r:.60} is no address"
        if any(found in network for network in self._allowed):
            return ""
        if isinstance(found, IPv6Address) and found.scope_id:
            return f"{address} is of one link alone"
        kind = next((kind for network, kind in _REFUSED if found in network), "")
        if isinstance(found, IPv6Address) and not kind:
            if found not in _GLOBAL:
                kind = "reserved"
            elif (int(found) >> 32) & 0xFFFF == _ISATAP and (int(found) >> 48) & 0xFCFF == 0:
                kind = "IPv4 in IPv6 (ISATAP)"
        return f"{found} is {kind}" if kind else ""

    async def permitted(self, host: str, port: int) -> tuple[str, ...]:
        """Return the addresses that a host has now and that are permitted, to connect to one of them.

        Raise AddressRefused if there is none, OSError if the host is not found.
        """
        try:
            found: Sequence[str] = (str(ip_address(host)),)
        except ValueError:
            found = await self._look_up(host, port)
        judged = {address: self.refusal(address) for address in found}
        permitted = tuple(address for address, why in judged.items() if not why)
        if not permitted:
            why = "; ".join(judged.values()) or "it has no address"
            raise AddressRefused(
                f"webhooks must not go to {host}. {why}. If they should, give --push-allow and the network "
                "to whatever sends them: serve, gateway or push test"
            )
        return permitted


def host_of(url: str) -> tuple[str, int]:
    """Return host and port of a webhook's URL. Raise Invalid."""
    parts = urlsplit(check_new_push_url(url))
    host = parts.hostname or ""
    return host, parts.port or (443 if parts.scheme == "https" else 80)
