"""S12 and L1: nothing that is due is left lying, or stranded once all faults are healed.

S12 as the store's side shows it, dealing round by dealing round: while there is credit, whatever comes due is looked
for at once, and a round with credit left leaves nothing lying that is due.

A `deal` line is a call of the store that leased, or found nothing to lease. It says when it began, `asked` (monotonic
ms), and at which time of the broker, `now_ms`; of which `buckets` (None: all) and overdue by how much, `overdue_ms`;
`broker`: who asked, and `brokers`: how many there are, where there is more than one;
`granted`: holder → [messages, bytes] of credit, `dealt`: holder → [messages, bytes], `largest`: the size of the largest
message that it leased. Its topic's `buckets` and `redelivery_backoff_ms` are told by the `topic` line.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from timeline.history.course import CourseStretch, MessageState, expires_by
from timeline.history.record import Event, Values, described
from timeline.history.sharing import with_credit
from timeline.history.story import Declared, Story, Violation
from timeline.model import bucket_of

LOOKED_FOR_IN_MS = 500.0
"""How soon after a message's due a round begins, where nothing is wrong and there is credit."""


@dataclass(slots=True)
class Rounds:
    """The rounds of a topic, by when they began. `credit`: whether anybody could have had any message more, whatever
    its size. `calm_until`: when the first thing happened that may hinder dealing: a fault, a pause, a lease that ran
    out (its consumer may be set aside), or the end of all faults."""

    events: list[Event] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    credit: list[bool] = field(default_factory=list)
    calm_until: float = inf


def left_lying(stories: Sequence[Story], events: Iterable[Event]) -> Iterator[Violation]:
    """What was due and stood as it was, and no round leased it though there was credit. Told once of each id."""
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
            rounds.credit.append(bool(with_credit(values, largest[values["topic"]])))
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
    """Whether the last round before that was for its bucket had credit left, and none came when this was due. Of
    several brokers that dealt the bucket, the last one of each: which of them deals it now, nobody says. A sweep of
    what others should deal is for no bucket."""
    assert stretch.by is not None
    due = max(stretch.since, standing.due_ms - stretch.by.wall_ms + stretch.by.invoked + bound_ms)
    until = due + LOOKED_FOR_IN_MS
    if until >= min(stretch.until, rounds.calm_until) or expires_by(standing, standing.due_ms + LOOKED_FOR_IN_MS):
        return False
    following = bisect_left(rounds.begins, due)
    latest: dict[str, bool] = {}
    for at in range(following):
        if _is_for(rounds.events[at], bucket):
            latest[rounds.events[at].arguments.get("broker", "")] = rounds.credit[at]
    in_time = range(following, bisect_right(rounds.begins, until))
    return bool(latest) and all(latest.values()) and not any(_is_for(rounds.events[at], bucket) for at in in_time)


def _is_for(event: Event, bucket: int) -> bool:
    values = event.arguments
    return not values["overdue_ms"] and (values["buckets"] is None or bucket in values["buckets"])


def stranded(events: Iterable[Event], rows: Iterable[Values], declared: Declared) -> Iterator[Violation]:
    """What was due after all faults were healed and not handed out within the bound: left lying, or leased again and
    again and never with anybody's code. Counted from the time that a person asked for, and once it was handed out since
    then from its due."""
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
    """Since when it should have been handed out."""
    asked_ms = float(values["scheduled_ms"])
    handed = handed_ms.get(_life(values), -inf) >= max(asked_ms, healed_ms)
    return float(values["due_ms"]) if handed else asked_ms
