"""Histories: one JSON line per operation of a process, written and read back.

A line has `invoked` and `returned` (monotonic ms of the machine), `wall_ms` (true wall time when invoked), `process`,
`operation`, `arguments`, `outcome` and `result`. Outcomes: ok; fail: nothing of it happened; unknown: it may have
happened.

A long operation has two lines with the same `call`: one before it starts, and one with its answer. So its effect is
accounted for when its process is killed in between. A line may carry many messages: `arguments` is then a list, and so
are `outcome` and `result`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, TypeAlias

from timeline.clock import Clock

Values: TypeAlias = dict[str, Any]

OK, FAIL, UNKNOWN = "ok", "fail", "unknown"


@dataclass(slots=True, eq=False)
class Event:
    """One operation on one message, or one fault marker. Until it is answered, `returned` is infinity and `outcome`
    unknown. `number`: its place in the history."""

    process: str
    operation: str
    arguments: Values
    invoked: float
    returned: float = inf
    wall_ms: float = 0.0
    outcome: str = UNKNOWN
    result: Values = field(default_factory=dict)
    number: int = 0

    @property
    def effect_until(self) -> float:
        """Monotonic ms after which it can no longer take effect: infinity if its outcome is unknown. Also if its result
        says `lingers`: one broker had it and was given up, another one answered."""
        return inf if self.outcome == UNKNOWN or self.result.get("lingers") else self.returned

    @property
    def happened(self) -> bool:
        return self.outcome == OK

    @property
    def may_have_happened(self) -> bool:
        """Whether it did not fail for certain. A repeated call (`repeated` in its result) may have been done at first
        and fail the second time."""
        return self.outcome != FAIL or bool(self.result.get("repeated"))

    def as_line(self) -> str:
        """Return the event as one JSON line, the same for the same event."""
        returned = None if self.returned == inf else self.returned
        return json.dumps(
            {
                "invoked": self.invoked,
                "returned": returned,
                "process": self.process,
                "operation": self.operation,
                "arguments": self.arguments,
                "outcome": self.outcome,
                "result": self.result,
                "wall_ms": self.wall_ms,
            },
            separators=(",", ":"),
            sort_keys=True,
        )


Arguments: TypeAlias = Values | Sequence[Values]


class History:
    """The notes of one process, kept in memory. Subclasses put them elsewhere."""

    def __init__(self, process: str, clock: Clock, into: list[Event] | None = None) -> None:
        self.process = process
        self.clock = clock
        self.events: list[Event] = [] if into is None else into

    def call(self, operation: str, arguments: Arguments) -> list[Event]:
        """Note that an operation starts now, before anything of it can have happened. Return one event per message."""
        invoked, wall_ms = self.clock.monotonic_ms(), self.clock.now()
        each = [arguments] if isinstance(arguments, dict) else arguments
        made = [Event(self.process, operation, dict(one), invoked, wall_ms=wall_ms) for one in each]
        self.events.extend(made)
        return made

    def answer(self, call: list[Event], outcomes: str | Sequence[str], results: Arguments = ()) -> None:
        """Note the answers to `call`: an outcome for all or one each, and results in order."""
        returned = self.clock.monotonic_ms()
        listed = [results] if isinstance(results, dict) else results
        for index, event in enumerate(call):
            event.returned = returned
            event.outcome = outcomes if isinstance(outcomes, str) else outcomes[index]
            event.result = dict(listed[index]) if index < len(listed) else {}

    def note(self, operation: str, arguments: Values) -> None:
        """Note something that happens at this instant: a delivery handed to code, a fault."""
        self.answer(self.call(operation, arguments), OK)


class HistoryFile(History):
    """A history that stays readable when its process is killed. The operating system has a call's first line before
    `call` returns. Answers and notes follow with the next call, or at `flush` or `close`."""

    def __init__(self, path: str | Path, process: str, clock: Clock) -> None:
        super().__init__(process, clock)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._waiting: list[str] = []
        self._calls = 0
        self._open: dict[int, int] = {}

    def call(self, operation: str, arguments: Arguments) -> list[Event]:
        made = super().call(operation, arguments)
        self.events.clear()
        self._calls += 1
        if made:
            self._open[id(made)] = self._calls
        self._write({"operation": operation, "arguments": arguments, **self._when(made), "call": self._calls})
        self.flush()
        return made

    def answer(self, call: list[Event], outcomes: str | Sequence[str], results: Arguments = ()) -> None:
        if not call:
            return
        listed = results if isinstance(results, dict) else list(results)
        outcome = outcomes if isinstance(outcomes, str) else list(outcomes)
        number = self._open.pop(id(call))
        self._write({"call": number, "returned": self.clock.monotonic_ms(), "outcome": outcome, "result": listed})

    def note(self, operation: str, arguments: Values) -> None:
        self._note(operation, arguments)

    def notes(self, operation: str, many: Sequence[Values]) -> None:
        """Note several of one kind at this instant with one line."""
        if many:
            self._note(operation, list(many))

    def _note(self, operation: str, arguments: Values | list[Values]) -> None:
        at = self.clock.monotonic_ms()
        when = {"process": self.process, "invoked": at, "returned": at, "wall_ms": self.clock.now()}
        self._write({"operation": operation, "arguments": arguments, **when, "outcome": OK})

    def _when(self, made: list[Event]) -> Values:
        if made:
            return {"process": self.process, "invoked": made[0].invoked, "wall_ms": made[0].wall_ms}
        return {"process": self.process, "invoked": self.clock.monotonic_ms(), "wall_ms": self.clock.now()}

    def _write(self, line: Values) -> None:
        self._waiting.append(json.dumps(line, separators=(",", ":")) + "\n")
        if len(self._waiting) >= 1_000:
            self.flush()

    def flush(self) -> None:
        """Hand all lines noted so far to the operating system."""
        if self._waiting:
            data = "".join(self._waiting).encode()
            self._waiting.clear()
            while data:
                data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Flush and close the file. Twice is harmless."""
        if self._file >= 0:
            self.flush()
            os.close(self._file)
            self._file = -1


class BadHistory(ValueError):
    """A line in the middle of a history cannot be read. The text says which."""


def read_history(paths: Iterable[str | Path]) -> list[Event]:
    """Return the events of one or many histories, by the time they were invoked. A torn last line is skipped. An
    operation without its answer is unknown."""
    events: list[Event] = []
    for path in paths:
        with open(path, "rb") as file:
            events.extend(read_lines(file, str(path)))
    return in_order(events)


def in_order(events: list[Event]) -> list[Event]:
    """Sort events by the time they were invoked, number them, and return them."""
    events.sort(key=lambda event: (event.invoked, event.returned))
    for number, event in enumerate(events):
        event.number = number
    return events


def read_lines(lines: Iterable[str | bytes], name: str = "history") -> Iterator[Event]:
    """Yield the events of one history in the order of their first lines. Raise BadHistory."""
    open_calls: dict[int, list[Event]] = {}
    events: list[Event] = []
    torn = ""
    for at, line in enumerate(lines, start=1):
        if torn:
            raise BadHistory(torn)
        try:
            value = json.loads(line)
        except ValueError as bad:
            torn = f"{name}:{at} is no JSON: {bad}"
            continue
        _take(value, events, open_calls, f"{name}:{at}")
    yield from events


def _take(value: Values, events: list[Event], open_calls: dict[int, list[Event]], where: str) -> None:
    call = value.get("call")
    if "operation" not in value:
        if call not in open_calls:
            raise BadHistory(f"{where} answers call {call}, which did not start")
        _answered(open_calls.pop(call), value)
        return
    arguments = value["arguments"]
    each = arguments if isinstance(arguments, list) else [arguments]
    at, wall_ms, process, operation = value["invoked"], value.get("wall_ms", 0.0), value["process"], value["operation"]
    made = [Event(process, operation, one, at, wall_ms=wall_ms) for one in each]
    events.extend(made)
    if value.get("returned") is not None:
        _answered(made, value)
    elif call is not None:
        open_calls[call] = made


def _answered(made: list[Event], value: Values) -> None:
    outcome, result, returned = value["outcome"], value.get("result") or {}, value["returned"]
    for index, event in enumerate(made):
        event.returned = returned
        event.outcome = outcome if isinstance(outcome, str) else outcome[index]
        if isinstance(result, list):
            event.result = result[index] if index < len(result) else {}
        else:
            event.result = result


def outcome_of(status: str) -> str:
    """Return the outcome that a definite status means: OK and DUPLICATE are ok, UNKNOWN is unknown, all others fail."""
    if status in ("OK", "DUPLICATE"):
        return OK
    return UNKNOWN if status == "UNKNOWN" else FAIL


def described(event: Event | Mapping[str, Any]) -> str:
    """Return the event, or a row of the dump, as a line for people."""
    return event.as_line() if isinstance(event, Event) else json.dumps({"dump": dict(event)}, sort_keys=True)
