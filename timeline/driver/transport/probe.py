"""A knock at an address where no broker could be reached: who is there?"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Collection
from contextlib import suppress
from enum import Enum

from timeline.config import split_address
from timeline.credentials import Credentials
from timeline.errors import STAYS, Invalid

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


PROBE_S = 0.5
"""How long the other side may take to say what it is."""
LASTING = (
    "speaks TLS: connect",
    "is not to be trusted:",
    "does not speak TLS:",
    "wants to see a certificate:",
    "does not take our certificate",
)
"""What the sentences have in them that tell of something which no other try mends."""


def lasting(troubles: Collection[str]) -> str:
    """What a sentence about these troubles ends with: that trying again mends none of them; empty where it may."""
    stay = bool(troubles) and all(any(words in trouble for words in LASTING) for trouble in troubles)
    return f"; {STAYS}" if stay else ""


class _HungUp(Exception):
    """The handshake was done, and the other side ended the connection without a word."""


async def why_not(address: str, credentials: Credentials, within_s: float) -> str:
    """Why no connection to `address` can be made, in words that say what to do."""
    try:
        if not credentials.tls:
            return (await probe(address, min(within_s, PROBE_S))).said(address)
        async with asyncio.timeout(min(within_s, PROBE_S)):
            return await _encrypted(address, credentials)
    except TimeoutError:
        return ProbeResult.SILENT.said(address)
    except Invalid as bad:
        return bad.reason


async def _encrypted(address: str, credentials: Credentials) -> str:
    try:
        await _said(address, credentials.context())
    except _HungUp:
        return _wants_another(address, credentials)
    except ssl.SSLCertVerificationError as bad:
        return f"the certificate of {address} is not to be trusted: {_verdict(bad)}"
    except ssl.SSLError as refused:
        return _refused(address, refused.reason or "", credentials)
    except OSError as cannot:
        return _nobody(address, cannot)
    return _broke(address)


async def _said(address: str, context: ssl.SSLContext) -> None:
    """Returns once the other side has said something in TLS; in its version 1.3 it looks at our certificate after the
    handshake, and says only then that it wants another, or hangs up: then raises _HungUp. Raises OSError, of which
    SSLError is one."""
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=host)
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


def _verdict(bad: ssl.SSLCertVerificationError) -> str:
    said = bad.verify_message or str(bad.reason)
    if "expired" in said:
        return "it has expired, have it renewed"
    if "not yet valid" in said:
        return "it is not valid yet, or the clock of this machine is wrong"
    if "mismatch" in said.lower() or "is not valid for" in said:
        return "it was made out to another name; connect by a name that is in it"
    if "issuer" in said or "self-signed" in said or "self signed" in said:
        return "none of the authorities in ca= (or of this machine's, without it) has signed it"
    return said


def _refused(address: str, reason: str, credentials: Credentials) -> str:
    """What the other side, or TLS itself, has against this connection."""
    if "ALERT" not in reason:
        return f"{address} does not speak TLS: connect without it, or have the broker serve with --tls-cert"
    if "CERTIFICATE" in reason or credentials.cert:
        return _wants_another(address, credentials)
    return f"{address} refuses the connection: {reason.lower().rpartition('alert_')[2].replace('_', ' ')}"


def _wants_another(address: str, credentials: Credentials) -> str:
    """It did not like the certificate that we showed, or that we showed none."""
    if not credentials.cert:
        return f"{address} wants to see a certificate: connect with cert= and key="
    return (
        f"{address} does not take our certificate {credentials.cert!r}: has it expired, or was it signed by none of "
        "the broker's --client-ca?"
    )


def _nobody(address: str, cannot: OSError) -> str:
    return _broke(address) if isinstance(cannot, ConnectionResetError) else unconnected(cannot).said(address)


def _broke(address: str) -> str:
    return f"the connection to {address} broke off"
