"""The settings, clients and bounds that all calls share, and whether the gateway is about to end."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from timeline import config
from timeline.clock import Clock
from timeline.credentials import PLAIN, Credentials
from timeline.driver.tasks import all_of, end, keep
from timeline.driver.transport.addresses import DEFAULT_ADDRESS
from timeline.errors import Forbidden, Invalid, TimelineError, Unavailable, explain
from timeline.gateway.clients import Caller, CallerClient, Clients
from timeline.gateway.metrics import GatewayMetrics
from timeline.gateway.requests import ApiRequest, BodyBudget, LargeAnswers
from timeline.gateway.routes.recurring import RuleWalks

log = logging.getLogger("timeline.gateway")

OPEN_TO_ALL = (
    "other machines reach this gateway, and its broker asks for no tokens: start the broker with --tokens, or the "
    "gateway with --insecure where the network itself keeps strangers out"
)
NONE_READY = "no broker takes all calls now: its own /readyz, at its metrics port, has the reason"
ORIGIN = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
LOOK_MS = 1_000.0
"""How long the brokers' answer about their readiness is kept."""
LOOK_S = 2.0
"""How long brokers may take for that answer."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The settings of one gateway. `brokers`: their addresses. `credentials`: how they are reached, without a token.
    `origins`: pages of these origins may call from a browser."""

    listen: str = config.HTTP
    brokers: str = DEFAULT_ADDRESS
    credentials: Credentials = PLAIN
    tls_cert: str = ""
    tls_key: str = ""
    insecure: bool = False
    origins: tuple[str, ...] = ()
    grace_ms: int = 30_000
    log_level: str = "info"
    log_format: str = "json"

    def check(self) -> GatewaySettings:
        """Return itself. Raise Invalid with a sentence for the first impossible value."""
        config.check_address("listen", self.listen, free_port=True)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise Invalid("tls_cert and tls_key belong together: give both, or neither")
        for origin in self.origins:
            if ORIGIN.fullmatch(origin) is None:
                raise Invalid(f"an origin is a scheme and a host, such as https://app.example.org, not {origin!r:.80}")
        return self

    @property
    def exposed(self) -> bool:
        """Whether other machines reach it."""
        return not config.is_loopback(config.split_address(self.listen)[0])


class SettleListener(Protocol):
    """Something that gives out deliveries, and learns here which of them were settled."""

    def settled(self, receipts: Set[str]) -> None: ...
    def extended(self, receipts: Set[str], until_ms: float) -> None: ...


class Part(Protocol):
    """Something that runs beside the calls, from start to end. After `rest` it begins nothing more."""

    async def start(self, metrics: GatewayMetrics) -> None: ...
    def rest(self) -> None: ...
    async def stop(self) -> None: ...


class _Cached:
    """The result of `ask`, kept for `LOOK_MS`. Calls that come meanwhile wait for the same result."""

    def __init__(self, clock: Clock, ask: Callable[[], Awaitable[str]]) -> None:
        self._clock, self._ask = clock, ask
        self._asked_ms, self._said = -LOOK_MS, ""
        self._asking = asyncio.Lock()

    async def get(self) -> str:
        async with self._asking:
            if self._clock.monotonic_ms() >= self._asked_ms + LOOK_MS:
                self._said = await self._ask()
                self._asked_ms = self._clock.monotonic_ms()
        return self._said


class HttpGateway:
    """One gateway. `parts` run beside its calls. They start before the first call, and stop after the last."""

    def __init__(self, settings: GatewaySettings, version: str, parts: tuple[Part, ...] = ()) -> None:
        self.settings, self.version, self.parts = settings, version, parts
        self.clock = Clock()
        self.clients = Clients(settings.brokers, settings.credentials)
        self.bodies, self.answers = BodyBudget(), LargeAnswers()
        self.walks = RuleWalks()
        self.metrics = GatewayMetrics()
        self.stopping = asyncio.Event()
        self.streams: set[SettleListener] = set()
        self._reached = _Cached(self.clock, self._reach)
        self._serves = _Cached(self.clock, self._ask_health)
        self._guarded = settings.exposed and not settings.insecure
        self._asks_tokens: bool | None = None
        """Whether brokers refused a caller without a token when they answered last. None: none has answered yet."""
        self._ending: asyncio.Future[Any] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the parts, and look whether brokers serve calls."""
        for part in self.parts:
            await part.start(self.metrics)
        self._looking = keep(self._tell_ready(), "look for a broker")

    async def _tell_ready(self) -> None:
        """Log if no broker serves calls at the start, and when one does."""
        told = False
        while (why := await self.not_ready()) and not self.stopping.is_set():
            if not told:
                log.warning("not ready yet: %s", why)
                told = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), LOOK_MS / 1000)
        if told and not self.stopping.is_set():
            log.info("ready: a broker serves calls")

    def end(self) -> None:
        """Begin to end: calls and parts begin nothing more."""
        self.stopping.set()
        for part in self.parts:
            part.rest()

    async def stop(self) -> None:
        """Stop the parts, and close the clients."""
        if self._ending is not None:
            self._ending.cancel()
        self.walks.stop()
        looking = () if self._looking is None else (end(self._looking),)
        await all_of(*looking, *(part.stop() for part in self.parts))
        await self.clients.aclose()

    @property
    def ending(self) -> asyncio.Future[Any]:
        """A future that is done once the gateway is about to end. All waits share it."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self.stopping.wait())
        return self._ending

    async def not_ready(self) -> str:
        """Return why calls cannot be served now. Empty: they can. A broker that only wants a token is ready."""
        if self.stopping.is_set():
            return "the gateway is about to end"
        return await self._reached.get() or await self._serves.get()

    async def _ask_health(self) -> str:
        return "" if await self.clients.any_ready(LOOK_S) else NONE_READY

    async def _reach(self) -> str:
        try:
            async with self.clients.serving(Caller()) as client:
                await client.timeline.ping(timeout=LOOK_S)
        except Forbidden:
            self._asks_tokens = True
            return ""
        except TimelineError as trouble:
            return explain(trouble)
        self._asks_tokens = False
        return OPEN_TO_ALL if self._guarded else ""

    async def is_open(self) -> bool:
        """Return whether callers need no token. Raise Unavailable while no broker has said."""
        said = await self._reached.get()
        if self._asks_tokens is None:
            raise Unavailable(said, advice=said)
        return not self._asks_tokens

    async def check_guarded(self) -> None:
        """Raise Unavailable while everybody on other machines could do everything: the broker asks for no tokens, or it
        has not said yet whether it does."""
        if not self._guarded or not (said := await self._reached.get()) or self._asks_tokens:
            return
        raise Unavailable(said, advice=said)


def gateway_of(request: ApiRequest) -> HttpGateway:
    """Return the gateway that a request came to."""
    gateway: HttpGateway = request.app.state.gateway
    return gateway


@asynccontextmanager
async def serving(request: ApiRequest) -> AsyncIterator[CallerClient]:
    """Lend the client of the request's token. Raise Unavailable while the gateway is open to all, Invalid for a token
    that cannot be one, and Forbidden for one that brokers do not let in."""
    gateway = gateway_of(request)
    await gateway.check_guarded()
    async with gateway.clients.serving(request.caller) as client:
        yield client
