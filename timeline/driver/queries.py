"""A client's questions: topics and their settings, messages, forecasts, lateness, and the status of brokers."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, overload

import numpy as np

from timeline.columns import Int64, Ragged
from timeline.driver.batch import encode_ids
from timeline.driver.brokers import Standings, standing_of
from timeline.driver.late import Cause, LateReport, Why, deliveries_of, late_rows
from timeline.driver.message import StoredMessage, encode_id, encode_tag, encode_text
from timeline.driver.receipts import NOT_FOUND, OK, UNAVAILABLE, error_of
from timeline.driver.schedules import origin_of, why_absent
from timeline.driver.times import Duration, When, as_datetime, duration_ms, instant_ms, shown
from timeline.driver.transport.channel import AttemptState, ClientContext, ask_all, found_by
from timeline.errors import Invalid, NotFound
from timeline.model import (
    LEASE_AHEAD_AUTO,
    MAX_BATCH,
    MAX_BUCKETS,
    MAX_HOLDER_BYTES,
    SETTING_RANGES,
    Rows,
    State,
    Topic,
    check_new_push_url,
    check_topic_name,
    decode_headers,
)
from timeline.schedules.specification import INTERNAL_PREFIX
from timeline.wire import (
    BrokerStatus,
    Forecast,
    Forecasted,
    Ping,
    Pong,
    Scan,
    ScanPage,
    StatusRequest,
    TopicAction,
    TopicList,
    Topics,
    TransportError,
    decode_as,
    encode,
)
from timeline.wording import shown_duration

DURATIONS = {name.removesuffix("_ms"): name for name in SETTING_RANGES if name.endswith("_ms")}
"""Settings that are durations, by their argument: `lease="30s"` is `lease_ms`."""
PERCENTS = {name.removesuffix("_percent"): name for name in SETTING_RANGES if name.endswith("_percent")}
"""Settings that are shares or factors, by their argument: `retry_factor=2.5` is `retry_factor_percent`."""
NUMBERS = ("buckets", "max_payload_bytes", "max_deliveries", "max_rate_per_s", "push_concurrency", "push_rate")
TEXTS = ("kind", "push_url")
NAMES = (*DURATIONS, *PERCENTS, *NUMBERS, "paused", *TEXTS)


def settings_of(given: dict[str, Any]) -> dict[str, int | str | bool]:
    """Return settings for the wire. Durations are given as `lease="30s"`, or in ms by their full name,
    `lease_ms=30_000`. `lease_ahead="auto"` is allowed, and None is the default. Raise Invalid for an unknown name, with
    the nearest one."""
    settings: dict[str, int | str | bool] = {}
    for name, value in given.items():
        if value is None:
            continue
        full = DURATIONS.get(name) or PERCENTS.get(name)
        if full is not None and given.get(full) is not None:
            raise Invalid(f"{name} and {full} are one setting. Give one of the two")
        if name == "lease_ahead" and value == "auto":
            settings["lease_ahead_ms"] = LEASE_AHEAD_AUTO
        elif name in DURATIONS:
            settings[DURATIONS[name]] = duration_ms(value, name)
        elif name in PERCENTS:
            settings[PERCENTS[name]] = _percent(name, value)
        elif name in SETTING_RANGES:
            if isinstance(value, bool) or not isinstance(value, int):
                raise Invalid(f"{name} must be a whole number, not {shown(value)}")
            if value.bit_length() > 63:  # more than the wire can carry; the broker checks the range
                low, high = SETTING_RANGES[name]
                raise Invalid(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")
            settings[name] = value
        elif name == "paused":
            if not isinstance(value, bool):
                raise Invalid(f"paused must be True or False, not {shown(value)}")
            settings[name] = value
        elif name == "push_url":
            settings[name] = check_new_push_url(value) if value != "" else ""
        elif name == "kind":
            settings[name] = encode_text(value, "kind", 255)
        else:
            near = difflib.get_close_matches(name, [*NAMES, *SETTING_RANGES], 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(NAMES)}"
            raise Invalid(f"a topic has no setting {name!r}: {hint}")
    return settings


def _percent(name: str, value: object) -> int:
    """Return a factor or share in hundredths. Raise Invalid unless it is in the setting's range."""
    low, high = (limit / 100 for limit in SETTING_RANGES[PERCENTS[name]])
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise Invalid(f"{name} must be a number from {low:g} to {high:g}, not {shown(value)}")
    percent = round(value * 100)
    if abs(percent - value * 100) > 1e-6:
        raise Invalid(f"{name} takes two decimals, not {shown(value)}. Round it")
    return percent


MAX_LIMIT = 2**63 - 1
STATES = (State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD)


def wanted_states(state: str | Iterable[str] | None) -> tuple[State, ...]:
    """Return the states of a scan; empty: all but dead letters. Raise Invalid."""
    if state is None:
        return ()
    allowed = {one.value: one for one in STATES}
    wanted = [state] if isinstance(state, str) or not isinstance(state, Iterable) else list(state)
    for one in wanted:
        if not isinstance(one, str) or one not in allowed:
            raise Invalid(f"state must be one of {', '.join(allowed)}, not {shown(one)}")
    return tuple(dict.fromkeys(allowed[one] for one in wanted))


def wanted_due(due: tuple[When | None, When | None] | None) -> tuple[int, int]:
    """Return `due=` as (first, end) in milliseconds, end excluded. 0: no bound. Raise Invalid."""
    if due is None:
        return 0, 0
    if not isinstance(due, tuple) or len(due) != 2:
        raise Invalid("due= is a pair (from, to) of points in time, either of them None for no bound")
    low, high = due
    from_ms = 0 if low is None else instant_ms(low, "due[0]")
    to_ms = 0 if high is None else instant_ms(high, "due[1]")
    if high is not None and to_ms <= from_ms:
        raise Invalid("due= is a pair (from, to) with from before to")
    return from_ms, to_ms


def wanted_buckets(buckets: tuple[int, int] | None) -> tuple[int, int]:
    """Return `buckets=` as (first, end), end excluded. (0, 0): all. Raise Invalid."""
    if buckets is None:
        return 0, 0
    whole = isinstance(buckets, tuple) and len(buckets) == 2 and all(type(one) is int for one in buckets)
    if not whole or not 0 <= buckets[0] < buckets[1] <= MAX_BUCKETS:
        raise Invalid(f"buckets= is a pair (first, end) with 0 <= first < end <= {MAX_BUCKETS}, not {shown(buckets)}")
    return buckets


def check_limit(limit: int) -> None:
    """Raise Invalid unless `limit` is a number of messages, or 0 for all."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_LIMIT:
        raise Invalid(f"limit must be a whole number from 0 (all) to {MAX_LIMIT}, not {shown(limit)}")


MAX_STEPS = 10_000
EVER = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class OutlookStep:
    """One step of a forecast: `count` messages come due from `start_ms` to `end_ms` (excluded)."""

    start_ms: int
    end_ms: int
    count: int

    @property
    def start(self) -> datetime:
        """The start, an aware datetime in UTC."""
        return as_datetime(self.start_ms)


class Outlook(Sequence[OutlookStep]):
    """A forecast: its steps in order. `overdue`: messages due before it. `exact`: False if the store estimates.
    `edges_ms` (n + 1) and `counts` (n): numpy columns."""

    def __init__(self, edges_ms: Int64, counts: Int64, overdue: int, exact: bool) -> None:
        self.edges_ms, self.counts, self.overdue, self.exact = edges_ms, counts, overdue, exact

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> OutlookStep: ...
    @overload
    def __getitem__(self, index: slice) -> list[OutlookStep]: ...
    def __getitem__(self, index: int | slice) -> OutlookStep | list[OutlookStep]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)
        return OutlookStep(int(self.edges_ms[place]), int(self.edges_ms[place + 1]), int(self.counts[place]))

    def __repr__(self) -> str:
        return f"Outlook({len(self)} steps, {int(self.counts.sum())} to come, {self.overdue} overdue)"


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of a topic's messages by state. `exact`: False if the store estimates `waiting` and `available`."""

    waiting: int
    available: int
    leased: int
    dead: int
    exact: bool


@dataclass(frozen=True, slots=True)
class PingAnswer:
    """A broker, the round trip, and its clock's offset from ours, known to within half the round trip."""

    broker: str
    version: str
    address: str
    round_trip_ms: float
    offset_ms: float
    error_ms: float


def messages_of(page: ScanPage) -> list[StoredMessage]:
    """Return the rows of a page as messages."""
    rows, now_ms = page.rows, page.now_ms
    return [_message(rows, place, now_ms) for place in range(len(rows))]


_NUMBERS = [field.name for field in Rows.columns if field.kind == "numbers" and field.name in StoredMessage.__slots__]


def _message(rows: Rows, at: int, now_ms: int) -> StoredMessage:
    numbers = {name: int(getattr(rows, name)[at]) for name in _NUMBERS}
    holder, died = rows.holders[at].decode(), numbers["died_ms"] > 0
    if died:
        state = State.DEAD
    elif numbers["due_ms"] <= now_ms:
        state = State.AVAILABLE
    else:
        state = State.LEASED if holder else State.WAITING
    return StoredMessage(
        id=rows.ids[at].decode(),
        state=state,
        group=rows.groups[at].decode(),
        tag=rows.tags[at].decode() or None,
        holder=holder or None,
        dead=rows.dead[at].decode(errors="replace") if died else None,
        payload=rows.payloads[at] if rows.payloads is not None else None,
        headers=decode_headers(rows.headers[at]) if rows.headers is not None else None,
        **numbers,
    )


_LEAST = {Cause.NO_CONSUMER: 0, Cause.UNEXPLAINED: 1}
"""Causes that any other one outweighs, the least first."""


class Queries:
    """The part of a client that asks for topics and messages, and how brokers fare. See `Timeline`."""

    def __init__(self, context: ClientContext) -> None:
        self._context = context

    async def create_topic(self, /, name: str, *, timeout: Duration | None = None, **settings: Any) -> Topic:
        """Create a topic. An existing topic with the same settings is returned. Raise Exists if its settings differ.

        Settings: `buckets lease max_lease max_payload_bytes horizon max_deliveries redelivery_backoff dead_retention
        remember lease_ahead paused max_rate_per_s kind retry_first retry_factor retry_cap retry_jitter push_url
        push_timeout push_concurrency push_rate`; durations like "30s".
        """
        return (await self._topics(TopicAction.CREATE, name, settings_of(settings), timeout)).topics[0]

    async def update_topic(self, /, name: str, *, timeout: Duration | None = None, **settings: Any) -> Topic:
        """Change settings of a topic while it is used. `buckets` and `kind` are fixed. Raise NotFound, Invalid."""
        if not settings:
            raise Invalid(f"say which settings to change: {', '.join(NAMES)}")
        return (await self._topics(TopicAction.UPDATE, name, settings_of(settings), timeout)).topics[0]

    async def pause_topic(self, name: str, *, timeout: Duration | None = None) -> Topic:
        """Stop deliveries of a topic. Producers go on, and leases stay."""
        return await self.update_topic(name, timeout=timeout, paused=True)

    async def resume_topic(self, name: str, *, timeout: Duration | None = None) -> Topic:
        """Resume deliveries of a topic."""
        return await self.update_topic(name, timeout=timeout, paused=False)

    async def drop_topic(self, name: str, *, timeout: Duration | None = None) -> None:
        """Delete a topic and all its messages. Raise NotFound if there is none."""
        await self._topics(TopicAction.DROP, name, {}, timeout)

    async def topics(self, *, internal: bool = False, timeout: Duration | None = None) -> list[Topic]:
        """Return all topics, sorted by name. `internal`: also those that brokers made for themselves, whose names begin
        with `~`."""
        listed = await self._topics(TopicAction.LIST, INTERNAL_PREFIX if internal else "", {}, timeout)
        return sorted(listed.topics, key=lambda topic: topic.name)

    async def topic_secrets(
        self, name: str, *, rotate: bool = False, timeout: Duration | None = None
    ) -> tuple[str, ...]:
        """Return the valid secrets with which a topic's webhooks are signed, the newest first. It takes the right
        admin.

        A broker makes the first one when `push_url` is set. `rotate`: make a new one; the former stays valid for a
        day, and two rotations end it at once. So a rotation whose answer was lost is not sent again: it raises Unknown.
        Do not log or store them where others read. Raise NotFound, Forbidden.
        """
        action = TopicAction.ROTATE if rotate else TopicAction.SECRETS
        return (await self._topics(action, name, {}, timeout)).secrets

    async def _topics(
        self, action: TopicAction, name: str, settings: dict[str, int | str | bool], timeout: Duration | None
    ) -> TopicList:
        self._context.check()
        if action is not TopicAction.LIST:
            check_topic_name(name)
        frame = encode(Topics(action, name, settings))
        attempt = AttemptState()
        writes = action not in (TopicAction.LIST, TopicAction.SECRETS)
        data = await self._context.channel.call(
            "Topics",
            frame,
            self._context.deadline(timeout),
            attempt,
            writes=writes,
            once=action is TopicAction.ROTATE,  # a repeat would end the secret that receivers have
        )
        answer = decode_as(data, TopicList)
        if answer.status == OK or (action is TopicAction.DROP and attempt.unsure and answer.status == NOT_FOUND):
            return answer
        raise error_of(answer.status, None, answer.detail)

    async def scan_pages(
        self,
        topic: str,
        *,
        state: str | Iterable[str] | None = None,
        tag: str | None = None,
        due: tuple[When | None, When | None] | None = None,
        ids: Iterable[str] | Iterable[bytes] | None = None,
        buckets: tuple[int, int] | None = None,
        holder: str = "",
        payload: bool = False,
        limit: int = 0,
        cursor: bytes = b"",
        timeout: Duration | None = None,
    ) -> AsyncIterator[ScanPage]:
        """Yield the pages of a scan, as columns (`page.rows`). See `scan`.

        It continues at another broker when one goes away. `timeout`: the longest time without a page. `ids`: only these
        messages. `buckets`: a pair (first, end), end excluded. `holder`: only messages that this consumer holds under a
        live lease, whatever else is asked. `cursor`: that of a page of the same scan, which continues after it.
        """
        self._context.check()
        from_ms, to_ms = wanted_due(due)
        check_limit(limit)
        bucket_from, bucket_to = wanted_buckets(buckets)
        if not isinstance(payload, bool):
            raise Invalid(f"payload must be True or False, not {shown(payload)}")
        frame = Scan(
            topic=check_topic_name(topic),
            states=wanted_states(state),
            tag=encode_tag(tag),
            due_from_ms=from_ms,
            due_to_ms=to_ms,
            ids=None if ids is None else encode_ids(ids),
            payload=payload,
            limit=limit,
            cursor=cursor,
            bucket_from=bucket_from,
            bucket_to=bucket_to,
            holder=encode_text(holder, "a holder", MAX_HOLDER_BYTES) if holder else "",
        )
        deadline, left = self._context.deadline(timeout), limit
        while True:
            try:
                async with aclosing(self._context.channel.pages("Scan", encode(frame), deadline)) as pages:
                    async for data in pages:
                        page = decode_as(data, ScanPage)
                        left -= len(page.rows)
                        yield page
                        deadline = self._context.deadline(timeout)  # the caller's own time does not count
                        if not page.cursor or (limit and left <= 0):
                            return
                        frame = replace(frame, cursor=page.cursor, limit=max(0, left))
            except TransportError as fault:
                if deadline.left_ms <= 0:
                    why = self._context.trouble()
                    raise error_of(UNAVAILABLE, None, f"the scan broke off: {why.reason}", trouble=why) from fault

    async def scan(
        self,
        topic: str,
        *,
        state: str | Iterable[str] | None = None,
        tag: str | None = None,
        due: tuple[When | None, When | None] | None = None,
        payload: bool = False,
        limit: int = 0,
        timeout: Duration | None = None,
    ) -> AsyncIterator[StoredMessage]:
        """Yield messages of a topic, in no order. A message that is there throughout is seen at least once, even if it
        moves.

        `state`: "waiting", "available", "leased" or "dead", or several (default: all but dead letters). `tag`: only
        messages with it. `due`: a pair (from, to), end excluded. Expired messages are left out.

            async for m in tl.scan("departures", state="waiting", due=(None, tonight)):
                print(m.id, m.due)

        Raise NotFound if there is no such topic, Invalid, Unavailable.
        """
        async for page in self.scan_pages(
            topic, state=state, tag=tag, due=due, payload=payload, limit=limit, timeout=timeout
        ):
            for message in messages_of(page):
                yield message

    async def dead(
        self, topic: str, *, tag: str | None = None, payload: bool = False, timeout: Duration | None = None
    ) -> AsyncIterator[StoredMessage]:
        """Yield the topic's dead letters, each with its reason in `.dead`."""
        async for message in self.scan(topic, state="dead", tag=tag, payload=payload, timeout=timeout):
            yield message

    async def get(
        self, topic: str, id: str, *, payload: bool = True, timeout: Duration | None = None
    ) -> StoredMessage | None:
        """Return one message with its payload, or None. Dead letters are found, too."""
        found = None
        ids = Ragged.of([encode_id(id)])
        async for page in self.scan_pages(topic, state=STATES, ids=ids, payload=payload, timeout=timeout):
            for message in messages_of(page):
                found = message
        return found

    async def forecast(
        self, topic: str, window: Duration = "1h", step: Duration = "1m", *, timeout: Duration | None = None
    ) -> Outlook:
        """Return how many messages come due per `step` of the next `window`, in at most 10,000 steps.

        Messages that have expired count until a broker has swept them."""
        self._context.check()
        window_ms, step_ms = duration_ms(window, "window", least_ms=1), duration_ms(step, "step", least_ms=1)
        if -(-window_ms // step_ms) > MAX_STEPS:
            raise Invalid(
                f"a window of {shown_duration(window_ms)} has more than {MAX_STEPS} steps of "
                f"{shown_duration(step_ms)}: make the step longer"
            )
        frame = encode(Forecast(check_topic_name(topic), window_ms, step_ms))
        data = await self._context.channel.unary("Forecast", frame, self._context.deadline(timeout))
        told = decode_as(data, Forecasted)
        return Outlook(told.edges_ms, told.counts, told.overdue, told.exact)

    async def count(self, topic: str, *, timeout: Duration | None = None) -> Counts:
        """Count the messages of a topic by state, one state after the other while they change.

        The store counts waiting and due messages from an index. Leased and dead messages are read without payloads,
        which takes some seconds per million messages of the topic. Due messages may include some that have expired and
        are not swept yet. `timeout`: the longest time without an answer.
        """
        outlook = await self.forecast(topic, EVER, EVER, timeout=timeout)
        leased = dead = 0
        async for page in self.scan_pages(topic, state=(State.LEASED, State.DEAD), timeout=timeout):
            died = int(np.count_nonzero(page.rows.died_ms))
            leased, dead = leased + len(page.rows) - died, dead + died
        return Counts(int(outlook.counts.sum()), outlook.overdue, leased, dead, outlook.exact)

    async def late(
        self,
        since: Duration = "1h",
        *,
        topic: str = "",
        id: str = "",
        limit: int = 1_000,
        timeout: Duration | None = None,
    ) -> LateReport:
        """Return deliveries of the last `since` that were more than 50 ms late, with their causes. All known brokers
        are asked, for the newest `limit` of each.

            report = await tl.late(since="10m")
            for one in report.deliveries:
                print(one.delivered, one.id, one.lateness, one.why)

        Raise Invalid, Closed, or Unavailable if no broker answered."""
        rows, unreachable = await late_rows(self._context, since, topic, id, limit, timeout)
        return LateReport(deliveries_of(rows), rows.dropped, unreachable)

    async def why(self, topic: str, id: str, *, timeout: Duration | None = None) -> Why:
        """Return why message `id` was late, or is due and not delivered, and its state. All brokers are asked.

            print(await tl.why("departures", "UA1545"))

        Raise NotFound if there is no such topic, or neither the message nor a late delivery of it is known. Raise
        Invalid, Closed, or Unavailable if no broker answered.
        """
        report = await self.late(EVER, topic=topic, id=id, limit=MAX_BATCH, timeout=timeout)
        message = await self.get(topic, id, payload=False, timeout=timeout)
        late = tuple(one for one in report.deliveries if one.consumer)
        # Each broker says why it does not deliver the message. One with a consumer knows better than one without.
        reasons = [one for one in report.deliveries if not one.consumer] if message else []
        kept = max(reversed(reasons), key=lambda one: _LEAST.get(one.cause, len(_LEAST)), default=None)
        origin, schedule = await origin_of(self._context, topic, id, timeout) or (None, None)
        if message is None and not late:
            of_schedule = "" if origin is None else why_absent(origin, schedule)
            silent = f" ({', '.join(report.unreachable)} did not answer)" if report.unreachable else ""
            raise NotFound(
                f"no message {id!r} is on {topic}, and no late delivery of it is recorded{silent}. It was never "
                "produced. Or it was delivered in time, cancelled, purged or expired, or late before the oldest record"
                f"{of_schedule}",
                id=id,
            )
        paused = False
        if kept is not None and kept.cause is not Cause.PAUSED:
            paused = any(each.name == topic and each.settings.paused for each in await self.topics(timeout=timeout))
        asked_ms = self._context.clock.now_ms()
        return Why(topic, id, late, kept, message, asked_ms, paused, report.unreachable, origin)

    async def ping(self, *, timeout: Duration | None = None) -> PingAnswer:
        """Ask a broker for its name and the time of its clock."""
        self._context.check()
        clock = self._context.clock
        sent_ms = clock.now()
        data = await self._context.channel.unary("Ping", encode(Ping(sent_ms)), self._context.deadline(timeout))
        arrived_ms = clock.now()
        pong = decode_as(data, Pong)
        round_trip_ms = (arrived_ms - sent_ms) - (pong.answered_ms - pong.received_ms)
        offset_ms = ((pong.received_ms - sent_ms) + (pong.answered_ms - arrived_ms)) / 2
        error_ms = abs(round_trip_ms) / 2
        self._context.drift.note(pong.broker, -offset_ms, error_ms)
        address = self._context.channel.current
        return PingAnswer(pong.broker, pong.version, address, round_trip_ms, offset_ms, error_ms)

    async def standing(self, topic: str = "", *, consumers: int = 1_000, timeout: Duration | None = None) -> Standings:
        """Return the status of each known broker, ready or not. It has the load of its topics (or of `topic`),
        lateness, and at most `consumers` of its connected consumers.

        Raise Invalid, Closed, or Unavailable if no broker answered.
        """
        self._context.check()
        frame = encode(StatusRequest(check_topic_name(topic) if topic else "", consumers))
        answers, silent = await ask_all(self._context.channel, "Stand", frame, self._context.deadline(timeout))
        found = (standing_of(address, decode_as(data, BrokerStatus)) for address, data in answers.items())
        there: dict[str, tuple[str, ...]] = {
            address: (one.name,) for address, fault in silent.items() if (one := found_by(fault)) is not None
        }
        return Standings(tuple(found), {address: fault.reason for address, fault in silent.items()}, there)
