"""The database file: its URL, its lock, its schema, its connections, and the checkpoints of its log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from sqlalchemy.dialects import sqlite as sqlite_dialect

from timeline.storage_plugins import shown, sql
from timeline.storage_plugins.contract import StoreError, StoreFull, StoreRefused, StoreUnavailable, disk_space_of
from timeline.storage_plugins.sqlite.writer import Room, unavailable
from timeline.storage_plugins.versions import Versions, migrate, noted

APPLICATION_ID = 0x544C4E31
"""Marks the file as Timeline's, so that we never write to another database."""
MAGIC = b"SQLite format 3\0"
"""How every SQLite database begins, unless it is still empty."""
PAGE_BYTES = 4096
"""The page size of a new file. Larger pages make a commit of few messages slower. Single puts, in turn: 19,200 to
20,700/s with 4,096, and 16,600 to 18,300 with 8,192. A cycle beside 1 M pending is equally fast."""
CACHE_MIB = 64
CACHE_MIB_RANGE = (1, 65_536)
SPARE_BYTES = 1024 * 1024
"""Puts are refused if the disk had less than this left after them, beside what the log still had to carry."""
AMPLE_BYTES = 64 * 1024 * 1024
"""With so much more on the disk than the log's file has, nobody asks how much of that is to be carried."""
PASS_PAGES = 6_000
"""Pages in the log that make a pass worth its two fsyncs. With random ids the same page is written many times and
carried once. Measured with 1 M pending: 18k cycles/s with 1,000 pages, 26k with 8,000, 27k with 32,000."""
REST_PAGES = 600
"""So many pages the writer carries by itself: 2 to 4 ms. A whole log took it 40 to 50 ms inside a commit."""
LOG_PAGES = 60_000
"""The writer's own limit (`wal_autocheckpoint`), if no pass ever comes so far."""
LOG_BYTES = 256 * 1024 * 1024
"""The log's file is cut to this size when the log starts again."""
FEWEST_CHANGES, MOST_CHANGES = 2_000, 300_000
TRIES = 8
SALTS = slice(16, 24)
"""The bytes of the log's header that change each time the log starts again (SQLite's file format, section 4.1)."""
OLDEST_SQLITE = (3, 37, 0)


@dataclass(frozen=True, slots=True)
class SqliteLocation:
    """The options of a URL: the file, with symbolic links resolved, and the page cache's size."""

    path: Path
    cache_mib: int = CACHE_MIB

    @classmethod
    def of(cls, url: str) -> SqliteLocation:
        """Read `sqlite:///relative/file` or `sqlite:////absolute/file`, with `?cache_mib=`. Raise StoreRefused, which
        says what to write instead."""
        rest = url.removeprefix("sqlite://")
        name, _, query = rest.partition("?")
        name = unquote(name)
        if name in ("", "/", "/:memory:", ":memory:"):
            raise StoreRefused(
                f"{url!r:.120} names no file: write sqlite:///timeline.db (in this folder) or "
                "sqlite:////var/lib/timeline.db (absolute); for a store without a file, memory://"
            )
        if not name.startswith("/"):
            raise StoreRefused(
                f"{shown(url)!r} names a host: a file takes three slashes, sqlite:///{name.rpartition('@')[2]:.80}"
            )
        if "\0" in name or name.endswith("/"):
            raise StoreRefused(f"{url!r:.120} names a folder, not a file: write sqlite:///folder/timeline.db")
        return cls(Path(os.path.realpath(name[1:])), _cache_mib(url, query))


def _cache_mib(url: str, query: str) -> int:
    chosen = CACHE_MIB
    low, high = CACHE_MIB_RANGE
    for option, value in parse_qsl(query, keep_blank_values=True):
        if option != "cache_mib":
            raise StoreRefused(
                f"{option!r:.80} is no option of sqlite://; known is cache_mib ({low} to {high}) in {url!r:.120}"
            )
        chosen = sql.number_option("cache_mib", value, CACHE_MIB_RANGE)
    return chosen


class Lock:
    """Keeps other processes away from the file: an flock on a file beside it, which holds the owner's process id. It
    ends with the process."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._descriptor: int | None = None

    @property
    def made(self) -> bool:
        """Whether its file exists: a process has, or had, the database open."""
        return self._path.exists()

    def take(self) -> None:
        """Take the lock. Raise StoreRefused, which names the process that has it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(descriptor)
            raise StoreRefused(
                f"{self._path.with_suffix('')} is in use by process {owner}: one broker at a time can have an SQLite "
                "file; stop that one, or use a store that several can share"
            ) from None
        if os.pread(descriptor, 32, 0).strip(b"0123456789\n"):
            os.close(descriptor)
            raise StoreRefused(f"{self._path} is not Timeline's, but its lock needs that name: give another file")
        self._descriptor = descriptor
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        except OSError:
            self.give_back()
            raise

    def give_back(self) -> None:
        """Release the lock. Twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Database:
    """The open file: its schema as this version needs it, and connections on demand."""

    def __init__(self, location: SqliteLocation) -> None:
        self._location = location
        self._lock = Lock(location.path)
        self.cluster_uid = ""
        self._files: tuple[_Watched, ...] = ()
        self.clean = True
        """Whether the last process closed the file properly. Then no payload lacks its message."""

    @property
    def path(self) -> Path:
        """The file."""
        return self._location.path

    @property
    def server(self) -> str:
        """The server in words."""
        return f"SQLite {sqlite3.sqlite_version}, {self._location.path}"

    def open(self) -> sqlite3.Connection:
        """Take the lock, create or migrate the schema, and return the writing connection. Raise StoreRefused or
        StoreUnavailable, and then hold nothing."""
        path = self._location.path
        if sqlite3.sqlite_version_info < OLDEST_SQLITE:
            raise StoreRefused(
                f"SQLite {sqlite3.sqlite_version} is too old: {'.'.join(map(str, OLDEST_SQLITE))} is needed"
            )
        try:
            if path.is_dir():
                raise StoreRefused(f"{path} is a folder: give a file in it, sqlite:///{path}/timeline.db")
            if path.exists() and not path.is_file():
                raise StoreRefused(f"{path} is no file that holds anything: give one in a folder of your own")
            if path.exists() and path.stat().st_nlink > 1:
                # SQLite finds the log beside it by name: another name would miss the log.
                raise StoreRefused(f"{path} has several names (hard links): keep one of them")
            if not self._lock.made:
                _judge_beginning(path)
            _judge_log(path)
            self._lock.take()
        except OSError as error:
            raise _refused(path, error) from error
        connection: sqlite3.Connection | None = None
        self._files = ()
        try:
            connection = self.connect()
            self._prepare(connection)
            self._files = _Watched(path), _Watched(Path(f"{path}-wal"), LOG_BYTES)
            return connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            self._lock.give_back()
            if isinstance(error, sqlite3.Error):
                raise self._judged(error) from error
            if isinstance(error, KeyError | ValueError):
                raise StoreRefused(
                    f"{path}: its own record (table meta) is damaged ({error!r}): restore the file, or give another"
                ) from error
            raise

    def lost(self) -> str:
        """Return why writes would be lost now: the file, or the log beside it, was replaced or cut short. Empty if
        neither was."""
        return next((f"{file.path} {happened}" for file in self._files if (happened := file.happened())), "")

    def room(self, connection: sqlite3.Connection) -> Room:
        """Return the room for puts. The last space of the disk is for the log, which must be carried to its place, or
        even an acknowledgement could not be written. If little is left, the log is carried now."""
        path = self._location.path
        try:
            log = Path(f"{path}-wal").stat().st_size
            disk = disk_space_of(path.parent)
            if not disk.size_bytes:
                return Room(sys.maxsize)  # no bound, or not known
            if disk.free_bytes >= log + SPARE_BYTES + AMPLE_BYTES:
                return Room(disk.free_bytes - log - SPARE_BYTES)
            unused, size = (connection.execute(f"PRAGMA {of}").fetchone()[0] for of in ("freelist_count", "page_size"))
            left, again = log, 0
            with contextlib.suppress(sqlite3.Error):  # not even that fits
                _, pages, carried = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                left = (pages - carried) * size
                again = 0 if left else log
            spared = unused * size - left
            return Room(disk_space_of(path.parent).free_bytes - SPARE_BYTES + min(0, spared), again, max(0, spared))
        except (OSError, sqlite3.Error):
            return Room(sys.maxsize)  # the next write fails equally

    @property
    def cramped(self) -> str:
        """Why puts are refused for which there is no room."""
        return (
            f"The disk of {self._location.path} is nearly full. New messages and changes of schedules are refused. All "
            "other calls work. Free some space."
        )

    def close(self) -> None:
        """Release the lock. All connections must be closed by then."""
        self._lock.give_back()

    def connect_for_checkpoints(self) -> sqlite3.Connection:
        """Return a connection that carries pages out of the log, durably."""
        connection = self.connect()
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -1024")
        return connection

    def connect(self, reading: bool = False) -> sqlite3.Connection:
        """Return a connection without implicit transactions. Raise StoreUnavailable if the path leads to another file.

        SQLite would make an absent file, and delete the log of the one that was moved away. Only `open` makes it.
        """
        if why := self.lost():
            raise StoreUnavailable(why)
        connection = sqlite3.connect(
            f"{self._location.path.as_uri()}?mode={'rw' if self._files else 'rwc'}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=512,
            timeout=10.0,
        )
        connection.execute(f"PRAGMA cache_size = -{max(1, self._location.cache_mib // (4 if reading else 1)) * 1024}")
        connection.execute("PRAGMA temp_store = MEMORY")
        # Some builds, such as Debian's, overwrite deleted data with zeros: a payload of 10 MiB wrote 10 MiB into the
        # log, and the next call waited 20 ms. FAST overwrites only pages that are written anyhow.
        connection.execute("PRAGMA secure_delete = FAST")
        if reading:
            connection.execute("PRAGMA query_only = ON")
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        path = self._location.path
        mark = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if tables and mark != APPLICATION_ID:
            raise StoreRefused(f"{path} is an SQLite database, but not a Timeline's: give a file of its own")
        if not tables:
            connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise StoreRefused(f"{path}: the file system allows no write-ahead log (journal_mode is {mode})")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if tables:
                known = _known(connection)
                reached = migrate(connection.execute, noted(known), sql.MIGRATIONS)
            else:
                known, newest = {"cluster_uid": secrets.token_hex(16)}, 1 + len(sql.MIGRATIONS)
                reached = Versions(newest, newest)
                for statement in sql.ddl(sqlite_dialect.dialect()):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self.clean = known.get("clean", "1") == "1"
            self.cluster_uid = known["cluster_uid"]
            _note(connection, {"cluster_uid": self.cluster_uid, "clean": "0"}, reached)
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    def _judged(self, error: sqlite3.Error) -> StoreError:
        """Return the contract's error for a file that could not be opened."""
        path = self._location.path
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return StoreRefused(f"{path} is not a whole SQLite database ({error}): restore it, or give another file")
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            return StoreRefused(f"{path} cannot be written ({error}): let this user write the file and its folder")
        judged = unavailable(error)
        return StoreFull(f"{path}: {judged.reason}") if name == "SQLITE_FULL" else judged


class _Watched:
    """A file that SQLite has open. SQLite never makes it shorter than it was, or than `limit_bytes`. We do not vacuum
    the database, and a log that starts again keeps its file up to the limit."""

    BACK = (
        "Move the one that was opened back, and this broker goes on by itself. To accept what is there, restart the "
        "broker."
    )
    CUT = "was cut short, and has lost data. Stop the broker and restore the database from a backup."

    def __init__(self, path: Path, limit_bytes: int = sys.maxsize) -> None:
        self.path, self._limit_bytes = path, limit_bytes
        found = path.stat()
        self._identity, self._least_bytes = (found.st_dev, found.st_ino), min(found.st_size, limit_bytes)

    def happened(self) -> str:
        """Return what another program did to the file; empty: nothing. Threads may call it at once."""
        least_bytes = self._least_bytes  # read first: another thread may see the file grow meanwhile
        try:
            found = self.path.stat()
        except OSError as error:
            return f"cannot be found ({error.strerror}). {self.BACK}"
        if (found.st_dev, found.st_ino) != self._identity:
            return f"is another file than the one that this broker opened. {self.BACK}"
        if found.st_size < least_bytes:
            return self.CUT
        self._least_bytes = min(found.st_size, self._limit_bytes)
        return ""


def _judge_beginning(path: Path) -> None:
    """Refuse a file that is no database, before a lock is put beside it: `/etc/passwd.lock` would stop `useradd`. Never
    do so for a file that this process may have open: closing it would end SQLite's own locks."""
    if not path.exists():
        return
    with path.open("rb") as file:
        beginning = file.read(len(MAGIC))
    if beginning and beginning != MAGIC:
        raise StoreRefused(f"{path} is not an SQLite database: give another file, or one that is not there yet")


def _judge_log(path: Path) -> None:
    """Refuse an absent or empty file beside a log that holds something: SQLite would delete the log."""
    log = Path(f"{path}-wal")
    if not (path.exists() and path.stat().st_size) and log.exists() and log.stat().st_size:
        raise StoreRefused(
            f"{path} is not there, or empty, but its log {log} is: move the database back beside it. To begin with an "
            "empty one, remove the log"
        )


def contracted(connection: sqlite3.Connection, contracting: bool) -> Versions:
    """Return the schema's versions, in the caller's transaction. `contracting`: remove what only the version before
    needed. Raise StoreRefused."""
    reached = migrate(connection.execute, noted(_known(connection)), sql.MIGRATIONS, contract=contracting)
    _note(connection, {}, reached)
    return reached


def _known(connection: sqlite3.Connection) -> dict[str, str]:
    return dict(connection.execute("SELECT name, value FROM meta").fetchall())


def _note(connection: sqlite3.Connection, more: dict[str, str], reached: Versions) -> None:
    written = {**more, "schema_version": str(reached.version), "oldest_version": str(reached.oldest)}
    connection.executemany("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", list(written.items()))


def _refused(path: Path, error: OSError) -> StoreError:
    if error.errno in (28, 122):  # No space, or no quota, left.
        return StoreUnavailable(f"{path}: {error.strerror}: free some space")
    return StoreRefused(f"{path} cannot be opened ({error.strerror}): give a file in a folder that this user can write")


# ── checkpoints ──


class Checkpointer:
    """Carries pages of the log to their place, in a thread of its own, after about PASS_PAGES of them. Owns its
    connection once it is started. `carry_rest` asks the writer to carry what is left.

    A checkpoint inside a commit delays every lease behind it: measured with 1 M pending messages, 24 ms for 8,000
    pages. That was a lease's p99.9, which is 2 ms this way. A passive checkpoint on another connection delays no writer
    and no reader. It cannot restart the log while the writer adds to it. So each pass carries what came during the one
    before, and the writer carries the small rest between two transactions. SQLite syncs the file only after a
    checkpoint that leaves nothing. The thread does so after each of its own, or the writer would wait for all of it (25
    ms, now 7)."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._log = Path(f"{path}-wal")
        self._salts = b""
        self._carry_rest: Callable[[], None] | None = None
        self._ready = threading.Condition()
        self._changes = 0
        self._enough = FEWEST_CHANGES
        self._carried = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="timeline-sqlite-checkpoints", daemon=True)

    def start(self, carry_rest: Callable[[], None]) -> None:
        self._carry_rest = carry_rest
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the connection. Block until then."""
        with self._ready:
            self._stopping = True
            self._ready.notify()
        self._thread.join()

    def close(self) -> None:
        """Close the file. All connections of this process must be closed before: the first descriptor that closes
        releases the locks of all."""
        os.close(self._file)

    def note(self, changes: int) -> None:
        """Note that the writer has committed `changes` more rows."""
        with self._ready:
            self._changes += changes
            if self._changes >= self._enough:
                self._ready.notify()

    def _run(self) -> None:
        try:
            while True:
                with self._ready:
                    while self._changes < self._enough and not self._stopping:
                        self._ready.wait()
                    if self._stopping:
                        return
                self._pass()
        finally:
            self._connection.close()

    def _taken(self) -> int:
        with self._ready:
            changes, self._changes = self._changes, 0
        return changes

    def _pass(self) -> None:
        """Carry what is there, then what came meanwhile, until the rest is small enough for the writer."""
        changes = self._taken()
        pages = self._carry()
        for _ in range(TRIES):
            # The number of new pages is not known, only the number of changed rows.
            added = self._taken()
            if added * pages <= REST_PAGES * changes:
                if added and self._carry_rest is not None:
                    self._carry_rest()
                break
            changes += added
            pages += self._carry()
        if pages:
            enough = min(max(changes * PASS_PAGES / pages, FEWEST_CHANGES), MOST_CHANGES)
            # A pass may meet few pages because the same ones changed many times. The next pass may differ.
            self._enough = int(min(enough, 2 * self._enough))

    def _carry(self) -> int:
        """Return the pages that one checkpoint carried."""
        try:
            before = self._carried if self._same_log() else 0
            _, _, self._carried = self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            os.fdatasync(self._file)
        except (sqlite3.Error, OSError):
            # A full or broken disk: the writer meets it too, and reports it. The log keeps everything.
            return 0
        return self._carried - before if self._carried >= before else self._carried

    def _same_log(self) -> bool:
        """Return whether the log has not started again since the last call: SQLite counts from there."""
        with self._log.open("rb", buffering=0) as log:
            header = log.read(SALTS.stop)
        salts, self._salts = self._salts, header[SALTS]
        return salts == self._salts
