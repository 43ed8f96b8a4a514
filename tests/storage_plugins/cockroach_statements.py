"""`python -m tests.storage_plugins.cockroach_statements` writes the golden file: the conformance suite is run on the
stand-in, and every statement of it noted as CockroachDB would be told it, beside all that the code has written out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from types import ModuleType

from tests.servers.cockroachdb import CockroachServer
from tests.servers.fixture import running
from tests.storage_plugins.cockroach_stand_in import GOLDEN, RecordedWords, store
from timeline.storage_plugins.cockroachdb import schema
from timeline.storage_plugins.cockroachdb.words import worded
from timeline.storage_plugins.conformance import CHECKS, run_check
from timeline.storage_plugins.postgresql import (
    lease_statements,
    putting,
    records,
    statements,
    sweeping,
    tags,
    walking,
)

MODULES: tuple[ModuleType, ...] = (schema, statements, lease_statements, putting, records, sweeping, tags, walking)
_VERBS = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")


def written_out() -> set[str]:
    """The statements that stand in the code under names of their own, but for what CockroachDB is never sent: the lease
    of one statement, and what updates and deletes rows of one table. Names that begin with _ may be of parts."""
    found = set(schema.statements())
    for module in MODULES:
        for name, value in vars(module).items():
            if not name.startswith("_"):
                found |= {text for text in _texts(value) if text not in lease_statements.LEASE.values()}
    return {text for text in (worded(text).strip() for text in found) if not _mixes(text)}


def _mixes(text: str) -> bool:
    return "UPDATE timeline.message" in text and "DELETE FROM timeline.message" in text


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str) and value.strip().startswith(_VERBS) and " " in value.strip():
        if "timeline." in value and not value.strip().endswith("timeline.topic"):
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)


def main() -> None:
    """Writes the file."""
    for servers in running():
        url = servers.url(CockroachServer)
        for name in CHECKS:
            asyncio.run(run_check(name, partial(store, url))).raise_failed()
    every = sorted(RecordedWords.emitted | written_out())
    GOLDEN.write_text("".join(f"{text};\n\n" for text in every), encoding="utf-8")
    print(f"{len(every)} statements")


if __name__ == "__main__":
    main()
