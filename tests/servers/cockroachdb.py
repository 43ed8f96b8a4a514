"""CockroachDB's stand-in: PostgreSQL, its every transaction SERIALIZABLE, so that it refuses some for real (40001)."""

from __future__ import annotations

from pathlib import Path

from tests.servers.postgresql import PostgresqlServer


class CockroachServer(PostgresqlServer):
    """A PostgreSQL that stands in for CockroachDB, of which there is no server to be had here."""

    name = "cockroachdb"

    def __init__(self, folder: Path, *settings: str) -> None:
        super().__init__(folder, "default_transaction_isolation=serializable", *settings)

    @property
    def url(self) -> str:
        return f"cockroachdb://postgres@127.0.0.1:{self.port}/postgres"
