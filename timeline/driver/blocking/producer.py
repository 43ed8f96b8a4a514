"""The producer for plain threads: the same words without await."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from timeline.columns import Int64
from timeline.driver.batch import Batch
from timeline.driver.blocking.background import Background, Closing
from timeline.driver.message import Message, Payload
from timeline.driver.mutations import TagProgress
from timeline.driver.produce.message_source import MessageSource
from timeline.driver.producer import Producer
from timeline.driver.receipts import Receipt, Receipts
from timeline.driver.times import Duration, Expiry, When


class SyncProducer(Closing):
    """See `Producer`. One serves all threads."""

    def __init__(self, background: Background, producer: Producer) -> None:
        self._background, self._producer = background, producer
        self.topic, self.group = producer.topic, producer.group

    def close(self) -> None:
        """Waits until all that is on its way is answered, then ends the stream."""
        if not self._producer.closed:
            self._background.run(self._producer.aclose())

    def produce(
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
        """See Producer.produce."""
        return self._background.run(
            self._producer.produce(
                payload,
                at=at,
                in_=in_,
                id=id,
                tag=tag,
                headers=headers,
                expires=expires,
                if_exists=if_exists,
                timeout=timeout,
            )
        )

    def produce_many(
        self, messages: Batch | Iterable[Message], *, if_exists: str | None = None, timeout: Duration | None = None
    ) -> Receipts:
        """See Producer.produce_many."""
        batch = messages if isinstance(messages, Batch) else Batch.of(messages)
        return self._background.run(self._producer.produce_many(batch, if_exists=if_exists, timeout=timeout))

    def produce_iter(
        self, messages: Iterable[Message], *, if_exists: str | None = None, timeout: Duration | None = None
    ) -> Iterator[Receipt]:
        """See Producer.produce_iter. `messages` is iterated in this thread, a thousand ahead of the receipts."""
        gathered: list[Message] = []
        held_bytes = 0
        given = MessageSource(messages)
        for message in given.plainly():
            gathered.append(message)
            held_bytes += len(message.payload)
            if len(gathered) == 1_000 or held_bytes > 1024 * 1024:
                yield from self._background.run(self._told(gathered, if_exists, timeout))
                gathered, held_bytes = [], 0
        yield from self._background.run(self._told(gathered, if_exists, timeout))
        given.check()

    async def _told(self, messages: list[Message], if_exists: str | None, timeout: Duration | None) -> list[Receipt]:
        told = self._producer.produce_iter(messages, if_exists=if_exists, timeout=timeout)
        return [receipt async for receipt in told]

    def move(
        self,
        id: str,
        *,
        at: When | None = None,
        in_: Duration | None = None,
        if_version: int | None = None,
        timeout: Duration | None = None,
    ) -> Receipt:
        """See Producer.move."""
        return self._background.run(self._producer.move(id, at=at, in_=in_, if_version=if_version, timeout=timeout))

    def cancel(
        self, id: str, *, leased: bool = False, if_version: int | None = None, timeout: Duration | None = None
    ) -> Receipt:
        """See Producer.cancel."""
        return self._background.run(self._producer.cancel(id, leased=leased, if_version=if_version, timeout=timeout))

    def move_many(
        self,
        ids: Iterable[str] | Iterable[bytes],
        *,
        at: When | Sequence[When] | Int64 | None = None,
        in_: Duration | Sequence[Duration] | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """See Producer.move_many."""
        return self._background.run(self._producer.move_many(ids, at=at, in_=in_, timeout=timeout))

    def cancel_many(
        self, ids: Iterable[str] | Iterable[bytes], *, leased: bool = False, timeout: Duration | None = None
    ) -> Receipts:
        """See Producer.cancel_many."""
        return self._background.run(self._producer.cancel_many(ids, leased=leased, timeout=timeout))

    def revive(
        self,
        ids: str | Iterable[str] | Iterable[bytes],
        *,
        at: When | None = None,
        in_: Duration | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """See Producer.revive."""
        return self._background.run(self._producer.revive(ids, at=at, in_=in_, timeout=timeout))

    def purge(self, ids: str | Iterable[str] | Iterable[bytes], *, timeout: Duration | None = None) -> Receipts:
        """See Producer.purge."""
        return self._background.run(self._producer.purge(ids, timeout=timeout))

    def move_tag(
        self,
        tag: str,
        *,
        at: When | None = None,
        in_: Duration | None = None,
        by: Duration | None = None,
        dry_run: bool = False,
        progress: Callable[[TagProgress], object] | None = None,
        resume: TagProgress | str | None = None,
        timeout: Duration | None = None,
    ) -> TagProgress:
        """See Producer.move_tag. `progress` is called in the client's thread."""
        return self._background.run(
            self._producer.move_tag(
                tag, at=at, in_=in_, by=by, dry_run=dry_run, progress=progress, resume=resume, timeout=timeout
            )
        )

    def cancel_tag(
        self,
        tag: str,
        *,
        leased: bool = False,
        dry_run: bool = False,
        progress: Callable[[TagProgress], object] | None = None,
        resume: TagProgress | str | None = None,
        timeout: Duration | None = None,
    ) -> TagProgress:
        """See Producer.cancel_tag."""
        return self._background.run(
            self._producer.cancel_tag(
                tag, leased=leased, dry_run=dry_run, progress=progress, resume=resume, timeout=timeout
            )
        )
