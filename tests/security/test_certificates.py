"""A broker's certificate as files: what is read from them, and what is refused with the sentence that mends it."""

from __future__ import annotations

import os
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tests.security.certificates import DAY, NOW, Authority, Pair, pem_of
from tests.security.conftest import Papers
from tests.security.guarded import Tokens
from timeline.broker.server.certificates import Certificates
from timeline.broker.server.gatekeeper import Gatekeeper
from timeline.credentials import validity_ms
from timeline.errors import Invalid
from timeline.metrics import Metrics


def now_ms() -> int:
    return ms(NOW)


def ms(when: datetime) -> int:
    return int(when.timestamp() * 1000)


def opened(pair: Pair, client_ca: str = "") -> Certificates:
    return Certificates(pair.cert, pair.key, client_ca, now_ms)


@pytest.mark.parametrize("ends", [NOW + 20 * DAY, datetime.fromisoformat("2049-12-31T23:59:59+00:00"),
                                  datetime.fromisoformat("2050-01-01T00:00:00+00:00"),
                                  datetime.fromisoformat("2121-06-01T12:00:00+00:00")])  # fmt: skip
def test_validity_is_what_the_certificate_says(tmp_path: Path, ends: datetime) -> None:
    """Years from 2050 on are written another way (RFC 5280)."""
    pair = Authority(tmp_path, "a").issue("broker", "localhost", ends=ends)
    chain = Path(pair.cert).read_bytes()
    parsed = x509.load_pem_x509_certificate(chain)
    assert validity_ms(chain, pair.cert) == (ms(parsed.not_valid_before_utc), ms(parsed.not_valid_after_utc))
    assert opened(pair).loaded.pair.expires_ms == ms(ends)


@pytest.mark.parametrize("cut", range(0, 400, 23))
def test_what_is_no_certificate_is_refused_whatever_it_is(papers: Papers, cut: int) -> None:
    chain = Path(papers.broker.cert).read_text().splitlines()
    body = "".join(chain[1:-1])
    damaged = "\n".join([chain[0], body[:cut] + body[cut + 4 :], chain[-1]]).encode()
    try:
        validity_ms(damaged, "x.pem")
    except Invalid as bad:
        assert "must be a certificate in PEM" in bad.reason
    with pytest.raises(Invalid, match="must be a certificate in PEM"):
        validity_ms(damaged[: len(damaged) // 2], "x.pem")


def test_what_cannot_be_used_is_said(papers: Papers, tmp_path: Path) -> None:
    encrypted, text = tmp_path / "encrypted.key", tmp_path / "text.pem"
    encrypted.write_bytes(pem_of(ec.generate_private_key(ec.SECP256R1()), b"secret"))
    text.write_text("no certificate")
    zero = tmp_path / "zero.pem"
    zero.write_bytes(b"\xff\xfe\0" + Path(papers.broker.cert).read_bytes())
    later = papers.ours.issue("later", "localhost", starts=NOW + DAY, ends=NOW + 2 * DAY)
    for pair, client_ca, says in (
        (Pair("/no/such.pem", papers.broker.key), "", "the certificate '/no/such.pem' cannot be read: No such file"),
        (Pair(papers.broker.cert, "/no/such.key"), "", "the key '/no/such.key' cannot be read: No such file"),
        (Pair(papers.broker.cert, papers.client.key), "", "is not that of the certificate"),
        (Pair(papers.broker.cert, str(encrypted)), "", "the key is encrypted"),
        (Pair(str(text), papers.broker.key), "", "must be a certificate and its key, in PEM"),
        (Pair(str(zero), papers.broker.key), "", "has a zero byte in it"),
        (papers.expired, "", "expired on .*: renew it"),
        (later, "", "is valid from .*clock right"),
        (papers.broker, str(text), "must be certificates of authorities, in PEM"),
        (papers.broker, os.devnull, "must be a plain file"),
        (papers.broker, "/no/ca.pem", "the client CA '/no/ca.pem' cannot be read"),
    ):
        with pytest.raises(Invalid, match=says):
            opened(pair, client_ca)
    if os.geteuid() != 0:
        unreadable = tmp_path / "unreadable.key"
        shutil.copy(papers.broker.key, unreadable)
        unreadable.chmod(0)
        with pytest.raises(Invalid, match="Permission denied"):
            opened(Pair(papers.broker.cert, str(unreadable)))


def test_what_is_broken_later_changes_nothing_and_is_told_once(
    papers: Papers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(str(tmp_path / "b.pem"), str(tmp_path / "b.key"))
    shutil.copy(papers.broker.cert, pair.cert)
    shutil.copy(papers.broker.key, pair.key)
    certificates = opened(pair)
    good = certificates.loaded
    for content in ("", "half of"):
        Path(pair.cert).write_text(content)
        for _ in range(3):
            certificates.look()
    assert certificates.loaded is good
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].startswith("the certificate stays as it was")
    renewed = papers.ours.issue("renewed", "localhost", ends=NOW + 9 * DAY)
    shutil.copy(renewed.cert, pair.cert)
    shutil.copy(renewed.key, pair.key)
    certificates.look()
    assert certificates.loaded.pair.expires_ms == ms(NOW + 9 * DAY)
    assert any("expires on" in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_file_holds_nobody_up(
    papers: Papers, tokens: Tokens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody writes to it: to open it is to wait for ever, and the broker looks at its files between its calls."""
    pair = Pair(str(tmp_path / "b.pem"), str(tmp_path / "b.key"))
    shutil.copy(papers.broker.cert, pair.cert)
    shutil.copy(papers.broker.key, pair.key)
    certificates, gate = opened(pair), Gatekeeper(str(tokens.path), lambda: 0, Metrics())
    for file in (pair.cert, tokens.path):
        os.unlink(file)
        os.mkfifo(file, 0o600)
    certificates.look()
    gate.look()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2 and all("must be a plain file" in error for error in errors)


def test_a_certificate_that_is_good_for_long_is_no_news(papers: Papers, caplog: pytest.LogCaptureFixture) -> None:
    opened(papers.broker)
    assert timedelta(days=14) < 20 * DAY
    assert not caplog.records


def test_a_certificate_that_expires_while_a_broker_runs_is_warned_of_once_a_day(
    papers: Papers, caplog: pytest.LogCaptureFixture
) -> None:
    now_ms = ms(NOW)
    certificates = Certificates(papers.broker.cert, papers.broker.key, "", lambda: now_ms)
    for _ in range(22 * 24 * 2):
        certificates.look()
        now_ms += 1_800_000
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 16, "from 14 days before, to 2 days after"
    assert sum("expires on" in one for one in warned) == 14
    assert "expired on" in warned[-1] and "renew it" in warned[-1]
