"""Parting: how a broker that deals no more lets go of those that are connected to it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from timeline.broker.api.produce import ProduceStream
from timeline.model import LateCause, LeavingReason

if TYPE_CHECKING:
    from timeline.broker.dispatch.dealer import Dealer
    from timeline.broker.node import Node

log = logging.getLogger("timeline.broker")


def stand_back(node: Node, cause: LateCause = LateCause.PAUSED) -> None:
    """From this moment nothing is leased and nothing pushed; what was not pushed goes back. `cause`: what is to blame
    for lateness from now on."""
    node.stand()  # first of all: others deal its buckets from now on
    for dealer in node.dealers:
        dealer.stop_leasing(cause)
        dealer.withdraw()


async def part(node: Node, reason: LeavingReason, text: str, hand_back_ms: float) -> None:
    """After `stand_back`: tells producers to leave, and each topic's consumers once what was not pushed is back.

    Another broker leases again to a consumer what it holds there and does not have in hand: what is still on its way
    back by then would have been delivered once more, to nobody's code. A store that does not answer keeps nobody for
    longer than `hand_back_ms`, nor any other topic's consumers at all; what it refuses again and again to take back
    runs out by its lease.
    """
    for stream in node.service.streams.of(ProduceStream):
        # Not waited for: who does not read holds up nobody.
        node.tasks.spawn(stream.leave(text, reason), "parting with a producer")
    await asyncio.gather(*(_dismiss(dealer, reason, text, hand_back_ms) for dealer in node.dealers))


async def _dismiss(dealer: Dealer, reason: LeavingReason, text: str, hand_back_ms: float) -> None:
    try:
        async with asyncio.timeout(hand_back_ms / 1000.0):
            await dealer.quiet()
    except TimeoutError:
        name = dealer.topic.name
        log.warning("topic %r: what was not pushed is not back after %d ms: consumers leave now", name, hand_back_ms)
    dealer.dismiss(reason, text)
