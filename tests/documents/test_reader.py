"""A reader types what the README and the tutorial say, in three terminals, and gets what they say."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.documents.pages import DOCS, README, Block, blocks
from tests.documents.stage import ADDRESS, HTTP, Served, commands, serving

pytestmark = pytest.mark.processes


def _written(served: Served, name: str, block: Block) -> Path:
    """A program saved as the README says."""
    file = served.folder / name
    file.write_text(block.body.replace(ADDRESS, served.listen))
    return file


@contextmanager
def _running(served: Served, program: Path) -> Iterator[subprocess.Popen[str]]:
    """A program in a terminal of its own, until Ctrl-C."""
    with subprocess.Popen(
        [sys.executable, "-u", str(program)],
        cwd=served.folder,
        env=served.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, ""), errors
    assert said.endswith("ended by Ctrl-C\n")


def _heard(process: subprocess.Popen[str]) -> str:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def _typed(served: Served, block: Block) -> str:
    """The commands of a block, typed into a shell; what they answered."""
    done = subprocess.run(
        ["bash", "-euc", "\n".join(commands(block)).replace(HTTP, served.http)],
        cwd=served.folder,
        env=served.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _listed(served: Served, topic: str) -> str:
    """What `timeline ls` shows."""
    command = ["timeline", "ls", topic]
    return subprocess.run(command, env=served.environment, capture_output=True, text=True, check=True).stdout


def test_the_example_of_the_readme_runs_and_its_commands_answer(tmp_path: Path) -> None:
    told = blocks(README)
    (example,) = [block for block in told if block.language == "python"]
    look, over_http = [block for block in told if block.language == "sh" and block.runs]
    with serving(tmp_path) as served:
        hello = _written(served, "hello.py", example)
        with _running(served, hello) as process:
            assert _heard(process).startswith("drink some water late by 0:00:")
        said = _typed(served, look)
        assert "lonely produced" in said and "lonely cancelled" in said
        put, moved, leased = _typed(served, over_http).splitlines()
        assert all('"id":"bread"' in answer for answer in (put, moved, leased)) and '"receipt":' in leased


def test_a_reader_produces_moves_cancels_consumes_and_asks_why(tmp_path: Path) -> None:
    told = blocks(DOCS / "tutorial.md")
    producing, consuming = [block for block in told if block.language == "python"][:2]
    first, second = [block for block in told if block.language == "sh" and block.runs][:2]
    with serving(tmp_path) as served:
        producer, consumer = _written(served, "producer.py", producing), _written(served, "consumer.py", consuming)
        subprocess.run([sys.executable, str(producer)], cwd=served.folder, env=served.environment, check=True)
        with _running(served, consumer) as process:
            assert _heard(process).startswith("stand up and stretch late by 0:00:")
            said = _typed(served, first)
            assert "water moved" in said and "mail cancelled" in said
            assert _heard(process).startswith("drink some water late by 0:00:")
            while "water" in _listed(served, "reminders"):  # until it is acknowledged
                pass
        assert "lonely produced" in _typed(served, second)
        with _running(served, consumer) as process:
            assert _heard(process).startswith("anybody there? late by 0:00:")
            why = subprocess.run(
                ["bash", "-euc", commands(second)[-1]],
                env=served.environment,
                capture_output=True,
                text=True,
                check=True,
            )
            assert "delivered to consumer-" in why.stdout and "no consumer was connected" in why.stdout
