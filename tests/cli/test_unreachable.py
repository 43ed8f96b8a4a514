"""A broker that does not answer, as each command tells it: what is at the address, and what to do, in two sentences."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Call, start

pytestmark = pytest.mark.slow

COMMANDS = (
    "topic list",
    "topic show t",
    "topic pause t",
    "produce t x --in 1h",
    "consume t --count 1",
    "consume t --wait 50ms",
    "show t a",
    "ls t",
    "ls t --follow",
    "move t a --in 1h",
    "move t --tag x --by 1h",
    "cancel t a",
    "cancel t --tag x",
    "dead list t",
    "forecast t",
    "late",
    "why t a",
    "cluster --json",
    "top --json",
)
LOOK = "The broker may be stopped or overloaded: look at its process and its log, or wait longer with --timeout."
START = "Start one with 'timeline serve', or say where it is with --address HOST:PORT or TIMELINE_ADDRESS."


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections. Nobody reads what comes over them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_broker_that_says_nothing(call: Call, silent: int, command: str) -> None:
    done = call(*command.split(), "--address", f"127.0.0.1:{silent}", "--timeout", "300ms")
    assert done.code == 3
    said = f"127.0.0.1:{silent} takes connections, but does not answer within 300ms. {LOOK}"
    assert done.err.splitlines()[-1] == f"timeline: UNAVAILABLE: {said}"


@pytest.mark.parametrize("command", ["topic list", "show t a", "produce t x --in 1h", "late"])
def test_one_broker_under_two_names_is_named_once(call: Call, silent: int, command: str) -> None:
    both = f"localhost:{silent},127.0.0.1:{silent}"
    done = call(*command.split(), "--address", both, "--timeout", "600ms")
    said = f"localhost:{silent} takes connections, but does not answer within 600ms. {LOOK}"
    assert (done.code, done.err) == (3, f"timeline: UNAVAILABLE: {said}\n")
    done = call(*command.split(), "--address", "localhost:1,127.0.0.1:1", "--timeout", "300ms")
    said = f"no broker at localhost:1 (nothing listens there). {START}"
    assert (done.code, done.err) == (3, f"timeline: UNAVAILABLE: {said}\n")


def test_two_brokers_are_told_apart(call: Call, silent: int) -> None:
    done = call("topic", "list", "--address", f"127.0.0.1:1,127.0.0.1:{silent}", "--timeout", "600ms")
    assert (
        f"127.0.0.1:{silent} takes connections, but does not answer within 600ms; no broker at 127.0.0.1:1" in done.err
    )


def test_doctor_of_a_broker_that_says_nothing(call: Call, silent: int) -> None:
    done = call("doctor", "--address", f"127.0.0.1:{silent}", "--timeout", "300ms", "--json")
    (told,) = [row for row in done.json if row["about"] == "broker"]
    assert told["found"] == f"127.0.0.1:{silent} takes connections, but does not answer" and told["advice"] == LOOK


@pytest.mark.processes
def test_a_broker_that_is_stopped_amid_a_command(call: Call, tmp_path: Path) -> None:
    serving = start("serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--http", "off", "--json", cwd=tmp_path)
    assert serving.stdout is not None
    address = json.loads(serving.stdout.readline())["listen"]
    try:
        assert call("topic", "create", "t", "--address", address).code == 0
        following = start("ls", "t", "--follow", "--every", "50ms", "--timeout", "300ms", "--address", address)
        assert following.stderr is not None
        assert b"following t, " in following.stderr.readline()
        serving.send_signal(signal.SIGSTOP)
        said = f"the scan broke off: no broker answered: {address}: no page in time; waiting for it to come back"
        assert following.stderr.readline().decode() == f"timeline: UNAVAILABLE: {said}\n"
    finally:
        serving.kill()
        serving.communicate(timeout=30)
        following.kill()
        following.communicate(timeout=30)
