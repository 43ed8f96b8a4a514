"""The producer: puts, moves and cancels messages of one topic in the name of one group."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias

import numpy as np

from timeline import tracing
from timeline.columns import Bools, Ragged
from timeline.driver.batch import Batch
from timeline.driver.message import Message, Payload, carried, move_flag, of_message
from timeline.driver.mutations import MutationCalls
from timeline.driver.produce.produce_stream import OVERHEAD_BYTES, PUT_COLUMNS, ProduceStream, cuts_of, put_sizes
from timeline.driver.produce.request_batch import BatchCall, Columns, RequestBatch, sound
from timeline.driver.receipts import Receipt, Receipts, receipt_of
from timeline.driver.times import Duration, Expiry, When
from timeline.driver.transport.client_context import ClientContext
from timeline.errors import Closed, Invalid, TimelineError, Unknown
from timeline.model import Operation, Status
from timeline.wire import Judgement
from timeline.wire.frames import AIM_BYTES, PutFlag

FRAME_MESSAGES = 10_000
STREAMED_MESSAGES = 5_000
STREAMED_BYTES = 16 * 1024 * 1024
"""What `produce_iter` holds at most: messages without their receipts."""
MOST_IN_DOUBT = 1_000
"""Traces of puts whose outcome is unknown, kept for whoever asks again; the oldest go."""


class Producer(MutationCalls):
    """Puts messages on a topic's timeline; moves and cancels those of its group. Made by `Timeline.producer`.

    One producer serves all tasks of a loop. Single calls that come at the same time travel together. Every call takes
    `timeout=` (the client's by default): past it, it raises Unavailable when it was surely never done, Unknown when it
    may have been; what is retryable is retried until then, as the very same call, so that nothing happens twice.

        async with tl.producer("departures", group="ops") as p:
            await p.produce(b"gate closes", at=when, id="UA1545")
    """

    def __init__(self, context: ClientContext, topic: str, group: str) -> None:
        super().__init__(context, topic, group)
        self._stream = ProduceStream(context, topic, group)
        self._in_doubt: dict[bytes, Mapping[str, str]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Waits until all that is on its way is answered, at most the client's timeout; then ends the stream. What has
        no answer by then raises where it was called."""
        if self.closed:
            return
        self.closed = True
        if self._epoch == self._context.epoch:
            try:
                async with asyncio.timeout(self._context.timeout_ms / 1000.0):
                    await self._stream.queue.idle()
                    await self._mutating_idle()
            except TimeoutError:
                pass  # who still waits is told when it stops
            except asyncio.CancelledError:  # nothing goes on behind whoever closes
                await self._stop()
                raise
            await self._stop()

    async def _stop(self) -> None:
        await self._stream.stop()
        await self._stop_mutating()

    def __del__(self) -> None:
        """One that was never closed and that nobody holds any more, so that nothing is under way: its stream ends."""
        if not self.closed and self._epoch == self._context.epoch and self._context.here:
            self._stream.cancel()
            for calls in self._calls.values():
                calls.cancel()

    def _start(self) -> None:
        """Before each call: a child process, and a new event loop, start afresh."""
        if self.closed:
            raise Closed("the producer was closed: make another with tl.producer(…)")
        self._context.check()
        if self._epoch != self._context.epoch:
            self._epoch = self._context.epoch
            self._context.leave_behind(self._stream, self._calls)
            self._stream = ProduceStream(self._context, self.topic, self.group)
            self._renew()
        self._stream.start()

    async def produce(
        self,
        payload: Payload,
        *,
        at: When | None = None,
        in_: Duration | None = None,
        id: str | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        expires: Expiry | None = None,
        if_exists: str | None = None,
        timeout: Duration | None = None,
    ) -> Receipt:
        """Puts one message; returns when the broker's store has it. A due in the past is delivered at once.

        `at` or `in_` says when (see `Message` for all arguments); `if_exists="move"`: a message of this id that is
        there and not leased is moved to the asked due instead, and keeps its payload, tag, headers and expires
        (`receipt.moved`). `if_exists="replace"`: this message takes the place of one that is there and not leased.
        Answers a Receipt: OK, or DUPLICATE when this very message was there already. Raises Exists when the id is taken
        by another message, Forbidden when that is another group's; Invalid, TooLarge, Throttled, Leased, Dead, NotFound
        (no such topic), Unavailable, Unknown, Closed: all with `.id`.
        """
        self._start()
        message = Message(payload, at, in_, id, tag, headers, expires)
        try:
            flag, timeout_ms = move_flag(if_exists), self._context.patience_ms(timeout)
        except Invalid as wrong:
            raise of_message(wrong, id) from None
        return await self._put(message, flag, timeout_ms)

    async def _put(self, message: Message, flag: int, timeout_ms: float, made: bytes = b"") -> Receipt:
        """`made`: an id of the driver's, for a message without one."""
        own, *_, headers = message.encoded
        id = own or made or self._context.ids.make()
        if own in self._in_doubt:  # it is asked for again, by the id that its error told
            headers = carried(headers, self._in_doubt[own])
        by = tracing.tracer()
        if by is None:
            return await self._put_one(message, id, headers, flag, timeout_ms)
        with tracing.sending(by, self.topic, 1, id.decode()) as trace:
            try:
                return await self._put_one(message, id, headers if own else carried(headers, trace), flag, timeout_ms)
            except Unknown:
                if not own:
                    self._doubt(id, trace)
                raise

    def _doubt(self, id: bytes, trace: Mapping[str, str]) -> None:
        """Nobody knows whether what went under this `id` of ours, with such trace headers, was put."""
        self._in_doubt[id] = trace
        if len(self._in_doubt) > MOST_IN_DOUBT:
            del self._in_doubt[next(iter(self._in_doubt))]

    async def _put_one(self, message: Message, id: bytes, headers: bytes, flag: int, timeout_ms: float) -> Receipt:
        _, time_ms, flags, expires_ms, tag, _ = message.encoded
        payload = message.payload
        entry = (id, self._context.ids.number(), time_ms, flags | flag, payload, expires_ms, tag, headers)
        nbytes = len(payload) + len(id) + len(tag) + len(headers) + OVERHEAD_BYTES
        answer = await self._stream.queue.single(entry, nbytes, timeout_ms)
        return receipt_of(id, answer, Operation.PUT, bool(flag & PutFlag.MOVE))

    async def produce_many(
        self, messages: Batch | Iterable[Message], *, if_exists: str | None = None, timeout: Duration | None = None
    ) -> Receipts:
        """Puts many messages; answers their Receipts in order: a message that is refused fails alone (`.failed`,
        `.raise_failed()`).

        `timeout` counts from the last answer, so that a large batch takes as long as it gets on. Raises Unavailable or
        Unknown when no broker said anything about any of it, Invalid for what concerns all of it, Closed.
        """
        self._start()
        batch = messages if isinstance(messages, Batch) else Batch.of(messages)
        own = None if batch.ids is None else batch.ids.sizes > 0
        columns = self._columns(batch, move_flag(if_exists))
        by = tracing.tracer()
        if by is None:
            return await self._put_many(columns, len(batch), batch.refused, timeout)
        with tracing.sending(by, self.topic, len(batch)) as trace:
            # They stay, as its ids do: the same batch sent again, in another trace or in none, is the same messages.
            batch.headers = columns["headers"] = _carried(batch.headers, len(batch), own, trace)
            return await self._put_many(columns, len(batch), batch.refused, timeout)

    async def _put_many(self, columns: Columns, count: int, refused: Judgement, timeout: Duration | None) -> Receipts:
        many = BatchCall(count, self._context.patience_ms(timeout), self._context.clock, self._context.trouble)
        if refused:
            many.refuse(refused)
        good, places = sound(columns, count, refused)
        sizes = put_sizes(good)
        for part in cuts_of(sizes, AIM_BYTES, FRAME_MESSAGES):
            cut = {name: column if column is None else column[part] for name, column in good.items()}
            self._stream.queue.add(RequestBatch(cut, Operation.PUT, many, places[part], int(sizes[part].sum())))
        answers = await many.finished()
        many.check_heard()
        moves = bool((columns["flags"] & PutFlag.MOVE).any())
        return Receipts(columns["ids"], answers, many.waits_ms, Operation.PUT, moves)

    def _columns(self, batch: Batch, flag: int) -> Columns:
        count = len(batch)
        if batch.ids is None:
            batch.ids = self._context.ids.make_column(count)
        elif count and int(batch.ids.sizes.min()) == 0:
            made = [
                id or (id if place in batch.refused else self._context.ids.make()) for place, id in enumerate(batch.ids)
            ]
            batch.ids = type(batch.ids).of(made)
        return {
            **{field.name: getattr(batch, field.name, None) for field in PUT_COLUMNS},
            "birth": self._context.ids.numbers(count) if batch.births is None else batch.births,
            "flags": batch.flags | np.uint8(flag) if flag else batch.flags,
        }

    async def produce_iter(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        if_exists: str | None = None,
        timeout: Duration | None = None,
    ) -> AsyncIterator[Receipt]:
        """Puts messages as they come, in bounded memory, and yields their receipts in order; a message that is refused
        yields a receipt that says so (`receipt.ok`, `receipt.raise_failed()`) and the stream goes on. What `messages`
        raises comes after the receipts of all that it gave before.

            async for receipt in p.produce_iter(Message(line, in_="1h") for line in file):
        """
        flag, timeout_ms = move_flag(if_exists), self._context.patience_ms(timeout)
        pending: deque[tuple[asyncio.Task[Receipt], int]] = deque()
        held_bytes = 0
        given = MessageSource(messages)
        try:
            async for message in given.each(pending):
                if message is not None:
                    self._start()
                    pending.append((asyncio.create_task(self._told(message, flag, timeout_ms)), len(message.payload)))
                    held_bytes += len(message.payload)
                while pending and (
                    pending[0][0].done() or len(pending) > STREAMED_MESSAGES or held_bytes > STREAMED_BYTES
                ):
                    task, size = pending.popleft()
                    held_bytes -= size
                    yield await task
            while pending:
                yield await pending.popleft()[0]
            given.check()
        finally:
            for task, _ in pending:
                task.cancel()

    async def _told(self, message: Message, flag: int, timeout_ms: float) -> Receipt:
        """A put whose failure is told by its receipt."""
        made = b"" if message.encoded[0] else self._context.ids.make()
        try:
            return await self._put(message, flag, timeout_ms, made)
        except Closed:
            raise
        except TimelineError as error:
            return Receipt(
                error.id or "", Status(error.code), 0, 0, detail=error.reason, retry_after_ms=error.retry_after_ms
            )


def _carried(headers: Ragged | None, count: int, own: Bools | None, trace: Mapping[str, str]) -> Ragged | None:
    """A batch's headers with the context of a trace, but where the id is the producer's `own`: headers are part of what
    makes a message the same, and such a one may be put again in another trace."""
    if own is not None and own.all():
        return headers
    if headers is None:
        if own is None:
            return Ragged.repeat(carried(b"", trace), count)
        headers = Ragged.repeat(b"", count)
    kept = [False] * count if own is None else own.tolist()
    return Ragged.of([each if keeps else carried(each, trace) for each, keeps in zip(headers, kept, strict=True)])


Pending: TypeAlias = deque[tuple[asyncio.Task[Any], int]]
"""Puts under way, the oldest first, and the bytes of each."""
YIELD_EVERY = 256


class MessageSource:
    """The messages of one `produce_iter`. What their iteration raises, or what is among them and no message, ends it;
    `check` raises it once what came before is told."""

    def __init__(self, messages: Any) -> None:
        if not isinstance(messages, AsyncIterable | Iterable):
            kind = type(messages).__name__
            raise Invalid(f"produce_iter takes an iterable, or async iterable, of timeline.Message, not {kind}")
        self._messages = messages
        self._broke: Exception | None = None

    def check(self) -> None:
        """Raises what broke it."""
        if self._broke is not None:
            raise self._broke

    def plainly(self) -> Iterator[Message]:
        """The messages of an iterable."""
        if not isinstance(self._messages, Iterable):
            raise Invalid("the synchronous produce_iter takes an iterable of timeline.Message, not an asynchronous one")
        try:
            for message in self._messages:
                yield _checked(message)
        except Exception as broke:
            self._broke = broke

    def each(self, pending: Pending) -> AsyncIterator[Message | None]:
        """The messages one by one; None whenever the oldest of `pending` is done before the next message is there."""
        if isinstance(self._messages, AsyncIterable):
            return self._awaited(aiter(self._messages), pending)
        return self._read()

    async def _read(self) -> AsyncIterator[Message | None]:
        for number, message in enumerate(self.plainly(), 1):
            yield message
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)  # lets what was made so far be sent

    async def _awaited(self, source: AsyncIterator[Message], pending: Pending) -> AsyncIterator[Message | None]:
        coming: asyncio.Future[Message] | None = None
        try:
            while True:
                coming = coming or asyncio.ensure_future(_next(source))
                waited: set[asyncio.Future[Any]] = {coming}
                if pending:
                    waited.add(pending[0][0])
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    yield None
                    continue
                try:
                    message = _checked(coming.result())
                except StopAsyncIteration:
                    return
                except Exception as broke:
                    self._broke = broke
                    return
                coming = None
                yield message
        finally:
            if coming is not None and not coming.done():
                coming.cancel()


async def _next(source: AsyncIterator[Message]) -> Message:
    """The next one. A coroutine of ours, so that what is wrong with the source comes where what it raises does."""
    coming = anext(source)
    if not inspect.isawaitable(coming):
        raise Invalid(f"produce_iter takes an async iterable, whose __anext__ is awaited; it gave {coming!r:.60}")
    return await coming


def _checked(message: object) -> Message:
    if not isinstance(message, Message):
        raise Invalid(f"produce_iter takes timeline.Message, not {type(message).__name__}")
    return message
