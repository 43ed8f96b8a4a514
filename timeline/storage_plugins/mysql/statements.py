"""The statements: a batch goes in as one list of values or one JSON array, never a statement a message, and comes out
as one row of whole columns.

Byte strings travel in as hexadecimal literals, which no character set touches. Each lookup names its index: left to
itself the planner may walk the whole table, and lock it.

Why one row: the driver is plain Python. Measured on MariaDB 10.11, 2,000 messages with 17 columns: 13.4 ms of the
driver's processor time as rows, 0.4 ms as the row that `Aggregate` asks for, and 7 instead of 20 ms in all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from timeline.columns import Ragged
from timeline.leases import Message
from timeline.storage_plugins.contract import StoreUnavailable
from timeline.storage_plugins.mysql.connections import Later, Session
from timeline.storage_plugins.mysql.schema import DEAD, FREE, HELD
from timeline.storage_plugins.sql import NUMBERS, STRINGS, signed_one
from timeline.storage_plugins.sql.rows import CHANGING, Columns

Reading = Callable[[], Columns]
"""Reads what was asked, when it is needed."""
AT_ONCE = 2000
"""Rows of one statement that writes or looks up."""
LEASED_AT_ONCE = 4000
"""Rows of one look along the timeline: with the longest ids, groups and holders they stay below the smallest packet."""
CONTENT_BYTES_AT_ONCE = 4 * 1024 * 1024
"""Content of one statement, give or take one message: as hexadecimal digits it is twice that."""


class Aggregate:
    """A SELECT whose result is one row of whole columns. `numbers`: integer columns that are never NULL. `strings`:
    byte-string columns."""

    def __init__(self, numbers: Sequence[str], strings: Sequence[str] = (), table: str = "m") -> None:
        self.numbers, self._strings = tuple(numbers), tuple(strings)
        self._named = {name: f"{table}.`{name}`" for name in (*numbers, *strings)}
        self.inner = ", ".join(self._named.values())
        self.outer = self._outer(self._named)

    def _outer(self, named: dict[str, str]) -> str:
        return ", ".join(
            (
                *(f"GROUP_CONCAT({named[name]})" for name in self.numbers),
                *(f"GROUP_CONCAT(LENGTH({named[name]}))" for name in self._strings),
                *(f"GROUP_CONCAT({named[name]} SEPARATOR '')" for name in self._strings),
            )
        )

    def over(self, source: str, **computed: str) -> str:
        """The statement for `source`: all that may follow FROM, in any order. `computed`: what some columns are."""
        return f"SELECT {self._outer(self._named | computed)} FROM {source}"

    def first(self, source: str) -> str:
        """The statement for a `source` in an order and with a limit, which may lock what it answers."""
        return f"SELECT {self.outer} FROM (SELECT {self.inner} FROM {source}) AS m"

    def read(self, session: Session, statement: str, parameters: Sequence[Any] | None = None) -> Columns:
        """Runs a statement made by `over` or `first`."""
        return self.columns(session.later(statement, parameters))

    def columns(self, asked: Later) -> Columns:
        """What such a statement answers."""
        row = asked.answered()[0][0]
        listed = len(self.numbers) + len(self._strings)
        lists: list[list[int]] = json.loads(f"[{','.join(f'[{text or str()}]' for text in map(_text, row[:listed]))}]")
        strings: dict[str, Ragged] = {}
        for name, sizes, joined in zip(self._strings, lists[len(self.numbers) :], row[listed:], strict=True):
            offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
            np.cumsum(sizes, out=offsets[1:])
            if offsets[-1] != len(joined or b""):
                raise StoreUnavailable("the server cut its answer short: raise max_allowed_packet")
            strings[name] = Ragged(joined or b"", offsets)
        return Columns(dict(zip(self.numbers, lists, strict=False)), strings, len(lists[0]))


def _text(listed: str | bytes | None) -> str:
    """A list of numbers as text: servers and drivers differ in what they call it."""
    return listed.decode() if isinstance(listed, bytes) else listed or ""


WHOLE = Aggregate(("row", "headers_bytes", *NUMBERS), tuple(STRINGS.values()))
"""Messages with every column but their content."""
_FREE_ROWS = Aggregate(tuple(name for name in WHOLE.numbers if name != "died_ms"), ("id", "grp", "tag"))
"""The same of messages that nobody holds."""


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


def mark(session: Session, key: int, rows: Sequence[tuple[Any, ...]]) -> None:
    """Notes in the tables beside `message` what new ones have: row, bucket, id, expires_ms, tag."""
    for part in parts([row for row in rows if row[4]]):
        values = ",".join(f"({key},x'{tag.hex()}',{bucket},x'{id.hex()}',{row})" for row, bucket, id, _, tag in part)
        session.later(f"INSERT INTO tagged (topic, tag, bucket, id, `row`) VALUES {values}")
    for part in parts([row for row in rows if row[3]]):
        values = ",".join(f"({key},{expires_ms},{row})" for row, _, _, expires_ms, _ in part)
        session.later(f"INSERT INTO expiring (topic, expires_ms, `row`) VALUES {values}")


def insert_payloads(session: Session, rows: Sequence[tuple[int, bytes, bytes]]) -> None:
    """Inserts contents: row, payload, headers."""
    values: list[str] = []
    room = CONTENT_BYTES_AT_ONCE
    for at, (row, payload, headers) in enumerate(rows, 1):
        values.append(f"({row},x'{payload.hex()}',x'{headers.hex()}')")
        room -= len(payload) + len(headers)
        if room <= 0 or at == len(rows):
            session.later(f"INSERT INTO payload (`row`, payload, headers) VALUES {','.join(values)}")
            values, room = [], CONTENT_BYTES_AT_ONCE


_KINDS = {"holder": "VARCHAR(510)", "dead": "VARCHAR(2048)"}
_CHANGED = ", ".join(f"{name} {_KINDS.get(name, 'BIGINT')} PATH '$[{at}]'" for at, name in enumerate(CHANGING, 1))
_SET = ", ".join(f"m.{name} = {f'UNHEX(a.{name})' if name in _KINDS else f'a.{name}'}" for name in CHANGING)


def update_messages(session: Session, changed: Sequence[tuple[int, Message]]) -> None:
    """Sets the changing columns of messages by row."""
    for part in parts(changed):
        rows = [[row, *(_value(message, name) for name in CHANGING)] for row, message in part]
        session.later(
            f"UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', {_CHANGED})) AS a "
            f"STRAIGHT_JOIN message AS m ON m.`row` = a.r SET {_SET}",
            (json.dumps(rows),),
        )


def _value(message: Message, name: str) -> Any:
    value = getattr(message, name)
    if name == "last_op":
        return signed_one(value)
    return value.hex() if isinstance(value, bytes) else value


_DELETE = (
    "DELETE m FROM JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$')) AS a "
    "STRAIGHT_JOIN {table} AS m FORCE INDEX (PRIMARY) ON m.`row` = a.r"
)
"""`WHERE row IN (…)` is a little quicker, but where the list is a fifth of the table the server reads, and locks, all
of it: two who acknowledge then wait for each other for ever."""


def delete(session: Session, rows: Sequence[int], marked: bool = True) -> None:
    """Removes messages by row, and their contents; and, unless none of them is `marked`, what stands beside them."""
    for part in parts(sorted(rows)):
        if marked:
            chosen = f"IN ({listed(part)})"
            session.later(
                "DELETE t FROM message AS m STRAIGHT_JOIN tagged AS t ON t.topic = m.topic AND t.tag = m.tag "
                f"AND t.bucket = m.bucket AND t.id = m.id WHERE m.`row` {chosen} AND m.tag <> x''"
            )
            session.later(
                "DELETE e FROM message AS m STRAIGHT_JOIN expiring AS e ON e.topic = m.topic "
                f"AND e.expires_ms = m.expires_ms AND e.`row` = m.`row` WHERE m.`row` {chosen} AND m.expires_ms > 0"
            )
        for table in ("message", "payload"):
            session.later(_DELETE.format(table=table), (json.dumps(part),))


def remember(session: Session, key: int, now_ms: int, left: Sequence[tuple[bytes, Message]]) -> None:
    """Notes settled ids."""
    for part in parts(left):
        values = ",".join(
            f"({key},x'{id.hex()}',{signed_one(old.birth)},{old.version},{signed_one(old.payload_sum)},"
            f"{signed_one(old.last_op)},{now_ms})"
            for id, old in part
        )
        session.later(
            f"REPLACE INTO remembered (topic, id, birth, version, payload_sum, last_op, settled_ms) VALUES {values}"
        )


def lease(session: Session, rows: Sequence[int], now_ms: int, lease_ms: int, holder: bytes) -> None:
    """Writes leases."""
    for part in parts(rows):
        session.later(
            f"UPDATE message SET due_ms = GREATEST({now_ms}, due_ms) + {lease_ms}, holder = {hexed(holder)}, "
            f"version = version + 1, deliveries = deliveries + 1 WHERE `row` IN ({listed(part)})"
        )


_LEASE_EACH = (
    "UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', due_ms BIGINT PATH '$[1]', "
    "holder VARCHAR(510) PATH '$[2]')) AS a STRAIGHT_JOIN message AS m ON m.`row` = a.r "
    "SET m.due_ms = a.due_ms, m.holder = UNHEX(a.holder), m.version = m.version + 1, m.deliveries = m.deliveries + 1"
)


def lease_each(session: Session, leases: Sequence[tuple[int, int, bytes]]) -> None:
    """Writes leases: row, due_ms, holder."""
    for part in parts(leases):
        session.later(_LEASE_EACH, (json.dumps([(row, due_ms, holder.hex()) for row, due_ms, holder in part]),))


_EXTEND = (
    "UPDATE JSON_TABLE(%s, '$[*]' COLUMNS (r BIGINT PATH '$[0]', due_ms BIGINT PATH '$[1]')) AS a "
    "STRAIGHT_JOIN message AS m ON m.`row` = a.r SET m.due_ms = a.due_ms"
)


def extend(session: Session, until: Sequence[tuple[int, int]]) -> None:
    """Sets the ends of leases: row, due_ms."""
    for part in parts(until):
        session.later(_EXTEND, (json.dumps(part),))


# ── reading ──


def _by_id(key: int, places: Sequence[tuple[int, bytes]]) -> str:
    """Messages by (bucket, id), as all that follows FROM: for each bucket the list of its ids. Joined to a JSON table
    instead, the server takes twice the processor time for the lookup; (bucket, id) IN (…) is in between."""
    by_bucket: dict[int, list[str]] = {}
    for bucket, id in places:
        by_bucket.setdefault(bucket, []).append(hexed(id))
    asked = " OR ".join(f"(m.bucket = {bucket} AND m.id IN ({','.join(ids)}))" for bucket, ids in by_bucket.items())
    return f"message AS m FORCE INDEX (message_id) WHERE m.topic = {key} AND ({asked})"


def find(session: Session, key: int, places: Sequence[tuple[int, bytes]], lock: bool) -> Iterator[Columns]:
    """Messages by (bucket, id), locked or not. They are looked up in the index's order, so that two who lock the same
    ones wait for each other rather than for ever."""
    for part in parts(sorted(set(places))):
        yield WHOLE.read(session, WHOLE.over(_by_id(key, part)) + (" FOR UPDATE" if lock else ""))


_HELD = Aggregate(("row", "birth", "version", "due_ms", "expires_ms", "payload_sum", "marked"), ("id", "holder"))


def find_held(session: Session, key: int, places: Sequence[tuple[int, bytes]]) -> Iterator[Columns]:
    """What living messages that somebody holds say of their token, by (bucket, id), locked. `marked`: whether
    something stands beside it."""
    for part in parts(sorted(places)):
        source = f"{_by_id(key, part)} AND m.kind = {HELD} AND {standing(key)} FOR UPDATE"
        yield _HELD.read(session, _HELD.over(source, marked="m.tag <> x'' OR m.expires_ms > 0"))


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
) -> Reading:  # fmt: skip
    """The first `limit` messages by (due, id) beyond `after`, up to due `until_ms`, locked: those nobody holds, or
    those with a holder. What others lease or settle just now is passed over."""
    beyond = ""
    if after is not None:
        beyond = f" AND m.place_ms >= {after[0]} AND (m.place_ms > {after[0]} OR m.id > {hexed(after[1])})"
    columns = WHOLE if held else _FREE_ROWS
    source = (
        f"message AS m FORCE INDEX (message_due) WHERE m.topic = {key} "
        f"AND m.kind = {HELD if held else FREE} AND m.place_ms <= {until_ms}{beyond}{in_buckets(buckets)} "
        f"ORDER BY m.place_ms, m.id LIMIT {limit} FOR UPDATE SKIP LOCKED"
    )
    asked = session.later(columns.first(source))

    def read() -> Columns:
        found = columns.columns(asked)
        if not held:
            nothing = Ragged(b"", np.zeros(found.count + 1, dtype=np.int64))
            found.numbers["died_ms"] = [0] * found.count
            found.strings |= {"holder": nothing, "dead": nothing}
        return found

    return read


def first_dues(session: Session, key: int, after_ms: int, buckets: Sequence[int] | None) -> Later:
    """The earliest due > `after_ms` of messages nobody holds, and of those with a holder; whether the topic stands:
    one row."""
    asked = ", ".join(
        f"(SELECT m.place_ms FROM message AS m FORCE INDEX (message_due) WHERE m.topic = {key} AND m.kind = {kind} "
        f"AND m.place_ms > {after_ms}{in_buckets(buckets)} ORDER BY m.place_ms LIMIT 1)"
        for kind in (FREE, HELD)
    )
    return session.later(f"SELECT {asked}, {standing(key)}")


def standing(key: int) -> str:
    """The condition that the topic was not dropped."""
    return f"EXISTS (SELECT 1 FROM topic WHERE `key` = {key})"


_CONTENT = Aggregate(("row",), ("payload", "headers"), "p")


def contents(session: Session, rows: Sequence[int], sizes: Sequence[int]) -> tuple[Ragged, Ragged, list[int]]:
    """Payloads and headers of `rows`, of about `sizes` bytes each, in order, and the indexes of those that are gone."""
    found: list[Columns] = []
    start = 0
    while start < len(rows):
        stop, room = start + 1, CONTENT_BYTES_AT_ONCE - sizes[start]
        while stop < len(rows) and stop - start < LEASED_AT_ONCE and sizes[stop] <= room:
            room -= sizes[stop]
            stop += 1
        source = f"payload AS p WHERE p.`row` IN ({listed(sorted(rows[start:stop]))})"
        found.append(_CONTENT.read(session, _CONTENT.over(source)))
        start = stop
    place = {row: at for at, row in enumerate(row for columns in found for row in columns.numbers["row"])}
    absent = len(place)
    gone = [at for at, row in enumerate(rows) if row not in place]
    order = np.array([place.get(row, absent) for row in rows], dtype=np.intp)

    def in_order(name: str) -> Ragged:
        joined = Ragged.concat([*(columns.strings[name] for columns in found), Ragged.of([b""])])
        return joined.take(order)

    return in_order("payload"), in_order("headers"), gone


__all__ = ["DEAD", "FREE", "HELD"]
