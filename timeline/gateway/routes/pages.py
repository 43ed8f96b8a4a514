"""What probes, scrapers and readers of the documentation ask for."""

from __future__ import annotations

import functools
import html
import json
import re
from typing import Any

from litestar import Litestar, MediaType, Response, get

from timeline.gateway.document.openapi import ABOUT, document_of
from timeline.gateway.requests import ApiRequest
from timeline.gateway.service import gateway_of

STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code,pre{font:14px/1.4 ui-monospace,monospace}pre{overflow-x:auto;padding:.5rem;border:1px solid #8884}
summary{cursor:pointer}summary b{display:inline-block;min-width:4rem}
@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}"""


@get("/healthz", include_in_schema=False, media_type=MediaType.TEXT)
async def healthz() -> str:
    """Return that the process answers."""
    return "alive\n"


@get("/readyz", include_in_schema=False)
async def readyz(request: ApiRequest) -> Response[str]:
    """Return whether a broker is ready behind this gateway, or why not."""
    why = await gateway_of(request).not_ready()
    return Response(f"{why or 'ready'}\n", status_code=503 if why else 200, media_type=MediaType.TEXT)


@get("/metrics", include_in_schema=False)
async def metrics(request: ApiRequest) -> Response[bytes]:
    """Return the metrics for Prometheus."""
    return Response(gateway_of(request).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@functools.lru_cache(1)
def _documents(app: Litestar) -> tuple[bytes, bytes]:
    """Return the OpenAPI document, in JSON and as a page. Other requests wait while they are made."""
    document = document_of(app)
    return json.dumps(document, ensure_ascii=False).encode(), _page(document)


@get("/openapi.json", include_in_schema=False)
async def openapi(request: ApiRequest) -> Response[bytes]:
    """Return the OpenAPI document."""
    return Response(_documents(request.app)[0], media_type=MediaType.JSON)


@get("/docs", include_in_schema=False)
async def docs(request: ApiRequest) -> Response[bytes]:
    """Return the same as a page."""
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return Response(_documents(request.app)[1], media_type=MediaType.HTML, headers=policy)


def _page(document: dict[str, Any]) -> bytes:
    """Return the document as a page. It needs nothing from any other address."""
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
