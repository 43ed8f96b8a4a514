"""The program behind `relay.py`: carries calls from standard input to one address by gRPC, and what comes back to
standard output. Ends when its input does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys

from timeline.credentials import Credentials
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.driver.transport.relay import OPENING, RecordKind, fault_body, read_record, record
from timeline.wire.transport import Fault, Stream, TransportError

log = logging.getLogger("timeline.driver")


class RelayServer:
    """All calls of one parent to one address."""

    def __init__(self, transport: GrpcTransport, writer: asyncio.StreamWriter) -> None:
        self._transport = transport
        self._writer = writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._said: dict[int, asyncio.Queue[tuple[RecordKind, bytes]]] = {}

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Until the input ends."""
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
                await self._tell(RecordKind.END, call)
            else:
                await self._stream(call, await self._transport.stream(method, timeout_s))
        except TransportError as fault:
            await self._tell(RecordKind.FAULT, call, fault_body(fault))
        except Exception as error:  # a mistake of ours: whoever calls must not wait for ever
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
        with contextlib.suppress(ConnectionError):  # whoever asked has ended: so does our input, and all with it
            await self._writer.drain()


async def main(address: str) -> None:
    """Serves standard input and output."""
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
