"""`postgresql://user@host/database`: a store that several brokers share, on PostgreSQL 13 and newer.

location.py          what the URL says
pool.py              a bounded pool that drops what is in doubt
connections.py       deadlines, what is tried again, and what a failure means
schema.py            tables, migrations under an advisory lock, what the server's settings promise
rows.py              what statements answer, as columns and as the rules see it
statements.py        the statements by id; putting.py and messages.py use them
lease_statements.py  the statements that lease; leasing.py uses them, and settles
floors.py            where a look for what may be leased begins, so that it does not read what is gone
tags.py, walking.py, sweeping.py, records.py, numbers.py  the rest of the contract, a file a subject
"""

from timeline.storage_plugins.postgresql.store import PostgresqlStore

__all__ = ["PostgresqlStore"]
