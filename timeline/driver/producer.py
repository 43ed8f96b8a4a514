"""The producer: it puts, moves and cancels messages of one topic for one group."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

import numpy as np

from timeline import tracing
from timeline.columns import Bools, Ragged
from timeline.driver.batch import Batch
from timeline.driver.message import Message, Payload, carried, move_flag, of_message
from timeline.driver.mutations import MutationCalls
from timeline.driver.produce.produce_stream import OVERHEAD_BYTES, PUT_COLUMNS, ProduceStream, put_sizes
from timeline.driver.produce.request_queue import BatchCall, Columns, QueueRunner
from timeline.driver.receipts import Receipt, Receipts, receipt_of
from timeline.driver.tasks import SharedClose, all_of
from timeline.driver.times import Duration, Expiry, When, shown
from timeline.driver.transport.channel import ClientContext
from timeline.errors import Closed, Invalid, TimelineError, Unknown
from timeline.model import Operation, Status
from timeline.wire import Judgement
from timeline.wire.frames import PutFlag

STREAMED_MESSAGES = 5_000
STREAMED_BYTES = 16 * 1024 * 1024
"""Payload bytes that `produce_iter` holds at most for messages without a receipt."""
NO_TRACE: Mapping[str, str] = {}
MOST_IN_DOUBT = 1_000
"""Traces of puts with an unknown outcome, kept for a second call. The oldest go."""


class Producer(MutationCalls):
    """Puts messages on a topic's timeline, and moves and cancels those of its group. Made by `Timeline.producer`.

    One producer serves all tasks of a loop. Single calls that are made at the same time travel together.

    Every call takes `timeout=` (default: the client's). After it, a call raises Unavailable if it was certainly not
    done, and Unknown if it may have been. Until then the driver repeats a retryable call as the very same call, so that
    nothing happens twice.

        async with tl.producer("departures", group="ops") as p:
            await p.produce(b"gate closes", at=when, id="UA1545")
    """

    def __init__(self, context: ClientContext, topic: str, group: str) -> None:
        super().__init__(context, topic, group)
        self._stream = ProduceStream(context, topic, group)
        self._in_doubt: dict[bytes, Mapping[str, str]] = {}
        self._closing = SharedClose()

    async def aclose(self) -> None:
        """Wait until all calls are answered, at most for the client's timeout; then end the stream. Calls without an
        answer by then raise Unavailable or Unknown."""
        first, self.closed = not self.closed, True
        if self._epoch == self._context.epoch and not self._context.elsewhere:
            await self._closing.run(self._close)
        elif first:
            self._context.leave_behind(*self._runners)

    async def _close(self) -> None:
        try:
            async with asyncio.timeout(self._context.timeout_ms / 1000.0):
                for runner in self._runners:
                    await runner.queue.idle()
        except TimeoutError:
            pass  # `_stop` answers the rest
        except asyncio.CancelledError:  # nothing goes on in the background
            await self._stop()
            raise
        await self._stop()

    async def _stop(self) -> None:
        await all_of(*(runner.stop() for runner in self._runners))

    @property
    def _runners(self) -> list[QueueRunner]:
        return [self._stream, *self._calls.values()]

    def __del__(self) -> None:
        """End the stream of a producer that was never closed. No call is under way: it would hold the producer."""
        if not self.closed and self._epoch == self._context.epoch and self._context.here:
            for runner in self._runners:
                if runner.started:
                    self._context.part(runner)

    def _start(self) -> None:
        """Prepare each call. A child process and a new event loop start with a new stream."""
        if self.closed:
            raise self._context.closed_error("the producer was closed. Make another with tl.producer(…)")
        self._context.check()
        if self._epoch != self._context.epoch:
            self._epoch = self._context.epoch
            self._context.leave_behind(*self._runners)
            self._stream = ProduceStream(self._context, self.topic, self.group)
            self._calls = {}
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
        birth: int | None = None,
        timeout: Duration | None = None,
    ) -> Receipt:
        """Put one message. Return when the broker's store has it. A due time in the past means: deliver at once.

        `at` or `in_` is the due time; see `Message` for all arguments. `if_exists="move"`: if an unleased message has
        this id, only its due time is changed. It keeps its payload, tag, headers and expiry (`receipt.moved`).
        `if_exists="replace"`: this message replaces an unleased message of the same id.

        `birth` (64 bits, not 0): a repeat of this call has the same one and the same `id`. It is recognised, stores
        nothing and gets the same answer. Payloads are not compared: another one under both is dropped, and its receipt
        is OK. Under another birth it raises Exists. Default: random.

        Return a Receipt: OK, or DUPLICATE if this very message is there already. Raise Exists if another message has
        the id, and Forbidden if that is another group's. Raise Invalid, TooLarge, Throttled, Leased, Dead, NotFound (no
        such topic), Unavailable, Unknown or Closed. All errors have the message's `.id`.
        """
        self._start()
        message = Message(payload, at, in_, id, tag, headers, expires)
        try:
            flag, timeout_ms = move_flag(if_exists), self._context.patience_ms(timeout)
            number = self._context.ids.number() if birth is None else self._number(birth, "birth")
            if birth is not None and id is None:
                raise Invalid("birth= needs id=: a repeat is recognised by both, and each call makes another id")
        except Invalid as wrong:
            raise of_message(wrong, id) from None
        return await self._put(message, number, flag, timeout_ms)

    async def _put(self, message: Message, birth: int, flag: int, timeout_ms: float, made: bytes = b"") -> Receipt:
        """Put a message. `made`: the driver's id for a message without one."""
        own, time_ms, flags, expires_ms, tag, headers = message.encoded
        payload, id = message.payload, own or made or self._context.ids.make()
        if own in self._in_doubt:  # the call is repeated with the id that its error had
            headers = carried(headers, self._in_doubt[own])
        by = tracing.tracer()
        with nullcontext(NO_TRACE) if by is None else tracing.sending(by, self.topic, 1, id.decode()) as trace:
            if trace and not own:
                headers = carried(headers, trace)
            entry = (id, birth, time_ms, flags | flag, payload, expires_ms, tag, headers)
            nbytes = len(payload) + len(id) + len(tag) + len(headers) + OVERHEAD_BYTES
            try:
                answer = await self._stream.queue.single(entry, nbytes, timeout_ms)
                return receipt_of(id, answer, Operation.PUT, bool(flag & PutFlag.MOVE))
            except Unknown:
                if trace and not own:
                    self._doubt(id, trace)
                raise

    def _doubt(self, id: bytes, trace: Mapping[str, str]) -> None:
        """Keep the trace headers of a put whose outcome is unknown, under the `id` that the driver made."""
        self._in_doubt[id] = trace
        if len(self._in_doubt) > MOST_IN_DOUBT:
            del self._in_doubt[next(iter(self._in_doubt))]

    async def produce_many(
        self, messages: Batch | Iterable[Message], *, if_exists: str | None = None, timeout: Duration | None = None
    ) -> Receipts:
        """Put many messages. Return their Receipts in order. A refused message fails alone (`.failed`,
        `.raise_failed()`).

        `timeout` counts from the last answer, so that a large batch may take as long as it makes progress. Raise
        Unavailable or Unknown if no broker said anything about any message, Invalid if all of the call is wrong, and
        Closed.
        """
        self._start()
        batch = messages if isinstance(messages, Batch) else Batch.of(messages)
        own = None if batch.ids is None else batch.ids.sizes > 0
        columns = self._columns(batch, move_flag(if_exists))
        by = tracing.tracer()
        if by is None:
            return await self._put_many(columns, len(batch), batch.refused, timeout)
        with tracing.sending(by, self.topic, len(batch)) as trace:
            # They stay with the batch, as its ids do: the batch sent again, in any trace, has the same messages.
            batch.headers = columns["headers"] = _carried(batch.headers, len(batch), own, trace)
            return await self._put_many(columns, len(batch), batch.refused, timeout)

    async def _put_many(self, columns: Columns, count: int, refused: Judgement, timeout: Duration | None) -> Receipts:
        many = BatchCall(self._stream.queue, count, self._context.patience_ms(timeout), refused)
        many.send(columns, Operation.PUT, put_sizes(columns))
        answers = await many.finished()
        many.check_heard()
        moves = bool((columns["flags"] & PutFlag.MOVE).any())
        return Receipts(columns["ids"], answers, many.waits_ms, Operation.PUT, moves)

    def _columns(self, batch: Batch, flag: int) -> Columns:
        count = len(batch)
        ids = batch.ids
        empty = range(count) if ids is None else np.flatnonzero(ids.sizes == 0).tolist()
        nameless = [place for place in empty if place not in batch.refused]
        if nameless and batch.births is not None:
            raise Invalid("births need ids: a repeat is recognised by both, and each batch makes other ids")
        if ids is None:
            batch.ids = self._context.ids.make_column(count)
        elif nameless:
            named = ids.tolist()
            for place in nameless:
                named[place] = self._context.ids.make()
            batch.ids = type(ids).of(named)
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
        """Put messages as they come, in bounded memory, and yield their receipts in order.

        A refused message yields a receipt of its status (`receipt.ok`, `receipt.raise_failed()`), and the stream goes
        on. An exception of `messages` is raised after the receipts of all messages before it.

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
        """Put a message. Return its failure as a receipt, too."""
        made = b"" if message.encoded[0] else self._context.ids.make()
        try:
            return await self._put(message, self._context.ids.number(), flag, timeout_ms, made)
        except Closed:
            raise
        except TimelineError as error:
            return Receipt(
                error.id or "", Status(error.code), 0, 0, detail=error.reason, retry_after_ms=error.retry_after_ms
            )


def _carried(headers: Ragged | None, count: int, own: Bools | None, trace: Mapping[str, str]) -> Ragged | None:
    """Return a batch's headers with the context of a trace. Messages with the producer's `own` id keep theirs: they may
    be put again in another trace, and must then be the same message."""
    if own is not None and own.all():
        return headers
    if headers is None:
        if own is None:
            return Ragged.repeat(carried(b"", trace), count)
        headers = Ragged.repeat(b"", count)
    kept = [False] * count if own is None else own.tolist()
    return Ragged.of([each if keeps else carried(each, trace) for each, keeps in zip(headers, kept, strict=True)])


Pending: TypeAlias = deque[tuple[asyncio.Task[Any], int]]
"""Puts under way with the bytes of each, the oldest first."""
YIELD_EVERY = 256


class MessageSource:
    """The messages of one `produce_iter`. An exception, or an item that is no message, ends them. `check` raises it,
    after the receipts of the messages before it."""

    def __init__(self, messages: Any) -> None:
        if not isinstance(messages, AsyncIterable | Iterable):
            kind = type(messages).__name__
            raise Invalid(f"produce_iter takes an iterable, or async iterable, of timeline.Message, not {kind}")
        self._messages = messages
        self._broke: Exception | None = None

    def check(self) -> None:
        """Raise the exception that ended the messages."""
        if self._broke is not None:
            raise self._broke

    def plainly(self) -> Iterator[Message]:
        """Yield the messages of an iterable."""
        if not isinstance(self._messages, Iterable):
            raise Invalid("the synchronous produce_iter takes an iterable of timeline.Message, not an asynchronous one")
        try:
            for message in self._messages:
                yield _checked(message)
        except Exception as broke:
            self._broke = broke

    def each(self, pending: Pending) -> AsyncIterator[Message | None]:
        """Yield the messages one by one. Yield None when the oldest of `pending` is done before the next message
        comes."""
        if isinstance(self._messages, AsyncIterable):
            return self._awaited(aiter(self._messages), pending)
        return self._read()

    async def _read(self) -> AsyncIterator[Message | None]:
        for number, message in enumerate(self.plainly(), 1):
            yield message
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)  # let the puts so far be sent

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
    """Return the next message. In this coroutine a wrong source fails where its own exceptions do."""
    coming = anext(source)
    if not inspect.isawaitable(coming):
        raise Invalid(f"produce_iter takes an async iterable, whose __anext__ is awaited; it gave {shown(coming)}")
    return await coming


def _checked(message: object) -> Message:
    if not isinstance(message, Message):
        raise Invalid(f"produce_iter takes timeline.Message, not {type(message).__name__}")
    return message
