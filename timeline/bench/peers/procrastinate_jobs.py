"""procrastinate on PostgreSQL as its documentation says: one call defers a batch, a worker hears of it by LISTEN.

`python -m timeline.bench.peers.procrastinate_jobs work` is a worker that deletes the jobs it has done; `… put` defers.
Both first read `{"url": …, "name": …, "way": …}` from standard input: `name` is the PostgreSQL schema of its tables,
and `way` how many jobs the worker runs at once. See `peers` for their lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import UTC, datetime

from procrastinate import App, PsycopgConnector
from procrastinate.types import JSONDict

from timeline.bench.load import ID_BYTES
from timeline.bench.peers import DROP, DROPPED, LEFT, READY, STORED, asked_of, id_output

TASK = "handed"
POLLED_S = 0.1
"""How long it waits for a notification before it polls. Of a job that becomes due, there is none."""


def application(url: str, name: str) -> App:
    """Return the application, whose tables are in a schema of their own."""
    return App(connector=PsycopgConnector(conninfo=url, kwargs={"options": f"-c search_path={name}"}))


async def work(url: str, name: str, way: str) -> None:
    """Work until SIGTERM, with one task, which writes the id that it gets."""
    ids = id_output()
    app = application(url, name)

    @app.task(name=TASK)
    async def handed(payload: str) -> None:
        os.write(ids, f"{payload[:ID_BYTES]}\n".encode())

    async with app.open_async():
        os.write(ids, f"{READY}\n".encode())
        await app.run_worker_async(
            concurrency=int(way), delete_jobs="always", fetch_job_polling_interval=POLLED_S, listen_notify=True
        )


async def put(url: str, name: str, way: str) -> None:
    """Create the tables, and answer the lines of `peers`."""
    app = application(url, name)
    async with app.open_async():
        connector = app.connector
        await connector.execute_query_async(f"CREATE SCHEMA {name}")
        await app.schema_manager.apply_schema_async()
        print(READY, flush=True)
        while asked := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if asked == LEFT:
                (row,) = await connector.execute_query_all_async("SELECT count(*) AS left FROM procrastinate_jobs")
                print(row["left"], flush=True)
            elif asked == DROP:
                await connector.execute_query_async(f"DROP SCHEMA {name} CASCADE")
                print(DROPPED, flush=True)
            else:
                payloads, due_ms = asked_of(asked)
                if due_ms is None:
                    jobs: list[JSONDict] = [{"payload": one} for one in payloads]
                    await app.configure_task(TASK).batch_defer_async(*jobs)
                for payload, due in zip(payloads, due_ms or (), strict=False):
                    when = datetime.fromtimestamp(due / 1000, UTC)
                    await app.configure_task(TASK, schedule_at=when).defer_async(payload=payload)
                print(STORED, flush=True)


if __name__ == "__main__":
    asyncio.run({"work": work, "put": put}[sys.argv[1]](**json.loads(sys.stdin.readline())))
