"""`postgresql://user@host/database`: a store that several brokers share, on PostgreSQL 13 and newer.

pool.py         the URL, its servers, their failures, and a bounded pool of connections
connections.py  deadlines and repetitions; plans as steps or in a transaction
schema.py       tables, migrations under an advisory lock, the promises of the server's settings
statements.py   the statements that are tuned by hand
dialect.py      PostgreSQL's part of the SQL core; puts, leases, settles and tag operations by one statement each
store.py        the store; where a look for messages to lease begins, so that it does not read deleted entries
"""

from timeline.storage_plugins.postgresql.store import PostgresqlStore

__all__ = ["PostgresqlStore"]
