"""`timeline show` and `timeline ls`: what is on a timeline, the first of it, and what changes on it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any
from zoneinfo import ZoneInfo

import click
import numpy as np

import timeline
from timeline.cli.app import REFUSED, Failed, complain, say
from timeline.cli.options import (
    ClientOptions,
    check_topic,
    client_command,
    every_option,
    parse_time,
    topic_names,
    zone_of,
    zone_option,
)
from timeline.cli.output import (
    Progress,
    counted,
    id_cell,
    payload_fields,
    picked,
    print_fields,
    print_json,
    print_table,
    shown_payload,
    time_cell,
)
from timeline.driver.times import as_datetime, shown_time
from timeline.errors import Invalid, TimelineError
from timeline.model import MAX_DURATION_MS, State
from timeline.wording import shown_duration

STATES = (State.WAITING, State.AVAILABLE, State.LEASED, State.DEAD)
LIMIT = 100
FOLLOWED_AT_MOST = 10_000
STEPS = 1_000
FINEST_MS = 1_000
SOON_MS = 1_000
"""A message that comes due while the scan begins is available by then."""
SPARE = 1_000
"""How many entries beyond the limit are kept before the later ones are dropped."""

Look = Callable[[int | None], AsyncIterator[timeline.StoredMessage]]
"""Begins a scan of what is due before a time in ms. None: of all."""
Begin = Callable[[], AsyncIterator[timeline.StoredMessage]]
Tell = Callable[[str, timeline.StoredMessage], None]
"""Gets a change, in a word, and the message as it stands. For `gone`: as it stood."""


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.argument("id")
@zone_option
@client_command
async def show(tl: timeline.Timeline, options: ClientOptions, topic: str, id: str, zone: ZoneInfo | None) -> None:
    """Show one message of TOPIC with all of its fields, its payload and its state.

    A message that is over (acknowledged, cancelled, purged, expired) leaves nothing to show. A topic that remembers
    keeps its id, so that it is not produced twice, but not how it ended.

    \b
    Example:
      timeline show departures UA1545
    """
    entry = await tl.get(topic, id)
    if entry is None:
        raise Failed(REFUSED, _gone(await check_topic(tl, topic), id))
    if options.as_json:
        print_json(entry_json(entry))
        return
    fields: dict[str, object] = {
        "id": entry.id,
        "state": entry.state,
        "due": shown_time(entry.due_ms, zone),
        "scheduled": shown_time(entry.scheduled_ms, zone),
        "version": entry.version,
        "deliveries": entry.deliveries,
        "group": entry.group,
    }
    if entry.holder:
        fields["lease of" if entry.state is State.LEASED else "last holder"] = entry.holder
    if entry.tag:
        fields["tag"] = entry.tag
    if entry.expires_ms:
        fields["expires"] = shown_time(entry.expires_ms, zone)
    if entry.died_ms:
        fields |= {"died": shown_time(entry.died_ms, zone), "reason": entry.dead}
    fields |= {f"header {name}": value for name, value in (entry.headers or {}).items()}
    payload = entry.payload or b""
    print_fields(fields | {"payload": shown_payload(payload, 2_000), "bytes": len(payload)})


def _gone(topic: timeline.Topic, id: str) -> str:
    """Return the sentence for an id without a message."""
    said = (
        f"NOT_FOUND: no message {id!r} is on {topic.name}. It was never produced, or it was acknowledged, "
        "cancelled, purged or expired"
    )
    if not topic.settings.remember_ms:
        return said
    return (
        f"{said}. The topic remembers such ids for {shown_duration(topic.settings.remember_ms)}, so that none is "
        "produced twice. It does not record how each ended"
    )


@click.command()
@click.argument("topic", shell_complete=topic_names)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([str(state) for state in STATES]),
    help="Only this state; repeatable.",
)
@click.option("--tag", help="Only messages of this tag.")
@click.option("--due-from", metavar="TIME", help="Only messages due at or after this time.")
@click.option("--due-to", metavar="TIME", help="Only messages due before this time.")
@click.option("--tz", metavar="ZONE", help="Time zone of given and shown times. Default: this machine's.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"At most N messages. Default: {LIMIT}; with --follow {FOLLOWED_AT_MOST}, which it reads at each look.",
)
@click.option("--all", "everything", is_flag=True, help="No limit; with --json printed as they come, in no order.")
@click.option("--payload", "payloads", is_flag=True, help="Read payloads too.")
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C: print what is new, moves, is taken, is gone.")
@every_option("With --follow: time between two looks.")
@client_command
async def ls(
    tl: timeline.Timeline, options: ClientOptions, topic: str, limit: int | None, everything: bool, follow: bool,
    every: int, **selected: Any,
) -> None:  # fmt: skip
    """List messages of TOPIC, the first ones by due time.

    \b
    Example:
      timeline ls departures --state waiting --due-to now+1h
      timeline ls departures --follow
      timeline ls departures --tag spring --payload --json --all
    """
    search = _Search(tl, topic, **selected)
    if limit is not None and everything:
        raise Invalid("--limit and --all contradict each other: give one of the two")
    bound = limit or (FOLLOWED_AT_MOST if follow else LIMIT)
    most = sys.maxsize if everything else bound

    def begun() -> None:
        if not options.as_json:
            complain(f"following {topic}, a look every {shown_duration(every)}; Ctrl-C ends it")

    if follow:
        return await follow_changes(search.look, most, every / 1000, search.teller(options), begun)
    if everything and options.as_json:
        async for entry in search.look():
            print_json(entry_json(entry))
        return
    before_ms = None if everything or search.narrow else await bound_ms(tl, topic, bound, search.states)
    with Progress("read") as progress:
        entries, more = await earliest(lambda before: counted(search.look(before), progress), most, before_ms)
    search.tell(entries, options)
    if more:
        complain(f"there are more than {bound}; --limit or --all shows them")


class _Search:
    """What `ls` looks for on a topic. Raises Invalid for impossible times."""

    def __init__(
        self, tl: timeline.Timeline, topic: str, *, states: tuple[str, ...], tag: str | None, due_from: str | None,
        due_to: str | None, tz: str | None, payloads: bool,
    ) -> None:  # fmt: skip
        self._zone = zone_of(tz)
        from_ms, to_ms = (
            0 if text is None else parse_time(text, option, tz).absolute_ms()
            for text, option in ((due_from, "--due-from"), (due_to, "--due-to"))
        )
        if from_ms and to_ms and from_ms >= to_ms:
            raise Invalid("--due-from must lie before --due-to")
        # As datetimes: the driver takes the milliseconds of the early 1970s for seconds.
        since, until = (as_datetime(one) if one else None for one in (from_ms, to_ms))
        self._due = (since, until) if since or until else None
        self._tl, self._topic, self._tag, self._payloads = tl, topic, tag, payloads
        self.states = [State(state) for state in states]

    @property
    def narrow(self) -> bool:
        """Whether a tag or a time is asked for, not the topic from its beginning."""
        return bool(self._tag or self._due)

    def look(self, before_ms: int | None = None) -> AsyncIterator[timeline.StoredMessage]:
        """Begin a scan of what is due before a time in ms. None: of all."""
        due = self._due if before_ms is None else (None, before_ms)
        return self._tl.scan(self._topic, state=self.states or None, tag=self._tag, due=due, payload=self._payloads)

    def tell(self, entries: Sequence[timeline.StoredMessage], options: ClientOptions) -> None:
        """Print messages as JSON, or as a table."""
        if options.as_json:
            for entry in entries:
                print_json(entry_json(entry))
            return
        columns = ["DUE", "ID", "STATE", "TAG", "GROUP", "DELIVERIES", *(["PAYLOAD"] if self._payloads else [])]
        rows = [
            [
                time_cell(entry.due_ms, self._zone), id_cell(entry.id), entry.state, entry.tag or "", entry.group,
                entry.deliveries, *([shown_payload(entry.payload or b"")] if self._payloads else []),
            ]
            for entry in entries
        ]  # fmt: skip
        spare = ("GROUP", "DELIVERIES", "TAG")
        print_table(columns, rows, right=("DELIVERIES",), empty=self._nothing(), spare=spare)

    def _nothing(self) -> str:
        of_tag = f" of tag {self._tag!r}" if self._tag else ""
        which = f" {' or '.join(self.states)}" if self.states else ""
        return f"no messages{of_tag} are{which} on {self._topic}{' in that time' if self._due else ''}"

    def teller(self, options: ClientOptions) -> Tell:
        """Return what prints a change: as JSON, or a line with due time, id, what happened, and who has it."""

        def tell(change: str, entry: timeline.StoredMessage) -> None:
            if options.as_json:
                print_json({"change": change, **entry_json(entry)})
                return
            by = f" by {entry.holder}" if entry.state is State.LEASED and change != "gone" else ""
            why = f": {entry.dead}" if entry.state is State.DEAD and entry.dead else ""
            payload = f"  {shown_payload(entry.payload or b'')}" if self._payloads else ""
            say(f"{shown_time(entry.due_ms, self._zone)}  {entry.id}  {change}{by}{why}{payload}")

        return tell


def entry_json(entry: timeline.StoredMessage) -> dict[str, Any]:
    """Return a stored message for machines."""
    values = picked(
        entry, "id", "state", "due", "due_ms", "scheduled", "scheduled_ms", "version", "deliveries", "group", "holder",
        "tag", "expires", "died", "reason=dead",
    )  # fmt: skip
    if entry.payload is not None:
        values |= {"headers": dict(entry.headers or {}), **payload_fields(entry.payload)}
    return values


def by_due(entry: timeline.StoredMessage) -> tuple[int, str]:
    """Return the sort key of a timeline."""
    return entry.due_ms, entry.id


async def earliest(look: Look, limit: int, before_ms: int | None) -> tuple[list[timeline.StoredMessage], bool]:
    """Return the first `limit` entries by due time of those due before `before_ms`, and whether there are more."""
    kept: list[timeline.StoredMessage] = []
    more = False
    async for entry in look(before_ms):
        kept.append(entry)
        if len(kept) > limit + SPARE:
            kept.sort(key=by_due)
            del kept[limit:]
            more = True
    kept.sort(key=by_due)
    return kept[:limit], more or len(kept) > limit


async def bound_ms(tl: timeline.Timeline, topic: str, limit: int, states: Collection[State]) -> int | None:
    """Return a time before which more than `limit` messages in `states` are due, as early as a few counts can tell.
    No states: all but dead letters. None when there are fewer, or counts are not exact."""
    if not set(states) <= {State.WAITING, State.AVAILABLE}:
        return None  # forecasts do not count leases and dead letters
    waiting, available = (not states or state in states for state in (State.WAITING, State.AVAILABLE))
    window_ms = MAX_DURATION_MS
    while True:
        step_ms = max(1, -(-window_ms // STEPS))
        outlook = await tl.forecast(topic, window_ms / 1000, step_ms / 1000)
        if not outlook.exact:
            return None
        due = outlook.overdue if available else 0
        if due > limit or not waiting:
            return int(outlook.edges_ms[0]) + SOON_MS
        enough = np.flatnonzero(due + np.cumsum(outlook.counts) > limit)
        if not len(enough):
            return None
        first = int(enough[0])
        if first or step_ms <= FINEST_MS:
            return int(outlook.edges_ms[first + 1])
        window_ms = int(outlook.edges_ms[1] - outlook.edges_ms[0])


async def follow_changes(
    look: Begin, limit: int, every_s: float, tell: Tell, begun: Callable[[], None] = lambda: None
) -> None:
    """Look every `every_s`, tell what changed, and never end. Two changes of a message between two looks are told as
    one. `begun` is called before the first. Raises Failed when more than `limit` match: only a whole scan can be
    compared."""
    known: dict[str, timeline.StoredMessage] | None = None
    lost = False
    while True:
        try:
            seen = {entry.id: entry for entry in await _read(look, limit)}
        except TimelineError as trouble:
            if known is None or not trouble.retryable:
                raise
            if not lost:
                complain(f"{trouble.code}: {trouble.reason or trouble.advice}; waiting for it to come back")
            lost = True
        else:
            if known is None:
                begun()
            for change, entry in changes(known or {}, seen, first=known is None):
                tell(change, entry)
            known, lost = seen, False
        await asyncio.sleep(every_s)


async def _read(look: Begin, limit: int) -> list[timeline.StoredMessage]:
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
    """Return what changed since `known`, by due time: messages that are new (or there, with `first`), changed their
    state, moved, or are gone."""
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
    """Return what happened to a message that is in the same state as before."""
    if entry.state is State.LEASED:
        return "extended" if entry.version == before.version else "leased again"
    if entry.version - before.version > 1 and entry.state is State.AVAILABLE and entry.deliveries == before.deliveries:
        return "returned unseen"  # leased, and released before a consumer saw it
    if entry.deliveries > before.deliveries:  # a consumer had it in between
        return "lease ran out" if entry.holder else "released"
    return "moved"
