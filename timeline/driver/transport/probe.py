"""A knock at an address where no broker could be reached: who is there?"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from enum import Enum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client of HTTP/2, which gRPC is, begins: RFC 9113, 3.4, with an empty SETTINGS frame."""
_SETTINGS = 4
_TLS_RECORDS = range(20, 25)
"""The types that a record of TLS begins with: RFC 8446, 5.1."""


class ProbeResult(Enum):
    """What was found: GRPC by a call, the others by a knock. `said` of an address makes it a sentence; `short` is for
    where the address stands before it."""

    BROKEN = ("no connection to {} can be made", "no connection can be made")
    ELSE = ("what listens at {} is no Timeline broker", "what listens there is no Timeline broker")
    GRPC = (
        "what listens at {} is a gRPC server, but no Timeline broker of this version",
        "a gRPC server listens there, but no Timeline broker of this version",
    )
    HANGS_UP = (
        "{} hangs up at once: it is no Timeline broker, or one that has all the connections it may",
        "it hangs up at once: no Timeline broker, or one that has all the connections it may",
    )
    HTTP = (
        "an HTTP server listens at {}, no Timeline broker (its metrics have a port of their own)",
        "an HTTP server listens there, no Timeline broker; its metrics have a port of their own",
    )
    NOBODY = ("nobody listens at {}", "nothing listens there")
    SILENT = ("{} did not answer in time", "no answer")
    TALKS = ("{} takes connections, but no call goes through", "it takes connections, but no call goes through")
    TLS = (
        "{} speaks TLS: connect with tls=True, or ca=FILE (--tls, --tls-ca)",
        "what listens there speaks TLS: connect with --tls, or --tls-ca FILE",
    )
    UNKNOWN_NAME = ("the host name of {} is not known", "this host name is not known")
    UNREACHABLE = ("the network has no way to {}", "the network has no way there")

    def said(self, address: str) -> str:
        """The sentence about `address`."""
        return self.value[0].format(address)

    @property
    def short(self) -> str:
        """The same, where the address was named."""
        return self.value[1]


async def probe(address: str, wait_s: float) -> ProbeResult:
    """Who is at `address` ("host:port"), where a call without TLS did not get through. Connects, begins as gRPC does,
    and says what came back within `wait_s`. SILENT: no connection was made in time; TALKS: one was, and nothing or
    HTTP/2 came over it, as from a broker that has much to do."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(wait_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
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
    # It hung up without a word: on what was no greeting of its own, or on whoever comes.
    return ProbeResult.TLS if await _takes_tls(host.strip("[]"), int(port), wait_s) else ProbeResult.HANGS_UP


async def _takes_tls(host: str, port: int, wait_s: float) -> bool:
    """Whether a TLS handshake gets an answer of TLS. Whose certificate it shows is of no interest here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(wait_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as refused:
        return refused.reason not in ("WRONG_VERSION_NUMBER", None)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True


def unconnected(trouble: OSError) -> ProbeResult:
    """Why no connection could be made. Of several addresses of a host asyncio tells together, in words alone."""
    if isinstance(trouble, socket.gaierror):
        return ProbeResult.UNKNOWN_NAME
    if trouble.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL):
        return ProbeResult.UNREACHABLE
    if trouble.errno == errno.ETIMEDOUT:
        return ProbeResult.SILENT
    refused = trouble.errno == errno.ECONNREFUSED or f"[Errno {errno.ECONNREFUSED}]" in str(trouble)
    return ProbeResult.NOBODY if refused else ProbeResult.BROKEN


def _named(begun: bytes) -> ProbeResult:
    if begun[:5] == b"HTTP/":
        return ProbeResult.HTTP
    if len(begun) >= 2 and begun[0] in _TLS_RECORDS and begun[1] == 3:
        return ProbeResult.TLS
    if len(begun) >= 9 and begun[3] == _SETTINGS:
        return ProbeResult.TALKS
    return ProbeResult.ELSE
