"""A broker in this process, and databases of a program that has an outbox: SQLite, PostgreSQL, MariaDB."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

import timeline
from tests.driver.broker import Broker
from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.servers.postgresql import PostgresqlServer
from timeline import outbox
from timeline.model import Status
from timeline.outbox.database import Outbox, OutboxCounts, OutboxRow, outbox_url

TOPIC = "reminders"


@dataclass
class Shop:
    """A program's database with an outbox in it."""

    url: str
    engine: sa.Engine
    dialect: str

    def add(self, *ids: str, in_: str = "1h", topic: str = TOPIC) -> None:
        """A transaction for each id that adds its message and commits."""
        for id in ids:
            with self.engine.begin() as connection:
                outbox.add(connection, timeline.Message(id.encode(), in_=in_, id=id), topic=topic)

    def left(self) -> list[str]:
        """The ids that are in the table still."""
        with self.engine.begin() as connection:
            return list(connection.scalars(sa.text(f"SELECT id FROM {outbox.TABLE} ORDER BY seq")))

    def run(self, statement: str) -> None:
        """A transaction of one statement."""
        with self.engine.begin() as connection:
            connection.execute(sa.text(statement))

    def outbox(self) -> Outbox:
        """The relay's side of it."""
        return Outbox(self.url)


@dataclass
class Heard:
    """What a relay told."""

    statuses: dict[Status, int] = field(default_factory=dict)
    set_aside: list[tuple[str, Status, str]] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    counts: list[OutboxCounts] = field(default_factory=list)

    def sent(self, topic: str, status: Status, count: int) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + count

    def refused(self, row: OutboxRow, status: Status, reason: str) -> None:
        self.set_aside.append((row.id, status, reason))

    def trouble(self, reason: str) -> None:
        self.troubles.append(reason)

    def warned(self, sentence: str) -> None:
        self.warnings.append(sentence)

    def counted(self, waiting: OutboxCounts, oldest_s: float) -> None:
        self.counts.append(waiting)


def made_shop(url: str) -> Iterator[Shop]:
    """The database at `url` with a table made by the DDL that the product prints, run twice."""
    read = outbox_url(url)
    engine = sa.create_engine(read)
    dialect = read.get_backend_name()
    shop = Shop(url, engine, dialect)
    shop.run(f"DROP TABLE IF EXISTS {outbox.TABLE}")
    for _ in range(2):
        for made in outbox.ddl(dialect):
            shop.run(made)
    yield shop
    engine.dispose()


@pytest.fixture
def sqlite_shop(tmp_path: Path) -> Iterator[Shop]:
    """An outbox in a file of SQLite."""
    file = tmp_path / "shop.db"
    file.touch()
    yield from made_shop(f"sqlite:///{file}")


@pytest.fixture
def postgresql_shop(servers: Running) -> Iterator[Shop]:
    """An outbox in PostgreSQL."""
    yield from made_shop(servers.url(PostgresqlServer))


DATABASES = ["sqlite", *(pytest.param(name, marks=pytest.mark.servers) for name in ("postgresql", "mysql"))]


@pytest.fixture(params=DATABASES)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shop]:
    """An outbox in each database."""
    if request.param == "sqlite":
        (tmp_path / "shop.db").touch()
        yield from made_shop(f"sqlite:///{tmp_path / 'shop.db'}")
        return
    servers: Running = request.getfixturevalue("servers")
    yield from made_shop(servers.url(PostgresqlServer if request.param == "postgresql" else MysqlServer))


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    """A broker on the memory store."""
    running = Broker()
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def tl(broker: Broker) -> AsyncIterator[timeline.Timeline]:
    """A client of it, with a topic that remembers."""
    async with timeline.connect(broker.address, timeout="10s") as client:
        await client.create_topic(TOPIC, remember="1h")
        yield client
