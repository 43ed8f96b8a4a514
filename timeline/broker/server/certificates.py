"""The broker's certificate and key, and the authorities whose clients it accepts.

The files are checked, and read again when they change. Invalid files are logged and ignored: connections use the last
good ones.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import grpc

from timeline.credentials import load_authorities, load_pair
from timeline.errors import Invalid
from timeline.files import Reloaded, read_file

log = logging.getLogger("timeline.broker")

MAX_BYTES = 4 * 1024 * 1024
DAY_MS = 86_400_000
SOON_MS = 14 * DAY_MS
"""A certificate that expires within this time is warned of, once a day."""
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """Contents of the files. `expires_ms`: when the first certificate of the chain expires."""

    chain: bytes
    key: bytes
    authorities: bytes | None
    expires_ms: int

    def configuration(self) -> Any:
        """Return it for gRPC."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.authorities)


class Certificates:
    """The files, and their last good contents. `now_ms`: the time in ms UTC. Raise Invalid if they cannot be used at
    all."""

    def __init__(self, cert: str, key: str, client_ca: str, now_ms: Callable[[], int]) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._now_ms = now_ms
        files = [file for file in (cert, key, client_ca) if file]
        self._files = Reloaded("the certificate stays as it was", files, self._load, log)
        self._warned_ms = 0
        self._warn()

    @property
    def loaded(self) -> LoadedCertificate:
        """The last good contents."""
        return self._files.value

    def credentials(self) -> Any:
        """Return credentials for one listener of gRPC, which asks for changes before each handshake."""
        given = self.loaded

        def fetch() -> Any:
            nonlocal given
            if given is self.loaded:
                return None
            given = self.loaded
            return given.configuration()

        return grpc.dynamic_ssl_server_credentials(
            given.configuration(), fetch, require_client_authentication=bool(self._client_ca)
        )

    def look(self) -> None:
        """Read the files again if they have changed."""
        self._warn()
        if self._files.look():
            self._warned_ms = 0
            log.info("the certificate was read again", extra={"expires": _shown(self.loaded.expires_ms)})
            self._warn()

    def _warn(self) -> None:
        now_ms = self._now_ms()
        if self.loaded.expires_ms - now_ms < SOON_MS and now_ms - self._warned_ms >= DAY_MS:
            self._warned_ms = now_ms
            does = "expired" if now_ms >= self.loaded.expires_ms else "expires"
            log.warning("the certificate %s %s on %s: renew it", self._cert, does, _shown(self.loaded.expires_ms))

    def _load(self) -> LoadedCertificate:
        chain = read_file(self._cert, "certificate", MAX_BYTES)
        key = read_file(self._key, "key", MAX_BYTES)
        for content, file in ((chain, self._cert), (key, self._key)):
            if b"\0" in content:  # gRPC would read no further, and go on with what it had
                raise Invalid(f"{file!r} has a zero byte in it, and must be text, in PEM")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_pair(context, self._cert, self._key)
        starts_ms, expires_ms = validity_ms(chain, self._cert)
        now_ms = self._now_ms()
        if now_ms >= expires_ms:
            raise Invalid(f"the certificate {self._cert!r} expired on {_shown(expires_ms)}: renew it")
        if now_ms < starts_ms:
            raise Invalid(
                f"the certificate {self._cert!r} is valid from {_shown(starts_ms)} on: is this machine's clock right?"
            )
        authorities = read_file(self._client_ca, "client CA", MAX_BYTES) if self._client_ca else None
        if authorities is not None:
            load_authorities(context, authorities, self._client_ca)
        return LoadedCertificate(chain, key, authorities, expires_ms)


def validity_ms(chain: bytes, file: str) -> tuple[int, int]:
    """Return from when until when the first certificate in `chain` (PEM) is valid, ms UTC. Raise Invalid."""
    found = _PEM.search(chain)
    try:
        if found is None:
            raise ValueError("no certificate")
        (_, certificate), *_ = _elements(ssl.PEM_cert_to_DER_cert(found[0].decode("ascii")))
        (_, signed), *_ = _elements(certificate)
        fields = [content for tag, content in _elements(signed) if tag != 0xA0]  # but for the version
        starts, ends = (_time_ms(tag, content) for tag, content in _elements(fields[3]))
    except (ValueError, IndexError) as bad:
        raise Invalid(f"{file!r} must be a certificate in PEM") from bad
    return starts, ends


def _elements(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of each element (X.690). Raise ValueError or IndexError if it is not DER."""
    at = 0
    while at < len(der):
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            size = length & 0x7F
            length, at = int.from_bytes(der[at : at + size], "big"), at + size
        if at + length > len(der):
            raise ValueError("cut off")
        yield tag, der[at : at + length]
        at += length


def _time_ms(tag: int, content: bytes) -> int:
    """Return a time of RFC 5280. UTCTime has years from 1950 to 2049."""
    text = content.decode("ascii")
    if tag == 0x17:
        text = ("19" if text[:2] >= "50" else "20") + text
    return int(datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp() * 1000)


def _shown(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
