"""`python -m tests.storage_plugins.cockroach_statements` writes the golden file: the conformance suite is run on the
stand-in, and every statement of it noted as CockroachDB would be told it, beside all that the code has written out."""

from __future__ import annotations

import asyncio
from functools import partial

from tests.servers.cockroachdb import CockroachServer
from tests.servers.fixture import running
from tests.storage_plugins.cockroach_stand_in import GOLDEN, RecordedWords, store
from timeline.storage_plugins.cockroachdb import schema
from timeline.storage_plugins.cockroachdb.store import STATEMENTS
from timeline.storage_plugins.conformance import CHECKS, run_check


def written_out() -> set[str]:
    """The statements that stand in the code, but for what updates and deletes rows of one table: that is never sent."""
    found = set(schema.statements())
    found |= {text for name, text in vars(schema).items() if not name.startswith("_") and _is_statement(text)}
    for value in vars(STATEMENTS).values():
        found |= {text for text in (value.values() if isinstance(value, dict) else [value]) if isinstance(text, str)}
    return {text.strip() for text in found if not _mixes(text)}


def _mixes(text: str) -> bool:
    return "UPDATE timeline.message" in text and "DELETE FROM timeline.message" in text


def _is_statement(value: object) -> bool:
    return isinstance(value, str) and value.startswith(("SELECT", "INSERT", "UPDATE")) and "timeline." in value


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
