"""`timeline serve --http`: a gateway beside the broker, started again when it dies, gone with the broker."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

import timeline
from tests.broker.journalled import until
from tests.gateway.connections import Connection, posted
from tests.gateway.processes import TIMELINE, broker
from tests.gateway.push.receiver import Receiver, always
from timeline.broker.server import gateway_process
from timeline.broker.server.gateway_process import GatewayProcess, command_of, gateway_for, missing_package
from timeline.child import free_ports
from timeline.cli.run.gateway import BESIDE_NICENESS
from timeline.config import HTTP, ServeConfig, split_address
from timeline.errors import Invalid

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def answers(url: str) -> httpx.Response:
    """What the gateway says once it answers."""
    said: list[httpx.Response] = []

    def answered() -> bool:
        with contextlib.suppress(httpx.TransportError):
            said.append(httpx.get(f"{url}/readyz", timeout=5))
        return bool(said)

    await until(answered)
    return said[0]


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
        await until(lambda: len(gateway_pids(served["log"])) == 2)
        assert (await answers(url)).status_code == 200
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.put("/v1/topics/departures", json={})).status_code == 201
            put = await http.post("/v1/topics/departures/messages", json={"payload": 1, "in": "1h"})
            assert put.status_code == 201
    last = gateway_pids(served["log"])[-1]
    assert not alive(first) and not alive(last)


async def test_a_request_under_way_is_answered_before_broker_and_gateway_end(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    body = b'{"id":"uploaded","payload":1,"in":"1h"}'
    with serve(tmp_path, port, "--store", f"sqlite:///{tmp_path}/a.db") as served:
        assert (await answers(url)).status_code == 200
        assert httpx.put(f"{url}/v1/topics/departures", json={}, timeout=60).status_code == 201
        async with Connection(url) as uploading:
            await uploading.send(posted("/v1/topics/departures/messages", body, kind="application/json")[:-1])
            while "in_flight 2.0" not in httpx.get(f"{url}/metrics", timeout=60).text:
                pass
            served["process"].send_signal(signal.SIGTERM)
            await until(lambda: _ends(url))
            await uploading.send(body[-1:])
            assert (await uploading.answer()).status == 201


def _ends(url: str) -> bool:
    """Whether a gateway takes no more requests."""
    try:
        return httpx.get(f"{url}/readyz", timeout=60).status_code == 503
    except httpx.TransportError:
        return True


async def test_it_sends_webhooks_to_the_networks_that_the_broker_permits(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    receiver = Receiver(always(204))
    await receiver.start()
    try:
        with serve(tmp_path, port, "--push-allow", "10.1.0.0/16, 127.0.0.0/8") as served:
            async with timeline.connect(served["listen"], timeout="30s") as tl:
                await tl.create_topic("pushed", push_url=receiver.url)
                async with tl.producer("pushed") as p:
                    await p.produce(b"hello", in_=0)
                ((_, body),) = await receiver.received(1)
                assert body == b"hello"
    finally:
        await receiver.stop()


def test_its_webhooks_have_the_token_and_the_networks_of_the_broker() -> None:
    config = ServeConfig(http="127.0.0.1:9080", push_allow="10.1.0.0/16,fd00::/8", push_token_file="push.token")
    command = " ".join(command_of(config.check()))
    assert "--push-token-file push.token --push-allow 10.1.0.0/16 --push-allow fd00::/8" in command
    with pytest.raises(Invalid, match="push_allow takes networks"):
        ServeConfig(push_allow="10.1.0.0/33").check()


def test_its_grace_leaves_some_for_the_drain_of_the_broker() -> None:
    assert "--grace 20000ms" in " ".join(command_of(ServeConfig(http="127.0.0.1:9080", grace_ms=30_000).check()))


async def test_it_is_tried_again_when_it_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when there is no memory or no descriptor for a while."""
    (port,) = free_ports(1)
    monkeypatch.setattr(gateway_process, "COMMAND", ("/nowhere/to/be/found",))
    beside = GatewayProcess(ServeConfig(http=f"127.0.0.1:{port}").check())
    beside.start()
    await until(lambda: "cannot be started" in caplog.text)
    monkeypatch.setattr(gateway_process, "COMMAND", ("true",))
    await until(lambda: "ended with code 0" in caplog.text)
    await beside.stop()


async def test_it_is_nicer_than_its_broker(tmp_path: Path) -> None:
    """A busy gateway delays the broker's deliveries where both have too few processors."""
    (port,) = free_ports(1)
    with serve(tmp_path, port) as served:
        assert (await answers(f"http://127.0.0.1:{port}")).status_code == 200
        (pid,) = gateway_pids(served["log"])
        brokers = os.getpriority(os.PRIO_PROCESS, served["process"].pid)
        most = 19  # as nice as a process may be
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(most, brokers + BESIDE_NICENESS)


async def test_it_ends_when_the_broker_is_killed(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with serve(tmp_path, port) as served:
        assert (await answers(f"http://127.0.0.1:{port}")).status_code == 200
        (pid,) = gateway_pids(served["log"])
        served["process"].kill()
        await until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("http", "said", "told"),
    [
        ((), "without metrics, without HTTP", "off"),
        (("--http", "127.0.0.1:{port}"), "without metrics, HTTP on 127.0.0.1:{port}", "127.0.0.1:{port}"),
        (("--http", "127.0.0.1:0"), "HTTP on a free port of 127.0.0.1, which the log names", "127.0.0.1:0"),
    ],
)
def test_the_start_line_names_the_port_of_http(tmp_path: Path, http: tuple[str, ...], said: str, told: str) -> None:
    """Without it, a reader would call the port of another broker."""
    (port,) = free_ports(1)
    command = (*TIMELINE, "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--store", "memory://", *http)
    for more in ((), ("--json",)):
        words = [word.format(port=port) for word in (*command, *more)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as serving:
            assert serving.stdout is not None
            line = serving.stdout.readline().decode()
            serving.terminate()
        if more:
            assert json.loads(line)["http"] == told.format(port=port)
        else:
            assert line.rstrip().endswith(said.format(port=port))


async def test_a_taken_address_is_an_error(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with serve(tmp_path, port):
        assert (await answers(f"http://127.0.0.1:{port}")).status_code == 200  # it has the port now
        flags = ("--listen", "127.0.0.1:0", "--metrics", "off", "--store", "memory://", "--http", f"127.0.0.1:{port}")
        done = subprocess.run([*TIMELINE, "serve", *flags], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 4
    assert f"cannot serve HTTP on 127.0.0.1:{port}" in done.stderr and "--http HOST:PORT" in done.stderr


def test_beyond_this_machine_it_wants_what_the_broker_wants(tmp_path: Path) -> None:
    flags = ("serve", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0")
    done = subprocess.run([*TIMELINE, *flags], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 4
    assert "other machines reach 0.0.0.0:0, and there is no TLS" in done.stderr


def test_a_default_port_that_is_taken_is_told_and_the_broker_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken by somebody else: the same to us
            other.bind(split_address(HTTP))
            other.listen(1)
        with caplog.at_level(logging.WARNING):
            assert gateway_for(ServeConfig().check()) is None
    assert f"no HTTP: {HTTP}: address already in use. Choose another: --http HOST:PORT" in caplog.text


def test_another_address_of_the_broker_has_no_gateway_unasked() -> None:
    assert gateway_for(ServeConfig(listen="127.0.0.1:9100").check()) is None
    assert gateway_for(ServeConfig(http="off").check()) is None
    assert gateway_for(ServeConfig(listen="127.0.0.1:9100", http="127.0.0.1:0").check()) is not None


def test_a_package_that_the_gateway_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_package() == ""
    monkeypatch.setattr("timeline.broker.server.gateway_process.PACKAGES", ("not_there_at_all",))
    assert missing_package() == "not_there_at_all: pip install 'timeline-scheduler[gateway]'"
    asked = ServeConfig(http="127.0.0.1:0").check()
    with pytest.raises(Invalid, match=r"http 127.0.0.1:0 needs a package that is not installed: not_there_at_all: pip"):
        gateway_for(asked)
    assert gateway_for(ServeConfig(http="off").check()) is None
