"""The examples that serve requests, each behind its real server."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import httpx
import pytest

import timeline
from tests.examples.conftest import commands, typed

Serve = Callable[..., httpx.Client]


@pytest.fixture
def serve(address: str) -> Iterator[Serve]:
    """Starts an example's server by its docstring's second command; answers a client of it, once it listens."""
    with ExitStack() as stack:

        def served(name: str, **variables: str) -> httpx.Client:
            variables["TIMELINE_ADDRESS"] = address
            server = stack.enter_context(typed(commands(name)[1], subprocess.STDOUT, **variables))
            return stack.enter_context(httpx.Client(base_url=listening(server), timeout=60))

        yield served


def listening(server: subprocess.Popen[str]) -> str:
    """The address that a server says it listens at."""
    assert server.stdout is not None
    said = []
    for line in server.stdout:
        said.append(line)
        if found := re.search(r"(?:running on|Listening at:) (http://\S+)", line):
            return found[1]
    raise AssertionError(f"it ended, saying {''.join(said)}")


@pytest.mark.processes
def test_each_request_puts_or_moves_a_reminder(serve: Serve, tl: timeline.SyncTimeline) -> None:
    web = serve("web_carts", UVICORN_PORT="0")
    first = web.put("/carts/42")
    assert first.status_code == 200
    one = tl.get("carts", "cart-42", payload=True)
    assert one is not None
    assert (one.payload, one.group, str(one.due)) == (b"42", "shop", first.json()["reminder"])
    assert one.due - datetime.now(UTC) > timedelta(hours=23)

    web.put("/carts/42")
    again = tl.get("carts", "cart-42")
    assert again is not None
    assert (again.version, again.due >= one.due) == (2, True)

    assert web.delete("/carts/42").json() == {"cart": "42", "reminder": "cancelled"}
    assert web.delete("/carts/42").json() == {"cart": "42", "reminder": "sent before"}
    assert tl.get("carts", "cart-42") is None

    too_long = web.put(f"/carts/{'x' * 300}")
    assert (too_long.status_code, "1 to 255 bytes" in too_long.json()["error"]) == (409, True)


@pytest.mark.processes
def test_workers_forked_from_a_preloaded_application_all_produce(serve: Serve, tl: timeline.SyncTimeline) -> None:
    web = serve("gunicorn_invoices", GUNICORN_CMD_ARGS="--bind 127.0.0.1:0")
    workers: set[str] = set()
    invoices: set[str] = set()

    def send(number: int) -> dict[str, str]:
        answer = web.post(f"/invoices/2026-{number}")
        assert answer.status_code == 201, answer.text
        told: dict[str, str] = answer.json()
        return told

    with ThreadPoolExecutor(8) as pool:
        while len(workers) < 2:  # as many requests as it takes until a second worker took one
            for told in pool.map(send, range(len(invoices), len(invoices) + 40)):
                workers.add(told["worker"])
                invoices.add(told["id"])
    assert {message.id for message in tl.scan("payment-deadlines")} == invoices
    assert web.post("/invoices/2026-1").status_code == 201  # the very same invoice: no second deadline
    assert len(list(tl.scan("payment-deadlines"))) == len(invoices)
