"""Hand-made histories: each call adds an event; time moves on by hand."""

from __future__ import annotations

from typing import Any

from timeline.history import Event, Verdict, check

START_MS = 1_700_000_000_000.0
LEASE_MS = 1_000


class Scene:
    """A history under construction. `at` is the monotonic time in ms; the wall clock stands at START_MS + at."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.rows: list[dict[str, Any]] = []
        self.at = 0.0

    def wait(self, ms: float) -> None:
        self.at += ms

    @property
    def now_ms(self) -> int:
        return int(START_MS + self.at)

    def did(
        self, operation: str, outcome: str = "ok", took: float = 1.0, process: str = "p", **arguments: Any
    ) -> Event:
        result = arguments.pop("result", {"status": "OK"} if outcome == "ok" else {})
        event = Event(process, operation, arguments, self.at, self.at + took, START_MS + self.at, outcome, result)
        self.at += took + 1
        self.events.append(event)
        return event

    def put(self, id: str = "a", due: float = 0, outcome: str = "ok", **more: Any) -> Event:
        """A put due `due` ms from START_MS."""
        result = more.pop("result", {"status": "OK", "version": 1} if outcome == "ok" else {})
        arguments = {"id": id, "due_ms": int(START_MS + due), "sum": 7, "group": "g", **more}
        return self.did("put", outcome, result=result, **arguments)

    def receive(self, version: int = 2, id: str = "a", consumer: str = "c1", due: float = 0, **more: Any) -> Event:
        scheduled = more.pop("scheduled", due)
        until = more.pop("until", self.at + LEASE_MS)
        arguments = {
            "id": id,
            "consumer": consumer,
            "session": 1,
            "birth": 11,
            "version": version,
            "due_ms": int(START_MS + due),
            "scheduled_ms": int(START_MS + scheduled),
            "lease_until_ms": int(START_MS + until),
            "sum": 7,
            **more,
        }
        return self.did("receive", took=0.0, process=consumer, **arguments)

    def settle(self, operation: str, version: int = 2, outcome: str = "ok", consumer: str = "c1", **more: Any) -> Event:
        arguments = {"id": "a", "consumer": consumer, "birth": 11, "version": version, **more}
        return self.did(operation, outcome, process=consumer, **arguments)

    def row(self, version: int = 1, due: float = 0, **more: Any) -> None:
        values = {
            "id": "a",
            "birth": 11,
            "version": version,
            "due_ms": int(START_MS + due),
            "scheduled_ms": int(START_MS + more.pop("scheduled", due)),
            "holder": "",
            "sum": 7,
            "read_sum": 7,
            "died_ms": 0,
            **more,
        }
        self.rows.append(values)

    def judge(self, **declared: Any) -> Verdict:
        declared.setdefault("end_wall_ms", START_MS + self.at)
        return check(self.events, self.rows, **declared)

    def broken(self, **declared: Any) -> set[str]:
        """The promises that the checker finds broken."""
        return {violation.invariant for violation in self.judge(**declared).violations}


class StoreScene(Scene):
    """A scene told by the store, too: `commit` adds a change (at another time than now: `at`)."""

    def commit(self, kind: str, version: int, due: float = 0, at: float | None = None, **more: Any) -> Event:
        values = {"birth": 11, "now_ms": self.now_ms, "holder": "c1", "op": 0, **more}
        if kind == "put":
            values = {"sum": 7, "group": "g", "expires_ms": 0, **values}
        now, self.at = self.at, self.at if at is None else at
        event = self.did(
            "commit",
            took=0.0,
            id=values.pop("id", "a"),
            kind=kind,
            version=version,
            due_ms=int(START_MS + due),
            process="store",
            **values,
        )
        self.at = self.at if at is None else now
        return event
