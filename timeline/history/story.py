"""All that is known of one id: its events sorted out, and which of its lives each can be about.

An id's life begins with a put that stored it and ends when it is acknowledged, cancelled, purged, expired or replaced;
another put then begins the next. What a history does not say (which life a move met, whether a lost call happened) is
never decided here: the questions below are asked so that a yes is certain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from timeline.history.course import Course
from timeline.history.record import UNKNOWN, Event, Values, described

MOST_TOLD = 60
"""Lines of one id that are told at most, its first and its last ones."""

SETTLES = ("ack", "extend", "release", "bury")
SCHEDULERS = ("move", "revive")
REMOVERS = ("cancel", "purge")


@dataclass(slots=True)
class Violation:
    """A broken promise: which (`S1` … `S16`, `L1`), a sentence, the message, and the lines that show it."""

    invariant: str
    sentence: str
    topic: str = ""
    id: str = ""
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        about = f" {self.topic}/{self.id}" if self.id else ""
        return "\n    ".join([f"{self.invariant}{about}: {self.sentence}", *self.lines])


@dataclass(frozen=True, slots=True)
class Declared:
    """What the run was allowed to do: see `checker.check` for each."""

    durable: bool = True
    clock_bound_ms: float = 0.0
    transit_bound_ms: float | None = None
    liveness_bound_ms: float | None = None
    remember: frozenset[str] = frozenset()
    retention: frozenset[str] = frozenset()
    dropped: frozenset[str] = frozenset()
    last_crash: float = -inf
    sessions: Mapping[str, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    """Of each consumer id its sessions, each with when it was there: from, until (monotonic ms)."""
    witnessed: bool = False
    """Whether the store's side of everything is in the history."""
    settings: Mapping[str, Values] = field(default_factory=dict)
    """Of each topic what the history says of its settings, as last changed; `lease_ahead_ms` being how long before its
    due a message may be leased at most."""
    end_wall_ms: float = inf


@dataclass(slots=True)
class Story:
    """The events and dump rows of one (topic, id), each list by time of invocation."""

    topic: str
    id: str
    declared: Declared
    puts: list[Event] = field(default_factory=list)
    mutations: list[Event] = field(default_factory=list)
    settles: list[Event] = field(default_factory=list)
    receives: list[Event] = field(default_factory=list)
    reads: list[Event] = field(default_factory=list)
    commits: list[Event] = field(default_factory=list)
    by_tag: list[Event] = field(default_factory=list)
    rows: list[Values] = field(default_factory=list)
    _storers: list[Event] | None = None
    _course: Course | None = None

    def add(self, event: Event) -> None:
        """Files an event under its kind."""
        operation = event.operation
        if operation == "receive":
            self.receives.append(event)
        elif operation == "put":
            self.puts.append(event)
        elif operation in SETTLES:
            self.settles.append(event)
        elif operation == "commit":
            self.commits.append(event)
        elif operation in ("move", "cancel", "revive", "purge"):
            self.mutations.append(event)
        else:
            self.reads.append(event)

    @property
    def storers(self) -> list[Event]:
        """Puts that began a life, or may have: not those that met their like, which is another put of the same content
        that may have been there before."""
        if self._storers is None:
            found: list[Event] = []
            for put in self.puts:
                if not put.may_have_happened:
                    continue
                again = bool(put.result.get("repeated"))  # then it may have met itself
                if met(put) and not again and any(self._may_meet(one, put) for one in self.puts if one is not put):
                    continue
                found.append(put)
            self._storers = found
        return self._storers

    def _may_meet(self, other: Event, put: Event) -> bool:
        alike = other.arguments.get("sum") == put.arguments.get("sum")
        return alike and other.may_have_happened and other.invoked < put.returned and not met(other)

    def storers_of(self, birth: int, content: int | None) -> list[Event]:
        """The storers that may have begun the life `birth`, whose payload's checksum is `content` (None: not seen)."""
        named = [put for put in self.storers if put.arguments.get("birth") == birth]
        if named:
            return named
        return [
            put
            for put in self.storers
            if put.arguments.get("birth") is None and content in (None, put.arguments.get("sum", content))
        ]

    @property
    def births(self) -> dict[int, int | None]:
        """Each life that was seen by its birth, with its content's checksum where that was seen."""
        seen: dict[int, int | None] = {}
        for event in self.settles:
            seen.setdefault(event.arguments["birth"], None)
        for event in self.receives:
            seen[event.arguments["birth"]] = event.arguments.get("sum")
        for row in self.rows:
            seen[row["birth"]] = row["sum"]
        return seen

    def span(self, storer: Event) -> tuple[float, float]:
        """Monotonic ms between which the life that `storer` began can have been there."""
        if storer.outcome == UNKNOWN:
            return storer.invoked, inf
        ends = [put.returned for put in self.storers if stored(put) and put.invoked > storer.returned]
        return storer.invoked, min(ends, default=inf)

    def sole(self, event: Event, birth: int, content: int | None) -> bool:
        """Whether `event`, which names no life, can only have met the life `birth`."""
        storers = self.storers
        if len(storers) == 1:
            return True
        met_by = []
        for storer in storers:
            start, end = self.span(storer)
            if start <= event.effect_until and event.invoked <= end:
                met_by.append(storer)
        mine = self.storers_of(birth, content)
        return len(met_by) == 1 and len(mine) == 1 and met_by[0] is mine[0]

    def removers(self, storer: Event | None = None) -> Iterator[tuple[float, float, Event | None]]:
        """(from, until, event) of whatever may have ended the life that `storer` began (None: any life): from, until
        in monotonic ms. Expiry, retention and a dropped topic come without an event."""
        for event in self.settles:
            gone = event.operation == "ack" and event.may_have_happened
            # A release past the expiry removes the message; its answer may have got lost.
            past = event.operation == "release" and not event.happened and event.may_have_happened and self.expiries
            if (gone or past or expired(event)) and self._concerns(event, storer):
                yield event.invoked, event.effect_until, event
        for event in self.mutations:
            if (event.operation in REMOVERS and event.may_have_happened) or expired(event):
                yield event.invoked, event.effect_until, event
        for event in self.reads:
            if expired(event):
                yield event.invoked, event.effect_until, event
        for event in self.puts:
            if event.arguments.get("replace") and event.may_have_happened and event is not storer:
                yield event.invoked, event.effect_until, event
        for event in self.by_tag:
            if event.may_have_happened and (event.operation == "cancel_tag" or self.expiries):
                yield event.invoked, event.effect_until, event
        for put in self.puts if storer is None else [storer]:
            at = expiry(put, self.declared.clock_bound_ms)
            if at < inf:
                yield put.invoked + max(0.0, at - put.wall_ms), inf, None
        if self.topic in self.declared.dropped or self.topic in self.declared.retention:
            yield -inf, inf, None

    @property
    def course(self) -> Course:
        """How the message stood, as the store's side tells it."""
        if self._course is None:
            self._course = Course(self.commits)
        return self._course

    @property
    def remembers(self) -> bool:
        """Whether the topic remembers ids that were settled."""
        return self.topic in self.declared.remember

    @property
    def expiries(self) -> bool:
        return any(expiry(put, 0.0) < inf for put in self.puts)

    def _concerns(self, settle: Event, storer: Event | None) -> bool:
        if storer is None:
            return True
        return storer in self.storers_of(settle.arguments["birth"], self.births.get(settle.arguments["birth"]))

    def lives_twice(self, birth: int, content: int | None) -> bool:
        """Whether one put of this life may have stored it again after it was settled (the documented doubling)."""
        if self.commits:
            return self.course.births(birth) > 1
        ends = self.removers()
        if self.remembers:
            # What was acknowledged, cancelled or expired is remembered, what was purged or replaced is not.
            ends = (end for end in ends if end[2] is not None and end[2].operation in ("purge", "put"))
        first_end = min((start for start, _, _ in ends), default=inf)
        return first_end < inf and any(put.effect_until >= first_end for put in self.storers_of(birth, content))

    @property
    def forgotten(self) -> bool:
        """Whether a store that declares no durability may have lost something of this id in a crash."""
        if self.declared.durable:
            return False
        return any(put.invoked <= self.declared.last_crash for put in self.puts)

    def told(self, faults: Iterable[Event] = ()) -> list[str]:
        """All that was done with the id, as lines for people in the order of time, `faults` among them, and what the
        store had at the end."""
        events = [*self.puts, *self.mutations, *self.settles, *self.receives, *self.reads, *self.commits, *self.by_tag]
        ordered = sorted((*events, *faults), key=lambda event: (event.invoked, event.number))
        lines = [*map(described, ordered), *map(described, self.rows)]
        if len(lines) > MOST_TOLD:
            half = MOST_TOLD // 2
            lines[half:-half] = [f"… and {len(lines) - MOST_TOLD} more"]
        return lines

    def violation(self, invariant: str, sentence: str, *shown: Event | Values | None) -> Violation:
        """A violation about this id, with the lines that show it."""
        lines = tuple(described(line) for line in shown if line is not None)
        return Violation(invariant, sentence, self.topic, self.id, lines)


def met(put: Event) -> bool:
    """Whether a put was answered DUPLICATE: its message was there already."""
    return put.result.get("status") == "DUPLICATE"


def stored(put: Event) -> bool:
    """Whether a put certainly stored a message that was not there before. Answered with a later version, it was
    repeated and met itself, unless it was to move what is there: then it may have done just that."""
    if not put.happened or met(put):
        return False
    return not put.arguments.get("move") or put.result.get("version", 1) == 1


def expired(event: Event) -> bool:
    """Whether an answer says that the message was found expired, and removed."""
    return event.result.get("status") == "EXPIRED"


def expiry(put: Event, bound_ms: float) -> float:
    """The earliest true wall time at which a broker may find the put's message expired; infinity without an expiry.
    What counts from now was reckoned by one broker's clock, and another's may find it."""
    arguments = put.arguments
    if not put.may_have_happened:
        return inf
    if arguments.get("expires_in_ms"):
        return put.wall_ms + float(arguments["expires_in_ms"]) - 2 * bound_ms - 1
    return float(arguments["expires_ms"]) - bound_ms if arguments.get("expires_ms") else inf


def sort_out(events: Iterable[Event], rows: Iterable[Values], declared: Declared) -> list[Story]:
    """The stories of all ids in events and dump."""
    stories: dict[tuple[str, str], Story] = {}
    tagged: list[Event] = []

    def story(values: dict[str, Any]) -> Story:
        key = values.get("topic", ""), values["id"]
        found = stories.get(key)
        if found is None:
            found = stories[key] = Story(key[0], key[1], declared)
        return found

    for event in events:
        if "id" in event.arguments:
            story(event.arguments).add(event)
        elif event.operation in ("move_tag", "cancel_tag") and not event.arguments.get("dry_run"):
            tagged.append(event)
    for row in rows:
        story(row).rows.append(row)
    if tagged:
        for one in stories.values():
            tags = {(put.arguments.get("tag", ""), put.arguments.get("group", "default")) for put in one.puts}
            one.by_tag = [
                event
                for event in tagged
                if event.arguments.get("topic", "") == one.topic
                and (event.arguments["tag"], event.arguments.get("group", "default")) in tags
            ]
    return list(stories.values())
