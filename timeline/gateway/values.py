"""JSON values and the driver's: times, payloads, and parts of a path."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar, get_args
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw, UnsetType

from timeline.driver.consume.pull import PulledDelivery
from timeline.driver.message import of_message
from timeline.driver.times import Duration, When, duration_ms, instant_ms, iso, shown
from timeline.errors import FIXED_LIMIT, Invalid, TooLarge
from timeline.gateway.shapes import (
    CatchUpName,
    IfExists,
    LeasedMessage,
    NewMessage,
    OverlapName,
    Pending,
    ScheduleFields,
)
from timeline.model import DEFAULT_GROUP, MAX_HEADERS_BYTES
from timeline.recurrence import FoldPolicy, GapPolicy

T = TypeVar("T")
HEADERS = msgspec.json.Decoder(dict[str, str] | None)
MAX_HEADERS_JSON_BYTES = 8 * MAX_HEADERS_BYTES
"""A header's byte takes six in JSON at most, and some spaces."""
NOT_JSON = "this is not JSON"
NO_TRACE: Mapping[str, str] = {}
TOO_DEEP = "this JSON is nested too deeply: give it as payload_text, which is not read"
CONTENT_TYPE = "content-type"
JSON = "application/json"
MAX_REREAD_BYTES = 64 * 1024
"""A larger body is not read a second time: it could be one of very many fields."""
WHOLE = re.compile(rb"(-?[0-9]+)\.0+")
TIMES = "a time is RFC 3339 with its offset (2030-03-29T09:00+02:00, …Z), or milliseconds since 1970 UTC"

CHOICES: Mapping[str, tuple[str, ...]] = {
    "if_exists": get_args(IfExists),
    "pending": get_args(Pending),
    "catch_up": get_args(CatchUpName),
    "overlap": get_args(OverlapName),
    "gap": tuple(GapPolicy),
    "fold": tuple(FoldPolicy),
}
"""By field: the words that it takes."""
NO_CHOICE = "Invalid enum value"
PLACE = re.compile(r" - at '\$[^']*?(\w+)'$")
MOST_SAID = 300
"""Characters of a decoder's sentence that are kept. It repeats the name of a field that is not known, whole."""


def in_words(said: str, field: str = "") -> str:
    """Return what a decoder said, without its middle if that is long, and which words the field takes if the word was
    none of them."""
    said = said.replace("`", "'")
    if len(said) > MOST_SAID:
        said = f"{said[: MOST_SAID // 2]}…{said[-MOST_SAID // 2 :]}"
    if not said.startswith(NO_CHOICE):
        return said
    place = PLACE.search(said)
    words = CHOICES.get(place[1] if place else field)
    return f"{said}: it is one of {', '.join(words)}" if words else said


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Return what a body says. Raise Invalid."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            again = _with_whole_numbers(body)
            if again is None:
                raise
            return decoder.decode(again)
    except msgspec.ValidationError as bad:
        raise Invalid(in_words(str(bad))) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise Invalid(f"{NOT_JSON}: {bad!s:.300}") from None
    except RecursionError:
        raise Invalid(TOO_DEEP) from None


def _with_whole_numbers(body: bytes) -> bytes | None:
    """Return a body whose fields have 643 in the place of 643.0: JSON has one kind of number. Payloads stay. None: it
    has no such field."""
    if len(body) > MAX_REREAD_BYTES:
        return None
    try:
        read = msgspec.json.decode(body, type=dict[str, Raw] | list[dict[str, Raw]])
    except msgspec.DecodeError:
        return None
    found = False
    for fields in read if isinstance(read, list) else [read]:
        for name, value in fields.items():
            if name != "payload" and (whole := WHOLE.fullmatch(value)):
                fields[name], found = Raw(whole[1]), True
    return msgspec.json.encode(read) if found else None


def text_of(part: str) -> str:
    """Return a part of a path without its percent signs. Raise Invalid unless it is UTF-8."""
    try:
        return unquote_to_bytes(part).decode()
    except UnicodeDecodeError:
        raise Invalid(f"a path is UTF-8 with percent signs, not {part!r:.80}") from None


def instant(value: str | int, name: str) -> int:
    """Return a time for the driver, in milliseconds UTC. Raise Invalid, which names the field."""
    if isinstance(value, int):
        return instant_ms(value, name)
    said = value.strip()
    if said.isascii() and said.isdigit() and len(said) <= 30:
        return instant_ms(int(said), name)
    try:
        when = datetime.fromisoformat(said.upper())  # RFC 3339 allows t and z
    except ValueError:
        raise Invalid(f"{name} {value!r:.60} is no time: {TIMES}") from None
    if when.tzinfo is None:
        meant = said if ":" in said else f"{said}T00:00"
        raise Invalid(f"{name} {value!r:.60} does not say in which time zone: add the offset ({meant}Z is UTC)")
    return instant_ms(when, name)


def length(value: str | int | float, name: str, *, least_ms: int = 0) -> Duration:
    """Return a duration for the driver. A number, in JSON or as text, is seconds. Raise Invalid naming the field."""
    if isinstance(value, str):
        try:
            value = float(value) if not value.strip().isdigit() else int(value)
        except ValueError:
            pass  # it has a unit, or is refused below
    return timedelta(milliseconds=duration_ms(value, name, least_ms=least_ms))


def due_of(at: str | int | None, in_: str | int | float | None) -> dict[str, Any]:
    """Return `at=` or `in_=` for the driver. Raise Invalid unless exactly one is given."""
    if at is not None and in_ is None:
        return {"at": instant(at, "at")}
    if in_ is None or at is not None:
        raise Invalid("give either at (a time) or in (how long from now), one of the two")
    return {"in_": length(in_, "in")}


def expiry(value: str | int) -> When | timedelta:
    """Return when a message expires: a time, or a duration from now. Raise Invalid."""
    if isinstance(value, str) and value[-1:].isalpha() and not value.endswith(("Z", "z")):
        return timedelta(milliseconds=duration_ms(value, "expires", least_ms=1))
    return instant(value, "expires")


class ToPut(NamedTuple):
    """One message to put: the arguments of its `Message`, its group, and what to do if its id is taken."""

    fields: dict[str, Any]
    group: str = DEFAULT_GROUP
    if_exists: str | None = None


def to_put(asked: NewMessage, id: str | None = None, trace: Mapping[str, str] = NO_TRACE) -> ToPut:
    """Return what a body asks to put. `id`: for a message that has none. `trace`: headers of the caller's trace.

    They go with a message without an id of its own. Another one may be put again in another trace, and must then be the
    same message. Raise Invalid or TooLarge.
    """
    try:
        payload, headers = payload_of(asked)
        if trace and asked.id is None:
            headers = {**trace, **(headers or {})}
        when = due_of(asked.at, asked.in_)
        expires = None if asked.expires is None else expiry(asked.expires)
    except (Invalid, TooLarge) as wrong:
        raise of_message(wrong, asked.id) from None
    fields = {
        "payload": payload,
        "id": id if asked.id is None else asked.id,
        "tag": asked.tag,
        "headers": headers,
        "expires": expires,
        **when,
    }
    return ToPut(fields, asked.group, asked.if_exists)


def payload_of(asked: NewMessage | ScheduleFields) -> tuple[bytes, dict[str, str] | None]:
    """Return the payload and the headers. A JSON value is marked by its content type."""
    raw = b"" if isinstance(asked.payload, UnsetType) else bytes(asked.payload)
    given = (bool(raw), asked.payload_text is not None, asked.payload_base64 is not None).count(True)
    if given != 1:
        raise Invalid("give one of payload (any JSON value), payload_text and payload_base64")
    headers = headers_of(asked)
    if raw:
        headers = headers or {}
        if not any(name.lower() == CONTENT_TYPE for name in headers):
            headers[CONTENT_TYPE] = JSON
        return raw, headers
    if asked.payload_text is not None:
        return asked.payload_text.encode(), headers
    try:
        return base64.b64decode(asked.payload_base64 or "", validate=True), headers
    except (binascii.Error, ValueError):
        raise Invalid(f"payload_base64 must be base64 with padding, not {shown(asked.payload_base64)}") from None


def headers_of(asked: NewMessage | ScheduleFields) -> dict[str, str] | None:
    """Return the headers. Raise Invalid or TooLarge."""
    if isinstance(asked.headers, UnsetType):
        return None
    raw = bytes(asked.headers)
    if len(raw) > MAX_HEADERS_JSON_BYTES:
        raise TooLarge(f"headers may take {MAX_HEADERS_BYTES} bytes in all", advice=FIXED_LIMIT)
    try:
        headers: dict[str, str] | None = decoded(HEADERS, raw)
        return headers
    except Invalid as bad:
        raise Invalid(f"headers: {bad.reason}") from None


def payload_fields(payload: bytes, headers: Mapping[str, str] | None) -> dict[str, Any]:
    """Return a payload for an answer: what was put as JSON as JSON, other UTF-8 as text, the rest in base64."""
    if is_json(headers):
        try:
            payload.decode()
            return {"payload": msgspec.json.decode(payload, type=Raw)}
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            pass  # its content type is not true, or it is nested too deeply
    try:
        return {"payload_text": payload.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(payload).decode()}


def is_json(headers: Mapping[str, str] | None) -> bool:
    """Return whether these headers mark a payload as JSON."""
    kinds = (value for name, value in (headers or {}).items() if name.lower() == CONTENT_TYPE)
    return any(kind.partition(";")[0].strip().lower() == JSON for kind in kinds)


def leased_message(one: PulledDelivery) -> LeasedMessage:
    """Return a delivery for an answer."""
    headers = one.headers
    return LeasedMessage(
        id=one.id,
        receipt=one.receipt,
        headers=headers,
        tag=one.tag,
        due=iso(one.due_ms),
        scheduled=iso(one.scheduled_ms),
        deliveries=one.deliveries,
        lateness_ms=max(0, round(one.lateness.total_seconds() * 1000)),
        lease_until=iso(one.lease_until_ms),
        retry_in_ms=one.retry_in // timedelta(milliseconds=1),
        max_deliveries=one.max_deliveries,
        **payload_fields(one.payload, headers),
    )
