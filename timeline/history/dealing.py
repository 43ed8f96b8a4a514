"""The judge of dispatch: dealing rounds judged by the store's side, credit by what callers had.

S12: nothing due is left lying while there is credit. L1: nothing stays stranded once all faults are healed. S14: no
consumer has more in flight than its credit, and those with credit get equal shares. S15: queues are bounded.

A `deal` line is a call of the store that leased, or found nothing to lease. Its arguments:

| argument | meaning |
|---|---|
| `asked`, `now_ms` | when it began, in monotonic ms, and by the broker's clock |
| `buckets` | where it looked; None: everywhere |
| `overdue_ms` | by how much messages had to be overdue |
| `broker`, `brokers` | who asked, and how many brokers there are if more than one |
| `granted`, `dealt` | holder → [messages, bytes]: credit, and what it got |
| `largest` | size of the largest message that it leased |

The `topic` line has its topic's `buckets` and `redelivery_backoff_ms`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from timeline.history.record import Event, Values, described
from timeline.history.story import CourseStretch, Declared, MessageState, Story, Violation, expires_by
from timeline.model import PULL_PREFIX, bucket_of

LOOKED_FOR_IN_MS = 500.0
"""How soon after a message's due time a round begins, if there is credit and no fault."""


@dataclass(slots=True)
class Rounds:
    """The dealing rounds of a topic, by when they began.

    `credit`: whether any consumer had credit for any further message, of any size. `lasting`: the same, without the
    consumers that brokers keep for Takes: their credit ends with the callers that wait. `calm_until`: when dealing may
    first have been hindered: by a fault, a pause, a lease that ran out (its consumer may be suspended), or the end of
    all faults.
    """

    events: list[Event] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    credit: list[bool] = field(default_factory=list)
    lasting: list[bool] = field(default_factory=list)
    calm_until: float = inf


def left_lying(stories: Sequence[Story], events: Iterable[Event]) -> Iterator[Violation]:
    """Yield messages that were due and unchanged, and that no round leased though there was credit: one violation per
    id."""
    topics = _rounds(stories, events)
    for story in stories:
        rounds = topics.get(story.topic)
        settings = story.declared.settings.get(story.topic, {})
        if rounds is not None and "buckets" in settings:
            found = _left(story, rounds, settings["buckets"], settings.get("redelivery_backoff_ms", 0))
            yield from [found] if found is not None else ()


def _rounds(stories: Sequence[Story], events: Iterable[Event]) -> dict[str, Rounds]:
    largest: dict[str, int] = defaultdict(int)
    topics: dict[str, Rounds] = defaultdict(Rounds)
    for story in stories:
        sizes = (stretch.standing.size for stretch in story.course.stretches if stretch.standing is not None)
        largest[story.topic] = max(largest[story.topic], *sizes, 0)
        ran_out = (
            after.since
            for before, after in zip(story.course.stretches, story.course.stretches[1:], strict=False)
            if before.standing is not None and before.standing.holder and _is_lease(after)
        )
        topics[story.topic].calm_until = min(topics[story.topic].calm_until, *ran_out, inf)
    events = list(events)
    over = max((event.invoked for event in events), default=inf)
    for event in sorted(events, key=lambda event: event.arguments.get("asked", event.invoked)):
        values = event.arguments
        if event.operation == "deal" and "now_ms" in values:
            rounds = topics[values["topic"]]
            rounds.events.append(event)
            rounds.begins.append(values["asked"])
            able = with_credit(values, largest[values["topic"]])
            rounds.credit.append(bool(able))
            rounds.lasting.append(not all(holder.startswith(PULL_PREFIX) for holder in able))
        elif event.operation in ("fault", "healed"):
            over = min(over, event.invoked)
        elif event.operation == "topic" and (values.get("settings") or {}).get("paused"):
            topics[values["name"]].calm_until = min(topics[values["name"]].calm_until, event.invoked)
    for rounds in topics.values():
        rounds.calm_until = min(rounds.calm_until, over)
    return {name: rounds for name, rounds in topics.items() if rounds.events}


def _is_lease(stretch: CourseStretch) -> bool:
    return stretch.by is not None and stretch.by.arguments["kind"] == "lease"


def _left(story: Story, rounds: Rounds, buckets: int, backoff_ms: int) -> Violation | None:
    bucket, bound_ms = bucket_of(story.id.encode(), buckets), story.declared.clock_bound_ms
    for stretch in story.course.stretches:
        standing = stretch.standing
        if standing is None or standing.dead:
            continue
        for at in range(bisect_right(rounds.begins, stretch.since), bisect_left(rounds.begins, stretch.until)):
            event = rounds.events[at]
            if rounds.credit[at] and _passed_over(stretch, standing, bucket, backoff_ms, event, bound_ms):
                late_ms = event.arguments["now_ms"] - standing.due_ms
                sentence = f"a dealing round with credit left passed it over, {late_ms} ms after its due"
                return story.violation("S12", sentence, stretch.by, event)
        if not standing.holder and _not_looked_for(stretch, standing, rounds, bucket, bound_ms):
            sentence = f"nobody looked for it for {LOOKED_FOR_IN_MS:.0f} ms after its due, though there was credit"
            return story.violation("S12", sentence, stretch.by)
    return None


def _passed_over(
    stretch: CourseStretch, standing: MessageState, bucket: int, backoff_ms: int, event: Event, bound_ms: float
) -> bool:
    values = event.arguments
    if event.returned >= stretch.until or (values["buckets"] is not None and bucket not in values["buckets"]):
        return False
    rests_ms = max(backoff_ms if standing.holder else 0, values["overdue_ms"])
    # A sweep, perhaps another broker's, may have removed what expired before the round came to it, or the round did.
    over_ms = max(values["now_ms"], event.wall_ms + bound_ms)
    return standing.due_ms + rests_ms <= values["now_ms"] and not expires_by(standing, over_ms)


def _not_looked_for(
    stretch: CourseStretch, standing: MessageState, rounds: Rounds, bucket: int, bound_ms: float
) -> bool:
    """Return whether the last round before that was for its bucket had credit left, and none came when this was due. If
    several brokers dealt the bucket, the last round of each counts: the history does not say which of them deals it
    now. A sweep of others' buckets is for no bucket."""
    assert stretch.by is not None
    due = max(stretch.since, standing.due_ms - stretch.by.wall_ms + stretch.by.invoked + bound_ms)
    until = due + LOOKED_FOR_IN_MS
    if until >= min(stretch.until, rounds.calm_until) or expires_by(standing, standing.due_ms + LOOKED_FOR_IN_MS):
        return False
    following = bisect_left(rounds.begins, due)
    latest: dict[str, bool] = {}
    for at in range(following):
        if _is_for(rounds.events[at], bucket):
            latest[rounds.events[at].arguments.get("broker", "")] = rounds.lasting[at]
    in_time = range(following, bisect_right(rounds.begins, until))
    return bool(latest) and all(latest.values()) and not any(_is_for(rounds.events[at], bucket) for at in in_time)


def _is_for(event: Event, bucket: int) -> bool:
    values = event.arguments
    return not values["overdue_ms"] and (values["buckets"] is None or bucket in values["buckets"])


def stranded(events: Iterable[Event], rows: Iterable[Values], declared: Declared) -> Iterator[Violation]:
    """Yield messages that were due after all faults were healed, and not handed out within the bound. They were left
    lying, or leased again and again without reaching code. The wait counts from the time that a person asked for; from
    its due time if it was handed out since then."""
    bound_ms = declared.liveness_bound_ms
    if bound_ms is None:
        return
    events = list(events)
    healed = next((event for event in reversed(events) if event.operation == "healed"), None)
    healed_ms = -inf if healed is None else healed.wall_ms
    handed_ms: dict[Life, float] = {}
    for event in events:
        values = event.arguments
        if event.operation == "receive":
            late_ms = event.wall_ms - max(_since(values, handed_ms, healed_ms), healed_ms)
            handed_ms[_life(values)] = event.wall_ms
            if healed is not None and event.invoked >= healed.invoked and late_ms > bound_ms:
                sentence = f"delivered {late_ms:.0f} ms late after all was healed, where {bound_ms:.0f} are allowed"
                yield Violation("S12", sentence, values.get("topic", ""), values["id"], (event.as_line(),))
    for row in rows:
        # A due that lies behind is as late as it is, whenever faults were healed.
        late_ms = declared.end_wall_ms - min(row["due_ms"], max(_since(row, handed_ms, healed_ms), healed_ms))
        if not row["died_ms"] and late_ms > bound_ms:
            sentence = f"still not delivered {late_ms:.0f} ms after its due, where {bound_ms:.0f} are allowed"
            yield Violation("L1", sentence, row.get("topic", ""), row["id"], (described(row),))


Life: TypeAlias = tuple[str, str, int]


def _life(values: Values) -> Life:
    return values.get("topic", ""), values["id"], values["birth"]


def _since(values: Values, handed_ms: dict[Life, float], healed_ms: float) -> float:
    """Return since when it should have been handed out."""
    asked_ms = float(values["scheduled_ms"])
    handed = handed_ms.get(_life(values), -inf) >= max(asked_ms, healed_ms)
    return float(values["due_ms"]) if handed else asked_ms


# ── credit, shares and bounds ──


Session = tuple[str, int]
Token = tuple[str, int, int]

SETTLED_IN_MS = 500.0
"""How long after it began a consumer is certainly connected, if nothing is wrong."""


def over_credit(events: Iterable[Event], clock_bound_ms: float) -> Iterator[Violation]:
    """Yield where a consumer had more in flight than its session's credit.

    `consume` lines have the credit: `credit` in messages, `credit_bytes` in bytes of payloads and headers. A message
    larger than that goes alone. Receives and settles show what code had, until a settle was asked for. If a receive has
    `in_hand`, the [messages, bytes] of its driver, that counts too: the buffer, and settles without an answer or
    refused.
    """
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
    """In flight are messages whose lease runs, whose settle was not asked for, and which the driver has not given up as
    lost. It may give one up when it cannot be sure that the lease still runs."""
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
    """Successive rounds of one topic, by one broker, between the same consumers, none of whom ran out of credit.
    `counts`: how many messages each got in all of them."""

    holders: frozenset[str] = frozenset()
    counts: dict[str, int] = field(default_factory=dict)


def unfair(events: Iterable[Event]) -> Iterator[Violation]:
    """Yield where consumers with credit got shares that differ by more than one: within a round, and over rounds in
    which the same consumers had credit. Rounds that dealt nothing do not count."""
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
    """A consumer on its topic since `since`. `unsettled`: what it was leased and has not settled. `lapsed`: one of its
    leases ran out, so that it may have been suspended. `broker`: the one that granted it something last."""

    topic: str
    since: float
    unsettled: set[Token] = field(default_factory=set)
    lapsed: bool = False
    broker: str = ""


def left_out(events: Sequence[Event]) -> Iterator[Violation]:
    """Yield where a round passed over a consumer that certainly had credit: with nothing in flight, and no lease that
    ever ran out. The store's side tells, and only until the first fault. If several brokers deal, a consumer counts
    with the one that dealt to it last."""
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
                yield from _without_a_share(here, event)


def _by_time(events: Iterable[Event]) -> list[tuple[float, Event]]:
    """Return each event with when it was over: a settle gave its credit back by then. A deal counts when it began."""
    over = [(event.arguments.get("asked", event.returned), event) for event in events if event.returned < inf]
    return sorted(over, key=lambda one: (one[0], one[1].number))


def _leased(present: dict[str, _Present], values: Values) -> None:
    for one in present.values():
        before = {token for token in one.unsettled if token[:2] == (values["id"], values["birth"])}
        one.lapsed = one.lapsed or bool(before)
        one.unsettled -= before
    if (holder := present.get(values["holder"])) is not None:
        holder.unsettled.add((values["id"], values["birth"], values["version"]))


def _without_a_share(present: dict[str, _Present], event: Event) -> Iterator[Violation]:
    values = event.arguments
    for id, one in present.items():
        # What this round leased to it would show in `granted`.
        free = not one.unsettled and not one.lapsed and one.topic == values.get("topic", "")
        if free and id not in values["granted"] and values.get("asked", event.invoked) > one.since + SETTLED_IN_MS:
            sentence = f"{id!r} had nothing in flight and was passed over"
            yield Violation("S14", sentence, one.topic, lines=(event.as_line(),))


def over_bounds(events: Iterable[Event]) -> Iterator[Violation]:
    """Yield queues that grew past their bounds. `queue` lines have the most that each held."""
    for event in events:
        values = event.arguments
        if event.operation == "queue" and values["most"] > values["bound"]:
            sentence = f"{values['what']} grew to {values['most']}, where {values['bound']} are allowed"
            yield Violation("S15", sentence, lines=(event.as_line(),))
