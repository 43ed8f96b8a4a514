"""`timeline consume` in a shell: a program that is not there, a wait that shows, and acks that are refused."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from tests.cli.conftest import Call, start
from tests.driver.broker import Broker
from timeline.model import Answers, Status, Topic
from timeline.storage_plugins.contract import Settles
from timeline.storage_plugins.memory import MemoryStore

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


def test_a_command_that_fails_is_tried_again_as_the_topic_says(tell: Call, topic: str) -> None:
    assert tell("topic", "update", topic, "--retry-first", "7h", "--retry-cap", "30h", "--retry-jitter", "0").code == 0
    tell("produce", topic, "x", "--in", "0s", "--id", "a")
    done = tell("consume", topic, "--count", 1, "--exec", "false")
    assert done.code == 1 and "again in 25200s" in done.out, done.out
    assert tell("show", topic, "a", "--json").json[0]["state"] == "waiting"


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


class Fencing(MemoryStore):
    """Refuses all settles."""

    async def settle(self, topic: Topic, now_ms: int, settles: Settles) -> Answers:
        return Answers.blank(len(settles), Status.FENCED)


def test_acks_that_are_refused_after_the_last_line_count_too(call: Call) -> None:
    """It prints on while acks are answered, and exits with what became of all of them."""
    broker, loop = Broker(Fencing(cluster_uid="0" * 32)), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(broker.start(), loop).result(10)
        where = ("--address", broker.address)
        call("topic", "create", "t", *where)
        for id in ("a", "b", "c"):
            call("produce", "t", "x", "--in", "0s", "--id", id, *where)
        done = call("consume", "t", "--count", 3, *where)
        asyncio.run_coroutine_threadsafe(broker.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert (done.code, len(done.out.splitlines())) == (1, 3)
    assert sum(line.startswith("timeline: ") for line in done.err.splitlines()) == 3
