"""The records of schedules in the store, and the messages of their occurrences."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from timeline.broker.catalog import Catalog
from timeline.broker.cluster import ClusterHints
from timeline.broker.lanes import Intake, MeteredStore, perhaps_done
from timeline.broker.runtime import Runtime
from timeline.columns import Ragged
from timeline.errors import Invalid
from timeline.model import (
    MAX_HEADERS_BYTES,
    Answers,
    Operation,
    Rows,
    State,
    Status,
    Topic,
    TopicSettings,
    encode_headers,
    payload_sums,
)
from timeline.schedules.looks import UNSURE, ScheduledMessage
from timeline.schedules.record import (
    BUCKETS,
    SCHEDULES_GROUP,
    SCHEDULES_TOPIC,
    ScheduleRecord,
    birth_of,
    number_of,
    tag_of,
)
from timeline.schedules.specification import Specification
from timeline.storage_plugins.contract import Mutations, Puts, ScanFilter, StoreError, StoreUnavailable, StoreUnknown

log = logging.getLogger("timeline.broker")
PEER = "schedules"
"""Whose the puts are, where peers take turns."""
NOBODY = ""
"""A producer group that owns no message: the wire takes none without a name."""
PAGE_ROWS = 500
SETTINGS = TopicSettings(
    buckets=BUCKETS, max_deliveries=0, remember_ms=86_400_000, lease_ahead_ms=0, max_payload_bytes=4 * 1024 * 1024
)
"""Of the internal topic. It remembers the numbers of records, so that none is used twice."""
TRIES = 4
FIRST_WAIT_S = 0.02
PART_BYTES = 1024 * 1024
"""Records and occurrences go to the store in parts of about this size."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OccurrenceAnswer:
    """The answer to a put or a mutation of one message. `settled`: the id is remembered. `foreign`: the DUPLICATE is of
    another put's message, which is there."""

    status: Status
    detail: str = ""
    settled: bool = False
    foreign: bool = False
    version: int = 0
    due_ms: int = 0


class ScheduleStore:
    """Reads and writes records and occurrences, in batches. Raise StoreError where no answer per message says it."""

    def __init__(
        self,
        runtime: Runtime,
        catalog: Catalog,
        store: MeteredStore,
        cluster: ClusterHints,
        intake: Intake,
        random_bits: Callable[[int], int],
    ) -> None:
        self._clock, self._catalog, self._store = runtime.clock, catalog, store
        self._cluster, self._intake, self._random_bits = cluster, intake, random_bits

    @property
    def topic(self) -> Topic | None:
        """The internal topic. None: there is none, as far as this broker knows."""
        return self._catalog.known(SCHEDULES_TOPIC)

    async def find_topic(self) -> Topic | None:
        """Return the internal topic. None: no schedule was ever created."""
        return self.topic or await self._catalog.find(SCHEDULES_TOPIC)

    async def make_topic(self) -> Topic:
        """Return the internal topic, created if it is not there yet."""
        return self.topic or await self._catalog.create_internal(SCHEDULES_TOPIC, SETTINGS)

    def is_known(self, name: str) -> bool:
        """Return whether there is such a topic, as far as this broker knows."""
        return self._catalog.known(name) is not None

    async def target(self, name: str) -> Topic | None:
        """Return the topic that a schedule produces into. None: there is none."""
        return self._catalog.known(name) or await self._catalog.find(name)

    async def targets(self, schedules: Iterable[Specification]) -> dict[str, Topic | None]:
        """Return the topics of schedules by name, as `target` does. One reading of the store looks for all that are not
        known."""
        found: dict[str, Topic | None] = {}
        read = False
        for name in {said.topic: None for said in schedules}:
            found[name] = self._catalog.known(name)
            if found[name] is None and not read:
                found[name], read = await self._catalog.find(name), True
        return found

    # ── reading ──

    async def newest(self, topic: str, name: str) -> list[ScheduleRecord]:
        """Return the newest record of each schedule with this name, by number. There are several if one was deleted and
        made again, or if two calls made it at the same time. Raise StoreUnavailable if one cannot be read."""
        internal = await self.find_topic()
        if internal is None:
            return []
        for attempt in range(TRIES):
            if attempt:  # a record that ends while it is read has no payload any more
                await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
            # A store that reads ids and then their records misses the only one if it changes in between.
            found = await self._newest(internal, topic, name) or await self._newest(internal, topic, name)
            unreadable = [one for one in found if isinstance(one, str)]
            if not unreadable:
                break
        else:
            raise StoreUnavailable(f"schedule {topic}/{name} cannot be read: {unreadable[0]}")
        return [one for one in found if isinstance(one, ScheduleRecord)]

    async def _newest(self, internal: Topic, topic: str, name: str) -> list[ScheduleRecord | str]:
        payloads: dict[int, tuple[bytes, bytes]] = {}
        async for rows in self._pages(internal, ScanFilter(tag=tag_of(topic, name).encode()), payload=True):
            assert rows.payloads is not None
            for id, payload in zip(rows.ids.tolist(), rows.payloads.tolist(), strict=True):
                payloads[number_of(id.decode(), topic, name)] = id, payload
        # Records with consecutive numbers are one schedule: it changes. Only the last of them counts.
        ends = sorted(number for number in payloads if number and number + 1 not in payloads)
        return [read_record(*payloads[number]) for number in ends]

    async def by_id(self, internal: Topic, ids: Collection[str]) -> dict[str, ScheduleRecord]:
        """Return the records with these ids that are there, by id."""
        if not ids:
            return {}
        pages = self._pages(internal, ScanFilter(ids=ragged(ids)), payload=True)
        return {one.id: one async for rows in pages for one in decoded(rows)}

    async def rows(self, internal: Topic, cursor: bytes, limit: int) -> tuple[Rows, bytes]:
        """Return the messages of some of all records, with payloads, and where to go on. Empty: there are no more."""
        work = self._store.store.scan(internal, self._clock.now_ms(), ScanFilter(), cursor, limit, True)
        page = await self._store.call("scan", work)
        return page.rows, page.cursor or b""

    async def there(self, topic: Topic, ids: Collection[str], states: Collection[State] = ()) -> set[str]:
        """Return which of the messages with these ids are there, in one of `states` (empty: in any that lives). Expired
        ones are not, whether or not they are removed yet."""
        if not ids:
            return set()
        where = ScanFilter(frozenset(states), ids=ragged(ids))
        found: set[str] = set()
        async for rows in self._pages(topic, where, payload=False):
            living = rows.take(~rows.expired(self._clock.now_ms()))
            found.update(id.decode() for id in living.ids.tolist())
        return found

    async def _pages(self, topic: Topic, where: ScanFilter, payload: bool) -> AsyncIterator[Rows]:
        cursor: bytes = b""
        while True:
            work = self._store.store.scan(topic, self._clock.now_ms(), where, cursor, PAGE_ROWS, payload)
            page = await self._store.call("scan", work)
            yield page.rows
            if not page.cursor:
                return
            cursor = page.cursor

    async def taken(self, topic: Topic, ids: Sequence[str]) -> tuple[set[str], set[str]]:
        """Return which ids messages of the topic have, and which are remembered."""
        # A group that owns nothing asks to cancel. So nothing changes, and the answer tells what is there.
        answers = list(zip(ids, await self._mutated(topic, Operation.CANCEL, ids, NOBODY), strict=True))
        living = {id for id, one in answers if one.status is not Status.NOT_FOUND}
        return living, {id for id, one in answers if one.settled}

    # ── writing ──

    async def put_records(
        self, asked: Sequence[tuple[ScheduleRecord, int]], until_ms: float = math.inf
    ) -> list[OccurrenceAnswer]:
        """Put records, each with its due time, if their numbers are free.

        Return an answer for each. DUPLICATE: the same record is there. EXISTS: another record has the number, or had
        it. UNAVAILABLE: the store could not, or it was not begun by monotonic `until_ms`."""
        internal, answers = await self.make_topic(), []
        for part in parts_of([(record, due_ms, record.encode()) for record, due_ms in asked], lambda one: len(one[2])):
            records, dues, payloads = [list(column) for column in zip(*part, strict=True)]
            puts = _puts(
                ids=[record.id for record in records],
                birth=[self._random_bits(64) | 1 for _ in records],
                due_ms=dues,
                groups=[SCHEDULES_GROUP] * len(records),
                tags=[record.tag for record in records],
                payloads=payloads,
            )
            answers += _listed(await self._put(internal, puts, until_ms))
        gone = OccurrenceAnswer(Status.EXISTS)
        return [gone if one.status is Status.DUPLICATE and one.settled else one for one in answers]

    async def put_messages(
        self, topic: Topic, asked: Sequence[tuple[ScheduleRecord, ScheduledMessage]], until_ms: float = math.inf
    ) -> list[OccurrenceAnswer]:
        """Put the messages of occurrences, and return an answer for each. DUPLICATE: it was put before. `until_ms`: as
        of `put_records`."""
        messages = [message for _, message in asked]
        puts = _puts(
            ids=[one.id for one in messages],
            birth=[one.birth for one in messages],
            due_ms=[one.due_ms for one in messages],
            expires_ms=[one.expires_ms for one in messages],
            groups=[record.specification.group for record, _ in asked],
            tags=[record.specification.tag for record, _ in asked],
            payloads=[one.payload for one in messages],
            headers=[encode_headers(dict(one.headers)) for one in messages],
            replace=[one.replace for one in messages],
        )
        most = topic.settings.max_payload_bytes
        short = puts.headers.sizes <= MAX_HEADERS_BYTES
        fits = short & (puts.payloads.sizes <= most)
        if fits.all():
            return _listed(await self._put(topic, puts, until_ms))
        answers = Answers.blank(len(puts), Status.TOO_LARGE)
        long, large = f"headers may take {MAX_HEADERS_BYTES} bytes", f"the topic takes payloads of up to {most} bytes"
        answers.details = {at: large if one else long for at, one in enumerate(short.tolist())}
        if fits.any():
            answers.assign(np.flatnonzero(fits), await self._put(topic, puts.take(fits), until_ms))
        return _listed(answers)

    async def _put(self, topic: Topic, puts: Puts, until_ms: float) -> Answers:
        """Put, and repeat what is UNKNOWN: with the same births the next answer is definite."""
        answers = await self._intake.put(topic, puts, until_ms, PEER)
        for attempt in range(TRIES):
            unknown = np.flatnonzero(answers.status == Status.UNKNOWN.code)
            if not len(unknown):
                break
            await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
            again = await self._intake.put(topic, puts.take(unknown), until_ms, PEER)
            unsure = (again.status == Status.UNAVAILABLE.code) | (again.status == Status.THROTTLED.code)
            again.status[unsure] = Status.UNKNOWN.code  # of the put before nobody knows
            answers.assign(unknown, again)
        return answers

    async def cancel(self, topic: Topic, ids: Sequence[str], group: str) -> list[OccurrenceAnswer]:
        """Cancel messages that no consumer has. Return an answer for each: OK if it was cancelled, now or before."""
        return await self._mutated(topic, Operation.CANCEL, ids, group, [birth_of(id, 0) for id in ids])

    async def wake(self, ids: Sequence[str]) -> None:
        """Move records to now, so that brokers look at them. Those that are leased are being looked at."""
        await self._mutated(await self.make_topic(), Operation.MOVE, ids, SCHEDULES_GROUP)

    async def _mutated(
        self, topic: Topic, operation: Operation, ids: Sequence[str], group: str, op: Sequence[int] = ()
    ) -> list[OccurrenceAnswer]:
        """Change messages, and repeat it until the outcome is known. `op`: operation ids; empty: new ones."""
        if not ids:
            return []
        count = len(ids)
        mutations = Mutations(
            operation=operation,
            ids=ragged(ids),
            groups=Ragged.repeat(group.encode(), count),
            due_ms=np.full(count, self._clock.now_ms(), dtype=np.int64),
            if_version=np.zeros(count, dtype=np.int64),
            leased=np.zeros(count, dtype=np.bool_),
            op=np.array(op or [self._random_bits(64) | 1 for _ in ids], dtype=np.uint64),
        )
        for attempt in range(TRIES):
            try:
                answers = await self._store.mutate(topic, self._clock.now_ms(), mutations)
                if np.isin(answers.status, [status.code for status in UNSURE]).any():
                    raise StoreUnknown("the store could not change all messages")
                break
            except StoreError:
                if attempt == TRIES - 1:
                    raise
                await asyncio.sleep(FIRST_WAIT_S * 2**attempt)
        if operation is Operation.MOVE:
            self._cluster.scheduled(topic, mutations.ids, mutations.due_ms, perhaps_done(answers), 0)
        return _listed(answers)


def decoded(rows: Rows) -> Iterator[ScheduleRecord]:
    """Yield the records of rows, which have payloads, without those that cannot be read."""
    assert rows.payloads is not None
    for id, payload in zip(rows.ids.tolist(), rows.payloads.tolist(), strict=True):
        record = read_record(id, payload)
        if isinstance(record, ScheduleRecord):
            yield record


def read_record(id: bytes, payload: bytes) -> ScheduleRecord | str:
    """Return the record of a message, or why it cannot be read."""
    try:
        record = ScheduleRecord.decode(payload)
        if record.id.encode() != id:
            raise Invalid(f"it is the record {record.id!r}")
    except Invalid as bad:
        return bad.reason
    except Exception as bad:  # whatever stands there must not stop the other schedules
        return f"{type(bad).__name__}: {bad}"
    return record


def ragged(texts: Iterable[str]) -> Ragged:
    """Return texts as a column."""
    return Ragged.of([text.encode() for text in texts])


def _puts(
    *,
    ids: list[str],
    birth: list[int],
    due_ms: list[int],
    groups: list[str],
    tags: list[str],
    payloads: list[bytes],
    expires_ms: list[int] | None = None,
    headers: list[bytes] | None = None,
    replace: list[bool] | None = None,
) -> Puts:
    count = len(ids)
    content, encoded = Ragged.of(payloads), Ragged.of(headers or [b""] * count)
    return Puts.filled(
        count,
        ids=ragged(ids),
        birth=np.array(birth, dtype=np.uint64),
        due_ms=np.array(due_ms, dtype=np.int64),
        expires_ms=np.array(expires_ms or [0] * count, dtype=np.int64),
        groups=ragged(groups),
        tags=ragged(tags),
        payload_sum=payload_sums(content, encoded),
        payloads=content,
        headers=encoded,
        replace=np.array(replace or [False] * count, dtype=np.bool_),
    )


def parts_of(asked: Sequence[T], size_of: Callable[[T], int], most: int | None = None) -> Iterator[list[T]]:
    """Yield what one call puts: about PART_BYTES, and at most `most` of them."""
    part: list[T] = []
    size = 0
    for one in asked:
        if part and (len(part) == most or size + size_of(one) > PART_BYTES):
            yield part
            part, size = [], 0
        part.append(one)
        size += size_of(one)
    if part:
        yield part


def _listed(answers: Answers) -> list[OccurrenceAnswer]:
    foreign = (answers.status == Status.DUPLICATE.code) & (answers.settled == 0) & (answers.repeat == 0)
    columns = (answers.status, answers.settled, foreign, answers.version, answers.due_ms)
    return [
        OccurrenceAnswer(Status.of(status), answers.details.get(at, ""), bool(settled), other, version, due_ms)
        for at, (status, settled, other, version, due_ms) in enumerate(
            zip(*(one.tolist() for one in columns), strict=True)
        )
    ]
