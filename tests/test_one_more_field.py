"""A put gets one more field, in a copy of the code: so many modules change until a delivery has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.servers.fixture import Running
from tests.servers.mysql import MysqlServer
from tests.servers.postgresql import PostgresqlServer
from tests.servers.process import Server
from timeline.model import Topic, TopicSettings
from timeline.storage_plugins import make_store
from timeline.storage_plugins.cassandra.changes import news_of
from timeline.storage_plugins.cassandra.rows import CassandraRow
from timeline.storage_plugins.contract import Puts
from timeline.storage_plugins.redis.records import pack, pack_puts, unpack

ROOT = Path(__file__).resolve().parents[1]
MOST_MODULES = 12
SERVERS: dict[str, type[Server]] = {"postgresql": PostgresqlServer, "mysql": MysqlServer}

_KEYWORD = ("tag: str | None = None,", "tag: str | None = None, priority: int = 0,")
CHANGES: dict[str, list[tuple[str, str]]] = {
    # What the wire carries: in timeline.fbs, of which `make schema` makes the layout.
    "timeline/wire/generated/layout.py": [
        ("('timeout_ms', 'long', 34, 0),", "('timeout_ms', 'long', 34, 0), ('priority', '[long]', 36, 0),"),
        (
            "('retry_jitter_percent', 'long', 48, 20),",
            "('retry_jitter_percent', 'long', 48, 20), ('priority', '[long]', 50, 0),",
        ),
        ("('headers', '[ubyte]', 54, 0),", "('headers', '[ubyte]', 54, 0), ('priority', '[long]', 56, 0),"),
    ],
    "timeline/wire/frames.py": [
        # In Produce, then in Deliver. Rows follow from the model.
        ("    timeout_ms: Duration = 0\n", "    priority: Int64 | None = None\n    timeout_ms: Duration = 0\n"),
        ("    max_deliveries: int = 0\n", "    max_deliveries: int = 0\n    priority: Int64 | None = None\n"),
    ],
    # What a store is given, and what it gives back.
    "timeline/storage_plugins/contract.py": [
        ("    payload_bytes: Int64 | None = None\n", "    priority: Int64\n    payload_bytes: Int64 | None = None\n")
    ],
    # What a database that is there already is told. Its tables and statements follow from the two above.
    "timeline/storage_plugins/sql/__init__.py": [
        (
            "MIGRATIONS: tuple[Migration, ...] = ()",
            "MIGRATIONS = (Step(lambda run: run('ALTER TABLE message ADD COLUMN priority BIGINT DEFAULT 0 NOT NULL'), "
            "lambda run: None),)",
        )
    ],
    "timeline/model.py": [
        ("    died_ms: Times\n", "    died_ms: Times\n    priority: Annotated[Int64, Form('zeros_before')]\n")
    ],
    # Peers of before have no such column. A value out of range is refused, message by message.
    "timeline/wire/codec.py": [
        (
            "    def among(self, field: str",
            "    def zeros_before(self, field):\n"
            "        long = DTYPES['[long]']\n"
            "        return self.numbers(field, long) if field in self.places else np.zeros(self.count, long)\n\n"
            "    def among(self, field: str",
        )
    ],
    "timeline/wire/validate.py": [
        (
            '        _zeros(frame.birth, "a birth"),\n',
            "        {} if frame.priority is None else dict.fromkeys(np.flatnonzero(frame.priority > 9).tolist(), "
            '"a priority is 9 at most"),\n        _zeros(frame.birth, "a birth"),\n',
        )
    ],
    # What users say and see.
    "timeline/driver/message.py": [
        _KEYWORD,
        ("self.payload = check_payload(payload)\n", "self.payload, self.priority = check_payload(payload), priority\n"),
        ('"in_", "payload", "tag")', '"in_", "payload", "priority", "tag")'),
    ],
    "timeline/driver/batch.py": [
        ("expires: Any = None,\n    ) -> None:\n", "expires: Any = None,\n        priority=0,\n    ) -> None:\n"),
        (
            "        self.ids = None if ids is None",
            "        self.priority = np.full(count, priority)\n        self.ids = None if ids is None",
        ),
        (
            "        return batch\n",
            "        batch.priority = np.array([message.priority for message in listed])\n        return batch\n",
        ),
    ],
    "timeline/driver/producer.py": [
        _KEYWORD,
        (
            "Message(payload, at, in_, id, tag, ",
            "Message(payload, at, in_, id, tag, priority=priority, headers=headers, expires=expires)  # ",
        ),
        ("payload, expires_ms, tag, headers)", "payload, expires_ms, tag, headers, message.priority)"),
    ],
    "timeline/driver/delivery.py": [
        (
            "    @property\n    def tag(self)",
            "    @property\n    def priority(self):\n        return int(self._frame.columns.priority[self._index])\n\n"
            "    @property\n    def tag(self)",
        )
    ],
    "timeline/cli/messages/produce.py": [
        ('@click.option("--tag"', '@click.option("--priority", type=int, default=0)\n@click.option("--tag"'),
        ("group: str, if_exists: Any,\n", "group: str, if_exists: Any, priority: int,\n"),
        ('"expires": _expires(expires, tz),\n', '"expires": _expires(expires, tz), "priority": priority,\n'),
    ],
}
"""The modules that change until every store delivers it, and how. The stores in memory, on Redis and on Cassandra and
the reference store need no change."""

PACKED = """
import sys
from dataclasses import replace
from timeline.columns import Ragged
from timeline.model import Topic, TopicSettings
from timeline.storage_plugins.cassandra.changes import news_of
from timeline.storage_plugins.cassandra.rows import CassandraRow, rows_of
from timeline.storage_plugins.contract import Puts
from timeline.storage_plugins.redis import records

class Read:
    id, payload, headers = b"one", None, None

    def __init__(self, fields):
        self.fields = fields

def cassandra(fields):
    return CassandraRow.of(Read(fields))

puts = Puts.blank(2)
puts.ids, puts.tags, puts.groups = (Ragged.of(items) for items in ([b"one", b"two"], [b"", b"tag"], [b"g", b"group"]))
puts.birth[:] = 1, 2
puts.priority[:] = 3, 5
values = records.pack_puts(puts, 7)
news = news_of(puts, 7, 1, Topic("t", 1, TopicSettings()))
assert records.rows_of(puts.ids.tolist(), values).priority.tolist() == [3, 5]
assert rows_of([cassandra(new.fields()) for new in news]).priority.tolist() == [3, 5]
leased = records.unpack(values[1])
leased = records.pack(replace(leased, message=replace(leased.message, holder=b"worker-1", version=2)))
rows = records.rows_of([b"two"], [leased])
assert (rows.priority[0], rows.tags[0], rows.groups[0], rows.holders[0]) == (5, b"tag", b"group", b"worker-1")

earlier = [bytes.fromhex(text) for text in sys.argv[1:]]
assert records.rows_of([b"one"], earlier[:1]).priority.tolist() == [0]
assert rows_of([cassandra(earlier[1])]).priority.tolist() == [0]
print(leased.hex(), news[0].fields().hex())
"""
"""What Redis and Cassandra pack of a message, read by this version and the one before."""

JOURNEY = """
import asyncio, sys, timeline
from tests.driver.broker import Broker
from timeline.storage_plugins.reference import ReferenceStore

async def shell(address, *arguments):
    command = [sys.executable, "-m", "timeline", *arguments, "--address", address]
    return await (await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)).wait()

async def journey():
    broker = Broker(ReferenceStore() if sys.argv[1] == "reference" else sys.argv[1])
    await broker.start()
    async with timeline.connect(broker.address) as tl:
        await tl.create_topic("t")
        await tl.schedule("t", "tick", every="1h")
        async with tl.producer("t") as p, tl.consumer("t") as c:
            await p.produce(b"", in_=0, id="one", priority=3)
            await p.produce_many([timeline.Message(b"", in_=0, id=f"many {n}", priority=n) for n in (5, 6)])
            assert await shell(broker.address, "produce", "t", "", "--in", "0", "--id", "typed", "--priority", "9") == 0
            try:
                await p.produce(b"", in_=0, id="ten", priority=10)
            except timeline.Invalid as bad:
                assert "9 at most" in str(bad)
            else:
                raise AssertionError("a priority of 10 was not refused")
            told = {}
            async for delivery in c:
                told[delivery.id] = delivery.priority
                await delivery.ack()
                if len(told) == 4:
                    break
    await broker.stop()
    assert told == {"one": 3, "many 5": 5, "many 6": 6, "typed": 9}, told
    print(timeline.__file__)

asyncio.run(journey())
"""

CONFORMANCE = """
import asyncio, timeline
from timeline.storage_plugins.conformance import run_suite

report = asyncio.run(run_suite("memory://"))
assert report.ok, report.failed
print(timeline.__file__)
"""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the changed code."""
    tmp_path = tmp_path_factory.mktemp("changed")
    shutil.copytree(ROOT / "timeline", tmp_path / "timeline", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests" / "driver", tmp_path / "tests" / "driver", ignore=shutil.ignore_patterns("test_*"))
    for name, edits in CHANGES.items():
        module = tmp_path / name
        source = module.read_text(encoding="utf-8")
        for old, new in edits:
            assert old in source, f"{name} has changed, so that this test must: {old!r}"
            source = source.replace(old, new, 1)
        module.write_text(source, encoding="utf-8")
    return tmp_path


def run(folder: Path, code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_field_of_a_put_is_declared_in_few_modules(changed: Path) -> None:
    assert run(changed, JOURNEY, "memory://").startswith(str(changed))
    assert run(changed, JOURNEY, "reference").startswith(str(changed))
    assert len(CHANGES) <= MOST_MODULES


@pytest.mark.slow
def test_the_conformance_suite_needs_no_change(changed: Path) -> None:
    assert run(changed, CONFORMANCE).startswith(str(changed))


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("name", ["sqlite", *(pytest.param(one, marks=pytest.mark.servers) for one in SERVERS)])
async def test_a_sql_store_delivers_it(
    name: str, earlier: bool, changed: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a database that is new, and in one of the version before."""
    url = f"sqlite:///{tmp_path}/one.db"
    if name != "sqlite":
        servers: Running = request.getfixturevalue("servers")
        url = servers.server(SERVERS[name]).url
        url += f"?schema=one_more_{earlier:d}" if name == "postgresql" else ""
    if earlier:
        store = make_store(url)
        await store.open()
        await store.close()
    assert run(changed, JOURNEY, url).startswith(str(changed))


@pytest.mark.slow
def test_redis_and_cassandra_pack_a_later_field_without_a_change(changed: Path) -> None:
    """What they packed before has it as 0. The version before keeps what it does not know."""
    puts = Puts.blank(1)
    [value], [new] = pack_puts(puts, 7), news_of(puts, 7, 1, Topic("t", 1, TopicSettings()))
    leased, fields = (bytes.fromhex(text) for text in run(changed, PACKED, value.hex(), new.fields().hex()).split())
    assert pack(unpack(leased)) == leased and unpack(leased).message.holder == b"worker-1"
    row = SimpleNamespace(id=b"one", fields=fields)
    assert CassandraRow.of(row).fields() == fields
