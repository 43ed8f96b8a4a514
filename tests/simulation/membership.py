"""A membership that is wrong: it says that others deal some of the buckets, where there are no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from timeline.sync import MembershipChange
from timeline.sync.view import LocalMembership

THIRDS = 3


class Belief:
    """What the membership says, whichever broker asks: `others` names the thirds of the buckets that others deal."""

    def __init__(self) -> None:
        self.others: frozenset[int] = frozenset()
        self._listeners: list[Callable[[MembershipChange], None]] = []

    def listen(self, callback: Callable[[MembershipChange], None]) -> None:
        """Calls back when the belief changes, unless the event is missed."""
        self._listeners.append(callback)

    def change(self, others: frozenset[int], told: bool) -> None:
        """Believes something else from now on; brokers hear of it only if `told`."""
        self.others = others
        if told:
            for callback in self._listeners:
                callback(MembershipChange.MEMBERS)


class WrongMembership(LocalMembership):
    """One broker's view of the belief."""

    def __init__(self, belief: Belief) -> None:
        super().__init__()
        self._belief = belief

    def buckets(self, topic_uid: int, buckets: int) -> Sequence[int] | None:
        others = self._belief.others
        return [bucket for bucket in range(buckets) if bucket % THIRDS not in others] if others else None

    def on_change(self, callback: Callable[[MembershipChange], None]) -> None:
        self._belief.listen(callback)
