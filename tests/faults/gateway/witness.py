"""The witness of a run: PostgreSQL's write-ahead log, which has each change of each message in the order of commits.

A gateway takes and settles webhooks of its own accord, and writes no history. The log survives a kill -9 as the data
do, and nothing of Timeline is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Set
from datetime import datetime
from typing import NamedTuple

import asyncpg

from tests.faults.machine import PATIENCE_S
from tests.faults.worker import TOPIC
from timeline.history import OK, Event
from timeline.model import PULL_PREFIX

SETTING = "wal_level=logical"
"""What the server must be started with."""
SLOT = "witness"
AT_A_TIME = 50_000
CLOSE_MS = 1.0
"""A commit takes effect about at its time."""
_VALUE = re.compile(r"(\w+)\[[^\]]*\]:('(?:[^']|'')*'|\S+)")
_TABLE = "table timeline.message: "


class _Row(NamedTuple):
    """A message as a change left it."""

    birth: int
    version: int
    due_ms: int
    scheduled_ms: int
    holder: str
    died_ms: int


class Witness:
    """What the log says. `offset_ms`: wall time less monotonic time. `moved`: (id, version) made by moves. `cancelled`:
    ids that producers cancelled, perhaps. The log does not tell these from settles.

    `lease_ends`: of each (id, birth, version) that was leased, as granted. `settles`: what ended leases of callers
    without a consumer, or prolonged them.
    """

    def __init__(self, offset_ms: float, moved: Set[tuple[str, int]], cancelled: Set[str]) -> None:
        self._offset_ms, self._moved, self._cancelled = offset_ms, moved, cancelled
        self._rows: dict[str, _Row] = {}
        self.lease_ends: dict[tuple[str, int, int], int] = {}
        self.settles: list[Event] = []

    def hear(self, lines: Iterable[str]) -> None:
        """Take in more lines of the log."""
        for wall_ms, what, values in _changes(lines):
            id = _text(values["id"])
            before = self._rows.pop(id, None)
            after = None if what == "DELETE" else _row(values)
            if after is not None:
                self._rows[id] = after
                if after.holder and (before is None or after.version != before.version):
                    self.lease_ends[id, after.birth, after.version] = after.due_ms
            if before is not None and before.holder.startswith(PULL_PREFIX):
                self._settled(id, before, after, wall_ms)

    def _settled(self, id: str, before: _Row, after: _Row | None, wall_ms: float) -> None:
        settled = _settle(before, after, (id, before.version + 1) in self._moved)
        if settled is None:
            return
        operation, more, result = settled
        if operation == "ack" and id in self._cancelled and before.due_ms <= wall_ms:
            return  # a cancel meets no lease, but one that ran out
        token = {"topic": TOPIC, "id": id, "consumer": before.holder, "birth": before.birth, "version": before.version}
        at, told = wall_ms - self._offset_ms, {"status": "OK", **result}
        event = Event("store", operation, {**token, **more}, at - CLOSE_MS, at + CLOSE_MS, wall_ms, OK, told)
        self.settles.append(event)


async def watch(url: str) -> None:
    """Keep the log from now on. The schema may be made later."""
    connection = await asyncpg.connect(url)
    await connection.execute("SELECT pg_create_logical_replication_slot($1, 'test_decoding')", SLOT)
    await connection.close()


async def question(url: str, witness: Witness) -> None:
    """Let `witness` hear the log since `watch`."""
    connection = await asyncpg.connect(url)
    try:
        asked = f"SELECT data FROM pg_logical_slot_get_changes($1, NULL, {AT_A_TIME}, 'include-timestamp', '1')"
        while lines := await connection.fetch(asked, SLOT, timeout=PATIENCE_S):
            witness.hear(line["data"] for line in lines)
    finally:
        await connection.close()


def _settle(before: _Row, after: _Row | None, moved: bool) -> tuple[str, dict[str, int], dict[str, int]] | None:
    """Return operation, more arguments and result of what ended or prolonged a lease."""
    if after is None:
        return "ack", {}, {}
    if after.died_ms:
        return "bury", {}, {}
    if after.version == before.version:
        return "extend", {}, {"lease_until_ms": after.due_ms}
    if after.holder or moved:
        return None
    return "release", {"due_ms": after.scheduled_ms}, {"version": after.version}


def _changes(lines: Iterable[str]) -> Iterator[tuple[float, str, dict[str, str]]]:
    """Yield (wall ms, INSERT, UPDATE or DELETE, columns) of each change of a message, in order of the commits."""
    changes: list[tuple[str, dict[str, str]]] = []
    for line in lines:
        if line.startswith(_TABLE):
            what, _, columns = line.removeprefix(_TABLE).partition(": ")
            changes.append((what, dict(_VALUE.findall(columns))))
        elif line.startswith("COMMIT") and changes:  # its time is at its end: COMMIT 758 (at 2026-11-25 20:41:02.5+00)
            at = datetime.fromisoformat(line.partition("(at ")[2].rstrip(")") + ":00").timestamp() * 1_000.0
            for what, values in changes:
                yield at, what, values
            changes.clear()


def _row(values: dict[str, str]) -> _Row:
    numbers = {name: int(values[name]) for name in ("birth", "version", "due_ms", "scheduled_ms", "died_ms")}
    numbers["birth"] %= 1 << 64
    return _Row(holder=_text(values["holder"]), **numbers)


def _text(shown: str) -> str:
    """Return the text in a bytea, which is shown as '\\x…'."""
    return bytes.fromhex(shown.strip("'").removeprefix("\\x")).decode()
