"""S8 no loss, S9 no phantom, and that nothing is stored over what is there (S3). A story at a time."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from timeline.history.record import Event
from timeline.history.story import Story, Violation, stored

NEEDS_IT = ("move", "extend", "release", "bury", "revive", "get")
"""Operations that, answered NOT_FOUND, say that the message was gone and cannot have removed it themselves."""


def presence(story: Story) -> Iterator[Violation]:
    """What was put is there until something ends it; what is there was put."""
    yield from _phantoms(story)
    if story.forgotten:
        return
    yield from _overwritten(story)
    yield from _lost(story)
    yield from _not_found(story)


def _phantoms(story: Story) -> Iterator[Violation]:
    first_seen: dict[int, Event] = {}
    for receive in story.receives:
        first_seen.setdefault(receive.arguments["birth"], receive)
    lives_of: dict[int, set[int]] = {}
    for birth, receive in first_seen.items():
        candidates = story.storers_of(birth, receive.arguments.get("sum"))
        if not any(put.invoked <= receive.returned for put in candidates):
            yield story.violation(
                "S9", "delivered, but no put can have stored it with this payload", receive, *story.puts
            )
        elif len(candidates) == 1:
            lives_of.setdefault(id(candidates[0]), set()).add(birth)
    for put in story.storers:
        if len(lives_of.get(id(put), ())) > 1:
            births = lives_of[id(put)]
            shown = [receive for birth, receive in first_seen.items() if birth in births]
            yield story.violation("S9", "one put has lived under two births", put, *shown)
    for receive in story.receives:
        seen, first = receive.arguments.get("sum"), first_seen[receive.arguments["birth"]]
        if seen != first.arguments.get("sum"):
            yield story.violation("S9", "one message was delivered with two payloads", first, receive)
    for row in story.rows:
        if not story.storers_of(row["birth"], row["sum"]):
            yield story.violation("S9", "the store has a message that no put can have stored", row, *story.puts)
        if row.get("read_sum", row["sum"]) != row["sum"]:
            yield story.violation("S13", "the payload that the store has is not the one its checksum is of", row)
    if len(story.rows) > 1:
        yield story.violation("S3", "the store has one id twice", *story.rows)


def _overwritten(story: Story) -> Iterator[Violation]:
    """Between two puts that both stored, something must have ended the first life."""
    stored_puts = [put for put in story.storers if stored(put)]
    for second in stored_puts[1:]:
        before = [put for put in stored_puts if put.returned < second.invoked]
        if not before:
            continue
        first = max(before, key=lambda put: put.returned)
        between = (start <= second.returned and first.invoked <= until for start, until, _ in story.removers(first))
        if not any(between):
            yield story.violation(
                "S3", "a second put stored its message while the first was still there", first, second
            )


def _lost(story: Story) -> Iterator[Violation]:
    """The last message that was certainly there is in the dump, or something may have ended it."""
    certain = [put for put in story.puts if put.happened and not put.result.get("settled")]
    if not certain or story.rows:
        return
    last = max(certain, key=lambda put: put.returned)
    whose = last if stored(last) else None
    ends = story.removers(whose)
    if not any(until >= last.invoked and (by is not None or _in_time(story, start, last)) for start, until, by in ends):
        sentence = "put was acknowledged, nothing ended its message, and the store has it no more"
        yield story.violation("S8", sentence, last, *story.receives[-2:], *story.settles[-2:])


def _in_time(story: Story, start: float, put: Event) -> bool:
    """Whether an expiry that began at `start`, counted from `put` by the wall clock, came before the dump was made.
    What has a line of its own did: by another process's clock it would be off by what the two drifted apart."""
    return put.wall_ms + (start - put.invoked) <= story.declared.end_wall_ms if start > -inf else True


def _not_found(story: Story) -> Iterator[Violation]:
    """NOT_FOUND is an answer only where the message may have been gone."""
    asked = [
        event
        for event in (*story.mutations, *story.settles, *story.reads)
        if event.operation in NEEDS_IT and event.result.get("status") == "NOT_FOUND"
    ]
    if not asked:
        return
    for event in asked:
        there = [put for put in story.puts if put.returned < event.invoked and put.happened and not _settled(put)]
        if not there:
            continue
        last = max(there, key=lambda put: put.returned)
        if "birth" in event.arguments and last not in story.storers_of(event.arguments["birth"], None):
            continue
        whose = last if stored(last) else None
        removers = story.removers(whose)
        if not any(start <= event.returned and until >= last.invoked for start, until, _ in removers):
            yield story.violation("S8", f"{event.operation} found nothing, though nothing ended it", last, event)


def _settled(put: Event) -> bool:
    return bool(put.result.get("settled"))
