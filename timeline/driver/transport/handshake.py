"""Why a connection cannot be made. gRPC does not say; so we knock ourselves, with the same certificates, and listen to
what the other side answers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Collection
from contextlib import suppress

from timeline.config import split_address
from timeline.credentials import Credentials
from timeline.driver.transport.probe import PREFACE, ProbeResult, probe, unconnected
from timeline.errors import STAYS, Invalid

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
