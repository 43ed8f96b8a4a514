"""Two servers of PostgreSQL: a primary whose commits wait for a streaming standby."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg

from tests.servers.postgresql import PostgresqlServer
from tests.servers.process import START_S

SETTINGS = ("synchronous_standby_names=*", "wal_keep_size=128MB")
WAITING = "pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = 'client backend'"
"""Clients whose commits wait for the standby; the server's own, as of autovacuum, do, too."""


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that the servers' user may pass through."""
    made = Path(tempfile.mkdtemp(prefix="timeline-"))
    made.chmod(0o711)
    try:
        yield made
    finally:
        shutil.rmtree(made)


async def asked(url: str, statement: str) -> Any:
    """The first field of a statement's answer."""
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


class Pair:
    """A primary, and a standby that follows it; `template`: a pair that does not run, to be copied."""

    def __init__(self, folder: Path, template: Pair | None = None) -> None:
        self.primary = PostgresqlServer(folder / "primary", *SETTINGS)
        self.standby = self.primary.standby()
        if template is not None:
            for mine, theirs in zip(self.servers, template.servers, strict=True):
                subprocess.run(["cp", "-a", theirs.folder, mine.folder], check=True)
                mine.port, mine.is_prepared = theirs.port, True

    @property
    def servers(self) -> tuple[PostgresqlServer, PostgresqlServer]:
        return self.primary, self.standby

    @property
    def url(self) -> str:
        """Of both, the primary first."""
        return f"postgresql://postgres@127.0.0.1:{self.primary.port},127.0.0.1:{self.standby.port}/postgres"

    def start(self) -> None:
        """Both."""
        for server in self.servers:
            server.start()

    def stop(self) -> None:
        self.standby.stop()
        self.primary.stop()

    async def following(self) -> None:
        """Returns once the standby has all that the primary has."""
        caught_up = "SELECT count(*) FROM pg_stat_replication WHERE flush_lsn >= pg_current_wal_flush_lsn()"
        async with asyncio.timeout(START_S):
            while not await asked(self.primary.url, caught_up):
                pass

    async def kill_amid_commits(self) -> None:
        """Kills the primary while a commit waits for the standby, which has it then: its caller is not told so."""
        self.standby.freeze()
        async with asyncio.timeout(START_S):
            while not await asked(self.primary.url, f"SELECT count(*) FROM {WAITING}"):
                pass
        self.primary.kill()
        self.standby.thaw()

    async def break_off_waits(self) -> int:
        """Cancels what waits for the standby, as an administrator may, or a statement_timeout; answers how many."""
        broken = f"SELECT count(pg_cancel_backend(pid)) FROM {WAITING}"
        return int(await asked(self.primary.url, broken))

    async def promote(self) -> None:
        """Promotes the standby, while others of this process go on."""
        await asyncio.to_thread(self.standby.promote)
