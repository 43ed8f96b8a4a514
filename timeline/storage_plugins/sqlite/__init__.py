"""`sqlite:///`: the embedded, durable store.

`store.py` is the store; `writer.py` its one writing thread, `checkpoints.py` the one that tidies up behind it;
`database.py` the file; `dialect.py` SQLite's part of the SQL core, which is in `timeline.storage_plugins.sql`;
`messages.py` puts and settles by columns; `bulk.py` what is done a few messages at a time.
"""

from timeline.storage_plugins.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
