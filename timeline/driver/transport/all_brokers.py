"""Questions that all brokers of a cluster are asked: each knows what it did itself, and which others there are."""

from __future__ import annotations

import asyncio

from timeline.driver.transport.channel import DENIALS, Channel, Deadline, named_trouble, refusal
from timeline.driver.transport.handshake import lasting
from timeline.errors import Invalid, Unavailable
from timeline.wire import Ping, Pong, decode_as, encode
from timeline.wire.transport import Fault, TransportError

SEARCH_SHARE = 0.5
"""Of the time there is, how much may go into finding out who is there."""


async def ask_all(
    channel: Channel, method: str, frame: bytes, deadline: Deadline
) -> tuple[dict[str, bytes], dict[str, str]]:
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
        stays = lasting([fault.reason for fault in silent.values()])
        raise Unavailable(f"no broker answered: {'; '.join(named)}{stays}")
    answers = {address: one for address, one in zip(addresses, told, strict=True) if isinstance(one, bytes)}
    return answers, {address: fault.reason for address, fault in silent.items()}


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
