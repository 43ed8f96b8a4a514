"""`timeline consume --exec` in trouble: a broker that is away, a person in a hurry, a command that will not end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import TIMELINE, Call, start
from timeline.cli.messages.consume import Taker, is_gone, shown_ending

pytestmark = pytest.mark.processes

PATIENCE_S = 30.0
STUBBORN = "trap '' TERM; echo $$ > {started}; while :; do read nothing < {never}; done"
"""Tells its process id, and then ends for nobody who asks."""


@dataclass
class Broker:
    """A broker of a test's own, which it may hold up: it is there, and says nothing."""

    process: subprocess.Popen[bytes]
    address: str
    tell: Call

    def stands_still(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def goes_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def has_one(self, lease: str) -> None:
        """A topic with one message, which is due."""
        self.tell("topic", "create", "errands", "--lease", lease)
        self.tell("produce", "errands", "x", "--in", "0s", "--id", "a")

    def shows(self, id: str) -> dict[str, Any]:
        return self.tell("show", "errands", id, "--json").json[0]


@pytest.fixture
def broker(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    process = start(
        "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--json", "--log-level", "error", cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["listen"]
        monkeypatch.setenv("TIMELINE_ADDRESS", address)
        yield Broker(process, address, call)
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def fifos(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Where a command says that it has `started`, what it may `finish` by, and what `never` comes."""
    made = {name: tmp_path / name for name in ("started", "finish", "never")}
    for path in made.values():
        os.mkfifo(path)
    yield made
    for path in made.values():
        os.close(os.open(path, os.O_RDWR))  # whoever still waits there goes on, and ends


Consume = Callable[..., subprocess.Popen[bytes]]
Spawn = Callable[..., Any]


@pytest.fixture
def consume(broker: Broker) -> Iterator[Consume]:
    """Starts a consumer that is gone after the test, whatever becomes of it."""
    running: list[subprocess.Popen[bytes]] = []

    def consume(*options: object) -> subprocess.Popen[bytes]:
        running.append(start("consume", "errands", *map(str, options), address=broker.address, group=0))
        return running[-1]

    yield consume
    for each in running:
        each.kill()
        each.wait()


def until(holds: Callable[[], object]) -> None:
    """Asks, which takes a moment, until it is so."""
    over = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < over, "it has not come to pass"


def line(consumer: subprocess.Popen[bytes], part: str) -> str:
    """The next line on standard error that has `part` in it."""
    assert consumer.stderr is not None
    while said := consumer.stderr.readline().decode():
        if part in said:
            return said
    raise AssertionError(f"it never said {part!r}")


def of_ours(errors: bytes) -> list[str]:
    """What the command line itself said on standard error; the driver tells of outages there, too. Not that it waits,
    which it says where its first message takes long."""
    ours = [said for said in errors.decode().splitlines() if said.startswith("timeline: ")]
    return [said for said in ours if not said.startswith("timeline: waiting for messages of ")]


def put(payload: bytes, broker: Broker) -> subprocess.CompletedProcess[bytes]:
    """Puts what is too large for an argument."""
    command = (*TIMELINE, "produce", "errands", "-", "--in", "0s", "--id", "a", "--address", broker.address)
    return subprocess.run(command, input=payload, stdout=subprocess.DEVNULL)


@contextmanager
def gone(group: int) -> Iterator[None]:
    """Afterwards nothing of a process group may run any more; nothing does."""
    try:
        yield
        until(lambda: is_gone(group))  # the kernel takes a moment for what SIGKILL has ended
    finally:
        if not is_gone(group):
            os.killpg(group, signal.SIGKILL)


def tell_twice(first: signal.Signals = signal.SIGTERM) -> None:
    """Two signals to this process, which handles them in one turn of its loop."""
    signal.raise_signal(first)
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.prove
def test_a_lease_is_extended_again_after_an_outage(broker: Broker, consume: Consume, fifos: dict[str, Path]) -> None:
    """Else the command runs twice at once, though the broker was away for less than the lease."""
    broker.has_one("15s")
    consumer = consume("--count", 1, "--exec", "echo > {started}; read word < {finish}".format(**fifos))
    fifos["started"].read_bytes()
    first = broker.shows("a")["due_ms"]
    broker.stands_still()
    said = line(consumer, "lease")
    assert said.startswith("timeline: the lease of 'a' could not be extended (")
    assert said.endswith("); trying again\n") and "repeat" not in said
    broker.goes_on()
    until(lambda: broker.shows("a")["due_ms"] > first)
    fifos["finish"].write_text("now\n")
    out, errors = consumer.communicate(timeout=PATIENCE_S)
    assert (consumer.returncode, of_ours(errors)) == (0, [])
    assert out.decode().rstrip().endswith("exit 0") and "delivery" not in out.decode()


def test_a_lease_that_has_ended_is_said_once(broker: Broker, consume: Consume, fifos: dict[str, Path]) -> None:
    broker.has_one("1s")
    consumer = consume("--count", 1, "--exec", "echo > {started}; read word < {finish}".format(**fifos))
    fifos["started"].read_bytes()
    broker.stands_still()
    lost = "timeline: the lease of 'a' has ended: another consumer may run the command, too\n"
    assert line(consumer, "has ended") == lost
    broker.goes_on()
    fifos["finish"].write_text("now\n")
    _, errors = consumer.communicate(timeout=PATIENCE_S)
    assert not [said for said in of_ours(errors) if "lease of" in said]


@pytest.mark.parametrize(
    ("signals", "extended", "code"),
    [
        ((signal.SIGTERM, signal.SIGINT), False, 130),
        pytest.param((signal.SIGINT, signal.SIGINT), True, 130, marks=pytest.mark.prove),
        ((signal.SIGTERM, signal.SIGTERM), True, 1),
    ],
)
def test_the_second_signal_ends_what_ignores_sigterm(
    broker: Broker,
    consume: Consume,
    fifos: dict[str, Path],
    signals: tuple[signal.Signals, signal.Signals],
    extended: bool,
    code: int,
) -> None:
    """At once after the first, or when the lease has been `extended` since."""
    broker.has_one("5s")
    consumer = consume("--exec", STUBBORN.format(**fifos))
    group = int(fifos["started"].read_text())
    with gone(group):
        consumer.send_signal(signals[0])
        first = broker.shows("a")["due_ms"]
        until(lambda: not extended or broker.shows("a")["due_ms"] > first)
        consumer.send_signal(signals[1])
        _, errors = consumer.communicate(timeout=PATIENCE_S)
    killed = "was killed, since it was still there 2s after SIGTERM; its message was given back"
    interrupted = ["timeline: interrupted"] if code == 130 else []
    assert consumer.returncode == code
    assert of_ours(errors) == [f"timeline: the command for 'a' {killed}", *interrupted]
    row = broker.shows("a")
    assert (row["state"], row["holder"], row["deliveries"]) == ("available", None, 1)


def test_the_second_signal_ends_what_the_command_started_too(
    broker: Broker, consume: Consume, fifos: dict[str, Path]
) -> None:
    """The shell that runs the command ends at SIGTERM; the one that it started does not."""
    broker.has_one("30s")
    command = f'sh -c "{STUBBORN.format(**fifos)}"; true'  # the outer shell puts its own id for $$
    consumer = consume("--exec", command)
    group = int(fifos["started"].read_text())
    with gone(group):
        consumer.send_signal(signal.SIGTERM)
        consumer.send_signal(signal.SIGINT)
        _, errors = consumer.communicate(timeout=PATIENCE_S)
    assert "was killed" in of_ours(errors)[0]
    assert broker.shows("a")["state"] == "available"


def test_the_second_signal_ends_without_a_broker_too(broker: Broker, consume: Consume, fifos: dict[str, Path]) -> None:
    broker.has_one("10m")
    consumer = consume("--timeout", "10m", "--exec", "echo > {started}; read word < {never}".format(**fifos))
    fifos["started"].read_bytes()
    broker.stands_still()
    consumer.send_signal(signal.SIGTERM)
    consumer.send_signal(signal.SIGINT)
    _, errors = consumer.communicate(timeout=PATIENCE_S)
    assert consumer.returncode == 130
    back = "no broker took its message back, which comes again when its lease ends"
    assert of_ours(errors)[0] == f"timeline: the command for 'a' was ended; {back}"


def test_the_second_signal_does_not_wait_for_the_answer_to_an_ack(
    broker: Broker, consume: Consume, fifos: dict[str, Path]
) -> None:
    broker.has_one("10m")
    consumer = consume("--exec", "echo > {started}; read word < {finish}; echo done".format(**fifos))
    fifos["started"].read_bytes()
    broker.stands_still()
    fifos["finish"].write_text("now\n")
    assert consumer.stdout is not None and consumer.stdout.readline() == b"done\n"
    consumer.send_signal(signal.SIGTERM)
    line(consumer, "lost its broker")  # by then it waits for an answer
    consumer.send_signal(signal.SIGINT)
    out, errors = consumer.communicate(timeout=PATIENCE_S)
    assert (consumer.returncode, out) == (130, b"")
    assert of_ours(errors)[0] == (
        "timeline: no broker has answered what became of 'a': it may come again when its lease ends"
    )


def test_sigterm_of_an_idle_consumer_without_a_broker_is_no_interruption(broker: Broker, consume: Consume) -> None:
    broker.has_one("30s")
    consumer = consume("--timeout", "10m")
    assert consumer.stdout is not None and b"  x  " in consumer.stdout.readline()
    until(lambda: not broker.tell("ls", "errands", "--json").out)  # it is acknowledged
    broker.stands_still()
    consumer.send_signal(signal.SIGTERM)
    _, errors = consumer.communicate(timeout=PATIENCE_S)
    assert (consumer.returncode, of_ours(errors)) == (0, [])


@pytest.mark.parametrize("turns", range(5))
def test_the_second_signal_ends_a_command_that_is_being_started(
    broker: Broker, fifos: dict[str, Path], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it has started by then; with the shell `turns` of the loop after the signal."""
    broker.has_one("30s")
    groups: list[int] = []
    real: Spawn = asyncio.create_subprocess_shell

    async def spawn(*arguments: Any, **settings: Any) -> Any:
        tell_twice()
        for _ in range(turns):
            await asyncio.sleep(0)
        # Holds up the loop until the command is up, of which asyncio tells a turn later.
        asyncio.get_running_loop().call_soon(lambda: groups.append(int(fifos["started"].read_text())))
        return await real(*arguments, **settings)

    monkeypatch.setattr(asyncio, "create_subprocess_shell", spawn)
    command = "sh -c 'echo $PPID > {started}; read word < {never}'; true".format(**fifos)
    done = broker.tell("consume", "errands", "--exec", command)
    with gone(groups[0]):
        assert done.code == 1
    assert of_ours(done.err.encode()) == ["timeline: the command for 'a' was ended; its message was given back"]
    assert broker.shows("a")["state"] == "available"


@pytest.mark.parametrize("turns", range(9))
def test_the_second_signal_leaves_what_has_ended_done(
    broker: Broker, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of its end has come through by then, its ack on its way included: it is acknowledged, and never given
    back to be done again."""
    broker.has_one("30s")
    monkeypatch.setattr("timeline.cli.messages.consume.ANSWER_S", PATIENCE_S)
    real: Spawn = asyncio.create_subprocess_shell

    def tell_in(turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(tell_in, turns - 1)
        else:
            tell_twice()

    async def spawn(*arguments: Any, **settings: Any) -> Any:
        process = await real(*arguments, **settings)
        until(lambda: is_gone(process.pid))  # asyncio has not heard of it yet
        tell_in(turns)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_shell", spawn)
    done = broker.tell("consume", "errands", "--exec", "exit 0")
    assert (done.code, of_ours(done.err.encode())) == (0, [])
    assert done.out.rstrip().endswith("exit 0")
    assert not broker.tell("ls", "errands", "--json").out


@pytest.mark.parametrize(("first", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_an_idle_consumer_that_is_told_twice_at_once_has_failed_at_nothing(
    broker: Broker, first: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.tell("topic", "create", "errands", "--lease", "30s")
    monkeypatch.setattr(Taker, "say_it_waits", lambda *_: tell_twice(first))
    done = broker.tell("consume", "errands")
    assert (done.code, done.out) == (code, "")


def test_a_command_has_ended_when_it_exits(broker: Broker, consume: Consume, tmp_path: Path) -> None:
    """Not when the child that it left behind lets go of its standard input, which is larger than a pipe."""
    broker.tell("topic", "create", "errands", "--lease", "30s")
    assert put(b"x" * 500_000, broker).returncode == 0
    left = tmp_path / "left"
    consumer = consume("--count", 1, "--exec", f"exec 3<&0; sleep 600 >/dev/null 2>&1 & echo $! > {left}; exit 0")
    try:
        out, errors = consumer.communicate(timeout=PATIENCE_S)
    finally:
        os.kill(int(left.read_text()), signal.SIGKILL)
    assert (consumer.returncode, of_ours(errors)) == (0, [])
    assert out.decode().rstrip().endswith("exit 0")


def test_a_child_that_was_left_behind_may_write_errors_on(
    broker: Broker, consume: Consume, fifos: dict[str, Path]
) -> None:
    """A command has ended when it exits, though its child has its standard error. What the child writes comes, too."""
    broker.has_one("30s")
    broker.tell("produce", "errands", "y", "--in", "1h", "--id", "b")
    consumer = consume("--exec", "(read word < {finish}; echo late news >&2) & echo soon >&2; exit 0".format(**fifos))
    assert line(consumer, "soon") == "soon\n"
    until(lambda: not broker.tell("ls", "errands", "--state", "leased", "--json").out)
    fifos["finish"].write_text("go\n")
    assert line(consumer, "late news") == "late news\n"


def test_a_command_gets_all_of_a_large_payload(broker: Broker, tmp_path: Path) -> None:
    broker.tell("topic", "create", "errands", "--lease", "30s")
    payload, got = os.urandom(900_000), tmp_path / "got"
    assert put(payload, broker).returncode == 0
    assert broker.tell("consume", "errands", "--count", 1, "--exec", f"cat > {got}").code == 0
    assert got.read_bytes() == payload


def test_done_is_said_once_it_is_acknowledged(broker: Broker) -> None:
    """A message that was cancelled meanwhile was not: its line says so."""
    broker.has_one("30s")
    cancel = f"{' '.join(TIMELINE)} cancel errands a --leased > /dev/null"
    done = broker.tell("consume", "errands", "--count", 1, "--json", "--exec", cancel)
    assert (done.code, done.json[0]["done"]) == (1, "exit 0, but its ack failed: NOT_FOUND")
    assert done.err.startswith("timeline: NOT_FOUND 'a': ")


def test_a_command_that_a_signal_ended(broker: Broker) -> None:
    broker.has_one("30s")
    broker.tell("topic", "update", "errands", "--retry-jitter", "0")
    done = broker.tell("consume", "errands", "--count", 1, "--json", "--exec", "kill -KILL $$")
    assert (done.code, done.json[0]["done"]) == (1, "killed by SIGKILL, again in 1s")


@pytest.mark.parametrize(
    ("code", "said"), [(0, "exit 0"), (3, "exit 3"), (-15, "killed by SIGTERM"), (-40, "killed by signal 40")]
)
def test_how_a_command_ended(code: int, said: str) -> None:
    assert shown_ending(code) == said


def test_a_group_of_nothing_but_zombies_is_gone() -> None:
    """Where nobody asks how they ended, they stay for good."""
    ended = subprocess.Popen(["sleep", "600"], process_group=0)
    try:
        assert not is_gone(ended.pid)
        ended.kill()
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        os.killpg(ended.pid, 0)
        assert is_gone(ended.pid)
    finally:
        ended.wait()
    assert is_gone(ended.pid)
