"""`sqlite:///`: the embedded, durable store.

`store.py` is the store; `writer.py` its one writing thread, `checkpoints.py` the one that tidies up behind it;
`messages.py`, `leasing.py`, `mutations.py`, `tags.py`, `sweeping.py`, `records.py` what a call does in a transaction,
`parts.py` a call in several, `reading.py` what is read outside of one; `statements.py` the SQL that carries batches;
`database.py` the file. What other SQL stores share is in `timeline.storage_plugins.sql`.
"""

from timeline.storage_plugins.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
