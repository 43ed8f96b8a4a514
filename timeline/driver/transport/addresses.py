"""Addresses of brokers as people write them: `host:port`, several separated by commas."""

from __future__ import annotations

import re
from collections.abc import Sequence

from timeline.config import is_host, is_ipv6, is_loopback, split_address
from timeline.driver.times import shown
from timeline.errors import Invalid

DEFAULT_ADDRESS = "localhost:9000"

_ADDRESS = re.compile(r"(?:\[([^\s\[\]]+)\]|([^\s:/@\[\]]+)):([0-9]{1,5})")


def parse_addresses(addresses: str | Sequence[str]) -> list[str]:
    """Return "host:port,host:port" as a list. Raise Invalid for anything else, with the probable address."""
    if hasattr(addresses, "decode") or not isinstance(addresses, Sequence):  # bytes are a sequence of numbers
        raise Invalid(f"addresses are 'host:port', comma-separated or a list of them, not {shown(addresses)}")
    parts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    parsed: list[str] = []
    for part in parts:
        if not isinstance(part, str):
            raise Invalid(f"an address is 'host:port', like 'localhost:9000', not {part!r:.80}")
        text = part.strip()
        if not is_address(text):
            hint = _hint(parts)
            raise Invalid(f"an address is 'host:port', like 'localhost:9000' or '[::1]:9000', not {text!r:.80}{hint}")
        if text not in parsed:
            parsed.append(text)
    if not parsed:
        raise Invalid("no address is given: say where a broker is, like 'localhost:9000'")
    return parsed


def place_of(address: str) -> tuple[str, int]:
    """Return host and port of an address, one host for all names of this machine's loopback."""
    host, port = split_address(address)
    return "localhost" if is_loopback(host) else host.lower(), port


def is_address(text: str) -> bool:
    """Return whether `text` is `host:port`: a name, an IPv4 address, or an IPv6 address in brackets; and a port."""
    found = _ADDRESS.fullmatch(text)
    if found is None or not 1 <= int(found[3]) <= 65_535:
        return False
    return is_ipv6(found[1]) if found[1] else is_host(found[2])


def _hint(parts: Sequence[object]) -> str:
    """Return `. Did you mean …?`, or nothing if no list of addresses can be guessed."""
    meant = [_meant(part.strip()) if isinstance(part, str) else "" for part in parts]
    return f". Did you mean {','.join(meant)}?" if all(map(is_address, meant)) else ""


def _meant(address: str) -> str:
    """Return the address that a URL, or an address without port or host, probably means."""
    place = address.rpartition("://")[2].partition("/")[0]
    host, separator, port = place.rpartition(":")
    default_host, _, default_port = DEFAULT_ADDRESS.partition(":")
    if not separator or not port.isdigit():
        return f"{place or default_host}:{default_port}"
    return f"{host or default_host}:{port}"
