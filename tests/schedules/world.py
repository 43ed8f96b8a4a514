"""A world in which a schedule is looked at and edited: a store of records, a topic that remembers, brokers that crash
at each step, and editors that race with them. Time is a number; everything follows from a seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from timeline.model import Status
from timeline.schedules import looks
from timeline.schedules.edits import Edit, created, deleted, edited
from timeline.schedules.looks import ScheduledMessage
from timeline.schedules.record import ScheduleRecord
from timeline.schedules.specification import Specification

LEASE_MS, CHAIN_MS = 30_000, 20
BEGIN_MS = 1_795_000_000_000
Steps = Iterator[None]


@dataclass
class Delivered:
    """A message that reached a consumer."""

    id: str
    at_ms: int
    due_ms: int
    when_ms: int
    payload: bytes


@dataclass
class Stored:
    """A message in the target topic. `until_ms`: until when a consumer works on it; 0: none has it."""

    message: ScheduledMessage
    group: str
    until_ms: int = 0


@dataclass
class Held:
    """A record's message. `due_ms` moves with leases."""

    payload: bytes
    due_ms: int
    writer: int
    leased: bool = False


@dataclass(frozen=True)
class Committed:
    """A record that was put, and what it was made of."""

    before: ScheduleRecord | None
    record: ScheduleRecord
    now_ms: int
    edit: bool


@dataclass
class World:
    """One schedule, its records and its topic. `work_ms`: how long a consumer works on each message."""

    random: random.Random
    work_ms: int = 0
    mistake: str = ""
    now_ms: int = BEGIN_MS
    topic: dict[str, Stored] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    cancelled: set[str] = field(default_factory=set)
    delivered: list[Delivered] = field(default_factory=list)
    records: dict[int, Held] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    history: list[Committed] = field(default_factory=list)
    actors: list[Steps] = field(default_factory=list)
    ended_ms: dict[int, int] = field(default_factory=dict)
    """When each record ended."""
    kept: list[int] = field(default_factory=list)
    """The numbers of edits that kept what was pending."""
    carried_out_ms: dict[int, int] = field(default_factory=dict)
    """When the look at each record had cancelled and put."""
    writers: int = 0
    busy: bool = False
    """Whether the topic answers THROTTLED."""

    # The topic.

    def put(self, message: ScheduledMessage, group: str) -> Status:
        """Put a message, by the rules of a topic that remembers."""
        if self.busy and self.random.random() < 0.7:
            return Status.THROTTLED
        if message.id in self.settled:
            return Status.DUPLICATE
        stands = self.topic.get(message.id)
        if stands is not None:
            if stands.message.birth == message.birth:
                return Status.DUPLICATE
            if stands.group != group:
                return Status.FORBIDDEN
            if not message.replace:
                same = (stands.message.payload, stands.message.headers) == (message.payload, message.headers)
                return Status.DUPLICATE if same else Status.EXISTS
            if stands.until_ms > self.now_ms:
                return Status.LEASED
        self.topic[message.id] = Stored(message, group)
        return Status.OK

    def cancel(self, id: str, group: str) -> Status:
        """Cancel a message, unless a consumer has it."""
        if id in self.cancelled:
            return Status.OK
        stands = self.topic.get(id)
        if stands is None:
            return Status.NOT_FOUND
        if stands.group != group:
            return Status.FORBIDDEN
        if stands.until_ms > self.now_ms:
            return Status.LEASED
        del self.topic[id]
        self.settled.add(id)
        self.cancelled.add(id)
        return Status.OK

    def go_to(self, now_ms: int) -> None:
        """Let time pass, and consumers have what is due in between."""
        while True:
            coming = [
                (one.until_ms or max(one.message.due_ms, self.now_ms), one.message.id) for one in self.topic.values()
            ]
            if not coming or min(coming)[0] > now_ms:
                break
            self.now_ms, id = min(coming)
            stored = self.topic[id]
            if not stored.until_ms:
                one = stored.message
                self.delivered.append(Delivered(id, one.at_ms, one.due_ms, self.now_ms, one.payload))
                stored.until_ms = self.now_ms + self.work_ms
            if stored.until_ms <= self.now_ms:
                del self.topic[id]
                self.settled.add(id)
        self.now_ms = max(self.now_ms, now_ms)

    # The records.

    def newest(self) -> ScheduleRecord | None:
        """Return the newest record that there is."""
        return ScheduleRecord.decode(self.records[max(self.records)].payload) if self.records else None

    def commit(self, edit: Edit, before: ScheduleRecord | None, writer: int, made_ms: int, is_edit: bool) -> Status:
        """Put a record, if its number is free."""
        number = edit.record.number
        if number in self.ended:
            return Status.DUPLICATE
        held = self.records.get(number)
        if held is not None:
            return Status.DUPLICATE if held.writer == writer else Status.EXISTS
        self.records[number] = Held(edit.record.encode(), edit.due_ms, writer)
        self.history.append(Committed(before, edit.record, made_ms, is_edit))
        return Status.OK

    def release(self, number: int, due_ms: int) -> None:
        """End the lease of a record."""
        if (held := self.records.get(number)) is not None:
            held.due_ms, held.leased = due_ms, False

    def wake(self, number: int) -> None:
        """Move a record to now. One that is leased is being looked at."""
        if (held := self.records.get(number)) is not None and not held.leased:
            held.due_ms = min(held.due_ms, self.now_ms)

    def end(self, number: int) -> None:
        """End a record."""
        if self.records.pop(number, None) is not None:
            self.ended.add(number)
            self.ended_ms[number] = self.now_ms

    # Those who act.

    def look(self, number: int) -> Steps:
        """A broker that leased the record looks at it. Each `yield` is where it may crash, and where others act."""
        record = ScheduleRecord.decode(self.records[number].payload)
        self.writers += 1
        writer, made_ms = self.writers, self.now_ms
        yield
        if number - 1 in self.records:
            self.release(number, self.now_ms + CHAIN_MS)
            self.wake(number - 1)
            return
        if number + 1 in self.records:
            self.end(number)
            return
        previous = self.topic.get(looks.watched(record))
        made_ms = self.now_ms
        look = looks.plan(record, made_ms, previous is not None)
        if self.mistake == "forgets cancels":
            look = looks.Look(look.messages, look.successor, look.due_ms, look.now_ms, look.over)
        if self.mistake == "puts what it decides" and look.successor is not None:
            ahead = looks.plan(look.successor, made_ms).messages
            rest = dataclasses.replace(look.successor, decided=())
            look = looks.Look((*look.messages, *ahead), rest, look.due_ms, look.now_ms, look.over, look.cancel)
        if self.mistake == "successor first" and look.successor is not None:
            made = look.completed([Status.OK] * len(look.messages))
            assert made is not None
            self.commit(Edit(made, look.due_ms), record, writer, made_ms, False)
            self.end(number)
            yield
        delivered: list[str] = []
        for gone in look.cancel:
            status = self.cancel(gone.id, gone.group)
            if status is Status.LEASED or (status is Status.NOT_FOUND and gone.id in self.settled):
                delivered.append(gone.id)
        look = look.after(delivered)
        yield
        put: list[Status] = []
        for message in look.messages:
            put.append(self.put(message, record.specification.group))
            if self.random.random() < 0.3:
                yield
        yield
        if look.must_repeat(put):
            self.release(number, self.now_ms + 1_000)
            return
        self.carried_out_ms.setdefault(number, self.now_ms)
        if look.successor is None:
            if look.over:
                self.end(number)
            else:
                self.release(number, look.due_ms)
            return
        if self.mistake == "successor first":
            return
        made = look.completed(put)
        assert made is not None
        self.commit(Edit(made, look.due_ms), record, writer, made_ms, False)
        yield
        self.end(number)

    def edit(self, make: Callable[[ScheduleRecord, int], Edit], keep: bool = False) -> Steps:
        """An editor, who tries again if somebody else was faster."""
        self.writers += 1
        writer = self.writers
        while (record := self.newest()) is not None and not record.deleted:
            made_ms = self.now_ms
            edit = make(record, made_ms)
            yield
            if self.commit(edit, record, writer, made_ms, True) is not Status.OK:
                continue
            if keep:
                self.kept.append(edit.record.number)
            if self.random.random() < 0.5:
                yield
                for gone in edit.record.cancelling:
                    self.cancel(*gone)
            yield
            self.wake(record.number)
            return

    def begin(self, specification: Specification, number: int = 1) -> None:
        """Create the schedule."""
        edit = created(specification, self.now_ms, number)
        self.writers += 1
        assert self.commit(edit, None, self.writers, self.now_ms, True) is Status.OK

    def lease(self) -> bool:
        """Lease a record that is due. Return whether there was one."""
        due = [number for number, held in self.records.items() if held.due_ms <= self.now_ms]
        if not due:
            return False
        number = self.random.choice(due)
        self.records[number].due_ms = self.now_ms + LEASE_MS
        self.records[number].leased = True
        actor = self.look(number)
        next(actor)  # which reads the record
        self.actors.append(actor)
        return True

    def step(self, crash: float = 0.0) -> bool:
        """Let one of those who act go on, or crash. Return whether there is one."""
        if not self.actors:
            return False
        actor = self.random.choice(self.actors)
        if self.random.random() < crash:
            self.actors.remove(actor)
            return True
        try:
            next(actor)
        except StopIteration:
            self.actors.remove(actor)
        return True

    def run_until(self, until_ms: int, crash: float = 0.0, pace_ms: int = 3) -> None:
        """Let brokers work until a time. Between any two steps a few ms may pass."""
        for _ in range(200_000):
            if self.now_ms >= until_ms and not self.actors:
                return
            self.lease()
            if self.step(crash):
                self.go_to(self.now_ms + self.random.randrange(pace_ms + 1))
            else:
                coming = min((held.due_ms for held in self.records.values()), default=until_ms)
                if coming > until_ms:
                    self.go_to(until_ms)
                    return
                self.go_to(max(coming, self.now_ms))
        raise AssertionError("it does not come to rest")

    def outage(self, length_ms: int) -> None:
        """All brokers die, and nobody acts for a time."""
        self.actors.clear()
        self.go_to(self.now_ms + length_ms)

    def update(self, keep: bool = False, **fields: Any) -> None:
        """Somebody edits the schedule."""
        self.actors.append(
            self.edit(lambda record, now_ms: edited(record, now_ms, record.specification.changed(**fields), keep), keep)
        )

    def delete(self, keep: bool = False) -> None:
        """Somebody deletes the schedule."""
        self.actors.append(self.edit(lambda record, now_ms: deleted(record, now_ms, keep), keep))
