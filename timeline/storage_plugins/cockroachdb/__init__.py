"""`cockroachdb://user@host/database`: a store that several brokers share, on CockroachDB 23.2 and newer.

It is the PostgreSQL store where the two are one: the same protocol, driver, rows and rules. What CockroachDB lacks or
does in another way is here.

location.py     what the URL says
words.py        PostgreSQL's statements in CockroachDB's words: rows by their key, not by their place on disk
schema.py       tables by its SQLAlchemy dialect, hash-sharded indexes, versions; no transaction around DDL, no lock
connections.py  what is tried again, with jitter: every transaction is SERIALIZABLE
store.py        the store
"""

from timeline.storage_plugins.cockroachdb.store import CockroachStore

__all__ = ["CockroachStore"]
