"""The OpenAPI document."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Controller, Litestar
from litestar.openapi import OpenAPIConfig

from timeline.gateway import shapes as module
from timeline.gateway.document import answers, rules
from timeline.gateway.keys import KEYED
from timeline.gateway.problems import FAILED, PROBLEM, documented, plain
from timeline.gateway.routes.verbs import as_called
from timeline.model import Status

ABOUT = """Put a message on a timeline. At its time, never before, it is leased to one consumer.

Errors are `application/problem+json`: `code` is for programs, `detail` says what to do.

If an answer was lost, send the request again under the same `Idempotency-Key`. Each call says what a repeat does. A
message remembers its last move, release or revival alone: a repeat that comes after another one is a new change.

With `Timeline-As-Operator: true`, a token with the right `operator` changes messages of any group.

What is no request of HTTP/1.1, or comes too slowly, is answered by 400, 408, 431, 501 or 503, and its connection
ends."""

REF = "#/components/schemas/{name}"
_JSON, _LINES = "application/json", "application/x-ndjson"
_RECEIPTS = ["AQdkZXBhcnR1cmVz"]
_SCHEDULE = {"cron": "0 9 * * 1-5", "zone": "Europe/Berlin", "payload": {"report": "{occurrence}"}, "catch_up": "all"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "NewMessage": {"id": "UA1545", "payload": {"gate": "A7"}, "in": "10m", "tag": "ops"},
    "MoveMessage": {"in": "1h"},
    "MoveTag": {"by": "-30m"},
    "Leasing": {"max": 10, "wait": "20s", "lease": "1m"},
    "AckLeases": {"receipts": _RECEIPTS},
    "ExtendLeases": {"receipts": _RECEIPTS, "lease": "1m"},
    "ReleaseLeases": {"receipts": _RECEIPTS, "in": "5m", "reason": "host down"},
    "BuryLeases": {"receipts": _RECEIPTS, "reason": "no such customer"},
    "ReviveLetters": {"tag": "spring", "in": "1h"},
    "DeadLetters": {"ids": ["UA1545"]},
    "NewSchedule": _SCHEDULE | {"name": "daily-report"},
    "ReplaceSchedule": _SCHEDULE,
    "ChangeSchedule": {"cron": "30 9 * * 1-5"},
    "TriggerTime": {"at": "2026-11-26T20:40:00Z"},
    "BackfillRange": {"from": "2026-11-01T00:00:00Z", "to": "2026-11-02T00:00:00Z"},
    "PreviewRules": {"cron": "0 9 * * 1-5", "zone": "Europe/Berlin", "limit": 5},
    "NewTopic": {"lease": "30s", "max_deliveries": 10},
}
"""A body for each shape that callers send."""


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": REF.format(name=name)}


NAMED: dict[str, Any] = {
    "NewMessages": {"type": "array", "items": _ref("NewMessage"), "description": "Messages to put, each on its own."},
    "PutBody": {"anyOf": [_ref("NewMessage"), _ref("NewMessages")], "description": "One message, or many."},
}
"""Schemas with names, of which generators of clients make usable types."""
PUT_BODIES: dict[str, Any] = {
    _JSON: {
        "schema": _ref("PutBody"),
        "examples": {
            "one": {"value": EXAMPLES["NewMessage"]},
            "array": {"value": [{"payload_text": "gate closes", "at": "2030-01-01T09:00:00Z"}]},
        },
    },
    _LINES: {
        "schema": {"type": "string", "description": "A message in JSON on each line."},
        "examples": answers.shown(answers.PUT_LINES),
    },
    "*/*": {
        "examples": answers.shown(answers.PAYLOAD),
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "The payload itself. `Timeline-At` or `Timeline-In` says when it is due, and makes the "
            "body of any type a payload.",
        },
    },
}
"""Bodies of a put. The call reads its body by its content type."""
PUT_ANSWERS: dict[str, Any] = {
    "200": {"description": "The message was there already", "content": {_JSON: {"schema": _ref("PutAnswer")}}},
    "201": {"description": "The message was created", "content": {_JSON: {"schema": _ref("PutAnswer")}}},
    "207": {
        "description": "Of an array, a status for each message. Of a stream, the counts; or, if asked for as "
        f"`{_LINES}`, an answer on each line.",
        "content": {
            _JSON: {"schema": {"anyOf": [_ref("PutAnswers"), _ref("BulkAnswer")]}},
            _LINES: {
                "schema": {"type": "string", "description": "A LineAnswer on each line."},
                "examples": answers.shown(answers.ANSWER_LINES),
            },
        },
    },
}

_RETRY_AFTER: dict[str, Any] = {
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}
}
HEADERS: dict[str, Any] = {
    "401": {"WWW-Authenticate": {"description": "Bearer", "schema": {"type": "string"}}},
    "429": _RETRY_AFTER,
    "503": _RETRY_AFTER,
}
"""Headers of answers, by status."""
_FAILED = plain(500, Status.UNKNOWN, "The gateway failed", FAILED)
GATEWAY_FAILED = {
    "description": _FAILED.title,
    "content": {PROBLEM: {"schema": _ref("Problem"), "examples": {"UNKNOWN": {"value": msgspec.to_builtins(_FAILED)}}}},
}


def openapi_config(version: str) -> OpenAPIConfig:
    """Return what the framework makes the document from."""
    pages: Any = _NoPages
    return OpenAPIConfig(
        title="Timeline", version=version, description=ABOUT, openapi_controller=pages, use_handler_docstrings=True
    )


class _NoPages(Controller):
    """Stands for the framework's own pages, which load scripts from elsewhere."""

    path = "/docs"


def document_of(app: Litestar) -> dict[str, Any]:
    """Return the document. The framework knows the calls, msgspec the shapes, and `rules` what values they take."""
    document = app.openapi_schema.to_schema()
    document["paths"] = {as_called(path): calls for path, calls in document["paths"].items()}
    document["components"] = {
        "schemas": _shapes() | NAMED,
        "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
    }
    document["security"] = [{}, {"token": []}]
    calls = {call["operationId"]: call for path in document["paths"].values() for call in path.values()}
    _complete(calls)
    for name, call in calls.items():
        if name in KEYED:
            call.setdefault("parameters", []).append(rules.KEY_HEADER)
        call["parameters"] = [_parameter(call["operationId"], each) for each in call.get("parameters", [])]
        call["responses"] = {status: _answer(status, each) for status, each in sorted(call["responses"].items())}
    return document


def _shapes() -> dict[str, Any]:
    """Return the schemas of all shapes."""
    shapes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    ours = [one for one in shapes if one.__module__ == module.__name__ and one is not module.Asked]
    _, schemas = msgspec.json.schema_components(ours, ref_template=REF)
    bodies = {one.__name__ for one in ours if issubclass(one, module.Asked)}
    partial = {one.__name__ for one in ours if one.__struct_config__.omit_defaults}
    for name, schema in schemas.items():
        if name in bodies:
            rules.describe_body(name, schema)
        else:
            rules.describe_answer(name, schema, whole=name not in partial)
        if shown := EXAMPLES.get(name, answers.ANSWERS.get(name)):
            schema["examples"] = [shown]
    return schemas


def _complete(calls: dict[str, Any]) -> None:
    """Add what calls do beside what the framework sees of them."""
    put, create = calls["putMessages"], calls["createTopic"]
    put["parameters"] += rules.PUT_HEADERS
    put["requestBody"] = {"required": True, "content": PUT_BODIES}
    put["responses"] |= PUT_ANSWERS
    for call, body in ((create, "NewTopic"), (calls["triggerSchedule"], "TriggerTime")):
        either = {"anyOf": [_ref(body), {"type": "null"}]}
        call["requestBody"] = {"required": False, "content": {_JSON: {"schema": either}}}
    for name in ("createSchedule", "replaceSchedule"):
        made, there = {"description": "The schedule was created"}, {"description": "It is as the body says"}
        answer = next(iter(each for code, each in calls[name]["responses"].items() if code in ("200", "201")))
        calls[name]["responses"] |= {"200": answer | there, "201": answer | made}
    create["responses"]["200"] = create["responses"]["201"] | {
        "description": "It is there already, with these settings"
    }
    create["responses"]["201"]["description"] = "The topic was created"
    for call in calls.values():
        if "requestBody" in call:
            call["responses"].setdefault("413", _too_large())
        call["responses"]["500"] = GATEWAY_FAILED
    stream = calls["streamMessages"]["responses"]["200"]
    events = {"type": "string", "description": rules.EVENTS}
    stream["content"] = {"text/event-stream": {"schema": events, "examples": answers.shown(answers.EVENTS)}}


def _too_large() -> dict[str, Any]:
    """Return the answer to a body that is too large."""
    spec = documented(Status.TOO_LARGE)[413]
    shown = {each.id: {"summary": each.summary, "value": each.value} for each in spec.examples or ()}
    return {"description": spec.description, "content": {PROBLEM: {"schema": _ref("Problem"), "examples": shown}}}


def _parameter(call: str, parameter: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter without what only repeats a default of OpenAPI, and with the values that it takes."""
    kept = {name: parameter[name] for name in ("name", "in", "description", "required") if parameter.get(name)}
    return kept | {"schema": rules.values_of(call, parameter)}


def _answer(status: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer with a description, its headers, and with examples as OpenAPI has them."""
    answer.pop("headers", None)
    if status in HEADERS:
        answer["headers"] = HEADERS[status]
    answer["description"] = answer["description"] or "A status for each"
    for example in answer.get("content", {}).get(PROBLEM, {}).get("examples", {}).values():
        example.pop("id", None)
    return answer
