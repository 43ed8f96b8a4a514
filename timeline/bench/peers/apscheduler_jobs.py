"""APScheduler on PostgreSQL as its documentation says: one process has the scheduler, and adds a job per message.

`python -m timeline.bench.peers.apscheduler_jobs work` has the scheduler, and listens to `… put`, which passes payloads
on: a second process may add no jobs to the store of a scheduler that runs. Both first read
`{"url": …, "name": …, "way": …}` from standard input: `name` is the table, and `way` how many threads run jobs. See
`peers` for their lines.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from sqlalchemy import create_engine, text

from timeline.bench.load import ID_BYTES
from timeline.bench.peers import DROP, DROPPED, LEFT, READY, STORED, apscheduler_jobs, asked_of, id_output
from timeline.clock import Clock

ids = -1
"""The file to which jobs write their ids."""


def handed(payload: str) -> None:
    """Write the id of a message."""
    os.write(ids, f"{payload[:ID_BYTES]}\n".encode())


def own_url(url: str) -> str:
    """Return the URL as SQLAlchemy takes it."""
    return f"postgresql+psycopg://{url.partition('://')[2]}"


def place_of(name: str) -> Path:
    """Return the socket on which the scheduler listens."""
    return Path(tempfile.gettempdir()) / f"{name}.sock"


def work(url: str, name: str, way: str) -> None:
    """Work until SIGTERM."""
    apscheduler_jobs.ids = id_output()  # the store names the function in this module
    scheduler = BackgroundScheduler(
        jobstores={"default": SQLAlchemyJobStore(own_url(url), tablename=name)},
        executors={"default": ThreadPoolExecutor(int(way))},
        job_defaults={"misfire_grace_time": None},
        timezone=UTC,
    )
    scheduler.start()
    clock = Clock()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(place_of(name)))
        listening.listen()
        os.write(apscheduler_jobs.ids, f"{READY}\n".encode())
        connection, _ = listening.accept()
        with connection, connection.makefile("rw", encoding="utf-8") as lines:
            for line in lines:
                payloads, due_ms = asked_of(line)
                for at, payload in enumerate(payloads):
                    due = clock.now_ms() if due_ms is None else due_ms[at]
                    when = datetime.fromtimestamp(due / 1000, UTC)
                    scheduler.add_job(apscheduler_jobs.handed, "date", run_date=when, args=(payload,))
                lines.write(f"{STORED}\n")
                lines.flush()


def put(url: str, name: str, way: str) -> None:
    """Answer the lines of `peers`."""
    engine = create_engine(own_url(url))
    lines = None
    print(READY, flush=True)
    for line in sys.stdin:
        asked = line.strip()
        if asked == LEFT:
            with engine.connect() as connection:
                print(connection.scalar(text(f"SELECT count(*) FROM {name}")), flush=True)
        elif asked == DROP:
            with engine.begin() as connection:
                connection.execute(text(f"DROP TABLE IF EXISTS {name}"))
            place_of(name).unlink(missing_ok=True)
            print(DROPPED, flush=True)
        else:
            if lines is None:
                client = socket.socket(socket.AF_UNIX)
                client.connect(str(place_of(name)))
                lines = client.makefile("rw", encoding="utf-8")
            lines.write(f"{asked}\n")
            lines.flush()
            print(lines.readline().strip(), flush=True)


if __name__ == "__main__":
    {"work": work, "put": put}[sys.argv[1]](**json.loads(sys.stdin.readline()))
