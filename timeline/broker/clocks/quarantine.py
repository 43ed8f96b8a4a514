"""Quarantine: what a broker leaves undone while it cannot go by its clock, and how it takes it up again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from timeline.broker.clocks.offsets import Clocks
from timeline.broker.dispatch.roster import ConnectedConsumer
from timeline.broker.drain import part, stand_back
from timeline.model import LateCause, LeavingReason
from timeline.storage_plugins.contract import Store

if TYPE_CHECKING:
    from timeline.broker.node import Node


def watched(node: Node, store: Store) -> Clocks:
    """The clocks that `node` compares its own with, the store's among them; it stands aside by what they say."""

    def consumers() -> Iterator[ConnectedConsumer]:
        for dealer in node.dealers:
            yield from dealer.roster.consumers.values()

    return Clocks(
        name=node.name,
        clock=node.clock,
        store=store,
        members=node.membership.members,
        consumers=consumers,
        peers=node.cluster.peers,
        limits=node.limits,
        metrics=node.metrics,
        changed=lambda: _stand_aside(node) if node.clocks.quarantined else _take_part(node),
    )


def _stand_aside(node: Node) -> None:
    """Leases nothing; its buckets and whoever is connected go to others."""
    stand_back(node, LateCause.CLOCK)
    leaving = part(node, LeavingReason.QUARANTINED, node.clocks.quarantined, node.limits.hand_back_ms)
    node.tasks.spawn(leaving, "parting")
    node.readiness.set()


def _take_part(node: Node) -> None:
    """Leases again, for whoever comes back."""
    for dealer in node.dealers:
        dealer.lease_again(LateCause.CLOCK)
    node.readiness.set()
