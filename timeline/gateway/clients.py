"""Clients of the brokers: one for each token that callers bring, and their producers.

The broker alone decides what a token may do. So each token has a client of its own, whose calls carry it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from timeline.clock import Clock
from timeline.credentials import Credentials
from timeline.driver.client import Timeline
from timeline.driver.producer import Producer
from timeline.driver.tasks import all_of
from timeline.driver.transport.addresses import parse_addresses
from timeline.driver.transport.grpc_transport import serves
from timeline.errors import Forbidden, Throttled, TimelineError

CLIENTS = 256
"""Clients that are kept while nobody uses them. Those in use are not counted."""
STRANGERS = 64
"""Tokens at once about which no broker has said anything yet. Each takes a connection to one."""
MOST_OF_TOKEN = 2_000
"""Requests of one token at once. Each long poll and each stream takes one of the streams that a broker permits a
host."""
PRODUCERS = 64
"""Producers that one client keeps while nobody uses them."""
TIMEOUT = "10s"
ADMITTED_MS = 2_000.0
"""How long a broker's word holds that it lets a token in."""
ASK_AGAIN_MS = 250.0
"""How long nobody asks again after a broker gave no answer."""
UNAUTHENTICATED = "UNAUTHENTICATED"
"""In `found` of an error: the token is missing, unknown or has expired."""


def no_token() -> Forbidden:
    """Return the refusal of a caller that shows no token, where brokers ask for one."""
    denied = Forbidden("no token was given: send the header 'Authorization: Bearer' with a token")
    denied.found = (UNAUTHENTICATED,)
    return denied


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as far as the gateway knows: the token that is shown. Empty: none."""

    token: str = field(default="", repr=False)
    as_operator: bool = False


@dataclass(slots=True)
class _ProducerUse:
    producer: Producer
    users: int = 0


class CallerClient:
    """A caller's client, with producers that stay open between calls."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.users = 0
        self.admitted = False
        """Whether a broker has let this token in."""
        self._clock = Clock()
        self._asked_ms = -ADMITTED_MS
        self._asking = asyncio.Lock()
        self._producers: OrderedDict[tuple[str, str], _ProducerUse] = OrderedDict()

    async def check_admitted(self) -> None:
        """Ask a broker now and then whether it lets this token in. Raise Forbidden if it does not. Answers to messages
        do not say whether a token is unknown, or only lacks a right."""
        if self._clock.monotonic_ms() < self._asked_ms + ADMITTED_MS:
            return
        async with self._asking:
            now_ms = self._clock.monotonic_ms()
            if now_ms < self._asked_ms + ADMITTED_MS:
                return
            try:
                await self.timeline.ping(timeout="1s")
            except Forbidden:
                self.admitted = False
                raise
            except TimelineError:
                # The call itself meets the same, and has more time. Those that wait here need not ask, too.
                self._asked_ms = self._clock.monotonic_ms() - ADMITTED_MS + ASK_AGAIN_MS
                return
            self._asked_ms = now_ms
            self.admitted = True

    @asynccontextmanager
    async def producer(self, topic: str, group: str) -> AsyncIterator[Producer]:
        """Lend the producer of `topic` and `group`. Raise Invalid for names that cannot be."""
        key = topic, group
        use = self._producers.get(key)
        if use is None:
            use = self._producers[key] = _ProducerUse(self.timeline.producer(topic, group))
        self._producers.move_to_end(key)
        use.users += 1
        try:
            yield use.producer
        finally:
            use.users -= 1
            await self._drop_idle()

    async def _drop_idle(self) -> None:
        if len(self._producers) <= PRODUCERS:
            return
        idle = next((key for key, use in self._producers.items() if not use.users), None)
        if idle is not None:
            await self._producers.pop(idle).producer.aclose()


class Clients:
    """Makes, keeps and closes clients. `credentials`: how brokers are reached, without a token."""

    def __init__(self, brokers: str, credentials: Credentials) -> None:
        self._brokers, self._credentials = brokers, credentials
        self._clients: OrderedDict[Caller, CallerClient] = OrderedDict()

    @asynccontextmanager
    async def serving(self, caller: Caller) -> AsyncIterator[CallerClient]:
        """Lend the client of `caller`. Raise Invalid for a token that cannot be one, and
        Forbidden for one that brokers do not let in."""
        client = self._clients.get(caller)
        if client is None:
            strangers = sum(bool(each.token) and not one.admitted for each, one in self._clients.items())
            if caller.token and strangers >= STRANGERS:
                raise Throttled("the brokers are asked about as many new tokens as may be", retry_after_ms=1_000)
            credentials = replace(self._credentials, token=caller.token, as_operator=caller.as_operator)
            credentials.metadata()
            client = self._clients[caller] = CallerClient(Timeline(self._brokers, TIMEOUT, credentials=credentials))
        self._clients.move_to_end(caller)
        if caller.token and client.users >= MOST_OF_TOKEN:
            raise Throttled(f"{MOST_OF_TOKEN:,} requests of this token are under way: wait", retry_after_ms=1_000)
        client.users += 1
        try:
            await client.check_admitted()
            yield client
        except Forbidden as denied:
            if UNAUTHENTICATED in denied.found and not caller.token:  # the broker's sentence is for its own clients
                raise no_token() from denied
            raise
        finally:
            client.users -= 1
            if not client.users and not client.admitted and caller.token and self._clients.get(caller) is client:
                del self._clients[caller]  # unknown tokens cost nothing for long
                await client.timeline.aclose()
            await self._drop_idle()

    async def _drop_idle(self) -> None:
        if len(self._clients) <= CLIENTS:
            return
        idle = next((caller for caller, client in self._clients.items() if not client.users), None)
        if idle is not None:
            await self._clients.pop(idle).timeline.aclose()

    async def any_ready(self, timeout_s: float) -> bool:
        """Return whether a broker is ready: one that was given, or that a client has learned of. Brokers say that
        without a token."""
        known = {*parse_addresses(self._brokers)}
        for client in self._clients.values():
            known.update(client.timeline._context.channel.known)
        asked = [asyncio.ensure_future(serves(address, self._credentials, timeout_s)) for address in known]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
            return False
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def aclose(self) -> None:
        """Close all clients, which end their calls."""
        clients, self._clients = self._clients, OrderedDict()
        await all_of(*(client.timeline.aclose() for client in clients.values()))
