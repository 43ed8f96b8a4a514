"""How full the queues of a broker were, against their bounds: S15. And how often somebody was told to wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from timeline.broker.limits import Limits
from timeline.broker.node import Node
from timeline.history import History
from timeline.model import Answers, Status
from timeline.wire.transport import Fault, TransportError

ROOMY = Limits(set_aside_cap_ms=3_000)
NARROW = Limits(
    set_aside_cap_ms=3_000,
    intake_messages=6,
    settles_waiting=4,
    calls_in_flight=2,
    requests_per_stream=3,
    store_batch_messages=3,
    lease_messages=4,
    lease_bytes=70,
    outbox_bytes=60,
    outboxes_bytes=100,
    deliver_messages=2,
    answers_waiting=4,
    scans=2,
    late_kept=5,
)
"""So little that everything runs full."""
CREDIT = 20
"""The most frames of deliveries that wait for one consumer: its credit."""


class Gauges:
    """Watches one broker from the outside: what goes into its queues, and the most that each of them held."""

    def __init__(self, node: Node, occurred: Counter[str]) -> None:
        self._node, self._occurred = node, occurred
        self._most: Counter[str] = Counter()
        self._bounds: dict[str, int] = {}
        self._largest: Counter[str] = Counter()
        node.intake.put = self._watched("put", node.intake.put)  # type: ignore[method-assign]
        node.settling.settle = self._watched("settle", node.settling.settle)  # type: ignore[method-assign]
        self._unary = node.service.unary
        node.service.unary = self._call  # type: ignore[method-assign]

    def _watched(self, what: str, work: Any) -> Any:
        async def watched(topic: Any, batch: Any, *more: Any) -> Answers:
            # What is too large by itself is let in where nothing waits.
            self._largest[what] = max(self._largest[what], len(batch))
            self.look()
            answers: Answers = await work(topic, batch, *more)
            self._occurred[f"{what} throttled"] += int(np.count_nonzero(answers.status == Status.THROTTLED.code))
            self.look()
            return answers

        return watched

    async def _call(self, method: str, frame: bytes) -> bytes:
        self.look()
        try:
            return await self._unary(method, frame)
        except TransportError as fault:
            self._occurred["call throttled"] += fault.fault is Fault.OVERLOADED
            raise

    def look(self) -> None:
        """Takes note of how full everything is now."""
        node, limits = self._node, self._node.limits
        self._held("puts waiting", node.intake.waiting, max(limits.intake_messages, self._largest["put"]))
        self._held("settles waiting", node.settling.waiting, max(limits.settles_waiting, self._largest["settle"]))
        self._held("calls under way", len(node.service._under_way), limits.calls_in_flight)
        self._held("late deliveries kept", len(node.late._ids), limits.late_kept)
        answers = limits.answers_waiting + limits.requests_per_stream + CREDIT
        for dealer in node.dealers:
            for consumer in dealer.roster.consumers.values():
                self._held("frames for a consumer", len(consumer.outbox), answers)

    def _held(self, what: str, count: int, bound: int) -> None:
        self._most[what] = max(self._most[what], count)
        self._bounds[what] = bound

    def note(self, history: History) -> None:
        """Writes down the most that was held."""
        for what, most in sorted(self._most.items()):
            history.note("queue", {"broker": self._node.name, "what": what, "most": most, "bound": self._bounds[what]})
