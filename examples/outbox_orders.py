"""Orders whose payment reminder is sent if, and only if, the order was committed: the outbox, with SQLAlchemy.

The reminder is a row of the same database, added in the same transaction. A relay, `timeline outbox URL`, sends
committed rows. In production it runs as a service. If it is killed at any moment, it sends nothing twice, because the
topic remembers.

    timeline serve
    python examples/outbox_orders.py

Needs `pip install 'timeline-scheduler[server,outbox]'`.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from sqlalchemy import create_engine, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import timeline
from timeline import outbox

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]


def place(session: Session, customer: str) -> None:
    """Add the order and its payment reminder in one transaction."""
    with session.begin():
        order = Order(customer=customer)
        session.add(order)
        session.flush()  # now the order has its id
        reminder = timeline.Message(customer.encode(), in_="3d", id=f"unpaid-{order.id}")
        outbox.add(session, reminder, topic="payments", group="shop")
        if customer == "mallory":
            raise PermissionError("this customer buys nothing here")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, timeline.connect_sync(ADDRESS) as tl:
        tl.create_topic("payments", remember="7d")
        url = f"sqlite:///{Path(folder) / 'shop.db'}"
        engine = create_engine(url)
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            for statement in outbox.ddl("sqlite"):  # in your own project: a migration
                connection.execute(text(statement))

        with Session(engine) as session:
            for customer in ("ada", "mallory", "grace", "edsger"):
                try:
                    place(session, customer)
                except PermissionError as refused:
                    print(f"{customer}: {refused}; the order is rolled back, and its reminder with it")
            placed = {f"unpaid-{id}" for id in session.scalars(select(Order.id))}
        subprocess.run(["timeline", "outbox", url, "--once", "--address", ADDRESS], check=True)
        reminded = {message.id for message in tl.scan("payments") if message.id in placed}
        print(f"{len(placed)} orders, {len(reminded)} of them with a reminder")
        engine.dispose()


if __name__ == "__main__":
    main()
