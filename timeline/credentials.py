"""A client's credentials: certificates, and a token. Files are read again for each connection, so that a renewal needs
no restart. Drivers use them, and brokers when they call each other."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from timeline.errors import Invalid
from timeline.files import read_file, stamp_of

MAX_BYTES = 4 * 1024 * 1024
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
TOKEN = re.compile(r"timeline_[0-9a-f]{12}_[0-9a-f]{64}")
AUTHORIZATION = "authorization"
AS_OPERATOR = "timeline-as-operator"
Metadata = tuple[tuple[str, str], ...]


class BadCredentials(Invalid):
    """Credentials that cannot be used. `part`: the one at fault, `token`, `ca`, `cert` or `key`. Empty: they do not fit
    together."""

    def __init__(self, reason: str = "", *, part: str = "", **more: Any) -> None:
        super().__init__(reason, **more)
        self.part = part


def _read(file: str, what: str, part: str) -> bytes:
    try:
        return read_file(file, what, MAX_BYTES)
    except Invalid as bad:
        raise BadCredentials(bad.reason, part=part) from bad


@dataclass(frozen=True, slots=True)
class Credentials:
    """All files are PEM; empty: none.

    - `tls`: connections are encrypted, and the broker's certificate is verified.
    - `ca`: the authorities for that. Empty: those that this machine trusts.
    - `cert`, `key`: our own certificate and its key, for brokers that ask for one.
    - `token`: the token's text. `token_file`: a file with it.
    """

    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""
    as_operator: bool = False

    def check(self) -> Credentials:
        """Return itself, once all files were read and can be used. Raise Invalid."""
        if self.token and self.token_file:
            raise Invalid("give a token or the file that has it, not both")
        if bool(self.cert) != bool(self.key):
            raise Invalid("a certificate of our own takes both: the certificate and its key")
        self.metadata()
        if self.tls:
            self.context()
            self._parts()
        return self

    def metadata(self) -> Metadata:
        """Return the metadata of each call. Raise Invalid if the token cannot be read or is none."""
        token = self.token
        if self.token_file:
            token = _read(self.token_file, "token file", "token").decode("ascii", "replace").strip()
            if not token:
                raise BadCredentials(
                    f"the token file {self.token_file!r} is empty: write the token into it", part="token"
                )
        if token and TOKEN.fullmatch(token) is None:
            why = "this is no token: one begins with timeline_ and has 86 characters ('timeline token create')"
            raise BadCredentials(why, part="token")
        said = ((AUTHORIZATION, f"Bearer {token}"),) if token else ()
        return (*said, (AS_OPERATOR, "1")) if self.as_operator else said

    @property
    def stamps(self) -> object:
        """Changes when one of the files with certificates does."""
        return tuple(stamp_of(file) for file in (self.ca, self.cert, self.key) if file)

    def _parts(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return authorities, key and certificate for gRPC. Raise Invalid."""
        ca = self.ca or ssl.get_default_verify_paths().cafile or ""
        roots = _read(ca, "CA", "ca") if ca else None
        if not self.cert:
            return roots, None, None
        key = _read(self.key, "key", "key")
        return roots, key, _read(self.cert, "certificate", "cert")

    def channel(self, address: str, options: list[tuple[str, Any]]) -> Any:
        """Return a gRPC channel to `address`. Raise Invalid if a file cannot be read."""
        import grpc.aio  # on first use: who only builds a message needs none

        if not self.tls:
            return grpc.aio.insecure_channel(address, options=options)
        made = grpc.ssl_channel_credentials(*self._parts())
        return grpc.aio.secure_channel(address, made, options=options)

    def context(self) -> ssl.SSLContext:
        """Return the same for Python's own TLS, which explains what is wrong with a certificate. Raise Invalid."""
        context = ssl.create_default_context()
        context.set_alpn_protocols(["h2"])
        if self.ca:
            context = _trusting(self.ca, context)
        if self.cert:
            load_pair(context, self.cert, self.key)
        return context


PLAIN = Credentials()
"""No encryption, no identity."""


def credentials_of(
    tls: bool | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    token: str | os.PathLike[str] | None = None,
    as_operator: bool = False,
) -> Credentials:
    """Return credentials as people give them. `ca` or `cert` mean TLS. A path as `token` is a file that has it. Raise
    Invalid."""
    files = {}
    for name, value in (("ca", ca), ("cert", cert), ("key", key)):
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise Invalid(f"{name} is the name of a PEM file, not {value!r:.60}")
        files[name] = os.fspath(value) if value is not None else ""
    if token is not None and not isinstance(token, (str, os.PathLike)):
        raise Invalid("token is a text that begins with timeline_, or the path of a file that has it")
    if tls is False and any(files.values()):
        raise Invalid("certificates are given, and tls=False: leave one of them out")
    text, file = (token, "") if isinstance(token, str) else ("", os.fspath(token) if token is not None else "")
    encrypted = bool(tls) or any(files.values())
    return Credentials(encrypted, **files, token=text, token_file=file, as_operator=bool(as_operator)).check()


def _trusting(ca: str, context: ssl.SSLContext) -> ssl.SSLContext:
    """Return a context like `context` that trusts only the authorities in the file `ca`."""
    only = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    only.set_alpn_protocols(["h2"])
    only.check_hostname, only.verify_mode = context.check_hostname, context.verify_mode
    try:
        load_authorities(only, _read(ca, "CA", "ca"), ca)
    except Invalid as bad:
        raise BadCredentials(bad.reason, part="ca") from bad
    return only


def load_pair(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Load a certificate and its key from PEM files. Raise Invalid."""
    try:
        context.load_cert_chain(cert, key, password=_encrypted)
    except ssl.SSLError as bad:
        if "KEY_VALUES_MISMATCH" in str(bad.reason):
            raise Invalid(f"the key {key!r} is not that of the certificate {cert!r}") from bad
        raise Invalid(f"{cert!r} and {key!r} must be a certificate and its key, in PEM") from bad
    except OSError as cannot:
        raise Invalid(f"{cert!r} and {key!r} cannot be read: {cannot.strerror}") from cannot


@dataclass(frozen=True, slots=True)
class ServerPair:
    """A server's certificates and key, in PEM. `expires_ms`: when the first certificate expires."""

    chain: bytes
    key: bytes
    expires_ms: int


def load_server_pair(context: ssl.SSLContext, cert: str, key: str, now_ms: int) -> ServerPair:
    """Load a server's certificate and key from plain files. Raise Invalid, also if the certificate is not valid now."""
    chain, secret = read_file(cert, "certificate", MAX_BYTES), read_file(key, "key", MAX_BYTES)
    for content, file in ((chain, cert), (secret, key)):
        if b"\0" in content:  # gRPC would read no further, and go on with what it had
            raise Invalid(f"{file!r} has a zero byte in it, and must be text, in PEM")
    load_pair(context, cert, key)
    starts_ms, expires_ms = validity_ms(chain, cert)
    if now_ms >= expires_ms:
        raise Invalid(f"the certificate {cert!r} expired on {shown_minute(expires_ms)}: renew it")
    if now_ms < starts_ms:
        raise Invalid(
            f"the certificate {cert!r} is valid from {shown_minute(starts_ms)} on: is this machine's clock right?"
        )
    return ServerPair(chain, secret, expires_ms)


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


def shown_minute(at_ms: int) -> str:
    """Return a day and a time of UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


def load_authorities(context: ssl.SSLContext, authorities: bytes, file: str) -> None:
    """Load the certificates of authorities, in PEM, which come from `file`. Raise Invalid."""
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii"))
    except (ssl.SSLError, ValueError) as bad:  # also what is empty, or no text
        raise Invalid(f"{file!r} must be certificates of authorities, in PEM") from bad


def _encrypted() -> str:
    said = "the key is encrypted: give one without a password, in a file that only its user may read"
    raise BadCredentials(said, part="key")


class CallMetadata:
    """The metadata of each call. A token from a file is the file's present one, so that it can be renewed."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._metadata: Metadata | None = None
        self._stamp: object = None

    def metadata(self) -> Metadata:
        """Return it for gRPC. A file that cannot be read just now, perhaps while it is written, changes nothing. Raise
        Invalid the first time."""
        file = self._credentials.token_file
        stamp = stamp_of(file) if file else None
        if self._metadata is None:
            self._stamp, self._metadata = stamp, self._credentials.metadata()
        elif stamp != self._stamp:
            try:
                self._stamp, self._metadata = stamp, self._credentials.metadata()
            except Invalid:
                self._stamp = None  # looked at again at the next call
        return self._metadata
