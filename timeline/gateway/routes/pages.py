"""What probes, scrapers and readers of the documentation ask for."""

from __future__ import annotations

import functools
import json

from litestar import Litestar, MediaType, Response, get

from timeline.gateway.document.openapi import document_of
from timeline.gateway.document.page import docs_page
from timeline.gateway.requests import ApiRequest
from timeline.gateway.service import gateway_of


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
    return json.dumps(document, ensure_ascii=False).encode(), docs_page(document)


@get("/openapi.json", include_in_schema=False)
async def openapi(request: ApiRequest) -> Response[bytes]:
    """Return the OpenAPI document."""
    return Response(_documents(request.app)[0], media_type=MediaType.JSON)


@get("/docs", include_in_schema=False)
async def docs(request: ApiRequest) -> Response[bytes]:
    """Return the same as a page."""
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return Response(_documents(request.app)[1], media_type=MediaType.HTML, headers=policy)
