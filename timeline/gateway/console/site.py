"""All pages of the console, and what becomes of an error on its way to a browser."""

from __future__ import annotations

import logging
from typing import Any

from litestar import Request, Response, Router, get, post
from litestar.exceptions import HTTPException

from timeline.errors import Forbidden, Invalid, TimelineError
from timeline.gateway.clients import UNAUTHENTICATED, Caller
from timeline.gateway.console import letters, messages, overview, rendering, schedules, tags, topics
from timeline.gateway.console.live import LOGIN
from timeline.gateway.console.rendering import link, page
from timeline.gateway.console.visit import Fields, check_own_page, form_of, log_in, log_out, redirect, sentence, shown
from timeline.gateway.problems import ClientGone, gone, problem_of
from timeline.gateway.requests import ApiRequest
from timeline.gateway.service import gateway_of
from timeline.gateway.streams import EVENT_STREAM

STREAMS = ("/live", "/dead/reasons")
WRITTEN = (
    "payload", "headers", "id", "tag", "at", "in", "zone", "expires", "name", "cron", "rrule", "every",
    *(name for names in topics.GROUPS.values() for name in names if name not in ("paused", *topics.FIXED)),
)  # fmt: skip
"""Fields of forms that people write into. They are shown when a form cannot be taken."""
LOGIN_ENDED = "This was not carried out. Log in, and send it again."
log = logging.getLogger("timeline.gateway")


@get("/login", include_in_schema=False)
async def login_form(request: ApiRequest) -> Response[bytes]:
    """Ask for a token."""
    return shown(request, "login.html", next=_own_path(request.query_params.get("next", "/")), trouble="")


@post("/login", include_in_schema=False)
async def login(request: ApiRequest) -> Response[bytes]:
    """Keep a token that brokers let in."""
    form = await form_of(request)
    token, as_operator = form.text("token"), form.has("operator")
    path, gateway = _own_path(form.text("next")), gateway_of(request)
    try:
        await gateway.check_guarded()
        if not token:
            raise Invalid("give a token: 'timeline token create' makes one")
        async with gateway.clients.serving(Caller(token, as_operator)) as client:
            await client.timeline.topics(timeout="5s")
    except TimelineError as denied:
        problem = problem_of(denied)
        return shown(request, "login.html", problem.status, next=path, trouble=problem.detail)
    return log_in(request, token, as_operator, path)


@post("/logout", include_in_schema=False)
async def logout(request: ApiRequest) -> Response[bytes]:
    """Forget the token."""
    await form_of(request)
    return log_out(request, "/login")


def _own_path(path: str) -> str:
    """Return a path of this console, whatever a link says."""
    own = path.startswith("/") and not path.startswith(("//", "/\\"))
    return path if own and path.isascii() and path.isprintable() else "/"


HANDLERS: tuple[Any, ...] = (
    rendering.static, login_form, login, logout,
    overview.overview, overview.live, overview.load, overview.cluster, overview.late, overview.find,
    topics.topic, topics.messages, topics.create, topics.settings, topics.pause, topics.produce_form, topics.produce,
    messages.message, messages.payload, messages.act,
    letters.dead, letters.count, letters.letters, letters.reasons, letters.step, tags.step,
    schedules.schedules, schedules.week, schedules.schedule, schedules.act, schedules.preview, schedules.create,
)  # fmt: skip


async def check_request(request: Request[Any, Any, Any]) -> Response[bytes] | None:
    """Let only a page of this console change something. A browser that comes from another site brings no cookies: let
    it come once more, from here."""
    assert isinstance(request, ApiRequest)
    if request.method not in ("GET", "HEAD"):
        check_own_page(request)
        request.state.sent = await request.body()
    if request.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        if request.headers.get("sec-fetch-mode") != "navigate":
            raise Forbidden("pages of other sites may not load parts of this console: follow a link to it")
        return page("arrival.html", {})
    return None


def of_driver(request: Request[Any, Any, Any], error: TimelineError) -> Response[bytes]:
    """Show what went wrong, or ask for a token."""
    assert isinstance(request, ApiRequest)
    problem = problem_of(error)
    if problem.code == UNAUTHENTICATED and request.scope["path"] in STREAMS:
        return Response(LOGIN, media_type=EVENT_STREAM, headers={"Cache-Control": "no-store"})
    if problem.code == UNAUTHENTICATED:
        path = request.scope["path"]
        query = request.scope["query_string"].decode("latin-1")
        asked = f"{path}?{query}" if query else path
        if request.method == "POST":
            return _failed(request, 401, "Your login has ended", UNAUTHENTICATED, LOGIN_ENDED, login=True)
        return redirect(request, link("/login", next=asked if "hx-request" not in request.headers else "/"))
    return _failed(request, problem.status, problem.title, problem.code, sentence(error))


def _failed(request: ApiRequest, status: int, title: str, code: str, said: str, login: bool = False) -> Response[bytes]:
    """Say what went wrong, in the part of a page that asked, or on a page. Nothing that was written is lost. `login`:
    ask for a token."""
    if "hx-request" in request.headers:
        return shown(request, "_trouble.html", status, sentence=said, login=login)
    problem = {"title": title, "status": status, "code": code, "detail": said}
    return shown(request, "error.html", status, problem=problem, written=_written(request), login=login)


def _written(request: ApiRequest) -> dict[str, str]:
    """Return what somebody wrote into the form that was sent, by the names of its fields."""
    try:
        form = Fields.of(request.state.get("sent", b"").decode(errors="replace"))
    except Invalid:
        return {}
    return {name: form.raw(name) for name in WRITTEN if form.text(name)}


def of_anything(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Show that the gateway failed. Its log says why."""
    log.error("%s %s failed", request.method, request.scope.get("path_template", ""), exc_info=error)
    assert isinstance(request, ApiRequest)
    said = "The gateway failed, and its log says why. What was asked may have happened: look before you ask again."
    return _failed(request, 500, "The gateway failed", "UNKNOWN", said)


def of_framework(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Show a page that is not there, or a request that is none."""
    assert isinstance(request, ApiRequest)
    absent = error.status_code == 404
    title = "No such page" if absent else "The request is wrong"
    said = f"There is no page {request.scope['path']!r:.200}." if absent else error.detail
    return _failed(request, error.status_code, title, "", said)


def console() -> Router:
    """Return the pages for the application."""
    errors: dict[Any, Any] = {
        TimelineError: of_driver,
        ClientGone: gone,
        HTTPException: of_framework,
        Exception: of_anything,
    }
    return Router("/", route_handlers=HANDLERS, before_request=check_request, exception_handlers=errors)
