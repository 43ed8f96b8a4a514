"""Celery on Redis as its documentation says for short tasks: ETA tasks, acknowledged late, results ignored.

`python -m timeline.bench.peers.celery_tasks work` is a worker (`worker_main`). `… put` publishes from several threads,
because no call publishes many. Both first read `{"url": …, "name": …, "way": …}` from standard input: `name` prefixes
every key, and `way` is the worker's pool. See `peers` for their lines.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

import redis
from celery import Celery
from celery.signals import worker_ready

from timeline.bench.load import ID_BYTES
from timeline.bench.peers import DROP, DROPPED, LEFT, READY, STORED, asked_of, id_output

PREFETCHED = 128
PUBLISHERS = 4
AT_ONCE = {"solo": 1, "threads": 8, "prefork": 2}
"""Tasks at once, by pool. Two processes are one per core of the machine that the figures are of."""
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "ERROR")


def application(url: str, name: str, ids: int) -> tuple[Celery, Any]:
    """Return the application and its one task, which writes the id that it gets to the file `ids`."""
    app = Celery("timeline-bench", broker=url, set_as_current=False)
    app.conf.update(
        task_acks_late=True,
        task_ignore_result=True,
        task_default_queue=name,
        worker_prefetch_multiplier=PREFETCHED,
        worker_enable_remote_control=False,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"global_keyprefix": f"{name}:"},
    )

    @app.task(name="handed")  # type: ignore[untyped-decorator]
    def handed(payload: str) -> None:
        os.write(ids, f"{payload[:ID_BYTES]}\n".encode())

    return app, handed


def work(url: str, name: str, way: str) -> None:
    """Work until SIGTERM."""
    ids = id_output()
    app, _ = application(url, name, ids)

    @worker_ready.connect(weak=False)  # type: ignore[untyped-decorator]
    def ready(**_: object) -> None:
        os.write(ids, f"{READY}\n".encode())

    app.worker_main(["worker", "--pool", way, "--concurrency", str(AT_ONCE[way]), *QUIET])


def put(url: str, name: str, way: str) -> None:
    """Answer the lines of `peers`."""
    _, handed = application(url, name, sys.stdout.fileno())
    server = redis.Redis.from_url(url)
    with ThreadPoolExecutor(PUBLISHERS) as publishers:
        print(READY, flush=True)
        for line in sys.stdin:
            asked = line.strip()
            if asked == LEFT:
                print(server.hlen(f"{name}:unacked") + server.llen(f"{name}:{name}"), flush=True)
            elif asked == DROP:
                for key in server.scan_iter(match=f"{name}:*", count=10_000):
                    server.delete(key)
                print(DROPPED, flush=True)
            else:
                payloads, due_ms = asked_of(asked)
                parts = [slice(at, None, PUBLISHERS) for at in range(PUBLISHERS)]
                dues = [None if due_ms is None else due_ms[part] for part in parts]
                list(publishers.map(partial(publish, handed), [payloads[part] for part in parts], dues))
                print(STORED, flush=True)


def publish(handed: Any, payloads: list[str], due_ms: list[int] | None) -> None:
    """Publish one task per payload, due at times of their own, or at once, which needs no ETA."""
    for at, payload in enumerate(payloads):
        eta = None if due_ms is None else datetime.fromtimestamp(due_ms[at] / 1000, UTC)
        handed.apply_async((payload,), eta=eta)


if __name__ == "__main__":
    {"work": work, "put": put}[sys.argv[1]](**json.loads(sys.stdin.readline()))
