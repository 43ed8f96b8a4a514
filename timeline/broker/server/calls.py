"""gRPC's calls as the gateway takes them: bytes of frames in and out, and who calls. Of the broker's shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc

from timeline.broker.api.access import ANYBODY, Principal
from timeline.broker.api.gateway import Gateway
from timeline.broker.server.begun import Begun
from timeline.broker.server.gatekeeper import Gatekeeper
from timeline.broker.server.partial_frames import CALL_BYTES, Unfinished
from timeline.metrics import Metrics
from timeline.wire import METHODS, SERVICE, Fault, TransportError
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
    """A two-way gRPC call as a `wire.Stream`.

    gRPC goes on with a write whose caller was cancelled, and sends no status beside it: the call would neither go on
    nor end. So a write goes on by itself, and whoever ends the call waits for it (`let_go`).
    """

    def __init__(self, context: Any, unfinished: Unfinished | None = None) -> None:
        self._context, self._unfinished = context, unfinished
        self._peer = context.peer() if unfinished is not None else ""
        self._task = asyncio.current_task()
        self._writing: Begun | None = None
        self._admitted = False
        self.closed = self.given_up = False
        self.broken = False
        """Whether the peer has ended the call, or its connection: there is nobody to tell anything any more."""

    async def send(self, frame: bytes) -> None:
        self._writing = Begun(self._context.write(frame))
        try:
            await self._writing.wait()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError) as over:
            self.broken = True
            raise TransportError(Fault.BROKEN, str(over)) from over

    async def receive(self) -> bytes | None:
        try:
            if not self._admitted:  # it is read, so it was not refused
                self._admitted = True
                await self._context.send_initial_metadata(((ADMITTED, "1"),))
            data: bytes | object = await self._context.read()
        except (grpc.RpcError, grpc.aio.BaseError) as over:
            self.broken = True
            raise TransportError(Fault.BROKEN, str(over)) from over
        if not isinstance(data, bytes):  # the end
            return None
        if self._unfinished is not None:
            self._unfinished.whole(self._peer, len(data))
        return data

    @property
    def writing(self) -> bool:
        """Whether gRPC holds something that the peer has not taken."""
        return self._writing is not None and not self._writing.over

    async def let_go(self) -> None:
        """Returns when gRPC holds nothing more: the peer has taken it, or has ended the call or its connection. There
        is no way to break a call off from here, `abort` neither: it waits behind what is being written."""
        if self._writing is not None:
            try:
                await self._writing.wait()
            except (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
                pass  # taken or not, it is over

    async def close(self) -> None:
        """Ends the call in order: its handler stops where it stands and answers OK."""
        self.closed = True
        self._stop()

    def cancel(self) -> None:
        """Its handler stops where it stands; should the peer ever read on, it is told why."""
        self.given_up = True
        self._stop()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """All methods of the service, bytes in and bytes out. Who calls is asked before anything of the call is read."""

    def __init__(
        self,
        service: Gateway,
        stall_ms: int,
        gate: Gatekeeper | None = None,
        unfinished: Unfinished | None = None,
    ) -> None:
        self._service, self._stall_s = service, stall_ms / 1000.0
        self._unfinished = unfinished
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

    def _came(self, frame: bytes, context: Any) -> str:
        """A call's one frame is whole; answers from whom."""
        peer: str = context.peer()
        if self._unfinished is not None:
            self._unfinished.whole(peer, len(frame), CALL_BYTES)
        return peer

    def _unary(self, method: str, caller: Principal) -> Callable[[bytes, Any], Any]:
        async def serve(frame: bytes, context: Any) -> bytes:
            peer = self._came(frame, context)
            try:
                return await self._service.unary(method, frame, caller, peer)
            except TransportError as fault:
                del frame
                await _abort(context, fault)
                raise AssertionError("abort raises") from fault

        return serve

    def _unary_stream(self, method: str, caller: Principal) -> Callable[[bytes, Any], Any]:
        async def serve(frame: bytes, context: Any) -> None:
            stream, peer = ServerStream(context), self._came(frame, context)
            asked = self._service.unary_stream(method, frame, caller, peer)
            del frame
            try:
                with self._gate.serving(caller):
                    async with aclosing(asked) as pages:
                        async for page in pages:
                            async with asyncio.timeout(self._stall_s):
                                await stream.send(page)
            except TimeoutError:
                log.info("a scan of %s does not take its pages: it ends", peer)
                await self._refuse(context, stream, self._stalled)
            except TransportError as fault:
                await self._refuse(context, stream, fault)

        return serve

    def _stream(self, method: str, caller: Principal) -> Callable[[Any, Any], Any]:
        async def serve(_: Any, context: Any) -> None:
            stream = ServerStream(context, self._unfinished)
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
        """Ends a call with its reason, once gRPC holds nothing of it; until then it counts as a stream."""
        if stream.broken:
            return
        if stream.writing:
            with self._service.streams.kept(context.peer()):
                await stream.let_go()
        await _abort(context, fault)


async def _abort(context: Any, fault: TransportError) -> None:
    # What `abort` raises leads to the call's context, and that leads back to it: all that hangs there, such as the
    # frame that was refused, stays until Python's collector comes by.
    fault.__traceback__ = fault.__cause__ = fault.__context__ = None
    trailers = NOT_READY_TRAILER if fault.fault is Fault.NOT_READY else ()
    await context.abort(STATUS_OF.get(fault.fault, grpc.StatusCode.UNKNOWN), fault.reason, trailers)
