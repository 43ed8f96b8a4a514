"""A broker whose store changes under it: what it finds, and what it answers."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.broker.link import Link
from tests.servers.postgresql import PostgresqlServer, program

FAR_MS = 3_600_000


async def look(link: Link) -> str:
    """Looks at the store, as the broker does again and again; answers why the broker is not ready."""
    await link.node._inspect_store()
    await link.node._check_store()
    return link.node.not_ready


async def put(link: Link, id: str) -> Any:
    """On a stream that was open before whatever happened."""
    return await link.node.puts.put(link.puts([id], FAR_MS), "test")


def psql(server: PostgresqlServer, statement: str) -> None:
    address = ["-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres"]
    subprocess.run([program("psql"), *address, "-v", "ON_ERROR_STOP=1", "-qc", statement], check=True)
