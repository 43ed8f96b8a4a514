"""Errors as `application/problem+json`: the status of HTTP, the code for programs, and a sentence with what to do."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Example
from litestar.routes import HTTPRoute

from timeline import errors
from timeline.credentials import BadCredentials
from timeline.errors import Forbidden, Invalid, TimelineError, sentence_of
from timeline.gateway.clients import UNAUTHENTICATED, no_token
from timeline.gateway.routes.verbs import as_called
from timeline.gateway.shapes import Problem
from timeline.gateway.values import MOST_SAID, NOT_JSON, TOO_DEEP, in_words
from timeline.model import Status

log = logging.getLogger("timeline.gateway")

PROBLEM = "application/problem+json"
STATUSES: dict[str, tuple[int, str]] = {
    Status.INVALID: (400, "The request is wrong"),
    UNAUTHENTICATED: (401, "A token is needed"),
    Status.FORBIDDEN: (403, "Not permitted"),
    Status.NOT_FOUND: (404, "Not found"),
    Status.EXISTS: (409, "The id or name is taken"),
    Status.LEASED: (409, "A consumer has the message"),
    Status.DEAD: (409, "The message is a dead letter"),
    Status.EXPIRED: (410, "The message has expired"),
    Status.FENCED: (412, "It has changed since"),
    Status.TOO_LARGE: (413, "Too large"),
    Status.THROTTLED: (429, "At a bound: wait"),
    Status.UNAVAILABLE: (503, "Nothing happened"),
    "CLOSED": (503, "Nothing happened"),
    Status.UNKNOWN: (504, "It may have happened"),
}
"""By code: the status of HTTP, and a title."""
SAME_KEY = "it may have happened: send it again with the same id or Idempotency-Key to learn which"
MOST_KEPT = 1_000
"""Characters of a sentence that is kept in the words of HTTP."""
MEANT = {("POST", "/v1/topics"): ". PUT /v1/topics/{topic} creates one"}
"""What a natural guess was meant for."""
FAILED = f"the gateway failed: its log says why; {SAME_KEY}"
GO_ON = "it may have happened in part: send it again with 'resume' as it stands here, or messages may be changed twice"
RETRY_AFTER_S = 1
GONE = 499
"""The status in logs and metrics of a request whose caller has disconnected."""


_MESSAGE = "GET /v1/topics/{topic}/messages/{id}"
_RESUME = "as 'resume' of the answer had it"
_WORDS = tuple(
    (re.compile(theirs), ours)
    for theirs, ours in (
        (r"\bin_=", "in"),
        (r"\b(at|due_from|due_to|expires)=(?=-?\d)", r"\1 "),
        (r"(?<=setting )horizon=, --horizon", "horizon"),
        (r"\(group=…, --group NAME\)", "(give it as 'group')"),
        (r"add --as-operator, or connect\(…, as_operator=True\)", "send the header Timeline-As-Operator: true"),
        (r", which --as-operator needs", ", which the header Timeline-As-Operator needs"),
        (r"\(create_topic, 'timeline topic create'\)", "(PUT /v1/topics/{topic})"),
        (r"`timeline topic update \S+ [^`]*` changes it, or update_topic", "PATCH /v1/topics/{topic} changes it"),
        (r"\bleased=True", "?leased=true"),
        (r"\btl\.get\(topic, id\)", _MESSAGE),
        (r"as it was printed: `progress\.resume` in Python, after --resume in a shell", _RESUME),
        (r"\(d\.receipt\)", "('receipt')"),
        (r"\bNone or empty would\b", "an empty one would"),
        (r"due= is a pair \(from, to\) with from before to", "due_from must lie before due_to"),
        (r"after retry_after_ms", "after the time in Retry-After"),
        (r", or use a consumer: tl\.consumer\(topic\)", ""),
    )
)
"""HTTP's names in place of those of the driver and of the command line, which have the same sentences."""


class ClientGone(Exception):
    """The caller has disconnected. Nobody reads an answer."""


def problem_of(error: TimelineError) -> Problem:
    """Return the problem of an error, in the words of HTTP."""
    code = error.code
    if (isinstance(error, Forbidden) and UNAUTHENTICATED in error.found) or _no_token(error):
        code = UNAUTHENTICATED
    elif code not in STATUSES:
        code = Status.UNKNOWN
    status, title = STATUSES[code]
    said = sentence(error)
    resume = None if error.progress is None or error.progress.finished else error.progress.resume
    if code == Status.UNKNOWN:
        said = f"{error.reason.rstrip('.') or 'the answer was lost'}; {SAME_KEY if resume is None else GO_ON}"
    return plain(status, code, title, said, id=error.id, resume=resume)


def plain(status: int, code: str, title: str, detail: str, **more: str | None) -> Problem:
    """Return a problem in these words."""
    kind = f"urn:timeline:{code.lower().replace('_', '-')}"
    return Problem(type=kind, title=title, status=status, code=str(code), detail=detail, **more)


def _no_token(error: TimelineError) -> bool:
    return isinstance(error, BadCredentials) and error.part == "token"


def sentence(error: TimelineError) -> str:
    """Return the sentence for an error, without the code and the id, which have fields of their own."""
    said = sentence_of(error)
    return in_words_of_http(said) if len(said) <= MOST_KEPT else said


@lru_cache(1024)
def in_words_of_http(sentence: str) -> str:
    """Return a sentence with HTTP's names in place of those of the driver and of the command line."""
    for theirs, ours in _WORDS:
        sentence = theirs.sub(ours, sentence)
    return sentence


def answer_of(error: TimelineError) -> Response[bytes]:
    """Return the answer for an error."""
    problem = problem_of(error)
    headers = {}
    if problem.status in (429, 503):
        headers["Retry-After"] = str(max(RETRY_AFTER_S, math.ceil(error.retry_after_ms / 1000)))
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return answer(problem, headers)


def answer(problem: Problem, headers: dict[str, str] | None = None) -> Response[bytes]:
    """Return a problem as an answer."""
    return Response(msgspec.json.encode(problem), status_code=problem.status, media_type=PROBLEM, headers=headers)


def of_driver(_: Request[Any, Any, Any], error: TimelineError) -> Response[bytes]:
    """Answer a call whose error came from the driver, or from our own checks."""
    return answer_of(error)


def of_framework(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Answer what no route takes: another path, another method, or a body or a query that is wrong."""
    if isinstance(error, ValidationException) or error.status_code == 400:
        return answer_of(Invalid(_sentence(error)))
    if error.status_code == 413:
        return answer(plain(413, Status.TOO_LARGE, "Too large", "the body is larger than this gateway takes"))
    path = as_called(request.scope["path"])
    if error.status_code == 404:
        said = f"there is no {path!r:.200} here: /docs shows all calls"
        return answer(plain(404, Status.NOT_FOUND, "Not found", said))
    if error.status_code == 405:
        methods, meant = allowed(request), MEANT.get((request.method, path), "")
        said = f"{request.method} does not go with {path!r:.200}: it takes {methods}{meant}"
        return answer(plain(405, Status.INVALID, "The method is wrong", said), {"Allow": methods})
    return answer(plain(error.status_code, Status.INVALID, "The request is wrong", error.detail))


def allowed(request: Request[Any, Any, Any]) -> str:
    """Return the methods that the request's path takes."""
    for route in request.app.routes:
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(route.path_format))
        if isinstance(route, HTTPRoute) and re.fullmatch(pattern, request.scope["path"]):
            return ", ".join(sorted(route.methods))
    return ""


def _sentence(error: HTTPException) -> str:
    """Return what is wrong with a body or a query, one part after the other."""
    extra = error.extra if isinstance(error.extra, list) else []
    told = []
    for one in extra:
        place = str(one.get("key", ""))[:MOST_SAID]
        told.append(in_words(str(one.get("message", "")), "" if place == "data" else place))
    return "; ".join(told) or f"{NOT_JSON}: {error.detail:.300}"


def of_anything(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer a call that met a fault of the gateway. It may have happened."""
    if isinstance(error, RecursionError):
        return answer_of(Invalid(TOO_DEEP))
    log.error("%s %s failed", request.method, request.scope.get("path_template", ""), exc_info=error)
    return answer(plain(500, Status.UNKNOWN, "The gateway failed", FAILED))


def gone(_: Request[Any, Any, Any], error: ClientGone) -> Response[bytes]:
    """Answer nobody."""
    return Response(b"", status_code=GONE)


HANDLERS: tuple[tuple[type[Exception], Callable[[Request[Any, Any, Any], Any], Response[bytes]]], ...] = (
    (TimelineError, of_driver),
    (ClientGone, gone),
    (HTTPException, of_framework),
    (Exception, of_anything),
)
"""How the errors of a call are answered. The first kind that fits counts."""


def documented(*codes: str) -> dict[int, ResponseSpec]:
    """Return the problems that a call may answer, for the OpenAPI document."""
    of_all = (Status.INVALID, UNAUTHENTICATED, Status.FORBIDDEN, Status.THROTTLED, Status.UNAVAILABLE, Status.UNKNOWN)
    shown: dict[int, list[Example]] = {}
    for code in (*of_all, *codes):
        status, title = STATUSES[code]
        example = Example(id=code, summary=title, value=msgspec.to_builtins(_example(code)))
        shown.setdefault(status, []).append(example)
    found: dict[int, ResponseSpec] = {}
    for status, examples in shown.items():
        title = examples[0].summary or ""
        found[status] = ResponseSpec(
            Problem, description=title, media_type=PROBLEM, generate_examples=False, examples=examples
        )
    return found


def _example(code: str) -> Problem:
    """Return a problem of `code` that says what the code means."""
    if code == UNAUTHENTICATED:
        return problem_of(no_token())
    (kind,) = (kind for kind in vars(errors).values() if isinstance(kind, type) and vars(kind).get("code") == code)
    return problem_of(kind())
