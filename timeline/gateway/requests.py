"""One request: its body within bounds, its token, and whether its caller is still there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, TypeVar

from litestar import Request, Response
from litestar.types import Receive, Scope, Send
from litestar.types.asgi_types import HTTPResponseStartEvent

from timeline.credentials import AUTHORIZATION
from timeline.errors import FIXED_LIMIT, Forbidden, Invalid, Throttled, TooLarge
from timeline.gateway.clients import UNAUTHENTICATED, Caller
from timeline.gateway.problems import ClientGone
from timeline.model import MAX_PAYLOAD_BYTES

MAX_BODY_BYTES = MAX_PAYLOAD_BYTES * 4 // 3 + 1024 * 1024
"""The largest payload in base64, and room for the rest of its message."""
BODIES_BYTES = 2 * MAX_BODY_BYTES
"""All bodies together that wait here for their end."""
SILENT_S = 30.0
"""How long a caller may send nothing while its body is not complete."""
BEARER = "bearer "
AS_OPERATOR = "timeline-as-operator"
KEY = "idempotency-key"
MAX_KEY_BYTES = 255
MAX_STATE_CHARS = 512
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

T = TypeVar("T")


class BodyBudget:
    """Bounds the bytes of all bodies that are in memory at once."""

    def __init__(self, most: int = BODIES_BYTES) -> None:
        self._left = most

    def take(self, count: int) -> None:
        """Reserve bytes. Raise Throttled if they are not free."""
        if count > self._left:
            raise Throttled("the gateway holds as many bodies as it may", retry_after_ms=1_000)
        self._left -= count

    def give_back(self, count: int) -> None:
        """Free bytes."""
        self._left += count


class ApiRequest(Request[Any, Any, Any]):
    """A request whose body is bounded in size, in time, and together with all others."""

    _whole: bytes | None = None

    async def body(self) -> bytes:
        """Return the whole body. Raise TooLarge, Throttled, Invalid for a caller that stops sending, or ClientGone."""
        if self._whole is None:
            budget: BodyBudget = self.app.state.gateway.bodies
            parts: list[bytes] = []
            taken = 0
            try:
                async for part in self.chunks(MAX_BODY_BYTES):
                    budget.take(len(part))
                    taken += len(part)
                    parts.append(part)
                self._whole = b"".join(parts)
            finally:
                budget.give_back(taken)
        return self._whole

    async def chunks(self, most_bytes: int | None = None) -> AsyncIterator[bytes]:
        """Yield the body as it comes. `most_bytes`: its bound. None: it has none, as its reader keeps nothing."""
        announced: str = self.headers.get("content-length", "")
        if most_bytes is not None and announced.isdigit() and len(announced) < 20 and int(announced) > most_bytes:
            raise _too_large(most_bytes)
        seen = 0
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    event: Any = await self.receive()
            except TimeoutError:
                raise Invalid(f"nothing came of the body for {SILENT_S:g} s: send it without pauses") from None
            if event["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = event.get("body", b"")
            seen += len(part)
            if most_bytes is not None and seen > most_bytes:
                raise _too_large(most_bytes)
            if part:
                yield part
            if not event.get("more_body", False):
                return

    @property
    def caller(self) -> Caller:
        """Who calls. Raise Forbidden for an Authorization header that has no bearer token."""
        said = self.headers.get(AUTHORIZATION, "")
        if said and not said.lower().startswith(BEARER):
            denied = Forbidden("the Authorization header must be 'Bearer' and a token ('timeline token create')")
            denied.found = (UNAUTHENTICATED,)
            raise denied
        return Caller(said[len(BEARER) :].strip(), AS_OPERATOR in self.headers)

    @property
    def trace(self) -> dict[str, str]:
        """The caller's trace context (W3C), as headers of the messages that it puts. Empty: none."""
        parent: str = self.headers.get("traceparent", "")
        if TRACEPARENT.fullmatch(parent) is None:
            return {}
        state: str = self.headers.get("tracestate", "")
        return {"traceparent": parent} | ({"tracestate": state} if 0 < len(state) <= MAX_STATE_CHARS else {})

    @property
    def key(self) -> str:
        """The Idempotency-Key. Empty: none. Raise Invalid for one that is too long."""
        key: str = self.headers.get(KEY, "")
        if len(key) > MAX_KEY_BYTES:
            raise Invalid(f"Idempotency-Key has at most {MAX_KEY_BYTES} characters, not {len(key)}")
        return key


def _too_large(most_bytes: int) -> TooLarge:
    return TooLarge(f"the body has more than {most_bytes} bytes", advice=FIXED_LIMIT)


OURS = {"request", "client", "data"}
"""What a call gets that its caller does not name."""


async def check_query(request: Request[Any, Any, Any]) -> None:
    """Raise Invalid for a parameter that the call has not."""
    fields = request.route_handler.parsed_fn_signature.parameters
    known = {getattr(field.kwarg_definition, "name", None) or name for name, field in fields.items()}
    known -= OURS | set(request.path_params)
    for name in request.query_params:
        if name not in known:
            takes = f"this call takes {', '.join(sorted(known))}" if known else "this call takes none"
            raise Invalid(f"there is no parameter {name!r:.80}: {takes}")


class Streamed(Response[None]):
    """An answer that is sent part by part. A caller that does not read within `SILENT_S` is disconnected.

    The framework's own would read the request beside us, to notice a caller that has gone.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], status: int, media_type: str) -> None:
        super().__init__(None, status_code=status, media_type=media_type)
        self._parts, self._kind = parts, media_type

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        """Return what sends it."""
        return self._send

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin: HTTPResponseStartEvent = {
            "type": "http.response.start",
            "status": self.status_code or 200,
            "headers": [(b"content-type", self._kind.encode()), (b"cache-control", b"no-store")],
        }
        try:
            first = True
            async for part in self._parts:
                if first:
                    await send(begin)
                    first = False
                async with asyncio.timeout(SILENT_S):
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            if first:
                await send(begin)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._parts.aclose()


async def while_connected(request: ApiRequest, work: Coroutine[Any, Any, T], ending: asyncio.Future[Any]) -> T | None:
    """Return the result of `work`. Cancel it when the caller disconnects, and raise ClientGone. Cancel it when `ending`
    is done, and return None. The body must have been read before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        both: set[asyncio.Future[Any]] = {working, gone, ending}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if gone.done():
            raise ClientGone
        return None
    finally:
        ended = [task for task in (working, gone) if not task.done()]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)


async def _disconnected(request: ApiRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
