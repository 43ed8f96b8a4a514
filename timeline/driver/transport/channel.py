"""The channel: a way to some broker, out of several addresses, whatever becomes of each.

It stays with an address while that works; one that fails rests for a jittered, growing while; one that says it is
leaving is avoided until it has had time to go. Learned addresses (brokers tell them) come after those that were given.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from timeline.clock import Clock
from timeline.driver.message import Randomness
from timeline.driver.transport.addresses import is_address
from timeline.driver.transport.probe import ABSENT, NoConnection, ProbeResult, lasting, mending
from timeline.errors import Closed, Forbidden, Invalid, NotFound, TimelineError, Unavailable, Unknown
from timeline.wire import Ping, Pong, decode_as, encode
from timeline.wire.transport import STAYS, Fault, Stream, Transport, TransportError

log = logging.getLogger("timeline.driver")

TransportFactory: TypeAlias = Callable[[str], Transport]
Timed: TypeAlias = Callable[[int], bytes]
"""Makes a frame that tells the broker for how many ms its answer is awaited there."""

BACKOFF_FIRST_MS = 25.0
BACKOFF_CAP_MS = 2_000.0
LEAVING_REST_MS = 3_000.0
LEARNED_AT_MOST = 64
PLACES_AT_MOST = 256
"""Addresses kept, those that are no more included: connections to them may be in use."""
LEAST_ATTEMPT_MS = 500.0

REFUSALS = STAYS
DENIALS = (Fault.UNAUTHENTICATED, Fault.FORBIDDEN)
NOTHING_HAPPENED = (Fault.UNREACHABLE, Fault.NOT_READY, Fault.OVERLOADED, *DENIALS)


def refusal(fault: TransportError) -> TimelineError:
    """The error for a fault of REFUSALS."""
    if fault.fault is Fault.NO_TOPIC:
        return NotFound(fault.reason)
    if fault.fault in DENIALS:
        denied = Forbidden(fault.reason)
        denied.found = (fault.fault.name,)
        return denied
    return Invalid(fault.reason)


def found_by(fault: TransportError) -> ProbeResult | None:
    """What is at the address that `fault` is about, where no connection could be made; else None."""
    return fault.probed if isinstance(fault, NoConnection) else None


def unavailable(reason: str, found: Sequence[ProbeResult | None] = ()) -> Unavailable:
    """The error of a call that reached no broker. `found`: what is at the addresses instead."""
    error = Unavailable(reason + mending(stays := lasting(found)))
    error.lasting, error.found = stays, tuple(one.name for one in found if one is not None)
    return error


@dataclass(slots=True)
class _Place:
    """An address and how it fares. `there`: it was given, or brokers still tell of it. `rest_until_ms`: monotonic; not
    tried before, while another can be. `trouble`: what it last failed with; `found`: what is there instead."""

    address: str
    given: bool
    there: bool = True
    transport: Transport | None = None
    failures: int = 0
    rest_until_ms: float = 0.0
    trouble: str = ""
    found: ProbeResult | None = None


@dataclass(slots=True)
class Deadline:
    """Until when (monotonic ms) a call may go on."""

    clock: Clock
    at_ms: float

    @classmethod
    def after(cls, clock: Clock, timeout_ms: float) -> Deadline:
        return cls(clock, clock.monotonic_ms() + timeout_ms)

    @property
    def left_ms(self) -> float:
        return self.at_ms - self.clock.monotonic_ms()


@dataclass(slots=True)
class OpenedStream:
    """A stream and the address it goes to."""

    stream: Stream
    address: str


class InFlightRequest(Protocol):
    """What is known of a frame on its way. `outstanding`: it was sent, and its answer is awaited. `unsure`: an earlier
    attempt of it may have happened. `outdated`: somebody who asked for part of it has given up, and may have been told
    that nothing happened: it must not go as it is."""

    outstanding: bool
    unsure: bool

    @property
    def outdated(self) -> bool: ...


@dataclass(slots=True)
class AttemptState:
    """A `InFlightRequest` of a call of its own."""

    outstanding: bool = False
    unsure: bool = False
    outdated: bool = False


@dataclass(slots=True)
class Channel:
    """Ways to the brokers of one cluster. `make` makes the transport to an address, on its first use."""

    addresses: Sequence[str]
    make: TransportFactory
    clock: Clock
    random: Randomness
    several: bool = field(default=False, init=False)
    """Whether there is another address to go to."""
    _places: dict[str, _Place] = field(default_factory=dict)
    _current: str = ""
    _closed: bool = False

    def __post_init__(self) -> None:
        for address in self.addresses:
            self._places[address] = _Place(address, given=True)
        self.several = len(self.known) > 1

    @property
    def known(self) -> list[str]:
        """All addresses, those that were given first."""
        return [place.address for place in self._places.values() if place.there]

    @property
    def current(self) -> str:
        """The address that worked last; empty when none does."""
        return self._current

    @property
    def transports(self) -> list[Transport]:
        """Those that were made."""
        return [place.transport for place in self._places.values() if place.transport is not None]

    def learn(self, addresses: Sequence[str]) -> None:
        """All brokers that there are, as one of them told. Of those learned before, whoever is not among them is tried
        no more."""
        told = [address for address in addresses if is_address(address)][:LEARNED_AT_MOST]
        if not told:
            return
        for address, place in list(self._places.items()):
            place.there = place.given or address in told
            if not place.there and place.transport is None:
                del self._places[address]
        for address in told:
            if address not in self._places and len(self._places) < PLACES_AT_MOST:
                self._places[address] = _Place(address, given=False)
        self.several = len(self.known) > 1

    def _place(self, address: str) -> _Place:
        return self._places.setdefault(address, _Place(address, given=False, there=False))

    def failed(self, address: str, trouble: str, found: ProbeResult | None = None) -> None:
        """`address` did not work: rest it, longer each time."""
        place = self._place(address)
        place.trouble, place.found = trouble, found
        backoff_ms = min(BACKOFF_CAP_MS, BACKOFF_FIRST_MS * 2.0 ** min(place.failures, 16))
        place.failures += 1
        place.rest_until_ms = self.clock.monotonic_ms() + backoff_ms * (0.5 + self.random.random() / 2)
        self._leave(address)

    def leaving(self, address: str) -> None:
        """The broker at `address` is going: others first for a while."""
        rest_ms = LEAVING_REST_MS if self.several else BACKOFF_FIRST_MS
        self._place(address).rest_until_ms = self.clock.monotonic_ms() + rest_ms
        self._leave(address)

    def worked(self, address: str) -> None:
        """`address` answered."""
        place = self._place(address)
        place.failures, place.rest_until_ms = 0, 0.0
        self._current = address

    def check_open(self) -> None:
        """Raises Closed after `close`."""
        if self._closed:
            raise Closed("the client was closed meanwhile")

    def _leave(self, address: str) -> None:
        if self._current == address:
            self._current = ""

    async def _pick(self, deadline: Deadline) -> _Place | None:
        """The address to try next, when its rest is over; None: not before the deadline. Raises Closed."""
        self.check_open()
        now_ms = self.clock.monotonic_ms()
        current = self._places.get(self._current)
        if current is not None and current.rest_until_ms <= now_ms:
            return current
        there = [place for place in self._places.values() if place.there]
        rested = [place for place in there if place.rest_until_ms <= now_ms]
        rested = [place for place in rested if place.given] or rested
        if rested:
            return rested[int(self.random.random() * len(rested)) % len(rested)]
        soonest = min(there, key=lambda place: place.rest_until_ms)
        wait_ms = soonest.rest_until_ms - now_ms
        if wait_ms >= deadline.left_ms:
            await asyncio.sleep(max(0.0, deadline.left_ms) / 1000.0)
            return None
        await asyncio.sleep(wait_ms / 1000.0)
        return soonest

    def transport(self, address: str) -> Transport:
        """The transport to `address`. Raises Closed."""
        self.check_open()
        place = self._place(address)
        if place.transport is None:
            place.transport = self.make(address)
        return place.transport

    def _attempt_s(self, deadline: Deadline) -> float:
        """How long to wait for one address: leave time for another where there is one."""
        left_ms = deadline.left_ms
        if self.several:
            left_ms = min(left_ms, max(left_ms / 2, LEAST_ATTEMPT_MS))
        return max(0.001, left_ms / 1000.0)

    def unreached(self) -> Unavailable:
        """Why nothing could be sent, for whoever asked: the addresses, what was found there, and what to do."""
        if self._current:
            return Unavailable("it could not be sent in time")
        given = [place for place in self._places.values() if place.given]
        said = "; ".join(_found(place) for place in given)
        absent = any(not place.trouble or place.found in ABSENT for place in given)
        advice = ". Is the address right? `timeline serve` starts a broker" if absent else ""
        return unavailable(f"no broker could be reached: {said}{advice}", [place.found for place in given])

    async def open(self, method: str, deadline: Deadline) -> OpenedStream:
        """A two-way stream to some broker. Raises Unavailable at the deadline."""
        while (place := await self._pick(deadline)) is not None:
            try:
                stream = await self.transport(place.address).stream(method, self._attempt_s(deadline))
            except TransportError as fault:
                if fault.fault in REFUSALS:
                    raise refusal(fault) from fault
                self.failed(place.address, fault.reason, found_by(fault))
            else:
                self._current = place.address
                return OpenedStream(stream, place.address)
            if deadline.left_ms <= 0:
                break
        raise self.unreached()

    async def unary(
        self,
        method: str,
        frame: bytes | Timed,
        deadline: Deadline,
        sending: InFlightRequest | None = None,
        *,
        writes: bool = False,
    ) -> bytes:
        """One frame for one, repeated until it is answered, as it is but for the time that it tells. `attempt` is kept
        up to date meanwhile. Raises Unavailable when that is outdated, or at the deadline; Unknown then when the frame
        `writes` and may have arrived; Invalid, NotFound or Forbidden for what stays refused."""
        attempt = sending if sending is not None else AttemptState()
        while (place := await self._pick(deadline)) is not None:
            transport = self.transport(place.address)
            try:
                await transport.ready(self._attempt_s(deadline))
                if attempt.outdated:
                    raise self.unreached()
                attempt_s = self._attempt_s(deadline)
                data = frame if isinstance(frame, bytes) else frame(max(1, int(attempt_s * 1000.0)))
                attempt.outstanding = True
                answer = await transport.unary(method, data, attempt_s)
            except TransportError as fault:
                attempt.outstanding = False
                if fault.fault in REFUSALS:
                    raise refusal(fault) from fault
                attempt.unsure = attempt.unsure or fault.fault not in NOTHING_HAPPENED
                self.failed(place.address, fault.reason, found_by(fault))
            else:
                attempt.outstanding = False
                self.worked(place.address)
                return answer
            if deadline.left_ms <= 0:
                break
        if attempt.unsure and writes:
            raise Unknown("the answer was lost: it may or may not have happened")
        raise self.unreached()

    async def pages(self, method: str, frame: bytes, deadline: Deadline) -> AsyncIterator[bytes]:
        """One frame for many, from one broker; each may take as long as is left until `deadline` now. Whoever has the
        last page asks for no more: only he can tell that it is the last. Raises TransportError when that breaks off, or
        the broker ends it: the caller knows from where to go on; Invalid or NotFound for what stays refused;
        Unavailable when none could be reached."""
        place = await self._pick(deadline)
        if place is None:
            raise self.unreached()
        patience_s = deadline.left_ms / 1000.0
        try:
            async with aclosing(self.transport(place.address).unary_stream(method, frame, None)) as pages:
                while (page := await _next(pages, patience_s)) is not None:
                    self.worked(place.address)
                    yield page
            raise TransportError(Fault.BROKEN, "the broker ended it before the last page")
        except TransportError as fault:
            if fault.fault in REFUSALS:
                raise refusal(fault) from fault
            self.failed(place.address, fault.reason, found_by(fault))
            raise

    async def close(self) -> None:
        """Ends every transport; from now on whatever is asked raises Closed."""
        self._closed = True
        for place in self._places.values():
            if place.transport is not None:
                transport, place.transport = place.transport, None
                await transport.close()

    def abandon(self) -> None:
        """Forgets every transport without a word: it belongs to the process this one was forked from."""
        for place in self._places.values():
            place.transport, place.failures, place.rest_until_ms = None, 0, 0.0
        self._current = ""


def _found(place: _Place) -> str:
    if not place.trouble:
        return f"{place.address} did not answer in time"
    return named_trouble(place.address, place.trouble)


def named_trouble(address: str, trouble: str) -> str:
    """What went wrong at `address`, which the sentence names."""
    return trouble if address in trouble else f"{address}: {trouble}"


async def _next(pages: AsyncIterator[bytes], patience_s: float) -> bytes | None:
    try:
        async with asyncio.timeout(patience_s):
            return await anext(pages, None)
    except TimeoutError:
        raise TransportError(Fault.DEADLINE, "no page in time") from None


SEARCH_SHARE = 0.5
"""Of the time there is, how much may go into finding out who is there."""


async def ask_all(
    channel: Channel, method: str, frame: bytes, deadline: Deadline
) -> tuple[dict[str, bytes], dict[str, TransportError]]:
    """One frame to every broker that is known or that those know of, to all at once: who does not answer costs the
    others no time. Answers what each said, and why the others said nothing, by address. Raises Invalid for a frame
    that is refused, Forbidden or Unavailable when nobody answered, Closed."""
    addresses = await _addresses(channel, deadline)
    told = await asyncio.gather(*(_told(channel, method, address, frame, deadline) for address in addresses))
    silent = {address: one for address, one in zip(addresses, told, strict=True) if isinstance(one, TransportError)}
    for fault in silent.values():
        if fault.fault is Fault.REFUSED_FRAME or (fault.fault in DENIALS and len(silent) == len(addresses)):
            raise refusal(fault) from fault
    if len(silent) == len(addresses):
        channel.check_open()
        named = (named_trouble(address, fault.reason) for address, fault in silent.items())
        raise unavailable(f"no broker answered: {'; '.join(named)}", [found_by(fault) for fault in silent.values()])
    answers = {address: one for address, one in zip(addresses, told, strict=True) if isinstance(one, bytes)}
    return answers, silent


async def _addresses(channel: Channel, deadline: Deadline) -> list[str]:
    """An address of each broker, and those where none answers. A broker is told by its name and its cluster: it may be
    reached under the address that was given and under the one that it tells others."""
    channel.check_open()
    until = Deadline.after(channel.clock, deadline.left_ms * SEARCH_SHARE)
    known = channel.known
    pongs = dict(zip(known, await asyncio.gather(*(_ping(channel, one, until) for one in known)), strict=True))
    cluster = sorted({address for pong in pongs.values() if pong is not None for address in pong.brokers})
    channel.learn(cluster)
    more = [address for address in cluster if address not in pongs]
    pongs.update(zip(more, await asyncio.gather(*(_ping(channel, one, until) for one in more)), strict=True))
    found: list[str] = []
    met: set[tuple[str, tuple[str, ...]]] = set()
    for address, pong in pongs.items():
        who = (pong.broker, pong.brokers) if pong is not None and pong.brokers else (address, ())
        if who not in met:
            met.add(who)
            found.append(address)
    return found


async def _ping(channel: Channel, address: str, deadline: Deadline) -> Pong | None:
    """Who answers at `address`, and whom it knows; None: nobody does."""
    told = await _told(channel, "Ping", address, encode(Ping(channel.clock.now())), deadline)
    try:
        return decode_as(told, Pong) if isinstance(told, bytes) else None
    except Invalid:
        return None  # whatever that is says so again to the question itself


async def _told(
    channel: Channel, method: str, address: str, frame: bytes, deadline: Deadline
) -> bytes | TransportError:
    try:
        return await channel.transport(address).unary(method, frame, max(0.001, deadline.left_ms / 1000.0))
    except TransportError as fault:
        return fault
