"""Carries the calls that are made most often to their functions, past the framework.

The framework finds the route, resolves what the function takes, and builds the answer. That costs more than these calls
themselves. It still gets each request that is unusual in any way, so what it refuses has its own sentence.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import msgspec
from litestar import Litestar, Response
from litestar.handlers import HTTPRouteHandler
from litestar.types import Receive, Send

from timeline.errors import Forbidden, TimelineError, Unavailable
from timeline.gateway.problems import HANDLERS
from timeline.gateway.requests import STREAMED, ApiRequest, Streamed, end_large, release_body
from timeline.gateway.service import GatewaySettings, serving

PREFIX = "/v1"
TOPIC = "{topic:str}"
HOST_HEADER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/@\[\]\s]+)(?::[0-9]+)?")
"""The host's name or address, and perhaps a port."""
PRIVATE = (".internal", ".local", ".svc", ".home.arpa", ".lan")
"""Ends of names that are no one's on the Internet, as clusters and local networks have them."""
MOST_HOSTS = 100
"""How many hosts are kept with what was found about them."""
USUAL_HOST = re.compile(rb"[A-Za-z0-9.-]+(:[0-9]+)?")
JSON_TYPE = b"application/json"
JSON_HEADER = (b"content-type", JSON_TYPE)
ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class _Call:
    """`template`: its path in metrics. `decoder`: of its body. None: the function reads the request itself."""

    function: Callable[..., Awaitable[Any]]
    template: str
    status: int
    decoder: msgspec.json.Decoder[Any] | None

    @classmethod
    def of(cls, handler: HTTPRouteHandler) -> _Call:
        (path,) = handler.paths
        body = get_type_hints(handler.fn).get("data")
        decoder = None if body is None else msgspec.json.Decoder(body)
        return cls(handler.fn, PREFIX + path.replace(TOPIC, "{topic}"), handler.status_code or 200, decoder)


class HostNames:
    """The hosts under which a gateway may be asked.

    A web page can give its own name any address, and then ask a gateway there like a page of its own. Where tokens are
    asked for, it learns nothing. Elsewhere a gateway answers to these hosts alone: addresses, `localhost` and names
    below it, and those of `origins`. One that other machines reach answers to names that nobody outside can own, too.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._own = {"localhost", *(urlsplit(one).hostname for one in settings.origins)}
        self.exposed = settings.exposed
        self._judged: dict[bytes, bool] = {}

    def refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> Forbidden | None:
        """Return why a request with these headers is refused, if no token is asked for. None: it is not."""
        host = next((value for name, value in headers if name == b"host"), b"localhost")
        if host not in self._judged:
            if len(self._judged) >= MOST_HOSTS:
                self._judged.clear()
            self._judged[host] = self._is_own(host)
        if self._judged[host]:
            return None
        return Forbidden(
            f"this gateway does not answer under the host {host.decode('latin-1')!r:.100}. Ask localhost, or start "
            "'timeline gateway' with --origin and the origin under which it is known"
        )

    def _is_own(self, host: bytes) -> bool:
        found = HOST_HEADER.fullmatch(host.decode("latin-1"))
        name = found[1].strip("[]").removesuffix(".").lower() if found else ""
        with suppress(ValueError):
            return bool(ip_address(name))
        private = self.exposed and bool(name) and ("." not in name or name.endswith(PRIVATE))
        return name in self._own or name.endswith(".localhost") or private


class DirectCalls:
    """An ASGI application: POST to `handlers`, and all else to the application `inside`, which has them, too.

    A request under another host than `names` permit is refused, unless `is_open` says that callers need a token, and
    other machines reach the gateway. At the end of each request, its body has no room left.
    """

    def __init__(
        self,
        inside: Litestar,
        handlers: Sequence[HTTPRouteHandler],
        names: HostNames,
        is_open: Callable[[], Awaitable[bool]],
    ) -> None:
        self._inside, self._names, self._is_open = inside, names, is_open
        calls = [_Call.of(handler) for handler in handlers]
        self._whole = {call.template: call for call in calls if "{" not in call.template}
        self._of_topic = {call.template.rpartition("/")[2]: call for call in calls if "{" in call.template}

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        finally:
            release_body(scope)
            end_large(scope)

    async def _serve(self, scope: Any, receive: Receive, send: Send) -> None:
        refused = await self._refusal(scope) if scope["type"] == "http" else None
        if refused is not None:
            scope["app"] = scope["litestar_app"] = self._inside
            await self._fail(refused, ApiRequest(scope, receive, send))
            return
        call, given = self._found(scope)
        if call is None:
            await self._inside(scope, receive, _releasing(scope, send))
            return
        scope["app"] = scope["litestar_app"] = self._inside
        scope["path_template"] = call.template
        request = ApiRequest(scope, receive, send)
        answer: Any = None
        try:
            answer = await self._answer(call, request, given)
            if isinstance(answer, Streamed):
                await answer.to_asgi_response()(scope, receive, send)
                return
        except _Undecoded as undecoded:
            release_body(scope)
            await self._inside(scope, undecoded.again(receive), _releasing(scope, send))
            return
        except Exception as error:
            if isinstance(answer, Streamed) and answer.begun:
                raise
            await self._fail(error, request)
            return
        given.clear()
        release_body(scope)  # a caller that does not read its answer holds no room of others
        if isinstance(answer, Response):
            await _send(send, answer.status_code or call.status, answer.content)
        else:
            await _send(send, call.status, answer)

    async def _refusal(self, scope: Any) -> TimelineError | None:
        """Return why a request is refused for the host that it names. None: it is not."""
        refused = self._names.refusal(scope["headers"])
        if refused is None or not self._names.exposed:
            return refused
        try:
            return refused if await self._is_open() else None
        except Unavailable as unknown:
            return unknown

    async def _fail(self, error: Exception, request: ApiRequest) -> None:
        handler = next(handler for kind, handler in HANDLERS if isinstance(error, kind))
        answer = handler(request, error).to_asgi_response(self._inside, request)
        await answer(request.scope, request.receive, request.send)

    def _found(self, scope: Any) -> tuple[_Call | None, dict[str, Any]]:
        """Return the call of a request, and what its path gives to the function. None: the framework gets it."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["query_string"]:
            return None, {}
        path: str = scope["path"]
        parts = path.split("/")
        if len(parts) == 5 and parts[1] == PREFIX[1:] and parts[2] == "topics" and parts[3]:
            call, given = self._of_topic.get(parts[4]), {"topic": parts[3]}
        else:
            call, given = self._whole.get(path), {}
        return (call, given) if call is not None and _usual(scope["headers"], call) else (None, {})

    @staticmethod
    async def _answer(call: _Call, request: ApiRequest, given: dict[str, Any]) -> Any:
        """Return what the function of a call returns. Nothing of a stranger's body is read."""
        async with serving(request) as client:
            if call.decoder is not None:
                body = await request.body()
                try:
                    given["data"] = call.decoder.decode(body)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    raise _Undecoded(body) from None
            return await call.function(request=request, client=client, **given)


class _Undecoded(Exception):
    """A body that the framework is to refuse in its own words."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._body: bytes | None = body

    def again(self, receive: Receive) -> Receive:
        """Return `receive` with the body before what comes."""

        async def received() -> Any:
            if self._body is None:
                return await receive()
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}

        return received


def _usual(headers: Sequence[tuple[bytes, bytes]], call: _Call) -> bool:
    """Return whether a request with these headers is as most are: the framework need not see it."""
    host = kind = b""
    for name, value in headers:
        if name == b"host":
            host = value
        elif name == b"content-type":
            kind = value
        elif name in (b"origin", b"sec-fetch-site"):
            return False
    return (call.decoder is None or kind == JSON_TYPE) and USUAL_HOST.fullmatch(host) is not None


def _releasing(scope: Any, send: Send) -> Send:
    """Return `send`, which gives back the room of the request's body as the answer begins. An answer that is sent part
    by part reads the body meanwhile, and gives back its parts."""

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start" and STREAMED not in scope:
            release_body(scope)
        await send(message)

    return sending


async def _send(send: Send, status: int, content: Any) -> None:
    body = ENCODER.encode(content)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [JSON_HEADER, length]})
    await send({"type": "http.response.body", "body": body, "more_body": False})
