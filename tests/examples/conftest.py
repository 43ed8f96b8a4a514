"""A broker and examples as a person starts them: by the commands of a docstring, with settings in the environment."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

import timeline

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
SERVE = "timeline serve"

Run = Callable[..., list[str]]


def docstring(name: str) -> str:
    """What an example says of itself."""
    return ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))) or ""


def commands(name: str) -> list[str]:
    """The commands that an example's docstring tells to type."""
    return re.findall(r"^    (\S.*)$", docstring(name), re.MULTILINE)


@contextmanager
def typed(command: str, errors: IO[str] | int, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A command as typed into a shell of this environment; on leaving, SIGTERM ends it if it has not ended. `errors`:
    where its standard error goes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIMELINE_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    python = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**kept, "PATH": path, "PYTHONPATH": python, **variables}
    program, *arguments = shlex.split(command)
    with subprocess.Popen(
        ["env", program, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.communicate(timeout=40)
                finally:
                    process.kill()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The address of a broker with a SQLite file of its own."""
    settings = {
        "TIMELINE_STORE": f"sqlite:///{tmp_path / 'timeline.db'}",
        "TIMELINE_LISTEN": "127.0.0.1:0",
        "TIMELINE_METRICS": "off",
    }
    log = tmp_path / "broker.log"
    with log.open("w") as errors, typed(f"{SERVE} --json", errors, **settings) as broker:
        assert broker.stdout is not None
        yield json.loads(broker.stdout.readline())["listen"]
    assert broker.returncode == 0, log.read_text()


@pytest.fixture
def run(address: str, tmp_path: Path) -> Run:
    """Runs an example to its end by its docstring's second command; answers the lines it printed."""

    def ran(name: str, **variables: str) -> list[str]:
        log = tmp_path / f"{name}.log"
        variables["TIMELINE_ADDRESS"] = address
        with log.open("w") as errors, typed(commands(name)[1], errors, **variables) as process:
            said, _ = process.communicate()
        assert process.returncode == 0, said + log.read_text()
        return said.splitlines()

    return ran


@pytest.fixture
def tl(address: str) -> Iterator[timeline.SyncTimeline]:
    """A client, to look at what an example left behind."""
    with timeline.connect_sync(address) as client:
        yield client
