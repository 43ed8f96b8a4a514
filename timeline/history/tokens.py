"""S2 versions, S3 one writer a version, S4 fencing, S5 late acks, S6 no resurrection. A life (one birth) at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from timeline.history.record import Event, Values
from timeline.history.story import SCHEDULERS, Story, Violation, stored


@dataclass(slots=True)
class Made:
    """A version that was certainly made, and between when (monotonic ms). `by` showed it."""

    version: int
    after: float
    before: float
    by: Event


@dataclass(slots=True)
class Life:
    """What is certain about one birth."""

    birth: int
    content: int | None
    receives: list[Event]
    settles: list[Event]
    mutations: list[Event]
    made: list[Made]
    row: Values | None


def life_of(story: Story, birth: int, content: int | None) -> Life:
    """Collects what is certain about the life `birth` of a story."""
    receives = [event for event in story.receives if event.arguments["birth"] == birth]
    settles = [event for event in story.settles if event.arguments["birth"] == birth]
    sole = [event for event in story.mutations if event.happened and story.sole(event, birth, content)]
    storers = story.storers_of(birth, content)
    made = [Made(event.arguments["version"], -inf, event.returned, event) for event in receives]
    if len(storers) == 1 and stored(storers[0]):
        made.append(Made(1, storers[0].invoked, storers[0].returned, storers[0]))
    for event in (event for event in sole if event.operation in SCHEDULERS):
        if event.result.get("version"):
            made.append(Made(event.result["version"], event.invoked, event.returned, event))
    for event in settles:
        if event.operation == "release" and event.happened:
            made.append(Made(released_version(event), event.invoked, event.returned, event))
    made.sort(key=lambda one: one.version)
    row = next((row for row in story.rows if row["birth"] == birth), None)
    return Life(birth, content, receives, settles, sole, made, row)


def released_version(release: Event) -> int:
    """The version that a release made: one more than its token's."""
    return int(release.arguments["version"]) + 1


def tokens(story: Story) -> Iterator[Violation]:
    """What versions promise, for each life of the story that lived once."""
    if story.forgotten:
        return
    for birth, content in story.births.items():
        if story.lives_twice(birth, content):
            continue
        life = life_of(story, birth, content)
        yield from _versions(story, life)
        yield from _fencing(story, life)
        yield from _after_the_end(story, life)


def _versions(story: Story, life: Life) -> Iterator[Violation]:
    received: dict[int, Event] = {}
    for event in life.receives:
        version = event.arguments["version"]
        if version in received:
            yield story.violation("S2", f"version {version} was handed to code twice", received[version], event)
        received[version] = event
    asked: dict[int, Event] = {}
    latest: Made | None = None
    for made in life.made:
        if latest is not None and made.before < latest.after and made.version > latest.version:
            sentence = f"version {made.version} was there before {latest.version} was made"
            yield story.violation("S2", sentence, latest.by, made.by)
        if latest is None or made.after > latest.after:
            latest = made
        if made.by.operation != "receive":
            if made.version in asked:
                sentence = f"two operations both made version {made.version}"
                yield story.violation("S3", sentence, asked[made.version], made.by)
            asked[made.version] = made.by
    if life.row is not None and life.made and life.made[-1].version > life.row["version"]:
        sentence = f"the store ends at version {life.row['version']}, below one that was made"
        yield story.violation("S2", sentence, life.made[-1].by, life.row)


def _fencing(story: Story, life: Life) -> Iterator[Violation]:
    for use in life.settles:
        version = use.arguments["version"]
        if use.happened and not _may_have_been_gone(story, use):
            later = [made for made in life.made if made.version > version and made.before < use.invoked]
            if later:
                sentence = f"{use.operation} with version {version} worked after version {later[0].version} was there"
                yield story.violation("S4", sentence, later[0].by, use)
        if use.result.get("status") != "FENCED":
            continue
        for other in life.settles:
            if (
                other.happened
                and not _may_have_been_gone(story, other)
                and other.arguments["version"] == version
                and other.arguments.get("consumer") == use.arguments.get("consumer")
                and other.invoked > use.returned
            ):
                sentence = f"version {version} was fenced off, then accepted"
                yield story.violation("S5", sentence, use, other)
        row = life.row
        if row and row["version"] == version and row["holder"] == use.arguments.get("consumer") and not row["died_ms"]:
            yield story.violation("S5", f"version {version} was fenced off, yet it is the one the store has", use, row)


def _may_have_been_gone(story: Story, use: Event) -> bool:
    """Whether an ack may count as done only because, repeated after its answer was lost, it found nothing: something
    else ended the message before."""
    if use.operation != "ack":
        return False
    return any(start <= use.returned and event is not use for start, _, event in story.removers())


def _after_the_end(story: Story, life: Life) -> Iterator[Violation]:
    for ack in (event for event in life.settles if event.operation == "ack" and event.happened):
        for receive in life.receives if not _may_have_been_gone(story, ack) else ():
            if receive.arguments["version"] > ack.arguments["version"]:
                yield story.violation("S6", "delivered again though its ack counted", ack, receive)
        yield from _used_after(story, life, ack)
    for end in life.mutations:
        if end.operation not in ("cancel", "purge"):
            continue
        for receive in life.receives:
            if receive.invoked > end.returned and _granted_after(story, end, receive):
                yield story.violation("S6", f"delivered after its {end.operation} was answered OK", end, receive)
        yield from _used_after(story, life, end)
    revived = any(event.operation == "revive" and event.may_have_happened for event in story.mutations)
    for bury in (event for event in life.settles if event.operation == "bury" and event.happened):
        for receive in life.receives:
            if receive.arguments["version"] > bury.arguments["version"] and not revived:
                yield story.violation("S6", "delivered though it was buried and nobody revived it", bury, receive)


def _used_after(story: Story, life: Life, end: Event) -> Iterator[Violation]:
    for use in life.settles:
        if use is not end and use.happened and use.invoked > end.returned and use.operation != "ack":
            yield story.violation("S6", f"{use.operation} worked on what {end.operation} had removed", end, use)
    if life.row is not None:
        yield story.violation("S6", f"{end.operation} was answered OK, yet the store still has it", end, life.row)


def _granted_after(story: Story, end: Event, receive: Event) -> bool:
    """Whether the lease of `receive` was certainly granted after `end`: had it been there before, it would have stood
    in the way of a cancel that spares leases, for it still runs."""
    if end.arguments.get("leased"):
        return False
    ended_wall_ms = end.wall_ms + (end.returned - end.invoked)
    until = receive.arguments.get("lease_until_ms", 0)
    return bool(until > ended_wall_ms + story.declared.clock_bound_ms)
