"""Changes to messages that are stored: move, cancel, revive, purge. One message, many, or all of a tag."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from timeline.columns import Int64, UInt64
from timeline.driver.batch import durations, encode_ids, instants, is_number, numbers_column
from timeline.driver.message import about, asked_time, encode_id, encode_tag
from timeline.driver.produce.request_queue import (
    BatchCall,
    Columns,
    RequestBatch,
    RequestQueue,
    UnaryCalls,
    calls_of,
)
from timeline.driver.receipts import Receipt, Receipts, receipt_of
from timeline.driver.tasks import Closing
from timeline.driver.times import Duration, When, duration_ms, instant_ms, shift_ms, shown
from timeline.driver.transport.channel import AttemptState, ClientContext
from timeline.errors import Invalid, TimelineError, Unknown
from timeline.model import Answers, Operation, Status
from timeline.wire import Judgement, Mutate, Mutated, MutateFlag, MutateTag, TagMutated, decode_as, encode

log = logging.getLogger("timeline.driver")

ID_OVERHEAD_BYTES = 48
NO_FLAGS = MutateFlag(0)


class MutateCalls(UnaryCalls):
    """The queue of one operation of a producer. Its batches go as Mutate calls."""

    method = "Mutate"

    def __init__(self, context: ClientContext, topic: str, group: str, operation: Operation) -> None:
        self._topic, self._group, self._operation = topic, group, operation
        queue = RequestQueue(calls_of(Mutate, operation), context.clock, context.random, context.trouble)
        super().__init__(context, queue, f"mutating {topic}", f"the changes of {topic}")

    def frame(self, batch: RequestBatch, timeout_ms: int) -> bytes:
        asked = self._topic, self._group, self._operation
        return encode(Mutate(*asked, timeout_ms=timeout_ms, **batch.columns))

    def answers(self, data: bytes) -> tuple[Answers, int]:
        mutated = decode_as(data, Mutated)
        return mutated.answers, mutated.retry_after_ms


Asked: TypeAlias = dict[str, Any]
"""The arguments of a call by tag, by name. A call that resumes must have the same."""
TOKEN_OF = "timeline-tag-1"
MAX_TOKEN_BYTES = 65_536
"""Longer text, packed or unpacked, is no token: its cursor, tag and names have a few KiB at most."""
NO_TOKEN = (
    "this is no resume token: it is damaged or cut off. Give it as it was printed: `progress.resume` in Python, "
    "after --resume in a shell"
)
OPERATIONS_BY_TAG = {Operation.MOVE: "move", Operation.CANCEL: "cancel"}


@dataclass(slots=True)
class TagProgress:
    """How far a call by tag has come. `counts`: messages by status. `finished`: the call is done. `total`: messages of
    the tag at the start, counted for a cancel only, else 0.

    `progress=` receives it, and an error has it as `error.progress`. A call that broke off continues with `resume=`,
    which takes this object or its token `.resume`.
    """

    counts: dict[Status, int] = field(default_factory=dict)
    finished: bool = False
    op: int = 0
    cursor: bytes = b""
    started_ms: int = 0
    at_ms: int = 0
    total: int = 0
    asked: Asked = field(default_factory=dict)

    def __repr__(self) -> str:
        told = [f"{count} {status.value}" for status, count in self.counts.items()]
        return f"TagProgress({', '.join([*told, 'finished' if self.finished else 'not finished'])})"

    @property
    def changed(self) -> int:
        """Messages moved or cancelled so far. In a dry run: those that would be."""
        return self.counts.get(Status.OK, 0)

    @property
    def done(self) -> int:
        """Messages processed so far, refused ones included."""
        return sum(self.counts.values())

    @property
    def resume(self) -> str:
        """A token to continue from here, on one line. It works in another process, at another broker, hours later."""
        told = asdict(self) | {"is": TOKEN_OF, "cursor": self.cursor.hex()}
        packed = zlib.compress(json.dumps(told, separators=(",", ":")).encode(), 9)  # ends with a checksum
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def of(cls, resume: TagProgress | str) -> TagProgress:
        """Return a copy of a TagProgress, or read a token. Raise Invalid for anything else."""
        if isinstance(resume, TagProgress):
            return resume.copy()
        if not isinstance(resume, str):
            raise Invalid(f"resume= takes a TagProgress or its token (.resume), not {shown(resume)}")
        text = resume.strip()
        if len(text) > MAX_TOKEN_BYTES:
            raise Invalid(NO_TOKEN)
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
            told = json.loads(zlib.decompressobj().decompress(packed, MAX_TOKEN_BYTES))
            if told.pop("is") != TOKEN_OF:
                raise Invalid(NO_TOKEN)
            counts = {Status(status): many for status, many in told.pop("counts").items()}
            progress = cls(counts, cursor=bytes.fromhex(told.pop("cursor")), **told)
        except (binascii.Error, zlib.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as bad:
            raise Invalid(NO_TOKEN) from bad
        if not progress._plausible():
            raise Invalid(NO_TOKEN)
        return progress

    def _plausible(self) -> bool:
        """Return whether each value has a type and range that a call may have."""
        numbers = (*self.counts.values(), self.op, self.started_ms, self.at_ms, self.total)
        in_range = all(type(number) is int and 0 <= number < 2**64 for number in numbers)
        return in_range and type(self.finished) is bool and type(self.asked) is dict

    def copy(self) -> TagProgress:
        """Return a copy as of now."""
        return replace(self, counts=dict(self.counts))

    def check(self, asked: Asked) -> None:
        """Raise Invalid unless the resumed call has the same arguments."""
        for name, now in asked.items():
            before = self.asked.get(name)
            if before != now:
                raise Invalid(
                    f"this resume token belongs to another call: {name} was {before!r:.80} there, and is {now!r:.80} "
                    "here. Repeat the call as it was, with its token"
                )


class MutationCalls(Closing):
    """The part of a producer that changes stored messages. See `Producer`."""

    closed = True
    """Until `__init__` is done: a producer that could not be made has nothing to end."""

    def __init__(self, context: ClientContext, topic: str, group: str) -> None:
        self.topic, self.group = topic, group
        self.closed = False
        self._context = context
        self._epoch = context.epoch
        self._calls: dict[Operation, MutateCalls] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.topic!r}, group {self.group!r})"

    @abstractmethod
    def _start(self) -> None:
        """Prepare each call."""

    def _queue(self, operation: Operation) -> RequestQueue:
        calls = self._calls.get(operation)
        if calls is None:
            calls = self._calls[operation] = MutateCalls(self._context, self.topic, self.group, operation)
        calls.start()
        return calls.queue

    async def move(
        self,
        id: str,
        *,
        at: When | None = None,
        in_: Duration | None = None,
        if_version: int | None = None,
        operation_id: int | None = None,
        timeout: Duration | None = None,
    ) -> Receipt:
        """Move a message to another due time. `if_version`: only if the message has that version, else raise Fenced.

        `operation_id` (64 bits, not 0): a repeat of this call has the same one, is recognised, and changes nothing.
        Default: random. So a program that starts again can repeat a call whose outcome it does not know.

        Raise NotFound, Forbidden (another group's), Fenced, Leased (a consumer has it), Dead, Expired, Invalid,
        Throttled, Unavailable, Unknown or Closed.
        """
        self._start()
        with about(id):
            time_ms, relative = asked_time(at, in_)
        return await self._one(Operation.MOVE, id, time_ms, _in_flag(relative), if_version, operation_id, timeout)

    async def cancel(
        self,
        id: str,
        *,
        leased: bool = False,
        if_version: int | None = None,
        operation_id: int | None = None,
        timeout: Duration | None = None,
    ) -> Receipt:
        """Delete a message that is not leased. `leased=True`: also one that a consumer has; its settle then answers
        NOT_FOUND.

        `operation_id`: see `move`. A repeat of a cancel is recognised while the topic remembers the id; else it raises
        NotFound.

        Raise like `move`. Unknown is also raised if the message is gone after an answer was lost: it was cancelled, or
        delivered first.
        """
        self._start()
        return await self._one(Operation.CANCEL, id, 0, _leased_flag(leased), if_version, operation_id, timeout)

    async def _one(
        self,
        operation: Operation,
        id: str,
        time_ms: int,
        flags: MutateFlag,
        if_version: int | None,
        operation_id: int | None,
        timeout: Duration | None,
    ) -> Receipt:
        with about(id):
            encoded, version, patience_ms = encode_id(id), _version(if_version), self._context.patience_ms(timeout)
            op = self._number(operation_id, "operation_id")
        entry = (encoded, time_ms, int(flags), version, op)
        answer = await self._queue(operation).single(entry, len(encoded) + ID_OVERHEAD_BYTES, patience_ms)
        return receipt_of(encoded, answer, operation)

    def _number(self, given: int | None, name: str) -> int:
        """Return the birth or operation id of a call. Default: random. Raise Invalid for one that cannot be."""
        if given is None:
            return self._context.ids.number()
        if not is_number(given):
            raise Invalid(f"{name} must be an int of 64 bits, not 0 or negative, not {shown(given)}")
        return int(given)

    async def move_many(
        self,
        ids: Iterable[str] | Iterable[bytes],
        *,
        at: When | Sequence[When] | Int64 | None = None,
        in_: Duration | Sequence[Duration] | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """Move many messages, to one due time or to one each (a list, or an integer array of milliseconds UTC). Return
        receipts in the order of `ids`. An id or a time out of range is INVALID; the others are moved."""
        return await self._many(Operation.MOVE, ids, (at, in_), timeout=timeout)

    async def cancel_many(
        self, ids: Iterable[str] | Iterable[bytes], *, leased: bool = False, timeout: Duration | None = None
    ) -> Receipts:
        """Cancel many messages. Return receipts in the order of `ids`."""
        return await self._many(Operation.CANCEL, ids, flags=_leased_flag(leased), timeout=timeout)

    async def revive(
        self,
        ids: str | Iterable[str] | Iterable[bytes],
        *,
        at: When | Sequence[When] | Int64 | None = None,
        in_: Duration | Sequence[Duration] | None = None,
        operation_ids: Sequence[int] | UInt64 | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """Put dead letters back on the timeline, at one due time or at one each; default: now. Their deliveries count
        from 0 again.

        `operation_ids`: one for each letter, by which a repeat is recognised; see `move`.
        """
        listed = [ids] if isinstance(ids, str) else ids
        when = (at, 0 if at is None and in_ is None else in_)
        return await self._many(Operation.REVIVE, listed, when, operation_ids=operation_ids, timeout=timeout)

    async def purge(self, ids: str | Iterable[str] | Iterable[bytes], *, timeout: Duration | None = None) -> Receipts:
        """Delete dead letters for good."""
        return await self._many(Operation.PURGE, [ids] if isinstance(ids, str) else ids, timeout=timeout)

    async def _many(
        self,
        operation: Operation,
        ids: Any,
        when: tuple[Any, Any] | None = None,
        *,
        flags: MutateFlag = NO_FLAGS,
        operation_ids: Sequence[int] | UInt64 | None = None,
        timeout: Duration | None,
    ) -> Receipts:
        """Change many messages. `when`: `at=` and `in_=`, if the operation has a time."""
        self._start()
        bad = Judgement()
        encoded = encode_ids(ids, bad)
        count = len(encoded)
        times = np.zeros(count, dtype=np.int64)
        if when is not None:
            times, relative = _times(*when, count, bad)
            flags |= _in_flag(relative)
        ops = (
            self._context.ids.numbers(count)
            if operation_ids is None
            else numbers_column(operation_ids, count, "operation_ids")
        )
        queue = self._queue(operation)
        many = BatchCall(queue, count, self._context.patience_ms(timeout), bad)
        columns: Columns = {
            "ids": encoded,
            "time_ms": times,
            "flags": np.full(count, int(flags), dtype=np.uint8),
            "if_version": np.zeros(count, dtype=np.int64),
            "op": ops,
        }
        many.send(columns, operation, encoded.sizes + ID_OVERHEAD_BYTES)
        answers = await many.finished()
        many.check_heard()
        return Receipts(encoded, answers, many.waits_ms, operation)

    async def move_tag(
        self,
        tag: str,
        *,
        at: When | None = None,
        in_: Duration | None = None,
        by: Duration | None = None,
        dry_run: bool = False,
        progress: Callable[[TagProgress], object] | None = None,
        resume: TagProgress | str | None = None,
        operation_id: int | None = None,
        timeout: Duration | None = None,
    ) -> TagProgress:
        """Move every message that has `tag` at the start: to one due time (`at`, `in_`), or by a shift (`by`), which
        may be negative ("-2h"). Return the counts by status.

        It works in chunks; `timeout` is for each. `dry_run`: only count. `progress` is called at the start and after
        each chunk.

        If the call raises, `error.progress` says how far it came. The same call with `resume=error.progress`, or with
        its token `error.progress.resume`, continues there. A new call would shift the same messages again, unless it
        has the same `operation_id` (see `move`). Raise Unavailable if nothing was changed, and Unknown if a part was.
        """
        self._start()
        if sum(value is not None for value in (at, in_, by)) != 1:
            raise Invalid("say one of at= (a point in time), in_= (from now) or by= (a shift)")
        frame = self._by_tag(Operation.MOVE, tag, dry_run, operation_id)
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
        resume: TagProgress | str | None = None,
        operation_id: int | None = None,
        timeout: Duration | None = None,
    ) -> TagProgress:
        """Cancel every message that has `tag` at the start. See `move_tag`.

        UNKNOWN counts messages that were there at the start and were not found after an answer was lost, or after a
        `resume`. They were cancelled, or delivered first.
        """
        self._start()
        _check_bool(leased, "leased")
        frame = replace(self._by_tag(Operation.CANCEL, tag, dry_run, operation_id), leased=leased)
        return await self._walk(frame, progress, resume, timeout)

    def _by_tag(self, operation: Operation, tag: object, dry_run: bool, operation_id: int | None) -> MutateTag:
        encoded = encode_tag(tag)
        if not encoded:
            raise Invalid("a call by tag needs a tag: None or empty would mean everything")
        _check_bool(dry_run, "dry_run")
        op = self._number(operation_id, "operation_id")
        return MutateTag(self.topic, self.group, operation, encoded, op, dry_run=dry_run)

    async def _walk(
        self,
        frame: MutateTag,
        progress: Callable[[TagProgress], object] | None,
        resume: TagProgress | str | None,
        timeout: Duration | None,
    ) -> TagProgress:
        asked = _asked(frame)
        told = TagProgress(op=frame.op, asked=asked) if resume is None else TagProgress.of(resume)
        told.check(asked)
        walk = _TagWalk(self._context, replace(frame, op=told.op), told, progress or (lambda _: None), timeout)
        walk.unsure, before = resume is not None, told.done
        try:
            await walk.run()
        except TimelineError as error:
            raise _broken_off(error, told, not frame.dry_run and told.done > before) from error
        return told


@dataclass(slots=True)
class _TagWalk:
    """One call by tag, chunk by chunk. `told`: how far it has come. `unsure`: an answer was lost, or it was resumed."""

    context: ClientContext
    frame: MutateTag
    told: TagProgress
    progress: Callable[[TagProgress], object]
    timeout: Duration | None
    unsure: bool = False

    async def run(self) -> None:
        """Ask for all chunks that are left."""
        told = self.told
        if not told.started_ms and not self.frame.dry_run:
            await self._begin()
        while not told.finished:
            attempt = AttemptState()
            chunk = await self._chunk(replace(self.frame, cursor=told.cursor), told, attempt)
            self.unsure = self.unsure or attempt.unsure
            for code, many in chunk.counts.items():
                status = Status.of(code)
                told.counts[status] = told.counts.get(status, 0) + many
            told.cursor, told.finished = chunk.cursor, not chunk.cursor
            if told.finished and self.unsure and told.total > told.done:
                told.counts[Status.UNKNOWN] = told.total - told.done
            self.progress(told.copy())

    async def _begin(self) -> None:
        """Fix the start by a dry run, before anything is changed. A repeated chunk and a resumed call then ask for the
        very same. Before a cancel, count all messages: one that was cancelled without an answer is missed at the
        end."""
        told, cancels = self.told, self.frame.operation is Operation.CANCEL
        look = replace(self.frame, dry_run=True) if cancels else replace(self.frame, dry_run=True, limit=1)
        so_far = told.copy()
        while True:
            chunk = await self._chunk(look, so_far, AttemptState())
            look = replace(look, cursor=chunk.cursor)
            if not cancels or not chunk.cursor:
                break
            so_far.total += sum(chunk.counts.values())
            self.progress(replace(told.copy(), total=so_far.total))
        told.started_ms, told.at_ms = so_far.started_ms, so_far.at_ms
        told.total = so_far.total + sum(chunk.counts.values()) if cancels else 0
        self.progress(told.copy())

    async def _chunk(self, frame: MutateTag, told: TagProgress, attempt: AttemptState) -> TagMutated:
        frame = replace(frame, started_ms=told.started_ms)
        if told.at_ms:
            frame = replace(frame, at_ms=told.at_ms, in_ms=-1)

        def timed(timeout_ms: int) -> bytes:
            return encode(replace(frame, timeout_ms=timeout_ms))

        deadline = self.context.deadline(self.timeout)
        data = await self.context.channel.call("Mutate", timed, deadline, attempt, writes=not frame.dry_run)
        chunk = decode_as(data, TagMutated)
        told.started_ms, told.at_ms = chunk.started_ms, chunk.at_ms
        return chunk


def _in_flag(relative: bool) -> MutateFlag:
    return MutateFlag.IN if relative else NO_FLAGS


def _leased_flag(leased: bool) -> MutateFlag:
    return MutateFlag.LEASED if leased else NO_FLAGS


def _asked(frame: MutateTag) -> Asked:
    """Return what `frame` asks for, by the names of its call."""
    return {
        "the operation": OPERATIONS_BY_TAG[frame.operation],
        "topic": frame.topic,
        "group": frame.group,
        "tag": frame.tag.decode(),
        "at": frame.at_ms,
        "in_": frame.in_ms,
        "by": frame.by_ms,
        "leased": frame.leased,
        "dry_run": frame.dry_run,
    }


def _broken_off(error: TimelineError, told: TagProgress, partly: bool) -> TimelineError:
    """Return the error of a call by tag that broke off, with its progress and how to continue. `partly`: it changed
    something, so that "nothing happened" would be untrue."""
    kind, reason, advice = type(error), error.reason or error.advice, error.advice
    if error.retryable and not told.asked["dry_run"] and (told.done or isinstance(error, Unknown)):
        advice = "repeat the same call with resume=error.progress; without it, messages may be changed twice"
        if partly:
            kind, reason = Unknown, f"it broke off after {told.done} messages: {reason}"
    broken = kind(reason, id=error.id, retry_after_ms=error.retry_after_ms, advice=advice)
    broken.progress, broken.lasting, broken.found = told, error.lasting, error.found
    return broken


def _times(at: Any, in_: Any, count: int, bad: Judgement) -> tuple[Int64, bool]:
    """Return `at=` or `in_=`, one for all or one each, as a column, and whether it counts from the broker's now."""
    if (at is None) == (in_ is None):
        raise Invalid("say either at= (points in time) or in_= (how long from now), one of the two")
    return (durations(in_, count, bad), True) if at is None else (instants(at, count, "at", bad), False)


def _check_bool(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise Invalid(f"{name} must be True or False, not {shown(value)}")


def _version(if_version: int | None) -> int:
    if if_version is None:
        return 0
    if isinstance(if_version, bool) or not isinstance(if_version, int) or not 1 <= if_version < 2**63:
        raise Invalid(f"if_version must be a version, a whole number from 1, not {shown(if_version)}")
    return if_version
