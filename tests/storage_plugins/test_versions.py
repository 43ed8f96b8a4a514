"""Two neighbouring versions of a schema share a store: an invented next version beside this one."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from timeline.model import Operation, Rows, Status
from timeline.storage_plugins import open_store, sql
from timeline.storage_plugins.conformance import run_check
from timeline.storage_plugins.conformance.trial import T0, Trial, named, statuses
from timeline.storage_plugins.contract import StoreRefused, StoreUnavailable
from timeline.storage_plugins.memory import MemoryStore
from timeline.storage_plugins.offload.files import PayloadFiles
from timeline.storage_plugins.offload.store import OffloadingStore
from timeline.storage_plugins.sqlite import SqliteStore
from timeline.storage_plugins.versions import Step, Versions, migrate, noted

pytestmark = pytest.mark.slow

Does = list[str]


def _steps(count: int) -> list[Step[Does]]:
    """Steps that say what they do."""

    def named_after(number: int) -> Step[Does]:
        return Step(lambda does: does.append(f"expand {number}"), lambda does: does.append(f"contract {number}"))

    return [named_after(number) for number in range(2, count + 2)]


@pytest.mark.parametrize(
    ("found", "known", "contract", "reached", "done"),
    [
        ((1, 1), 1, False, (1, 1), []),
        ((1, 1), 2, False, (2, 1), ["expand 2"]),
        ((2, 1), 2, False, (2, 1), []),
        ((2, 1), 1, False, (2, 1), []),
        ((2, 1), 2, True, (2, 2), ["contract 2"]),
        ((2, 2), 2, True, (2, 2), []),
        ((1, 1), 2, True, (2, 2), ["expand 2", "contract 2"]),
        ((2, 1), 3, False, (3, 2), ["contract 2", "expand 3"]),
        ((1, 1), 4, False, (4, 3), ["expand 2", "contract 2", "expand 3", "contract 3", "expand 4"]),
        ((1, 1), 3, True, (3, 3), ["expand 2", "contract 2", "expand 3", "contract 3"]),
    ],
)
def test_a_schema_goes_forward(
    found: tuple[int, int], known: int, contract: bool, reached: tuple[int, int], done: Does
) -> None:
    does: Does = []
    assert migrate(does, Versions(*found), _steps(known - 1), contract=contract) == Versions(*reached)
    assert does == done


@pytest.mark.parametrize(
    ("found", "known", "contract", "says"),
    [
        ((2, 2), 1, False, "has version 2, which 2 and newer can use; this Timeline knows versions 1 to 1"),
        ((4, 3), 2, False, "knows versions 1 to 2"),
        ((2, 1), 1, True, "contract it with the newer Timeline"),
        ((0, 0), 1, False, "has version 0"),
        ((1, 2), 3, False, "has version 1"),
    ],
)
def test_a_schema_never_goes_back(found: tuple[int, int], known: int, contract: bool, says: str) -> None:
    does: Does = []
    with pytest.raises(StoreRefused, match=says):
        migrate(does, Versions(*found), _steps(known - 1), contract=contract)
    assert does == []


def test_what_a_store_noted() -> None:
    assert noted({"schema_version": "3"}) == Versions(3, 3)
    assert noted({"schema_version": "3", "oldest_version": "2"}) == Versions(3, 2)
    with pytest.raises(KeyError):
        noted({})
    with pytest.raises(ValueError):
        noted({"schema_version": "x"})


# ── an invented next version, on SQLite ──


def _expand(execute: sql.Executes) -> None:
    """A column with a default, an index of it, and a table of its own."""
    execute("ALTER TABLE message ADD COLUMN urgency INTEGER NOT NULL DEFAULT 0")
    execute("CREATE INDEX message_urgency ON message (topic, urgency, due_ms)")
    execute("CREATE TABLE urgency (name TEXT PRIMARY KEY)")


def _contract(execute: sql.Executes) -> None:
    """What it does without: here, an index that this version names in its statements."""
    execute("DROP INDEX message_held")


KNOWN, NOW = sql.MIGRATIONS, 1 + len(sql.MIGRATIONS)
NEXT = (sql.Migration(_expand, _contract),)
WITH_NEXT = (*KNOWN, *NEXT)


def _schema(path: Path) -> tuple[str, str]:
    connection = sqlite3.connect(path)
    try:
        found = dict(connection.execute("SELECT name, value FROM meta").fetchall())
        return found["schema_version"], found["oldest_version"]
    finally:
        connection.close()


async def test_two_versions_take_turns_on_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each puts, takes what the other put, and settles what the other leased."""
    path = tmp_path / "a.db"
    url = f"sqlite:///{path}"
    async with Trial(lambda: SqliteStore(url)) as trial:
        topic = await trial.topic()
        tokens: Rows | None = None
        for turn, migrations in enumerate((KNOWN, WITH_NEXT, KNOWN, WITH_NEXT, KNOWN)):
            await trial.store.close()
            monkeypatch.setattr(sql, "MIGRATIONS", migrations)
            await trial.store.open()
            if tokens is not None:
                assert set(statuses(await trial.settle(topic, Operation.ACK, tokens))) == {Status.OK}
            if turn:
                tokens = (await trial.lease(topic)).rows
                assert len(tokens) == 10
            await trial.stored(topic, named(10, f"turn{turn}"))
            assert _schema(path) == (str(NOW + 1 if turn else NOW), str(NOW))
        assert await trial.store.migrate(False) == Versions(NOW + 1, NOW)
        with pytest.raises(StoreRefused, match="contract it with the newer"):
            await trial.store.migrate(True)
        monkeypatch.setattr(sql, "MIGRATIONS", WITH_NEXT)
        assert await trial.store.migrate(True) == Versions(NOW + 1, NOW + 1)
        await trial.store.close()
        assert _schema(path) == (str(NOW + 1), str(NOW + 1))
        monkeypatch.setattr(sql, "MIGRATIONS", KNOWN)
        with pytest.raises(StoreRefused, match=f"which {NOW + 1} and newer can use"):
            await trial.store.open()
        monkeypatch.setattr(sql, "MIGRATIONS", WITH_NEXT)
        await trial.store.open()
        assert len(await trial.everything(topic, now_ms=T0)) == 20


@pytest.mark.parametrize("name", ["rules_on_a_plain_topic", "brokers_racing", "large_mixed_batches"])
async def test_this_version_keeps_the_contract_on_the_next_ones_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    for migrations in (KNOWN, WITH_NEXT, KNOWN):
        monkeypatch.setattr(sql, "MIGRATIONS", migrations)
        await (await open_store(url)).close()
    (await run_check(name, lambda: SqliteStore(url))).raise_failed()
    assert _schema(tmp_path / "a.db") == (str(NOW + 1), str(NOW))


async def test_a_contraction_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(execute: sql.Executes) -> None:
        execute("DROP TABLE urgency")
        execute("DROP TABLE urgency")

    async with Trial(lambda: SqliteStore(f"sqlite:///{tmp_path}/a.db")) as trial:
        topic = await trial.topic()
        await trial.store.close()
        monkeypatch.setattr(sql, "MIGRATIONS", (*KNOWN, sql.Migration(_expand, fails)))
        await trial.store.open()
        with pytest.raises(StoreUnavailable, match="no such table"):
            await trial.store.migrate(True)
        assert await trial.store.migrate(False) == Versions(NOW + 1, NOW)
        drops = sql.Migration(_expand, lambda execute: execute("DROP TABLE urgency"))
        monkeypatch.setattr(sql, "MIGRATIONS", (*KNOWN, drops))
        assert await trial.store.migrate(True) == Versions(NOW + 1, NOW + 1)
        await trial.stored(topic, named(3))


async def test_a_store_without_a_schema_has_no_versions() -> None:
    assert await MemoryStore().migrate(True) is None
    assert await OffloadingStore(MemoryStore(), PayloadFiles("memory://versions")).migrate(False) is None
