"""The database file: its URL, its lock, its schema, its connections."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from sqlalchemy.dialects import sqlite as sqlite_dialect

from timeline.storage_plugins import shown, sql
from timeline.storage_plugins.contract import StoreError, StoreFull, StoreRefused, StoreUnavailable, disk_space_of
from timeline.storage_plugins.sqlite.checkpoints import LOG_BYTES, LOG_PAGES
from timeline.storage_plugins.sqlite.writer import unavailable
from timeline.storage_plugins.versions import Versions, migrate, noted

APPLICATION_ID = 0x544C4E31
"""Marks the file as Timeline's, so that nobody else's database is written to."""
MAGIC = b"SQLite format 3\0"
"""How every SQLite database begins, but for one that nothing was written to yet."""
PAGE_BYTES = 4096
"""Of a new file; an older one keeps its own. Larger pages make a commit of few messages dearer: single puts run at
19,200 to 20,700/s with 4,096 and 16,600 to 18,300 with 8,192, in turn; a cycle beside 1 M pending is as fast."""
CACHE_MIB = 64
CACHE_MIB_RANGE = (1, 65_536)
SPARE_BYTES = 1024 * 1024
"""Left on the disk, beside what the log still has to carry, when puts are refused."""
OLDEST_SQLITE = (3, 37, 0)


@dataclass(frozen=True, slots=True)
class SqliteLocation:
    """What a URL says: the file, symbolic links resolved, and the page cache's size."""

    path: Path
    cache_mib: int = CACHE_MIB

    @classmethod
    def of(cls, url: str) -> SqliteLocation:
        """Reads `sqlite:///relative/file` or `sqlite:////absolute/file`, with `?cache_mib=`. Raises StoreRefused with
        what to write instead."""
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
        if not value.isascii() or not value.isdigit() or not low <= int(value[:9]) <= high:
            raise StoreRefused(f"cache_mib must be a whole number from {low} to {high}, not {value!r:.80}")
        chosen = int(value)
    return chosen


class Lock:
    """Keeps other processes off the file: an flock on a file beside it, which holds the owner's process id. It dies
    with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._descriptor: int | None = None

    @property
    def made(self) -> bool:
        """Whether its file is there: somebody has, or had, the database open."""
        return self._path.exists()

    def take(self) -> None:
        """Raises StoreRefused naming the process that has it."""
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
        """Lets others have the file. Twice is harmless."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class Database:
    """The file, opened: schema as this version needs it, connections on demand."""

    def __init__(self, location: SqliteLocation) -> None:
        self._location = location
        self._lock = Lock(location.path)
        self.cluster_uid = ""
        self._files: tuple[_Watched, ...] = ()
        self.clean = True
        """Whether the last process that had the file closed it in peace: then no payload lacks its message."""

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._location.path

    @property
    def server(self) -> str:
        """In words, what it is."""
        return f"SQLite {sqlite3.sqlite_version}, {self._location.path}"

    def open(self) -> sqlite3.Connection:
        """Takes the lock, creates or migrates the schema; answers the writing connection. Raises StoreRefused or
        StoreUnavailable, and then holds nothing."""
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
                # The log beside it is found by name: under another name, what it holds would be missed.
                raise StoreRefused(f"{path} has several names (hard links): keep one of them")
            if not self._lock.made:
                _judge_beginning(path)
            self._lock.take()
        except OSError as error:
            raise _refused(path, error) from error
        connection: sqlite3.Connection | None = None
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
        """Return why what is written now would be lost: the file, or the log beside it, is another one or was cut
        short. Empty while neither is."""
        return next((f"{file.path} {happened}" for file in self._files if (happened := file.happened())), "")

    def cramped(self, connection: sqlite3.Connection) -> str:
        """Return why nothing more is put; empty while there is room. What is left on the disk is then for the log to be
        carried to its place, without which not even an acknowledgement could be written. Where little is left, the log
        is carried now. Pages of the file that nobody uses are room, too."""
        path = self._location.path
        try:
            log = Path(f"{path}-wal").stat().st_size
            room = disk_space_of(path.parent)
            if room.free_bytes >= log + SPARE_BYTES or not room.size_bytes:  # it has no bound, or does not tell
                return ""
            unused, size = (connection.execute(f"PRAGMA {of}").fetchone()[0] for of in ("freelist_count", "page_size"))
            with contextlib.suppress(sqlite3.Error):  # it does not even fit
                _, pages, carried = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                log = (pages - carried) * size
            if disk_space_of(path.parent).free_bytes + unused * size >= log + SPARE_BYTES:
                return ""
        except (OSError, sqlite3.Error):
            return ""  # whoever writes meets it, too
        return f"the disk of {path} is nearly full, and what is left is for what makes room: free some space"

    def close(self) -> None:
        """Gives the lock back; all connections are closed by then."""
        self._lock.give_back()

    def connect_for_checkpoints(self) -> sqlite3.Connection:
        """A connection that carries pages out of the log, durably."""
        connection = self.connect()
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -1024")
        return connection

    def connect(self, reading: bool = False) -> sqlite3.Connection:
        """A connection; statements begin and end transactions by themselves."""
        connection = sqlite3.connect(
            self._location.path, isolation_level=None, check_same_thread=False, cached_statements=512, timeout=10.0
        )
        connection.execute(f"PRAGMA cache_size = -{max(1, self._location.cache_mib // (4 if reading else 1)) * 1024}")
        connection.execute("PRAGMA temp_store = MEMORY")
        # Some builds, Debian's for one, write zeros over all that is deleted: 10 MiB into the log for a payload of as
        # much, and whoever came next waited 20 ms for them. FAST does so only on pages that are written anyhow.
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
        """Why the file could not be opened, in the contract's words."""
        path = self._location.path
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            return StoreRefused(f"{path} is not a whole SQLite database ({error}): restore it, or give another file")
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            return StoreRefused(f"{path} cannot be written ({error}): let this user write the file and its folder")
        judged = unavailable(error)
        return StoreFull(f"{path}: {judged.reason}") if name == "SQLITE_FULL" else judged


class _Watched:
    """A file that SQLite has open. It never gets shorter than it was, or than `limit_bytes`, unless somebody else cuts
    it: a database is not vacuumed, and a log that starts anew is kept up to its limit."""

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
        """Return what somebody else did to it; empty: nothing. Threads may ask at once."""
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
    """Refuses what is no database before a lock is put beside it: `/etc/passwd.lock` would stop `useradd`. Not for a
    file that this process may have open: closing it again would end SQLite's own locks on it."""
    if not path.exists():
        return
    with path.open("rb") as file:
        beginning = file.read(len(MAGIC))
    if beginning and beginning != MAGIC:
        raise StoreRefused(f"{path} is not an SQLite database: give another file, or one that is not there yet")


def contracted(connection: sqlite3.Connection, contracting: bool) -> Versions:
    """The schema's versions, in the caller's transaction; `contracting`: without what only the version before needed.
    Raises StoreRefused."""
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
