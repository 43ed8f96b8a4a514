"""`sqlite:///`: the embedded, durable store.

store.py     the store
writer.py    its one writing thread
database.py  the file, its schema, and the thread that carries the log to its place
dialect.py   SQLite's part of the SQL core, which is in `timeline.storage_plugins.sql`; puts and settles by columns
bulk.py      tag operations and sweeps, a few messages at a time
"""

from timeline.storage_plugins.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
