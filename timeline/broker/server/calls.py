"""Calls over gRPC: from clients to the gateway, and from one broker to another.

The gateway gets and returns frames as bytes, and knows the caller. Calls between brokers are single ones, each with its
deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from timeline.broker.api.access import ANYBODY, Principal
from timeline.broker.api.gateway import Gateway
from timeline.broker.server.gatekeeper import Gatekeeper
from timeline.credentials import PLAIN, CallMetadata, Credentials
from timeline.errors import Invalid
from timeline.metrics import Metrics
from timeline.wire import MAX_FRAME_BYTES, METHODS, SERVICE, Fault, TransportError
from timeline.wire.transport import ADMITTED

log = logging.getLogger("timeline.broker")

STATUS_OF = {
    Fault.REFUSED_FRAME: grpc.StatusCode.INVALID_ARGUMENT,
    Fault.WRONG_VERSION: grpc.StatusCode.FAILED_PRECONDITION,
    Fault.OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Fault.NOT_READY: grpc.StatusCode.UNAVAILABLE,
    Fault.NO_TOPIC: grpc.StatusCode.NOT_FOUND,
    Fault.BROKEN: grpc.StatusCode.ABORTED,
    Fault.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    Fault.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Fault.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
}
NOT_READY_TRAILER = (("timeline-not-ready", "1"),)


class ServerStream:
    """A two-way gRPC call as a `wire.Stream`. Its handler must await `let_go` before it ends the call."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._task = asyncio.current_task()
        self._taken = asyncio.Event()
        self._taken.set()
        self._sending: asyncio.Task[None] | None = None
        self._admitted = False
        self.closed = self.given_up = False
        self.broken = False
        """Whether the peer has ended the call, or its connection. No more can be sent then."""

    async def send(self, frame: bytes) -> None:
        self._taken.clear()
        try:
            await self._context.write(frame)
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as over:
            self.broken = True
            raise TransportError(Fault.BROKEN, str(over)) from over
        finally:
            self._taken.set()

    async def send_within(self, frame: bytes, timeout_s: float) -> None:
        """Send for a caller that may be cancelled. Raise TimeoutError if the peer has not taken the frame by then.

        The write goes on all the same: gRPC cannot cut it off.
        """
        self._sending = asyncio.ensure_future(self.send(frame))
        self._sending.add_done_callback(_retrieve)
        await asyncio.wait((self._sending,), timeout=timeout_s)
        if not self._sending.done():
            raise TimeoutError
        self._sending.result()

    async def receive(self) -> bytes | None:
        try:
            if not self._admitted:  # it is read, so it was not refused
                self._admitted = True
                await self._context.send_initial_metadata(((ADMITTED, "1"),))
            data: bytes | object = await self._context.read()
        except (grpc.RpcError, grpc.aio.BaseError) as over:
            self.broken = True
            raise TransportError(Fault.BROKEN, str(over)) from over
        return data if isinstance(data, bytes) else None  # the end

    @property
    def writing(self) -> bool:
        """Whether gRPC holds something that the peer has not taken."""
        return not self._taken.is_set()

    async def let_go(self) -> None:
        """Return when gRPC holds nothing more: the peer has taken it, or has ended the call or its connection.

        A call cannot be broken off from here. Even `abort` waits behind what is being written.
        """
        await self._taken.wait()

    async def close(self) -> None:
        """End the call in order: its handler stops where it stands and answers OK."""
        self.closed = True
        self._stop()

    def cancel(self) -> None:
        """Stop its handler where it stands. If the peer ever reads on, it learns why."""
        self.given_up = True
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _retrieve(sending: asyncio.Task[None]) -> None:
    """Take the result of a write. After a timeout nothing else does, and asyncio would log its error as forgotten."""
    if not sending.cancelled():
        sending.exception()


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """All methods of the service, bytes in and bytes out. The caller is identified before anything else is read."""

    def __init__(self, service: Gateway, stall_ms: int, gate: Gatekeeper | None = None) -> None:
        self._service, self._stall_s = service, stall_ms / 1000.0
        self._gate = gate or Gatekeeper("", lambda: 0, Metrics())
        self._stalled = TransportError(Fault.DEADLINE, f"what was sent here was not taken for {stall_ms} ms")
        kinds = {
            "unary_unary": (grpc.unary_unary_rpc_method_handler, self._unary),
            "unary_stream": (grpc.unary_stream_rpc_method_handler, self._unary_stream),
            "stream_stream": (grpc.stream_stream_rpc_method_handler, self._stream),
        }
        self._kinds = {f"/{SERVICE}/{method}": (method, *kinds[kind]) for method, kind in METHODS.items()}
        self._for_anybody = {path: make(serve(method, ANYBODY)) for path, (method, make, serve) in self._kinds.items()}

    def service(self, details: Any) -> Any:
        if details.method not in self._kinds:
            return None
        method, make, serve = self._kinds[details.method]
        try:
            caller = self._gate.identify(method, details.invocation_metadata)
        except TransportError as fault:
            return grpc.stream_stream_rpc_method_handler(self._turned_away(fault))
        return self._for_anybody[details.method] if caller is ANYBODY else make(serve(method, caller))

    def _turned_away(self, fault: TransportError) -> Callable[[Any, Any], Any]:
        async def refuse(_: Any, context: Any) -> None:
            self._gate.refused_to(context.peer())
            await _abort(context, fault)

        return refuse

    def _unary(self, method: str, caller: Principal) -> Callable[[bytes, Any], Any]:
        async def serve(frame: bytes, context: Any) -> bytes:
            peer = context.peer()
            try:
                if method != "Take":
                    return await self._service.unary(method, frame, caller, peer)
                with self._gate.serving(caller):  # it waits, as a stream does
                    return await self._service.unary(method, frame, caller, peer)
            except TransportError as fault:
                del frame
                await _abort(context, fault)
                raise AssertionError("abort raises") from fault

        return serve

    def _unary_stream(self, method: str, caller: Principal) -> Callable[[bytes, Any], Any]:
        async def serve(frame: bytes, context: Any) -> None:
            stream, peer = ServerStream(context), context.peer()
            asked = self._service.unary_stream(method, frame, caller, peer)
            del frame
            try:
                with self._gate.serving(caller):
                    async with aclosing(asked) as pages:
                        async for page in pages:
                            await stream.send_within(page, self._stall_s)
            except TimeoutError:
                log.info("a scan of %s does not take its pages: it ends", peer)
                await self._refuse(context, stream, self._stalled)
            except TransportError as fault:
                await self._refuse(context, stream, fault)

        return serve

    def _stream(self, method: str, caller: Principal) -> Callable[[Any, Any], Any]:
        async def serve(_: Any, context: Any) -> None:
            stream = ServerStream(context)
            try:
                with self._gate.serving(caller):
                    await self._service.stream(method, stream, context.peer(), caller)
            except TransportError as fault:
                await self._refuse(context, stream, fault)
            except asyncio.CancelledError:
                if stream.given_up:
                    await self._refuse(context, stream, self._stalled)
                elif not stream.closed:
                    raise

        return serve

    async def _refuse(self, context: Any, stream: ServerStream, fault: TransportError) -> None:
        """End a call with its reason, once gRPC holds nothing of it. Until then it counts as a stream."""
        if stream.broken:
            return
        if stream.writing:
            with self._service.streams.kept(context.peer()):
                await stream.let_go()
        await _abort(context, fault)


async def _abort(context: Any, fault: TransportError) -> None:
    # The error of `abort` and the call's context refer to each other. All that they hold, such as the refused frame,
    # would stay until Python's collector comes by.
    fault.__traceback__ = fault.__cause__ = fault.__context__ = None
    trailers = NOT_READY_TRAILER if fault.fault is Fault.NOT_READY else ()
    await context.abort(STATUS_OF.get(fault.fault, grpc.StatusCode.UNKNOWN), fault.reason, trailers)


PEER_OPTIONS = [
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
    """The channel to the broker at `address`, with `credentials`.

    It connects on first use, and again by itself. Calls fail at once while no broker is there. gRPC connects again with
    the certificates that it had at first. After a failed call the next one reads the files again if they have changed.
    """

    def __init__(self, address: str, credentials: Credentials = PLAIN) -> None:
        self.address = address
        self._credentials, self._shown = credentials, CallMetadata(credentials)
        self._channel: Any = None
        self._stamps: object = None

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        """Send one frame for one. Raise TransportError. OVERLOADED: nothing happened, the broker is too busy. BROKEN:
        it may have arrived."""
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
            self._channel = self._credentials.channel(self.address, PEER_OPTIONS)
        except Invalid as bad:  # a file that was there when this broker began
            raise TransportError(Fault.BROKEN, f"{self.address}: {bad.reason}") from bad
        return self._channel

    async def _part_with_old(self, channel: Any) -> None:
        """Close `channel` if it was opened with other certificates than the files have now."""
        if self._channel is channel and self._stamps != self._credentials.stamps:
            await self.close()

    async def close(self) -> None:
        """End the connection and the calls on it."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()
