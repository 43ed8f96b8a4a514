"""RQ on Redis as its documentation says: one call enqueues many jobs, and a worker has the scheduler beside it.

`python -m timeline.bench.peers.rq_jobs work` is a worker; `… put` enqueues. Both first read
`{"url": …, "name": …, "way": …}` from standard input: `name` is the queue and begins the id of every job, and `way`
where jobs run. See `peers` for their lines.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from datetime import UTC, datetime

import redis
from rq import Queue, SimpleWorker, Worker

from timeline.bench.load import ID_BYTES
from timeline.bench.peers import DROP, DROPPED, LEFT, READY, STORED, asked_of, id_output, rq_jobs

ids = -1
"""The file to which jobs write their ids."""
WORKERS = {"in the worker's process": SimpleWorker, "a process per job": Worker}


def handed(payload: str) -> None:
    """Write the id of a message."""
    os.write(ids, f"{payload[:ID_BYTES]}\n".encode())


def work(url: str, name: str, way: str) -> None:
    """Work until SIGTERM."""
    rq_jobs.ids = id_output()  # jobs name the function in this module
    server = redis.Redis.from_url(url)
    worker = WORKERS[way]([Queue(name, connection=server)], name=name, connection=server)
    os.write(rq_jobs.ids, f"{READY}\n".encode())
    worker.work(with_scheduler=True, logging_level="ERROR")


def put(url: str, name: str, way: str) -> None:
    """Answer the lines of `peers`."""
    server = redis.Redis.from_url(url)
    queue, numbers = Queue(name, connection=server), itertools.count()
    print(READY, flush=True)
    for line in sys.stdin:
        asked = line.strip()
        if asked == LEFT:
            running, later = queue.started_job_registry, queue.scheduled_job_registry
            print(queue.count + running.get_job_count(cleanup=False) + later.count, flush=True)
        elif asked == DROP:
            for key in server.scan_iter(match=f"rq:*{name}*", count=10_000):
                server.delete(key)
            for names in ("rq:queues", "rq:workers"):
                server.srem(names, f"rq:queue:{name}", f"rq:worker:{name}")
            print(DROPPED, flush=True)
        else:
            payloads, due_ms = asked_of(asked)
            if due_ms is None:
                queue.enqueue_many(
                    Queue.prepare_data(rq_jobs.handed, (one,), result_ttl=0, job_id=f"{name}-{next(numbers)}")
                    for one in payloads
                )
            for payload, due in zip(payloads, due_ms or (), strict=False):
                when = datetime.fromtimestamp(due / 1000, UTC)
                job_id = f"{name}-{next(numbers)}"
                queue.enqueue_at(when, rq_jobs.handed, payload, result_ttl=0, job_id=job_id)
            print(STORED, flush=True)


if __name__ == "__main__":
    {"work": work, "put": put}[sys.argv[1]](**json.loads(sys.stdin.readline()))
