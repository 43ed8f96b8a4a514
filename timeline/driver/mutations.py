"""What a producer does to messages that are there: move, cancel, revive, purge; one, many, or all of a tag."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.driver.batch import durations, encode_ids, instants
from timeline.driver.message import about, asked_time, encode_id, encode_tag
from timeline.driver.produce.request_batch import BatchCall, Columns, RequestBatch, refusal_of, sound
from timeline.driver.produce.request_queue import QueueRunner, RequestQueue
from timeline.driver.receipts import Receipt, Receipts, receipt_of
from timeline.driver.times import Duration, When, duration_ms, instant_ms, shift_ms
from timeline.driver.transport.channel import AttemptState, Deadline
from timeline.driver.transport.client_context import ClientContext
from timeline.errors import Forbidden, Invalid, NotFound, TimelineError, Unknown
from timeline.model import Operation, Status
from timeline.wire import Judgement, Mutate, Mutated, MutateFlag, MutateTag, TagMutated, decode_as, encode

log = logging.getLogger("timeline.driver")

CALLS_OUTSTANDING = 4
ID_OVERHEAD_BYTES = 48
SPARE_MS = 50.0


class MutateCalls(QueueRunner):
    """The queue of one operation of a producer: batches go as Mutate calls."""

    def __init__(self, context: ClientContext, topic: str, group: str, operation: Operation) -> None:
        self._context, self._topic, self._group, self._operation = context, topic, group, operation
        queue = RequestQueue(self._build, context.clock, context.random, context.trouble)
        super().__init__(queue, f"mutating {topic}", f"the changes of {topic}")

    def _build(self, entries: Sequence[Any]) -> tuple[Columns, Operation]:
        count = len(entries)
        ids, times, flags, versions, ops = zip(*entries, strict=True)
        columns: Columns = {
            "ids": Ragged.of(list(ids)),
            "time_ms": np.fromiter(times, np.int64, count),
            "flags": np.fromiter(flags, np.uint8, count),
            "if_version": np.fromiter(versions, np.int64, count),
            "op": np.fromiter(ops, np.uint64, count),
        }
        return columns, self._operation

    async def carry(self) -> None:
        queue = self.queue
        while True:
            await queue.work.wait()
            queue.work.clear()
            while len(self._under_way) < CALLS_OUTSTANDING and (taken := queue.next()) is not None:
                request, batch = taken
                batch.outstanding = False  # until it is sent, which the channel says
                task = asyncio.get_running_loop().create_task(self._call(request, batch))
                self._under_way.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        self.queue.work.set()

    async def _call(self, request: int, batch: RequestBatch) -> None:
        queue = self.queue
        try:
            data = await self._asked(batch)
        except (Invalid, NotFound, Forbidden) as bad:
            queue.refused(request, refusal_of(len(batch), Status(bad.code), bad.reason))
            return
        except TimelineError as trouble:
            batch.verdict_detail = trouble.reason
            queue.back(request, sent=False)
            return
        except Exception as error:  # a mistake of ours: whoever calls must not wait for it until the deadline
            log.exception("a change of %s failed", self._topic)
            batch.unsure = batch.unsure or batch.outstanding
            queue.refused(request, refusal_of(len(batch), Status.UNAVAILABLE, f"the producer failed: {error!r}"))
            return
        try:
            mutated = decode_as(data, Mutated)
            queue.answer(request, mutated.answers, mutated.retry_after_ms)
        except Invalid as bad:
            log.error("a broker sent what cannot be read: %s", bad.reason)
            batch.unsure = True  # it was asked, and what came of it is not known
            queue.back(request, sent=False)

    async def _asked(self, batch: RequestBatch) -> bytes:
        context = self._context
        # A little before the callers give up, so that they learn whether it was ever sent.
        spare_ms = min(SPARE_MS, (batch.sink.deadline_ms - context.clock.monotonic_ms()) / 4)
        deadline = Deadline(context.clock, batch.sink.deadline_ms - spare_ms)

        def frame(timeout_ms: int) -> bytes:
            asked = self._topic, self._group, self._operation
            return encode(Mutate(*asked, timeout_ms=timeout_ms, **batch.columns))

        return await context.channel.unary("Mutate", frame, deadline, batch, writes=True)


FRAME_IDS = 10_000


Asked: TypeAlias = dict[str, Any]
"""What a call by tag asks for, by name: a walk that goes on must ask for the same."""
TOKEN_OF = "timeline-tag-1"
MAX_TOKEN_BYTES = 65_536
"""A token that is longer, packed or unpacked, is none: it has a cursor, a tag and names, each of a few KiB at most."""
NO_TOKEN = (
    "this is no resume token: it is damaged, or not whole. Give it as it was printed: `progress.resume` in Python, "
    "after --resume in a shell"
)
OPERATIONS_BY_TAG = {Operation.MOVE: "move", Operation.CANCEL: "cancel"}


@dataclass(slots=True)
class TagProgress:
    """How far a call by tag has come. `counts`: messages by status. `finished`: the walk is over. `total`: how many
    messages of the tag were there at the start; counted for a cancel only, else 0.

    Handed to `progress=`, and to be found in the `progress` of an error. A walk that broke off goes on with `resume=`,
    which takes it or its token `.resume`.
    """

    counts: dict[Status, int] = field(default_factory=dict)
    finished: bool = False
    op: int = 0
    cursor: bytes = b""
    started_ms: int = 0
    at_ms: int = 0
    total: int = 0
    asked: Asked = field(default_factory=dict, repr=False)

    @property
    def changed(self) -> int:
        """Messages that were moved or cancelled so far; of a dry run: those that would be."""
        return self.counts.get(Status.OK, 0)

    @property
    def done(self) -> int:
        """Messages met so far, whatever became of them: also those that were refused."""
        return sum(self.counts.values())

    @property
    def resume(self) -> str:
        """A token that goes on from here, also in another process, at another broker, hours later. One line of text."""
        told = {
            "is": TOKEN_OF,
            "asked": self.asked,
            "counts": {str(status): many for status, many in self.counts.items()},
            "finished": self.finished,
            "op": self.op,
            "cursor": self.cursor.hex(),
            "started_ms": self.started_ms,
            "at_ms": self.at_ms,
            "total": self.total,
        }
        packed = zlib.compress(json.dumps(told, separators=(",", ":")).encode(), 9)  # ends with a checksum
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def of(cls, resume: TagProgress | str) -> TagProgress:
        """A copy of what `resume=` was given, a token read. Raises Invalid."""
        if isinstance(resume, TagProgress):
            return resume.copy()
        if not isinstance(resume, str):
            raise Invalid(f"resume= takes a TagProgress or its token (.resume), not {resume!r:.60}")
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
        """Return whether each value has the type and the range of one that a walk told."""
        numbers = (*self.counts.values(), self.op, self.started_ms, self.at_ms, self.total)
        in_range = all(type(number) is int and 0 <= number < 2**64 for number in numbers)
        return in_range and type(self.finished) is bool and type(self.asked) is dict

    def copy(self) -> TagProgress:
        """As it is now; what comes later does not change it."""
        return replace(self, counts=dict(self.counts))

    def check(self, asked: Asked) -> None:
        """Raises Invalid unless the walk asked for the same as the call that goes on with it."""
        for name, now in asked.items():
            before = self.asked.get(name)
            if before != now:
                raise Invalid(
                    f"this resume token belongs to another call: {name} was {before!r:.80} there, and is {now!r:.80} "
                    "here. Repeat the call as it was, with its token"
                )


class MutationCalls:
    """The part of a producer that changes messages that are there. See `Producer`."""

    closed = True
    """Until it is made: one that could not be has nothing to end."""

    def __init__(self, context: ClientContext, topic: str, group: str) -> None:
        self.topic, self.group = topic, group
        self.closed = False
        self._context = context
        self._epoch = context.epoch
        self._calls: dict[Operation, MutateCalls] = {}

    def _start(self) -> None:
        raise AssertionError("a Producer says how it starts")

    def _renew(self) -> None:
        self._calls = {}

    async def _mutating_idle(self) -> None:
        for calls in self._calls.values():
            await calls.queue.idle()

    async def _stop_mutating(self) -> None:
        for calls in self._calls.values():
            await calls.stop()

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
        timeout: Duration | None = None,
    ) -> Receipt:
        """Moves a message to another due. `if_version`: only when it stands at that version, else Fenced.

        Raises NotFound, Forbidden (another group's), Fenced, Leased (a consumer has it), Dead, Expired, Invalid,
        Throttled, Unavailable, Unknown, Closed.
        """
        self._start()
        with about(id):
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
        with about(id):
            encoded, version, patience_ms = encode_id(id), _version(if_version), self._context.patience_ms(timeout)
        entry = (encoded, time_ms, int(flags), version, self._context.ids.number())
        answer = await self._queue(operation).single(entry, len(encoded) + ID_OVERHEAD_BYTES, patience_ms)
        return receipt_of(encoded, answer, operation)

    async def move_many(
        self,
        ids: Iterable[str] | Iterable[bytes],
        *,
        at: When | Sequence[When] | Int64 | None = None,
        in_: Duration | Sequence[Duration] | None = None,
        timeout: Duration | None = None,
    ) -> Receipts:
        """Move many messages, to one due or to one each (a list, or an integer array of milliseconds UTC). Returns
        receipts in the order of `ids`; an id or a time that is out of range is INVALID, and the others are moved."""
        self._start()
        bad = Judgement()
        encoded = encode_ids(ids, bad)
        times, relative = _times(at, in_, len(encoded), bad)
        flags = MutateFlag.IN if relative else MutateFlag(0)
        return await self._many(Operation.MOVE, encoded, times, flags, bad, timeout)

    async def cancel_many(
        self, ids: Iterable[str] | Iterable[bytes], *, leased: bool = False, timeout: Duration | None = None
    ) -> Receipts:
        """Cancel many messages. Returns receipts in the order of `ids`."""
        self._start()
        flags = MutateFlag.LEASED if leased else MutateFlag(0)
        bad = Judgement()
        return await self._many(Operation.CANCEL, encode_ids(ids, bad), None, flags, bad, timeout)

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
        bad = Judgement()
        encoded = encode_ids([ids] if isinstance(ids, str) else ids, bad)
        times, relative = _times(at, in_, len(encoded), bad)
        flags = MutateFlag.IN if relative else MutateFlag(0)
        return await self._many(Operation.REVIVE, encoded, times, flags, bad, timeout)

    async def purge(self, ids: str | Iterable[str] | Iterable[bytes], *, timeout: Duration | None = None) -> Receipts:
        """Deletes dead letters for good."""
        self._start()
        bad = Judgement()
        encoded = encode_ids([ids] if isinstance(ids, str) else ids, bad)
        return await self._many(Operation.PURGE, encoded, None, MutateFlag(0), bad, timeout)

    async def _many(
        self,
        operation: Operation,
        ids: Ragged,
        times: Any,
        flags: MutateFlag,
        bad: Judgement,
        timeout: Duration | None,
    ) -> Receipts:
        count = len(ids)
        many = BatchCall(count, self._context.patience_ms(timeout), self._context.clock, self._context.trouble)
        columns: Columns = {
            "ids": ids,
            "time_ms": np.zeros(count, dtype=np.int64) if times is None else times,
            "flags": np.full(count, int(flags), dtype=np.uint8),
            "if_version": np.zeros(count, dtype=np.int64),
            "op": self._context.ids.numbers(count),
        }
        if bad:
            many.refuse(bad)
        columns, places = sound(columns, count, bad)
        queue = self._queue(operation)
        for start in range(0, len(places), FRAME_IDS):
            part = slice(start, start + FRAME_IDS)
            cut = {name: column[part] for name, column in columns.items()}
            positions = places[part]
            size = cut["ids"].nbytes + ID_OVERHEAD_BYTES * len(positions)
            queue.add(RequestBatch(cut, operation, many, positions, size))
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
        resume: TagProgress | str | None = None,
        timeout: Duration | None = None,
    ) -> TagProgress:
        """Move every message of `tag` that was there at the start: to one due (`at`, `in_`), or `by` a shift, which
        may be negative ("-2h"). Works in chunks; `timeout` is for each. `dry_run`: only count. Returns the counts by
        status.

        `progress` is called at the start and after each chunk. When the call raises, `error.progress` says how far it
        came, and the same call goes on from there with `resume=error.progress`, or its token, `error.progress.resume`.
        A new call instead would shift again what is shifted already. Raises Unavailable when nothing was changed,
        Unknown when a part was.
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
        resume: TagProgress | str | None = None,
        timeout: Duration | None = None,
    ) -> TagProgress:
        """Cancel every message of `tag` that was there at the start. See `move_tag`.

        UNKNOWN counts what was there at the start and was not met after an answer was lost, or after a `resume`: it was
        cancelled, or delivered first.
        """
        self._start()
        _check_bool(leased, "leased")
        frame = replace(self._by_tag(Operation.CANCEL, tag, dry_run), leased=leased)
        return await self._walk(frame, progress, resume, timeout)

    def _by_tag(self, operation: Operation, tag: object, dry_run: bool) -> MutateTag:
        encoded = encode_tag(tag)
        if not encoded:
            raise Invalid("a call by tag needs a tag: None or empty would mean everything")
        _check_bool(dry_run, "dry_run")
        return MutateTag(self.topic, self.group, operation, encoded, self._context.ids.number(), dry_run=dry_run)

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
        before, unsure = told.done, resume is not None
        try:
            if not told.started_ms and not frame.dry_run:
                await self._begin(replace(frame, op=told.op, dry_run=True), told, progress, timeout)
            while not told.finished:
                attempt = AttemptState()
                chunk = await self._chunk(replace(frame, op=told.op, cursor=told.cursor), told, timeout, attempt)
                unsure = unsure or attempt.unsure
                for code, many in chunk.counts.items():
                    status = Status.of(code)
                    told.counts[status] = told.counts.get(status, 0) + many
                told.cursor, told.finished = chunk.cursor, not chunk.cursor
                if told.finished and unsure and told.total > told.done:
                    told.counts[Status.UNKNOWN] = told.total - told.done
                if progress is not None:
                    progress(told.copy())
        except TimelineError as error:
            raise _broken_off(error, told, not frame.dry_run and told.done > before) from error
        return told

    async def _begin(
        self,
        look: MutateTag,
        told: TagProgress,
        progress: Callable[[TagProgress], object] | None,
        timeout: Duration | None,
    ) -> None:
        """Fix the start, by a dry run, before anything is changed, so that a chunk sent again, or a walk that goes on,
        asks for the very same. Of a cancel, count all that is there: what was cancelled without an answer is gone, and
        can only be missed at the end."""
        cancels = look.operation is Operation.CANCEL
        look = look if cancels else replace(look, limit=1)
        so_far = told.copy()
        while True:
            chunk = await self._chunk(look, so_far, timeout, AttemptState())
            look = replace(look, cursor=chunk.cursor)
            if not cancels or not chunk.cursor:
                break
            so_far.total += sum(chunk.counts.values())
            if progress is not None:
                progress(replace(told.copy(), total=so_far.total))
        told.started_ms, told.at_ms = so_far.started_ms, so_far.at_ms
        told.total = so_far.total + sum(chunk.counts.values()) if cancels else 0
        if progress is not None:
            progress(told.copy())

    async def _chunk(
        self, frame: MutateTag, told: TagProgress, timeout: Duration | None, attempt: AttemptState
    ) -> TagMutated:
        frame = replace(frame, started_ms=told.started_ms)
        if told.at_ms:
            frame = replace(frame, at_ms=told.at_ms, in_ms=-1)
        deadline = self._context.deadline(timeout)
        data = await self._context.channel.unary(
            "Mutate", partial(_timed, frame), deadline, attempt, writes=not frame.dry_run
        )
        chunk = decode_as(data, TagMutated)
        told.started_ms, told.at_ms = chunk.started_ms, chunk.at_ms
        return chunk


def _asked(frame: MutateTag) -> Asked:
    """What `frame` asks for, in the words of its call."""
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
    """The error of a call by tag that broke off: how far it came, and how it goes on. `partly`: it changed something,
    so that "nothing happened" would be untrue."""
    kind, reason, advice = type(error), error.reason or error.advice, error.advice
    if error.retryable and not told.asked["dry_run"] and (told.done or isinstance(error, Unknown)):
        advice = "repeat the same call with resume=error.progress; without it, messages may be changed twice"
        if partly:
            kind, reason = Unknown, f"it broke off after {told.done} messages: {reason}"
    broken = kind(reason, id=error.id, retry_after_ms=error.retry_after_ms, advice=advice)
    broken.progress = told
    return broken


def _timed(frame: MutateTag, timeout_ms: int) -> bytes:
    return encode(replace(frame, timeout_ms=timeout_ms))


def _times(at: Any, in_: Any, count: int, bad: Judgement) -> tuple[Any, bool]:
    """`at=` or `in_=`, one for all or one each, as a column, and whether it counts from the broker's now."""
    if (at is None) == (in_ is None):
        raise Invalid("say either at= (points in time) or in_= (how long from now), one of the two")
    return (durations(in_, count, bad), True) if at is None else (instants(at, count, "at", bad), False)


def _check_bool(value: object, name: str) -> None:
    if not isinstance(value, bool):
        raise Invalid(f"{name} must be True or False, not {value!r:.60}")


def _version(if_version: int | None) -> int:
    if if_version is None:
        return 0
    if isinstance(if_version, bool) or not isinstance(if_version, int) or not 1 <= if_version < 2**63:
        raise Invalid(f"if_version must be a version, a whole number from 1, not {if_version!r:.40}")
    return if_version
