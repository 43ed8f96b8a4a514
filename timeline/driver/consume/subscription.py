"""One Consume stream, and what its session asks for."""

from __future__ import annotations

from dataclasses import dataclass

from timeline.driver.transport.channel import OpenedStream
from timeline.model import LeavingReason
from timeline.wire import Leaving, TransportError, Welcome

SILENT_HEARTBEATS = 3


@dataclass(slots=True)
class Subscription:
    """What a consumer asks for. `lease_ms` 0: the topic's."""

    topic: str
    consumer: str
    session: int
    lease_ms: int


class ConsumeStream:
    """What is known of one stream. Times are monotonic."""

    def __init__(self, opened: OpenedStream, now_ms: float) -> None:
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
        self.heard_out = False
        """Whether a broker that drains was sent what had gathered when it said so."""

    def silent_at_ms(self, timeout_ms: float) -> float:
        """When a broker that says nothing until then is given up."""
        if self.welcome is None:
            return self.hello_ms + timeout_ms
        return self.heard_ms + SILENT_HEARTBEATS * self.welcome.heartbeat_ms

    @property
    def dismissed(self) -> bool:
        """Whether the broker said, of its own accord, that this stream ends."""
        return self.leaving is not None and not self.farewell

    @property
    def hears(self) -> bool:
        """Whether the broker takes what is sent now. One that drains still reads what had gathered when it said so, and
        that once: any other could take it only after this one has gone, perhaps after this process has."""
        if self.welcome is None or self.leaving is None or self.farewell:
            return self.welcome is not None
        return not self.heard_out and self.leaving.reason is LeavingReason.DRAINING
