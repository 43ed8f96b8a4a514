"""The same words without await, for plain threads: one background thread runs the event loop, all threads may call.

Every method does what its namesake does in `client.py`, `producer.py`, `consumer.py`, and returns when that is done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NoReturn, overload

from timeline.credentials import credentials_of
from timeline.driver.backoff import Backoff
from timeline.driver.blocking.background import Background, Closing, iterate
from timeline.driver.blocking.delivery import SyncDelivery, SyncDeliveryBatch
from timeline.driver.blocking.producer import SyncProducer
from timeline.driver.brokers import Standings
from timeline.driver.client import DEFAULT_TIMEOUT, Name, Timeline
from timeline.driver.consume.handlers import Handler
from timeline.driver.consume.in_flight import Stats
from timeline.driver.consumer import CREDIT_BYTES, Consumer
from timeline.driver.delivery import Delivery
from timeline.driver.late import LateReport, Why
from timeline.driver.message import StoredMessage
from timeline.driver.queries import Counts, Outlook, PingAnswer
from timeline.driver.times import Duration, When
from timeline.driver.transport.addresses import DEFAULT_ADDRESS
from timeline.errors import Closed, TimelineError
from timeline.model import DEFAULT_GROUP, Topic
from timeline.wire import ScanPage


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
    """A client for plain threads. See `timeline.connect`.

        with timeline.connect_sync("localhost:9000") as tl, tl.consumer("departures", id="worker-1") as c:
            for d in c:
                d.ack()

    One serves all threads of a process; after a fork each child connects by itself. Its calls block their thread:
    inside a running event loop, as in a coroutine or a Jupyter cell, they raise Invalid. Use `timeline.connect` there.
    """
    return SyncTimeline(addresses, timeout, credentials=credentials_of(tls, ca, cert, key, token, as_operator))


class SyncConsumer(Closing):
    """See `Consumer`. Iterate it from any thread."""

    def __init__(self, background: Background, consumer: Consumer) -> None:
        self._background, self._consumer = background, consumer
        self.topic = consumer.topic
        self.on_settle_error: Callable[[SyncDelivery, TimelineError], object] | None = None
        """Called in the client's thread with what `ack_soon` could not settle."""
        consumer.on_settle_error = self._settle_failed

    @property
    def id(self) -> str:
        """See Consumer.id."""
        return self._consumer.id

    @property
    def stats(self) -> Stats:
        """See Consumer.stats."""
        return self._consumer.stats

    @property
    def taking(self) -> bool:
        """See Consumer.taking."""
        return self._consumer.taking

    def close(self) -> None:
        """Sends what is still to be settled, hands back what nobody took, and leaves."""
        if not self._consumer.closed:
            self._background.run(self._consumer.aclose())

    def __iter__(self) -> Iterator[SyncDelivery]:
        while (delivery := self.take()) is not None:
            yield delivery

    @overload
    def take(self) -> SyncDelivery | None: ...
    @overload
    def take(self, max: int, timeout: Duration | None = None) -> list[SyncDelivery]: ...
    def take(self, max: int | None = None, timeout: Duration | None = None) -> SyncDelivery | list[SyncDelivery] | None:
        """See Consumer.take. Ctrl-C loses nothing either."""
        taken: list[Delivery] = []
        try:
            self._background.run(self._take(taken, max, timeout))
        except TimelineError:
            raise
        except BaseException:  # Ctrl-C, or another signal's: the client's thread may have taken some by now
            with suppress(Closed):
                self._background.run(self._put_back(taken))
            raise
        made = [SyncDelivery.of(one, self._background.run) for one in taken]
        return made if max is not None else made[0] if made else None

    async def _take(self, taken: list[Delivery], max: int | None, timeout: Duration | None) -> None:
        if max is not None or timeout is not None:
            taken.extend(await self._consumer.take(max, timeout))  # type: ignore[arg-type]
        elif (one := await self._consumer.take()) is not None:
            taken.append(one)

    async def _put_back(self, taken: list[Delivery]) -> None:
        self._consumer.put_back(taken)

    def batches(self) -> Iterator[SyncDeliveryBatch]:
        """See Consumer.batches."""
        while (batch := self.take_batch()) is not None:
            yield batch

    def take_batch(self) -> SyncDeliveryBatch | None:
        """The next batch, when there is one; None once the consumer is closed or takes nothing more."""
        taken = self._background.run(self._consumer.take_batch())
        return None if taken is None else SyncDeliveryBatch.of(taken, self._background.run)

    def run(
        self,
        handler: Handler,
        concurrency: int = 8,
        *,
        backoff: Backoff | None = None,
        timeout: Duration | None = None,
        grace: Duration = "30s",
    ) -> None:
        """See Consumer.run. Blocks; in the main thread SIGTERM ends it in order, and so does Ctrl-C, which then raises
        KeyboardInterrupt; a second Ctrl-C does not wait for handlers."""
        undo = self._on_sigterm()
        try:
            working = self._background.start(
                self._consumer.run(handler, concurrency, backoff=backoff, timeout=timeout, grace=grace)
            )
            try:
                self._background.wait(working)
            except KeyboardInterrupt:
                try:
                    self.stop_taking()
                    self._background.wait(working)
                finally:
                    working.cancel()
                raise
        finally:
            undo()

    def stop_taking(self) -> None:
        """Hands back what nobody took, and takes nothing more; `run` then ends in order."""
        self._background.run(self._stop())

    async def _stop(self) -> None:
        self._consumer.stop_taking()

    def _on_sigterm(self) -> Callable[[], None]:
        on_main = threading.current_thread() is threading.main_thread()
        if not on_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return lambda: None
        stopper = threading.Thread  # a handler must not wait for the loop: another thread does

        def stop(number: int, frame: object) -> None:
            stopper(target=self.stop_taking, name="timeline-stop", daemon=True).start()

        signal.signal(signal.SIGTERM, stop)
        return lambda: (signal.signal(signal.SIGTERM, signal.SIG_DFL), None)[1]

    def _settle_failed(self, delivery: Delivery, error: TimelineError) -> None:
        if self.on_settle_error is not None:
            self.on_settle_error(SyncDelivery.of(delivery, self._background.run), error)


class SyncTimeline(Closing):
    """See `Timeline`. One serves all threads; close it with `with` or `close()`."""

    def __init__(
        self, addresses: str | Sequence[str] = DEFAULT_ADDRESS, timeout: Duration = DEFAULT_TIMEOUT, **seams: Any
    ) -> None:
        self._client = Timeline(addresses, timeout, **seams)
        self._background = Background()

    async def __aenter__(self) -> NoReturn:
        raise TypeError("this client is for `with`; timeline.connect makes the one for `async with`")

    async def __aexit__(self, *_: object) -> None:
        """There for `__aenter__`, which tells."""

    def close(self) -> None:
        """Closes its producers and consumers, which flush; then all connections, and the thread."""
        try:
            self._background.run(self._client.aclose())
        except Closed:
            pass  # closed before
        finally:
            self._background.close()

    def producer(self, topic: str, group: str = DEFAULT_GROUP) -> SyncProducer:
        """See Timeline.producer."""
        return SyncProducer(self._background, self._client.producer(topic, group))

    def consumer(
        self,
        topic: str,
        id: str | None = None,
        lease: Duration | None = None,
        credit: int | None = None,
        credit_bytes: int = CREDIT_BYTES,
    ) -> SyncConsumer:
        """See Timeline.consumer."""
        return SyncConsumer(self._background, self._client.consumer(topic, id, lease, credit, credit_bytes))

    def create_topic(self, name: str, *, timeout: Duration | None = None, **settings: Any) -> Topic:
        """See Timeline.create_topic."""
        return self._background.run(self._client.create_topic(name, timeout=timeout, **settings))

    def update_topic(self, name: str, *, timeout: Duration | None = None, **settings: Any) -> Topic:
        """See Timeline.update_topic."""
        return self._background.run(self._client.update_topic(name, timeout=timeout, **settings))

    def pause_topic(self, name: str, *, timeout: Duration | None = None) -> Topic:
        """See Timeline.pause_topic."""
        return self._background.run(self._client.pause_topic(name, timeout=timeout))

    def resume_topic(self, name: str, *, timeout: Duration | None = None) -> Topic:
        """See Timeline.resume_topic."""
        return self._background.run(self._client.resume_topic(name, timeout=timeout))

    def drop_topic(self, name: str, *, timeout: Duration | None = None) -> None:
        """See Timeline.drop_topic."""
        self._background.run(self._client.drop_topic(name, timeout=timeout))

    def topics(self, *, timeout: Duration | None = None) -> list[Topic]:
        """See Timeline.topics."""
        return self._background.run(self._client.topics(timeout=timeout))

    def scan_pages(
        self,
        topic: str,
        *,
        state: str | Iterable[str] | None = None,
        tag: str | None = None,
        due: tuple[When | None, When | None] | None = None,
        ids: Iterable[str] | None = None,
        buckets: tuple[int, int] | None = None,
        holder: str = "",
        payload: bool = False,
        limit: int = 0,
        timeout: Duration | None = None,
    ) -> Iterator[ScanPage]:
        """See Timeline.scan_pages."""
        where: dict[str, Any] = {
            "state": state,
            "tag": tag,
            "due": due,
            "ids": ids,
            "buckets": buckets,
            "holder": holder,
        }
        pages = self._client.scan_pages(topic, **where, payload=payload, limit=limit, timeout=timeout)
        return iterate(self._background, pages)

    def scan(
        self,
        topic: str,
        *,
        state: str | Iterable[str] | None = None,
        tag: str | None = None,
        due: tuple[When | None, When | None] | None = None,
        payload: bool = False,
        limit: int = 0,
        timeout: Duration | None = None,
    ) -> Iterator[StoredMessage]:
        """See Timeline.scan."""
        found = self._client.scan(topic, state=state, tag=tag, due=due, payload=payload, limit=limit, timeout=timeout)
        return iterate(self._background, found)

    def dead(
        self, topic: str, *, tag: str | None = None, payload: bool = False, timeout: Duration | None = None
    ) -> Iterator[StoredMessage]:
        """See Timeline.dead."""
        return iterate(self._background, self._client.dead(topic, tag=tag, payload=payload, timeout=timeout))

    def get(
        self, topic: str, id: str, *, payload: bool = True, timeout: Duration | None = None
    ) -> StoredMessage | None:
        """See Timeline.get."""
        return self._background.run(self._client.get(topic, id, payload=payload, timeout=timeout))

    def forecast(
        self, topic: str, window: Duration = "1h", step: Duration = "1m", *, timeout: Duration | None = None
    ) -> Outlook:
        """See Timeline.forecast."""
        return self._background.run(self._client.forecast(topic, window, step, timeout=timeout))

    def count(self, topic: str, *, timeout: Duration | None = None) -> Counts:
        """See Timeline.count."""
        return self._background.run(self._client.count(topic, timeout=timeout))

    def late(
        self,
        since: Duration = "1h",
        *,
        topic: str = "",
        id: str = "",
        limit: int = 1_000,
        timeout: Duration | None = None,
    ) -> LateReport:
        """See Timeline.late."""
        return self._background.run(self._client.late(since, topic=topic, id=id, limit=limit, timeout=timeout))

    def why(self, topic: str, id: str, *, timeout: Duration | None = None) -> Why:
        """See Timeline.why."""
        return self._background.run(self._client.why(topic, id, timeout=timeout))

    def standing(self, topic: str = "", *, consumers: int = 1_000, timeout: Duration | None = None) -> Standings:
        """See Timeline.standing."""
        return self._background.run(self._client.standing(topic, consumers=consumers, timeout=timeout))

    def ping(self, *, timeout: Duration | None = None) -> PingAnswer:
        """See Timeline.ping."""
        return self._background.run(self._client.ping(timeout=timeout))
