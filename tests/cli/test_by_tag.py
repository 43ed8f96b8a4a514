"""`timeline move --tag` and `timeline cancel --tag`, interrupted: they print a token, and go on with it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import timeline
from tests.cli.conftest import TIMELINE, Call, plain_environment, start
from timeline.driver.blocking.client import SyncTimeline

COUNT = 80_000
START_MS = 1_900_000_000_000
TWO_HOURS_MS = 7_200_000


class _Served:
    """A broker process on a file, which can be killed and started again at its address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = "127.0.0.1:0"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        given = ("--listen", self.address, "--metrics", "off", "--json", "--log-level", "error")
        process = start("serve", "--store", f"sqlite:///{self._folder}/t.db", *given, cwd=self._folder)
        assert process.stdout is not None
        self.address = json.loads(process.stdout.readline())["listen"]
        return process

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def again(self) -> None:
        self.kill()
        self.process = self._start()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[_Served]:
    """With a topic `t`, 80,000 messages of tag `spring`, all due at one time."""
    broker = _Served(tmp_path)
    try:
        with timeline.connect_sync(broker.address, "60s") as tl:
            tl.create_topic("t")
            p = tl.producer("t")
            for _ in range(0, COUNT, 20_000):
                p.produce_many(timeline.Batch([b""] * 20_000, at=START_MS, tags="spring")).raise_failed()
        yield broker
    finally:
        broker.kill()


def _amid(tl: SyncTimeline) -> None:
    """Returns once some messages are shifted."""
    while next(iter(tl.scan("t", due=(START_MS + 1, None), limit=1)), None) is None:
        pass


def _dues(tl: SyncTimeline) -> dict[int, int]:
    dues: dict[int, int] = {}
    for page in tl.scan_pages("t"):
        for due_ms in page.rows.due_ms.tolist():
            dues[due_ms] = dues.get(due_ms, 0) + 1
    return dues


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "how", ["broker killed", *(pytest.param(number, marks=pytest.mark.prove) for number in ("SIGINT", "SIGTERM"))]
)
def test_an_interrupted_shift_goes_on_and_shifts_once(served: _Served, how: str) -> None:
    shift = ("move", "t", "--tag", "spring", "--by", "2h")
    with timeline.connect_sync(served.address, "60s") as tl:
        if how == "broker killed":
            command = start(*shift, "--json", "--timeout", "2s", address=served.address)
            _amid(tl)
            served.kill()
            out, err = command.communicate(timeout=60)
            told = json.loads(out)
            token = told["resume"]
            assert command.returncode == 3 and not told["finished"] and "continue with --resume" in err.decode()
            assert told["changed"] == told["counts"].get("OK", 0) < COUNT
            served.again()
        else:
            command = start(*shift, address=served.address, group=0)
            _amid(tl)
            command.send_signal(signal.Signals[how])
            out, err = command.communicate(timeout=60)
            before, line, after = filter(None, err.decode().splitlines())
            assert command.returncode == 130 and out == b"" and after == "timeline: interrupted", err
            assert "more may be moved already" in before and line.startswith("--resume ")
            token = line.removeprefix("--resume ")
        between = _dues(tl)
        assert set(between) == {START_MS, START_MS + TWO_HOURS_MS}, "it was interrupted in the middle"
        command = start(*shift, "--resume", token, "--json", address=served.address)
        out, err = command.communicate(timeout=60)
        told = json.loads(out)
        assert (command.returncode, told["counts"], told["finished"]) == (0, {"OK": COUNT}, True), err
        assert _dues(tl) == {START_MS + TWO_HOURS_MS: COUNT}


@pytest.mark.prove
@pytest.mark.slow
@pytest.mark.processes
def test_an_interrupted_cancel_counts_what_it_cannot_tell(served: _Served) -> None:
    cancel = ("cancel", "t", "--tag", "spring")
    with timeline.connect_sync(served.address, "60s") as tl:
        command = start(*cancel, "--json", "--timeout", "2s", address=served.address)
        while sum((counts := _dues(tl)).values()) == COUNT:
            pass
        served.kill()
        out, _ = command.communicate(timeout=60)
        assert command.returncode == 3 and 0 < sum(counts.values()) < COUNT
        served.again()
        command = start(*cancel, "--resume", json.loads(out)["resume"], address=served.address)
        out, err = command.communicate(timeout=60)
        assert _dues(tl) == {}
        ok, unknown = f"{out.decode()} 0".split()[0], err.decode()
        if int(ok) == COUNT:  # the kill came between two chunks
            assert (command.returncode, unknown) == (0, "")
        else:
            said = f"{ok} of {COUNT} cancelled; {COUNT - int(ok)} UNKNOWN\n"
            assert (command.returncode, out.decode()) == (1, said)
            assert "UNKNOWN: these are gone, and an answer was lost" in unknown


@pytest.mark.slow
def test_the_token_is_for_the_same_call_alone(tell: Call, topic: str, address: str) -> None:
    tell("produce", topic, "x", "--in", "1h", "--tag", "spring")
    seen: list[str] = []
    with timeline.connect_sync(address) as tl:
        tl.producer(topic).move_tag("spring", by="2h", progress=lambda told: seen.append(told.resume))
    refused = tell("move", topic, "--tag", "spring", "--by", "3h", "--resume", seen[0])
    assert refused.code == 2 and "by was 7200000 there, and is 10800000 here" in refused.err
    refused = tell("cancel", topic, "--tag", "spring", "--resume", seen[0])
    assert refused.code == 2 and "the operation was 'move' there, and is 'cancel' here" in refused.err
    assert "no resume token" in tell("move", topic, "--tag", "spring", "--by", "2h", "--resume", seen[0][1:]).err
    assert "--resume goes with --tag" in tell("move", topic, "x", "--in", "2h", "--resume", seen[0]).err
    done = tell("move", topic, "--tag", "spring", "--by", "2h", "--resume", seen[0], "--json").json[0]
    assert (done["changed"], done["finished"], done["resume"]) == (1, True, None)


@pytest.mark.slow
def test_what_is_refused_is_not_counted_as_moved(tell: Call, topic: str) -> None:
    for group in ("a", "b"):
        tell("produce", topic, "x", "--in", "1h", "--tag", "spring", "--group", group)
    done = tell("move", topic, "--tag", "spring", "--by", "2h", "--dry-run", "--group", "a")
    assert (done.code, done.out) == (1, "1 of 2 would be moved; 1 FORBIDDEN\n")
    told = tell("cancel", topic, "--tag", "spring", "--dry-run", "--group", "a", "--json").json[0]
    assert (told["matched"], told["changed"], told["finished"]) == (2, 1, True)


@pytest.mark.processes
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("call", [("move", "--by", "2h"), ("cancel",)])
def test_an_interrupt_before_any_answer_says_that_nothing_was_done(call: tuple[str, ...], how: str) -> None:
    """A broker that takes the connection and says nothing, as one that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = start(*call, "t", "--tag", "spring", "--timeout", "10m", address=address, group=0)
        asked, _ = silent.accept()
        with asked:
            command.send_signal(signal.Signals[how])
            out, err = command.communicate(timeout=60)
    done = "moved" if call[0] == "move" else "cancelled"
    nothing = f"timeline: nothing was {done}: it was still looking for the messages of the tag"
    assert [*filter(None, err.decode().splitlines())] == [nothing, "timeline: interrupted"]
    assert (command.returncode, out) == (130, b"")


@pytest.mark.processes
def test_an_interrupt_of_a_resumed_call_before_any_answer_prints_the_token_again() -> None:
    asked_for = {"the operation": "move", "topic": "t", "group": "default", "tag": "spring", "at": 0, "in_": -1}
    asked_for |= {"by": TWO_HOURS_MS, "leased": False, "dry_run": False}
    before = timeline.TagProgress(
        {timeline.Status.OK: 7}, op=1, cursor=b"\0\0\0\1a", started_ms=START_MS, asked=asked_for
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        shift = ("move", "t", "--tag", "spring", "--by", "2h", "--timeout", "10m", "--resume", before.resume)
        command = start(*shift, address=address, group=0)
        asked, _ = silent.accept()
        with asked:
            command.send_signal(signal.SIGINT)
            _, err = command.communicate(timeout=60)
    how_far, line, _ = filter(None, err.decode().splitlines())
    assert command.returncode == 130 and "stopped after 7 messages" in how_far, err
    assert line == f"--resume {before.resume}"


@pytest.mark.processes
def test_an_interrupt_while_the_command_is_loaded_says_that_nothing_was_done(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == os.environ['INTERRUPTED_AT']:\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    for place in ("timeline.cli.app", "timeline.cli.messages.change"):
        environment = {**plain_environment(), "PYTHONPATH": str(tmp_path), "INTERRUPTED_AT": place}
        done = subprocess.run(
            [*TIMELINE, "move", "t", "--tag", "spring", "--by", "2h"], env=environment, capture_output=True, timeout=60
        )
        assert done.returncode == 130, (place, done)
        assert done.stderr.decode().strip() == "timeline: interrupted before it began: nothing was done"
