"""`timeline ls --follow`: what changes on a timeline, as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import timeline
from timeline.cli.app import REFUSED, Failed, complain, explain, say
from timeline.cli.terminal.output import print_json, shown_payload
from timeline.driver.times import shown_time
from timeline.errors import TimelineError
from timeline.model import State

Look = Callable[[], AsyncIterator[timeline.StoredMessage]]
"""Begins a new scan."""
Tell = Callable[[str, timeline.StoredMessage], None]
"""Told of a change, in a word, and the message as it stands (or, for `gone`, stood)."""


def _silent() -> None:
    """Says nothing."""


async def follow(look: Look, limit: int, every_s: float, tell: Tell, begun: Callable[[], None] = _silent) -> None:
    """Looks again every `every_s` and tells what changed; never ends by itself. What changed twice between two looks is
    told once. `begun` is called before the first is told. Raises Failed when more than `limit` match: only what is read
    whole can be compared."""
    known: dict[str, timeline.StoredMessage] | None = None
    lost = False
    while True:
        try:
            seen = {entry.id: entry for entry in await _read(look, limit)}
        except TimelineError as trouble:
            if known is None or not trouble.retryable:
                raise
            if not lost:
                complain(f"{explain(trouble)}; waiting for it to come back")
            lost = True
        else:
            if known is None:
                begun()
            for change, entry in changes(known or {}, seen, first=known is None):
                tell(change, entry)
            known, lost = seen, False
        await asyncio.sleep(every_s)


async def _read(look: Look, limit: int) -> list[timeline.StoredMessage]:
    entries: list[timeline.StoredMessage] = []
    async for entry in look():
        if len(entries) == limit:
            raise Failed(
                REFUSED,
                f"more than {limit} messages match, and --follow reads them all each time: select fewer with --tag, "
                "--state or --due-to, or allow more with --limit",
            )
        entries.append(entry)
    return entries


def changes(
    known: dict[str, timeline.StoredMessage], seen: dict[str, timeline.StoredMessage], *, first: bool
) -> list[tuple[str, timeline.StoredMessage]]:
    """What is another since `known`, by due: what is there (`first`) or new, became another state, or moved; and what
    is gone."""
    found = []
    for id, entry in seen.items():
        before = known.get(id)
        if before is None or before.birth != entry.birth:
            found.append(("there" if first else "new", entry))
        elif before.state is not entry.state:
            found.append((_became(before, entry), entry))
        elif before.due_ms != entry.due_ms or entry.deliveries > before.deliveries:
            found.append((_went_on(before, entry), entry))
    found += [("gone", entry) for id, entry in known.items() if id not in seen]
    return sorted(found, key=lambda one: (one[1].due_ms, one[1].id))


def _became(before: timeline.StoredMessage, entry: timeline.StoredMessage) -> str:
    if entry.state is State.AVAILABLE:
        return "lease ran out" if before.state is State.LEASED and entry.holder else "due"
    if entry.state is State.WAITING:
        was_out = before.state is State.LEASED or entry.deliveries > before.deliveries
        return "revived" if before.state is State.DEAD else "released" if was_out else "moved"
    return str(entry.state)


def _went_on(before: timeline.StoredMessage, entry: timeline.StoredMessage) -> str:
    """What came to a message that is in the state that it was in."""
    if entry.state is State.LEASED:
        return "extended" if entry.version == before.version else "leased again"
    if entry.version - before.version > 1 and entry.state is State.AVAILABLE and entry.deliveries == before.deliveries:
        return "handed back"  # leased and, before anybody saw it, let go again
    if entry.deliveries > before.deliveries:  # a consumer had it in between
        return "lease ran out" if entry.holder else "released"
    return "moved"


def tell_lines(zone: Any, payloads: bool) -> Tell:
    """A line a change: the message's due, its id, what happened, and to whom."""

    def tell(change: str, entry: timeline.StoredMessage) -> None:
        by = f" by {entry.holder}" if entry.state is State.LEASED and change != "gone" else ""
        why = f": {entry.dead}" if entry.state is State.DEAD and entry.dead else ""
        payload = f"  {shown_payload(entry.payload or b'')}" if payloads else ""
        say(f"{shown_time(entry.due_ms, zone)}  {entry.id}  {change}{by}{why}{payload}")

    return tell


def tell_json(shown: Callable[[timeline.StoredMessage], dict[str, Any]]) -> Tell:
    """A JSON object a change."""

    def tell(change: str, entry: timeline.StoredMessage) -> None:
        print_json({"change": change, **shown(entry)})

    return tell
