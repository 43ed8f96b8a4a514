"""pgqueuer on PostgreSQL as its documentation says: one call enqueues a batch, consumers on uvloop take batches.

`python -m timeline.bench.peers.pgqueuer_jobs work` is a worker, like `pgq run`; `… put` enqueues. Both first read
`{"url": …, "name": …, "way": …}` from standard input: `name` prefixes every table, and `way` begins with the number of
consumers and ends with the size of a batch. Its own benchmark has five consumers in one process, each with a connection
of its own. See `peers` for their lines.
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
FEW = 10
"""Jobs with due times of their own that one call enqueues. It counts their delays from its own time on."""
URL, PREFIX = "PGDSN", "PGQUEUER_PREFIX"


async def work(consumers: int, batch: int) -> None:
    """Work until SIGTERM, with one entrypoint, which writes the id that it gets."""
    ids = id_output()

    async def handed(job: Job) -> None:
        assert job.payload is not None
        os.write(ids, job.payload[:ID_BYTES] + b"\n")

    queuers = [PgQueuer(AsyncpgDriver(await asyncpg.connect(os.environ[URL]))) for _ in range(consumers)]
    for queuer in queuers:
        queuer.entrypoint(ENTRYPOINT)(handed)
    os.write(ids, f"{READY}\n".encode())
    await asyncio.gather(*(queuer.run(dequeue_timeout=POLLED, batch_size=batch) for queuer in queuers))


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
            step = len(texts) if due_ms is None else FEW
            for start in range(0, len(texts), step):
                part = slice(start, start + step)
                await enqueue(queries, texts[part], None if due_ms is None else due_ms[part])
            print(STORED, flush=True)
    await connection.close()


async def enqueue(queries: Queries, texts: list[str], due_ms: list[int] | None) -> None:
    """Enqueue jobs, due at times of their own, or now."""
    payloads: list[bytes | None] = [text.encode() for text in texts]
    count, now_ms = len(payloads), Clock().now_ms()
    dues = due_ms or [now_ms] * count
    delays: list[timedelta | None] = [timedelta(milliseconds=due - now_ms) for due in dues]
    await queries.enqueue([ENTRYPOINT] * count, payloads, [0] * count, delays)


def main(what: str, url: str, name: str, way: str) -> None:
    """Put or work, until standard input ends or SIGTERM."""
    os.environ |= {URL: url, PREFIX: name}
    if what == "put":
        uvloop.run(put())
    else:
        consumers, *_, batch = way.split()
        uvloop.run(work(int(consumers), int(batch)))


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.stdin.readline()))
