"""`mysql://`: the store. Each call is a transaction on a connection of the pool. The rules decide on locked rows."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from timeline.model import MAX_PAYLOAD_BYTES, Answers, Topic
from timeline.storage_plugins.contract import (
    Grant,
    LeasedRows,
    Opened,
    Puts,
    Settles,
    StoreRefused,
    StoreUnavailable,
)
from timeline.storage_plugins.mysql import schema
from timeline.storage_plugins.mysql.connections import (
    NO_DATABASE,
    Later,
    MysqlConnections,
    MysqlLocation,
    MysqlSession,
    code_of,
)
from timeline.storage_plugins.mysql.dialect import MysqlDialect, NumbersTaken, put, settle_plain
from timeline.storage_plugins.records import dropped
from timeline.storage_plugins.sql.changes import settle
from timeline.storage_plugins.sql.dialect import Changes, SqlDialect
from timeline.storage_plugins.sql.leasing import LeaseOutcome, lease_due
from timeline.storage_plugins.sql.statements import Plan, Result
from timeline.storage_plugins.sql.store import ServerStore, cut, whole, without_all
from timeline.storage_plugins.versions import Versions

PUT_AT_ONCE = 5_000
"""Messages of one transaction of a put. Leases skip what it has locked, so that none waits for it."""
ROWS_RESERVED = 100_000
"""Row numbers that a process takes at once. Unused ones are lost."""
PACKET_SLACK_BYTES = 1024 * 1024
"""Bytes of a packet beside the content, which is hexadecimal text."""
SMALLEST_PACKET_BYTES = 16 * 1024 * 1024


class _Dropped(Exception):
    """The topic of a call does not stand."""


class MysqlStore(ServerStore):
    """The store of `mysql://`; see `connections.MysqlLocation` for the URL."""

    sql = MysqlDialect()

    def __init__(self, url: str) -> None:
        super().__init__()
        self._location = MysqlLocation.of(url)
        self._connections: MysqlConnections | None = None
        self._rows_lock = threading.Lock()
        self._next_row, self._last_row = 1, 0
        self._keys: dict[int, int] = {}

    async def _open(self) -> Opened:
        connections = MysqlConnections(self._location)
        try:
            opened = await connections.transact(lambda session: self._found(session, schema.prepare))
        except BaseException:
            await asyncio.to_thread(connections.close)
            raise
        connections.opening = False
        self._connections = connections
        return opened

    async def inspect(self) -> Opened:
        try:
            return await self._transact(lambda session: self._found(session, schema.known_uid))
        except StoreUnavailable as error:
            if error.__cause__ is None or code_of(error.__cause__) != NO_DATABASE:
                raise
            return Opened("", "", ())

    def _found(self, session: MysqlSession, uid: Callable[[MysqlSession], str]) -> Opened:
        server = schema.server(session)
        if server.packet_bytes < SMALLEST_PACKET_BYTES:
            raise StoreRefused(
                f"max_allowed_packet is {server.packet_bytes}: set it to {SMALLEST_PACKET_BYTES} or more"
            )
        limit = min(MAX_PAYLOAD_BYTES, (server.packet_bytes - PACKET_SLACK_BYTES) // 2)
        self.capabilities = replace(self.capabilities, durable=server.durable, payload_limit_bytes=limit)
        return Opened(uid(session), f"{server.shown}, {self._location.shown}", server.warnings)

    async def close(self) -> None:
        connections, self._connections, self._opened = self._connections, None, None
        self._keys.clear()
        if connections is not None:
            await asyncio.to_thread(connections.close)

    async def check(self) -> None:
        text = "REPLACE INTO meta (name, value) VALUES ('probe', %s)"
        await self._transact(lambda session: session.execute(text, (secrets.token_hex(8),)))

    async def migrate(self, contract: bool) -> Versions:
        return await self._transact(lambda session: schema.contracted(session, contract))

    async def clock_ms(self) -> float | None:
        found = await self._transact(lambda session: session.rows("SELECT UNIX_TIMESTAMP(SYSDATE(6))"))
        return float(found[0][0]) * 1000.0

    # ── ways in ──

    async def _transact(self, act: Callable[[MysqlSession], Result]) -> Result:
        if self._connections is None:
            raise StoreUnavailable("the store is not open")
        return await self._connections.transact(act)

    async def _read(self, plan: Callable[[], Plan[Result]]) -> Result:
        return await self._transact(lambda session: session.run(plan()))

    async def _record(self, plan: Callable[[SqlDialect], Plan[Result]]) -> Result:
        return await self._transact(lambda session: session.run(plan(self.sql)))

    async def _read_of(self, topic: Topic, plan: Callable[[int], Plan[Result]], gone: Callable[[], Result]) -> Result:
        return await self._on(topic, lambda session, key: session.run(plan(key)), gone)

    async def _change_of(
        self, topic: Topic, now_ms: int, plan: Callable[[Changes], Plan[Result | None]], gone: Callable[[], Result],
        weight: int, lock: bool = False, asks: bool = False,
    ) -> Result:  # fmt: skip
        def act(session: MysqlSession, key: int) -> Result | None:
            return session.run(plan(Changes(self.sql, topic, key, now_ms)))

        return await self._on(topic, act, gone, lock, asks)

    async def _on(
        self, topic: Topic, act: Callable[[MysqlSession, int], Result | None], gone: Callable[[], Result],
        lock: bool = False, asks: bool = False,
    ) -> Result:  # fmt: skip
        """Run `act(session, key)` if the topic stands; else return what `gone` does.

        A known key is confirmed in one exchange with the first statement of `act`, all of which is undone if the topic
        was dropped. `asks`: `act` asks by itself, and returns None if the key is not the topic's. `lock`: the topic is
        not dropped meanwhile."""

        def keyed(session: MysqlSession) -> Result:
            key = self._keys.get(topic.uid)
            if asks and key is not None:
                result = act(session, key)
                if result is not None:
                    return result
                key = None
            asked = _key_of(session, topic, lock)
            used = self._told(topic, asked) if key is None else key
            result = act(session, used)
            if self._told(topic, asked) != used:
                raise StoreUnavailable("the topic has another key since a failover")
            return gone() if result is None else result

        try:
            return await self._transact(keyed)
        except _Dropped:
            return gone()

    def _told(self, topic: Topic, asked: Later) -> int:
        """Note and return the topic's key, as the server told it. Raise _Dropped."""
        found, _ = asked.answered()
        if not found:
            self._keys.pop(topic.uid, None)
            raise _Dropped
        self._keys[topic.uid] = key = int(found[0][0])
        return key

    async def _rows(self, count: int) -> int:
        """Return the first of the row numbers that a put of `count` may take: three for each, if all of them replace
        one message in turn. A transaction of its own reserves them, so that no others wait for it."""
        needed = 3 * count + 1
        with self._rows_lock:
            first, self._next_row = self._next_row, self._next_row + needed
            enough = self._next_row <= self._last_row + 1
        if not enough:
            many = max(ROWS_RESERVED, needed)
            first = await self._transact(lambda session: schema.reserve(session, many))
            with self._rows_lock:
                self._next_row, self._last_row = first + needed, first + many - 1
        return first

    # ── messages ──

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        done: list[Answers | BaseException] = []
        for part in cut(puts, PUT_AT_ONCE):
            try:
                done.append(await self._put(topic, now_ms, part))
            except Exception as error:
                done.append(error)
                break
        return Answers.concat(whole(done))

    async def _put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        try:
            return await self._put_numbered(topic, now_ms, puts)
        except NumbersTaken:
            with self._rows_lock:
                self._next_row, self._last_row = 1, 0
            return await self._put_numbered(topic, now_ms, puts)

    async def _put_numbered(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        first = await self._rows(len(puts))

        def plan(changes: Changes) -> Plan[Answers]:
            left = [first]  # a transaction that is repeated starts again

            def reserve(count: int) -> int:
                left[0] += count
                return left[0] - count

            return put(changes, puts, reserve)

        gone = partial(dropped, topic, len(puts))
        return await self._change_of(topic, now_ms, plan, gone, len(puts), lock=True)

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        asked = (without_all(topic, buckets), due_before_ms, grants, overdue_ms)
        found = await self._change_of(
            topic,
            now_ms,
            lambda changes: lease_due(changes, *asked),
            lambda: LeaseOutcome(LeasedRows.empty()),
            weight=sum(grant.count for grant in grants),
            asks=True,
        )
        return found.leased

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        count = len(settles)
        return await self._change_of(
            topic,
            now_ms,
            lambda changes: settle(changes, settles, settle_plain),
            lambda: dropped(topic, count),
            count,
            asks=True,
        )


def _key_of(session: MysqlSession, topic: Topic, lock: bool = False) -> Later:
    """Ask for the number by which rows name the topic; there is none if it was dropped. `lock`: it is not dropped
    meanwhile."""
    return session.later(f"SELECT `key` FROM topic WHERE uid = {topic.uid}{' LOCK IN SHARE MODE' if lock else ''}")
