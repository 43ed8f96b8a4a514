"""`timeline serve --http`: a gateway beside the broker, started again when it dies, gone with the broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.processes import TIMELINE, broker
from timeline.child import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def answers(url: str) -> httpx.Response:
    """What the gateway says once it answers."""
    async with httpx.AsyncClient(base_url=url, timeout=5) as http:
        while True:
            try:
                return await http.get("/readyz")
            except httpx.TransportError:
                pass


def gateway_pids(log: Path) -> list[int]:
    """The processes of the gateway so far, by the broker's log."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line["gateway_pid"] for line in lines if "gateway_pid" in line]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def serve(folder: Path, port: int, *more: str) -> Any:
    return broker(folder, "--http", f"127.0.0.1:{port}", "--log-format", "json", "--log-level", "info", *more)


async def test_it_is_started_again_and_ends_with_the_broker(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with serve(tmp_path, port) as served:
        assert (await answers(url)).status_code == 200
        (first,) = gateway_pids(served["log"])
        os.kill(first, signal.SIGKILL)
        while len(gateway_pids(served["log"])) < 2:
            pass
        assert (await answers(url)).status_code == 200
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.put("/v1/topics/departures", json={})).status_code == 201
            put = await http.post("/v1/topics/departures/messages", json={"payload": 1, "in": "1h"})
            assert put.status_code == 201
    last = gateway_pids(served["log"])[-1]
    assert not alive(first) and not alive(last)


async def test_it_ends_when_the_broker_is_killed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with serve(tmp_path, port) as served:
        assert (await answers(f"http://127.0.0.1:{port}")).status_code == 200
        (pid,) = gateway_pids(served["log"])
        served["process"].kill()
        while alive(pid):
            pass


def test_a_taken_address_is_an_error(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with serve(tmp_path, port):
        flags = ("--listen", "127.0.0.1:0", "--metrics", "off", "--store", "memory://", "--http", f"127.0.0.1:{port}")
        done = subprocess.run([*TIMELINE, "serve", *flags], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 4
    assert f"cannot serve HTTP on 127.0.0.1:{port}" in done.stderr and "--http HOST:PORT" in done.stderr


def test_beyond_this_machine_it_wants_what_the_broker_wants(tmp_path: Path) -> None:
    flags = ("serve", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0")
    done = subprocess.run([*TIMELINE, *flags], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 4
    assert "other machines reach 0.0.0.0:0, and there is no TLS" in done.stderr
