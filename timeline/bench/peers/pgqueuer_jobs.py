"""pgqueuer on PostgreSQL as its documentation says: one call enqueues a batch, a worker on uvloop takes batches.

`python -m timeline.bench.peers.pgqueuer_jobs work` is a worker, like `pgq run`; `… put` enqueues. Both first read
`{"url": …, "name": …, "way": …}` from standard input: `name` prefixes every table, and `way` ends with the size of a
batch. See `peers` for their lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import timedelta

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from timeline.bench.load import ID_BYTES
from timeline.bench.peers import DROP, DROPPED, LEFT, READY, STORED, asked_of, id_output
from timeline.clock import Clock

ENTRYPOINT = "handed"
POLLED = timedelta(seconds=1)
"""How long it waits for a notification before it polls."""
URL, PREFIX = "PGDSN", "PGQUEUER_PREFIX"


async def work(batch: int) -> None:
    """Work until SIGTERM, with one entrypoint, which writes the id that it gets."""
    ids = id_output()
    queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(os.environ[URL])))

    @queuer.entrypoint(ENTRYPOINT)
    async def handed(job: Job) -> None:
        assert job.payload is not None
        os.write(ids, job.payload[:ID_BYTES] + b"\n")

    os.write(ids, f"{READY}\n".encode())
    await queuer.run(dequeue_timeout=POLLED, batch_size=batch)


async def put() -> None:
    """Create the tables, and answer the lines of `peers`."""
    connection = await asyncpg.connect(os.environ[URL])
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    print(READY, flush=True)
    while asked := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if asked == LEFT:
            print(await connection.fetchval(f"SELECT count(*) FROM {os.environ[PREFIX]}pgqueuer"), flush=True)
        elif asked == DROP:
            await queries.uninstall()
            print(DROPPED, flush=True)
        else:
            texts, due_ms = asked_of(asked)
            payloads: list[bytes | None] = [payload.encode() for payload in texts]
            count, now_ms = len(payloads), Clock().now_ms()
            dues = due_ms or [now_ms] * count
            delays: list[timedelta | None] = [timedelta(milliseconds=due - now_ms) for due in dues]
            await queries.enqueue([ENTRYPOINT] * count, payloads, [0] * count, delays)
            print(STORED, flush=True)
    await connection.close()


def main(what: str, url: str, name: str, way: str) -> None:
    """Put or work, until standard input ends or SIGTERM."""
    os.environ |= {URL: url, PREFIX: name}
    if what == "put":
        asyncio.run(put())
    else:
        uvloop.run(work(int(way.split()[-1])))


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.stdin.readline()))
