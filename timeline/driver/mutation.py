"""What a producer does to messages that are there: move, cancel, revive, purge; one, many, or all of a tag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.driver.batch import durations, encode_ids, instants
from timeline.driver.changing import ID_OVERHEAD_BYTES, Changing
from timeline.driver.line import Line
from timeline.driver.link import Link
from timeline.driver.message import asked_time, encode_id, encode_tag
from timeline.driver.parcel import Columns, Many, Parcel
from timeline.driver.receipts import Receipt, Receipts, receipt_of
from timeline.driver.times import Duration, When, duration_ms, instant_ms, shift_ms
from timeline.errors import Invalid
from timeline.model import Operation, Status
from timeline.wire import MutateFlag, MutateTag, TagMutated, decode_as, encode

FRAME_IDS = 10_000


@dataclass(slots=True)
class TagProgress:
    """How far a call by tag has come: `counts` by status, `done` messages in all, `finished` when the walk is over.

    Handed to `progress=`; a walk that broke off goes on from the last one with `resume=`.
    """

    counts: dict[Status, int] = field(default_factory=dict)
    finished: bool = False
    op: int = 0
    cursor: bytes = b""
    started_ms: int = 0
    at_ms: int = 0

    @property
    def done(self) -> int:
        """Messages met so far."""
        return sum(self.counts.values())


class Mutations:
    """The part of a producer that changes messages that are there. See `Producer`."""

    closed = True
    """Until it is made: one that could not be has nothing to end."""

    def __init__(self, link: Link, topic: str, group: str) -> None:
        self.topic, self.group = topic, group
        self.closed = False
        self._link = link
        self._epoch = link.epoch
        self._calls: dict[Operation, Changing] = {}

    def _start(self) -> None:
        raise AssertionError("a Producer says how it starts")

    def _renew(self) -> None:
        self._calls = {}

    async def _mutating_idle(self) -> None:
        for calls in self._calls.values():
            await calls.line.idle()

    async def _stop_mutating(self) -> None:
        for calls in self._calls.values():
            await calls.stop()

    def _line(self, operation: Operation) -> Line:
        calls = self._calls.get(operation)
        if calls is None:
            calls = self._calls[operation] = Changing(self._link, self.topic, self.group, operation)
        calls.start()
        return calls.line

    async def move(
        self,
        id: str,
        *,
        at: When | None = None,
        in_: Duration | None = None,
        if_version: int | None = None,
        timeout: Duration | None = None,
    ) -> Receipt:
        """Moves a message to another due. `if_version`: only when it stands at that version, else Fenced.

        Raises NotFound, Forbidden (another group's), Fenced, Leased (a consumer has it), Dead, Expired, Invalid,
        Throttled, Unavailable, Unknown, Closed.
        """
        self._start()
        time_ms, relative = asked_time(at, in_)
        flags = MutateFlag.IN if relative else MutateFlag(0)
        return await self._one(Operation.MOVE, id, time_ms, flags, if_version, timeout)

    async def cancel(
        self, id: str, *, leased: bool = False, if_version: int | None = None, timeout: Duration | None = None
    ) -> Receipt:
        """Deletes a message that is not leased; `leased=True`: also one that a consumer has, whose settle then answers
        NOT_FOUND. Raises like `move`; Unknown also when the message is gone after an answer was lost: it was
        cancelled, or delivered first."""
        self._start()
        flags = MutateFlag.LEASED if leased else MutateFlag(0)
        return await self._one(Operation.CANCEL, id, 0, flags, if_version, timeout)

    async def _one(
        self,
        operation: Operation,
        id: str,
        time_ms: int,
        flags: MutateFlag,
        if_version: int | None,
        timeout: Duration | None,
    ) -> Receipt:
        encoded = encode_id(id)
        entry = (encoded, time_ms, int(flags), _version(if_version), self._link.ids.number())
        nbytes = len(encoded) + ID_OVERHEAD_BYTES
        answer = await self._line(operation).single(entry, nbytes, self._link.patience_ms(timeout))
        return receipt_of(encoded, answer, operation)

    async def move_many(
        self,
        ids: Iterable[str] | Iterable[bytes],
        *,
        at: When | Sequence[When] | Int64 | None = None,
        in_: Duration | Sequence[Duration] | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """Moves many messages, to one due or to one each (a list, or an integer array of milliseconds UTC). Receipts in
        the order of `ids`."""
        self._start()
        encoded = encode_ids(ids)
        times, relative = _times(at, in_, len(encoded))
        flags = MutateFlag.IN if relative else MutateFlag(0)
        return await self._many(Operation.MOVE, encoded, times, flags, timeout)

    async def cancel_many(
        self, ids: Iterable[str] | Iterable[bytes], *, leased: bool = False, timeout: Duration | None = None
    ) -> Receipts:
        """Cancels many messages. Receipts in the order of `ids`."""
        self._start()
        flags = MutateFlag.LEASED if leased else MutateFlag(0)
        return await self._many(Operation.CANCEL, encode_ids(ids), None, flags, timeout)

    async def revive(
        self,
        ids: str | Iterable[str] | Iterable[bytes],
        *,
        at: When | None = None,
        in_: Duration | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """Puts dead letters back on the timeline, with their deliveries counted from 0 again."""
        self._start()
        encoded = encode_ids([ids] if isinstance(ids, str) else ids)
        times, relative = _times(at, in_, len(encoded))
        flags = MutateFlag.IN if relative else MutateFlag(0)
        return await self._many(Operation.REVIVE, encoded, times, flags, timeout)

    async def purge(self, ids: str | Iterable[str] | Iterable[bytes], *, timeout: Duration | None = None) -> Receipts:
        """Deletes dead letters for good."""
        self._start()
        encoded = encode_ids([ids] if isinstance(ids, str) else ids)
        return await self._many(Operation.PURGE, encoded, None, MutateFlag(0), timeout)

    async def _many(
        self, operation: Operation, ids: Ragged, times: Any, flags: MutateFlag, timeout: Duration | None
    ) -> Receipts:
        count = len(ids)
        many = Many(count, self._link.patience_ms(timeout), self._link.clock, self._link.trouble)
        columns: Columns = {
            "ids": ids,
            "time_ms": np.zeros(count, dtype=np.int64) if times is None else times,
            "flags": np.full(count, int(flags), dtype=np.uint8),
            "if_version": np.zeros(count, dtype=np.int64),
            "op": self._link.ids.numbers(count),
        }
        line = self._line(operation)
        for start in range(0, count, FRAME_IDS):
            part = slice(start, min(count, start + FRAME_IDS))
            cut = {name: column[part] for name, column in columns.items()}
            positions = np.arange(part.start, part.stop)
            size = cut["ids"].nbytes + ID_OVERHEAD_BYTES * len(positions)
            line.add(Parcel(cut, operation, many, positions, size))
        answers = await many.finished()
        many.check_heard()
        return Receipts(ids, answers, many.waits_ms, operation)

    async def move_tag(
        self,
        tag: str,
        *,
        at: When | None = None,
        in_: Duration | None = None,
        by: Duration | None = None,
        dry_run: bool = False,
        progress: Callable[[TagProgress], object] | None = None,
        resume: TagProgress | None = None,
        timeout: Duration | None = None,
    ) -> TagProgress:
        """Moves every message of `tag` that was there at the start: to one due (`at`, `in_`), or `by` a shift, which
        may be negative ("-2h"). Works in chunks; `timeout` is for each. `dry_run`: only counts. Answers the counts by
        status.

        `progress` is called after each chunk; when the call raises, the last progress goes on with `resume=`.
        """
        self._start()
        if sum(value is not None for value in (at, in_, by)) != 1:
            raise Invalid("say one of at= (a point in time), in_= (from now) or by= (a shift)")
        frame = self._by_tag(Operation.MOVE, tag, dry_run)
        if at is not None:
            frame = replace(frame, at_ms=instant_ms(at))
        elif in_ is not None:
            frame = replace(frame, in_ms=duration_ms(in_))
        elif by is not None:
            frame = replace(frame, by_ms=shift_ms(by))
        return await self._walk(frame, progress, resume, timeout)

    async def cancel_tag(
        self,
        tag: str,
        *,
        leased: bool = False,
        dry_run: bool = False,
        progress: Callable[[TagProgress], object] | None = None,
        resume: TagProgress | None = None,
        timeout: Duration | None = None,
    ) -> TagProgress:
        """Cancels every message of `tag` that was there at the start. See `move_tag`."""
        self._start()
        _check_bool(leased, "leased")
        frame = replace(self._by_tag(Operation.CANCEL, tag, dry_run), leased=leased)
        return await self._walk(frame, progress, resume, timeout)

    def _by_tag(self, operation: Operation, tag: object, dry_run: bool) -> MutateTag:
        encoded = encode_tag(tag)
        if not encoded:
            raise Invalid("a call by tag needs a tag: None or empty would mean everything")
        _check_bool(dry_run, "dry_run")
        return MutateTag(self.topic, self.group, operation, encoded, self._link.ids.number(), dry_run=dry_run)

    async def _walk(
        self,
        frame: MutateTag,
        progress: Callable[[TagProgress], object] | None,
        resume: TagProgress | None,
        timeout: Duration | None,
    ) -> TagProgress:
        told = replace(resume, counts=dict(resume.counts)) if resume is not None else TagProgress(op=frame.op)
        while not told.finished:
            deadline = self._link.deadline(timeout)
            frame = replace(frame, op=told.op, cursor=told.cursor, started_ms=told.started_ms)
            if told.at_ms:
                frame = replace(frame, at_ms=told.at_ms, in_ms=-1)
            data = await self._link.channel.unary("Mutate", partial(_timed, frame), deadline)
            chunk = decode_as(data, TagMutated)
            for code, many in chunk.counts.items():
                status = Status.of(code)
                told.counts[status] = told.counts.get(status, 0) + many
            told.cursor, told.started_ms, told.at_ms = chunk.cursor, chunk.started_ms, chunk.at_ms
            told.finished = not chunk.cursor
            if progress is not None:
                progress(replace(told, counts=dict(told.counts)))
        return told


def _timed(frame: MutateTag, timeout_ms: int) -> bytes:
    return encode(replace(frame, timeout_ms=timeout_ms))


def _times(at: Any, in_: Any, count: int) -> tuple[Any, bool]:
    """`at=` or `in_=`, one for all or one each, as a column, and whether it counts from the broker's now."""
    if (at is None) == (in_ is None):
        raise Invalid("say either at= (points in time) or in_= (how long from now), one of the two")
    return (durations(in_, count), True) if at is None else (instants(at, count), False)


def _check_bool(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise Invalid(f"{name} must be True or False, not {value!r:.60}")


def _version(if_version: int | None) -> int:
    if if_version is None:
        return 0
    if isinstance(if_version, bool) or not isinstance(if_version, int) or not 1 <= if_version < 2**63:
        raise Invalid(f"if_version must be a version, a whole number from 1, not {if_version!r:.40}")
    return if_version
