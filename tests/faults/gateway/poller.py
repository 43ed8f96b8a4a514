"""A client of HTTP as a process of its own. It leases by long poll, and settles by receipts at any gateway.

    python -m tests.faults.gateway.poller --address HOST:PORT,HOST:PORT --history FILE --name c1 --window 120

It keeps `--window` messages unsettled while it can, so that a kill always falls between lease and ack. Sometimes it
hangs up on a poll that is under way. A line on standard input makes it settle everything from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import suppress
from datetime import datetime
from typing import Any

import aiohttp

from tests.faults.worker import TOPIC, options, run, say
from timeline.driver.consume.pull import LeaseToken
from timeline.history import UNKNOWN, HistoryFile, outcome_of
from timeline.model import payload_sum

POLLS = 3
"""So many polls wait at a time."""
MOST = 25
PAUSE_S = 0.05
"""After a poll that was not answered, or with an error. Nothing announces a gateway that can lease again."""
WAIT = "2s"
Held = tuple[str, dict[str, Any]]
"""A receipt, and the token for the history."""


class Poll:
    """Leases and settles until standard input ends."""

    def __init__(self, asked: argparse.Namespace, history: HistoryFile) -> None:
        self.asked, self.history = asked, history
        self.rng = random.Random(f"{asked.name}.{asked.session}")
        self.doors = asked.address.split(",")
        self.window = asked.window
        self.never = asyncio.get_running_loop().create_future()
        self.held: list[Held] = []
        self.received = self.again = self.hung_up = 0

    def finish(self) -> None:
        """From now on nothing is held back."""
        self.window = 0

    async def work(self) -> None:
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
            for _ in range(POLLS):
                tasks.create_task(self._poll(session))

    async def _post(self, session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status and the body of an answer. Raises aiohttp.ClientError or TimeoutError when none came. A gateway
        that is not there is passed over."""
        *others, last = self.rng.sample(self.doors, len(self.doors))
        for door in others:
            with suppress(aiohttp.ClientConnectorError):
                return await self._post_to(door, session, path, body)
        return await self._post_to(last, session, path, body)

    async def _post_to(
        self, door: str, session: aiohttp.ClientSession, path: str, body: dict[str, Any]
    ) -> tuple[int, Any]:
        async with session.post(f"http://{door}/v1/{path}", json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def _poll(self, session: aiohttp.ClientSession) -> None:
        while True:
            hangs_up = self.rng.random() < 0.02
            limit = asyncio.timeout(self.rng.random() * 0.1 if hangs_up else None)
            status = 0
            answer: Any = None
            with suppress(aiohttp.ClientError, TimeoutError):
                async with limit:
                    asked = {"max": MOST, "wait": WAIT}
                    status, answer = await self._post(session, f"topics/{TOPIC}/leases", asked)
            self.hung_up += limit.expired()
            if status == 200:
                self._receive(answer["messages"])
            elif not limit.expired():
                await asyncio.wait({self.never}, timeout=PAUSE_S)
            while len(self.held) > self.window:
                some, self.held = self.held[:MOST], self.held[MOST:]
                await self._settle(session, some)
            self._tell()

    def _tell(self) -> None:
        say(received=self.received, held=len(self.held), again=self.again, hung_up=self.hung_up)

    def _receive(self, messages: list[dict[str, Any]]) -> None:
        noted = []
        for one in messages:
            token = LeaseToken.of(one["receipt"])
            named = {"topic": TOPIC, "id": one["id"], "consumer": token.holder}
            named |= {"birth": token.birth, "version": token.version}
            times = {f"{name}_ms": _ms(one[name]) for name in ("due", "scheduled", "lease_until")}
            payload = one["payload_text"].encode()
            seen = {"sum": payload_sum(payload), "size": len(payload), "deliveries": one["deliveries"]}
            noted.append({**named, **times, **seen})
            self.held.append((one["receipt"], named))
            self.again += one["deliveries"] > 1
        self.history.notes("receive", noted)
        self.history.flush()
        self.received += len(noted)

    async def _settle(self, session: aiohttp.ClientSession, some: list[Held]) -> None:
        draw = 1.0 if not self.window else self.rng.random()
        if draw < 0.04:
            await self._one(session, "release", some, {"in": "200ms"}, {"in_ms": 200})
        elif draw < 0.06:
            await self._one(session, "bury", some[:1], {"reason": "no good"}, {})
            await self._one(session, "ack", some[1:], {}, {})
        else:
            if draw < 0.12:
                await self._one(session, "extend", some, {"lease": "5s"}, {"more_ms": 5_000})
            await self._one(session, "ack", some, {}, {})

    async def _one(
        self,
        session: aiohttp.ClientSession,
        verb: str,
        some: list[Held],
        more: dict[str, Any],
        noted: dict[str, Any],
    ) -> None:
        if not some:
            return
        started = self.history.call(verb, [{**token, **noted} for _, token in some])
        body = {"receipts": [receipt for receipt, _ in some], **more}
        try:
            status, answer = await self._post(session, f"leases:{verb}", body)
        except (aiohttp.ClientError, TimeoutError):
            self.history.answer(started, UNKNOWN, {"status": "UNKNOWN"})
            return
        if status != 207:
            code = answer["code"]
            self.history.answer(started, outcome_of(code), {"status": code})
            return
        results = [{"status": one["status"]} for one in answer["results"]]
        self.history.answer(started, [outcome_of(one["status"]) for one in results], results)


def _ms(text: str) -> int:
    """Milliseconds of a time as the gateway tells it."""
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


if __name__ == "__main__":
    asyncio.run(run(Poll, options().parse_args()))
