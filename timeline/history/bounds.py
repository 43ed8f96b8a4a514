"""What shows only across messages: S12 and L1 (nothing is stranded once faults are healed), S15 (bounds)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from typing import TypeAlias

from timeline.history.record import Event, Values, described
from timeline.history.story import Declared, Violation


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


def over_bounds(events: Iterable[Event]) -> Iterator[Violation]:
    """Queues that grew past their bounds. `queue` lines say the most that each held."""
    for event in events:
        values = event.arguments
        if event.operation == "queue" and values["most"] > values["bound"]:
            sentence = f"{values['what']} grew to {values['most']}, where {values['bound']} are allowed"
            yield Violation("S15", sentence, lines=(event.as_line(),))
