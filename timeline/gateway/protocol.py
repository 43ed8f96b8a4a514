"""HTTP/1.1 of one connection. Heads, waiting requests and times are bounded, and so are all connections together.

A request that breaks the rules of HTTP ends its connection, after the requests before it have their answers. If its
body breaks them, the call itself learns it (`BROKEN`): it alone knows what was done already.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Protocol

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from timeline.gateway.problems import PROBLEM, plain
from timeline.gateway.requests import BROKEN, DRAINED, SILENT_S, SLOW_BYTES_PER_S, LargeAnswers
from timeline.model import Status

HEAD_S = 20.0
"""How long the head of a request may take, and how long a new connection may say nothing."""
MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_PATH_BYTES, MAX_QUERY_BYTES, MAX_COOKIE_BYTES, MAX_FIELDS = 4 * 1024, 8 * 1024, 16 * 1024, 100
"""Of one request. The framework keeps the last thousand of each that it has parsed."""
MAX_WAITING = 16
"""Requests of one connection that may wait for the answer of the one before."""
HEADS_BYTES = 32 * 1024 * 1024
"""All heads together that have no end yet."""
UNREAD_BYTES = 128 * 1024 * 1024
"""All answers together that wait for their readers. Beyond it, those who read less than `SLOW_BYTES_PER_S` are
disconnected."""
LEFT_BYTES = 16 * 1024
"""What may be left of the answers before, when the next one is made."""
LOOK_S = 1.0
"""How long a reader is watched before it counts as slow."""
MOST_FILES = 65_536
FILES_OF_OURS = 2_048
"""Descriptors that connections never get: for brokers, receivers of webhooks and the log. If there are few, half."""


class Abortable(Protocol):
    """A connection that can be ended at once."""

    def abort(self) -> None: ...


class Connections:
    """All connections of a process. `most`: how many there may be. One more closes the one that is idle longest. If
    none is idle, it closes the one whose body has been coming for longest. Where half of all are handshakes of TLS, or
    none sends a body, it closes the handshake that lasts longest. `answers`: waits while too much is unread.
    `refused`: called with the status and the peer of what is no request."""

    def __init__(
        self, most: int, answers: LargeAnswers, refused: Callable[[int, str], None] = lambda status, peer: None
    ) -> None:
        self._most, self._open, self._heads_bytes = most, 0, 0
        self._answers, self.refused = answers, refused
        self._idle: dict[BoundedHttp, None] = {}
        self._sending: dict[BoundedHttp, None] = {}
        self._unread: dict[BoundedHttp, None] = {}
        self._handshakes: dict[Abortable, None] = {}
        self._next_look: asyncio.TimerHandle | None = None

    def greeted(self, one: Abortable) -> None:
        """Count a connection that has only begun its handshake."""
        self._handshakes[one] = None
        if self._open + len(self._handshakes) <= self._most:
            return
        if len(self._handshakes) > self._most // 2 or not self._gives_way():
            longest = next(iter(self._handshakes))
            self.secured(longest)
            longest.abort()

    def secured(self, one: Abortable) -> None:
        """Note that a handshake is over."""
        self._handshakes.pop(one, None)

    def opened(self, one: BoundedHttp) -> None:
        """Count a connection, which is idle."""
        self._open += 1
        if self._open > self._most and not self._gives_way():
            one.abort()
            return
        self._idle[one] = None

    def _gives_way(self) -> bool:
        """Disconnect one that waits for its caller: for a request, or for the rest of a body. Answers to requests
        before that one go with it. Return whether there was one."""
        longest = next(iter(self._idle or self._sending), None)
        if longest is None:
            return False
        self.busy(longest)  # its end comes later, and the next one more takes another
        self.sent(longest)
        longest.abort()
        return True

    def closed(self, one: BoundedHttp) -> None:
        """Forget a connection."""
        self._open -= 1
        for those in (self._idle, self._sending):
            those.pop(one, None)
        self.read(one)

    def idle(self, one: BoundedHttp) -> None:
        """Note that a connection has no request."""
        self._idle[one] = None

    def busy(self, one: BoundedHttp) -> None:
        """Note that a connection has one."""
        self._idle.pop(one, None)

    def sending(self, one: BoundedHttp) -> None:
        """Note that a body comes on a connection."""
        self._sending[one] = None

    def sent(self, one: BoundedHttp) -> None:
        """Note that a body is there."""
        self._sending.pop(one, None)

    def hold(self, count: int) -> bool:
        """Count bytes of heads without an end; a negative count frees them. Return whether there is room."""
        self._heads_bytes += count
        return self._heads_bytes <= HEADS_BYTES

    def read(self, one: BoundedHttp) -> None:
        """Note that the answers of a connection were read, or that it is closed."""
        self._unread.pop(one, None)
        if self._answers.crowded():
            self._look()

    def unread(self, one: BoundedHttp) -> None:
        """Note that a connection has an answer that is not read yet. If all are too large, those that read slowly
        since the last look are disconnected, the oldest first."""
        self._unread[one] = None
        self._look(one)

    def _look(self, newest: BoundedHttp | None = None) -> None:
        left = sum(each.unread_bytes for each in self._unread)
        for each in list(self._unread) if left > UNREAD_BYTES else ():
            if each is not newest and left > UNREAD_BYTES and not each.has_read():
                left -= each.unread_bytes
                each.abort()
        self._answers.set_crowded(left > UNREAD_BYTES)
        if left > UNREAD_BYTES and self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        self._look()


class _Parser:
    """The parser of one connection. It serves a request that asks for another protocol (`Upgrade`) as if it did not.

    The library would take what follows such a head for the other protocol, and drop its body. Java's own client asks
    for HTTP/2 in this way.
    """

    def __init__(self, http: BoundedHttp) -> None:
        self._http = http
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpRequestParser(self._http)
        self.get_http_version, self.get_method = self._parser.get_http_version, self._parser.get_method
        self.should_keep_alive = self._parser.should_keep_alive

    def should_upgrade(self) -> bool:
        """Return False: no other protocol is spoken."""
        return False

    @property
    def asked(self) -> bool:
        """Whether the request asks for another protocol."""
        return bool(self._parser.should_upgrade())

    def feed_data(self, data: bytes) -> None:
        """Parse. Raise HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserInvalidURLError:
                self._http.wrong_address(data.isascii())
                raise
            except httptools.HttpParserUpgrade as asked:
                data = data[asked.args[0] :]
                self._begin()
                if framing := self._http.framing():  # its body comes now, and so needs a head
                    self._http.muted = True
                    self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
                    self._http.muted = False


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def __init__(self, connections: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.parser: Any = _Parser(self)
        self.muted = False
        """Whether what the parser calls is no news."""
        self._all = connections
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._looked_s = 0.0
        self._in_body = self._ended = self._last = False
        self._served: Any = None
        """The request whose answer is under way. `cycle` is the newest one, which may wait behind it."""
        self._head_bytes = self._held_bytes = 0
        self._loose_bytes = 0
        """Bytes that came since the last whole head, or the last part of a body."""
        self._refusal = 400, "this is no request of HTTP/1.1"

    def connection_made(self, transport: Any) -> None:
        """Wait for a first request."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_S, transport.close)
        self._all.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing."""
        for timer in (self._timer, self._stalled):
            if timer is not None:
                timer.cancel()
        self._hold(0)
        self._all.closed(self)
        if self._served is not None:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Disconnect at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request. After one that broke the rules, nothing more is read."""
        if self._ended:
            return
        if self._loose_bytes > MAX_HEAD_BYTES:
            self._too_long()
            self.send_400_response("")
            return
        if self._timer is None and not self._in_body:
            self._timer = self.loop.call_later(HEAD_S, self._head_is_late)
        self._loose_bytes += len(data)
        super().data_received(data)
        if self.parser is not None and not self._ended and not self._hold(0 if self._in_body else self._loose_bytes):
            self._refusal = 503, "the gateway holds as many unfinished requests as it may: try again"
            self.send_400_response("")

    def _hold(self, count: int) -> bool:
        """Note how many bytes of an unfinished head are held. Return whether there is room for them."""
        if count == self._held_bytes:
            return True
        more, self._held_bytes = count - self._held_bytes, count
        return self._all.hold(more) or more < 0

    def _wait_no_more(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        self._refusal = 408, f"the head of a request takes at most {HEAD_S:g} s"
        self.send_400_response("")

    def wrong_address(self, ascii: bool) -> None:
        """Note that there is no address. `ascii`: the request has no other letters."""
        said = "the address of a request begins with /, and has no spaces and no control characters"
        if not ascii:
            said = (
                "the address has a character that must be written with percent signs, such as %C3%BC for ü: "
                "curl takes -G --data-urlencode NAME=VALUE"
            )
        self._refusal = 400, said

    def _too_long(self) -> None:
        self._refusal = 431, f"a head has at most {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers"

    def on_message_begin(self) -> None:
        """Begin a head."""
        if self.muted:
            return
        if len(self.pipeline) >= MAX_WAITING:
            raise ValueError("too many requests wait")
        super().on_message_begin()
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the request line."""
        if not self.muted:
            self._count(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header. Those after a body are dropped."""
        if not self.muted and not self._in_body:
            self._count(len(name) + len(value))
            super().on_header(name, value)

    def _count(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) >= MAX_HEADERS:
            self._too_long()
            raise ValueError("the head is too long")

    def _check_parsed(self) -> None:
        """Check the sizes of what is parsed, and kept, before any token is looked at."""
        path, _, query = self.url.partition(b"?")
        cookies = [value for name, value in self.headers if name == b"cookie"]
        fields = max(query.count(b"&"), sum(each.count(b";") for each in cookies))
        sizes = len(path), len(query), sum(map(len, cookies))
        most = MAX_PATH_BYTES, MAX_QUERY_BYTES, MAX_COOKIE_BYTES
        if fields >= MAX_FIELDS or any(size > limit for size, limit in zip(sizes, most, strict=True)):
            said = (
                f"a request has a path of at most {MAX_PATH_BYTES} bytes, a query of {MAX_QUERY_BYTES} with "
                f"{MAX_FIELDS} fields, and {MAX_FIELDS} cookies of {MAX_COOKIE_BYTES} bytes in all"
            )
            self._refusal = 431, said
            raise ValueError("the address or the cookies are too long")

    def framing(self) -> bytes:
        """Return the headers that say how long the body is. Empty: there is none."""
        found = (one for one in self.headers if one[0] in (b"content-length", b"transfer-encoding"))
        return b"".join(name + b": " + value + b"\r\n" for name, value in found)

    def on_headers_complete(self) -> None:
        """Serve the request."""
        if self.muted:
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._refusal = 400, "a request has one Host header"
            raise ValueError("no host, or several")
        if any(name == b"transfer-encoding" and value.strip().lower() != b"chunked" for name, value in self.headers):
            self._refusal = 501, "of transfer codings, only chunked is read"
            raise ValueError("another coding")
        self._check_parsed()
        extensions: Any = {DRAINED: self._drained}
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        if not self.pipeline:
            self._served = self.cycle
        self._wait_no_more()
        self._in_body, self._loose_bytes = True, 0
        self._last = not self.cycle.keep_alive
        self.cycle.keep_alive = True
        self._all.busy(self)
        self._all.sending(self)

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._loose_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        if self.parser.asked and self.framing():
            return
        self._wait_no_more()
        self._all.sent(self)
        self._in_body, self._loose_bytes = False, 0
        self.cycle.keep_alive = not self._last
        if self._last and self.cycle.response_complete:
            self.transport.close()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request. A body whose answer came before its end may go on for a while. Its sender could
        not read the answer if the connection closed at once."""
        self._served = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.cycle.response_complete:
            self._all.idle(self)
            if self._in_body and self._timer is None:
                self._timer = self.loop.call_later(SILENT_S, self.transport.close)
                if self._last and self.transport.can_write_eof():
                    self.transport.write_eof()

    def shutdown(self) -> None:
        """End the connection after the request under way, also if its body is still to come."""
        self._last = True
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """End the connection after the requests before, which were good. No answer of theirs can be taken for this
        one."""
        self._ended = True
        self._wait_no_more()
        if self.cycle is None or self.cycle.response_complete:
            if not self._in_body:
                self.transport.write(_refused(*self._refusal))
                self._all.refused(self._refusal[0], self.client[0] if self.client else "")
            self.transport.close()
            return
        self.cycle.keep_alive = False
        if self._in_body:
            self.scope["extensions"][BROKEN] = {}
            self.cycle.more_body = False
            self.cycle.message_event.set()

    @property
    def unread_bytes(self) -> int:
        """How much of the answers waits for its reader."""
        return int(self.transport.get_write_buffer_size())

    def has_read(self) -> bool:
        """Return whether the reader is not slow, or was looked at just now."""
        now_s = self.loop.time()
        watched_s, before = now_s - self._looked_s, self._unread_bytes
        if watched_s < LOOK_S:
            return True
        self._unread_bytes, self._looked_s = self.unread_bytes, now_s
        return before - self._unread_bytes >= SLOW_BYTES_PER_S * watched_s

    async def _drained(self) -> bool:
        """Return whether the caller is still there, once it has read the answers before. `LEFT_BYTES` may be left of
        them: the head of an answer is written by itself, and would wait for its reader above the usual mark."""
        self.transport.set_write_buffer_limits(LEFT_BYTES)
        try:
            await self.flow.drain()
        finally:
            self.transport.set_write_buffer_limits(HIGH_WATER_LIMIT)
        return not self.transport.is_closing()

    def pause_writing(self) -> None:
        """Wait for a reader that is slow."""
        if self._stalled is not None:  # it waits already
            return
        super().pause_writing()
        self._unread_bytes, self._looked_s = self.unread_bytes, self.loop.time()
        self._all.unread(self)
        self._await_reader()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._all.read(self)
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _await_reader(self) -> None:
        self._stalled = self.loop.call_later(SILENT_S, self._still_reading, self.unread_bytes)

    def _still_reading(self, before: int) -> None:
        if self.unread_bytes < before:
            self._await_reader()
        else:
            self.abort()


def _refused(status: int, said: str) -> bytes:
    """Return the answer to what is no request."""
    title, code = HTTPStatus(status).phrase, Status.UNAVAILABLE if status == 503 else Status.INVALID
    body = msgspec.json.encode(plain(status, code, title, said))
    head = f"HTTP/1.1 {status} {title}\r\ncontent-type: {PROBLEM}\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


def most_connections() -> int:
    """Permit this process all the descriptors that it may have. Return how many connections that is."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    return max(1, files - min(FILES_OF_OURS, files // 2))
