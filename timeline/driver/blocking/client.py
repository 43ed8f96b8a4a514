"""The client without await, for plain threads. One background thread runs the event loop, and all threads may call.

Every method does the same as its namesake in `client.py`, `producer.py` or `consumer.py`, and returns when it is done.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn, overload

from timeline.credentials import credentials_of
from timeline.driver.batch import Batch
from timeline.driver.blocking.calls import (
    Background,
    Blocking,
    SyncDelivery,
    SyncDeliveryBatch,
    blocking,
    in_loop,
    iterate,
    stepping,
)
from timeline.driver.blocking.schedules import SyncSchedule, handing
from timeline.driver.client import DEFAULT_TIMEOUT, Name, Timeline
from timeline.driver.consume.handlers import Backoff, Handler
from timeline.driver.consume.in_flight import Stats
from timeline.driver.consumer import CREDIT_BYTES, Consumer, wait_of
from timeline.driver.delivery import Delivery, DeliveryBatch
from timeline.driver.message import Message
from timeline.driver.producer import MessageSource, Producer
from timeline.driver.receipts import Receipt, Receipts
from timeline.driver.times import Duration
from timeline.driver.transport.addresses import DEFAULT_ADDRESS
from timeline.errors import Closed, TimelineError
from timeline.model import DEFAULT_GROUP


def connect_sync(
    addresses: str | Sequence[str] = DEFAULT_ADDRESS,
    timeout: Duration = DEFAULT_TIMEOUT,
    *,
    tls: bool | None = None,
    ca: Name | None = None,
    cert: Name | None = None,
    key: Name | None = None,
    token: Name | None = None,
    as_operator: bool = False,
) -> SyncTimeline:
    """Return a client for plain threads. See `timeline.connect`.

        with timeline.connect_sync("localhost:9000") as tl, tl.consumer("departures", id="worker-1") as c:
            for d in c:
                d.ack()

    One client serves all threads of a process. After a fork each child connects by itself. Calls block their thread.
    Inside a running event loop, as in a coroutine or a Jupyter cell, they raise Invalid: use `timeline.connect` there.
    """
    return SyncTimeline(addresses, timeout, credentials=credentials_of(tls, ca, cert, key, token, as_operator))


class SyncProducer(Blocking):
    """See `Producer`. One serves all threads."""

    _target: Producer

    def __init__(self, background: Background, producer: Producer) -> None:
        super().__init__(background, producer)
        self.topic, self.group = producer.topic, producer.group

    produce = blocking(Producer.produce)
    move = blocking(Producer.move)
    cancel = blocking(Producer.cancel)
    move_many = blocking(Producer.move_many)
    cancel_many = blocking(Producer.cancel_many)
    revive = blocking(Producer.revive)
    purge = blocking(Producer.purge)
    move_tag = blocking(Producer.move_tag)
    cancel_tag = blocking(Producer.cancel_tag)

    def produce_many(
        self, messages: Batch | Iterable[Message], *, if_exists: str | None = None, timeout: Duration | None = None
    ) -> Receipts:
        """See Producer.produce_many."""
        batch = messages if isinstance(messages, Batch) else Batch.of(messages)
        return self._run(self._target.produce_many(batch, if_exists=if_exists, timeout=timeout))

    def produce_iter(
        self, messages: Iterable[Message], *, if_exists: str | None = None, timeout: Duration | None = None
    ) -> Iterator[Receipt]:
        """See Producer.produce_iter. This thread iterates over `messages`, up to a thousand ahead of the receipts."""
        gathered: list[Message] = []
        held_bytes = 0
        given = MessageSource(messages)
        for message in given.plainly():
            gathered.append(message)
            held_bytes += len(message.payload)
            if len(gathered) == 1_000 or held_bytes > 1024 * 1024:
                yield from self._run(self._told(gathered, if_exists, timeout))
                gathered, held_bytes = [], 0
        yield from self._run(self._told(gathered, if_exists, timeout))
        given.check()

    async def _told(self, messages: list[Message], if_exists: str | None, timeout: Duration | None) -> list[Receipt]:
        told = self._target.produce_iter(messages, if_exists=if_exists, timeout=timeout)
        return [receipt async for receipt in told]


async def _raised_by(work: Awaitable[None]) -> BaseException | None:
    """Await `work`, and return what it raised if that is no Exception: a task that raises it ends the client's loop."""
    try:
        await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        return error
    return None


class SyncConsumer(Blocking):
    """See `Consumer`. Iterate it from any thread."""

    _target: Consumer

    def __init__(self, background: Background, consumer: Consumer) -> None:
        super().__init__(background, consumer)
        self.topic = consumer.topic
        self.on_settle_error: Callable[[SyncDelivery, TimelineError], object] | None = None
        """Called in the client's thread if `ack_soon` could not settle a message."""
        consumer.on_settle_error = self._settle_failed

    @property
    def id(self) -> str:
        """See Consumer.id."""
        return self._target.id

    @property
    def stats(self) -> Stats:
        """See Consumer.stats."""
        return self._target.stats

    @property
    def taking(self) -> bool:
        """See Consumer.taking."""
        return self._target.taking

    def __iter__(self) -> Iterator[SyncDelivery]:
        while (delivery := self.take()) is not None:
            yield delivery

    @overload
    def take(self) -> SyncDelivery | None: ...
    @overload
    def take(
        self, max: int, wait: Duration | None = None, *, timeout: Duration | None = None
    ) -> list[SyncDelivery]: ...
    def take(
        self, max: int | None = None, wait: Duration | None = None, *, timeout: Duration | None = None
    ) -> SyncDelivery | list[SyncDelivery] | None:
        """See Consumer.take. Ctrl-C loses no message."""
        taken = list[Delivery]()
        self._taking(taken, self._take(taken, max, wait_of(wait, timeout)))
        made = [SyncDelivery.of(one, self._run) for one in taken]
        return made if max is not None else made[0] if made else None

    async def _take(self, taken: list[Delivery], max: int | None, wait: Duration | None) -> None:
        if max is not None or wait is not None:
            taken.extend(await self._target.take(max, wait))  # type: ignore[arg-type]
        elif (one := await self._target.take()) is not None:
            taken.append(one)

    async def _take_batch(self, taken: list[DeliveryBatch]) -> None:
        if (batch := await self._target.take_batch()) is not None:
            taken.append(batch)

    def _taking(self, taken: Sequence[Delivery | DeliveryBatch], asked: Coroutine[Any, Any, None]) -> None:
        """Run `asked`, which adds to `taken`. Put that back after Ctrl-C or another signal: nobody has seen it."""
        try:
            self._run(asked)
        except TimelineError:
            raise
        except BaseException:
            with suppress(Closed):
                for one in reversed(taken):
                    self._put_back([one] if isinstance(one, Delivery) else one)
            raise

    _put_back = in_loop(Consumer.put_back)

    def batches(self) -> Iterator[SyncDeliveryBatch]:
        """See Consumer.batches."""
        while (batch := self.take_batch()) is not None:
            yield batch

    def take_batch(self) -> SyncDeliveryBatch | None:
        """Wait for the next batch. Return None once the consumer is closed or takes nothing more. Ctrl-C loses none."""
        taken = list[DeliveryBatch]()
        self._taking(taken, self._take_batch(taken))
        return SyncDeliveryBatch.of(taken[0], self._run) if taken else None

    def run(
        self,
        handler: Handler,
        concurrency: int = 8,
        *,
        backoff: Backoff | None = None,
        timeout: Duration | None = None,
        grace: Duration = "30s",
    ) -> None:
        """See Consumer.run. It blocks. In the main thread SIGTERM and Ctrl-C end it in order; Ctrl-C then raises
        KeyboardInterrupt. A second Ctrl-C does not wait for handlers."""
        undo = self._on_sigterm()
        try:
            working = self._background.start(
                _raised_by(self._target.run(handler, concurrency, backoff=backoff, timeout=timeout, grace=grace))
            )
            try:
                ended_by = self._background.wait(working)
            except KeyboardInterrupt:
                try:
                    self.stop_taking()
                    self._background.wait(working)
                finally:
                    working.cancel()
                raise
        finally:
            undo()
        if ended_by is not None:
            raise ended_by

    stop_taking = in_loop(Consumer.stop_taking)

    def _on_sigterm(self) -> Callable[[], None]:
        on_main = threading.current_thread() is threading.main_thread()
        if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return lambda: None
        stopper = threading.Thread  # a signal handler must not wait for the loop

        def stop(number: int, frame: object) -> None:
            stopper(target=self.stop_taking, name="timeline-stop", daemon=True).start()

        signal.signal(signal.SIGTERM, stop)
        return lambda: (signal.signal(signal.SIGTERM, signal.SIG_DFL), None)[1]

    def _settle_failed(self, delivery: Delivery, error: TimelineError) -> None:
        if self.on_settle_error is not None:
            self.on_settle_error(SyncDelivery.of(delivery, self._run), error)


class SyncTimeline(Blocking):
    """See `Timeline`. One serves all threads. Close it with `with` or `close()`."""

    _target: Timeline

    def __init__(
        self, addresses: str | Sequence[str] = DEFAULT_ADDRESS, timeout: Duration = DEFAULT_TIMEOUT, **seams: Any
    ) -> None:
        super().__init__(Background(), Timeline(addresses, timeout, **seams))

    async def __aenter__(self) -> NoReturn:
        raise TypeError("this client is for `with`; timeline.connect makes the one for `async with`")

    async def __aexit__(self, *_: object) -> None:
        """Needed, so that `async with` calls `__aenter__`, which raises."""

    def close(self) -> None:
        """Close its producers and consumers, which flush, then all connections and the thread."""
        with suppress(Closed):
            self._background.check()  # before anything is closed
        try:
            self._run(self._target.aclose())
        except Closed:
            pass  # closed before
        finally:
            self._background.close()

    def producer(self, topic: str, group: str = DEFAULT_GROUP) -> SyncProducer:
        """See Timeline.producer."""
        return SyncProducer(self._background, self._target.producer(topic, group))

    def consumer(
        self,
        topic: str,
        id: str | None = None,
        lease: Duration | None = None,
        credit: int | None = None,
        credit_bytes: int = CREDIT_BYTES,
    ) -> SyncConsumer:
        """See Timeline.consumer."""
        return SyncConsumer(self._background, self._target.consumer(topic, id, lease, credit, credit_bytes))

    schedule = handing(Timeline.schedule)
    create_schedule = handing(Timeline.create_schedule)

    def get_schedule(self, topic: str, name: str, *, timeout: Duration | None = None) -> SyncSchedule | None:
        """See Timeline.get_schedule."""
        found = self._run(self._target.get_schedule(topic, name, timeout=timeout))
        return None if found is None else SyncSchedule(found, self._run)

    def schedules(self, topic: str | None = None, *, timeout: Duration | None = None) -> Iterator[SyncSchedule]:
        """See Timeline.schedules."""
        for one in iterate(self._background, self._target.schedules(topic, timeout=timeout)):
            yield SyncSchedule(one, self._run)

    create_topic = blocking(Timeline.create_topic)
    update_topic = blocking(Timeline.update_topic)
    topic_secrets = blocking(Timeline.topic_secrets)
    pause_topic = blocking(Timeline.pause_topic)
    resume_topic = blocking(Timeline.resume_topic)
    drop_topic = blocking(Timeline.drop_topic)
    topics = blocking(Timeline.topics)
    get = blocking(Timeline.get)
    forecast = blocking(Timeline.forecast)
    count = blocking(Timeline.count)
    late = blocking(Timeline.late)
    why = blocking(Timeline.why)
    standing = blocking(Timeline.standing)
    ping = blocking(Timeline.ping)
    take = blocking(Timeline.take)
    settle = blocking(Timeline.settle)
    scan_pages = stepping(Timeline.scan_pages)
    scan = stepping(Timeline.scan)
    dead = stepping(Timeline.dead)
