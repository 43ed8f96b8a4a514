"""Sends requests to one receiver: to a judged address, without redirects, proxies, cookies or decompression."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import aiohttp
from yarl import URL

from timeline.errors import Invalid
from timeline.gateway.push.addresses import AddressGuard, host_of
from timeline.wording import shown_duration

READ_BYTES = 65_536
"""A longer answer is cut off, with its connection."""
LOOK_UP_AGAIN_MS = 5_000.0
OLD_MS = 60_000.0
"""How long addresses are used while the name cannot be looked up again."""
TRIED_ADDRESSES = 3
IDLE_S = 4.0
"""How long a connection is kept for the next request. Many servers close it after 5 s, Node among them."""
CONNECT_S = 2.0
"""How long an address may take for a connection, while there is another one to try."""
CONNECT_SHARE = 0.9
"""The part of the time that is left in which the last address must connect. So a connection that never comes is told
from an answer that never comes."""
UNBOUNDED = aiohttp.ClientTimeout(total=None)
"""Bounds of one request: none. `Sender.post` bounds the whole."""


class Answer(NamedTuple):
    """`headers`: by lower-case name. `body`: its first bytes."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Unanswered(Exception):
    """No answer came; the text says why. `refused`: nothing was sent, because the URL or its addresses are refused.
    `reached`: there was a connection, so the host itself works."""

    def __init__(self, reason: str, refused: bool = False, reached: bool = False) -> None:
        super().__init__(reason)
        self.refused, self.reached = refused, reached


def _connecting(within_s: float) -> aiohttp.ClientTimeout:
    """Return a bound for the connection alone. By itself, the library rounds times above 5 s up to a whole second."""
    return aiohttp.ClientTimeout(total=None, sock_connect=within_s, ceil_threshold=math.inf)


class Sender:
    """The connections to one URL. `connections`: most at a time."""

    def __init__(self, url: str, guard: AddressGuard, connections: int) -> None:
        self._url, self._guard = url, guard
        self._host, self._port = host_of(url)
        self._addresses: tuple[str, ...] = ()
        self._worked = ""
        """The address that was reached last. It is tried first."""
        self._judged_ms = float("-inf")
        self._looking: asyncio.Future[tuple[str, ...]] | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections, use_dns_cache=False, keepalive_timeout=IDLE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            skip_auto_headers=("accept-encoding", "user-agent"),
            headers={"user-agent": "timeline-webhooks", "accept": "*/*"},
            timeout=UNBOUNDED,
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._session.close()

    async def post(self, headers: Sequence[tuple[str, str]], body: bytes, timeout_ms: float) -> Answer:
        """Send a request and return the answer. Raise Unanswered."""
        judged: tuple[str, ...] = ()
        try:
            async with asyncio.timeout(timeout_ms / 1000.0) as timer:
                judged = await self._judged()
                connect_s = min(CONNECT_S, timeout_ms / 1000.0 / TRIED_ADDRESSES)
                return await self._post(judged, headers, body, timer, connect_s)
        except aiohttp.ConnectionTimeoutError:
            said = f"no connection within {shown_duration(round(timeout_ms))}"
            raise Unanswered(said) from None
        except TimeoutError:  # it is connected by now, or would have had the other error
            said = f"no answer within {shown_duration(round(timeout_ms))}"
            raise Unanswered(said, reached=bool(judged)) from None
        except Invalid as bad:
            raise Unanswered(bad.reason, refused=True) from bad
        except socket.gaierror as unknown:
            raise Unanswered(f"the name {self._host} is not known here: {unknown.strerror}") from unknown
        except (aiohttp.ClientError, OSError, ssl.SSLError, ValueError) as bad:
            raise Unanswered(self._reason(bad), reached=not isinstance(bad, aiohttp.ClientConnectorError)) from bad

    def _reason(self, bad: Exception) -> str:
        """Return a failure as a receiver's owner understands it."""
        if isinstance(bad, aiohttp.ClientConnectorError) and not isinstance(bad, aiohttp.ClientSSLError) and bad.errno:
            return f"cannot connect to {self._host}:{self._port}: {os.strerror(bad.errno).lower()}"
        if isinstance(bad, aiohttp.ServerDisconnectedError):
            return "the receiver closed the connection without an answer"
        if isinstance(bad, aiohttp.ClientResponseError):  # its text has the URL, in which a secret may stand
            return f"{type(bad).__name__}: {bad.message}"
        return f"{type(bad).__name__}: {bad}"

    async def _post(
        self,
        judged: Sequence[str],
        headers: Sequence[tuple[str, str]],
        body: bytes,
        timer: asyncio.Timeout,
        connect_s: float,
    ) -> Answer:
        *others, last = sorted(judged, key=lambda address: address != self._worked)[:TRIED_ADDRESSES]
        for address in others:
            connecting = _connecting(connect_s)
            # Nothing was sent: the next one may be reached.
            with suppress(aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
                return await self._post_to(address, headers, body, timer, connecting)
        until_s = timer.when()
        assert until_s is not None
        left_s = max(0.001, (until_s - asyncio.get_running_loop().time()) * CONNECT_SHARE)
        return await self._post_to(last, headers, body, timer, _connecting(left_s))

    async def _judged(self) -> tuple[str, ...]:
        """Return the permitted addresses. They are looked up again now and then, and the former are used meanwhile."""
        now_ms = self._now_ms()
        if now_ms > self._judged_ms + LOOK_UP_AGAIN_MS and (self._looking is None or self._looking.done()):
            self._looking = asyncio.ensure_future(self._look_up())
            self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())
        if self._looking is None or (self._addresses and now_ms < self._judged_ms + OLD_MS):
            return self._addresses
        return await asyncio.shield(self._looking)  # one that is given up here may suit the next request

    async def _look_up(self) -> tuple[str, ...]:
        self._addresses = await self._guard.permitted(self._host, self._port)
        self._judged_ms = self._now_ms()
        return self._addresses

    @staticmethod
    def _now_ms() -> float:
        return asyncio.get_running_loop().time() * 1000.0

    async def _post_to(
        self,
        address: str,
        headers: Sequence[tuple[str, str]],
        body: bytes,
        timer: asyncio.Timeout,
        connecting: aiohttp.ClientTimeout,
    ) -> Answer:
        """Send to an address, under the host's name for the receiver and its certificate. `timer`: until when the
        receiver's status must be there. A body that is not complete by then is cut off."""
        url = URL(self._url, encoded=True)
        named = ("host", url.raw_authority)
        async with self._session.post(
            url.with_host(address),
            data=body,
            headers=[named, *headers],
            allow_redirects=False,
            timeout=connecting,
            server_hostname=self._host if url.scheme == "https" else None,
        ) as response:
            self._worked = address
            answered = {name.lower(): value for name, value in response.headers.items()}
            until_s = timer.when()
            timer.reschedule(None)  # its status came: that decides, whatever becomes of the body
            start = bytearray()
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await _read_start(response, start)
            return Answer(response.status, answered, bytes(start))


async def _read_start(response: aiohttp.ClientResponse, start: bytearray) -> None:
    """Read the first bytes of the body into `start`. Close the connection if more would come than is worth reading."""
    complete = False
    try:
        while len(start) < READ_BYTES and not complete:
            part = await response.content.read(READ_BYTES - len(start))
            complete = not part
            start += part
    finally:
        if not complete:
            response.close()
