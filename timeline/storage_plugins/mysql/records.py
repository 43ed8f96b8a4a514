"""Topic records, and the schema they live in."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pymysql

from timeline.model import Topic
from timeline.storage_plugins import sql
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.mysql.connections import Later, Session, code_of, is_lost
from timeline.storage_plugins.mysql.schema import ddl
from timeline.storage_plugins.records import check_update, same_settings
from timeline.storage_plugins.sql import settings_text, topic_of
from timeline.storage_plugins.versions import Versions, migrate

OLDEST = {"MariaDB": (10, 6), "MySQL": (8, 0)}
LOCK = "CONCAT('timeline ', LEFT(MD5(DATABASE()), 16))"
LOCK_S = 8


TABLES = ("dropped", "expiring", "message", "meta", "payload", "remembered", "tagged", "topic")
SAME_INDEX = 1061


def prepare(session: Session) -> str:
    """Creates or migrates the schema, one process at a time; answers the cluster's uid. DDL commits by itself here, so
    that a creation may be cut short: it is gone on with, and tables of others are never touched."""
    with _alone(session):
        return _prepare(session)


def known_uid(session: Session) -> str:
    """The cluster's uid; empty where there is none."""
    there = "SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name = 'meta'"
    found = session.rows("SELECT value FROM meta WHERE name = 'cluster'") if session.rows(there) else ()
    return bytes(found[0][0]).decode() if found else ""


@contextmanager
def _alone(session: Session) -> Iterator[None]:
    if session.rows(f"SELECT GET_LOCK({LOCK}, {LOCK_S})")[0][0] != 1:
        # It passes: who opens the store tries again.
        raise StoreUnavailable("another process is creating or migrating this database's schema")
    try:
        yield
    finally:
        with suppress(pymysql.MySQLError, OSError):  # a connection that is gone has let go of it
            session.rows(f"SELECT RELEASE_LOCK({LOCK})")


def _prepare(session: Session) -> str:
    engines = {
        str(name): str(engine)
        for name, engine in session.rows(
            "SELECT CONVERT(table_name USING utf8mb4), CONVERT(engine USING utf8mb4) FROM information_schema.tables "
            "WHERE table_schema = DATABASE()"
        )
        if str(name) in TABLES
    }
    if others := sorted(name for name, engine in engines.items() if engine.lower() != "innodb"):
        raise StoreRefused(
            f"these tables are not in InnoDB, which alone can take a change back: {', '.join(others)}; "
            "ALTER TABLE … ENGINE = InnoDB"
        )
    there = engines.keys()
    found = dict(session.rows("SELECT name, value FROM meta")) if "meta" in there else {}
    if b"cluster" not in found:
        if there - {"meta"} or found:
            raise StoreRefused(
                f"the database has tables named {', '.join(sorted(there))} that are not Timeline's: "
                "give it a database of its own"
            )
        for statement in ddl("meta"):
            session.execute(statement)
        uid = secrets.token_hex(16)
        session.execute(f"INSERT INTO meta (name, value) VALUES ('cluster', '{uid}'), ('rows', '0')")
        found[b"cluster"] = uid.encode()
    if b"schema" not in found:
        for statement in ddl(*(name for name in TABLES if name != "meta")):
            try:
                session.execute(statement)
            except pymysql.MySQLError as error:
                if code_of(error) != SAME_INDEX:
                    raise
        session.execute(f"INSERT INTO meta (name, value) VALUES ('schema', '{1 + len(sql.MIGRATIONS)}')")
    else:
        _migrated(session, found, contract=False)
    return bytes(found[b"cluster"]).decode()


def contracted(session: Session, contract: bool) -> Versions:
    """The schema's versions; `contract`: without what only the version before needed. One process at a time."""
    with _alone(session):
        return _migrated(session, dict(session.rows("SELECT name, value FROM meta")), contract)


def _migrated(session: Session, known: dict[bytes, bytes], contract: bool) -> Versions:
    found = Versions.of(known[b"schema"], known.get(b"oldest"))
    begun = False

    def execute(statement: str) -> None:
        nonlocal begun
        session.execute(statement)
        begun = True  # DDL commits by itself

    try:
        reached = migrate(execute, found, sql.MIGRATIONS, contract=contract)
        if reached != found:
            noted = (str(reached.version), str(reached.oldest))
            session.execute("REPLACE INTO meta (name, value) VALUES ('schema', %s), ('oldest', %s)", noted)
    except (pymysql.MySQLError, OSError) as error:
        if begun or is_lost(error):
            raise StoreUnknown(
                f"the schema is migrated in part, and the same command goes on with it: {error}"
            ) from error
        raise
    return reached


def server(session: Session) -> tuple[str, tuple[str, ...], int]:
    """What the server is, sentences on settings that weaken durability, and max_allowed_packet in bytes. Raises
    StoreRefused for one that is too old or may not be written."""
    names = ("version", "innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "max_allowed_packet", "read_only")
    version, flush, sync, binlog, packet, read_only = session.rows(
        f"SELECT {', '.join(f'@@{name}' for name in names)}"
    )[0]
    kind = "MariaDB" if "mariadb" in version.lower() else "MySQL"
    number = tuple(int(part) for part in version.split("-")[0].split(".")[:2])
    if number < OLDEST[kind]:
        oldest = ".".join(map(str, OLDEST[kind]))
        raise StoreRefused(f"{kind} {version} is too old: {kind} {oldest} is needed, for SKIP LOCKED and JSON_TABLE")
    if read_only not in (0, "OFF"):
        raise StoreRefused(f"{kind} {version} is read-only: name the primary in the URL, or SET GLOBAL read_only = OFF")
    warnings = []
    if flush != 1:
        warnings.append(
            f"innodb_flush_log_at_trx_commit = {flush}: what was acknowledged in the last second may be lost when the "
            "server or its machine dies; set it to 1"
        )
    if binlog and sync != 1:
        warnings.append(
            f"sync_binlog = {sync}: a replica may miss what was acknowledged when the machine dies; set it to 1"
        )
    return f"{kind} {version}", tuple(warnings), int(packet)


def reserve(session: Session, count: int) -> int:
    """The first of `count` row numbers that nobody else was or will be given."""
    # Beyond all that stand, too: a replica that took over may have missed what was reserved last.
    standing = session.rows("SELECT COALESCE(MAX(`row`), 0) FROM message")[0][0]
    reserved = f"GREATEST(CAST(value AS SIGNED), {standing}) + {count}"
    session.execute(f"UPDATE meta SET value = LAST_INSERT_ID({reserved}) WHERE name = 'rows'")
    return int(session.rows("SELECT LAST_INSERT_ID()")[0][0]) - count + 1


_RECORD = "SELECT uid, name, settings, revision, created_ms FROM topic"


def key_of(session: Session, topic: Topic, lock: bool = False) -> Later:
    """The number by which rows name the topic, a row of one; none when it does not stand. `lock`: nobody drops it
    meanwhile."""
    return session.later(f"SELECT `key` FROM topic WHERE uid = {topic.uid}{' LOCK IN SHARE MODE' if lock else ''}")


def all_topics(session: Session) -> list[Topic]:
    """All records, by name."""
    return [_topic(record) for record in session.rows(f"{_RECORD} ORDER BY name")]


def _topic(record: tuple[int, bytes, bytes, int, int]) -> Topic:
    uid, name, settings, revision, created_ms = record
    return topic_of(uid, name.decode(), settings.decode(), revision, created_ms)


def _standing(session: Session, name: str) -> Topic | None:
    found = session.rows(f"{_RECORD} WHERE name = %s FOR UPDATE", (name.encode(),))
    return _topic(found[0]) if found else None


def create(session: Session, topic: Topic) -> Topic:
    """The record that stands."""
    session.execute(
        "INSERT INTO topic (uid, name, settings, revision, created_ms) VALUES (%s, %s, %s, %s, %s) "
        "ON DUPLICATE KEY UPDATE name = name",
        (topic.uid, topic.name.encode(), settings_text(topic).encode(), topic.revision, topic.created_ms),
    )
    standing = _standing(session, topic.name)
    assert standing is not None, "the record was inserted or stood"
    return topic if standing.uid == topic.uid else same_settings(standing, topic)


def update(session: Session, topic: Topic) -> Topic:
    """The record with its next revision."""
    changed = check_update(_standing(session, topic.name), topic)
    session.execute(
        "UPDATE topic SET settings = %s, revision = %s, created_ms = %s WHERE uid = %s",
        (settings_text(changed).encode(), changed.revision, changed.created_ms, changed.uid),
    )
    return changed


def drop(session: Session, topic: Topic) -> bool:
    """Removes the record; its rows are the sweep's. False when no such record stood."""
    found = session.rows(
        "SELECT `key` FROM topic WHERE name = %s AND uid = %s FOR UPDATE", (topic.name.encode(), topic.uid)
    )
    if not found:
        return False
    session.execute("DELETE FROM topic WHERE `key` = %s", found[0])
    session.execute("INSERT INTO dropped (`key`) VALUES (%s)", found[0])
    return True
