"""The outbox's database by its URL: SQLAlchemy's own form, with a driver that is installed where it names none."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from timeline.errors import Invalid, TimelineError
from timeline.outbox.ddl import DIALECTS
from timeline.storage_plugins import shown

DRIVERS = {
    "sqlite": {"pysqlite": "sqlite3"},
    "postgresql": {"psycopg": "psycopg", "psycopg2": "psycopg2", "pg8000": "pg8000"},
    "mysql": {
        "pymysql": "pymysql",
        "mysqldb": "MySQLdb",
        "mysqlconnector": "mysql.connector",
        "mariadbconnector": "mariadb",
    },
}
"""SQLAlchemy's name of each driver that the relay can use → its module, the first that is installed is taken."""
_PACKAGES = {"postgresql": "psycopg[binary]", "mysql": "pymysql"}
_ALSO = {"postgres": "postgresql", "mariadb": "mysql"}


class OutboxRefused(TimelineError):
    """The outbox cannot be used as it is: no such table, no rights, a driver that is missing. The text says what to
    change."""

    code = "REFUSED"


def outbox_url(url: str) -> URL:
    """`url` read, with a driver in it. Raises Invalid for what is no URL of a known database, OutboxRefused without a
    driver or, of SQLite, without its file."""
    scheme, separator, _ = url.partition("://")
    asked, _, driver = scheme.partition("+")
    dialect = _ALSO.get(asked, asked)
    if not separator or dialect not in DIALECTS:
        forms = "sqlite:////path/to/app.db, postgresql://user@host/database or mysql://user@host/database"
        raise Invalid(f"the outbox lies in a database of SQL, {forms}, not {shown(url)!r}")
    try:
        read = make_url(url)
    except (ArgumentError, ValueError):
        raise Invalid(
            f"{shown(url)!r} cannot be read as a URL: special characters in a password are written %40"
        ) from None
    if "@" in (read.host or ""):
        # Half of a password that has an @ in it: the driver would look that up, and say that it is not known.
        raise Invalid(f"{shown(url)!r} names no host: special characters in a password are percent-encoded, @ is %40")
    known = DRIVERS[dialect]
    if driver and driver not in known:
        raise Invalid(f"the relay uses {', '.join(known)} for {dialect}, not {driver!r:.40}")
    if dialect == "sqlite":
        _check_file(read.database)
    return read.set(drivername=f"{dialect}+{driver or _installed(dialect)}")


def _installed(dialect: str) -> str:
    for driver, module in DRIVERS[dialect].items():
        if _has(module):
            return driver
    raise OutboxRefused(
        f"{dialect}:// needs one of {', '.join(DRIVERS[dialect].values())}, and none is installed: "
        f"pip install '{_PACKAGES[dialect]}'"
    )


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in
        return False


def _check_file(name: str | None) -> None:
    if not name or name == ":memory:":
        raise Invalid("an outbox in memory is seen by nobody else: give the file, sqlite:////path/to/app.db")
    if not Path(name).is_file():
        raise OutboxRefused(
            f"there is no file {name}: give the database that your program writes to "
            "(four slashes before an absolute path, sqlite:////path/to/app.db)"
        )
