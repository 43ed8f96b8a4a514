"""The gate that is a webhook receiver: what it lets in."""

from __future__ import annotations

from datetime import UTC, datetime

from standardwebhooks import Webhook

from timeline.demo.webhook import signed

SECRET = "whsec_MDEyMzQ1Njc4OWFiY2RlZg=="
BODY = b'{"flight":"UA 1545"}'


def headers_of(secret: str, body: bytes = BODY) -> dict[str, str]:
    now = datetime.now(UTC)
    signature = Webhook(secret).sign("a-1", now, body.decode())
    other = Webhook("whsec_OTg3NjU0MzIxMGZlZGNiYQ==").sign("a-1", now, body.decode())
    told = {"webhook-id": "a-1", "webhook-timestamp": str(int(now.timestamp()))}
    return {**told, "webhook-signature": f"{other} {signature}"}


def test_a_request_with_one_good_signature_is_let_in() -> None:
    assert signed(headers_of(SECRET), BODY, SECRET)


def test_another_secret_or_another_body_is_not() -> None:
    assert not signed(headers_of("whsec_ZmVkY2JhOTg3NjU0MzIxMA=="), BODY, SECRET)
    assert not signed(headers_of(SECRET), BODY + b" ", SECRET)
