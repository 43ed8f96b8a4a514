"""The OpenAPI document, and the page that shows it. The page needs nothing from any other address."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import msgspec
from litestar import Controller, Litestar
from litestar.openapi import OpenAPIConfig

from timeline.gateway import shapes as module
from timeline.gateway.keys import KEYED
from timeline.gateway.requests import MAX_KEY_BYTES

ABOUT = """Put a message on a timeline. At its time, never before, it is leased to one consumer.

Errors are `application/problem+json`: `code` is for programs, `detail` says what to do.

If an answer was lost, send the request again under the same `Idempotency-Key`. Each call says what a repeat does. A
message remembers its last move, release or revival alone: a repeat that comes after another one is a new change."""

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font:14px/1.4 ui-monospace,monospace}pre{overflow-x:auto;padding:.5rem;border:1px solid #8884}
summary{cursor:pointer}summary b{display:inline-block;min-width:4rem}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}"""


PUT_PATH = "/v1/topics/{topic}/messages"
_MESSAGE = {"$ref": "#/components/schemas/NewMessage"}
PUT_BODIES: dict[str, Any] = {
    "application/json": {
        "schema": {"oneOf": [_MESSAGE, {"type": "array", "items": _MESSAGE}]},
        "examples": {
            "one": {"value": {"id": "UA1545", "payload": {"gate": "A7"}, "in": "10m", "tag": "ops"}},
            "array": {"value": [{"payload_text": "gate closes", "at": "2030-01-01T09:00:00Z"}]},
        },
    },
    "application/x-ndjson": {"schema": {"type": "string", "description": "A message in JSON on each line."}},
    "*/*": {
        "schema": {
            "type": "string",
            "format": "binary",
            "description": "The payload itself. `Timeline-At` or `Timeline-In` says when it is due.",
        }
    },
}
"""What a put takes. The call reads its body by its content type."""
KEY_PARAMETER: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Any text of your own for this request. Send it again with the same request if an answer was lost.",
    "schema": {"type": "string", "maxLength": MAX_KEY_BYTES},
}
_RECEIPTS = ["AQdkZXBhcnR1cmVz"]
EXAMPLES: dict[str, dict[str, Any]] = {
    "MoveMessage": {"in": "1h"},
    "MoveTag": {"by": "-30m"},
    "Leasing": {"max": 10, "wait": "20s", "lease": "1m"},
    "AckLeases": {"receipts": _RECEIPTS},
    "ExtendLeases": {"receipts": _RECEIPTS, "lease": "1m"},
    "ReleaseLeases": {"receipts": _RECEIPTS, "in": "5m", "reason": "host down"},
    "BuryLeases": {"receipts": _RECEIPTS, "reason": "no such customer"},
    "ReviveLetters": {"tag": "spring", "in": "1h"},
    "DeadLetters": {"ids": ["UA1545"]},
    "NewTopic": {"lease": "30s", "max_deliveries": 10},
}
"""A body for each shape that callers send."""


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
    """Return the document. The framework knows the calls, and msgspec the shapes."""
    document = app.openapi_schema.to_schema()
    shapes = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, msgspec.Struct)]
    found, components = msgspec.json.schema_components(
        [one for one in shapes if one.__module__ == module.__name__], ref_template="#/components/schemas/{name}"
    )
    assert found
    for name, example in EXAMPLES.items():
        components[name]["examples"] = [example]
    document["components"]["schemas"] = components
    for call in (call for calls in document["paths"].values() for call in calls.values()):
        if isinstance(call, dict) and call.get("operationId") in KEYED:
            call.setdefault("parameters", []).append(KEY_PARAMETER)
    document["paths"][PUT_PATH]["post"]["requestBody"] = {"required": True, "content": PUT_BODIES}
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"token": []}]
    return document


def docs_page(document: dict[str, Any]) -> bytes:
    """Return the document as a page."""
    parts = [f"<h1>Timeline over HTTP</h1>{_prose(ABOUT)}<p><a href=openapi.json>openapi.json</a></p>"]
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            if isinstance(call, dict) and "responses" in call:
                parts.append(_call(method, path, call))
    parts.append("<h2>Shapes</h2>")
    for name, shape in document["components"]["schemas"].items():
        parts.append(f"<details id='{name}'><summary><b>{name}</b></summary><pre>{_json(shape)}</pre></details>")
    title = "<title>Timeline over HTTP</title>"
    head = f"<!doctype html><html lang=en><meta charset=utf-8>{title}<style>{STYLE}</style>"
    return (head + "".join(parts) + "</html>").encode()


def _call(method: str, path: str, call: dict[str, Any]) -> str:
    lines = [f"<details><summary><b>{method.upper()}</b> <code>{_text(path)}</code> {_text(call['summary'])}</summary>"]
    lines.append(_prose(call.get("description", "")))
    for part in ("parameters", "requestBody", "responses"):
        if part in call:
            lines.append(f"<p>{part}</p><pre>{_json(call[part])}</pre>")
    return "".join([*lines, "</details>"])


def _prose(text: str) -> str:
    """Return paragraphs, in which `words` are code."""
    paragraphs = (re.sub(r"`([^`]+)`", r"<code>\1</code>", _text(part)) for part in text.split("\n\n"))
    return "".join(f"<p>{part}</p>" for part in paragraphs)


def _text(text: str) -> str:
    return html.escape(text)


def _json(value: Any) -> str:
    return html.escape(json.dumps(value, indent=1, ensure_ascii=False))
