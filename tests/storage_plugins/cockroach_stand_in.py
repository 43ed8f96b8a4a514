"""The plugin on its stand-in: what it sends is noted as it would go to CockroachDB, and rewritten where PostgreSQL does
not understand it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar

from timeline.storage_plugins.cockroachdb import schema
from timeline.storage_plugins.cockroachdb.store import CockroachConnections, CockroachStore
from timeline.storage_plugins.postgresql.connections import PostgresqlConnections, Qualified

REAL = "TIMELINE_TEST_COCKROACHDB_URL"
GOLDEN = Path(__file__).with_name("cockroachdb_statements.sql")
VERSION = "CockroachDB CCL v23.2.0 (stand-in)"

_HASH = re.compile(r" USING HASH WITH \(bucket_count = \d+\)")
_LIMITED = re.compile(r"DELETE FROM (\S+) WHERE (.*?)\s+ORDER BY (\S+) LIMIT (\$\d)\s*$", re.DOTALL)


def for_postgresql(statement: str) -> str:
    """A statement of CockroachDB's as PostgreSQL takes it: without sharding, computed columns in
    its own words, and without a limit on a DELETE."""
    if statement == schema.VERSION:
        return f"SELECT '{VERSION}'"
    text = _HASH.sub("", statement)
    text = text.replace(" AS (uid) STORED", " GENERATED ALWAYS AS (uid) STORED")
    chosen = r"DELETE FROM \1 WHERE ctid = ANY(ARRAY(SELECT ctid FROM \1 WHERE \2 ORDER BY \3 LIMIT \4))"
    return _LIMITED.sub(chosen, text)


def golden() -> set[str]:
    """The statements of the golden file."""
    return {text.strip() for text in GOLDEN.read_text(encoding="utf-8").split(";\n\n") if text.strip()}


class RecordedWords(Qualified):
    """Notes each statement. `emitted`: as CockroachDB is told it."""

    emitted: ClassVar[set[str]] = set()

    def qualified(self, statement: str) -> str:
        self.emitted.add(statement.strip())
        return super().qualified(statement)


class StandInWords(RecordedWords):
    def qualified(self, statement: str) -> str:
        return for_postgresql(super().qualified(statement))


class RecordedConnections(CockroachConnections):
    wording: ClassVar[type[Qualified]] = RecordedWords


class StandInConnections(CockroachConnections):
    wording: ClassVar[type[Qualified]] = StandInWords
    # PostgreSQL's planner takes small tables whole, and then each transaction has read what any other one writes.
    settings: dict[str, str] = CockroachConnections.settings | {
        "enable_seqscan": "off",
        "enable_bitmapscan": "off",
        "plan_cache_mode": "force_generic_plan",
    }


class StandInStore(CockroachStore):
    connecting: ClassVar[type[PostgresqlConnections]] = StandInConnections


class RecordedStore(CockroachStore):
    connecting: ClassVar[type[PostgresqlConnections]] = RecordedConnections


def store(url: str) -> CockroachStore:
    """The store at `url`: of a real CockroachDB where one is given to the tests, else of the stand-in."""
    if os.environ.get(REAL):
        return RecordedStore(url)
    # These statements are not for PostgreSQL's planner. A lease of 10,000 messages may take it many seconds.
    return StandInStore(f"{url}{'&' if '?' in url else '?'}timeout_ms=60000")
