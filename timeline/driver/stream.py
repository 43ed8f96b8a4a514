"""One Consume stream, and what its session asks for."""

from __future__ import annotations

from dataclasses import dataclass

from timeline.driver.channel import Opened
from timeline.wire import Leaving, TransportError, Welcome


@dataclass(slots=True)
class Wish:
    """What a consumer asks for. `lease_ms` 0: the topic's."""

    topic: str
    consumer: str
    session: int
    lease_ms: int


class ConsumeStream:
    """What is known of one stream. Times are monotonic."""

    def __init__(self, opened: Opened, now_ms: float) -> None:
        self.stream, self.address = opened.stream, opened.address
        self.hello_ms = self.heard_ms = self.beat_ms = now_ms
        self.welcome: Welcome | None = None
        self.over = False
        self.leaving: Leaving | None = None
        self.leave_by_ms = float("inf")
        self.fault: TransportError | None = None
        self.echoes: dict[int, float] = {}
        self.farewell = False
        """Whether the broker was told that nothing more is taken."""
