"""`timeline consume` in a shell: a program that is not there, and a wait that shows."""

from __future__ import annotations

import signal

import pytest

from tests.cli.conftest import Call, start

pytestmark = pytest.mark.processes


def test_a_program_that_is_not_there_is_said_before_anything_is_taken(tell: Call, topic: str) -> None:
    """Else each message would be put back, and count as delivered, until all are dead letters."""
    tell("produce", topic, "x", "--in", "0s", "--id", "a")
    for command in ("./remind.sh", "remind-nobody", "  remind-nobody --now"):
        done = tell("consume", topic, "--count", 1, "--exec", command)
        assert (done.code, len(done.err.splitlines())) == (2, 1)
        assert f"the shell finds no program {command.split()[0]!r}" in done.err
    assert tell("show", topic, "a", "--json").json[0]["deliveries"] == 0


@pytest.mark.parametrize(
    "command", ["true", "exit 0", "if true; then true; fi", "X=1 true", "(true)", "cat >/dev/null", "'true'", "! false"]
)
def test_what_a_shell_can_run_is_run(tell: Call, topic: str, command: str) -> None:
    tell("produce", topic, "x", "--in", "0s")
    done = tell("consume", topic, "--count", 1, "--exec", command)
    assert (done.code, done.err) == (0, "")


def test_one_that_waits_says_so_once(topic: str, address: str) -> None:
    waits = start("consume", topic, address=address)
    try:
        assert waits.stderr is not None
        assert waits.stderr.readline() == f"timeline: waiting for messages of {topic}; Ctrl-C ends it\n".encode()
        waits.send_signal(signal.SIGTERM)
        _, errors = waits.communicate(timeout=30)
    finally:
        waits.kill()
        waits.wait()
    assert (waits.returncode, errors) == (0, b"")
