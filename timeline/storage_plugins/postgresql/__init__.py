"""`postgresql://user@host/database`: a store that several brokers share, on PostgreSQL 13 and newer.

location.py     what the URL says
pool.py         a bounded pool that drops what is in doubt, and which of several servers it connects to
connections.py  deadlines, what is tried again; how plans are run, as steps or in a transaction
failures.py     what a failure means
schema.py       tables, migrations under an advisory lock, what the server's settings promise
statements.py   the statements that are tuned by hand
dialect.py      PostgreSQL's part of the SQL core
messages.py     puts, leases, settles and tag operations by one statement each
scan_floors.py  where a look for what may be leased begins, so that it does not read what is gone
"""

from timeline.storage_plugins.postgresql.store import PostgresqlStore

__all__ = ["PostgresqlStore"]
