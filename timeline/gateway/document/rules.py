"""The values that parameters and bodies take, as far as JSON Schema can say it.

The calls check values themselves, so that a refusal has the command line's sentence. A schema cannot say what depends
on the time, on the topic, or on stored messages, such as a due time beyond the topic's horizon.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from timeline.driver.queries import DURATIONS, NUMBERS
from timeline.driver.times import LOOKS_LIKE_SECONDS
from timeline.gateway.requests import MAX_KEY_BYTES
from timeline.gateway.routes.recurring import MOST_SHOWN
from timeline.gateway.streams import MAX_CREDIT
from timeline.model import (
    DEFAULT_GROUP,
    KINDS,
    MAX_DURATION_MS,
    MAX_GROUP_BYTES,
    MAX_ID_BYTES,
    MAX_PUSH_URL_BYTES,
    MAX_REASON_BYTES,
    MAX_TAG_BYTES,
    MAX_TIME_MS,
    MAX_TOPIC_CHARS,
    SETTING_RANGES,
)
from timeline.recurrence.recurrence import LEAST_PERIOD_MS, MOST_RULES
from timeline.recurrence.rules import MOST_COUNT
from timeline.schedules.specification import MOST_JITTER_MS, MOST_WINDOW_MS

Schema = dict[str, Any]

MAX_LEASED, MAX_LEASED_BYTES = 1_000, 4 * 1024 * 1024
"""Bounds of one take, which the driver checks."""
MAX_INT = 2**63 - 1
NULL: Schema = {"type": "null"}
INTEGER: Schema = {"type": "integer"}
_LENGTH = r"[0-9]{1,30}(\.[0-9]{1,30})?\s*(us|ms|s|m|h|d|w)\s*"
LENGTH_TEXT: Schema = {"type": "string", "format": "timeline-duration", "pattern": rf"^\s*({_LENGTH})+$"}
SHIFT_TEXT: Schema = {"type": "string", "format": "timeline-duration", "pattern": rf"^\s*-?\s*({_LENGTH})+$"}
SECONDS: Schema = {"type": "number", "minimum": 0, "maximum": MAX_DURATION_MS / 1000}
SOME_SECONDS: Schema = {"type": "number", "minimum": 1e-6, "maximum": MAX_DURATION_MS / 1000}
LENGTH: Schema = {"anyOf": [LENGTH_TEXT, SECONDS]}
SOME_LENGTH: Schema = {"anyOf": [LENGTH_TEXT, SOME_SECONDS]}
SHIFT: Schema = {"anyOf": [SHIFT_TEXT, SECONDS | {"minimum": -MAX_DURATION_MS / 1000}]}
INSTANT: Schema = {"type": "string", "format": "date-time"}
TIME: Schema = {"anyOf": [INSTANT, {"type": "integer", "minimum": LOOKS_LIKE_SECONDS, "maximum": MAX_TIME_MS}]}
EXPIRY: Schema = {"anyOf": [*TIME["anyOf"], LENGTH_TEXT]}


def _text(least: int, most: int, **more: Any) -> Schema:
    """Return the schema of a text without NUL. Its bytes in UTF-8 are bounded, so its characters are."""
    return {"type": "string", "minLength": least, "maxLength": most, "pattern": "^[^\\x00]*$", **more}


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


ID = _text(1, MAX_ID_BYTES, format="timeline-id")
GROUP = _text(1, MAX_GROUP_BYTES)
TAG = _text(0, MAX_TAG_BYTES)
SOME_TAG = TAG | {"minLength": 1}
TOPIC: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_TOPIC_CHARS, "format": "timeline-topic"}
SCHEDULE: Schema = {
    "type": "string",
    "pattern": r"^(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}$",
    "format": "timeline-schedule",
}
"""A name that a path can carry: no `.` and no `..`."""
HEADER: Schema = {"type": "string", "minLength": 1}
IF_EXISTS: Schema = {"type": "string", "enum": ["move", "replace"]}
BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
VERSION = _whole(1, MAX_INT)
CURSOR: Schema = {"type": "string", "format": "timeline-cursor"}
RESUME: Schema = {"type": "string", "minLength": 1, "format": "timeline-resume"}
STATES: Schema = {"type": "array", "items": {"enum": ["waiting", "available", "leased", "dead"], "type": "string"}}

PARAMETERS: dict[str, Schema] = {
    "topic": TOPIC, "id": ID, "group": GROUP | {"default": DEFAULT_GROUP}, "tag": TAG,
    "state": STATES, "if_version": VERSION, "cursor": CURSOR,
    "resume": RESUME, "due_from": TIME, "due_to": TIME, "credit": _whole(1, MAX_CREDIT) | {"default": 10},
    "since": SOME_LENGTH | {"default": "1h"}, "window": SOME_LENGTH | {"default": "1h"},
    "step": SOME_LENGTH | {"default": "1m"}, "lease": SOME_LENGTH,
    "name": SCHEDULE, "if_revision": _whole(0, MAX_INT) | {"default": 0},
}  # fmt: skip
"""By name, what a parameter of a path or a query takes."""
OF_CALLS: dict[tuple[str, str], Schema] = {("moveTag", "tag"): SOME_TAG, ("cancelTag", "tag"): SOME_TAG}
"""Where one call takes others."""

FIELDS: dict[str, Schema] = {
    "id": ID, "at": TIME, "in": LENGTH, "by": SHIFT, "tag": TAG, "expires": EXPIRY, "group": GROUP,
    "if_version": VERSION, "resume": RESUME, "lease": SOME_LENGTH, "wait": LENGTH, "max": _whole(1, MAX_LEASED),
    "max_bytes": _whole(1, MAX_LEASED_BYTES), "reason": _text(0, MAX_REASON_BYTES),
    "ids": {"type": "array", "items": ID}, "payload_base64": BASE64,
    "if_exists": IF_EXISTS,
}  # fmt: skip
"""By name, what a field of a body takes. Where the field may be null, null goes with it."""


def _setting(name: str) -> Schema:
    """Return what a setting of a topic takes."""
    if name in DURATIONS:
        least, most = (each / 1000 for each in SETTING_RANGES[DURATIONS[name]])
        seconds: Schema = {"type": "number", "minimum": max(0, least), "maximum": most}
        texts = [LENGTH_TEXT, {"const": "auto"}] if name == "lease_ahead" else [LENGTH_TEXT]
        return {"anyOf": [*texts, seconds], "examples": ["auto" if name == "lease_ahead" else "15m"]}
    return _whole(*SETTING_RANGES[name])


SETTINGS: dict[str, Schema] = {name: _setting(name) for name in (*DURATIONS, *NUMBERS)} | {
    "retry_factor": {"type": "number", "minimum": 1, "maximum": 1000, "multipleOf": 0.01},
    "retry_jitter": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
    "kind": {"enum": list(KINDS), "type": "string"},
    "push_url": {
        "type": "string",
        "maxLength": MAX_PUSH_URL_BYTES,
        "pattern": r"^(https?:/{2}([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?([/?][!$-;=?-\[\]-~]*)?)?$",
    },
}

LAST_BOUND_MS = round(datetime(9999, 1, 1, tzinfo=UTC).timestamp() * 1000)
BOUND: Schema = {"anyOf": [INSTANT, {"type": "integer", "minimum": LOOKS_LIKE_SECONDS, "maximum": LAST_BOUND_MS}]}


def _texts(form: str, **bounds: int) -> Schema:
    """Return the schema of one text, or of a list of several."""
    text: Schema = {"type": "string", "minLength": 1, "format": form}
    return {"anyOf": [text, {"type": "array", "items": text, **bounds}]}


RULES: dict[str, Schema] = {
    "cron": _texts("timeline-cron", maxItems=MOST_RULES), "rrule": _texts("timeline-rrule", maxItems=MOST_RULES),
    "exclude": _texts("timeline-exclude"),  # of which only rules are bounded
    "every": {"anyOf": [LENGTH_TEXT, SECONDS | {"minimum": LEAST_PERIOD_MS / 1000}]}, "start": BOUND, "end": BOUND,
    "count": _whole(1, MOST_COUNT), "zone": {"type": "string", "minLength": 1, "format": "timeline-zone"},
}  # fmt: skip
"""What the fields of a body take that says when something recurs."""
TEMPLATE: dict[str, Schema] = {
    "jitter": {"anyOf": [LENGTH_TEXT, SECONDS | {"maximum": MOST_JITTER_MS / 1000}]},
    "window": {"anyOf": [LENGTH_TEXT, SECONDS | {"maximum": MOST_WINDOW_MS / 1000}]},
    "expires": LENGTH,
}
"""What other fields of a schedule take."""
OF_SHAPES: dict[str, dict[str, Schema]] = {
    "BuryLeases": {"reason": _text(1, MAX_REASON_BYTES)},
    "DeadLetters": {"tag": SOME_TAG},
    "ReviveLetters": {"tag": SOME_TAG},
    "NewTopic": SETTINGS,
    "PreviewRules": RULES | {"from": TIME, "limit": _whole(1, MOST_SHOWN)},
    "NewSchedule": RULES | TEMPLATE | {"name": SCHEDULE},
    "ReplaceSchedule": RULES | TEMPLATE,
    "ChangeSchedule": RULES | TEMPLATE,
    "BackfillRange": {"from": TIME, "to": TIME},
    "TriggerTime": {"at": TIME},
}
"""Where a field of one shape takes others."""
TIMES = frozenset((
    "at", "created", "delivered", "died", "due", "edited", "end", "expires", "last", "last_put", "lease_until", "local",
    "next", "position", "scheduled", "start",
))  # fmt: skip
"""Fields of answers that are times."""
LENGTHS = frozenset((("StoredSchedule", "expires"),))
"""Fields of shapes that are lengths of time, under such a name."""


def _none(name: str) -> Schema:
    """A field that is absent or null."""
    return {"properties": {name: NULL}}


def _given(name: str, given: Schema) -> Schema:
    return {"required": [name], "properties": {name: given}}


def _all(*rules: Schema) -> Schema:
    return {"if": {}, "then": {"allOf": list(rules)}}


_TEXT_OR_NUMBER: Schema = {"type": ["string", "number"]}
AT_OR_IN: Schema = {"if": _none("at"), "then": _given("in", _TEXT_OR_NUMBER), "else": _none("in")}
AT_OR_IN_OR_NONE: Schema = {"if": _given("at", {"type": ["string", "integer"]}), "then": _none("in")}
PAYLOAD: Schema = {
    "if": {"required": ["payload"]},
    "then": {"properties": {"payload_text": NULL, "payload_base64": NULL}},
    "else": {
        "if": _none("payload_text"),
        "then": _given("payload_base64", {"type": "string"}),
        "else": _none("payload_base64"),
    },
}
AT_MOST_ONE_PAYLOAD: Schema = {
    "if": {"required": ["payload"]},
    "then": {"properties": {"payload_text": NULL, "payload_base64": NULL}},
    "else": {"if": _given("payload_text", {"type": "string"}), "then": _none("payload_base64")},
}
LETTERS: Schema = {
    "if": _none("ids"),
    "then": {
        "if": _none("tag"),
        "then": _given("all", {"const": True}),
        "else": {"properties": {"all": {"const": False}}},
    },
    "else": {"properties": {"tag": NULL, "all": {"const": False}}},
}
SOME_RULE: Schema = {
    "if": {"properties": {name: {"maxItems": 0, "type": ["null", "array"]} for name in ("cron", "rrule")}},
    "then": _given("every", _TEXT_OR_NUMBER),
}
START_FOR_COUNT: Schema = {"if": _given("count", INTEGER), "then": _given("start", {"type": ["string", "integer"]})}
TOGETHER: dict[str, Schema] = {
    "NewMessage": _all(AT_OR_IN, PAYLOAD),
    "MoveMessage": AT_OR_IN,
    "MoveTag": {"if": _none("by"), "then": AT_OR_IN, "else": {"properties": {"at": NULL, "in": NULL}}},
    "ReleaseLeases": AT_OR_IN_OR_NONE,
    "DeadLetters": LETTERS,
    "ReviveLetters": _all(LETTERS, AT_OR_IN_OR_NONE),
    "PreviewRules": _all(SOME_RULE, START_FOR_COUNT),
    "NewSchedule": _all(SOME_RULE, START_FOR_COUNT, AT_MOST_ONE_PAYLOAD),
    "ReplaceSchedule": _all(SOME_RULE, START_FOR_COUNT, AT_MOST_ONE_PAYLOAD),
    "ChangeSchedule": AT_MOST_ONE_PAYLOAD,
}
"""By shape, which fields go together. Each is an `if`, which generators of clients pass over. From `oneOf` and `allOf`
they would make types that are hard to use."""

EVENTS = "Server-sent events. The data of each `message` is a LeasedMessage; of a `problem`, the last one, a Problem."


def _header(name: str, description: str, schema: Schema) -> Schema:
    return {"name": name, "in": "header", "description": description, "schema": schema}


KEY_HEADER = _header(
    "Idempotency-Key",
    "Any text of your own for this request. Send it again with the same request if an answer was lost.",
    {"type": "string", "minLength": 1, "maxLength": MAX_KEY_BYTES, "pattern": r"\S"},
)
PUT_HEADERS: list[Schema] = [
    _header(
        "Timeline-At",
        "When a payload that is the whole body is due: a time as in `at`.",
        HEADER | {"format": "timeline-time"},
    ),
    _header("Timeline-In", "How long from now, instead of `Timeline-At`.", HEADER | {"format": "timeline-duration"}),
    _header("Timeline-Id", "The id of such a message.", ID),
    _header("Timeline-Tag", "Its tag.", TAG),
    _header("Timeline-Expires", "When it expires.", HEADER | {"format": "timeline-expiry"}),
    _header("Timeline-Group", "Its producer group.", GROUP),
    _header("Timeline-If-Exists", "What to do with another message of the same id.", IF_EXISTS),
]


def values_of(call: str, parameter: Schema) -> Schema:
    """Return the schema of a parameter. A query has no null: what may be left out is not required."""
    schema: Schema = parameter["schema"]
    known = OF_CALLS.get((call, parameter["name"]), PARAMETERS.get(parameter["name"]))
    if known is not None and parameter["in"] != "header":
        return known
    return {name: value for name, value in schema.items() if name != "description"}


def describe_body(name: str, schema: Schema) -> None:
    """Add to the schema of a body what its fields take."""
    for field, given in schema["properties"].items():
        if given.get("default", 0) is None:
            del given["default"]
        known = OF_SHAPES.get(name, {}).get(field, FIELDS.get(field))
        if known is not None:
            _replace(given, known)
    if together := TOGETHER.get(name):
        schema |= together


def describe_answer(name: str, schema: Schema, *, whole: bool) -> None:
    """Add to the schema of an answer what its fields are. `whole`: none is left out. A default is no help: what an
    answer leaves out, its reader does not fill in."""
    fields: Schema = schema.get("properties", {})
    if whole and fields:
        schema["required"] = list(fields)
    for field, given in fields.items():
        given.pop("default", None)
        if field in TIMES and (name, field) not in LENGTHS and INTEGER not in (given, *given.get("anyOf", ())):
            _replace(given, INSTANT)
        elif field == "payload_base64":
            _replace(given, BASE64)


def _replace(given: Schema, known: Schema) -> None:
    """Put `known` in the place of the types of a field. Its description and its default stay, and null if allowed."""
    null = NULL in given.get("anyOf", [])
    for keyword in ("anyOf", "type"):
        given.pop(keyword, None)
    if not null:
        given |= {key: value for key, value in known.items() if key != "default"}
        return
    if "examples" in known:
        given["examples"] = known["examples"]
    given["anyOf"] = [*known.get("anyOf", (known,)), NULL]
