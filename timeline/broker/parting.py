"""Parting: how a broker that deals no more lets go of those that are connected to it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from timeline.broker.producing import ProduceStream
from timeline.wire.frames import Cause, LeavingReason

if TYPE_CHECKING:
    from timeline.broker.node import Node

log = logging.getLogger("timeline.broker")


def stand_back(node: Node, cause: Cause = Cause.PAUSED) -> None:
    """From this moment nothing is leased and nothing pushed; what was not pushed goes back. `cause`: what is to blame
    for lateness from now on."""
    node.recount()  # first of all: others deal its buckets from now on
    for dealer in node.dealers:
        dealer.stop_leasing(cause)
        dealer.withdraw()


async def part(node: Node, reason: LeavingReason, text: str) -> None:
    """After `stand_back`: tells producers to leave, and consumers once what was not pushed to them is back.

    Another broker leases again to a consumer what it holds there and does not have in hand: what is still on its way
    back by then would have been delivered once more, to nobody's code. A store that does not answer keeps nobody for
    longer than `limits.hand_back_ms`.
    """
    for stream in node.service.streams.of(ProduceStream):
        # Not waited for: who does not read holds up nobody.
        node.tasks.spawn(stream.leave(text, reason), "parting with a producer")
    try:
        async with asyncio.timeout(node.limits.hand_back_ms / 1000.0):
            await asyncio.gather(*(dealer.quiet() for dealer in node.dealers))
    except TimeoutError:
        log.warning("what was not pushed is not back after %d ms: consumers leave now", node.limits.hand_back_ms)
    for dealer in node.dealers:
        dealer.dismiss(reason, text)
