"""`postgresql://`: the store on PostgreSQL. Several brokers may share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import ClassVar

from timeline.model import Answers, Operation, Status, Topic
from timeline.storage_plugins.contract import (
    Grant,
    LeasedRows,
    Mutations,
    Opened,
    Puts,
    Settles,
    StoreUnavailable,
    TagMutation,
    TagStep,
)
from timeline.storage_plugins.postgresql import schema
from timeline.storage_plugins.postgresql.connections import (
    PostgresqlConnection,
    PostgresqlConnections,
    Steps,
    refused_rights,
)
from timeline.storage_plugins.postgresql.dialect import (
    PostgresqlDialect,
    RowNumbers,
    lease_plain,
    mutate_tag,
    put,
    settle_plain,
)
from timeline.storage_plugins.postgresql.pool import NO_DATABASE, PostgresqlLocation, state_of
from timeline.storage_plugins.sql.changes import mutate, settle
from timeline.storage_plugins.sql.dialect import Changes, SqlDialect
from timeline.storage_plugins.sql.leasing import LeaseOutcome, lease_due
from timeline.storage_plugins.sql.statements import Plan, Result
from timeline.storage_plugins.sql.store import ServerStore, without_all
from timeline.storage_plugins.versions import Versions

# ── where a look for messages to lease begins ──

# Leased and deleted messages stay in an index until they are collected: about a minute until PostgreSQL's vacuum, hours
# in CockroachDB. A look from the beginning of the timeline passes all of them each time. So a look begins a little
# before the earliest due time that the one before it left. Likewise it looks for the next lease to run out from the end
# of the one before. This is only an optimisation. The next look from the beginning finds messages that another broker
# wrote further back. A look that found nothing begins there again. So do the first look of each second and each sweep
# of overdue messages.

SLACK_MS = 1_000
"""How far before that a look begins: other brokers, by other clocks, put messages as due now."""
WHOLE_EVERY_MS = 1_000
"""How long looks may skip the beginning."""
NEVER_MS = 1 << 62

Place = tuple[int, tuple[int, ...] | None]


@dataclass(slots=True)
class Floor:
    """`due_ms`: the earliest due time of a message to lease. `end_ms`: the earliest end of a running lease. `whole_ms`:
    the time of the last look from the beginning."""

    due_ms: int
    end_ms: int
    whole_ms: int = 0

    def lower(self, due_ms: int, end_ms: int) -> None:
        """Note an earlier due time or end of a lease."""
        self.due_ms, self.end_ms = min(self.due_ms, due_ms), min(self.end_ms, end_ms)

    def holds(self, now_ms: int) -> bool:
        """Return whether the next look may begin here."""
        return 0 <= now_ms - self.whole_ms < WHOLE_EVERY_MS


class LeaseLook:
    """A look under way: for messages due at `due_ms` or later, and for leases that end at `end_ms` or later; -1: from
    the beginning."""

    def __init__(self, floors: ScanFloors, place: Place, now_ms: int) -> None:
        self.place = place
        self._floors, self._now_ms = floors, now_ms
        self.due_ms = self.end_ms = -1
        if (floor := floors.standing.get(place)) and floor.holds(now_ms):
            self.due_ms, self.end_ms = floor.due_ms, floor.end_ms
        self.missed = Floor(now_ms, NEVER_MS, now_ms)
        """The earliest times written during the look, which may not have seen them."""

    def __enter__(self) -> LeaseLook:
        self._floors.under_way.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._floors.under_way.discard(self)

    def begins_again(self) -> bool:
        """Start again from the beginning; return False if this look did."""
        partial = self.due_ms >= 0
        self.due_ms = self.end_ms = -1
        return partial

    def left(self, next_due_ms: int | None, end_ms: int | None, backoff_ms: int) -> None:
        """Note the end of the look. `next_due_ms`: the earliest due time that is left, where a lease that runs out
        counts from `backoff_ms` after its end. `end_ms`: the end of the next lease to run out."""
        new = self.missed
        new.lower(NEVER_MS if next_due_ms is None else next_due_ms, NEVER_MS if end_ms is None else end_ms)
        new.due_ms = max(-1, new.due_ms - backoff_ms - SLACK_MS)
        standing = self._floors.standing
        if self.due_ms < 0:
            for place in [place for place, floor in standing.items() if not floor.holds(self._now_ms)]:
                del standing[place]
            standing[self.place] = new
        elif floor := standing.get(self.place):  # else another call has removed it
            floor.due_ms, floor.end_ms = new.due_ms, new.end_ms


class ScanFloors:
    """The floors of all topics and sets of buckets, and the looks under way."""

    def __init__(self) -> None:
        self.standing: dict[Place, Floor] = {}
        self.under_way: set[LeaseLook] = set()

    def look(self, topic: Topic, buckets: Sequence[int] | None, now_ms: int) -> LeaseLook:
        """Return a look into these buckets, to be entered as a context."""
        return LeaseLook(self, (topic.uid, None if buckets is None else tuple(sorted(buckets))), now_ms)

    def lower(self, topic: Topic, due_ms: int = NEVER_MS, end_ms: int = NEVER_MS) -> None:
        """Note that this store may have written a message due at `due_ms` (-1: not known), or a lease that ends at
        `end_ms`."""
        for place, floor in self.standing.items():
            if place[0] == topic.uid:
                floor.lower(due_ms, end_ms)
        for look in self.under_way:
            if look.place[0] == topic.uid:
                look.missed.lower(due_ms, end_ms)

    def forget(self) -> None:
        """Forget all floors: the next looks begin at the beginning."""
        self.standing.clear()


# ── the store ──

_MARK = "SELECT pg_logical_emit_message(true, 'timeline', '')"
"""A commit that changes nothing."""


class PostgresqlStore(ServerStore):
    """The store of `postgresql://`; see `pool.PostgresqlLocation` for the URL."""

    located: ClassVar[Callable[[str], PostgresqlLocation]] = PostgresqlLocation.of
    connecting: ClassVar[type[PostgresqlConnections]] = PostgresqlConnections
    numbering: ClassVar[type[RowNumbers]] = RowNumbers
    sql: PostgresqlDialect = PostgresqlDialect()

    def __init__(self, url: str) -> None:
        super().__init__()
        self._location = type(self).located(url)
        self._numbers = self.numbering()
        self._connections = self.connecting(self._location, self._numbers.forget)
        self._waits_for_standby = False
        self._floors = ScanFloors()

    async def _open(self) -> Opened:
        await self._connections.open()
        try:
            return await self._prepare()
        except BaseException:
            await self._connections.close()
            raise

    async def _prepare(self) -> Opened:
        """Create or migrate the schema, and read the server's settings."""
        location = self._location

        async def prepare(connection: PostgresqlConnection) -> schema.FoundSchema:
            with refused_rights(location):
                return await schema.prepare(connection, location.schema, location.shown)

        return self._as_found(await self._connections.transact(prepare))

    async def inspect(self) -> Opened:
        try:
            return await self._look()
        except StoreUnavailable as error:
            if error.__cause__ is None or state_of(error.__cause__) != NO_DATABASE:
                raise
            return Opened("", "", ())

    async def _look(self) -> Opened:
        location = self._location

        async def look(connection: PostgresqlConnection) -> schema.FoundSchema:
            return await schema.look(connection, location.schema, location.shown)

        return self._as_found(await self._connections.use(look, writes=False))

    def _as_found(self, found: schema.FoundSchema) -> Opened:
        self.capabilities = replace(self.capabilities, durable=found.durable, survives_failover=found.survives_failover)
        self._waits_for_standby = found.survives_failover
        return Opened(found.cluster_uid, found.server, found.warnings)

    async def close(self) -> None:
        async with self._opening:
            self._opened = None
            self._numbers.forget()
            self._floors.forget()
            await self._connections.close()

    async def check(self) -> None:
        async def write(connection: PostgresqlConnection) -> None:
            if await connection.fetchval("SELECT pg_is_in_recovery()"):
                raise StoreUnavailable("the server is a standby or recovers, and takes no writes")
            await connection.execute("UPDATE timeline.meta SET value = value WHERE name = 'schema_version'")

        await self._connections.transact(write)

    async def migrate(self, contract: bool) -> Versions:
        return await self._connections.transact(
            lambda connection: schema.migrate(connection, self._location.schema, contract)
        )

    async def clock_ms(self) -> float | None:
        sql = "SELECT extract(epoch FROM clock_timestamp())::float8 * 1000"
        return float(await self._connections.use(lambda connection: connection.fetchval(sql), writes=False))

    # ── ways in ──

    async def _read(self, plan: Callable[[], Plan[Result]]) -> Result:
        return await self._connections.use(lambda connection: connection.run(plan()), writes=False)

    async def _record(self, plan: Callable[[SqlDialect], Plan[Result]]) -> Result:
        return await self._connections.transact(lambda connection: connection.run(plan(self.sql)))

    async def _read_of(self, topic: Topic, plan: Callable[[int], Plan[Result]], gone: Callable[[], Result]) -> Result:
        # A uid without a key finds no rows.
        return await self._read(lambda: plan(topic.uid))

    async def _change_of(
        self, topic: Topic, now_ms: int, plan: Callable[[Changes], Plan[Result]], gone: Callable[[], Result],
        weight: int,
    ) -> Result:  # fmt: skip
        return await Steps(self._connections).run(plan(Changes(self.sql, topic, topic.uid, now_ms)))

    # ── messages ──

    async def _answered(self, topic: Topic, now_ms: int, plan: Callable[[Changes], Plan[Answers]]) -> Answers:
        """Run a plan and return its answers once the standby has everything that they rest on.

        A change waits for the standby by itself. A read may see a commit of another call whose wait was cut short. That
        may be on the primary alone. A commit of ours waits for all commits before it."""
        steps = Steps(self._connections)
        answers = await steps.run(plan(Changes(self.sql, topic, topic.uid, now_ms)))
        if self._waits_for_standby and (answers.repeat.any() or (answers.status != Status.OK.code).any()):
            await steps.use(lambda connection: connection.execute(_MARK), writes=True)
        return answers

    async def put(self, topic: Topic, now_ms: int, puts: Puts) -> Answers:
        if not len(puts):
            return Answers.blank(0)
        try:
            return await self._answered(topic, now_ms, lambda changes: put(changes, puts, self._numbers))
        finally:
            self._floors.lower(topic, int(puts.due_ms.min()))

    async def lease_due(
        self,
        topic: Topic,
        buckets: Sequence[int] | None,
        now_ms: int,
        due_before_ms: int,
        grants: Sequence[Grant],
        overdue_ms: int = 0,
    ) -> LeasedRows:
        wanted = without_all(topic, buckets)
        asked = (topic, wanted, now_ms, due_before_ms, grants, overdue_ms)
        backoff_ms, shortest_ms = topic.settings.redelivery_backoff_ms, min((one.lease_ms for one in grants), default=0)
        try:
            if overdue_ms:
                return (await self._lease(*asked, -1, NEVER_MS)).leased
            with self._floors.look(topic, wanted, now_ms) as look:
                found = await self._lease(*asked, look.due_ms, look.end_ms)
                if found.nothing and look.begins_again():
                    found = await self._lease(*asked, look.due_ms, look.end_ms)
                look.left(found.leased.next_due_ms, found.end_ms, backoff_ms)
            return found.leased
        finally:
            if grants:
                self._floors.lower(topic, end_ms=now_ms + shortest_ms)

    async def _lease(
        self, topic: Topic, buckets: Sequence[int] | None, now_ms: int, due_before_ms: int, grants: Sequence[Grant],
        overdue_ms: int, due_from_ms: int, end_from_ms: int,
    ) -> LeaseOutcome:  # fmt: skip
        asked = (topic, buckets, now_ms, due_before_ms, grants, overdue_ms, due_from_ms, end_from_ms)
        if self.sql.leases_at_once and any(grant.count for grant in grants):
            found = await self._connections.use(lambda connection: connection.run(lease_plain(*asked)), writes=True)
            if found is not None:
                return found
        changes = Changes(self.sql, topic, topic.uid, now_ms)
        by_rules = lease_due(changes, buckets, due_before_ms, grants, overdue_ms, due_from_ms)
        result = await Steps(self._connections).run(by_rules)
        assert result is not None, "statements find the topic by themselves"
        return result

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        def plan(changes: Changes) -> Plan[Answers]:
            answers = yield from settle(changes, settles, settle_plain)
            assert answers is not None, "statements find the topic by themselves"
            return answers

        try:
            return await self._answered(topic, now_ms, plan)
        finally:
            if (settles.operation == Operation.RELEASE).any():
                self._floors.lower(topic, now_ms)
            # A lease that had run out may end before those that were known to run.
            ends_ms = settles.time_ms[
                (settles.operation == Operation.EXTEND) | (settles.operation == Operation.REGRANT)
            ]
            if len(ends_ms):
                self._floors.lower(topic, end_ms=int(ends_ms.min()))

    async def mutate(self, topic: Topic, now_ms: int, mutations: Mutations) -> Answers:
        try:
            return await self._answered(topic, now_ms, lambda changes: mutate(changes, mutations))
        finally:
            if mutations.operation in (Operation.MOVE, Operation.REVIVE) and len(mutations):
                self._floors.lower(topic, int(mutations.due_ms.min()))

    async def mutate_tag(self, topic: Topic, now_ms: int, mutation: TagMutation, cursor: bytes, limit: int) -> TagStep:
        if not mutation.tag:
            return TagStep({}, None)
        steps, changes = Steps(self._connections), Changes(self.sql, topic, topic.uid, now_ms)
        try:
            found = await steps.run(mutate_tag(changes, mutation, cursor, max(1, limit)))
            if self._waits_for_standby and not mutation.dry_run:  # an earlier call may have done some of it
                await steps.use(lambda connection: connection.execute(_MARK), writes=True)
            return found
        finally:
            if mutation.operation is Operation.MOVE and not mutation.dry_run:
                self._floors.lower(topic, mutation.due_ms or -1)
