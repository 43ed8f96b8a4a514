"""Recurring schedules: how a client makes, finds and changes them, and the handle of one."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, tzinfo
from itertools import islice, takewhile
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

from timeline.driver.message import Payload, StoredMessage
from timeline.driver.receipts import DUPLICATE, EXISTS, NOT_FOUND, OK, Receipt, error_of
from timeline.driver.times import Duration, When, as_datetime, duration_ms, instant_ms, shown, shown_time, shown_utc
from timeline.driver.transport.channel import AttemptState, ClientContext
from timeline.errors import Exists, Fenced, Forbidden, Invalid, NotFound, Unavailable
from timeline.model import DEFAULT_GROUP, Status, check_topic_name
from timeline.recurrence import FoldPolicy, GapPolicy, Occurrence, rules_are_readable
from timeline.recurrence.recurrence import occurrences_of
from timeline.schedules import CatchUp, Overlap, Specification
from timeline.schedules.edits import MOST_AHEAD_MS, SHOWN_SLICES
from timeline.schedules.record import TRIGGER, schedule_of, status_of
from timeline.schedules.specification import DEFAULT_WINDOW_MS, FIELDS, INTERNAL_PREFIX, check_target
from timeline.wire import (
    MAJOR,
    Fault,
    Ping,
    ScheduleAction,
    ScheduleAnswer,
    ScheduleCall,
    TransportError,
    decode_as,
    encode,
)
from timeline.wire.frames import SCHEDULES_MINOR
from timeline.wording import shown_lateness

Texts: TypeAlias = str | Sequence[str]
"""One text, or several."""
MOST_NEXT = 10_000
DAY_MS = 86_400_000
PAGE = 500
TOLD = 10
"""How many next times a broker is asked for."""
MISSED_AFTER_MS = 15_000
"""An occurrence that is decided so much after its time was missed."""
_DURATIONS = ("every", "jitter", "window", "expires")
_TIMES = ("start", "end")
_PENDING = ("cancel", "keep")


def specification_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as the fields of a Specification: `every="15m"` is `every_ms`. None: the field's default. Raise
    Invalid, which names the argument that is wrong, or the nearest to one that there is not."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _DURATIONS:
            full = f"{name}_ms"
            plain = DEFAULT_WINDOW_MS if name == "window" else 0
            found[full] = plain if value is None else duration_ms(value, name)
        elif name in _TIMES:
            found[f"{name}_ms"] = 0 if value is None else instant_ms(value, name)
        elif name in _ARGUMENTS:
            found[name] = _DEFAULTS[name] if value is None else _value(name, value)
        else:
            near = difflib.get_close_matches(name, _ARGUMENTS, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_ARGUMENTS)}"
            raise Invalid(f"a schedule has no field {name!r:.60}: {hint}")
    return found


def _value(name: str, value: Any) -> Any:
    if name == "payload":
        if isinstance(value, str):
            try:
                return value.encode()
            except UnicodeEncodeError:
                raise Invalid("payload holds half of a surrogate pair, which UTF-8 cannot carry") from None
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise Invalid(f"payload must be bytes or text, not {type(value).__name__}")
    if name in ("cron", "rrule", "exclude") and isinstance(value, list):
        return tuple(value)
    return value


_DEFAULTS: dict[str, Any] = {
    one.name: one.default_factory() if callable(one.default_factory) else one.default for one in fields(Specification)
}
_ARGUMENTS = tuple(name.removesuffix("_ms") for name in FIELDS if name not in ("topic", "name"))


@dataclass(frozen=True, slots=True)
class ScheduleState:
    """How far a schedule has come, in times of ms UTC (0: none) and counts of occurrences.

    - `position_ms`: the first time that is not decided yet. `sequence`: how many occurrences were decided before it.
    - `produced`: in time. `caught_up`: after an outage. These are not in `produced`.
    - `missed`: not produced, because of an outage. `skipped`: the message before was unfinished.
    - `failed`: the topic refused it.
    - `last_ms`, `last_id`: what was put last, at `last_put_ms`.
    - `waiting`: occurrences wait for the end of the message before. `ended`: none follows.
    """

    position_ms: int = 0
    sequence: int = 0
    produced: int = 0
    caught_up: int = 0
    missed: int = 0
    skipped: int = 0
    failed: int = 0
    last_ms: int = 0
    last_id: str = ""
    last_put_ms: int = 0
    created_ms: int = 0
    edited_ms: int = 0
    waiting: bool = False
    ended: bool = False

    def __repr__(self) -> str:
        told = [f"{count} {name}" for name in ("produced", "caught_up", "missed", "skipped", "failed")
                if (count := getattr(self, name))]  # fmt: skip
        told += [f"last {shown_utc(self.last_ms).replace('.000Z', 'Z')}"] if self.last_ms else []
        told += [name for name in ("waiting", "ended") if getattr(self, name)]
        return f"ScheduleState({', '.join(told)})"

    @property
    def last(self) -> datetime | None:
        """The time of the last produced occurrence, an aware datetime in UTC. None before the first."""
        return as_datetime(self.last_ms) if self.last_ms else None


_STATE = tuple(one.name for one in fields(ScheduleState))


def _state_of(shown: Mapping[str, Any]) -> ScheduleState:
    """Return the state that a broker shows. A newer one may show more."""
    known = {name: shown[name] for name in _STATE if name in shown and name != "waiting"}
    return ScheduleState(**known, waiting=bool(shown.get("queue")))


@dataclass(frozen=True, slots=True)
class Backfill:
    """Counts of a backfill, or of its dry run: `produced`, `present` (produced before), `failed` (refused)."""

    produced: int
    present: int = 0
    failed: int = 0


class ScheduleView:
    """A schedule as it stood when a broker was asked last. `specification`: what it says. `revision`: 1, and 1 more
    with each edit. `next_ms`: its next occurrence, ms UTC, as the broker says; 0: none. `warnings`: sentences on what
    is wrong with it. `payload_shown`: whether this client may see payload and headers; else `specification` has none.
    """

    def __init__(self, shown: Mapping[str, Any], context: ClientContext) -> None:
        self._context = context
        self._take(shown)

    def _take(self, shown: Mapping[str, Any]) -> None:
        self._deleted = False
        plain = {name: value for name, value in shown.items() if name in FIELDS and value is not None}
        self.payload_shown: bool = "payload" in plain
        self.specification = Specification.from_json(plain)
        self.topic, self.name = self.specification.topic, self.specification.name
        self.revision: int = int(shown.get("revision", 1))
        self.state = _state_of(shown.get("state", {}))
        self.next_ms: int = int(shown.get("next_ms") or 0)
        self.warnings: tuple[str, ...] = tuple(shown.get("warnings", ()))
        self._told_ms: list[int] = shown.get("next", [])

    @property
    def status(self) -> str:
        """In a word: active, paused, waiting (for the occurrence before to be finished), ended or deleted."""
        if self._deleted:
            return "deleted"
        state = self.state
        now_ms = self._context.clock.now_ms()
        return status_of(self.specification.paused, state.waiting, state.ended, state.position_ms, now_ms)

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self.specification.paused

    def next(self, count: int = 10) -> list[datetime]:
        """Return its next times, aware datetimes in its own zone. A paused schedule has those that it would have if it
        were resumed now. In a driver-only install these are the ten that a broker told last, at most."""
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MOST_NEXT:
            raise Invalid(f"next() takes a whole number from 0 to {MOST_NEXT}, not {shown(count)}")
        if rules_are_readable():
            following = [one.at_ms for one in islice(self.occurrences(), count)]
        else:
            now_ms = self._context.clock.now_ms()
            following = [at_ms for at_ms in self._told_ms if at_ms >= now_ms][:count]
        zone = ZoneInfo(self.specification.zone)
        return [as_datetime(at_ms).astimezone(zone) for at_ms in following]

    def occurrences(self) -> Iterator[Occurrence]:
        """Yield what `next` returns, with the wall time of each, and whether clocks change there. It gives up where too
        many times in a row are excluded."""
        if self._deleted:
            return
        now_ms, position_ms = self._context.clock.now_ms(), self.state.position_ms
        recurrence = self.specification.recurrence
        if position_ms > now_ms and not self.specification.paused:
            # Decided already, `count` or not: these lie on the timeline.
            decided = occurrences_of(recurrence.walk(now_ms, None), SHOWN_SLICES, now_ms + MOST_AHEAD_MS)
            yield from takewhile(lambda one: one.at_ms < position_ms, decided)
            now_ms = position_ms
        if self.state.ended:
            return
        since_ms = max(now_ms, position_ms) if not recurrence.count else position_ms or recurrence.start_ms
        walk = recurrence.walk(since_ms, self.state.sequence)
        found = occurrences_of(walk, SHOWN_SLICES, since_ms + MOST_AHEAD_MS)
        yield from (one for one in found if one.at_ms >= now_ms)

    def __repr__(self) -> str:
        told = [repr(f"{self.topic}/{self.name}"), self.status]
        if self.next_ms and self.status == "active":
            told.append(f"next {shown_utc(self.next_ms).replace('.000Z', 'Z')}")
        if self.state.missed:
            told.append(f"{self.state.missed} missed")
        return f"{type(self).__name__}({', '.join(told)})"


class Schedule(ScheduleView):
    """A recurring schedule. At each of its times it produces an ordinary message into its topic, once.

    Each method that changes it raises its revision. It also keeps this object up to date. An example:

        s = await tl.schedule("invoices", "monthly", cron="0 6 1 * *", zone="Europe/Berlin", payload=b"send them")
        print(s.next(3))
        await s.update(cron="0 7 1 * *")
        await s.pause()
    """

    async def refresh(self, *, timeout: Duration | None = None) -> Schedule:
        """Ask for it again, and return itself. Raise NotFound if it was deleted."""
        answer = await self._ask(ScheduleAction.GET, timeout, limit=TOLD)
        return self._updated(answer)

    async def update(
        self, *, pending: str = "cancel", if_revision: int | None = None, timeout: Duration | None = None, **fields: Any
    ) -> Schedule:
        """Change fields, the arguments of `tl.schedule`, and return itself. None sets a field back to its default.

        `pending`: what becomes of occurrences that are produced already and wait for their time. "cancel" takes them
        off the timeline, "keep" leaves them. The new revision decides from now on, or after those that stay.
        `if_revision`: change it only if it stands at this revision.

        Raise Fenced if it does not, NotFound, Forbidden, Invalid.
        """
        if not fields:
            raise Invalid(f"say which fields to change: {', '.join(_ARGUMENTS)}")
        asked = specification_fields(fields)
        wanted = self.specification.changed(**asked).to_json()
        body = json.dumps({name: wanted[name] for name in asked})
        return await self._edit(ScheduleAction.UPDATE, pending, timeout, body, if_revision)

    async def pause(self, *, pending: str = "cancel", timeout: Duration | None = None) -> Schedule:
        """Produce nothing until it is resumed, and return itself. `pending`: see `update`."""
        return await self._edit(ScheduleAction.PAUSE, pending, timeout)

    async def resume(self, *, timeout: Duration | None = None) -> Schedule:
        """Go on with the next occurrence after now, and return itself.

        Occurrences during the pause are not produced, and not missed."""
        return await self._edit(ScheduleAction.RESUME, "cancel", timeout)

    async def trigger(self, *, at: When | None = None, timeout: Duration | None = None) -> Receipt:
        """Produce one message now, beside its occurrences, and return the receipt. Its id is the schedule's name and
        the time, `monthly@2026-11-01T05:30:00.250Z.trigger`.

        `at`: that time, within a day of now; default: now. A repeat with the same `at` produces nothing more."""
        op, at_ms = 0, self._context.clock.now_ms()  # is part of the id, whichever broker gets a repeat of the call
        if at is not None:
            now_ms, at_ms = at_ms, instant_ms(at, "at")
            if abs(at_ms - now_ms) > DAY_MS:
                raise Invalid(f"at must be within a day of now, and {shown_utc(at_ms)} is not")
            said = f"trigger {self.topic}/{self.name} {at_ms}".encode()
            op = int.from_bytes(hashlib.blake2b(said, digest_size=8).digest()) or 1
        (made,) = json.loads((await self._ask(ScheduleAction.TRIGGER, timeout, from_ms=at_ms, op=op)).body)
        return Receipt(made["id"], Status(made["status"]), int(made["version"]), int(made["due_ms"]))

    async def backfill(
        self, start: When, end: When, *, dry_run: bool = False, timeout: Duration | None = None
    ) -> Backfill:
        """Produce the occurrences from `start` to before `end` that were not produced, now, and return how many. They
        lie in the past, at most 10,000 of them. `dry_run`: only count them."""
        from_ms, to_ms = instant_ms(start, "start"), instant_ms(end, "end")
        if to_ms <= from_ms:
            raise Invalid("end must lie after start")
        answer = await self._ask(ScheduleAction.BACKFILL, timeout, from_ms=from_ms, to_ms=to_ms, dry_run=bool(dry_run))
        return Backfill(*(answer.counts.get(name, 0) for name in ("produced", "duplicate", "failed")))

    async def delete(self, *, pending: str = "cancel", timeout: Duration | None = None) -> None:
        """Delete it. `pending`: see `update`. Raise NotFound if it is not there."""
        await self._ask(ScheduleAction.DELETE, timeout, keep=keeps(pending))
        self._deleted = True

    async def _edit(
        self, action: ScheduleAction, pending: str, timeout: Duration | None, body: str = "",
        if_revision: int | None = None,
    ) -> Schedule:  # fmt: skip
        revision = 0 if if_revision is None else check_revision(if_revision)
        attempt = AttemptState()
        try:
            answer = await self._ask(action, timeout, attempt, body=body, revision=revision, keep=keeps(pending))
        except Fenced:
            # An attempt whose answer was lost may have made the revision that stands in the way of the next one.
            if not (revision and attempt.unsure and await self._made(revision + 1, body, timeout)):
                raise
            return self
        return self._updated(answer)

    async def _made(self, revision: int, body: str, timeout: Duration | None) -> bool:
        """Return whether it stands at `revision` with the fields of `body`."""
        await self.refresh(timeout=timeout)
        says = self.specification.to_json()
        return self.revision == revision and all(says[name] == value for name, value in json.loads(body).items())

    def _updated(self, answer: ScheduleAnswer) -> Schedule:
        (said,) = json.loads(answer.body)
        self._take(said)
        return self

    async def _ask(
        self, action: ScheduleAction, timeout: Duration | None, attempt: AttemptState | None = None, **asked: Any
    ) -> ScheduleAnswer:
        call = ScheduleCall(action, self.topic, self.name, **asked)
        return await ask_schedules(self._context, call, timeout, attempt)


def keeps(pending: object) -> bool:
    """Return whether `pending=` keeps occurrences. Raise Invalid."""
    if pending not in _PENDING:
        raise Invalid(f"pending must be 'cancel' or 'keep', not {shown(pending)}")
    return pending == "keep"


def check_revision(revision: object) -> int:
    """Return `if_revision=`. Raise Invalid unless it is a whole number from 1."""
    if isinstance(revision, bool) or not isinstance(revision, int) or not 1 <= revision < 2**63:
        raise Invalid(f"if_revision must be a whole number from 1, not {shown(revision)}")
    return revision


async def ask_schedules(
    context: ClientContext, call: ScheduleCall, timeout: Duration | None, attempt: AttemptState | None = None
) -> ScheduleAnswer:
    """Send a call about schedules until it is answered. Raise the error of a refusal, and Invalid if the broker is too
    old. `attempt` is kept up to date."""
    context.check()
    attempt, deadline = attempt or AttemptState(), context.deadline(timeout)
    if not context.channel.current:
        # A server that has answered nothing yet and lacks this call could be another service as well as an old broker.
        await context.channel.unary("Ping", encode(Ping(context.clock.now())), deadline)
    writes = call.action not in (ScheduleAction.GET, ScheduleAction.LIST) and not call.dry_run
    if writes and not call.op:
        call = replace(call, op=context.ids.number())
    try:
        data = await context.channel.call("Schedules", encode(call), deadline, attempt, writes=writes)
    except Invalid as refused:
        if isinstance(refused.__cause__, TransportError) and refused.__cause__.fault is Fault.WRONG_VERSION:
            needs = f"recurring schedules need brokers of wire version {MAJOR}.{SCHEDULES_MINOR}"
            raise Invalid(f"{needs}: {refused.reason}") from refused
        raise
    answer = decode_as(data, ScheduleAnswer)
    gone = call.action is ScheduleAction.DELETE and attempt.unsure and answer.status == NOT_FOUND
    if answer.status in (OK, DUPLICATE) or gone:
        return answer
    if call.action is ScheduleAction.CREATE and answer.status == EXISTS and answer.body:
        raise _taken(call, json.loads(answer.body))
    raise error_of(answer.status, None, answer.detail)


def _taken(call: ScheduleCall, there: Sequence[Mapping[str, Any]]) -> Exists:
    """Return the error for a name that another schedule has. It says in what they differ."""
    standing = [
        name.removesuffix("_ms")
        for name, value in json.loads(call.body).items()
        if there and name in there[0] and there[0][name] != value
    ]
    differ = f", which differs in {', '.join(standing)}" if standing else ""
    command = f"timeline schedule update {call.topic} {call.name}"
    return Exists(f"{call.topic} has another schedule {call.name!r}{differ}. `{command}` changes it")


async def find_schedule(
    context: ClientContext, topic: str, name: str, timeout: Duration | None = None
) -> Schedule | None:
    """Return a recurring schedule, or None."""
    check_target(topic, name)
    call = ScheduleCall(ScheduleAction.GET, topic, name, limit=TOLD)
    try:
        answer = await ask_schedules(context, call, timeout)
    except NotFound:
        return None
    (said,) = json.loads(answer.body)
    return Schedule(said, context)


@dataclass(frozen=True, slots=True)
class ScheduleOrigin:
    """The schedule that a message comes from, by its id, and its time. `triggered`: by hand, beside its times.
    `specification`: what the schedule says now; None if it is not there any more, or not to be seen."""

    name: str
    at_ms: int
    triggered: bool
    specification: Specification | None = None

    def lines(self, message: StoredMessage | None, zone: tzinfo | None) -> list[str]:
        """Return where the message comes from, in sentences."""
        what = "triggered by hand at" if self.triggered else "its occurrence of"
        gone = "" if self.specification else ", which is not there any more"
        told = [f"from schedule {self.name}{gone}: {what} {shown_time(self.at_ms, zone)}"]
        says = self.specification
        if message is None or self.triggered or says is None:
            return told
        behind_ms = message.put_ms - self.at_ms
        if behind_ms > MISSED_AFTER_MS:
            queued = "waited for the message before, " if says.overlap is Overlap.QUEUE else ""
            told.append(
                f"  put {shown_lateness(behind_ms)} after that time: it {queued}was caught up after brokers "
                "were away, or was backfilled"
            )
        later_ms = message.scheduled_ms - self.at_ms
        if 0 < later_ms <= says.jitter_ms:
            told.append(f"  its jitter made it due {shown_lateness(later_ms)} later")
        return told


async def origin_of(
    context: ClientContext, topic: str, id: str, timeout: Duration | None
) -> tuple[ScheduleOrigin, Schedule | None] | None:
    """Return the schedule that a message of this id comes from. None: it comes from none."""
    parsed = schedule_of(id)
    if parsed is None or topic.startswith(INTERNAL_PREFIX):
        return None
    name, at_ms = parsed
    try:
        found = await find_schedule(context, topic, name, timeout)
    except (Invalid, Forbidden, Unavailable):  # older brokers, or a token that may not see it
        return None
    origin = ScheduleOrigin(name, at_ms, id.endswith(f".{TRIGGER}"), None if found is None else found.specification)
    return origin, found


def why_absent(origin: ScheduleOrigin, found: Schedule | None) -> str:
    """Return what a schedule says of the message of one of its times, which is not there. Empty: nothing."""
    if found is None or origin.triggered or not rules_are_readable():
        return ""
    first = next(found.specification.recurrence.occurrences(origin.at_ms), None)
    if first is None or first.at_ms != origin.at_ms:
        return f". Schedule {found.name} has no occurrence at that time"
    state = found.state
    if origin.at_ms < state.created_ms:
        backfill = f"'timeline schedule backfill {found.topic} {found.name}' produces what was before"
        return f". Schedule {found.name} was created after that time: {backfill}"
    if state.ended and origin.at_ms > state.last_ms:
        return f". Schedule {found.name} has ended, and produces nothing after its last occurrence"
    if origin.at_ms >= state.position_ms:
        if found.paused:
            return f". Schedule {found.name} is paused: it produces nothing, and a pause is not made up for"
        return f". Schedule {found.name} puts it shortly before that time"
    counts = f"{state.missed:,} missed, {state.skipped:,} skipped and {state.failed:,} failed"
    return f". Schedule {found.name} decided on it, and has {counts} occurrences in all"


class Scheduling:
    """The part of a client that is about recurring schedules. See `Timeline`."""

    _context: ClientContext

    async def schedule(
        self,
        topic: str,
        name: str,
        *,
        cron: Texts = (),
        every: Duration | None = None,
        rrule: Texts = (),
        exclude: Texts = (),
        start: When | None = None,
        end: When | None = None,
        count: int = 0,
        zone: str = "UTC",
        gap: GapPolicy | str | None = None,
        fold: FoldPolicy | str | None = None,
        jitter: Duration | None = None,
        catch_up: CatchUp | str = CatchUp.LATEST,
        window: Duration = "1h",
        overlap: Overlap | str = Overlap.ALLOW,
        payload: Payload | str = b"",
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        group: str = DEFAULT_GROUP,
        expires: Duration | None = None,
        paused: bool = False,
        timeout: Duration | None = None,
    ) -> Schedule:
        """Create a recurring schedule, and return it. At each of its times it produces a message into `topic`, once.
        An example:

            await tl.schedule("invoices", "monthly", cron="0 6 1 * *", zone="Europe/Berlin", payload=b"send them")

        If the same schedule stands under this name, it is returned. Raise Exists if another one does, NotFound if there
        is no such topic, Forbidden, Invalid, TooLarge.

        `cron`, `every`, `rrule`: when; several together are put together. `exclude`: dates, times and rules that are
        left out. `start`, `end`, `count`: bounds. `zone`, `gap`, `fold`: the wall clock, and its changes.

        `jitter`: longest delay of a message, random for each occurrence. `catch_up`: what is produced after an outage,
        "none", "latest" or "all", as far back as `window`. `overlap`: "allow", or while the message before is
        unfinished "skip" or "queue".

        `payload headers tag group`: of each message; `{occurrence}` and `{sequence}` in text stand for its time and
        number. `expires`: how long after its due time. `paused`: produce nothing until it is resumed.
        """
        given = {
            "cron": cron, "every": every, "rrule": rrule, "exclude": exclude, "start": start,
            "end": end, "count": count, "zone": zone, "gap": gap, "fold": fold,
            "jitter": jitter, "catch_up": catch_up, "window": window, "overlap": overlap, "payload": payload,
            "headers": headers, "tag": tag, "group": group, "expires": expires, "paused": paused,
        }  # fmt: skip
        specification = Specification(topic, name, **specification_fields(given))
        return await self.create_schedule(specification, timeout=timeout)

    async def create_schedule(self, specification: Specification, *, timeout: Duration | None = None) -> Schedule:
        """Create a recurring schedule as `schedule` does, from a specification: that of another one, for example."""
        if not isinstance(specification, Specification):
            raise Invalid(f"create_schedule takes a Specification, not {shown(specification)}")
        target = specification.topic, specification.name
        call = ScheduleCall(ScheduleAction.CREATE, *target, body=json.dumps(specification.to_json()))
        answer = await ask_schedules(self._context, call, timeout)
        (said,) = json.loads(answer.body)
        return Schedule(said, self._context)

    async def get_schedule(self, topic: str, name: str, *, timeout: Duration | None = None) -> Schedule | None:
        """Return a recurring schedule, or None."""
        return await find_schedule(self._context, topic, name, timeout)

    async def schedules(self, topic: str | None = None, *, timeout: Duration | None = None) -> AsyncIterator[Schedule]:
        """Yield the recurring schedules of a topic, or of all topics that this client may see. `timeout`: the longest
        time without an answer."""
        cursor, seen = b"", set[tuple[str, str]]()
        while True:
            found, cursor = await schedule_page(self._context, topic, PAGE, cursor, timeout)
            for one in found:
                key = one.topic, one.name
                if key not in seen:  # one that changes meanwhile may be on two pages
                    seen.add(key)
                    yield one
            if not cursor:
                return


async def schedule_page(
    context: ClientContext, topic: str | None, limit: int, cursor: bytes, timeout: Duration | None = None
) -> tuple[list[Schedule], bytes]:
    """Return a page of the schedules of a topic, or of all, and where the next page begins: empty at the end."""
    target = "" if topic is None else check_topic_name(topic)
    call = ScheduleCall(ScheduleAction.LIST, target, cursor=cursor, limit=limit)
    answer = await ask_schedules(context, call, timeout)
    return [Schedule(said, context) for said in json.loads(answer.body)], answer.cursor
