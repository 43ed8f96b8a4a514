"""PostgreSQL's dialect: arrays in, records out; a change stands where the row is still as it was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from timeline.columns import Int64, Ragged, UInt32
from timeline.model import buckets_of
from timeline.storage_plugins.contract import Grant
from timeline.storage_plugins.postgresql.schema import ROWS_AT_A_TIME
from timeline.storage_plugins.postgresql.statements import (
    COLUMNS,
    FREE,
    HELD,
    STATEMENTS,
    TAGGED,
    WORDS,
    Fragments,
    HotStatements,
    whole,
)
from timeline.storage_plugins.sql import NUMBERS, STRINGS, signed, signed_one
from timeline.storage_plugins.sql.dialect import Changes, LeasedContent, SqlDialect
from timeline.storage_plugins.sql.rows import FoundColumns, MessageBatch, changing_columns
from timeline.storage_plugins.sql.statements import Plan, Query, Statement

BLOCKS = 16
_BLOCKS = "SELECT array_agg(nextval('timeline.message_row')) FROM generate_series(1, $1::int8)"
_NUMBERS = ("row", "bucket", "headers_bytes", *NUMBERS)


class RowNumbers:
    """Row numbers that no other broker has: taken from the server's sequence in blocks, so that a put costs no
    statement for them."""

    def __init__(self) -> None:
        self._ranges: list[range] = []

    def take(self, count: int) -> Plan[list[int]]:
        """`count` of them, each used once."""
        while sum(map(len, self._ranges)) < count:
            firsts = yield Statement(_BLOCKS, (BLOCKS + -(-count // ROWS_AT_A_TIME),), value)
            self._ranges += [range(first, first + ROWS_AT_A_TIME) for first in firsts]
        taken: list[int] = []
        while len(taken) < count:
            block = self._ranges[0]
            part = block[: count - len(taken)]
            taken += part
            self._ranges[0] = block[len(part) :]
            if not self._ranges[0]:
                del self._ranges[0]
        return taken

    def forget(self) -> None:
        """Take new ones: a server that lost its last moments in a crash may hand these out again."""
        self._ranges.clear()


class NumberedQuery(Query):
    """A statement under construction, with numbered parameters. `$1` is the topic's uid, where it is for rows of
    one."""

    __slots__ = ("_of_topic",)

    def __init__(self, key: int, of_topic: str) -> None:
        super().__init__(key)
        self._of_topic = of_topic
        if key:
            self._values.append(key)

    def __call__(self, value: Any) -> str:
        self._values.append(value)
        return f"${len(self._values)}"

    @property
    def topic(self) -> str:
        return self._of_topic


class PostgresqlDialect(SqlDialect):
    """The dialect. A call's key of a topic is its uid: statements find the key by themselves. `apart`: no statement may
    update and delete rows of one table. `leases_at_once`: a lease is one statement where nothing is for the rules."""

    free, held, tagged = FREE, HELD, TAGGED
    locked = " FOR UPDATE"
    asks_first = False
    apart = False
    leases_at_once = True
    words: Fragments = WORDS
    statements: HotStatements = STATEMENTS

    @property
    def claiming(self) -> str:  # type: ignore[override]
        return self.words.claiming

    def query(self, key: int = 0) -> Query:
        return NumberedQuery(key, self.words.of_topic)

    def table(self, name: str) -> str:
        return f"timeline.{name}"

    def along(self, index: str) -> str:
        return "timeline.message AS m"

    def in_buckets(self, query: Query, buckets: Sequence[int] | None) -> str:
        asked = query(None if buckets is None else list(buckets))
        return f" AND ({asked}::int8[] IS NULL OR m.bucket = ANY({asked}))"

    def messages(self, query: Query, source: str, free: bool = False, lock: str = "") -> Statement:
        return query.reading(f"SELECT {whole()} FROM {source}{lock}", columns_of_records)

    def find(self, key: int, places: Sequence[tuple[int, bytes]], lock: bool) -> Plan[Iterable[FoundColumns]]:
        asked = (key, [bucket for bucket, _ in places], [id for _, id in places])
        found = yield Statement(self.statements.find, asked, columns_of_records)
        return (found,)

    def find_remembered(self, key: int, ids: Sequence[bytes], after_ms: int) -> Plan[list[tuple[Any, ...]]]:
        found: list[tuple[Any, ...]] = yield Statement(self.statements.find_remembered, (key, ids, after_ms), list)
        return found

    def change(self, changes: Changes) -> Plan[set[bytes]]:
        if self.apart and changes.updated and changes.removed:
            lost = yield from self._change(changes, list(changes.updated))
            return lost | (yield from self._change(changes, list(changes.removed)))
        return (yield from self._change(changes, [*changes.updated, *changes.removed]))

    def _change(self, changes: Changes, chosen: list[bytes]) -> Plan[set[bytes]]:
        """Write what became of the `chosen`, by one statement."""
        bucket = dict(zip(chosen, buckets_of(Ragged.of(chosen), changes.topic.settings.buckets).tolist(), strict=True))
        ids = sorted(chosen, key=lambda id: (bucket[id], id))
        was = [changes.met[id].message for id in ids]
        after = [changes.updated.get(id, message) for id, message in zip(ids, was, strict=True)]
        updates = any(id in changes.updated for id in ids)
        removes = any(id in changes.removed for id in ids)
        remembers = removes and bool(changes.remembered)
        asked: list[Any] = [
            changes.key,
            [bucket[id] for id in ids],
            ids,
            [signed_one(message.birth) for message in was],
            [message.version for message in was],
            [message.due_ms for message in was],
            [message.died_ms for message in was],
            [id in changes.removed for id in ids],
        ]
        if updates:
            asked += changing_columns(after)
        if remembers:
            left = [changes.remembered.get(id) for id in ids]
            asked += [
                changes.now_ms,
                [left_one is not None for left_one in left],
                [0 if left_one is None else signed_one(left_one.last_op) for left_one in left],
            ]
        done = yield Statement(self.statements.change[updates, removes, remembers], asked, value, writes=True)
        return set(ids).difference(ids[at] for at in done or ())

    def contents(self, numbers: Sequence[int], sizes: Sequence[int]) -> Plan[tuple[Ragged, Ragged, list[int]]]:
        found = (yield Statement(self.statements.contents, (numbers,), list)) if numbers else []
        return _contents(found)

    def lease(
        self, changes: Changes, batch: MessageBatch, turns: UInt32, until_ms: Int64, grants: Sequence[Grant],
        also: Statement | None,
    ) -> Plan[tuple[LeasedContent, Any]]:  # fmt: skip
        rows = batch.rows
        asked = (
            changes.key,
            buckets_of(rows.ids, changes.topic.settings.buckets).tolist(),
            rows.ids.tolist(),
            signed(rows.birth),
            rows.version.tolist(),
            rows.due_ms.tolist(),
            until_ms.tolist(),
            [grants[turn].holder for turn in turns.tolist()],
        )
        found = yield Statement(self.statements.lease_each, asked, list, writes=True)
        payloads, headers, gone = _contents([record[1:] for record in map(tuple, found)])
        content = LeasedContent(payloads, headers, tuple(gone), [record[0] for record in found])
        return content, None if also is None else (yield also)

    def delete_some(self, key: int, limit: int) -> Plan[int]:
        removed: int = yield Statement(self.statements.rows_of_dropped, (key, limit), value, writes=True)
        return removed

    def forget(self, key: int, until_ms: int | None, limit: int) -> Plan[int]:
        text, asked = self.statements.forget_dropped, [key, limit]
        if until_ms is not None:
            text, asked = self.statements.forget, [key, until_ms, limit]
        removed: int = yield Statement(text, asked, counts=True, writes=True)
        return removed

    def still_stands(self, key: int) -> Plan[bool]:
        rows = yield Statement("SELECT key FROM timeline.topic WHERE uid = $1", (key,), list)
        return bool(rows)


def value(records: Sequence[Any]) -> Any:
    """The only field of the only record."""
    return records[0][0]


def _contents(records: Sequence[Any]) -> tuple[Ragged, Ragged, list[int]]:
    payloads = Ragged.of([payload or b"" for payload, _ in records])
    headers = Ragged.of([headers or b"" for _, headers in records])
    return payloads, headers, [at for at, (payload, _) in enumerate(records) if payload is None]


def columns_of_records(records: Sequence[Any]) -> FoundColumns:
    """Records of `whole` columns, and perhaps more, as columns."""
    columns: list[Any] = list(zip(*records, strict=True)) if records else [()] * len(COLUMNS)
    named = dict(zip(COLUMNS, columns, strict=False))
    numbers = {name: list(named[name]) for name in _NUMBERS}
    strings = {name: Ragged.of(list(named[name])) for name in STRINGS.values()}
    return FoundColumns(numbers, strings, len(records))
