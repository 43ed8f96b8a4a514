"""S14: nobody has more in flight than its credit, and those with credit get the same share. S15: queues are bounded."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from timeline.history.record import Event, Values
from timeline.history.story import Violation

Session = tuple[str, int]
Token = tuple[str, int, int]

SETTLED_IN_MS = 500.0
"""How long after it began a consumer is certainly connected, where nothing is wrong."""


def over_credit(events: Iterable[Event], clock_bound_ms: float) -> Iterator[Violation]:
    """Where a consumer had more in flight than its session's credit. `consume` lines say the credit: `credit` in
    messages, `credit_bytes` in bytes of payloads and headers (a message larger than that goes alone). What its code had
    is told by receives and settles, up to the moment that a settle was asked for; where a receive says `in_hand`, the
    [messages, bytes] that its driver had then, that is held to the credit too: what waited in the buffer, and what was
    settled and not answered, or refused."""
    credit: dict[Session, Values] = {}
    deliveries: dict[Session, list[Event]] = defaultdict(list)
    settled: dict[Token, float] = {}
    for event in events:
        values = event.arguments
        if event.operation == "consume" and "credit" in values:
            credit[values["consumer"], values["session"]] = values
        elif event.operation == "receive" and "session" in values:
            deliveries[values["consumer"], values["session"]].append(event)
        elif event.operation in ("ack", "release", "bury", "lost"):
            key = values["id"], values["birth"], values["version"]
            settled[key] = min(settled.get(key, inf), event.invoked)
    for session, received in deliveries.items():
        if session in credit:
            yield from _over(credit[session], received, settled, clock_bound_ms)


def _over(credit: Values, received: list[Event], settled: dict[Token, float], bound_ms: float) -> Iterator[Violation]:
    """In flight are those received whose lease runs, whose settle was not yet asked for, and which the driver has not
    given up as lost (it may, when it cannot be sure that the lease still runs)."""
    ends: list[tuple[float, int]] = []
    nbytes = 0
    for event in sorted(received, key=lambda one: one.invoked):
        values = event.arguments
        while ends and ends[0][0] <= event.invoked:
            nbytes -= heapq.heappop(ends)[1]
        lease_ends = event.invoked + (values["lease_until_ms"] - event.wall_ms) - bound_ms
        end = min(lease_ends, settled.get((values["id"], values["birth"], values["version"]), inf))
        size = values.get("size", 0)
        heapq.heappush(ends, (end, size))
        nbytes += size
        most = credit.get("credit_bytes") or inf
        for messages, total in ((len(ends), nbytes), values.get("in_hand", (0, 0))):
            if messages > credit["credit"] or (total > most and messages > 1):
                sentence = f"{messages} messages of {total} bytes in flight at a consumer with credit for "
                sentence += f"{credit['credit']}" + (f" of {most}" if most < inf else "")
                yield Violation("S14", sentence, values.get("topic", ""), values["id"], (event.as_line(),))
                return


@dataclass(slots=True)
class _Run:
    """Dealing rounds of one topic one after the other, by one broker, between the same consumers, none of whom ran out
    of credit: what each got in all of them."""

    holders: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)


def unfair(events: Iterable[Event]) -> Iterator[Violation]:
    """Where consumers with credit got shares that differ by more than one: within a dealing round, and over rounds as
    long as the same consumers had credit.

    See `liveness` for what a `deal` line says. A round that dealt nothing shared nothing out."""
    runs: dict[tuple[str, str], _Run] = {}
    for event in events:
        if event.operation != "deal" or not _dealt_something(event):
            continue
        values = event.arguments
        granted = values["granted"]
        able = with_credit(values, values["largest"])
        counts = {holder: values["dealt"].get(holder, (0, 0))[0] for holder in granted}
        yield from _uneven(event, counts, able, "in one round")
        run = runs.setdefault((values.get("topic", ""), values.get("broker", "")), _Run())
        if run.holders != frozenset(granted):
            run.holders, run.counts = frozenset(granted), dict.fromkeys(granted, 0)
        if len(able) < len(granted):
            run.holders = frozenset()
            continue
        run.counts = {holder: run.counts[holder] + count for holder, count in counts.items()}
        yield from _uneven(event, run.counts, able, "over rounds in which all had credit")


def with_credit(deal: Values, largest: int) -> list[str]:
    """Return who had credit left after a dealing round for one more message of `largest` bytes."""
    dealt = deal["dealt"]
    return [
        holder
        for holder, (messages, nbytes) in deal["granted"].items()
        if dealt.get(holder, (0, 0))[0] < messages and dealt.get(holder, (0, 0))[1] + largest <= nbytes
    ]


def _dealt_something(event: Event) -> bool:
    return any(messages for messages, _ in event.arguments["dealt"].values())


def _uneven(event: Event, counts: dict[str, int], able: list[str], when: str) -> Iterator[Violation]:
    most = max(counts.values(), default=0)
    for holder in able:
        if most > counts[holder] + 1:
            sentence = f"{holder!r} got {counts[holder]} though it had credit, another {most}, {when}"
            yield Violation("S14", sentence, event.arguments.get("topic", ""), lines=(event.as_line(),))
            return


@dataclass(slots=True)
class _Present:
    """A consumer on its topic since `since`: what it was leased and has not settled. `lapsed`: a lease of it ran out,
    so that it may have been set aside. `broker`: the one that granted it something last."""

    topic: str
    since: float
    unsettled: set[Token] = field(default_factory=set)
    lapsed: bool = False
    broker: str = ""


def left_out(events: Sequence[Event]) -> Iterator[Violation]:
    """Where a dealing round passed over a consumer that certainly had credit: one with nothing in flight, none of whose
    leases ever ran out. Told by the store's side, and only until the first fault. Where several brokers deal, each
    passes over those of the others: a consumer counts with the one that dealt to it last."""
    present: dict[str, _Present] = {}
    several = any(event.operation == "deal" and event.arguments.get("brokers", 1) > 1 for event in events)
    for _, event in _by_time(events):
        values, kind = event.arguments, event.operation
        if kind == "fault":
            return
        if kind == "consume" and "topic" in values:
            present[values["consumer"]] = _Present(values["topic"], event.invoked)
        elif kind == "parted":
            present.pop(values["consumer"], None)
        elif kind in ("ack", "release", "bury") and (one := present.get(values["consumer"])) is not None:
            one.unsettled.discard((values["id"], values["birth"], values["version"]))
        elif kind == "commit" and values["kind"] in ("lease", "regrant"):
            _leased(present, values)
        elif kind == "deal":
            for id in values["granted"]:
                if id in present:
                    present[id].broker = values.get("broker", "")
            if _dealt_something(event):
                here = {id: one for id, one in present.items() if not several or one.broker == values.get("broker", "")}
                yield from _passed_over(here, event)


def _by_time(events: Iterable[Event]) -> list[tuple[float, Event]]:
    """Each event when it was over: a settle then gave its credit back at the latest. A deal when it began."""
    over = [(event.arguments.get("asked", event.returned), event) for event in events if event.returned < inf]
    return sorted(over, key=lambda one: (one[0], one[1].number))


def _leased(present: dict[str, _Present], values: Values) -> None:
    for one in present.values():
        before = {token for token in one.unsettled if token[:2] == (values["id"], values["birth"])}
        one.lapsed = one.lapsed or bool(before)
        one.unsettled -= before
    if (holder := present.get(values["holder"])) is not None:
        holder.unsettled.add((values["id"], values["birth"], values["version"]))


def _passed_over(present: dict[str, _Present], event: Event) -> Iterator[Violation]:
    values = event.arguments
    for id, one in present.items():
        # What this round leased to it would show in `granted`.
        free = not one.unsettled and not one.lapsed and one.topic == values.get("topic", "")
        if free and id not in values["granted"] and values.get("asked", event.invoked) > one.since + SETTLED_IN_MS:
            sentence = f"{id!r} had nothing in flight and was passed over"
            yield Violation("S14", sentence, one.topic, lines=(event.as_line(),))


def over_bounds(events: Iterable[Event]) -> Iterator[Violation]:
    """Queues that grew past their bounds. `queue` lines say the most that each held."""
    for event in events:
        values = event.arguments
        if event.operation == "queue" and values["most"] > values["bound"]:
            sentence = f"{values['what']} grew to {values['most']}, where {values['bound']} are allowed"
            yield Violation("S15", sentence, lines=(event.as_line(),))
