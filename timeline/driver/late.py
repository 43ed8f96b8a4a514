"""Late deliveries with their causes, and why one message is late or not delivered, as values and in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from enum import StrEnum

import numpy as np

from timeline.columns import Bools
from timeline.driver.message import StoredMessage, encode_id
from timeline.driver.schedules import ScheduleOrigin
from timeline.driver.times import Duration, as_datetime, duration_ms, shown_time
from timeline.driver.transport.channel import ClientContext, ask_all
from timeline.model import State, check_topic_name
from timeline.wire import Late, LateCause, LateList, decode_as, encode
from timeline.wording import printable, shown_lateness


class Cause(StrEnum):
    """Why a delivery was late, or why a due message is not delivered."""

    UNEXPLAINED = "UNEXPLAINED"
    NO_CONSUMER = "NO_CONSUMER"
    NO_CREDIT = "NO_CREDIT"
    STORE_SLOW = "STORE_SLOW"
    NO_BROKER = "NO_BROKER"
    BROKER_DOWN = "BROKER_DOWN"
    PAUSED = "PAUSED"
    RATE_LIMITED = "RATE_LIMITED"
    CLOCK = "CLOCK"
    PRODUCED_LATE = "PRODUCED_LATE"
    LEASE_RAN_OUT = "LEASE_RAN_OUT"


HAPPENED: dict[Cause, str] = {
    Cause.UNEXPLAINED: "no cause was noted",
    Cause.NO_CONSUMER: "no consumer was connected",
    Cause.NO_CREDIT: "every consumer was full, or asked for nothing",
    Cause.STORE_SLOW: "the store was slow",
    Cause.NO_BROKER: "no broker had its bucket",
    Cause.BROKER_DOWN: "the broker was down",
    Cause.PAUSED: "the topic was paused",
    Cause.RATE_LIMITED: "the topic's rate limit held it back",
    Cause.CLOCK: "a clock was set",
    Cause.PRODUCED_LATE: "it was put or moved too late",
    Cause.LEASE_RAN_OUT: "a consumer let its lease run out",
}
"""The causes in words, short enough for a table."""

ADVICE: dict[Cause, str] = {
    Cause.UNEXPLAINED: "if many are so, look at the broker's processor time and its log",
    Cause.NO_CONSUMER: "keep a consumer connected: 'timeline top' shows who is",
    Cause.NO_CREDIT: "where take is used, call again sooner, wait longer in each call, or keep a consumer: a take that "
    "has ended still counts as a consumer for about a minute; else start more consumers, give them more credit, or let "
    "their handlers take less time; if it has webhooks, see that their receiver answers",
    Cause.STORE_SLOW: "look at timeline_store_call_seconds in /metrics, and at the disk or database behind the store; "
    "'timeline topic update TOPIC --lease-ahead 1s' leases before short stalls",
    Cause.NO_BROKER: "a bucket was between two brokers: it settles by itself within seconds",
    Cause.BROKER_DOWN: "it was delivered once a broker was back",
    Cause.PAUSED: "'timeline topic resume TOPIC' lets it deliver",
    Cause.RATE_LIMITED: "'timeline topic update TOPIC --max-rate-per-s N' raises the limit, 0 lifts it",
    Cause.CLOCK: "keep the clocks of brokers in step (chrony or ntpd)",
    Cause.PRODUCED_LATE: "its due was past, or nearly so, when the broker got it: nothing was slow here",
    Cause.LEASE_RAN_OUT: "it was delivered before and not settled in time: a longer --lease, or extend while it works",
}
"""Advice for each cause."""

LEARNT: dict[Cause, str] = ADVICE | {Cause.PAUSED: "it was delivered once the topic was resumed"}
"""Advice about a delivery that is over."""

KEEPS: dict[Cause, str] = HAPPENED | {
    Cause.UNEXPLAINED: "nothing that the broker knows of keeps it; it should go at once",
    Cause.NO_CONSUMER: "no consumer is connected",
    Cause.NO_CREDIT: "no take waits, and every consumer is full or asks for nothing",
    Cause.STORE_SLOW: "the store is slow",
    Cause.NO_BROKER: "no broker has its bucket",
    Cause.PAUSED: "the topic is paused",
    Cause.RATE_LIMITED: "the topic's rate limit holds it back",
}
"""The causes in words while a due message is not delivered."""

NEVER_LATE = "no late delivery of this message is recorded"
RETRIED = ": a retry has a due time of its own, and its lateness counts from that"


@dataclass(frozen=True, slots=True, repr=False)
class LateDelivery:
    """A delivery that was more than 50 ms late, and its cause. Times are milliseconds UTC on the broker's clock.

    Without a `consumer`: a message that is due and not delivered. Then `delivered_ms` is when the broker was asked.
    """

    topic: str
    id: str
    consumer: str
    due_ms: int
    delivered_ms: int
    cause: Cause

    @property
    def due(self) -> datetime:
        """When it was due, an aware datetime in UTC."""
        return as_datetime(self.due_ms)

    @property
    def delivered(self) -> datetime:
        """When it was delivered, an aware datetime in UTC."""
        return as_datetime(self.delivered_ms)

    @property
    def lateness(self) -> timedelta:
        """How late it was."""
        return timedelta(milliseconds=self.delivered_ms - self.due_ms)

    @property
    def why(self) -> str:
        """The cause in words: "no consumer was connected"."""
        return HAPPENED[self.cause] if self.consumer else KEEPS[self.cause]

    @property
    def advice(self) -> str:
        """Advice about the cause."""
        return (LEARNT if self.consumer else ADVICE)[self.cause].replace("TOPIC", self.topic)

    def __repr__(self) -> str:
        return f"LateDelivery({self.id!r}, {self.cause}, {self._by} late)"

    @property
    def _by(self) -> str:
        return shown_lateness(self.delivered_ms - self.due_ms)

    def lines(self, zone: tzinfo | None) -> list[str]:
        """Return the cause and the advice, a line each."""
        if self.consumer:
            when = shown_time(self.delivered_ms, zone)
            said = f"{when}  delivered to {self.consumer}, {self._by} late: {self.why}"
        else:
            said = f"now  due for {self._by}, and no consumer has it: {self.why}"
        return [said, f"  → {self.advice}"]


@dataclass(frozen=True, slots=True, repr=False)
class LateReport:
    """Late deliveries from all brokers, the oldest first. `dropped`: how many the brokers have forgotten.
    `unreachable`: addresses that did not answer; their deliveries are missing."""

    deliveries: tuple[LateDelivery, ...]
    dropped: int
    unreachable: tuple[str, ...]

    @property
    def causes(self) -> dict[Cause, int]:
        """The number of late deliveries by cause, the most frequent first."""
        return dict(Counter(one.cause for one in self.deliveries).most_common())

    def __repr__(self) -> str:
        told = [f"{len(self.deliveries)} late", *(f"{cause} {count}" for cause, count in self.causes.items())]
        if self.unreachable:
            told.append(f"{len(self.unreachable)} brokers unreachable")
        return f"LateReport({', '.join(told)})"


@dataclass(frozen=True, slots=True, repr=False)
class Why:
    """Why a message was late, or is due and not delivered. `print(why)` prints the text of `timeline why`.

    `late`: its late deliveries that brokers remember, the oldest first. `kept`: why it is not delivered now, or None.
    `message`: the message at `asked_ms`; None if it is not on the timeline any more. `paused`: the topic is paused, and
    `kept` has another cause. `unreachable`: brokers that did not answer; their part is missing. `schedule`: where it
    comes from, if it comes from one.
    """

    topic: str
    id: str
    late: tuple[LateDelivery, ...]
    kept: LateDelivery | None
    message: StoredMessage | None
    asked_ms: int
    paused: bool = False
    unreachable: tuple[str, ...] = ()
    schedule: ScheduleOrigin | None = None

    @property
    def cause(self) -> Cause | None:
        """The cause of `kept`, or else of its last late delivery. None if neither is known."""
        if self.kept is not None:
            return self.kept.cause
        return self.late[-1].cause if self.late else None

    def lines(self, zone: tzinfo | None = None) -> list[str]:
        """Return what happened to the message, one sentence per line, with advice. Times are in `zone` (default: this
        machine's)."""
        origin = self.schedule.lines(self.message, zone) if self.schedule is not None else []
        told = [line for one in self.late for line in one.lines(zone)]
        if self.kept is not None:
            told += self.kept.lines(zone)
            if self.paused:
                told += [
                    "     besides, the topic is paused",
                    f"  → {ADVICE[Cause.PAUSED].replace('TOPIC', self.topic)}",
                ]
        elif self.message is None:
            told.append(
                f"now  no longer on {self.topic}: acknowledged, cancelled, purged or expired. "
                "Only an event journal records which of these"
            )
        else:
            retried = self.message.deliveries > (self.message.state in (State.LEASED, State.DEAD))
            never = [] if told else [NEVER_LATE + (RETRIED if retried else "")]
            told.append(f"now  {self._state(self.message, zone)}")
            if self.message.state is State.WAITING and self.message.deliveries:
                told.append("     the reason of a release is in the log of its consumer or gateway")
            told += never
        return [printable(line) for line in [*origin, *told]]

    def _state(self, message: StoredMessage, zone: tzinfo | None) -> str:
        when = shown_time(message.due_ms, zone)
        if message.state is State.DEAD:
            back = f"'timeline dead revive {self.topic} {self.id}' puts it back"
            return f"a dead letter since {shown_time(message.died_ms, zone)} ({message.dead}): {back}"
        if message.state is State.LEASED:
            return f"{message.holder} has it until {when}, delivery {message.deliveries}"
        if message.state is State.AVAILABLE:
            return "due this moment"
        many = "delivery" if message.deliveries == 1 else "deliveries"
        before = f", after {message.deliveries} {many}" if message.deliveries else ""
        return f"waiting{before}: due in {shown_lateness(max(0, message.due_ms - self.asked_ms))}, at {when}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        state = self.message.state if self.message is not None else "gone"
        return f"Why({self.id!r}, {', '.join([state, *([self.cause] if self.cause else [])])})"


_CAUSES = [Cause(cause.name) for cause in LateCause]


async def late_rows(
    context: ClientContext, since: Duration, topic: str, id: str, limit: int, timeout: Duration | None = None
) -> tuple[LateList, tuple[str, ...]]:
    """Return the late deliveries that brokers remember as columns, the oldest first, and the addresses that did not
    answer. See `Timeline.late`."""
    context.check()
    since_ms = duration_ms(since, "since", least_ms=1)
    if topic:
        check_topic_name(topic)
    frame = encode(Late(topic=topic, id=encode_id(id) if id else b"", limit=limit))
    answers, unreachable = await ask_all(context.channel, "Late", frame, context.deadline(timeout))
    return _merged([decode_as(data, LateList) for data in answers.values()], since_ms), tuple(unreachable)


def _merged(lists: Sequence[LateList], since_ms: int) -> LateList:
    """Return what brokers remember of the last `since_ms`, the oldest first. Two addresses may be one broker."""
    parts = [_where(told, told.delivered_ms >= told.now_ms - since_ms) for told in lists]
    whole = LateList.concat(parts)
    whole.dropped = sum(told.dropped for told in lists)
    if len(parts) > 1:
        rows = zip(
            whole.topics, whole.ids, whole.consumers, whole.due_ms.tolist(), whole.delivered_ms.tolist(),
            whole.cause.tolist(), strict=True,
        )  # fmt: skip
        whole = whole.take(np.array(sorted({row: at for at, row in enumerate(rows)}.values()), dtype=np.intp))
    sorted_already = bool((np.diff(whole.delivered_ms) >= 0).all())
    return whole if sorted_already else whole.take(np.argsort(whole.delivered_ms, kind="stable"))


def _where(rows: LateList, wanted: Bools) -> LateList:
    return rows if wanted.all() else rows.take(wanted)


def deliveries_of(rows: LateList) -> tuple[LateDelivery, ...]:
    """Return late deliveries as values."""
    texts = ([item.decode() for item in column.tolist()] for column in (rows.topics, rows.ids, rows.consumers))
    causes = (_CAUSES[code] for code in rows.cause.tolist())
    return tuple(map(LateDelivery, *texts, rows.due_ms.tolist(), rows.delivered_ms.tolist(), causes))


def causes_of(rows: LateList) -> dict[Cause, int]:
    """Return how many late deliveries there are by cause, the most frequent first."""
    return {_CAUSES[code]: count for code, count in Counter(rows.cause.tolist()).most_common()}


def of_cause(rows: LateList, cause: str) -> Bools:
    """Return which late deliveries have this cause. An unknown one: none has it."""
    return np.isin(rows.cause, [code for code, name in enumerate(_CAUSES) if name == cause])


def newest(rows: LateList, most: int) -> Sequence[LateDelivery]:
    """Return the newest late deliveries, the newest first, `most` of them."""
    return deliveries_of(rows.slice(max(0, len(rows) - most), len(rows)))[::-1]
