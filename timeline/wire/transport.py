"""How frames travel, whatever carries them: gRPC, or the simulation's network.

A driver calls a `Transport`; a broker answers through a `Service`. Both move bytes of frames, never frames. Each end
decodes its input, so nothing unverified gets past it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Protocol

from timeline.errors import TimelineError


class Fault(StrEnum):
    """Why a call or stream ended. UNREACHABLE: it was never sent. BROKEN: it may have arrived. DEADLINE: no answer in
    time; it may have arrived. REFUSED_FRAME: the peer found the frame bad (gRPC's INVALID_ARGUMENT). WRONG_VERSION: the
    peer speaks another major (FAILED_PRECONDITION). OVERLOADED: the peer is at a bound, nothing happened
    (RESOURCE_EXHAUSTED). NOT_READY: the peer is starting or draining, nothing happened (UNAVAILABLE with the trailer
    `timeline-not-ready`). NO_TOPIC: there is no topic of that name (NOT_FOUND).
    UNAUTHENTICATED: the peer wants a token, and got none that is good now. FORBIDDEN: the token has not the right
    (PERMISSION_DENIED). Nothing happened in either case."""

    UNREACHABLE = "UNREACHABLE"
    BROKEN = "BROKEN"
    DEADLINE = "DEADLINE"
    REFUSED_FRAME = "REFUSED_FRAME"
    WRONG_VERSION = "WRONG_VERSION"
    OVERLOADED = "OVERLOADED"
    NOT_READY = "NOT_READY"
    NO_TOPIC = "NO_TOPIC"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    FORBIDDEN = "FORBIDDEN"


ADMITTED = "timeline-admitted"
"""The header of a stream's answer by which a broker says that it serves the stream, before anything is sent on it."""

STAYS = (Fault.REFUSED_FRAME, Fault.WRONG_VERSION, Fault.NO_TOPIC, Fault.UNAUTHENTICATED, Fault.FORBIDDEN)
"""Faults that the same call meets again."""


class TransportError(TimelineError):
    """A call or stream ended without an answer. `fault` says why and what may have happened."""

    code = "TRANSPORT"

    def __init__(self, fault: Fault, reason: str = "") -> None:
        self.code = str(fault)
        super().__init__(reason)
        self.fault = fault
        self.retryable = fault not in STAYS

    def __reduce__(self) -> tuple[object, ...]:
        return (TransportError, (self.fault, self.reason))


class Stream(Protocol):
    """One end of a two-way stream of frames."""

    async def send(self, frame: bytes) -> None:
        """Send a frame, and return when there is room for the next (flow control). Raise TransportError when the stream
        is over. Never cancel it: gRPC would go on with the write and send no status beside it, so that the call would
        neither go on nor end."""

    async def receive(self) -> bytes | None:
        """Return the peer's next frame; None when the peer has ended the stream in order. Else raise TransportError."""

    async def close(self) -> None:
        """Client: no more frames from here. Broker: end the stream in order. Twice is harmless."""

    def cancel(self) -> None:
        """End the stream at once, without a word."""


class Transport(Protocol):
    """A driver's way to one broker address. Opens on first use; reconnects by being asked again."""

    async def ready(self, timeout_s: float) -> None:
        """Connect if that is possible apart from a call, so that callers can tell what was never sent. Raise
        TransportError(UNREACHABLE)."""

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        """Send one frame and return one. Raise TransportError."""

    def unary_stream(self, method: str, frame: bytes, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        """Send one frame and yield many. Raise TransportError while iterated."""

    async def stream(self, method: str, timeout_s: float) -> Stream:
        """Open a two-way stream. Raise TransportError(UNREACHABLE) when the broker is not there in time."""

    async def close(self) -> None:
        """End everything that runs over it."""


class Service(Protocol):
    """A broker's side: what carries the frames (gRPC's server, the simulation) calls this. Each raises TransportError
    with REFUSED_FRAME, WRONG_VERSION, OVERLOADED, NOT_READY or DEADLINE (nothing was said) when it refuses."""

    async def unary(self, method: str, frame: bytes, peer: str = "") -> bytes: ...

    def unary_stream(self, method: str, frame: bytes, peer: str = "") -> AsyncGenerator[bytes, None]: ...

    async def stream(self, method: str, stream: Stream, peer: str) -> None:
        """Serve `stream` until either side ends it. `peer`: the client's address, for its share and for logs."""
