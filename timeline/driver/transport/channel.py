"""The channel: a way to some broker out of several addresses; and the context that all parts of one client share.

The channel stays with an address while that works. An address that fails rests, longer each time and jittered. A broker
that is leaving is avoided until it has had time to go. Given addresses come first, then those that brokers report.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from timeline.clock import Clock
from timeline.driver.consume.broker_clock import Drift
from timeline.driver.message import Ids, Randomness
from timeline.driver.tasks import all_of, keep
from timeline.driver.times import Duration, duration_ms
from timeline.driver.transport.addresses import (
    ABSENT,
    NoConnection,
    ProbeResult,
    is_address,
    lasting,
    mending,
    place_of,
)
from timeline.errors import Closed, Forbidden, Invalid, NotFound, TimelineError, Unavailable, Unknown
from timeline.wire import Ping, Pong, decode_as, encode
from timeline.wire.transport import STAYS, Fault, Stream, Transport, TransportError

log = logging.getLogger("timeline.driver")

TransportFactory: TypeAlias = Callable[[str], Transport]
Timed: TypeAlias = Callable[[int], bytes]
"""Makes a frame that tells the broker for how many ms the caller waits."""

BACKOFF_FIRST_MS = 25.0
BACKOFF_CAP_MS = 2_000.0
LEAVING_REST_MS = 3_000.0
LEARNED_AT_MOST = 64
PLACES_AT_MOST = 256
"""Addresses kept. Former ones count: connections to them may be in use."""
LEAST_ATTEMPT_MS = 500.0

REFUSALS = STAYS
DENIALS = (Fault.UNAUTHENTICATED, Fault.FORBIDDEN)
REFUSED_FOR_NOW = (Fault.OVERLOADED, Fault.NOT_READY)
NOTHING_HAPPENED = (Fault.UNREACHABLE, *REFUSED_FOR_NOW, *DENIALS)


def refusal(fault: TransportError) -> TimelineError:
    """Return the error for a fault of REFUSALS."""
    if fault.fault is Fault.NO_TOPIC:
        return NotFound(fault.reason)
    if fault.fault in DENIALS:
        denied = Forbidden(fault.reason)
        denied.found = (fault.fault.name,)
        return denied
    return Invalid(fault.reason)


def found_by(fault: TransportError) -> ProbeResult | None:
    """Return what is at the address: the result of the probe if no connection could be made, or TALKS if no answer came
    in time. None: the fault says it."""
    if isinstance(fault, NoConnection):
        return fault.probed
    return ProbeResult.TALKS if fault.fault is Fault.DEADLINE else None


def unavailable(reason: str, found: Sequence[ProbeResult | None] = ()) -> Unavailable:
    """Return the error of a call that reached no broker. `found`: results of probes of the addresses."""
    error = Unavailable(reason + mending(stays := lasting(found)))
    error.lasting, error.found = stays, tuple(one.name for one in found if one is not None)
    return error


@dataclass(slots=True)
class _Place:
    """An address and its state. `there`: it was given, or brokers still report it. `rest_until_ms` (monotonic): others
    are tried first until then. `trouble`: its last failure. `found`: see `found_by`. `refuses`: its broker answered
    that it takes no calls at present. `broker`: name and cluster of the broker that answered a ping there last."""

    address: str
    given: bool
    there: bool = True
    transport: Transport | None = None
    failures: int = 0
    rest_until_ms: float = 0.0
    trouble: str = ""
    found: ProbeResult | None = None
    refuses: bool = False
    broker: tuple[str, tuple[str, ...]] = ("", ())


@dataclass(slots=True)
class Deadline:
    """When a call must end, monotonic ms."""

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


SEND_GRACE_MS = 50.0
"""How much longer a send may take. After a halt of this process, what has arrived is read first."""


async def send_within(stream: Stream, frame: bytes, left_ms: Callable[[], float], silent: str) -> None:
    """Send a frame. Raise TransportError(DEADLINE, `silent`) once no time is left: a broker that reads no more blocks a
    send. End the stream then. `left_ms`: how long the broker still has, asked again when that is over."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def check(last: bool) -> None:
        nonlocal timer
        left_s = left_ms() / 1000.0
        if left_s > 0:
            timer = loop.call_later(left_s, check, False)
        elif not last:
            timer = loop.call_later(SEND_GRACE_MS / 1000.0, check, True)
        else:
            limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            timer = loop.call_later(max(0.0, left_ms()) / 1000.0, check, False)
            try:
                await stream.send(frame)
            finally:
                timer.cancel()
    except TimeoutError:
        raise TransportError(Fault.DEADLINE, silent) from None


class InFlightRequest(Protocol):
    """The state of a frame on its way. `outstanding`: sent, and not answered. `unsure`: an earlier attempt may have
    happened. `outdated`: a caller of a part of it has given up, and may have been told that nothing happened. Then it
    must not go as it is."""

    outstanding: bool
    unsure: bool

    @property
    def outdated(self) -> bool: ...


@dataclass(slots=True)
class AttemptState:
    """An `InFlightRequest` of one call."""

    outstanding: bool = False
    unsure: bool = False
    outdated: bool = False


@dataclass(slots=True)
class Channel:
    """Ways to the brokers of one cluster. `make` makes the transport to an address on its first use."""

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
        """All addresses, given ones first."""
        return [place.address for place in self._places.values() if place.there]

    @property
    def current(self) -> str:
        """The address that worked last, or empty."""
        return self._current

    @property
    def failing(self) -> bool:
        """Whether an attempt has failed, and none has worked since."""
        return not self._current and any(place.trouble for place in self._places.values())

    @property
    def transports(self) -> list[Transport]:
        """The transports that were made."""
        return [place.transport for place in self._places.values() if place.transport is not None]

    def learn(self, addresses: Sequence[str]) -> None:
        """Take the addresses of all brokers, as one of them reported. Addresses learned before that are missing here
        are not tried any more."""
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

    def failed(self, address: str, fault: TransportError) -> None:
        """Rest `address`, which did not work; longer each time."""
        place = self._place(address)
        explained = place.found is not None or place.refuses
        if fault.fault is not Fault.DEADLINE or not explained:  # a caller's time that ended explains less
            place.trouble, place.found = fault.reason, found_by(fault)
            place.refuses = fault.fault in REFUSED_FOR_NOW
        backoff_ms = min(BACKOFF_CAP_MS, BACKOFF_FIRST_MS * 2.0 ** min(place.failures, 16))
        place.failures += 1
        place.rest_until_ms = self.clock.monotonic_ms() + backoff_ms * (0.5 + self.random.random() / 2)
        self._leave(address)

    def _note(self, place: _Place, fault: TransportError) -> None:
        """Rest an address after `fault`. Raise the error of a lasting refusal instead."""
        if fault.fault in REFUSALS:
            raise refusal(fault) from fault
        self.failed(place.address, fault)

    def leaving(self, address: str) -> None:
        """Prefer others for a while: the broker at `address` is leaving."""
        rest_ms = LEAVING_REST_MS if self.several else BACKOFF_FIRST_MS
        self._place(address).rest_until_ms = self.clock.monotonic_ms() + rest_ms
        self._leave(address)

    def worked(self, address: str) -> None:
        """Note that `address` answered."""
        place = self._places.get(address) or self._place(address)
        if place.failures:
            place.failures, place.trouble, place.found, place.refuses = 0, "", None, False
        place.rest_until_ms = 0.0
        self._current = address

    def answered(self, address: str, pong: Pong) -> None:
        """Note which broker is at `address`."""
        self._place(address).broker = (pong.broker, tuple(pong.brokers))

    def broker_at(self, address: str) -> object:
        """Return what identifies the broker that answered at `address` last, or the place if none has."""
        broker = self._place(address).broker
        return broker if broker[0] else place_of(address)

    def check_open(self) -> None:
        """Raise Closed after `close`."""
        if self._closed:
            raise Closed("the client was closed meanwhile")

    def _leave(self, address: str) -> None:
        if self._current == address:
            self._current = ""

    async def _pick(self, deadline: Deadline) -> _Place | None:
        """Return the address to try next, once its rest is over. None: not before the deadline. Raise Closed."""
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
        """Return the transport to `address`. Raise Closed."""
        self.check_open()
        place = self._place(address)
        if place.transport is None:
            place.transport = self.make(address)
        return place.transport

    def _attempt_s(self, deadline: Deadline) -> float:
        """Return how long to wait for one address. Time is left for another, if there is one."""
        left_ms = deadline.left_ms
        if self.several:
            left_ms = min(left_ms, max(left_ms / 2, LEAST_ATTEMPT_MS))
        return max(0.001, left_ms / 1000.0)

    def unreached(self) -> Unavailable:
        """Return the error for a call that could not be sent: the addresses, what was found there, and what to do."""
        if self._current:
            return unavailable(f"the broker at {self._current} did not take it in time", [ProbeResult.TALKS])
        listed = [place for place in self._places.values() if place.given or (place.there and place.refuses)]
        places: dict[object, _Place] = {}
        for place in listed:
            places.setdefault((place_of(place.address), place.found, place.refuses), place)
        tried = list(places.values())
        said = "; ".join(_found(place) for place in tried)
        if any(place.refuses for place in tried):
            return unavailable(f"no broker took the call: {said}")
        found = [place.found if place.trouble else ProbeResult.SILENT for place in tried]
        absent = any(one in ABSENT for one in found)
        advice = ". Is the address right? `timeline serve` starts a broker" if absent else ""
        reached = any(one is None or one is ProbeResult.TALKS for one in found)
        return unavailable(f"no broker {'answered' if reached else 'could be reached'}: {said}{advice}", found)

    async def open(self, method: str, deadline: Deadline) -> OpenedStream:
        """Open a two-way stream to some broker. Raise Unavailable at the deadline."""
        while (place := await self._pick(deadline)) is not None:
            try:
                stream = await self.transport(place.address).stream(method, self._attempt_s(deadline))
            except TransportError as fault:
                self._note(place, fault)
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
        once: bool = False,
    ) -> bytes:
        """Send one frame until it is answered, and return the answer. Only the time in it changes. `sending` is kept up
        to date. `once`: a frame that may have arrived is not sent again.

        Raise Unavailable if `sending` is outdated, or at the deadline. Raise Unknown at the deadline if the frame
        `writes` and may have arrived. Raise Invalid, NotFound or Forbidden for a lasting refusal.

        A frame that `writes` is not sent again with less time left than its last refusal took. It would be Unknown.
        """
        attempt = sending if sending is not None else AttemptState()
        refused_ms = 0.0
        while (place := await self._pick(deadline)) is not None:
            transport = self.transport(place.address)
            try:
                await transport.ready(self._attempt_s(deadline))
                if attempt.outdated or (writes and not attempt.unsure and deadline.left_ms < refused_ms):
                    raise self.unreached()
                attempt_s = self._attempt_s(deadline)
                data = frame if isinstance(frame, bytes) else frame(max(1, int(attempt_s * 1000.0)))
                attempt.outstanding = True
                sent_ms = self.clock.monotonic_ms()
                answer = await transport.unary(method, data, attempt_s)
            except TransportError as fault:
                if attempt.outstanding and fault.fault in REFUSED_FOR_NOW:
                    refused_ms = self.clock.monotonic_ms() - sent_ms
                attempt.outstanding = False
                self._note(place, fault)
                attempt.unsure = attempt.unsure or fault.fault not in NOTHING_HAPPENED
            else:
                attempt.outstanding = False
                self.worked(place.address)
                return answer
            if deadline.left_ms <= 0 or (once and attempt.unsure):
                break
        if attempt.unsure and writes:
            raise Unknown("the answer was lost: it may or may not have happened")
        raise self.unreached()

    async def call(
        self,
        method: str,
        frame: bytes | Timed,
        deadline: Deadline,
        attempt: AttemptState,
        *,
        writes: bool,
        once: bool = False,
    ) -> bytes:
        """Send one frame as `unary` does. Raise Unknown for a lasting refusal, too, if the frame `writes` and an answer
        was lost before."""
        try:
            return await self.unary(method, frame, deadline, attempt, writes=writes, once=once)
        except (Invalid, NotFound, Forbidden) as refused:
            if writes and attempt.unsure:
                raise Unknown(f"the answer was lost, and then the call was refused: {refused.reason}") from refused
            raise

    async def pages(self, method: str, frame: bytes, deadline: Deadline) -> AsyncGenerator[bytes, None]:
        """Send one frame to one broker and yield its pages. Each may take as long as is left until `deadline` now. The
        first may take less, so that time is left for another broker. The caller stops after the last page, which only
        it can recognise.

        Raise TransportError if the broker breaks off, or ends it; the caller can continue. Raise Invalid or NotFound
        for a lasting refusal, and Unavailable if no broker could be reached.
        """
        place = await self._pick(deadline)
        if place is None:
            raise self.unreached()
        first_s, patience_s = self._attempt_s(deadline), deadline.left_ms / 1000.0
        try:
            async with aclosing(self.transport(place.address).unary_stream(method, frame, None)) as pages:
                page = await _next(pages, first_s)
                while page is not None:
                    self.worked(place.address)
                    yield page
                    page = await _next(pages, patience_s)
            raise TransportError(Fault.BROKEN, "the broker ended it before the last page")
        except TransportError as fault:
            self._note(place, fault)
            raise

    async def close(self) -> None:
        """End every transport. All later calls raise Closed."""
        self._closed = True
        for place in self._places.values():
            if place.transport is not None:
                transport, place.transport = place.transport, None
                await transport.close()

    def abandon(self) -> None:
        """Forget every transport without ending it: it belongs to the process that this one was forked from."""
        for place in self._places.values():
            place.transport, place.failures, place.rest_until_ms = None, 0, 0.0
        self._current = ""


def _found(place: _Place) -> str:
    if not place.trouble:
        return f"{place.address} did not answer in time"
    return named_trouble(place.address, place.trouble)


def named_trouble(address: str, trouble: str) -> str:
    """Return a sentence about `trouble` that names `address`."""
    return trouble if address in trouble else f"{address}: {trouble}"


async def _next(pages: AsyncIterator[bytes], patience_s: float) -> bytes | None:
    try:
        async with asyncio.timeout(patience_s):
            return await anext(pages, None)
    except TimeoutError:
        raise TransportError(Fault.DEADLINE, "no page in time") from None


SEARCH_SHARE = 0.5
"""The share of the time that may go into finding the brokers."""


async def ask_all(
    channel: Channel, method: str, frame: bytes, deadline: Deadline
) -> tuple[dict[str, bytes], dict[str, TransportError]]:
    """Send one frame to every broker that is known, or that those know, to all at once. Return the answers by address,
    and the faults of the silent ones by address. Raise Invalid if the frame is refused, Forbidden or Unavailable if no
    broker answered, and Closed."""
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
    """Return an address of each broker, and of each that does not answer. Name and cluster identify a broker: it may
    answer under a given address and under the one that it advertises. One that is silent is known by its last answer.
    """
    channel.check_open()
    until = Deadline.after(channel.clock, deadline.left_ms * SEARCH_SHARE)
    known = channel.known
    pongs = dict(zip(known, await asyncio.gather(*(_ping(channel, one, until) for one in known)), strict=True))
    cluster = sorted({address for pong in pongs.values() if pong is not None for address in pong.brokers})
    channel.learn(cluster)
    more = [address for address in cluster if address not in pongs]
    pongs.update(zip(more, await asyncio.gather(*(_ping(channel, one, until) for one in more)), strict=True))
    found: dict[object, str] = {}
    for address, pong in pongs.items():
        if pong is not None and pong.brokers:
            channel.answered(address, pong)
        who = channel.broker_at(address) if pong is None or pong.brokers else address
        found.setdefault(who, address)
    return list(found.values())


async def _ping(channel: Channel, address: str, deadline: Deadline) -> Pong | None:
    """Return the answer of the broker at `address`, or None."""
    told = await _told(channel, "Ping", address, encode(Ping(channel.clock.now())), deadline)
    try:
        return decode_as(told, Pong) if isinstance(told, bytes) else None
    except Invalid:
        return None  # the question itself fails in the same way


async def _told(
    channel: Channel, method: str, address: str, frame: bytes, deadline: Deadline
) -> bytes | TransportError:
    try:
        return await channel.transport(address).unary(method, frame, max(0.001, deadline.left_ms / 1000.0))
    except TransportError as fault:
        return fault


_left_behind: list[object] = []
"""Objects of the process that this one was forked from."""

CLIENT_CLOSED = "the client was closed. Connect again"
FORKED = "this delivery belongs to the process that this one was forked from"


class Leaver(Protocol):
    """A session that can leave its broker in order."""

    def stop(self, timeout_ms: float) -> Coroutine[Any, Any, None]: ...


class ClientContext:
    """Shared by a client and its producers and consumers.

    `epoch` grows in a forked child, and in another event loop after the first one has ended. New connections and tasks
    are made then; those of the epoch before are left alone.
    """

    def __init__(self, channel: Channel, clock: Clock, random: Randomness, timeout_ms: float) -> None:
        self.channel = channel
        self.clock = clock
        self.random = random
        self.ids = Ids(clock, random)
        self.timeout_ms = timeout_ms
        self.drift = Drift()
        self.epoch = 0
        self.closed = False
        self._parting: dict[Leaver, asyncio.Task[None] | None] = {}
        self._pid = os.getpid()
        self._forked = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def closed_error(self, otherwise: str = "") -> Closed:
        """Return the error of a call on something closed: the client, or what `otherwise` says."""
        return Closed(CLIENT_CLOSED if self.closed else otherwise)

    def check(self) -> None:
        """Check each use. Raise Closed after `aclose`, and Invalid in a second event loop while the first one runs."""
        if self.closed:
            raise self.closed_error()
        loop = asyncio.get_running_loop()
        pid = os.getpid()
        if loop is self._loop and pid == self._pid:
            return
        if self._loop is not None:
            if not self.elsewhere:
                raise Invalid(
                    "this client is used in another event loop already: make one client for each loop, "
                    "or use timeline.connect_sync, which serves all threads"
                )
            self.leave_all_behind()
            self.epoch += 1
            self._forked = self._forked or pid != self._pid
        self._loop, self._pid = loop, pid

    @property
    def here(self) -> bool:
        """Whether this is the process of its last use, and no child of it."""
        return os.getpid() == self._pid

    @property
    def elsewhere(self) -> bool:
        """Whether its last use was in another process, or in an event loop that was closed. Nothing of that use can be
        ended here."""
        return not self.here or (self._loop is not None and self._loop.is_closed())

    def leave_all_behind(self) -> None:
        """Leave all connections and parting sessions to the process and the event loop of the last use."""
        if not self.here:
            self.leave_behind(self.channel.transports, self._parting)
        self._parting = {}
        self.channel.abandon()

    def part(self, session: Leaver) -> None:
        """Have `session` leave in order, though its producer or consumer is not used any more. Closing the client waits
        for it. Any thread may call."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        self._parting[session] = None
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._begin_to_part, session)

    def _begin_to_part(self, session: Leaver) -> None:
        if session in self._parting:  # else it has left while the client closed
            self._leaving(session)

    def _leaving(self, session: Leaver) -> asyncio.Task[None]:
        """Return the task in which `session` leaves. There is one: a second `stop` would cut the first one off."""
        task = self._parting[session]
        if task is None:
            task = self._parting[session] = keep(self._leave(session), "an abandoned producer or consumer leaves")
        return task

    async def _leave(self, session: Leaver) -> None:
        try:
            await session.stop(self.timeout_ms)
        finally:
            self._parting.pop(session, None)

    async def parted(self) -> None:
        """Return once all sessions of `part` have left. If this is cancelled, they end at once."""
        await all_of(*(self._leaving(session) for session in list(self._parting)))

    def trouble(self) -> Unavailable:
        """Return why nothing can be sent."""
        return self.channel.unreached()

    def leave_behind(self, *things: object) -> None:
        """Keep `things` alive in a forked child. Their end would call into the parent's gRPC."""
        if self._forked or os.getpid() != self._pid:
            _left_behind.extend(things)

    def deadline(self, timeout: Duration | None) -> Deadline:
        """Return the deadline of a call with `timeout=`."""
        return Deadline.after(self.clock, self.patience_ms(timeout))

    def patience_ms(self, timeout: Duration | None) -> float:
        """Return `timeout=` of a call in ms. None: the client's."""
        return self.timeout_ms if timeout is None else float(duration_ms(timeout, "timeout", least_ms=1))
