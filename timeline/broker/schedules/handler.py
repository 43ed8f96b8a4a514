"""Calls about schedules: they create, show, change, trigger and delete them.

Each change is a put of the schedule's next record. If another edit or look put one first, the call reads again and
repeats. The look at the new record cancels the occurrences that the edit drops. The call does so at once if it can.
"""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from timeline.broker.api.access import Deed, Principal
from timeline.broker.api.mutate import PendingCall, Sendings
from timeline.broker.api.topics import TopicAccess, Walk, opened, sealed
from timeline.broker.runtime import Runtime
from timeline.broker.schedules.records import OccurrenceAnswer, ScheduleStore, decoded
from timeline.errors import Invalid, Throttled, TooLarge
from timeline.model import MAX_HEADERS_BYTES, Status, Topic, encode_headers
from timeline.schedules.edits import Edit, backfill, created, deleted, edited, shown, triggered, upcoming
from timeline.schedules.looks import AHEAD_MS, REMEMBER_MARGIN_MS, UNSURE, ScheduledMessage, filled_in
from timeline.schedules.record import ScheduleRecord, occurrence_id
from timeline.schedules.specification import Specification, check_target, fields_of_json
from timeline.storage_plugins.contract import StoreError, StoreUnavailable, StoreUnknown, TopicConflict
from timeline.wire import Fault, ScheduleAction, ScheduleAnswer, ScheduleCall, TransportError
from timeline.wording import no_such_topic, shown_duration

TRIES = 8
NUMBERS = 1_000_000
"""A schedule's first record has a number for each second. Until numbers are forgotten, an earlier schedule of its name
may have used those of other seconds. No schedule changes so often that it comes to them."""
MOST_ANSWERED, MOST_ANSWERED_CHARS = 1_000, 16 * 1024 * 1024
"""Answers that are kept for calls that are repeated, and the characters of all."""
_READING = (ScheduleAction.GET, ScheduleAction.LIST)
_DONE = (Status.OK, Status.DUPLICATE)
LONG_SEQUENCE = 9_999_999_999
MOST_TRIGGER_SKEW_MS = 86_400_000
PART_MESSAGES = 2_000
WALKED_ROWS, LISTED_BYTES = 5_000, 4 * 1024 * 1024
"""Records that one LIST looks through, and their size, about."""


class _Refused(Exception):
    """The call ends with this answer."""

    def __init__(self, status: Status, why: str, body: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(why)
        self.answer = ScheduleAnswer(status.code, why, _json(body) if body else "")


@dataclass(slots=True)
class _Made:
    """What a call did: `records` to show, or a `body`."""

    records: Sequence[ScheduleRecord] = ()
    status: Status = Status.OK
    body: Sequence[Mapping[str, Any]] | None = None
    cursor: bytes = b""
    counts: Mapping[str, int] | None = None


class ScheduleHandler:
    """Answers calls about schedules at one broker."""

    def __init__(self, runtime: Runtime, topics: TopicAccess, store: ScheduleStore) -> None:
        self._clock, self._off_loop, self._limits = runtime.clock, runtime.off_loop, runtime.limits
        self._metrics = runtime.metrics
        self._topics, self._store = topics, store
        self._sendings, self._edits = Sendings(), Sendings()
        self._answered: OrderedDict[tuple[int, str], ScheduleAnswer] = OrderedDict()
        self._answered_chars = 0

    async def answer(self, call: ScheduleCall, caller: Principal, pending: PendingCall) -> ScheduleAnswer:
        """Answer a call by a status. A repeat of a call that this broker carried out gets the same answer. Raise
        StoreError or TransportError: then the driver repeats the call."""
        async with self._sendings.in_order([call.op]):
            key = call.op, caller.name
            if (known := self._answered.get(key)) is not None:
                return known
            answer = await self._definite(call, caller, pending)
            # A refusal changed nothing, and its cause may be gone when the call is repeated.
            if call.op and call.action not in _READING and Status.of(answer.status) in _DONE:
                self._answered[key] = answer
                self._answered_chars += len(answer.body)
                while len(self._answered) > MOST_ANSWERED or self._answered_chars > MOST_ANSWERED_CHARS:
                    self._answered_chars -= len(self._answered.popitem(last=False)[1].body)
            return answer

    async def _definite(self, call: ScheduleCall, caller: Principal, pending: PendingCall) -> ScheduleAnswer:
        try:
            return await self._show(await self._do(call, caller, pending), call, caller)
        except _Refused as refused:
            return refused.answer
        except TooLarge as bad:
            return ScheduleAnswer(Status.TOO_LARGE.code, bad.reason)
        except (Invalid, TopicConflict) as bad:
            return ScheduleAnswer(Status.INVALID.code, bad.reason)
        except Throttled as busy:
            raise TransportError(Fault.OVERLOADED, busy.reason) from busy

    async def _do(self, call: ScheduleCall, caller: Principal, pending: PendingCall) -> _Made:
        if call.action is ScheduleAction.LIST:
            return await self._list(call, caller)
        check_target(call.topic, call.name)
        match call.action:
            case ScheduleAction.CREATE:
                return await self._create(call, caller)
            case ScheduleAction.GET:
                return _Made([await self._standing(call, caller, Deed.SEE)])
            case ScheduleAction.TRIGGER:
                return await self._trigger(call, caller)
            case ScheduleAction.BACKFILL:
                return await self._backfill(call, caller)
            case _:
                # One after the other: edits at the same time would put the same number, and all but one begin again.
                asked_ms = self._clock.monotonic_ms()
                async with self._edits.in_order([hash((call.topic, call.name)) or 1]):
                    if pending.gone or self._clock.monotonic_ms() - asked_ms >= self._limits.edit_wait_ms:
                        raise TransportError(Fault.OVERLOADED, f"too many edits of schedule {call.name!r} at once")
                    return await self._edit(call, caller)

    # ── showing ──

    async def _show(self, made: _Made, call: ScheduleCall, caller: Principal) -> ScheduleAnswer:
        body = await self._shown(made.records, call, caller) if made.body is None else made.body
        return ScheduleAnswer(made.status.code, "", _json(body), made.cursor, made.counts or {})

    async def _shown(
        self, records: Sequence[ScheduleRecord], call: ScheduleCall, caller: Principal
    ) -> list[dict[str, Any]]:
        now_ms = self._clock.now_ms()
        most = call.limit if call.action is ScheduleAction.GET else 0

        def bodies() -> list[dict[str, Any]]:
            found = []
            for record in records:
                topic = record.specification.topic
                template = not (caller.refusal(Deed.READ, topic) and caller.refusal(Deed.SCHEDULE, topic))
                body = shown(record, now_ms, template)
                if most:
                    body["next"] = upcoming(record, call.from_ms or now_ms, most)
                found.append(body)
            return found

        found = await self._off_loop(bodies)
        targets = await self._store.targets(one.specification for one in records)
        for body, record in zip(found, records, strict=True):
            body["warnings"] = _warnings(record.specification, targets[record.specification.topic])
        return found

    async def _list(self, call: ScheduleCall, caller: Principal) -> _Made:
        if call.topic and (why := caller.refusal(Deed.SEE, call.topic)):
            raise _Refused(Status.FORBIDDEN, why)
        internal = await self._store.find_topic()
        if internal is None:
            return _Made()
        # A cursor begins with the schedule that was listed last. Its records that came meanwhile lie behind the cursor.
        last, _, cursor = opened(internal, Walk.SCAN, call.cursor).partition(b"\0")
        found: dict[str, ScheduleRecord] = {}
        walked = size = 0
        while len(found) < call.limit and walked < WALKED_ROWS and size < LISTED_BYTES:
            rows, cursor = await self._store.rows(internal, cursor, max(1, call.limit - len(found)))
            walked, size = walked + max(1, len(rows)), size + int(rows.payload_bytes.sum())
            for one in decoded(rows):
                key = one.specification.key
                other = key in found and one.number // NUMBERS != found[key].number // NUMBERS
                if key == last.decode() or other:  # listed before, or created by two calls: the first one stands
                    continue
                found.pop(key, None)
                if _lists(one, call, caller):
                    found[key] = one
            if not cursor:
                break
        left = [one for one in await self._newest(internal, list(found.values())) if _lists(one, call, caller)]
        last = next(reversed(found)).encode() if found else last
        return _Made(left, cursor=sealed(internal, Walk.SCAN, last + b"\0" + cursor if cursor else b""))

    async def _newest(self, internal: Topic, found: Sequence[ScheduleRecord]) -> list[ScheduleRecord]:
        """Return what stands now in the places of the records found. Some have been followed by others since."""
        newest = {one.id: one for one in found}
        asked = list(found)
        for _ in range(TRIES):
            following = await self._store.by_id(internal, [one.neighbour_id(1) for one in asked])
            for one in asked:
                if (after := following.get(one.neighbour_id(1))) is not None:
                    del newest[one.id]
                    newest[after.id] = after
            asked = [one for one in following.values() if one.id in newest]
            if not asked:
                break
        return list(newest.values())

    # ── finding ──

    async def _find(self, topic: str, name: str) -> tuple[ScheduleRecord | None, list[ScheduleRecord]]:
        """Return the newest record of a schedule that is not deleted, and those of deleted ones of its name, too."""
        records = await self._store.newest(topic, name)
        # Two creations at the same time may have begun two: the first one stands.
        return next((one for one in records if not one.deleted), None), records

    async def _standing(self, call: ScheduleCall, caller: Principal, deed: Deed) -> ScheduleRecord:
        """Return the schedule's newest record, if `caller` may do `deed` with it."""
        if why := caller.refusal(deed, call.topic):
            raise _Refused(Status.FORBIDDEN, why)
        record, _ = await self._find(call.topic, call.name)
        if record is None:
            raise _Refused(Status.NOT_FOUND, f"topic {call.topic!r} has no schedule {call.name!r}")
        if deed is Deed.SCHEDULE:
            _permit(caller, record.specification)
        return record

    async def _target(self, name: str) -> Topic:
        target = await self._store.target(name)
        if target is None:
            raise _Refused(Status.NOT_FOUND, no_such_topic(name))
        return target

    # ── creating ──

    async def _create(self, call: ScheduleCall, caller: Principal) -> _Made:
        if why := caller.refusal(Deed.SCHEDULE, call.topic):
            raise _Refused(Status.FORBIDDEN, why)
        said = await self._specified(call)
        _permit(caller, said)
        _check_tag(said)
        target = await self._target(said.topic)
        _check_fits(said, target, self._clock.now_ms())
        for attempt in range(TRIES):
            standing, records = await self._sole(call)
            if standing is not None:
                return await self._already(standing, said, call, caller)
            await self._remember(target, said, caller)
            now_ms = self._clock.now_ms()
            number = (now_ms // 1_000 + attempt) * NUMBERS
            number = max([number, *(one.number + 2 for one in records)])
            edit = await self._new(target, said, now_ms, number)
            answer = await self._put(edit)
            if answer.status is Status.OK:
                record, _ = await self._sole(call)
                if record is None or record.number >= number:
                    return _Made([edit.record])
        _busy(call)

    async def _sole(self, call: ScheduleCall) -> tuple[ScheduleRecord | None, list[ScheduleRecord]]:
        """Return what `_find` does. Of several schedules that calls created at the same time, end all but the first."""
        for _ in range(TRIES):
            standing, records = await self._find(call.topic, call.name)
            others = [one for one in records if one is not standing and not one.deleted]
            if not others:
                return standing, records
            edits = [deleted(one, self._clock.now_ms(), keep=True) for one in others]
            await self._store.put_records([(edit.record, edit.due_ms) for edit in edits])
            await self._store.wake([one.id for one in others])
        _busy(call)

    async def _specified(self, call: ScheduleCall) -> Specification:
        body = _object(call.body)
        for name, value in (("topic", call.topic), ("name", call.name)):
            if body.setdefault(name, value) != value:
                raise Invalid(f"{name} is {body[name]!r:.80} in the specification and {value!r:.80} in the call")
        return await self._off_loop(lambda: Specification.from_json(body))

    async def _already(
        self, standing: ScheduleRecord, said: Specification, call: ScheduleCall, caller: Principal
    ) -> _Made:
        # Programs create their schedules whenever they start. One that an operator has paused must not stop them.
        if said in (standing.specification, standing.specification.changed(paused=False)):
            return _Made([standing], Status.DUPLICATE)
        body = await self._shown([standing], call, caller)
        why = f"topic {said.topic!r} has another schedule {said.name!r}: change that one, or choose another name"
        raise _Refused(Status.EXISTS, why, body)

    async def _new(self, target: Topic, said: Specification, now_ms: int, number: int) -> Edit:
        """Return the first record. Ids of its first minutes may be taken, if there was a schedule of this name."""
        edit = await self._off_loop(lambda: created(said, now_ms, number))
        until_ms = now_ms + 2 * AHEAD_MS
        coming = await self._off_loop(lambda: upcoming(edit.record, now_ms, 2 * AHEAD_MS // 1_000, until_ms))
        ids = [occurrence_id(said.name, at_ms) for at_ms in coming]
        living, settled = await self._store.taken(target, ids)
        record = edit.record if settled else replace(edit.record, renamed=())
        if living and not settled:  # they were kept when that schedule was deleted
            record = replace(record, standing_until_ms=until_ms, replacing=True)
        return replace(edit, record=record)

    async def _remember(self, target: Topic, said: Specification, caller: Principal) -> None:
        """Have the topic remember ids for long enough, or refuse the call."""
        needed_ms = said.window_ms + REMEMBER_MARGIN_MS
        for _ in range(TRIES):
            if target.settings.remember_ms >= needed_ms:
                return
            if why := caller.refusal(Deed.GOVERN, target.name):
                raise _Refused(Status.FORBIDDEN, f"{_remembers(target, needed_ms)}. Here, {why}")
            try:
                # At this revision: another call may have made it longer than needed here.
                changed = await self._topics.catalog.update(target.name, {"remember_ms": needed_ms}, target.revision)
            except TopicConflict:
                target = await self._target(target.name)
                continue
            if changed is None:
                raise _Refused(Status.NOT_FOUND, no_such_topic(target.name))
            return self._topics.changed()
        raise TopicConflict(f"topic {target.name!r} keeps changing under us: try again")

    # ── changing ──

    async def _edit(self, call: ScheduleCall, caller: Principal) -> _Made:
        fields = await self._fields(call)
        for _ in range(TRIES):
            record = await self._standing(call, caller, Deed.SCHEDULE)
            if call.revision not in (0, record.revision):
                why = f"schedule {record.specification.key} is at revision {record.revision}, not {call.revision}"
                raise _Refused(Status.FENCED, f"{why}: read it again")
            if call.action is ScheduleAction.DELETE:
                said = record.specification
            else:
                said = await self._changed(record, fields, caller)
                if said == record.specification:
                    return _Made([record])
            edit = await self._edited(record, said, call)
            answer = await self._put(edit)
            if answer.status in (Status.OK, Status.DUPLICATE):
                if missed := edit.record.missed - record.missed:
                    topic = self._metrics.topic(call.topic)
                    self._metrics.count("timeline_schedule_occurrences_total", topic, "missed", by=missed)
                cancelled = await self._cancel(edit.record)
                with suppress(StoreError):
                    await self._store.wake([record.id])
                shows = [] if edit.record.deleted else [edit.record]
                return _Made(shows, counts={"cancelled": cancelled})
        _busy(call)

    async def _fields(self, call: ScheduleCall) -> dict[str, Any]:
        """Return the fields of a specification that the call changes."""
        if call.action is ScheduleAction.UPDATE:
            fields = fields_of_json(_object(call.body))
            if not fields:
                raise Invalid("an update needs the fields that change")
            return fields
        return {"paused": call.action is ScheduleAction.PAUSE}

    async def _changed(self, record: ScheduleRecord, fields: dict[str, Any], caller: Principal) -> Specification:
        """Return the specification with other values of `fields`, which the topic can take."""
        said = await self._off_loop(lambda: record.specification.changed(**fields))
        _permit(caller, said)
        if "tag" in fields:
            _check_tag(said)
        target = await self._store.target(said.topic)
        if target is not None:
            # One that the topic has become too small for can still be paused.
            if "payload" in fields or "headers" in fields:
                _check_fits(said, target, self._clock.now_ms())
            if said.window_ms > record.specification.window_ms:
                await self._remember(target, said, caller)
        return said

    async def _edited(self, record: ScheduleRecord, said: Specification, call: ScheduleCall) -> Edit:
        now_ms = self._clock.now_ms()
        if call.action is ScheduleAction.DELETE:
            return await self._off_loop(lambda: deleted(record, now_ms, call.keep))
        return await self._off_loop(lambda: edited(record, now_ms, said, call.keep))

    async def _put(self, edit: Edit) -> OccurrenceAnswer:
        """Put the record of an edit. Refuse the call if the store gives no answer."""
        (answer,) = await self._store.put_records([(edit.record, edit.due_ms)])
        _check_sure(answer)
        if answer.status not in (Status.OK, Status.DUPLICATE, Status.EXISTS):
            raise _Refused(answer.status, answer.detail)
        return answer

    async def _cancel(self, record: ScheduleRecord) -> int:
        """Cancel what an edit leaves over, and return how many messages that were. If the store cannot now, the look at
        the record does."""
        target, cancelled = await self._store.target(record.specification.topic), 0
        of_group: dict[str, list[str]] = defaultdict(list)
        for id, group in record.cancelling:
            of_group[group].append(id)
        if target is not None:
            for group, ids in of_group.items():
                try:
                    answers = await self._store.cancel(target, ids, group)
                except StoreError:
                    break
                cancelled += sum(one.status is Status.OK for one in answers)
        return cancelled

    # ── producing ──

    async def _trigger(self, call: ScheduleCall, caller: Principal) -> _Made:
        record = await self._standing(call, caller, Deed.SCHEDULE)
        target, now_ms = await self._target(call.topic), self._clock.now_ms()
        at_ms = call.from_ms or now_ms
        if abs(at_ms - now_ms) > MOST_TRIGGER_SKEW_MS:
            raise Invalid("from_ms of a trigger names the present time by the caller's clock: it is off by a day")
        for tried in range(TRIES):
            message = triggered(record, at_ms + tried, now_ms)
            if call.op:
                message = replace(message, birth=call.op)
            (answer,) = await self._store.put_messages(target, [(record, message)])
            if answer.status in (Status.OK, Status.DUPLICATE) and not answer.foreign:
                told = {"id": message.id, "status": str(answer.status), "version": answer.version}
                return _Made(body=[told | {"due_ms": answer.due_ms or now_ms}])
            _check_sure(answer)
            if answer.status not in (Status.DUPLICATE, Status.EXISTS, Status.FORBIDDEN):
                raise _Refused(answer.status, answer.detail or f"the topic answered {answer.status}")
        _busy(call)

    async def _backfill(self, call: ScheduleCall, caller: Principal) -> _Made:
        record = await self._standing(call, caller, Deed.SCHEDULE)
        target, now_ms = await self._target(call.topic), self._clock.now_ms()
        to_ms = call.to_ms or now_ms
        messages = await self._off_loop(lambda: backfill(record, call.from_ms, to_ms, now_ms))
        counts = {"produced": 0, "duplicate": 0, "failed": 0}
        for at in range(0, len(messages), PART_MESSAGES):
            part = messages[at : at + PART_MESSAGES]
            if call.dry_run:
                living, settled = await self._store.taken(target, [message.id for message in part])
                counts["duplicate"] += len(living | settled)
                counts["produced"] += len(part) - len(living | settled)
            else:
                await self._fill(target, record, part, counts)
        return _Made([record], counts=counts)

    async def _fill(
        self, target: Topic, record: ScheduleRecord, messages: Sequence[ScheduledMessage], counts: dict[str, int]
    ) -> None:
        for answer in await self._store.put_messages(target, [(record, message) for message in messages]):
            _check_sure(answer)
            if answer.status is Status.OK:
                counts["produced"] += 1
            elif answer.status in (Status.DUPLICATE, Status.EXISTS, Status.FORBIDDEN):
                counts["duplicate"] += 1
            else:
                counts["failed"] += 1


def _check_sure(answer: OccurrenceAnswer) -> None:
    """Raise StoreError for an answer after which the call is repeated."""
    if answer.status is Status.UNKNOWN:
        raise StoreUnknown(answer.detail)
    if answer.status in UNSURE:
        raise StoreUnavailable(answer.detail or "the store is busy")


def _permit(caller: Principal, said: Specification) -> None:
    """Refuse the call unless `caller` may manage a schedule that produces so."""
    why = caller.refusal(Deed.SCHEDULE, said.topic) or caller.refusal(Deed.PUT, said.topic, said.group)
    if why:
        raise _Refused(Status.FORBIDDEN, why)


def _lists(record: ScheduleRecord, call: ScheduleCall, caller: Principal) -> bool:
    topic = record.specification.topic
    return not record.deleted and (not call.topic or topic == call.topic) and caller.sees(topic)


def _check_fits(said: Specification, target: Topic, now_ms: int) -> None:
    """Check the message of an occurrence, which has a time and a number in the place of the template's words."""
    most = target.settings.max_payload_bytes
    payload, headers = filled_in(said, now_ms // 1_000 * 1_000, LONG_SEQUENCE)
    if len(payload) > most:
        raise TooLarge(f"payload takes {len(payload)} bytes; topic {target.name!r} takes up to {most}")
    size = len(encode_headers(headers))
    if size > MAX_HEADERS_BYTES:
        raise TooLarge(f"headers take {size} bytes once they are filled in; they may take {MAX_HEADERS_BYTES}")


def _check_tag(said: Specification) -> None:
    """Check what older brokers did not. Their schedules stay readable."""
    if "\0" in said.tag:
        raise Invalid("tag must have no NUL: no call by tag would find such messages")


def _warnings(said: Specification, target: Topic | None) -> list[str]:
    if target is None:
        return [f"there is no topic {said.topic!r}: occurrences wait until it is there"]
    needed_ms = said.window_ms + REMEMBER_MARGIN_MS
    if target.settings.remember_ms < needed_ms:
        return [f"an occurrence may be produced twice: {_remembers(target, needed_ms)}"]
    return []


def _remembers(target: Topic, needed_ms: int) -> str:
    """Return what is wrong with a topic that remembers ids for too short a time, and the command that changes it."""
    has, needed = target.settings.remember_ms, shown_duration(needed_ms)
    remembers = f"remembers settled ids for {shown_duration(has)}" if has else "does not remember settled ids"
    return (
        f"topic {target.name!r} {remembers}, and the schedule needs {needed}: its window plus ten minutes. "
        f"`timeline topic update {target.name} --remember {needed}` sets it, with the right admin"
    )


def _object(body: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as bad:
        raise Invalid(f"the body must be JSON: {bad}") from None
    if not isinstance(found, dict):
        raise Invalid(f"the body must be an object of JSON with fields like cron and payload, not {body!r:.80}")
    return found


def _json(body: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False)


def _busy(call: ScheduleCall) -> NoReturn:
    raise StoreUnavailable(f"schedule {call.name!r} keeps changing: try again")
