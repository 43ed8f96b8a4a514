"""gRPC from one broker to another: single calls, each with its deadline. Like `service.py`, of the broker's shell."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from timeline.credentials import PLAIN, CallMetadata, Credentials
from timeline.errors import Invalid
from timeline.wire import MAX_FRAME_BYTES, SERVICE, Fault, TransportError

OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


class GrpcPeerChannel:
    """The way to the broker at `address`, as whom `credentials` say. Connects on first use, and again by itself; a call
    while nobody is there fails at once. gRPC connects again with what the files of `credentials` had at first: once a
    call has failed and they have others, the next one reads them anew."""

    def __init__(self, address: str, credentials: Credentials = PLAIN) -> None:
        self.address = address
        self._credentials, self._shown = credentials, CallMetadata(credentials)
        self._channel: Any = None
        self._stamps: object = None

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        """One frame for one. Raises TransportError: OVERLOADED when nothing happened, since the broker has too much to
        do; BROKEN: it may have arrived."""
        channel = self._channel or self._opened()
        try:
            call = channel.unary_unary(f"/{SERVICE}/{method}")
            answer: bytes = await call(frame, timeout=timeout_s, metadata=self._shown.metadata())
        except grpc.aio.AioRpcError as error:
            await self._part_with_old(channel)
            busy = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            fault = Fault.OVERLOADED if busy else Fault.BROKEN
            raise TransportError(fault, f"{self.address}: {error.details() or error.code()}") from error
        except Invalid as bad:  # the token was there when this broker began
            raise TransportError(Fault.BROKEN, f"{self.address}: {bad.reason}") from bad
        except (asyncio.CancelledError, grpc.aio.UsageError) as over:
            task = asyncio.current_task()
            if isinstance(over, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            raise TransportError(Fault.BROKEN, f"{self.address}: the connection was closed") from over
        return answer

    def _opened(self) -> Any:
        try:
            self._shown.metadata()
            self._stamps = self._credentials.stamps
            self._channel = self._credentials.channel(self.address, OPTIONS)
        except Invalid as bad:  # a file that was there when this broker began
            raise TransportError(Fault.BROKEN, f"{self.address}: {bad.reason}") from bad
        return self._channel

    async def _part_with_old(self, channel: Any) -> None:
        """Parts with `channel` when it was opened with other certificates than the files have now."""
        if self._channel is channel and self._stamps != self._credentials.stamps:
            await self.close()

    async def close(self) -> None:
        """Ends the connection and the calls on it."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()
