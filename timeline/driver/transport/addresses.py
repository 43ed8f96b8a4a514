"""Addresses of brokers as people write them, `host:port`, several separated by commas; and what answers there."""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import Collection, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

from timeline.config import is_host, is_ipv6, is_loopback, split_address
from timeline.credentials import Credentials
from timeline.driver.times import shown
from timeline.errors import STAYS, Invalid
from timeline.wire.transport import Fault, TransportError

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


# ── what answers at an address ──

# gRPC does not say why a connection cannot be made. So we connect with the same certificates, and look at the answer of
# the other side.

PROBE_S = 0.5
"""How long the other side may take to answer."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The first bytes of an HTTP/2 client, such as gRPC: RFC 9113, 3.4, with an empty SETTINGS frame."""
_SETTINGS = 4
_TLS_RECORDS = range(20, 25)
"""Types of TLS records, their first byte: RFC 8446, 5.1."""


class ProbeResult(Enum):
    """The finding: GRPC by a call, TALKS by a call or a probe, the others by a probe. `said` makes a sentence about an
    address; `short` follows a named address."""

    BROKEN = ("no connection to {} can be made", "no connection can be made")
    BROKE_OFF = ("the connection to {} broke off", "the connection broke off")
    CERTIFICATE_REFUSED = (
        "{} does not take our certificate {cert!r}: has it expired, or was it signed by none of the broker's "
        "--client-ca?",
        "it does not take our certificate",
    )
    ELSE = ("what listens at {} is no Timeline broker", "what listens there is no Timeline broker")
    FILES = ("{why}", "a file with a certificate cannot be used")
    GRPC = (
        "what listens at {} is a gRPC server, but no Timeline broker of this version",
        "a gRPC server listens there, but no Timeline broker of this version",
    )
    HANGS_UP = (
        "{} hangs up at once: it is no Timeline broker, or one that has all the connections it may",
        "it hangs up at once: no Timeline broker, or one that has all the connections it may",
    )
    HTTP = (
        "an HTTP server listens at {}, no Timeline broker. Give the broker's own port, which is 9000 by default",
        "an HTTP server listens there, no Timeline broker: give the broker's own port, which is 9000 by default",
    )
    NOBODY = ("nobody listens at {}", "nothing listens there")
    NOT_TLS = ("{} does not speak TLS: connect without it, or have the broker serve with --tls-cert", "no TLS there")
    REFUSES = ("{} refuses the connection: {why}", "it refuses the connection")
    SILENT = ("{} did not answer in time", "no answer")
    TALKS = ("{} takes connections, but does not answer", "it takes connections, but does not answer")
    TLS = (
        "{} speaks TLS: connect with tls=True, or ca=FILE (--tls, --tls-ca)",
        "what listens there speaks TLS: connect with --tls, or --tls-ca FILE",
    )
    UNKNOWN_AUTHORITY = (
        "the certificate of {} is not to be trusted: none of the authorities in ca= (or of this machine's, without it) "
        "has signed it",
        "its certificate is signed by no authority that is trusted here",
    )
    UNKNOWN_NAME = ("the host name of {} is not known", "this host name is not known")
    UNREACHABLE = ("the network has no way to {}", "the network has no way there")
    UNTRUSTED = ("the certificate of {} is not to be trusted: {why}", "its certificate is not to be trusted")
    WANTS_CERTIFICATE = ("{} wants to see a certificate: connect with cert= and key=", "it wants to see a certificate")
    WRONG_NAME = (
        "the certificate of {} is not to be trusted: it was made out to another name; connect by a name that is in it",
        "its certificate was made out to another name",
    )

    def said(self, address: str, **more: str) -> str:
        """Return the sentence about `address`."""
        return self.value[0].format(address, **more)

    @property
    def short(self) -> str:
        """The sentence where the address was named before."""
        return self.value[1]


LASTING = {
    ProbeResult.CERTIFICATE_REFUSED,
    ProbeResult.NOT_TLS,
    ProbeResult.TLS,
    ProbeResult.UNKNOWN_AUTHORITY,
    ProbeResult.UNTRUSTED,
    ProbeResult.WANTS_CERTIFICATE,
    ProbeResult.WRONG_NAME,
}
"""No later attempt helps: client and broker do not fit."""
ABSENT = {
    ProbeResult.BROKEN,
    ProbeResult.ELSE,
    ProbeResult.GRPC,
    ProbeResult.HANGS_UP,
    ProbeResult.HTTP,
    ProbeResult.NOBODY,
    ProbeResult.SILENT,
    ProbeResult.UNKNOWN_NAME,
    ProbeResult.UNREACHABLE,
}
"""Nothing is there, or no broker."""
_VERDICTS = {9: "it is not valid yet, or the clock of this machine is wrong", 10: "it has expired, have it renewed"}
"""By OpenSSL's number, X509_V_ERR_…"""
_OTHER_NAME = (62, 64)
_NO_ISSUER = (2, 18, 19, 20, 21)


class NoConnection(TransportError):
    """No connection could be made, and nothing was sent. `probed`: the result of the probe."""

    def __init__(self, found: ProbeResult, reason: str) -> None:
        super().__init__(Fault.UNREACHABLE, reason)
        self.probed = found

    @classmethod
    def at(cls, address: str, found: ProbeResult, **more: str) -> NoConnection:
        """Return the error for the result `found` at `address`."""
        return cls(found, found.said(address, **more))

    def __reduce__(self) -> tuple[object, ...]:
        return (NoConnection, (self.probed, self.reason))


def lasting(found: Collection[ProbeResult | None]) -> bool:
    """Return whether no later attempt helps at any address."""
    return bool(found) and all(one in LASTING for one in found)


def mending(stays: bool) -> str:
    """Return the end of a sentence about a failure that stays."""
    return f"; {STAYS}" if stays else ""


class _HungUp(Exception):
    """The other side ended the connection after the handshake, without an answer."""


async def why_not(address: str, credentials: Credentials, within_s: float) -> NoConnection:
    """Return why no connection to `address` can be made, and what to do."""
    wait_s = min(within_s, PROBE_S)
    if not credentials.tls:
        return NoConnection.at(address, await probe(address, wait_s))
    try:
        async with asyncio.timeout(wait_s):
            return await _encrypted(address, credentials)
    except TimeoutError:
        return NoConnection.at(address, ProbeResult.SILENT)
    except Invalid as bad:
        return NoConnection(ProbeResult.FILES, bad.reason)


async def _encrypted(address: str, credentials: Credentials) -> NoConnection:
    refusal = ProbeResult.CERTIFICATE_REFUSED if credentials.cert else ProbeResult.WANTS_CERTIFICATE
    why = ""
    try:
        await _said(address, credentials.context())
        found = ProbeResult.BROKE_OFF
    except _HungUp:
        found = refusal
    except ssl.SSLCertVerificationError as bad:
        found, why = _verdict(bad)
    except ssl.SSLError as refused:
        reason = refused.reason or ""  # a symbol of OpenSSL's, no sentence
        if "ALERT" not in reason:
            found = ProbeResult.NOT_TLS
        elif "CERTIFICATE" in reason or credentials.cert:
            found = refusal
        else:
            found, why = ProbeResult.REFUSES, reason.lower().rpartition("alert_")[2].replace("_", " ")
    except ConnectionResetError:
        found = ProbeResult.BROKE_OFF
    except OSError as cannot:
        found = unconnected(cannot)
    return NoConnection.at(address, found, why=why, cert=credentials.cert)


async def _said(address: str, context: ssl.SSLContext) -> None:
    """Return once the other side has sent something in TLS. In TLS 1.3 it checks our certificate after the handshake,
    and may only then refuse it or hang up. Raise _HungUp if it hangs up, and OSError (SSLError is one)."""
    reader, writer = await _connect(*split_address(address), ssl=context)
    try:
        writer.write(PREFACE)
        try:
            said = await reader.read(1)
        except ConnectionError as over:
            raise _HungUp from over
        if not said:
            raise _HungUp
    finally:
        writer.transport.abort()
        with suppress(OSError):  # however it ended, it is over
            await writer.wait_closed()


def _verdict(bad: ssl.SSLCertVerificationError) -> tuple[ProbeResult, str]:
    if bad.verify_code in _OTHER_NAME:
        return ProbeResult.WRONG_NAME, ""
    if bad.verify_code in _NO_ISSUER:
        return ProbeResult.UNKNOWN_AUTHORITY, ""
    return ProbeResult.UNTRUSTED, _VERDICTS.get(bad.verify_code, bad.verify_message or str(bad.reason))


async def probe(address: str, wait_s: float) -> ProbeResult:
    """Find out what is at `address` ("host:port"), where a call without TLS did not get through. Connect, begin as gRPC
    does, and judge the answer within `wait_s`.

    SILENT: no connection in time. TALKS: a connection, but nothing or HTTP/2 came over it, as from a busy broker.
    """
    host, port = split_address(address)
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await _connect(host, port)
    except TimeoutError:
        return ProbeResult.SILENT
    except OSError as trouble:
        return unconnected(trouble)
    try:
        async with asyncio.timeout(wait_s):
            writer.write(PREFACE)
            begun = await reader.read(64)
            # A frame's head is nine bytes; TLS and HTTP show themselves in fewer.
            while begun and len(begun) < 9 and (more := await reader.read(64)) != b"":
                begun += more
    except TimeoutError:
        return ProbeResult.TALKS
    except OSError:
        begun = b""
    finally:
        writer.transport.abort()
    if begun:
        return _named(begun)
    # It hung up: on a greeting that is not its own, or on every client.
    return ProbeResult.TLS if await _takes_tls(host, port, wait_s) else ProbeResult.HANGS_UP


async def _takes_tls(host: str, port: int, wait_s: float) -> bool:
    """Return whether a TLS handshake gets an answer of TLS. The certificate does not matter here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(wait_s):
            _, writer = await _connect(host, port, ssl=context)
    except ssl.SSLError as refused:
        return refused.reason not in ("WRONG_VERSION_NUMBER", None)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


async def _connect(host: str, port: int, **tls: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a host. Raise OSError with the reason."""
    if tls:
        tls["server_hostname"] = host
    try:
        return await asyncio.open_connection(host, port, **tls)
    except OSError as cannot:
        if cannot.errno:
            raise
    # asyncio puts the reasons of several addresses into one text: try them one by one.
    refused = OSError(errno.EADDRNOTAVAIL, "the host has no address")
    for _, *_, place in await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return await asyncio.open_connection(str(place[0]), port, **tls)
        except OSError as cannot:
            refused = cannot
            if cannot.errno == errno.ECONNREFUSED:
                break
    raise refused


def unconnected(trouble: OSError) -> ProbeResult:
    """Return why no connection could be made."""
    if isinstance(trouble, socket.gaierror):
        return ProbeResult.UNKNOWN_NAME
    if trouble.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
        return ProbeResult.UNREACHABLE
    if trouble.errno == errno.ETIMEDOUT:
        return ProbeResult.SILENT
    return ProbeResult.NOBODY if trouble.errno == errno.ECONNREFUSED else ProbeResult.BROKEN


def _named(begun: bytes) -> ProbeResult:
    if begun[:5] == b"HTTP/":
        return ProbeResult.HTTP
    if len(begun) >= 2 and begun[0] in _TLS_RECORDS and begun[1] == 3:
        return ProbeResult.TLS
    if len(begun) >= 9 and begun[3] == _SETTINGS:
        return ProbeResult.TALKS
    return ProbeResult.ELSE
