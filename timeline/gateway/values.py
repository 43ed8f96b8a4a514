"""JSON values and the driver's: times, payloads, and parts of a path. Wrong ones are refused in plain words."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, get_args
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw, UnsetType, inspect

from timeline.driver.consume.pull import PulledDelivery
from timeline.driver.message import of_message
from timeline.driver.times import Duration, When, duration_ms, in_utc, instant_ms, iso, parse_iso, shown
from timeline.errors import FIXED_LIMIT, Invalid, TooLarge
from timeline.gateway.shapes import (
    CatchUpName,
    IfExists,
    LeasedMessage,
    MoveMessage,
    MoveTag,
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
EMPTY = "the body is empty: send JSON"
NO_TRACE: Mapping[str, str] = {}
TOO_DEEP = "this JSON is nested too deeply: give it as payload_text, which is not read"
CONTENT_TYPE = "content-type"
JSON = "application/json"
MAX_REREAD_BYTES = 64 * 1024
"""A larger body is not read a second time: it could be one of very many fields."""
WHOLE = re.compile(rb"(-?[0-9]+)\.0+")
TIMES = "a time is RFC 3339 with its offset (2030-03-29T09:00+02:00, …Z), or milliseconds since 1970 UTC"
DECODED_PLUS = re.compile(r"[-\d]{8,10}[Tt ][\d:.]{2,20} \d\d:?\d\d")
"""A time whose + was not encoded in an address: a space stands for it."""

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
PLACE = re.compile(r" - at '(\$[^']*?(\w+))'$")
MOST_SAID = 300
"""Characters of a decoder's sentence that are kept. It repeats the name of a field that is not known, whole."""
AT = r"(?: - at '(\$[\w.\[\]]*)')?"
WRONG_TYPE = re.compile(rf"Expected '([\w |]+)', got '(\w+)'{AT}")
OUT_OF_BOUNDS = re.compile(rf"Expected '(int|float)(?: \| null)?' (>=|<=) (-?[\d.]+){AT}")
MISSING = re.compile(rf"Object missing required field '(\w+)'{AT}")
UNKNOWN = re.compile(rf"Object contains unknown field '(.*?)'{AT}", re.DOTALL)
TYPES: Mapping[str, str] = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
"""By type, as the decoder calls it: plain words."""
UNQUOTED = frozenset(("int", "float", "bool"))
MOST_OF_A_NAME = 40
PAYLOADS = frozenset(("payload", "payload_text", "payload_base64"))
NO_PAYLOAD = 'to change a payload, produce it again with if_exists: "replace"'
NO_BY = "by goes with ?tag= alone"


def in_words(said: str, field: str = "", kind: Any = None) -> str:
    """Return a decoder's sentence in plain words. A sentence that is not known stays as it is, without its middle if it
    is long.

    `field`: the parameter of the address that it is about. `kind`: the type that was decoded, which names the fields.
    """
    if len(said) > MOST_SAID:
        said = f"{said[: MOST_SAID // 2]}…{said[-MOST_SAID // 2 :]}"
    said = said.replace("`", "'")
    if wrong := WRONG_TYPE.fullmatch(said):
        plain = _wrong_type(wrong[1], wrong[2], wrong[3], field, kind)
    elif bound := OUT_OF_BOUNDS.fullmatch(said):
        limit = f"{bound[3]} or more" if bound[2] == ">=" else f"at most {bound[3]}"
        plain = f"{_subject(bound[4], field, kind)} must be {TYPES[bound[1]]} of {limit}"
    elif missing := MISSING.fullmatch(said):
        plain = f"the field '{missing[1]}' is missing{_at(missing[2])}"
    elif unknown := UNKNOWN.fullmatch(said):
        plain = _unknown(unknown[1], unknown[2], kind)
    else:
        plain = ""
    if plain:
        return plain
    if said.startswith(NO_CHOICE):
        place = PLACE.search(said)
        path, name = (place[1], place[2]) if place else (None, field)
        if words := CHOICES.get(name):
            value = said.removeprefix(NO_CHOICE).partition(" - at ")[0].strip()
            return f"{_subject(path, field, kind)} must be one of {', '.join(words)}, not {value}"
    return f"{field}: {said}" if field else said


def _wrong_type(expected: str, got: str, path: str | None, field: str, kind: Any) -> str:
    """Return the sentence for a value of another type. Empty: a type has no plain words."""
    types = [each for each in expected.split(" | ") if each != "null"] or ["null"]
    if not {*types, got} <= TYPES.keys():
        return ""
    if "float" in types and "int" in types:
        types.remove("int")
    said = f"{_subject(path, field, kind)} must be {' or '.join(TYPES[each] for each in types)}"
    if types == ["object"] and not path and not field:
        said += _example(kind)
    if field and got == "str":
        return said  # all parameters are text
    found = "a fraction" if got == "float" and "int" in types else TYPES["float" if got == "int" else got]
    if types == ["str"] and got in UNQUOTED:
        return f"{said}, not {found}: put it in quotes"
    if got == "str" and UNQUOTED.issuperset(types):
        return f"{said}, not {found}: write it without quotes"
    return f"{said}, not {found}"


def _subject(path: str | None, field: str, kind: Any) -> str:
    """Return what a sentence is about."""
    return _shown(path) or field or ("the body" if kind is None or _struct(kind) else "the value")


def _shown(path: str | None) -> str:
    """Return a decoder's path without its root. Empty: the root."""
    below = (path or "").removeprefix("$").removeprefix(".")
    if not below.endswith("[...]"):
        return below
    owner = below.removesuffix("[...]")
    return f"each value of {owner}" if owner else "each value"


def _at(path: str | None) -> str:
    return f" at {place}" if (place := _shown(path)) else ""


def _unknown(name: str, path: str | None, kind: Any) -> str:
    """Return the sentence for a field that is not known: what to write, or which fields there are."""
    shown_name = name if len(name) <= MOST_OF_A_NAME else f"{name[:MOST_OF_A_NAME]}…"
    said = f"there is no field '{shown_name}'{_at(path)}"
    struct = _struct(kind)
    if struct is None:
        return said
    if name in PAYLOADS and struct.cls in (MoveMessage, MoveTag):
        return f"{said}: {NO_PAYLOAD}"
    if name == "by" and struct.cls is MoveMessage:
        return f"{said}: {NO_BY}"
    if name.endswith("_ms") and (example := _spans(kind).get(name.removesuffix("_ms"))):
        return f'{said}: write {name.removesuffix("_ms")} (as in "{example}")'
    return f"{said}: this call takes {_names(kind)}"


@lru_cache(256)
def _struct(kind: Any) -> inspect.StructType | None:
    """Return the object that a body of this type is, or has many of. None: another type."""
    if kind is None:
        return None
    parts = [inspect.type_info(kind)]
    for part in parts:
        if isinstance(part, inspect.StructType):
            return part
        if isinstance(part, inspect.UnionType):
            parts.extend(part.types)
        elif isinstance(part, inspect.ListType):
            parts.append(part.item_type)
    return None


@lru_cache(256)
def _names(kind: Any) -> str:
    """Return the names of all fields."""
    struct = _struct(kind)
    return ", ".join(sorted(field.encode_name for field in struct.fields)) if struct else ""


@lru_cache(256)
def _spans(kind: Any) -> Mapping[str, str]:
    """Return an example of each field that is a duration or a time: those that are text or a number."""
    struct, examples = _struct(kind), {}
    for field in struct.fields if struct else ():
        type_ = field.type.type if isinstance(field.type, inspect.Metadata) else field.type
        kinds = {type(each) for each in type_.types} if isinstance(type_, inspect.UnionType) else set()
        if {inspect.StrType, inspect.IntType} <= kinds:
            examples[field.encode_name] = "1h" if inspect.FloatType in kinds else "2030-03-29T09:00Z"
    return examples


@lru_cache(256)
def _example(kind: Any) -> str:
    """Return the beginning of such an object. Empty: none fits."""
    struct = _struct(kind)
    required = [field.encode_name for field in struct.fields if field.required] if struct else []
    if struct and any(field.encode_name == "payload" for field in struct.fields):
        required = ["payload"]
    return f' such as {{"{required[0]}": …}}' if required else ""


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
        raise Invalid(in_words(str(bad), kind=decoder.type)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        if not body or body.isspace():
            raise Invalid(EMPTY) from None
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
        when = parse_iso(said)
    except ValueError:
        plus = ". Write + as %2B in an address" if DECODED_PLUS.fullmatch(said) else ""
        raise Invalid(f"{name} {value!r:.60} is no time: {TIMES}{plus}") from None
    if when.tzinfo is None:
        raise Invalid(f"{name} {value!r:.60} does not say in which time zone: add the offset ({in_utc(said)} is UTC)")
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
        try:
            raw.decode()
        except UnicodeDecodeError:
            raise Invalid("payload is JSON, which is UTF-8: give other bytes as payload_base64") from None
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
