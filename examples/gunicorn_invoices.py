"""A synchronous web application under gunicorn with preload: one client, made before the fork, used by every worker.

A client opens on first use and notices a fork. Each worker has its own connections, and shares none with the master.

    timeline serve
    gunicorn --preload --workers 4 examples.gunicorn_invoices:app

then `curl -X POST localhost:8000/invoices/2026-117`. Needs `pip install 'timeline-scheduler[server,examples]'`.
"""

import json
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import timeline

ADDRESS = os.environ.get("TIMELINE_ADDRESS", "localhost:9000")
PAYMENT_TERM = os.environ.get("PAYMENT_TERM", "14d")

tl = timeline.connect_sync(ADDRESS)  # in gunicorn's master; nothing is opened yet


@cache
def deadlines() -> timeline.SyncProducer:
    """Return this worker's producer. Creating a topic again does nothing."""
    tl.create_topic("payment-deadlines")
    return tl.producer("payment-deadlines", group="billing")


def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """POST /invoices/NUMBER: the invoice went out. If it is not paid when its term ends, a consumer gets a message."""
    number = environ["PATH_INFO"].removeprefix("/invoices/")
    try:
        receipt = deadlines().produce(number.encode(), in_=PAYMENT_TERM, id=f"invoice-{number}")
    except timeline.TimelineError as error:
        status, answer = "503 Service Unavailable" if error.retryable else "409 Conflict", {"error": str(error)}
    else:
        status, answer = "201 Created", {"id": receipt.id, "due": str(receipt.due), "worker": str(os.getpid())}
    body = json.dumps(answer).encode()
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
