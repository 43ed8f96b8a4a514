"""A receiver of webhooks as a process of its own. It writes down each request before it answers.

    python -m tests.faults.gateway.receiver --address HOST:PORT --history FILE --name r1

It handles each request for up to `--handle-ms`, so that requests are always under way. Most are then acknowledged.
Some are refused for now or for ever, some get no answer in time, and some keep their lease for a moment. A line on
standard input makes it acknowledge all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from tests.faults.worker import TOPIC, options, run, say
from timeline.driver.consume.pull import LeaseToken
from timeline.history import HistoryFile
from timeline.model import payload_sum

TIMEOUT_MS = 5_000
"""The topic's `push_timeout`."""
ANSWERS = (
    (0.95, web.Response, 204, {}),
    (0.97, web.Response, 500, {}),
    (0.98, web.Response, 503, {"Retry-After": "1"}),
    (0.985, web.Response, 429, {"Retry-After": "0"}),
    (0.99, web.Response, 410, {}),
    (0.997, web.Response, 202, {"Timeline-Lease": "1s"}),
)
"""Up to which draw each is given. Beyond the last one no answer comes in time."""


class Receive:
    """Answers requests until standard input ends."""

    def __init__(self, asked: argparse.Namespace, history: HistoryFile) -> None:
        self.asked, self.history = asked, history
        self.rng = random.Random(asked.name)
        self.received = self.again = self.held = 0
        self.enough = asyncio.Event()

    def finish(self) -> None:
        """From now on each request is acknowledged at once."""
        self.enough.set()

    async def work(self) -> None:
        runner = web.ServerRunner(web.Server(self._serve), shutdown_timeout=0.1)
        await runner.setup()
        host, _, port = self.asked.address.rpartition(":")
        await web.TCPSite(runner, host, int(port), backlog=1_024).start()
        say(listening=True)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await runner.cleanup()

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self._note(request.headers, body)
        self.held += 1
        try:
            await self._busy(self.rng.random() * self.asked.handle_ms)
            return await self._answer()
        finally:
            self.held -= 1

    async def _busy(self, for_ms: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.enough.wait(), for_ms / 1_000.0)

    async def _answer(self) -> web.StreamResponse:
        draw = 0.0 if self.enough.is_set() else self.rng.random()
        for until, made, status, headers in ANSWERS:
            if draw < until:
                return made(status=status, headers=headers)
        await self._busy(2 * TIMEOUT_MS)
        return web.Response(status=204)

    def _note(self, headers: Any, body: bytes) -> None:
        """One receive. When its lease ends, the store alone knows."""
        token = LeaseToken.of(headers["Timeline-Receipt"])
        due_ms = round(datetime.fromisoformat(headers["Timeline-Due"]).timestamp() * 1_000)
        deliveries = int(headers["Timeline-Deliveries"])
        assert unquote(headers["Timeline-Id"]).encode() == token.id
        noted = {"topic": TOPIC, "id": token.id.decode(), "consumer": token.holder, "birth": token.birth}
        seen = {"due_ms": due_ms, "scheduled_ms": due_ms, "sum": payload_sum(body), "deliveries": deliveries}
        self.history.note("receive", {**noted, "version": token.version, **seen, "size": len(body)})
        self.history.flush()
        self.received += 1
        self.again += deliveries > 1
        if self.enough.is_set() or self.received % 50 == 0:
            say(received=self.received, held=self.held, again=self.again)


if __name__ == "__main__":
    asyncio.run(run(Receive, options().parse_args()))
