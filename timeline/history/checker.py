"""The judge of a run. It reads what every process did and what the store has left, and names each broken promise.

Operations of a history and their arguments. A `topic` goes with each, "" when there is only one.

| operation | arguments | result |
|---|---|---|
| put | id, group, due_ms or in_ms, expires_(in_)ms, tag, sum, move, replace, birth | status version due_ms settled |
| move, revive | id, group, due_ms or in_ms, if_version | status version due_ms |
| cancel, purge | id, group, leased, if_version | status |
| move_tag, cancel_tag | tag, group, due_ms, in_ms or by_ms, leased, dry_run | counts |
| receive | id consumer session birth version due_ms scheduled_ms lease_until_ms sum size deliveries in_hand | |
| ack, release, bury | id, consumer, birth, version; release: due_ms or in_ms | status late version |
| extend | id, consumer, birth, version | status lease_until_ms |
| lost | id, consumer, birth, version: the driver gave it up | |
| get | id | status |
| consume | consumer, session, credit, credit_bytes | |
| parted | consumer, session: it is over | |
| topic | name, settings; or name, action = drop | |
| fault | what (crash, stop, continue, drain, cut, step …) | |
| healed | all faults are over | |
| commit | see `commits` | |
| deal | see `dealing` | |
| queue | what, most, bound: the most that a queue of a broker held, and may hold | |

Absent values are unknown. `repeated` in a result: the call was sent again after an answer was lost. `lingers`: of
several brokers, the first one may still do what the second one was asked and answered.

Doubt never counts against anybody. An operation whose outcome is unknown may have happened or not, at any time after it
was invoked. Operations that overlap may have happened in either order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf

from timeline.history.commits import answers, commits
from timeline.history.dealing import left_lying, left_out, over_bounds, over_credit, stranded, unfair
from timeline.history.lives import is_early, lives
from timeline.history.record import Event, Values, in_order, read_lines
from timeline.history.story import Declared, Story, Violation, sort_out

TOLD_IDS = 3
"""A verdict has the whole stories of this many ids with a broken promise."""
DOUBLED = ("S2", "S10", "S11")
LOST = ("S8", "L1")
UNANSWERED = ("commit", "deal", "queue", "fault", "healed", "consume", "parted", "lost")
"""Lines that are no questions."""


@dataclass(slots=True)
class Verdict:
    """The result of a check.

    `violations`: each broken promise. `counts`: `put moved cancelled delivered acked redelivered late early lost
    doubled`, in messages or deliveries. `statuses`: how often each operation had which answer. `told`: everything that
    was done with the first ids among the violations.
    """

    violations: list[Violation]
    counts: dict[str, int]
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    told: dict[str, list[str]] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return not self.violations

    def summary(self) -> str:
        """Return a line of counts, then each violation, then the first ids' whole stories."""
        counted = ", ".join(f"{name} {count}" for name, count in self.counts.items())
        stories = ("\n    ".join([f"all of {name}:", *lines]) for name, lines in self.told.items())
        return "\n".join([counted, *(str(violation) for violation in self.violations), *stories])


def check(
    history: Iterable[Event] | Iterable[str] | Iterable[bytes],
    dump: Iterable[Values],
    *,
    durable: bool = True,
    clock_bound_ms: float = 0.0,
    transit_bound_ms: float | None = None,
    liveness_bound_ms: float | None = None,
    end_wall_ms: float | None = None,
    most: int = 20,
) -> Verdict:
    """Judge a run.

    `history`: events, or the lines of one history. `dump`: the store's last state (see
    `storage_plugins.conformance.crowd`). `durable`: as the store declares. If False, messages put before the last crash
    may be gone. `clock_bound_ms`: by how much the broker's clock may differ from true time; 0 if one clock decides.
    `transit_bound_ms`: how long after its lease ended a delivery may reach code; None: not judged.
    `liveness_bound_ms`: how long a message may wait after its due time, or after the `healed` line; None: not judged.
    `end_wall_ms`: true time of the dump. `most`: how many violations of each kind are kept; the counts count all.
    """
    events = _events(history)
    rows = list(dump)
    end_ms = inf if end_wall_ms is None else end_wall_ms
    declared = _declared(
        events, Declared(durable, clock_bound_ms, transit_bound_ms, liveness_bound_ms, end_wall_ms=end_ms)
    )
    found: list[Violation] = []
    stories = sort_out(events, rows, declared)
    for story in stories:
        found.extend(_judge(story))
    found.extend(left_lying(stories, events))
    found.extend(stranded(events, rows, declared))
    found.extend(over_credit(events, clock_bound_ms))
    found.extend(unfair(events))
    found.extend(left_out(events))
    found.extend(over_bounds(events))
    totals = Counter(violation.invariant for violation in found)
    counts, statuses = _count(events, clock_bound_ms)
    counts["lost"] = sum(totals[name] for name in LOST)
    counts["doubled"] = sum(totals[name] for name in DOUBLED)
    kept: Counter[str] = Counter()
    shown: list[Violation] = []
    for violation in found:
        kept[violation.invariant] += 1
        if kept[violation.invariant] <= most:
            shown.append(violation)
    return Verdict(shown, counts, statuses, _told(shown, stories, events))


def _told(shown: list[Violation], stories: list[Story], events: list[Event]) -> dict[str, list[str]]:
    """Return the whole stories of the first ids with a broken promise."""
    named = list(dict.fromkeys((violation.topic, violation.id) for violation in shown if violation.id))[:TOLD_IDS]
    if not named:
        return {}
    faults = [event for event in events if event.operation in ("fault", "healed")]
    found = {(story.topic, story.id): story for story in stories}
    return {f"{name[0]}/{name[1]}": found[name].told(faults) for name in named if name in found}


def _judge(story: Story) -> list[Violation]:
    return [*lives(story), *commits(story), *answers(story)]


def _events(history: Iterable[Event] | Iterable[str] | Iterable[bytes]) -> list[Event]:
    events: list[Event] = []
    lines: list[str | bytes] = []
    for line in history:
        if isinstance(line, Event):
            events.append(line)
        else:
            lines.append(line)
    return in_order([*events, *read_lines(lines)])


def _declared(events: list[Event], given: Declared) -> Declared:
    """Return `given` with what the history says of topics, crashes and sessions."""
    remember: dict[str, bool] = {}
    retention: set[str] = set()
    dropped: set[str] = set()
    last_crash = -inf
    told: dict[str, Values] = {}
    sessions: dict[str, dict[int, tuple[float, float]]] = {}
    for event in events:
        values = event.arguments
        if "session" in values and event.operation in ("consume", "receive", "parted"):
            mine = sessions.setdefault(values["consumer"], {})
            since, until = mine.get(values["session"], (event.invoked, inf))
            mine[values["session"]] = since, event.invoked if event.operation == "parted" else until
        if event.operation == "topic":
            settings = values.get("settings") or {}
            told.setdefault(values["name"], {}).update(settings)
            if "remember_ms" in settings or values["name"] not in remember:
                remembers = settings.get("remember_ms", 0) > 0
                remember[values["name"]] = remembers and remember.get(values["name"], True)
            if settings.get("dead_retention_ms"):
                retention.add(values["name"])
            if values.get("action") == "drop":
                dropped.add(values["name"])
        elif event.operation == "fault" and values.get("what") == "crash":
            last_crash = max(last_crash, event.invoked)
    return replace(
        given,
        remember=frozenset(name for name, remembers in remember.items() if remembers),
        retention=frozenset(retention),
        dropped=frozenset(dropped),
        last_crash=last_crash,
        sessions=sessions,
        witnessed=any(event.operation == "commit" for event in events),
        settings=told,
    )


def _count(events: list[Event], clock_bound_ms: float) -> tuple[dict[str, int], Counter[tuple[str, str]]]:
    """Return what happened, in numbers. A message put again after it was gone counts again."""
    statuses: Counter[tuple[str, str]] = Counter()
    counts = dict.fromkeys(("put", "moved", "cancelled", "delivered", "acked", "redelivered", "late", "early"), 0)
    names = {"put": "put", "move": "moved", "cancel": "cancelled", "ack": "acked"}
    lives: set[tuple[str, str, int]] = set()
    for event in events:
        values = event.arguments
        if event.operation == "receive":
            counts["delivered"] += 1
            life = values.get("topic", ""), values["id"], values["birth"]
            counts["redelivered"] += life in lives
            lives.add(life)
            counts["early"] += is_early(event, clock_bound_ms)
            continue
        status = event.result.get("status") or {"ok": "OK", "unknown": "UNKNOWN"}.get(event.outcome, "FAIL")
        if event.operation not in UNANSWERED:
            statuses[event.operation, status] += 1
        if event.happened and event.operation in names and status != "DUPLICATE":
            counts[names[event.operation]] += 1
        counts["late"] += bool(event.result.get("late"))
    return counts, statuses
