"""The statements: a batch goes in as one list of values or one JSON array, never a statement a message.

Byte strings travel as hexadecimal literals, which no character set touches. Lookups join the batch, as a JSON table,
to the index in that order (STRAIGHT_JOIN): left to itself the planner may walk the whole table, and lock it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from timeline.columns import Ragged
from timeline.leases import Message
from timeline.storage_plugins.mysql.connections import Session
from timeline.storage_plugins.mysql.schema import DEAD, FREE, HELD
from timeline.storage_plugins.sql import NUMBERS, STRINGS, signed_one
from timeline.storage_plugins.sqlite.statements import CHANGING, Columns

AT_ONCE = 1000
"""Rows of one statement."""
_BYTES = tuple(STRINGS.values())
WHOLE = ("row", "headers_bytes", *NUMBERS, *_BYTES)
SELECTED = ", ".join(f"m.`{name}`" for name in WHOLE)


def columns_of(rows: Sequence[tuple[Any, ...]], names: Sequence[str]) -> Columns:
    """Fetched rows as columns by name."""
    listed = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    numbers = {name: list(column) for name, column in zip(names, listed, strict=True) if name not in _BYTES}
    strings = {name: Ragged.of(list(column)) for name, column in zip(names, listed, strict=True) if name in _BYTES}
    return Columns(numbers, strings, len(rows))


def parts(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """The items, as many at a time as a statement takes."""
    for start in range(0, len(items), AT_ONCE):
        yield items[start : start + AT_ONCE]


def listed(numbers: Sequence[int]) -> str:
    """Numbers as SQL lists them; a list that holds nothing for none."""
    return ",".join(map(str, numbers)) or "NULL"


def hexed(value: bytes) -> str:
    """Bytes as a literal."""
    return f"x'{value.hex()}'"


# ── writing ──


def insert_messages(session: Session, key: int, now_ms: int, rows: Sequence[tuple[Any, ...]]) -> int:
    """Inserts new messages: row, bucket, id, birth, due_ms, expires_ms, payload_sum, payload_bytes, headers_bytes, grp,
    tag. Those whose id is taken are left out. How many were stored."""
    stored = 0
    for part in parts(rows):
        values = ",".join(
            f"({row},{key},{bucket},x'{id.hex()}',{birth},1,{due},{due},{now_ms},{now_ms},{expires},{check},{size},"
            f"{headers},x'{group.hex()}',x'{tag.hex()}')"
            for row, bucket, id, birth, due, expires, check, size, headers, group, tag in part
        )
        stored += session.execute(
            "INSERT INTO message (`row`, topic, bucket, id, birth, version, due_ms, scheduled_ms, put_ms, asked_ms, "
            f"expires_ms, payload_sum, payload_bytes, headers_bytes, grp, tag) VALUES {values} "
            "ON DUPLICATE KEY UPDATE `row` = `row`"
        )
    return stored


def insert_payloads(session: Session, rows: Sequence[tuple[int, bytes, bytes]]) -> None:
    """Inserts contents: row, payload, headers."""
    for part in parts(rows):
        values = ",".join(f"({row},x'{payload.hex()}',x'{headers.hex()}')" for row, payload, headers in part)
        session.execute(f"INSERT INTO payload (`row`, payload, headers) VALUES {values}")


_KINDS = {"holder": "VARCHAR(510)", "dead": "VARCHAR(2048)"}
_CHANGED = ", ".join(f"{name} {_KINDS.get(name, 'BIGINT')} PATH '$[{at}]'" for at, name in enumerate(CHANGING, 1))
_SET = ", ".join(f"m.{name} = {f'UNHEX(a.{name})' if name in _KINDS else f'a.{name}'}" for name in CHANGING)


def update_messages(session: Session, changed: Sequence[tuple[int, Message]]) -> None:
    """Sets the changing columns of messages by row."""
    for part in parts(changed):
        rows = [[row, *(_value(message, name) for name in CHANGING)] for row, message in part]
        session.execute(
            f"UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', {_CHANGED})) AS a "
            f"STRAIGHT_JOIN message AS m ON m.`row` = a.r SET {_SET}",
            (json.dumps(rows),),
        )


def _value(message: Message, name: str) -> Any:
    value = getattr(message, name)
    if name == "last_op":
        return signed_one(value)
    return value.hex() if isinstance(value, bytes) else value


def delete(session: Session, rows: Sequence[int]) -> None:
    """Removes messages by row, and their contents."""
    for part in parts(sorted(rows)):
        session.execute(f"DELETE FROM message WHERE `row` IN ({listed(part)})")
        session.execute(f"DELETE FROM payload WHERE `row` IN ({listed(part)})")


def remember(session: Session, key: int, now_ms: int, left: Sequence[tuple[bytes, Message]]) -> None:
    """Notes settled ids."""
    for part in parts(left):
        values = ",".join(
            f"({key},x'{id.hex()}',{signed_one(old.birth)},{old.version},{signed_one(old.payload_sum)},"
            f"{signed_one(old.last_op)},{now_ms})"
            for id, old in part
        )
        session.execute(
            f"REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) VALUES {values}"
        )


def lease(session: Session, rows: Sequence[int], now_ms: int, lease_ms: int, holder: bytes) -> None:
    """Writes leases."""
    for part in parts(rows):
        session.execute(
            f"UPDATE message SET due_ms = GREATEST({now_ms}, due_ms) + {lease_ms}, holder = {hexed(holder)}, "
            f"version = version + 1, deliveries = deliveries + 1 WHERE `row` IN ({listed(part)})"
        )


# ── reading ──

_FIND = (
    f"SELECT a.n, {SELECTED} FROM JSON_TABLE(%s, '$[*]' COLUMNS (n BIGINT PATH '$[0]', bucket BIGINT PATH '$[1]', "
    "id VARCHAR(510) PATH '$[2]')) AS a STRAIGHT_JOIN message AS m FORCE INDEX (message_id) "
    "ON m.topic = {key} AND m.bucket = a.bucket AND m.id = UNHEX(a.id)"
)


def find(session: Session, key: int, buckets: Sequence[int], ids: Sequence[bytes], lock: bool) -> Iterator[Columns]:
    """Messages by id, locked or not; column `n` is the place in `ids`."""
    for part in parts(range(len(ids))):
        asked = json.dumps([(at, buckets[at], ids[at].hex()) for at in part])
        statement = _FIND.format(key=key) + (" FOR UPDATE" if lock else "")
        yield columns_of(session.rows(statement, (asked,)), ("n", *WHOLE))


def find_held(session: Session, key: int, now_ms: int, asked: Sequence[Sequence[Any]]) -> Iterator[Columns]:
    """Living messages whose token and holder match, locked: n, bucket, id, birth, version, holder. Columns n, row,
    late."""
    for part in parts(asked):
        rows = session.rows(
            f"SELECT a.n, m.`row`, m.due_ms <= {now_ms} FROM JSON_TABLE(%s, '$[*]' COLUMNS (n BIGINT PATH '$[0]', "
            "bucket BIGINT PATH '$[1]', id VARCHAR(510) PATH '$[2]', birth BIGINT PATH '$[3]', "
            "version BIGINT PATH '$[4]', holder VARCHAR(510) PATH '$[5]')) AS a "
            f"STRAIGHT_JOIN message AS m FORCE INDEX (message_id) ON m.topic = {key} AND m.bucket = a.bucket "
            "AND m.id = UNHEX(a.id) AND m.birth = a.birth AND m.version = a.version AND m.holder = UNHEX(a.holder) "
            f"AND m.kind = {HELD} FOR UPDATE",
            (json.dumps(part),),
        )
        yield columns_of(rows, ("n", "row", "late"))


def find_remembered(session: Session, key: int, ids: Sequence[bytes], after_ms: int) -> Iterator[tuple[Any, ...]]:
    """Ids settled after `after_ms`: id, birth, version, payload_sum, last_op."""
    for part in parts(list(dict.fromkeys(ids))):
        yield from session.rows(
            f"SELECT id, birth, version, payload_sum, last_op FROM remembered WHERE topic = {key} "
            f"AND id IN ({','.join(map(hexed, part))}) AND settled_ms > {after_ms}"
        )


def in_buckets(buckets: Sequence[int] | None) -> str:
    """The condition that asks for these buckets."""
    return "" if buckets is None else f" AND m.bucket IN ({listed(buckets)})"


def timeline_part(
    session: Session, key: int, held: bool, until_ms: int, after: tuple[int, bytes] | None, limit: int,
    buckets: Sequence[int] | None,
) -> Columns:  # fmt: skip
    """The first `limit` messages by (due, id) beyond `after`, up to due `until_ms`, locked: those nobody holds, or
    those with a holder. What others lease or settle just now is passed over."""
    beyond = ""
    if after is not None:
        beyond = f" AND m.due_ms >= {after[0]} AND (m.due_ms > {after[0]} OR m.id > {hexed(after[1])})"
    rows = session.rows(
        f"SELECT {SELECTED} FROM message AS m FORCE INDEX (message_due) WHERE m.topic = {key} "
        f"AND m.kind = {HELD if held else FREE} AND m.due_ms <= {until_ms}{beyond}{in_buckets(buckets)} "
        f"ORDER BY m.due_ms, m.id LIMIT {limit} FOR UPDATE SKIP LOCKED"
    )
    return columns_of(rows, WHOLE)


def first_dues(
    session: Session, key: int, after_ms: int, buckets: Sequence[int] | None
) -> tuple[int | None, int | None]:
    """The earliest due > `after_ms` of messages nobody holds, and of those with a holder."""
    asked = ", ".join(
        f"(SELECT m.due_ms FROM message AS m FORCE INDEX (message_due) WHERE m.topic = {key} AND m.kind = {kind} "
        f"AND m.due_ms > {after_ms}{in_buckets(buckets)} ORDER BY m.due_ms LIMIT 1)"
        for kind in (FREE, HELD)
    )
    free, held = session.rows(f"SELECT {asked}")[0]
    return free, held


def contents(session: Session, rows: Sequence[int]) -> tuple[Ragged, Ragged, list[int]]:
    """Payloads and headers of `rows`, in order, and the indexes of those that are gone."""
    found: dict[int, tuple[bytes, bytes]] = {}
    for part in parts(rows):
        selected = f"SELECT `row`, payload, headers FROM payload WHERE `row` IN ({listed(part)})"
        found.update((row, (payload, headers)) for row, payload, headers in session.rows(selected))
    nothing = (b"", b"")
    content = [found.get(row, nothing) for row in rows]
    gone = [at for at, row in enumerate(rows) if row not in found]
    return Ragged.of([payload for payload, _ in content]), Ragged.of([headers for _, headers in content]), gone


__all__ = ["DEAD", "FREE", "HELD"]
