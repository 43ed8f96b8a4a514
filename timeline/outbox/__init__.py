"""The outbox: "send only if my transaction commits".

A program adds a message to a table of its own database, inside the transaction that it is about; a relay, `timeline
outbox URL`, sends what was committed. What is rolled back was never there, and what is committed is sent, though the
program dies right after its commit.

    with engine.begin() as connection:                       # or a Session, or a DB-API connection
        connection.execute(insert(orders).values(id=42))
        outbox.add(connection, timeline.Message(b"42", in_="30m", id="unpaid-42"), topic="reminders")

`adding.py` needs no package but the driver's own; `database.py` and `relay.py`, which the command uses, need
`timeline[outbox]`. The table is `ddl.py`'s: whatever can insert a row into it can send.
"""

from timeline.outbox.adding import add, add_many, statement
from timeline.outbox.ddl import DIALECTS, TABLE, ddl

__all__ = ["DIALECTS", "TABLE", "add", "add_many", "ddl", "statement"]
