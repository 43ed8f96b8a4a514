"""The driver's session behind asyncio, at the place that a store's URL names.

It is opened once the nodes' settings are read and the tables made. Each failure says whether the request may
have happened.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
import struct
import threading
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from cassandra import AuthenticationFailed, ConsistencyLevel, InvalidRequest, ReadFailure, Unauthorized, Unavailable
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
from cassandra.connection import ConnectionException
from cassandra.policies import (
    DCAwareRoundRobinPolicy,
    ExponentialReconnectionPolicy,
    FallthroughRetryPolicy,
    RoundRobinPolicy,
    TokenAwarePolicy,
)
from cassandra.pool import Host
from cassandra.protocol import SyntaxException
from cassandra.query import BatchStatement, BatchType, BoundStatement, PreparedStatement, SimpleStatement

from timeline.storage_plugins import shown
from timeline.storage_plugins.cassandra.statements import BATCHED, TABLES, TEXTS
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.versions import Step, Versions, migrate

DEFAULT_PORT = 9042
USER, PASSWORD = "TIMELINE_CASSANDRA_USER", "TIMELINE_CASSANDRA_PASSWORD"
_KEYSPACE = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,47}")
_OPTIONS = ("datacenter", "replication", "timeout_s", "tls", "ca")


@dataclass(frozen=True, slots=True)
class CassandraLocation:
    """`cassandra://[user:password@]host[:port],host[:port]/keyspace?option=value`.

    `datacenter`: the one to talk to, if there are several. `replication`: replicas of a keyspace that is created if it
    is missing (0: a missing keyspace is refused). `timeout_s`: the deadline of each request. `tls`, `ca`: whether to
    use TLS, and the file of trusted certificates. User and password may come from the environment.
    """

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    user: str = ""
    password: str = field(default="", repr=False)
    datacenter: str = ""
    replication: int = 0
    timeout_s: float = 10.0
    tls: bool = False
    ca: str = ""

    @classmethod
    def of(cls, url: str) -> CassandraLocation:
        """Return the location that `url` names. Raise StoreRefused with what is wrong with it."""
        try:
            parts = urlsplit(url)
        except ValueError:
            raise _refused(url, "is no URL: special characters in a password are percent-encoded, [ is %5B") from None
        account, _, hosts = parts.netloc.rpartition("@")
        user, _, password = account.partition(":")
        keyspace = parts.path.removeprefix("/")
        if not _KEYSPACE.fullmatch(keyspace):
            raise _refused(url, "needs a keyspace of letters, digits and _: cassandra://host,host/keyspace")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(given) - set(_OPTIONS))
        if unknown:
            raise _refused(url, f"knows no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}")
        try:
            replication, timeout_s = int(given.get("replication", "0")), float(given.get("timeout_s", "10"))
        except ValueError as bad:
            raise _refused(url, f"has an option that is no number: {bad}") from bad
        if not 0 <= replication <= 99 or not 0.1 <= timeout_s <= 600:
            raise _refused(url, "takes replication from 0 to 99 and timeout_s from 0.1 to 600")
        if given.get("tls", "0") not in ("0", "1"):
            raise _refused(url, "takes tls=1 or tls=0")
        return cls(
            hosts=tuple(_host(url, host) for host in hosts.split(",")),
            keyspace=keyspace,
            user=unquote(user) or os.environ.get(USER, ""),
            password=unquote(password) or os.environ.get(PASSWORD, ""),
            datacenter=given.get("datacenter", ""),
            replication=replication,
            timeout_s=timeout_s,
            tls=given.get("tls", "0") == "1" or "ca" in given,
            ca=given.get("ca", ""),
        )

    @property
    def port(self) -> int:
        """Return the port of all hosts (the driver knows one)."""
        return self.hosts[0][1]

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return how to talk TLS, None without TLS."""
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except OSError as missing:
            raise StoreRefused(f"ca={self.ca}: {missing.strerror}") from missing
        context.check_hostname = False  # The driver uses the addresses that the nodes announce.
        return context


def _refused(url: str, why: str) -> StoreRefused:
    return StoreRefused(f"{shown(url)} {why}")


def _host(url: str, text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    if not host or (port and not port.isdigit()):
        raise _refused(url, "needs host[:port], several separated by commas: cassandra://h1,h2:9042/keyspace")
    return host, int(port) if port else DEFAULT_PORT


PROTOCOL = 5
"""The version of the wire's protocol."""
IN_FLIGHT = 64
"""Requests of one store at once; others wait here."""
TOO_MANY_TOMBSTONES = 1
"""The code of a replica that fails a read for its tombstones."""
READ_TRIES = 4
"""How often a read is sent if its connection ends before the answer."""
LOOK_S = 0.05
"""Interval at which a request without a connection looks again, for half of its time."""

Statement = tuple[str, Sequence[Any]]
"""The name of a statement of `statements.py` and its values."""


@lru_cache(maxsize=256)
def _row(columns: tuple[str, ...]) -> Any:
    return namedtuple("Row", [name.strip("[]") for name in columns])


def rows_as(columns: Sequence[str], rows: Sequence[Any]) -> list[Any]:
    """Return rows as named tuples; Cassandra's `[applied]` is `applied`. The driver's own factory makes a class for
    each answer, which takes longer than all else."""
    return list(map(_row(tuple(columns))._make, rows))


class WriteUnknown(Exception):
    """A write with unknown outcome: it may have happened, or may happen later."""


@contextmanager
def in_doubt(what: str) -> Iterator[None]:
    """Raise StoreUnknown, saying `what` may have happened, in place of WriteUnknown."""
    try:
        yield
    except WriteUnknown as doubt:
        raise StoreUnknown(f"{what}: {doubt}") from doubt


class Tombstoned(StoreUnavailable):
    """A read met more deletions than Cassandra reads past."""


class Mailbox:
    """Passes answers from the driver's thread to the event loop, with one wake-up for all that came meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._came: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._lock = threading.Lock()
        self._awake = False

    def post(self, future: asyncio.Future[Any], rows: Any, error: BaseException | None) -> None:
        """Pass on an answer, on the driver's thread."""
        with self._lock:
            self._came.append((future, rows, error))
            wake, self._awake = not self._awake, True
        if wake and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            came, self._came = self._came, deque()
            self._awake = False
        for future, rows, error in came:
            if future.done():
                continue
            if error is None:
                future.set_result(rows)
            else:
                future.set_exception(error)


Encoder = Callable[[Any], Any]
"""From a value to its bytes on the wire."""


def _as_it_is(value: Any) -> Any:
    return value


_ENCODERS: dict[str, Encoder] = {
    "bigint": struct.Struct(">q").pack,
    "int": struct.Struct(">i").pack,
    "tinyint": struct.Struct(">b").pack,
    "blob": _as_it_is,
}


class _BatchedStatement:
    """A prepared statement for batches, whose values are encoded here. The driver's own binding checks for each value
    whether its column is encrypted, which takes longer than all else."""

    def __init__(self, prepared: PreparedStatement) -> None:
        self._bound = BoundStatement(prepared)
        self._encoders = [_ENCODERS[column.type.typename] for column in prepared.column_metadata]

    def add_to(self, batch: BatchStatement, values: Sequence[Any]) -> None:
        """Add the statement on the partition of the one that was added first. A batch keeps the values alone."""
        self._bound.values = [encode(value) for encode, value in zip(self._encoders, values, strict=True)]
        batch.add(self._bound)


class CassandraSession:
    """A session with all statements prepared, made by `connect`. Its methods run on the event loop."""

    def __init__(
        self,
        cluster: Cluster,
        session: Session,
        prepared: dict[str, PreparedStatement],
        mailbox: Mailbox,
        timeout_s: float,
    ) -> None:
        self._cluster = cluster
        self.session = session
        self._prepared = prepared
        self._batched = {name: _BatchedStatement(prepared[name]) for name in BATCHED}
        self._mailbox = mailbox
        self._looks = int(timeout_s / LOOK_S / 2)
        self._room = asyncio.Semaphore(IN_FLIGHT)

    async def read(self, name: str, *values: Any, serial: bool = False) -> list[Any]:
        """Return the rows of a read. Raise StoreUnavailable, which may be Tombstoned."""
        bound = self._prepared[name].bind(values)
        if serial:
            bound.consistency_level = ConsistencyLevel.LOCAL_SERIAL
        for _ in range(READ_TRIES):
            try:
                return list(await self._send(bound) or ())
            except ConnectionException as lost:
                trouble: Exception = lost
            except ReadFailure as error:
                if TOO_MANY_TOMBSTONES in (error.error_code_map or {}).values():
                    raise Tombstoned(told(error)) from error
                raise unavailable(error) from error
            except Exception as error:
                raise unavailable(error) from error
        raise unavailable(trouble) from trouble

    async def write(self, statements: Sequence[Statement]) -> list[Any]:
        """Run a batch, or one statement: all of it or nothing within a partition. Return its rows (a conditional one
        has some). Raise StoreUnavailable if nothing happened, WriteUnknown if it may have."""
        name, values = statements[0]
        statement: Any = self._prepared[name].bind(values)
        if len(statements) > 1:
            batch = BatchStatement(BatchType.UNLOGGED, consistency_level=ConsistencyLevel.LOCAL_QUORUM)
            batch.serial_consistency_level = ConsistencyLevel.LOCAL_SERIAL
            batch.add(statement)
            for name, values in statements[1:]:
                self._batched[name].add_to(batch, values)
            statement = batch
        try:
            return list(await self._send(statement) or ())
        except (NoHostAvailable, Unavailable, InvalidRequest, Unauthorized, SyntaxException) as error:
            raise unavailable(error) from error
        except Exception as error:
            raise WriteUnknown(told(error)) from error

    async def _send(self, statement: Any) -> Any:
        """Send once there is a connection; never send again."""
        for _ in range(self._looks):
            try:
                return await self._ask(statement)
            except NoHostAvailable:
                await asyncio.sleep(LOOK_S)
        return await self._ask(statement)

    async def _ask(self, statement: Any) -> Any:
        async with self._room:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            post = self._mailbox.post
            self.session.execute_async(statement).add_callbacks(
                lambda rows: post(future, rows, None), lambda error: post(future, None, error)
            )
            return await future

    def close(self) -> None:
        """Close it; blocks until the driver's threads have ended."""
        self._cluster.shutdown()


def told(error: BaseException) -> str:
    """Return a failure's words, in one line and without what was sent."""
    if isinstance(error, NoHostAvailable):
        reasons = "; ".join(sorted({f"{type(why).__name__}: {why}" for why in error.errors.values()}))
        return f"no node of Cassandra can be reached{': ' + reasons if reasons else ''}"
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def unavailable(error: BaseException) -> StoreUnavailable:
    """Return a failure as one after which nothing has happened."""
    return StoreUnavailable(told(error))


OLDEST = (4, 1)
MIGRATIONS: tuple[Step[Callable[[str], object]], ...] = ()
"""See `versions.migrate`. Each half is statements that may run again without harm."""
SAFE_SYNCS = ("batch", "group")
"""Settings of `commitlog_sync` with which a node answers only once its disk has the write."""

_TOO_MANY = "a node ends new connections like that once it has native_transport_max_concurrent_connections of them"


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """A session, and what the servers said. `unsafe`: a sentence per setting that may lose what was answered.
    `warnings`: other sentences."""

    connected: CassandraSession
    version: str
    replication: str
    unsafe: tuple[str, ...]
    warnings: tuple[str, ...]


class Handover:
    """Passes a session from its thread to the task that asked, or closes it if the task is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = False
        self._connected: CassandraSession | None = None

    def give(self, connected: CassandraSession) -> None:
        """Pass on the session, on the thread that made it."""
        with self._lock:
            abandoned, self._connected = self._abandoned, connected
        if abandoned:
            connected.close()

    def abandon(self) -> None:
        """Have the session closed: the task is gone."""
        with self._lock:
            self._abandoned, connected = True, self._connected
        if connected is not None:
            threading.Thread(target=connected.close, name="timeline-cassandra-close").start()


def _cluster(location: CassandraLocation) -> Cluster:
    inner = DCAwareRoundRobinPolicy(local_dc=location.datacenter) if location.datacenter else RoundRobinPolicy()
    profile = ExecutionProfile(
        load_balancing_policy=TokenAwarePolicy(inner),
        # The driver sends nothing twice: a conditional write that was applied the first time would answer that it was
        # not.
        retry_policy=FallthroughRetryPolicy(),
        consistency_level=ConsistencyLevel.LOCAL_QUORUM,
        serial_consistency_level=ConsistencyLevel.LOCAL_SERIAL,
        request_timeout=location.timeout_s,
        row_factory=rows_as,
    )
    auth = PlainTextAuthProvider(location.user, location.password) if location.user else None
    return Cluster(
        contact_points=[host if port == location.port else (host, port) for host, port in location.hosts],
        port=location.port,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        auth_provider=auth,
        ssl_context=location.ssl_context(),
        # Without it, batches of 50 rows and more wait 45 ms for the peer's delayed acknowledgement.
        sockopts=[(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)],
        # The driver's own policy waits for minutes after some failures, in which a broker could do nothing.
        reconnection_policy=ExponentialReconnectionPolicy(0.1, 2.0, max_attempts=None),
        # A node that has lost a statement says so, and gets it then.
        reprepare_on_up=False,
        connect_timeout=location.timeout_s,
        control_connection_timeout=location.timeout_s,
        compression=False,
        protocol_version=PROTOCOL,
    )


def connect(location: CassandraLocation, make_mailbox: Callable[[], Mailbox], handover: Handover) -> OpenedSession:
    """Connect, create what is missing and prepare all statements; blocks. Raise StoreRefused and StoreUnavailable."""
    cluster = _cluster(location)
    try:
        session = cluster.connect()
        session.default_fetch_size = None
        version = str(session.execute("SELECT release_version FROM system.local").one().release_version)
        if older(version):
            raise StoreRefused(f"Cassandra {version} is too old: run {OLDEST[0]}.{OLDEST[1]} or newer (5.0 is tested)")
        replication, kept = _use_keyspace(session, location)
        unsafe = (*_unsafe(session, cluster.metadata.all_hosts()), *(() if kept else (_not_kept(location),)))
        warnings = _make_tables(session, location)
        prepared = {name: session.prepare(text) for name, text in TEXTS.items()}
        connected = CassandraSession(cluster, session, prepared, make_mailbox(), location.timeout_s)
    except BaseException as error:
        cluster.shutdown()
        raise _at_open(error, location) from error
    handover.give(connected)
    return OpenedSession(connected, version, replication, unsafe, warnings)


def older(version: str) -> bool:
    """Return whether this version of Cassandra is too old for the statements."""
    major, minor = (int(part) for part in version.split("-")[0].split(".")[:2])
    return (major, minor) < OLDEST


def look(session: Session, location: CassandraLocation) -> tuple[tuple[str, ...], str]:
    """Return a sentence per setting that may lose what was answered, and the cluster's uid: empty if the keyspace has
    no store. Blocks, and changes nothing. Nodes that are down are left out.

    If `session` reaches no node, a new one looks. The driver selects the keyspace on each connection of `session`, so
    it cannot connect to a node without that keyspace, and calls it down.
    """
    try:
        return _look(session, location)
    except NoHostAvailable:
        cluster = _cluster(location)
        try:
            return _look(cluster.connect(), location)
        finally:
            cluster.shutdown()


def _look(session: Session, location: CassandraLocation) -> tuple[tuple[str, ...], str]:
    name = location.keyspace.lower()
    kept = session.execute("SELECT durable_writes FROM system_schema.keyspaces WHERE keyspace_name = %s", (name,)).one()
    tables = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s AND table_name = 'meta'"
    unsafe = _unsafe(session, [host for host in session.cluster.metadata.all_hosts() if host.is_up])
    if kept is not None and not kept.durable_writes:
        unsafe.append(_not_kept(location))
    if session.execute(tables, (name,)).one() is None:
        return tuple(unsafe), ""
    record = f"SELECT value FROM {name}.meta WHERE name = 'cluster'"
    found = session.execute(SimpleStatement(record, consistency_level=ConsistencyLevel.LOCAL_SERIAL)).one()
    return tuple(unsafe), "" if found is None else str(found.value)


def _unsafe(session: Session, hosts: Iterable[Host]) -> list[str]:
    """Ask each node how it syncs its commit log: each has its own setting."""
    found: list[str] = []
    for host in hosts:
        query = "SELECT value FROM system_views.settings WHERE name = 'commitlog_sync'"
        try:
            row = session.execute(query, host=host).one()
            sync = str(row.value) if row is not None else "unknown"
        except NoHostAvailable:
            sync = "unknown, as it does not answer"
        if sync not in SAFE_SYNCS:
            found.append(
                f"commitlog_sync of node {host.address} is {sync}: what it acknowledged within its last seconds is "
                "lost when it is killed or loses power; set commitlog_sync: batch in its cassandra.yaml"
            )
    return found


def _use_keyspace(session: Session, location: CassandraLocation) -> tuple[str, bool]:
    """Make the keyspace the session's. Return its replication, and whether it is written to the commit log."""
    wanted = "SELECT replication, durable_writes FROM system_schema.keyspaces WHERE keyspace_name = %s"
    name = location.keyspace.lower()
    found = session.execute(wanted, (name,)).one()
    if found is None:
        create = (
            f"CREATE KEYSPACE IF NOT EXISTS {location.keyspace} WITH replication = "
            f"{{'class': 'NetworkTopologyStrategy', 'replication_factor': {location.replication or 3}}}"
        )
        if not location.replication:
            raise StoreRefused(
                f"there is no keyspace {location.keyspace!r}: create it ({create}), or add ?replication=3 to the URL, "
                "with the number of copies, and it is created"
            )
        session.execute(create)
        found = session.execute(wanted, (name,)).one()
    session.set_keyspace(name)
    shown = ", ".join(f"{key} {value}" for key, value in sorted(found.replication.items()) if key != "class")
    return shown, bool(found.durable_writes)


def _not_kept(location: CassandraLocation) -> str:
    return (
        f"keyspace {location.keyspace} has durable_writes = false: nothing of it is in the commit log, and what was "
        f"not flushed is lost when a node ends; ALTER KEYSPACE {location.keyspace} WITH durable_writes = true"
    )


def _make_tables(session: Session, location: CassandraLocation) -> tuple[str, ...]:
    """Make the missing tables. Return warnings."""
    query = "SELECT table_name, read_repair FROM system_schema.tables WHERE keyspace_name = %s"
    there = {row.table_name: row.read_repair for row in session.execute(query, (location.keyspace.lower(),))}
    if "meta" in there:
        migrated(session, contract=False)
    for name, text in TABLES.items():
        if name not in there:
            session.execute(text)
    return () if there.get("message", "NONE") == "NONE" else _repaired_no_more(session)


def _repaired_no_more(session: Session) -> tuple[str, ...]:
    """Alter a table made before `statements.TABLES` said so, while brokers may be at work. Return a warning if the user
    may not."""
    alter = "ALTER TABLE message WITH read_repair = 'NONE'"
    try:
        session.execute(alter)
    except Unauthorized as refused:
        return (f"reads repair table message, which with several replicas may undo what was done: {alter} ({refused})",)
    return ()


def migrated(session: Session, contract: bool) -> Versions:
    """Migrate the schema and return its versions. `contract`: remove what only the version before needed. Blocks. Two
    brokers that migrate at once do the same. Raise StoreRefused for a newer schema."""
    noted = {row.name: row.value for row in session.execute("SELECT name, value FROM meta")}
    newest = str(1 + len(MIGRATIONS))
    try:
        found = Versions.of(noted.get("schema", newest), noted.get("oldest"))
    except ValueError as damaged:
        raise StoreRefused(f"the store's own record, in table meta, is damaged ({damaged}): restore it") from damaged
    reached = migrate(session.execute, found, MIGRATIONS, contract=contract)
    if reached != found:
        for name, value in (("oldest", reached.oldest), ("schema", reached.version)):
            session.execute("INSERT INTO meta (name, value) VALUES (%s, %s)", (name, str(value)))
    return reached


def _at_open(error: BaseException, location: CassandraLocation) -> BaseException:
    """The error of an opening that failed."""
    if isinstance(error, (StoreRefused, StoreUnavailable)):
        return error
    reasons = list(error.errors.values()) if isinstance(error, NoHostAvailable) else [error]
    for why in reasons:
        if isinstance(why, AuthenticationFailed):
            return StoreRefused(
                f"Cassandra refuses user {location.user!r}: give user and password in the URL, or in {USER} and "
                f"{PASSWORD}"
            )
        if isinstance(why, Unauthorized):
            return StoreRefused(
                f"user {location.user!r} may not do what is needed: GRANT ALL ON KEYSPACE {location.keyspace} ({why})"
            )
    if any(isinstance(why, ConnectionResetError) for why in reasons):
        return StoreUnavailable(f"{told(error)}; {_TOO_MANY}")
    return unavailable(error) if isinstance(error, Exception) else error
