"""A real HTTP receiver of webhooks, on a free port of this machine."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

Answering = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class Receiver:
    """`requests`: what came, headers and body. `answer` may be changed while it runs."""

    def __init__(self, answer: Answering) -> None:
        self.answer = answer
        self.requests: list[tuple[Any, bytes]] = []
        self.came = asyncio.Condition()
        self.at_once = self.most_at_once = 0
        self.port = 0
        self._runner: web.ServerRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook?a=%2F"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        self._runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            async with self.came:
                self.requests.append((request, body))
                self.came.notify_all()
            return await self.answer(request, body)  # type: ignore[arg-type]
        finally:
            self.at_once -= 1

    async def received(self, count: int) -> list[tuple[Any, bytes]]:
        """Wait for so many requests."""
        async with self.came:
            await self.came.wait_for(lambda: len(self.requests) >= count)
        return self.requests


async def hang_up(request: web.Request, body: bytes) -> web.StreamResponse:
    """Answers nothing."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def always(status: int, text: str = "", **headers: str) -> Answering:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(status=status, text=text, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return answer
