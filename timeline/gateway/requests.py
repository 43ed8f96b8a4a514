"""One request: its body within bounds, its token, and whether its caller is still there."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from litestar import Request, Response
from litestar.datastructures import Headers
from litestar.types import Receive, Send
from litestar.typing import FieldDefinition

from timeline.credentials import AUTHORIZATION
from timeline.errors import FIXED_LIMIT, Forbidden, Invalid, Throttled, TooLarge
from timeline.gateway.clients import UNAUTHENTICATED, Caller
from timeline.gateway.problems import ClientGone
from timeline.gateway.values import decoded
from timeline.model import MAX_PAYLOAD_BYTES

MAX_BODY_BYTES = MAX_PAYLOAD_BYTES * 4 // 3 + 1024 * 1024
"""The largest payload in base64, and room for the rest of its message."""
MAX_CALL_BYTES = 4 * 1024 * 1024
"""The largest body of a call that puts nothing."""
CALL_WEIGHT = 16
"""How many bytes of memory a byte of such a body may take once it is read."""
BODIES_BYTES = 160 * 1024 * 1024
"""All bodies together."""
SMALL_BYTES = 64 * 1024
SMALL_ROOM_BYTES = 32 * 1024 * 1024
"""Room on top, for bodies of up to `SMALL_BYTES` alone."""
SLOW_BYTES_PER_S = 64 * 1024
WINDOW_S = 2.0
"""How long a body is watched before it counts as slow."""
TOO_SLOW = "the body came too slowly while the gateway had no room for others"
SILENT_S = 30.0
"""How long a caller may send nothing while its body is not complete."""
ENDING_WAIT_S = 0.25
"""How long a take may go on once the gateway ends: its answer may be on its way."""
BROKEN = "timeline.broken_body"
"""Among the extensions of a request's scope: its body broke off in a way that is no HTTP."""
DRAINED = "timeline.drained"
"""Among the extensions of a request's scope: waits until the caller has read the answers before, or is gone. Returns
whether it is still there."""
ROOM = "timeline.body_room"
"""In a request's scope: the room of its body."""
TURN = "timeline.large_answer"
"""In a request's scope: the `LargeAnswers` of which it has a turn."""
LARGE_AT_ONCE = 4
"""Answers that may be large are made so many at a time."""
LARGE_WAIT_S = 5.0
"""How long a call waits for its turn."""
STREAMED = "timeline.streamed"
"""In a request's scope: its answer is sent part by part."""
BEARER = "bearer "
AS_OPERATOR = "timeline-as-operator"
KEY = "idempotency-key"
MAX_KEY_BYTES = 255
MAX_STATE_CHARS = 512
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

T = TypeVar("T")


class BodyBudget:
    """Bounds the bytes of all bodies that are in memory at once, from their first part to the end of their calls.

    A caller that sends slowly gives way to others when there is no room left. So half a body cannot keep everybody out.
    """

    def __init__(self, most: int = BODIES_BYTES) -> None:
        self.left = most
        self.rooms: dict[BodyRoom, None] = {}

    def free_slow(self, wanted: int) -> None:
        """Take the room of callers that send slowly, the largest first, until there is as much as is wanted."""
        slow = sorted((room for room in self.rooms if room.slow), key=lambda room: room.held_bytes, reverse=True)
        for room in slow:
            if self.left >= wanted:
                return
            room.lose()


class BodyRoom:
    """The room of one body. `timer`: ends the wait for its next part; None while no part is awaited."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.held_bytes = 0
        self.timer: asyncio.Timeout | None = None
        self.lost = False
        self._since_s = self._last_s = asyncio.get_running_loop().time()
        self._recent_bytes = 0
        self._was_slow = False

    def take(self, count: int, weight: int = 1) -> None:
        """Reserve room for `count` bytes that came, each with a weight. Raise Throttled if there is none."""
        size = count * weight
        least = -SMALL_ROOM_BYTES if self.held_bytes + size <= SMALL_BYTES * weight else 0
        if self._budget.left - size < least:
            self._budget.free_slow(size + least)
        if self.lost or self._budget.left - size < least:
            raise Throttled("the gateway holds as many bodies as it may", retry_after_ms=1_000)
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._since_s + WINDOW_S:
            self._was_slow = self._falls_short(now_s)
            self._since_s, self._recent_bytes = now_s, 0
        self._last_s = now_s
        self._recent_bytes += count
        self._budget.left -= size
        self.held_bytes += size
        self._budget.rooms[self] = None

    def give_back(self, count: int | None = None) -> None:
        """Free bytes that are no longer kept. Default: all."""
        given = self.held_bytes if count is None else min(count, self.held_bytes)
        self._budget.left += given
        self.held_bytes -= given
        if not self.held_bytes:
            self._budget.rooms.pop(self, None)

    def keep(self, count: int) -> None:
        """Free all bytes but these."""
        self.give_back(max(0, self.held_bytes - count))

    @property
    def slow(self) -> bool:
        """Whether its caller sends slowly, or nothing, and is waited for now."""
        silent = asyncio.get_running_loop().time() >= self._last_s + WINDOW_S
        return self.timer is not None and (silent or self._was_slow)

    def _falls_short(self, now_s: float) -> bool:
        return self._recent_bytes < SLOW_BYTES_PER_S * (now_s - self._since_s)

    def lose(self) -> None:
        """Give way: the wait for the next part ends."""
        self.lost = True
        self.give_back()
        if self.timer is not None:
            self.timer.reschedule(asyncio.get_running_loop().time())


class LargeAnswers:
    """Bounds the answers that may be large: `LARGE_AT_ONCE` are made at a time, in order, and none while callers leave
    too much unread."""

    def __init__(self) -> None:
        self._turns, self._uncrowded = asyncio.Semaphore(LARGE_AT_ONCE), asyncio.Event()
        self.set_crowded(False)

    def crowded(self) -> bool:
        """Whether callers leave too much unread."""
        return not self._uncrowded.is_set()

    def set_crowded(self, crowded: bool) -> None:
        """Note whether callers leave too much unread."""
        if crowded:
            self._uncrowded.clear()
        else:
            self._uncrowded.set()

    async def begin(self, drained: Callable[[], Awaitable[bool]]) -> None:
        """Wait for a turn. Raise Throttled after `LARGE_WAIT_S`, or ClientGone. `drained`: see `DRAINED`."""
        try:
            async with asyncio.timeout(LARGE_WAIT_S):
                await drained()
                await self._turns.acquire()
                try:
                    await self._uncrowded.wait()
                    if not await drained():
                        raise ClientGone
                except BaseException:
                    self._turns.release()
                    raise
        except TimeoutError:
            raise (too_crowded() if self.crowded() else _too_many()) from None

    def end(self) -> None:
        """End a turn."""
        self._turns.release()


def too_crowded() -> Throttled:
    """Return the refusal of an answer while callers leave too much unread."""
    advice = "read answers as they come, ask with a smaller limit, and wait"
    return Throttled("callers of the gateway leave too much unread", retry_after_ms=1_000, advice=advice)


def _too_many() -> Throttled:
    advice = "ask for fewer at once, or with a smaller limit, and wait"
    return Throttled("the gateway has many large answers to make", retry_after_ms=1_000, advice=advice)


def release_body(scope: Any) -> None:
    """Give back the room of a request's body, if it took any."""
    room: BodyRoom | None = scope.get(ROOM)
    if room is not None:
        room.give_back()


def end_large(scope: Any) -> None:
    """End a request's turn for a large answer, if it has one."""
    answers: LargeAnswers | None = scope.pop(TURN, None)
    if answers is not None:
        answers.end()


class ApiRequest(Request[Any, Any, Any]):
    """A request whose body is bounded in size, in time, and together with all others."""

    _whole: bytes | None = None
    _read_headers: Headers | None = None
    _shaped: Any = None

    @property
    def headers(self) -> Headers:
        """The headers, read once. The framework's own makes them at each look."""
        if self._read_headers is None:
            self._read_headers = super().headers
        return self._read_headers

    @property
    def room(self) -> BodyRoom:
        """The room of the body. It is given back at the end of the request: see `release_body`."""
        scope: Any = self.scope
        if ROOM not in scope:
            scope[ROOM] = BodyRoom(self.app.state.gateway.bodies)
        room: BodyRoom = scope[ROOM]
        return room

    async def begin_large(self) -> None:
        """Wait for the turn of an answer that may be large, before anything of it is read. `end_large` ends it. Raise
        Throttled, or ClientGone."""
        scope: Any = self.scope
        if TURN not in scope:
            answers: LargeAnswers = self.app.state.gateway.answers
            await answers.begin(scope["extensions"][DRAINED])
            scope[TURN] = answers

    async def drained(self) -> None:
        """Wait until the caller has read the answers before, or is gone."""
        scope: Any = self.scope
        await scope["extensions"][DRAINED]()

    async def body(self, most_bytes: int = MAX_CALL_BYTES, weight: int = CALL_WEIGHT) -> bytes:
        """Return the whole body. Raise TooLarge, Throttled, Invalid for a caller that stops sending, or ClientGone.
        `weight`: how much memory its contents may take, as a multiple of its own."""
        if self._whole is None:
            self._whole = b"".join([part async for part in self.chunks(most_bytes, weight)])
        return self._whole

    async def json(self) -> Any:
        """Return the body in the shape that the call declares. Raise Invalid. The framework would take a text for a
        number, and a number for a truth value."""
        if self._shaped is None:
            shape = self.route_handler.parsed_data_field
            self._shaped = decoded(_decoder(shape.annotation if shape else Any), await self.body())
        return self._shaped

    async def chunks(self, most_bytes: int | None = None, weight: int = 1) -> AsyncIterator[bytes]:
        """Yield the body as it comes. `most_bytes`: its bound. None: it has none; its reader gives back the room of
        what it no longer keeps."""
        encoding: str = self.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise Invalid(f"Content-Encoding {encoding!r:.40} is not read: send the body as it is, without that header")
        announced: str = self.headers.get("content-length", "")
        if most_bytes is not None and announced.isdigit() and len(announced) < 20 and int(announced) > most_bytes:
            raise _too_large(most_bytes)
        seen = 0
        while True:
            event = await self._next_event()
            part: bytes = event.get("body", b"")
            seen += len(part)
            if most_bytes is not None and seen > most_bytes:
                raise _too_large(most_bytes)
            if part:
                self.room.take(len(part), weight)
                yield part
            if not event.get("more_body", False):
                break
        if BROKEN in (self.scope.get("extensions") or {}):
            raise Invalid("the body breaks the rules of HTTP/1.1: its chunks do not fit, or have trailers too long")

    async def _next_event(self) -> Any:
        """Return the next part of the body. Raise what `body` does."""
        try:
            async with asyncio.timeout(SILENT_S) as timer:
                self.room.timer = timer
                event: Any = await self.receive()
        except TimeoutError:
            if self.room.lost:
                raise Throttled(TOO_SLOW, retry_after_ms=1_000) from None
            raise Invalid(f"nothing came of the body for {SILENT_S:g} s: send it without pauses") from None
        finally:
            self.room.timer = None
        if event["type"] == "http.disconnect":
            raise ClientGone
        return event

    @property
    def caller(self) -> Caller:
        """Who calls. Raise Forbidden for an Authorization header that has no bearer token, Invalid for two headers, or
        for one that says neither true nor false."""
        said = self.sole(AUTHORIZATION) or ""
        if said and not said.lower().startswith(BEARER):
            denied = Forbidden("the Authorization header must be 'Bearer' and a token ('timeline token create')")
            denied.found = (UNAUTHENTICATED,)
            raise denied
        return Caller(said[len(BEARER) :].strip(), self._as_operator())

    def _as_operator(self) -> bool:
        said = (self.sole(AS_OPERATOR) or "false").lower()
        if said not in ("true", "false", "1", "0"):
            raise Invalid(f"the header {AS_OPERATOR.title()} is true or false, not {said!r:.40}")
        return said in ("true", "1")

    def check_origin(self, listed: Sequence[str]) -> None:
        """Raise Forbidden for a page of another site that is not listed. A browser sends what such a page asks for, and
        keeps only the answer from it."""
        origin: str = self.headers.get("origin", "")
        own = origin.partition("://")[2] == self.headers.get("host")
        foreign = bool(origin) or self.headers.get("sec-fetch-site") in ("cross-site", "same-site")
        if foreign and not own and origin not in listed:
            raise Forbidden(
                f"pages of {origin or 'another site'!r:.100} may not call. If they should, start the gateway with "
                "--origin and their origin"
            )

    def sole(self, header: str) -> str | None:
        """Return the value of a header that is given once; None: it is not there. Raise Invalid for more than one. A
        proxy in front of the gateway may go by another one of them."""
        given: list[str] = self.headers.getall(header, [])
        if len(given) > 1:
            raise Invalid(f"the header {header.title()} is there {len(given)} times: send it once")
        return given[0] if given else None

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
        """The Idempotency-Key. Empty: none. Raise Invalid for one that is too long, and for two."""
        given = self.sole(KEY)
        key = given or ""
        if given is not None and not key.strip():
            raise Invalid("Idempotency-Key is empty: give each call a key of its own, or leave the header out")
        if len(key) > MAX_KEY_BYTES:
            raise Invalid(f"Idempotency-Key has at most {MAX_KEY_BYTES} characters, not {len(key)}")
        return key


@functools.cache
def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)


def _too_large(most_bytes: int) -> TooLarge:
    return TooLarge(f"the body has more than {most_bytes} bytes", advice=FIXED_LIMIT)


READ_BY_THEMSELVES = ("putMessages",)
"""Calls that read their body in shapes of their own."""
OURS = {"request", "client", "data"}
"""What a call gets that its caller does not name."""


def check_body(request: ApiRequest) -> None:
    """Raise Invalid for a body that the call does not read, and for a missing one that it needs. A `dry_run` in a body
    that is not read would be ignored, and the call would cancel."""
    shape = request.route_handler.parsed_data_field
    has_body = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
    reads = shape is not None or request.route_handler.operation_id in READ_BY_THEMSELVES
    if has_body and not reads:
        said = "write what it says into the address, ?name=value"
        raise Invalid(f"this {request.method} has no body: {said}; {_takes(request)}")
    if not has_body and shape is not None and not shape.is_optional:
        raise Invalid("this call needs a body in JSON: /docs shows its fields")


def check_query(request: Request[Any, Any, Any]) -> None:
    """Raise Invalid for a parameter that the call has not, for one that is there twice, and for one that it needs."""
    known = _known_parameters(request)
    for name in request.query_params:
        if name not in known:
            raise Invalid(f"there is no parameter {name!r:.80}: {_takes(request)}")
        if len(request.query_params.getall(name)) > 1 and not known[name].is_non_string_sequence:
            raise Invalid(f"the parameter {name!r} is there twice: give it once, and make another call for the other")
    for name, field in known.items():
        if field.is_required and name not in request.query_params:
            raise Invalid(f"the parameter {name!r} is missing: put it into the address, ?{name}=…")


def _takes(request: Request[Any, Any, Any]) -> str:
    known = sorted(_known_parameters(request))
    return f"this call takes {', '.join(known)}" if known else "this call takes none"


def _known_parameters(request: Request[Any, Any, Any]) -> dict[str, FieldDefinition]:
    """Return the query parameters of the call by name."""
    return {
        getattr(field.kwarg_definition, "name", None) or name: field
        for name, field in request.route_handler.parsed_fn_signature.parameters.items()
        if name not in OURS and name not in request.path_params
    }


class Streamed(Response[None]):
    """An answer that is sent part by part, each when the caller has room for it.

    The framework's own would read the request beside us, to notice a caller that has gone.
    """

    def __init__(self, parts: AsyncGenerator[bytes, None], status: int, media_type: str) -> None:
        super().__init__(None, status_code=status, media_type=media_type)
        self._parts, self._kind = parts, media_type
        self.begun = False
        """Whether the caller has a part of it."""

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        """Return what sends it."""
        return self._send

    async def _send(self, scope: Any, receive: Receive, send: Send) -> None:
        scope[STREAMED] = True
        try:
            async for part in self._parts:
                await self._begin(send)
                await send({"type": "http.response.body", "body": part, "more_body": True})
                del part  # or it stays in memory until the next one comes
            await self._begin(send)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._parts.aclose()

    async def _begin(self, send: Send) -> None:
        if not self.begun:
            self.begun = True
            headers = [(b"content-type", self._kind.encode()), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": self.status_code or 200, "headers": headers})


async def while_connected(
    request: ApiRequest,
    work: Coroutine[Any, Any, T],
    ending: asyncio.Future[Any],
    undo: Callable[[T], Awaitable[None]] | None = None,
) -> T | None:
    """Return the result of `work`. Cancel it when the caller disconnects, and raise ClientGone. Cancel it
    `ENDING_WAIT_S` after `ending` is done, and return None. Begin nothing after that. The body must have been read
    before. `undo`: what to do with a result that came as the caller disconnected."""
    if ending.done():
        work.close()
        return None
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        both: set[asyncio.Future[Any]] = {working, gone, ending}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if ending.done() and not (working.done() or gone.done()):  # an answer that is on its way arrives
            await asyncio.wait({working, gone}, timeout=ENDING_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            if undo is not None and gone.done():
                await undo(working.result())
                raise ClientGone
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
