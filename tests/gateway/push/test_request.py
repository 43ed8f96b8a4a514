"""The request of a webhook: Standard Webhooks verifies it, and no text of a message adds a header."""

from __future__ import annotations

import base64
import re
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from timeline.errors import Invalid
from timeline.gateway.push.request import PushedMessage, encoded, headers_of, signatures

SECRETS = [f"whsec_{base64.b64encode(bytes([number]) * 32).decode()}" for number in range(3)]
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VISIBLE = re.compile(r"(?! )[\x20-\x7e]*(?<! )")


def message(**changes: Any) -> PushedMessage:
    given_: dict[str, Any] = {
        "topic": "departures", "id": "UA1545", "birth": 7, "payload": b'{"gate": 7}', "headers": {},
        "due": "2026-11-25", "deliveries": 1, "receipt": "AbC-_",
    } | changes  # fmt: skip
    return PushedMessage(**given_)


def verified(secret: str, sent: PushedMessage, secrets: list[str]) -> Any:
    headers = dict(headers_of(sent, secrets, int(time.time())))
    return Webhook(secret).verify(sent.payload, headers)


def test_standard_webhooks_verifies_our_signature() -> None:
    assert verified(SECRETS[0], message(), SECRETS[:1]) == {"gate": 7}


def test_both_secrets_verify_during_a_rotation_and_no_other_does() -> None:
    for secret in SECRETS[:2]:
        assert verified(secret, message(), SECRETS[:2]) == {"gate": 7}
    with pytest.raises(WebhookVerificationError):
        verified(SECRETS[2], message(), SECRETS[:2])


def test_a_changed_body_id_or_time_is_noticed() -> None:
    sent = message()
    headers = dict(headers_of(sent, SECRETS[:1], now := int(time.time())))
    for change in ({"webhook-id": "other"}, {"webhook-timestamp": str(now + 1)}):
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRETS[0]).verify(sent.payload, headers | change)
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRETS[0]).verify(b'{"gate": 8}', headers)


def test_the_signature_is_that_of_their_library() -> None:
    """Byte for byte, of the same id, time and body."""
    at = datetime(2026, 11, 25, tzinfo=UTC)
    theirs = Webhook(SECRETS[0]).sign("msg_1", at, '{"a": 1}')
    assert signatures(SECRETS[:1], "msg_1", int(at.timestamp()), b'{"a": 1}') == theirs


def test_the_webhook_id_is_that_of_one_life_of_the_id() -> None:
    """The same for each delivery, so that a receiver recognises repeats; another one when the id is produced again."""
    first = message().webhook_id
    assert message(deliveries=2, receipt="other").webhook_id == first == "UA1545-0000000000000007"
    assert message(birth=8).webhook_id != first
    assert "." not in message(id="a.1").webhook_id and message(id="a.1").webhook_id != message(id="a%2E1").webhook_id


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_AAAA", "word", "whsec_ä"])
def test_what_is_no_secret_signs_nothing_and_is_not_shown(secret: str) -> None:
    with pytest.raises(Invalid) as refused:
        signatures([secret], "id", 1, b"")
    assert not secret.removeprefix("whsec_") or secret not in str(refused.value)


def test_without_a_secret_nothing_is_sent() -> None:
    with pytest.raises(Invalid, match="timeline topic secret NAME --rotate"):
        headers_of(message(), [], 1)


ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.mark.slow
@given(id=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=60), topic=ANY_TEXT,
       headers=st.dictionaries(ANY_TEXT.filter(bool), ANY_TEXT, max_size=4))  # fmt: skip
def test_no_text_of_a_message_can_end_a_header(id: str, topic: str, headers: dict[str, str]) -> None:
    made = headers_of(message(id=id, topic=topic, headers=headers), SECRETS[:1], 1)
    for name, value in made:
        assert TOKEN.fullmatch(name) and VISIBLE.fullmatch(value), (name, value)
    by_name = dict(made)
    assert unquote(by_name["Timeline-Id"]) == id and unquote(by_name["Timeline-Topic"]) == topic
    assert unquote(by_name["webhook-id"]).rpartition("-")[0] == id
    for name, value in headers.items():
        told = [value_ for name_, value_ in made if unquote(name_) == f"Timeline-Header-{name}"]
        assert [unquote(each) for each in told] == [value]


@pytest.mark.parametrize("text", ["a\r\nHost: evil", "a\nb", "a\0b", "é", " a ", "100%", "\u2028", "\x7f", "\t"])
def test_control_characters_are_encoded(text: str) -> None:
    assert VISIBLE.fullmatch(encoded(text)) and unquote(encoded(text)) == text


def test_a_trace_goes_on_and_a_wrong_one_does_not() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    made = dict(headers_of(message(headers={"traceparent": trace, "tracestate": "a=b"}), SECRETS[:1], 1))
    assert (made["traceparent"], made["tracestate"]) == (trace, "a=b")
    for wrong in ("00-0af7", trace + "\r\nx: y", trace.upper()):
        assert "traceparent" not in dict(headers_of(message(headers={"traceparent": wrong}), SECRETS[:1], 1))


@pytest.mark.parametrize(
    ("named", "sent"),
    [
        ("application/json", "application/json"),
        ("text/plain; charset=utf-8", "text/plain; charset=utf-8"),
        ("text/plain\r\nx: y", "application/octet-stream"),
        ("", "application/octet-stream"),
    ],
)
def test_the_media_type_is_that_of_the_message_if_it_is_one(named: str, sent: str) -> None:
    assert dict(headers_of(message(headers={"Content-Type": named}), SECRETS[:1], 1))["content-type"] == sent
