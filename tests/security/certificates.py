"""Authorities and certificates of this run's own, made with `cryptography`, for brokers and clients under test."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)
NOW = datetime.now(UTC).replace(microsecond=0)


@dataclass(frozen=True, slots=True)
class Pair:
    """The names of two PEM files."""

    cert: str
    key: str


class Authority:
    """Signs certificates; its own is in the file `ca`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named(name)
        basic = x509.BasicConstraints(ca=True, path_length=0)
        made = _builder(self._subject, self._subject, self._key.public_key(), NOW - DAY, NOW + 30 * DAY)
        self._certificate = made.add_extension(basic, critical=True).sign(self._key, hashes.SHA256())
        self.ca = str(folder / f"{name}.ca.pem")
        Path(self.ca).write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, *hosts: str, starts: datetime = NOW - DAY, ends: datetime = NOW + 20 * DAY, file: str = ""
    ) -> Pair:
        """A certificate for `hosts` (names or addresses), signed by this authority; in files `file`, or `name`."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = _builder(_named(name), self._subject, key.public_key(), starts, ends)
        if hosts:
            made = made.add_extension(x509.SubjectAlternativeName([_host(each) for each in hosts]), critical=False)
        signed = made.sign(self._key, hashes.SHA256())
        pair = Pair(*(str(self._folder / f"{self._name}.{file or name}.{kind}") for kind in ("pem", "key")))
        Path(pair.cert).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        Path(pair.key).write_bytes(pem_of(key))
        return pair


def pem_of(key: ec.EllipticCurvePrivateKey, password: bytes = b"") -> bytes:
    """A key as PEM; encrypted with a password."""
    hidden: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if password:
        hidden = serialization.BestAvailableEncryption(password)
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, starts: datetime, ends: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(starts)
        .not_valid_after(ends)
    )
