"""What shows only across messages: S12 and L1 (nothing is stranded once faults are healed), S15 (bounds)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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


def over_bounds(events: Iterable[Event]) -> Iterator[Violation]:
    """Queues that grew past their bounds. `queue` lines say the most that each held."""
    for event in events:
        values = event.arguments
        if event.operation == "queue" and values["most"] > values["bound"]:
            sentence = f"{values['what']} grew to {values['most']}, where {values['bound']} are allowed"
            yield Violation("S15", sentence, lines=(event.as_line(),))
