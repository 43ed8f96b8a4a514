"""`cockroachdb://user@host/database`: a store that several brokers share, on CockroachDB 23.2 and newer.

It is the PostgreSQL store where the two agree: the same protocol, driver, rows and rules. The differences are here.

schema.py  tables by its SQLAlchemy dialect, hash-sharded indexes, versions; no transaction around DDL, no lock
store.py   the store: PostgreSQL's statements with CockroachDB's fragments, and transactions that are repeated
"""

from timeline.storage_plugins.cockroachdb.store import CockroachStore

__all__ = ["CockroachStore"]
