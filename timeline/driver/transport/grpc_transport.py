"""gRPC: bytes of frames to one broker address and back. No other module of the driver uses gRPC.

Implements `timeline.wire.transport.Transport`. A connection that cannot be made fails at once, so that the channel can
go to another address. gRPC's own waiting between attempts is not used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
import grpc.aio

from timeline.config import is_loopback, split_address
from timeline.credentials import PLAIN, CallMetadata, Credentials
from timeline.driver.tasks import PARTING_S
from timeline.driver.transport.addresses import NoConnection, ProbeResult, why_not
from timeline.errors import Invalid
from timeline.wire.frames import MAJOR, MAX_FRAME_BYTES, SERVICE
from timeline.wire.transport import ADMITTED, Fault, TransportError
from timeline.wire.verify import is_frame, minor_of

log = logging.getLogger("timeline.driver")

OPTIONS = [
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
NOT_READY_TRAILER = "timeline-not-ready"
ADMISSION_S = 0.25
"""How long a broker may take to say that it serves a stream."""
HEALTH = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
"""A HealthCheckResponse of status SERVING."""

_FAULTS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.DEADLINE,
    grpc.StatusCode.INVALID_ARGUMENT: Fault.REFUSED_FRAME,
    grpc.StatusCode.FAILED_PRECONDITION: Fault.WRONG_VERSION,
    grpc.StatusCode.UNIMPLEMENTED: Fault.WRONG_VERSION,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Fault.OVERLOADED,
    grpc.StatusCode.NOT_FOUND: Fault.NO_TOPIC,
    grpc.StatusCode.UNAUTHENTICATED: Fault.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Fault.FORBIDDEN,
}

_BROKE_OFF = {
    grpc.StatusCode.CANCELLED: "the call broke off",
    grpc.StatusCode.INTERNAL: "the call broke off",
    grpc.StatusCode.UNAVAILABLE: "the connection broke off",
    grpc.StatusCode.UNKNOWN: "the call broke off",
}
"""How calls end that no broker ended. gRPC's own text is about gRPC. It stays the cause of the error."""


_OVER = (asyncio.CancelledError, asyncio.InvalidStateError, grpc.aio.UsageError)
"""What gRPC raises if a call is used that is over, or whose connection is closed meanwhile."""


def _ours(over: BaseException) -> bool:
    """Return whether our own task was cancelled. gRPC raises the same error if the connection is closed during a call,
    which must not end our task."""
    task = asyncio.current_task()
    return isinstance(over, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


class _Met:
    """Whether a Timeline broker has answered on a connection. Until then, a server without our methods, or one whose
    answer is no frame, is another service. Nothing happened there."""

    __slots__ = ("_address", "_version", "_yes")

    def __init__(self, address: str) -> None:
        self._address, self._yes, self._version = address, False, ""

    def frame(self, data: bytes) -> bytes:
        """Return `data`, an answer. Raise TransportError if it is not a broker's."""
        if not self._yes:
            if not is_frame(data):
                raise self.foreign()
            self._yes = True
            with suppress(Invalid):  # whoever reads the frame says what is wrong with it
                self._version = f" It speaks version {MAJOR}.{minor_of(data)} of the wire."
        return data

    def fault(self, error: grpc.aio.AioRpcError, timed: bool = False) -> TransportError:
        """Return the fault for `error`. `timed`: the call had a timeout, which gRPC words in its own way."""
        code = error.code()
        if timed and code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return TransportError(Fault.DEADLINE, "no answer in time")
        return self.ended(code, error.details() or str(code), error.trailing_metadata() or ())

    def ended(self, code: grpc.StatusCode, text: str, trailers: Iterable[tuple[str, Any]] = ()) -> TransportError:
        """Return the fault of a call that ended with `code`."""
        if code is grpc.StatusCode.UNAVAILABLE and any(key == NOT_READY_TRAILER for key, _ in trailers):
            return TransportError(Fault.NOT_READY, text)
        text = _BROKE_OFF.get(code, text)
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            text = f"the broker says: {text}"
        if code is grpc.StatusCode.UNIMPLEMENTED:
            if not self._yes:
                return self.foreign()
            text = (
                f"the broker does not know this call: it is older than this driver.{self._version} Upgrade the broker"
            )
        return TransportError(_FAULTS.get(code, Fault.BROKEN), text)

    def foreign(self) -> TransportError:
        """Return the fault for an address of another service."""
        return NoConnection.at(self._address, ProbeResult.GRPC)

    @contextmanager
    def faults(self, timed: bool = False) -> Iterator[None]:
        """Raise gRPC's errors of a call as TransportError. `timed`: see `fault`."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise self.fault(error, timed) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as over:
            if _ours(over):
                raise
            raise TransportError(Fault.BROKEN, "the connection was closed") from over


class GrpcStream:
    """A two-way gRPC call as a `wire.transport.Stream`. One task sends, another receives."""

    def __init__(self, call: Any, met: _Met) -> None:
        self._call = call
        self._met = met
        self._closed = False

    async def send(self, frame: bytes) -> None:
        """Hand a frame over."""
        try:
            await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            raise self._met.fault(error) from error
        except _OVER as over:
            if _ours(over):
                raise
            raise await self._why(over) from over

    async def receive(self) -> bytes | None:
        """Return the next frame, or None if the broker ended the stream in order."""
        try:
            frame = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise self._met.fault(error) from error
        except _OVER as over:
            if _ours(over):
                raise
            raise await self._why(over) from over
        if frame is grpc.aio.EOF:
            if await self._call.code() is not grpc.StatusCode.OK:
                raise await self._why(None)
            return None
        return self._met.frame(frame)

    async def admitted(self) -> None:
        """Return once the broker serves the stream, or after a moment: an older broker does not say so. Raise
        TransportError if it refuses the stream.

        Nothing is sent before: gRPC does not distinguish a frame that met a refusal from one that arrived.
        """
        try:
            with self._met.faults():
                async with asyncio.timeout(ADMISSION_S):
                    said = await self._call.initial_metadata()
        except TimeoutError:
            return
        if not any(key == ADMITTED for key, _ in said or ()):
            try:
                async with asyncio.timeout(ADMISSION_S):
                    await self._call.code()
            except TimeoutError:  # the call goes on, and is not a broker's
                raise self._met.foreign() from None
            raise await self._why(None)

    async def _why(self, over: BaseException | None) -> TransportError:
        """Return the fault of a call that was over before it was used."""
        if not self._call.done():
            return TransportError(Fault.BROKEN, str(over or "") or "the stream ended")
        code, text = await self._call.code(), await self._call.details()
        return self._met.ended(code, text or str(over or code), await self._call.trailing_metadata() or ())

    async def close(self) -> None:
        """Say that no more frames come from here."""
        if not self._closed:
            self._closed = True
            try:
                await self._call.done_writing()
            except (grpc.aio.AioRpcError, *_OVER) as over:  # it is over already
                if _ours(over):
                    raise

    def cancel(self) -> None:
        """End the stream at once."""
        self._closed = True
        self._call.cancel()


class GrpcTransport:
    """The way to one address, opened on first use. After a failure the next call makes a new connection, and reads the
    files of `credentials` again."""

    def __init__(self, address: str, credentials: Credentials = PLAIN) -> None:
        self.address = address
        self._credentials = credentials
        self._shown = CallMetadata(credentials)
        self._warned = False
        self._channel: Any = None
        self._met = _Met(address)
        self._methods: dict[str, Any] = {}
        self._watch: asyncio.Task[None] | None = None

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        """Send one frame and return the answer."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        await self.ready(timeout_s)
        call = self._method("unary_unary", method)
        with self._met.faults(timed=True):
            left_s = max(0.001, until_s - loop.time())
            answer: bytes = await call(frame, timeout=left_s, metadata=self._shown.metadata())
        return self._met.frame(answer)

    async def unary_stream(self, method: str, frame: bytes, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        """Send one frame and yield the answers."""
        await self.ready(timeout_s if timeout_s is not None else 10.0)
        call = self._method("unary_stream", method)(frame, timeout=timeout_s, metadata=self._shown.metadata())
        pages = aiter(call)
        try:
            with self._met.faults(timed=timeout_s is not None):
                async for page in pages:
                    yield self._met.frame(page)
        except GeneratorExit:  # mostly after the last page: the end is on its way
            with suppress(TimeoutError, grpc.aio.AioRpcError):
                async with asyncio.timeout(PARTING_S):
                    await anext(pages, None)
            raise
        finally:
            call.cancel()

    async def stream(self, method: str, timeout_s: float) -> GrpcStream:
        """Open a two-way stream. Raise TransportError: UNREACHABLE if the broker is not there in time, else the reason
        of its refusal."""
        await self.ready(timeout_s)
        stream = GrpcStream(self._method("stream_stream", method)(metadata=self._shown.metadata()), self._met)
        try:
            await stream.admitted()
        except BaseException:
            stream.cancel()
            raise
        return stream

    def _method(self, kind: str, method: str) -> Any:
        made = self._methods.get(method)
        if made is None:
            made = self._methods[method] = getattr(self._channel, kind)(f"/{SERVICE}/{method}")
        return made

    async def ready(self, timeout_s: float) -> None:
        """Connect, or fail at once. UNREACHABLE: nothing was sent."""
        channel = self._channel or self._opened()
        state = channel.get_state(try_to_connect=True)
        if state is grpc.ChannelConnectivity.READY:
            return
        until_s = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while state is not grpc.ChannelConnectivity.READY:
                    if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                        await self._reset(channel)
                        left_s = until_s - asyncio.get_running_loop().time()
                        raise await why_not(self.address, self._credentials, max(0.001, left_s))
                    await self._changed(channel, state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise NoConnection.at(self.address, ProbeResult.SILENT) from None

    def _opened(self) -> Any:
        try:
            self._shown.metadata()
            self._channel = self._credentials.channel(self.address, OPTIONS)
            self._met = _Met(self.address)
            self._warn()
        except Invalid as bad:  # a file that the client found when it was made
            raise NoConnection(ProbeResult.FILES, bad.reason) from bad
        return self._channel

    def _warn(self) -> None:
        host, _ = split_address(self.address)
        said = self._credentials
        if (said.token or said.token_file) and not said.tls and not is_loopback(host) and not self._warned:
            self._warned = True
            log.warning("the token goes to %s unencrypted: use TLS", self.address)

    async def _changed(self, channel: Any, state: Any) -> None:
        """Wait until the channel's state changes. All calls share one watch: gRPC cannot cancel a watch, and one that
        ends after its event loop was closed prints a traceback in the next loop."""
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(channel.wait_for_state_change(state))
        await asyncio.wait({self._watch})

    async def _reset(self, channel: Any) -> None:
        if self._channel is channel:
            watch, self._channel, self._watch = self._watch, None, None
            self._methods.clear()
            await channel.close()
            if watch is not None:
                await asyncio.wait({watch})
                if not watch.cancelled():
                    watch.exception()  # it was broken off on purpose

    async def close(self) -> None:
        """End everything that runs over it."""
        if self._channel is not None:
            await self._reset(self._channel)


async def serves(address: str, credentials: Credentials, timeout_s: float) -> bool:
    """Return whether the broker at `address` is ready, by gRPC's health service, which asks for no token."""
    try:
        async with credentials.channel(address, OPTIONS) as channel:
            answer: bytes = await channel.unary_unary(HEALTH)(b"", timeout=timeout_s)
    except (grpc.aio.AioRpcError, Invalid):
        return False
    return answer == SERVING
