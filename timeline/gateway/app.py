"""The composition root: all calls, with what they share."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Request, Response, Router
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp

from timeline.gateway import problems
from timeline.gateway.clients import CallerClient
from timeline.gateway.console import site
from timeline.gateway.direct import DirectCalls, HostNames
from timeline.gateway.document.openapi import openapi_config
from timeline.gateway.metrics import Observed
from timeline.gateway.requests import ApiRequest, check_body, check_query
from timeline.gateway.routes import leases, many, messages, pages, reading, schedules, topics
from timeline.gateway.service import HttpGateway, gateway_of, serving

CALLS: tuple[Any, ...] = (
    messages.put, messages.show, messages.move, messages.cancel,
    leases.lease, leases.stream, leases.ack, leases.extend, leases.release, leases.bury,
    many.move_tag, many.cancel_tag, many.revive, many.purge,
    reading.list_, reading.dead, reading.why, reading.late, reading.forecast, reading.cluster,
    schedules.create, schedules.list_, schedules.list_all, schedules.show, schedules.replace, schedules.update,
    schedules.drop, schedules.pause, schedules.resume, schedules.trigger, schedules.backfill, schedules.next_,
    schedules.preview,
    topics.list_, topics.show, topics.create, topics.update, topics.drop, topics.rotate,
)  # fmt: skip
OFTEN: tuple[Any, ...] = (messages.put, leases.lease, leases.ack, leases.extend, leases.release, leases.bury)
"""Calls that go past the framework."""
PAGES: tuple[Any, ...] = (pages.healthz, pages.readyz, pages.metrics, pages.openapi, pages.docs)


async def client_of(request: ApiRequest) -> AsyncGenerator[CallerClient, None]:
    """Lend the client of the request's token to its call."""
    async with serving(request) as client:
        yield client


async def check_call(request: Request[Any, Any, Any]) -> Response[None] | None:
    """Check what needs no body: the parameters, and whether brokers let the caller in. The framework reads bodies
    before it lends the client. Answer OPTIONS: the framework's own answer names the methods of one call of a path."""
    assert isinstance(request, ApiRequest)
    if request.method == "OPTIONS":
        return Response(None, status_code=204, headers={"Allow": problems.allowed(request)})
    if request.method != "GET" or request.scope["path_template"].endswith("/stream"):  # a stream takes messages
        request.check_origin(gateway_of(request).settings.origins)
    check_query(request)
    check_body(request)
    if "data" in request.route_handler.parsed_fn_signature.parameters:
        async with serving(request):
            pass
    return None


def of_framework(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Answer what no route takes: a browser with a page, a program with a problem."""
    reads_pages = "text/html" in request.headers.get("accept", "") and not request.scope["path"].startswith("/v1")
    return site.of_framework(request, error) if reads_pages else problems.of_framework(request, error)


def application(gateway: HttpGateway) -> ASGIApp:
    """Return the ASGI application of `gateway`."""

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    origins = list(gateway.settings.origins)
    api = Router("/v1", route_handlers=CALLS, dependencies={"client": Provide(client_of)}, before_request=check_call)
    inside = Litestar(
        [api, *PAGES, site.console()],
        request_class=ApiRequest,
        state=State({"gateway": gateway}),
        lifespan=[lifespan],
        openapi_config=openapi_config(gateway.version),
        cors_config=CORSConfig(allow_origins=origins) if origins else None,
        exception_handlers={**dict(problems.HANDLERS), HTTPException: of_framework},
        request_max_body_size=None,
        logging_config=None,
    )
    return Observed(DirectCalls(inside, OFTEN, HostNames(gateway.settings), gateway.is_open), gateway.metrics)
