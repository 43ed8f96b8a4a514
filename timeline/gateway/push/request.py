"""The request that brings a message to its receiver: headers that nobody can forge, and signatures.

The signature is that of Standard Webhooks: HMAC-SHA256 over `id.timestamp.body`, one per valid secret.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from timeline.errors import Invalid

SECRET_PREFIX = "whsec_"
HEADER_PREFIX = "Timeline-Header-"
PLAIN_TYPE = "application/octet-stream"
_IN_VALUES = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_IN_NAMES = "!#$&'*+-.^_`|~"
"""Characters of a token besides letters and digits. `%` begins an encoded byte."""
_IN_IDS = "!$&'()*+,-/:;=@_~"
_MEDIA_TYPE = re.compile(r"[\w!#$&^+.-]{1,64}/[\w!#$&^+.-]{1,64}(; ?[\w-]{1,32}=[\w.-]{1,64}){0,4}", re.ASCII)
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
_TRACESTATE = re.compile(r"[\x20-\x7e]{1,512}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PushedMessage:
    """A message as its receiver gets it. `birth`: random, one life of the id. `receipt`: settles it later."""

    topic: str
    id: str
    birth: int
    payload: bytes
    headers: Mapping[str, str]
    due: str
    deliveries: int
    receipt: str

    @property
    def webhook_id(self) -> str:
        """Its id for Standard Webhooks: the same for each delivery, and another one if the id is produced again."""
        id = quote(self.id, safe=_IN_IDS).replace(".", "%2E")  # a full stop separates the parts of what is signed
        return f"{id}-{self.birth:016x}"


def signatures(secrets: Sequence[str], webhook_id: str, timestamp_s: int, body: bytes) -> str:
    """Return the value of `webhook-signature`: one signature per secret. Raise Invalid for what is no secret."""
    if not secrets:
        raise Invalid("the topic has no secret to sign with. Make one: timeline topic secret NAME --rotate")
    signed = f"{webhook_id}.{timestamp_s}.".encode() + body
    digests = (hmac.digest(key_of(secret), signed, hashlib.sha256) for secret in secrets)
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def key_of(secret: str) -> bytes:
    """Return the key in a secret. Raise Invalid, without the secret, for anything else."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if len(key) < 16:
        raise Invalid(f"a secret of webhooks is {SECRET_PREFIX} and base64 of 16 bytes or more") from None
    return key


def headers_of(message: PushedMessage, secrets: Sequence[str], timestamp_s: int) -> list[tuple[str, str]]:
    """Return the headers of the request, in order. No text of the message can add one, or end one early.

    Values hold visible ASCII and inner spaces. All other characters, and `%`, are percent-encoded UTF-8. Names are
    tokens in the same way.
    """
    webhook_id = message.webhook_id
    headers = [
        ("content-type", _media_type(message.headers)),
        ("webhook-id", webhook_id),
        ("webhook-timestamp", str(timestamp_s)),
        ("webhook-signature", signatures(secrets, webhook_id, timestamp_s, message.payload)),
        ("Timeline-Id", encoded(message.id)),
        ("Timeline-Topic", encoded(message.topic)),
        ("Timeline-Due", message.due),
        ("Timeline-Deliveries", str(message.deliveries)),
        ("Timeline-Receipt", message.receipt),
    ]
    trace = message.headers.get("traceparent", "")
    if _TRACEPARENT.fullmatch(trace):
        headers.append(("traceparent", trace))
        state = message.headers.get("tracestate", "")
        if _TRACESTATE.fullmatch(state):
            headers.append(("tracestate", state.strip()))
    headers += [(HEADER_PREFIX + quote(name, safe=_IN_NAMES), encoded(text)) for name, text in message.headers.items()]
    return headers


def encoded(text: str) -> str:
    """Return a text as the value of a header. `urllib.parse.unquote` reads it back."""
    value = quote(text, safe=_IN_VALUES)
    inner = value.strip(" ")
    left = len(value) - len(value.lstrip(" "))
    return "%20" * left + inner + "%20" * (len(value) - len(inner) - left)


def _media_type(headers: Mapping[str, str]) -> str:
    named = next((text for name, text in headers.items() if name.lower() == "content-type"), "")
    return named if _MEDIA_TYPE.fullmatch(named) else PLAIN_TYPE
