"""What shows only across messages: S12 and L1 (nothing is stranded once faults are healed), S14 (credit)."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import inf

from timeline.history.record import Event, Values, described
from timeline.history.story import Declared, Violation


def stranded(events: Iterable[Event], rows: Iterable[Values], declared: Declared) -> Iterator[Violation]:
    """What was due after all faults were healed and not delivered within the bound."""
    bound_ms = declared.liveness_bound_ms
    if bound_ms is None:
        return
    events = list(events)
    healed = next((event for event in reversed(events) if event.operation == "healed"), None)
    for row in rows:
        late_ms = declared.end_wall_ms - row["due_ms"]
        if not row["died_ms"] and late_ms > bound_ms:
            sentence = f"still not delivered {late_ms:.0f} ms after its due, where {bound_ms:.0f} are allowed"
            yield Violation("L1", sentence, row.get("topic", ""), row["id"], (described(row),))
    if healed is None:
        return
    for event in events:
        if event.operation != "receive" or event.invoked < healed.invoked:
            continue
        late_ms = event.wall_ms - max(event.arguments["due_ms"], healed.wall_ms)
        if late_ms > bound_ms:
            sentence = f"delivered {late_ms:.0f} ms late after all was healed, where {bound_ms:.0f} are allowed"
            values = event.arguments
            yield Violation("S12", sentence, values.get("topic", ""), values["id"], (event.as_line(),))


def over_credit(events: Iterable[Event], clock_bound_ms: float) -> Iterator[Violation]:
    """Where a consumer's code had more messages in flight than its session's credit. `consume` lines say the credit."""
    credit: dict[tuple[str, int], int] = {}
    deliveries: dict[tuple[str, int], list[Event]] = defaultdict(list)
    settled: dict[tuple[str, int, int], float] = {}
    for event in events:
        values = event.arguments
        if event.operation == "consume" and "credit" in values:
            credit[values["consumer"], values["session"]] = values["credit"]
        elif event.operation == "receive" and "session" in values:
            deliveries[values["consumer"], values["session"]].append(event)
        elif event.operation in ("ack", "release", "bury", "lost"):
            key = values["id"], values["birth"], values["version"]
            settled[key] = min(settled.get(key, inf), event.invoked)
    for session, received in deliveries.items():
        if session in credit:
            yield from _over(credit[session], received, settled, clock_bound_ms)


def _over(
    credit: int, received: list[Event], settled: dict[tuple[str, int, int], float], bound_ms: float
) -> Iterator[Violation]:
    """In flight are those received whose lease runs, whose settle was not yet asked for, and which the driver has not
    given up as lost (it may, when it cannot be sure that the lease still runs)."""
    ends: list[float] = []
    for event in sorted(received, key=lambda one: one.invoked):
        values = event.arguments
        while ends and ends[0] <= event.invoked:
            heapq.heappop(ends)
        lease_ends = event.invoked + (values["lease_until_ms"] - event.wall_ms) - bound_ms
        heapq.heappush(ends, min(lease_ends, settled.get((values["id"], values["birth"], values["version"]), inf)))
        if len(ends) > credit:
            sentence = f"{len(ends)} messages in flight at a consumer with credit for {credit}"
            yield Violation("S14", sentence, values.get("topic", ""), values["id"], (event.as_line(),))
            return
