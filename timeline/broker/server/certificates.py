"""The broker's certificate and key, and the authorities whose clients it accepts.

The files are checked, and read again when they change. Invalid files are logged and ignored: connections use the last
good ones.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from timeline.credentials import MAX_BYTES, ServerPair, load_authorities, load_server_pair, shown_minute
from timeline.files import Reloaded, read_file

log = logging.getLogger("timeline.broker")

DAY_MS = 86_400_000
SOON_MS = 14 * DAY_MS
"""A certificate that expires within this time is warned of, once a day."""


@dataclass(frozen=True, slots=True)
class LoadedCertificate:
    """Contents of the files."""

    pair: ServerPair
    authorities: bytes | None

    def configuration(self) -> Any:
        """Return it for gRPC."""
        return grpc.ssl_server_certificate_configuration([(self.pair.key, self.pair.chain)], self.authorities)


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
            log.info("the certificate was read again", extra={"expires": shown_minute(self.loaded.pair.expires_ms)})
            self._warn()

    def _warn(self) -> None:
        now_ms = self._now_ms()
        if self.loaded.pair.expires_ms - now_ms < SOON_MS and now_ms - self._warned_ms >= DAY_MS:
            self._warned_ms = now_ms
            does = "expired" if now_ms >= self.loaded.pair.expires_ms else "expires"
            log.warning(
                "the certificate %s %s on %s: renew it", self._cert, does, shown_minute(self.loaded.pair.expires_ms)
            )

    def _load(self) -> LoadedCertificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        pair = load_server_pair(context, self._cert, self._key, self._now_ms())
        authorities = read_file(self._client_ca, "client CA", MAX_BYTES) if self._client_ca else None
        if authorities is not None:
            load_authorities(context, authorities, self._client_ca)
        return LoadedCertificate(pair, authorities)
