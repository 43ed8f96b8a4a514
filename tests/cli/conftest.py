"""A real broker process, and a way to call the command line as a person does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from timeline.cli.app import run

TIMELINE = (sys.executable, "-m", "timeline")


@dataclass
class Done:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines."""
        return [json.loads(line) for line in self.out.splitlines()]


Call = Callable[..., Done]


def plain_environment() -> dict[str, str]:
    """This process's environment without what it says about brokers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIMELINE_")}


def start(
    *arguments: str, cwd: Path | None = None, address: str = "", group: int | None = None
) -> subprocess.Popen[bytes]:
    """Starts the command line as a process of its own, with pipes. `group` 0: in a process group of its own, as a shell
    starts what is typed into a terminal."""
    environment = plain_environment() | ({"TIMELINE_ADDRESS": address} if address else {})
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*TIMELINE, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env=environment, process_group=group
    )


def reads_a_pipe(pid: int) -> bool:
    """Whether a process sleeps until its input comes; where the kernel does not say for what: whether it sleeps."""
    waits_in = Path(f"/proc/{pid}/wchan").read_text()
    asleep = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "S"
    return asleep and ("pipe" in waits_in or waits_in == "0")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker that this module has to itself; it must end in order on SIGTERM."""
    folder = tmp_path_factory.mktemp("broker")
    broker = start(
        "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--json", "--log-level", "warning", cwd=folder
    )
    try:
        assert broker.stdout is not None
        yield json.loads(broker.stdout.readline())["listen"]
    finally:
        broker.send_signal(signal.SIGTERM)
        _, errors = broker.communicate(timeout=30)
    assert broker.returncode == 0, errors.decode()


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs a command in this process: `call("topic", "list")` answers its exit code and what it said."""
    for name in [name for name in os.environ if name.startswith("TIMELINE_")]:
        monkeypatch.delenv(name)

    def called(*arguments: object) -> Done:
        code = run([str(argument) for argument in arguments])
        said = capfd.readouterr()
        return Done(code, said.out, said.err)

    return called


@pytest.fixture
def tell(call: Call, address: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The same, to this module's broker."""
    monkeypatch.setenv("TIMELINE_ADDRESS", address)
    return call


@pytest.fixture
def topic(tell: Call, request: pytest.FixtureRequest) -> str:
    """A topic of this test's own."""
    name = re.sub(r"[^\w.-]+", "-", request.node.name, flags=re.ASCII)[:200]  # parameters may hold anything
    assert tell("topic", "create", name, "--lease", "30s").code == 0
    return name
