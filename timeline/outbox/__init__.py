"""The outbox: "send only if my transaction commits".

A program adds a message to a table of its own database, inside the transaction that the message is about. A relay,
`timeline outbox URL`, sends committed messages, even if the program dies right after its commit. Messages of a
transaction that was rolled back are never sent.

    with engine.begin() as connection:                       # or a Session, or a DB-API connection
        connection.execute(insert(orders).values(id=42))
        outbox.add(connection, timeline.Message(b"42", in_="30m", id="unpaid-42"), topic="reminders")

`adding.py` needs no package but the driver's own. `database.py` and `relay.py`, which the command uses, need the extra
`outbox`. Any program that can insert a row into the table can send messages.
"""

from timeline.outbox.adding import DIALECTS, TABLE, add, add_many, ddl, statement

__all__ = ["DIALECTS", "TABLE", "add", "add_many", "ddl", "statement"]
