"""gRPC through a process of its own, for a child that was forked after gRPC had started.

gRPC's threads stay behind in the parent, so that such a child must not use gRPC. Its frames go through pipes to a new
process, the relay, which runs this module as a program and uses gRPC. A record in a pipe is its length (4 bytes, big
endian), a kind (1 byte), the call that it belongs to (4 bytes), and a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import struct
import sys
from collections.abc import AsyncGenerator
from dataclasses import asdict
from enum import IntEnum

from timeline.child import send_signal
from timeline.credentials import PLAIN, Credentials
from timeline.driver.transport.addresses import NoConnection, ProbeResult
from timeline.wire.transport import Fault, Stream, Transport, TransportError

log = logging.getLogger("timeline.driver")

GRPC = "grpc"
HEAD = struct.Struct(">IBI")
OPENING = struct.Struct(">IB")
"""The body of a record that opens a call: timeout in ms (0: none), length of the method's name, the name, and the first
frame."""
SPARE_S = 5.0
"""Time beyond the timeout for the relay to say that time is up."""


class RecordKind(IntEnum):
    """The kinds of records. Up: CREDENTIALS comes first, as JSON; no other process can read the pipe. UNARY, PAGES and
    STREAM open a call; SEND, CLOSE and CANCEL belong to it. A SEND to PAGES asks for another page.

    Down: FRAME; DONE (a stream was opened, or a frame was taken); END (the peer ended the call in order); FAULT (the
    fault's name, the result of a probe or nothing, the reason, with spaces between).
    """

    UNARY = 0
    PAGES = 1
    STREAM = 2
    SEND = 3
    CLOSE = 4
    CANCEL = 5
    FRAME = 6
    DONE = 7
    END = 8
    FAULT = 9
    CREDENTIALS = 10


_forked_with_grpc = False


def _note_fork() -> None:
    global _forked_with_grpc
    _forked_with_grpc = _forked_with_grpc or GRPC in sys.modules


os.register_at_fork(after_in_child=_note_fork)


def needed() -> bool:
    """Return whether this process was forked after gRPC had been loaded."""
    return _forked_with_grpc


def record(kind: RecordKind, call: int, body: bytes = b"") -> bytes:
    """Return a record for the pipe."""
    return HEAD.pack(len(body), kind, call) + body


async def read_record(reader: asyncio.StreamReader) -> tuple[RecordKind, int, bytes] | None:
    """Return the next record, or None at the end of the pipe."""
    try:
        size, kind, call = HEAD.unpack(await reader.readexactly(HEAD.size))
        return RecordKind(kind), call, await reader.readexactly(size) if size else b""
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _fault_of(body: bytes) -> TransportError:
    name, found, reason = body.decode().split(" ", 2)
    return NoConnection(ProbeResult[found], reason) if found else TransportError(Fault(name), reason)


def fault_body(fault: TransportError) -> bytes:
    """Return the body of a FAULT record."""
    found = fault.probed.name if isinstance(fault, NoConnection) else ""
    return f"{fault.fault} {found} {fault.reason}".encode()


class _Call:
    """One call through the relay. `frames`: what came down for it. `taken`: the answers to its STREAM and SENDs."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[RecordKind, bytes]] = asyncio.Queue()
        self.taken: asyncio.Queue[tuple[RecordKind, bytes]] = asyncio.Queue()

    def hear(self, kind: RecordKind, body: bytes) -> None:
        if kind in (RecordKind.DONE, RecordKind.FAULT):
            self.taken.put_nowait((kind, body))
        if kind is not RecordKind.DONE:
            self.frames.put_nowait((kind, body))


class _Process:
    """A running relay."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._calls: dict[int, _Call] = {}
        self._last = 0
        self.over = False
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def start(cls, address: str, credentials: Credentials) -> _Process:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = (sys.executable, "-m", "timeline.driver.transport.relay", address)
        pipe = asyncio.subprocess.PIPE
        try:
            # Ctrl-C in a terminal is for the program. The relay ends with its input.
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True
            )
        except OSError as trouble:
            raise TransportError(Fault.UNREACHABLE, f"the relay could not be started: {trouble}") from trouble
        made = cls(process)
        made.say(RecordKind.CREDENTIALS, 0, json.dumps(asdict(credentials)).encode())
        return made

    async def _read(self) -> None:
        try:
            while (came := await read_record(self._stdout)) is not None:
                kind, number, body = came
                call = self._calls.get(number)
                if call is not None:
                    call.hear(kind, body)
        finally:
            self.over = True
            for call in self._calls.values():
                call.hear(RecordKind.FAULT, b"BROKEN  the relay process has ended")

    def open(self) -> tuple[int, _Call]:
        self._last += 1
        call = self._calls[self._last] = _Call()
        return self._last, call

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)

    def drop(self, number: int) -> None:
        """End a call."""
        self.say(RecordKind.CANCEL, number)
        self.forget(number)

    def say(self, kind: RecordKind, number: int, body: bytes = b"") -> None:
        if not self.over:
            self._stdin.write(record(kind, number, body))

    async def drained(self) -> None:
        try:
            await self._stdin.drain()
        except ConnectionError as over:
            raise TransportError(Fault.BROKEN, "the relay process has ended") from over

    async def stop(self) -> None:
        self._stdin.close()
        await asyncio.wait({self._reader}, timeout=SPARE_S)
        if self._process.returncode is None and not self.over:
            send_signal(self._process, signal.SIGKILL)
        await self._process.wait()


class RelayStream:
    """A two-way stream through the relay."""

    def __init__(self, process: _Process, number: int, call: _Call) -> None:
        self._process, self._number, self._call = process, number, call
        self._ended = False

    async def send(self, frame: bytes) -> None:
        """Hand a frame over. Return when gRPC has taken it."""
        self._process.say(RecordKind.SEND, self._number, frame)
        await self._process.drained()
        kind, body = await self._call.taken.get()
        if kind is RecordKind.FAULT:
            self._call.taken.put_nowait((kind, body))  # later sends fail, too
            raise _fault_of(body)

    async def receive(self) -> bytes | None:
        """Return the next frame, or None if the broker ended the stream in order."""
        kind, body = await self._call.frames.get()
        if kind is RecordKind.FRAME:
            return body
        self._call.frames.put_nowait((kind, body))
        if kind is RecordKind.FAULT:
            raise _fault_of(body)
        return None

    async def close(self) -> None:
        """Say that no more frames come from here."""
        self._process.say(RecordKind.CLOSE, self._number)

    def cancel(self) -> None:
        """End the stream at once."""
        if not self._ended:
            self._ended = True
            self._process.drop(self._number)


class RelayTransport:
    """The way to one address through a relay process, which is started on first use."""

    def __init__(self, address: str, credentials: Credentials = PLAIN) -> None:
        self.address = address
        self._credentials = credentials
        self._process: _Process | None = None
        self._starting = asyncio.Lock()

    async def _opened(
        self, kind: RecordKind, method: str, frame: bytes, timeout_s: float | None
    ) -> tuple[_Process, int, _Call]:
        process = await self._running()
        number, call = process.open()
        name = method.encode()
        timeout_ms = 0 if timeout_s is None else max(1, int(timeout_s * 1000))
        process.say(kind, number, OPENING.pack(timeout_ms, len(name)) + name + frame)
        return process, number, call

    async def _running(self) -> _Process:
        async with self._starting:
            if self._process is None or self._process.over:
                self._process = await _Process.start(self.address, self._credentials)
            return self._process

    async def ready(self, timeout_s: float) -> None:
        """Start the relay. Each call says what the relay finds at the address."""
        await self._running()

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        """Send one frame and return the answer."""
        process, number, call = await self._opened(RecordKind.UNARY, method, frame, timeout_s)
        try:
            async with asyncio.timeout(timeout_s + SPARE_S):
                kind, body = await call.frames.get()
        except TimeoutError:
            raise TransportError(Fault.DEADLINE, "the relay did not answer in time") from None
        finally:
            process.drop(number)
        if kind is RecordKind.FAULT:
            raise _fault_of(body)
        return body

    async def unary_stream(self, method: str, frame: bytes, timeout_s: float | None) -> AsyncGenerator[bytes, None]:
        """Send one frame and yield the answers."""
        process, number, call = await self._opened(RecordKind.PAGES, method, frame, timeout_s)
        try:
            while True:
                kind, body = await call.frames.get()
                if kind is RecordKind.FAULT:
                    raise _fault_of(body)
                if kind is RecordKind.END:
                    return
                process.say(RecordKind.SEND, number)
                yield body
        finally:
            process.drop(number)

    async def stream(self, method: str, timeout_s: float) -> RelayStream:
        """Open a two-way stream."""
        process, number, call = await self._opened(RecordKind.STREAM, method, b"", timeout_s)
        try:
            async with asyncio.timeout(timeout_s + SPARE_S):
                kind, body = await call.taken.get()
        except TimeoutError:
            process.drop(number)
            raise TransportError(Fault.UNREACHABLE, "the relay did not answer in time") from None
        if kind is RecordKind.FAULT:
            process.drop(number)
            raise _fault_of(body)
        return RelayStream(process, number, call)

    async def close(self) -> None:
        """End the relay process."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop()


class RelayServer:
    """The relay's end: all calls of one parent to one address."""

    def __init__(self, transport: Transport, writer: asyncio.StreamWriter) -> None:
        self._transport = transport
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._said: dict[int, asyncio.Queue[tuple[RecordKind, bytes]]] = {}

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Serve calls until the input ends."""
        while (came := await read_record(reader)) is not None:
            kind, call, body = came
            if kind in (RecordKind.UNARY, RecordKind.PAGES, RecordKind.STREAM):
                self._said[call] = asyncio.Queue()
                task = asyncio.get_running_loop().create_task(self._serve(kind, call, body))
                self._tasks[call] = task
                task.add_done_callback(lambda _, call=call: self._ended(call))  # type: ignore[misc]
            elif kind is RecordKind.CANCEL:
                if call in self._tasks:
                    self._tasks[call].cancel()
            elif call in self._said:
                self._said[call].put_nowait((kind, body))
        for task in list(self._tasks.values()):
            task.cancel()
        await self._transport.close()

    def _ended(self, call: int) -> None:
        self._tasks.pop(call, None)
        self._said.pop(call, None)

    async def _serve(self, kind: RecordKind, call: int, body: bytes) -> None:
        timeout_ms, size = OPENING.unpack_from(body)
        method = body[OPENING.size : OPENING.size + size].decode()
        frame = body[OPENING.size + size :]
        timeout_s = timeout_ms / 1000.0
        try:
            if kind is RecordKind.UNARY:
                await self._tell(RecordKind.FRAME, call, await self._transport.unary(method, frame, timeout_s))
            elif kind is RecordKind.PAGES:
                async for page in self._transport.unary_stream(method, frame, timeout_s or None):
                    await self._tell(RecordKind.FRAME, call, page)
                    await self._said[call].get()  # else a slow reader's memory would fill
                await self._tell(RecordKind.END, call)
            else:
                await self._stream(call, await self._transport.stream(method, timeout_s))
        except TransportError as fault:
            await self._tell(RecordKind.FAULT, call, fault_body(fault))
        except Exception as error:  # a mistake of ours: callers must not wait for ever
            log.exception("the relay failed")
            await self._tell(RecordKind.FAULT, call, f"{Fault.BROKEN}  the relay failed: {error!r}".encode())

    async def _stream(self, call: int, stream: Stream) -> None:
        await self._tell(RecordKind.DONE, call)
        downward = asyncio.get_running_loop().create_task(self._carry_down(call, stream))
        upward = asyncio.get_running_loop().create_task(self._carry_up(call, stream))
        try:
            await asyncio.wait({downward, upward}, return_when=asyncio.FIRST_EXCEPTION)
            for task in (downward, upward):
                if task.done():
                    task.result()
        finally:
            downward.cancel()
            upward.cancel()
            stream.cancel()

    async def _carry_down(self, call: int, stream: Stream) -> None:
        while (data := await stream.receive()) is not None:
            await self._tell(RecordKind.FRAME, call, data)
        await self._tell(RecordKind.END, call)

    async def _carry_up(self, call: int, stream: Stream) -> None:
        while True:
            kind, body = await self._said[call].get()
            if kind is RecordKind.CLOSE:
                await stream.close()
                return
            await stream.send(body)
            await self._tell(RecordKind.DONE, call)

    async def _tell(self, kind: RecordKind, call: int, body: bytes = b"") -> None:
        self._writer.write(record(kind, call, body))
        with contextlib.suppress(ConnectionError):  # the parent has ended, and so does our input
            await self._writer.drain()


async def main(address: str) -> None:
    """Serve standard input and output."""
    from timeline.driver.transport.grpc_transport import GrpcTransport

    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    unread = asyncio.StreamReader()
    transport, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(unread), sys.stdout.buffer)
    first = await read_record(reader)
    if first is None:
        return
    carrier = GrpcTransport(address, Credentials(**json.loads(first[2])))
    await RelayServer(carrier, asyncio.StreamWriter(transport, protocol, None, loop)).run(reader)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
