"""The gate that is a webhook receiver: a small HTTP server, as anybody could write it in any language.

The gateway POSTs a departure when it is due. The gate checks the signature and answers 202 with `Timeline-Lease`: it
keeps the lease while it boards. When the plane has left, it acknowledges by the receipt, over HTTP.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web

from timeline.demo.plan import WEBHOOK_GATE, WebhookPlan
from timeline.demo.roles import SESSION, Role, begun
from timeline.driver.consume.pull import LeaseToken
from timeline.errors import TimelineError, Unknown
from timeline.model import payload_sum

ANSWER_S = 30.0
"""How long the gate waits for the answer to its ack. The gateway's own deadline is shorter."""


class AckRefused(TimelineError):
    """The gateway did not acknowledge. `code` is the status that it gave."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.code = status


def signed(headers: Mapping[str, str], body: bytes, secret: str) -> bool:
    """Return whether a request has a valid signature of Standard Webhooks."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    said = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.digest(key, said, hashlib.sha256)).decode()
    given = headers["webhook-signature"].split()
    return any(hmac.compare_digest(f"v1,{expected}", one) for one in given)


class WebhookGate:
    """The gate at work. `http`: its connections to the gateway."""

    def __init__(self, role: Role, webhook: WebhookPlan, http: aiohttp.ClientSession) -> None:
        self._role, self._webhook, self._http = role, webhook, http
        self.boarding: set[asyncio.Task[None]] = set()
        mine = {"topic": role.plan.topic, "consumer": WEBHOOK_GATE, "session": SESSION}
        self._mine: dict[str, Any] = mine
        role.note("consume", mine)

    async def receive(self, request: web.Request) -> web.Response:
        """Take a departure."""
        body = await request.read()
        headers = request.headers
        if not signed(headers, body, self._webhook.secret):
            return web.Response(status=401)
        plan, receipt = self._role.plan, headers["Timeline-Receipt"]
        # A receiver need not read a receipt. The history does: it tells one lease from another by what is in it.
        lease = LeaseToken.of(receipt)
        id = unquote(headers["Timeline-Id"])
        about = {**self._mine, "id": id, "birth": lease.birth, "version": lease.version}
        scheduled_ms = round(datetime.fromisoformat(headers["Timeline-Due"]).timestamp() * 1000)
        # Its lease began no earlier, so that is the least that it lasts.
        until_ms = scheduled_ms + plan.lease_ms
        times = {"due_ms": scheduled_ms, "scheduled_ms": scheduled_ms, "lease_until_ms": until_ms}
        more = {"sum": payload_sum(body), "deliveries": int(headers["Timeline-Deliveries"])}
        self._role.note("receive", {**about, **times, **more})
        task = asyncio.create_task(self._leave(about, receipt))
        self.boarding.add(task)
        task.add_done_callback(self.boarding.discard)
        return web.Response(status=202, headers={"Timeline-Lease": f"{plan.lease_ms}ms"})

    async def _leave(self, about: dict[str, Any], receipt: str) -> None:
        await asyncio.sleep(self._role.plan.boarding_ms / 1000)
        await self._role.noted("ack", about, self._ack(receipt))

    async def _ack(self, receipt: str) -> None:
        """Acknowledge by the receipt. Raise TimelineError."""
        try:
            asked = self._http.post(f"http://{self._webhook.gateway}/v1/leases:ack", json={"receipts": [receipt]})
            async with asked as answer:
                told = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as lost:
            raise Unknown(f"the gateway's answer was lost: {lost!r:.200}") from lost
        if answer.status != 207:
            raise AckRefused(told["code"], told["detail"])
        (result,) = told["results"]
        if result["status"] != "OK":
            raise AckRefused(result["status"], result.get("detail", ""))


async def receive(folder: Path, port: int) -> None:
    """Play the gate that is a webhook receiver, on a port of this machine. On SIGTERM, let those that board leave."""
    gate: WebhookGate | None = None

    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=503) if gate is None else await gate.receive(request)

    application = web.Application()
    application.router.add_post("/departures", handle)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with begun(folder, WEBHOOK_GATE) as role, aiohttp.ClientSession(timeout=timeout) as http:
            assert role.plan.webhook is not None
            gate = WebhookGate(role, role.plan.webhook, http)
            await role.stopping.wait()
            while gate.boarding:
                await asyncio.wait(gate.boarding)
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(receive(Path(sys.argv[1]), int(sys.argv[2])))
