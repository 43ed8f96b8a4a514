"""Processes of ours: what they say is heard, how they end is told, and none is left behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from timeline.child import Child
from timeline.errors import TimelineError, Unavailable

pytestmark = pytest.mark.processes


class Needed(Child):
    """A child whose trouble has a name of its own."""

    trouble = Unavailable


async def started(folder: Path, script: str) -> Needed:
    return await Needed.start("helper", folder, "sh", "-c", script)


async def test_it_is_told_and_heard_line_by_line(tmp_path: Path) -> None:
    child = await started(tmp_path, "while read word; do echo you said $word; done")
    await child.tell("one")
    await child.tell("two")
    assert [await child.line(), await child.line()] == ["you said one", "you said two"]
    assert child.running
    assert await child.end() == -signal.SIGTERM and not child.running
    assert await child.end() == -signal.SIGTERM


async def test_a_brokers_urls_are_on_no_command_line(tmp_path: Path) -> None:
    """They may hold a password, and everybody may read the list of processes."""
    script = "echo $@ $TIMELINE_STORE $TIMELINE_SYNC"
    urls = ("--store", "redis://u:secret@h/0", "--sync", "etcd://u:secret@h")
    child = await Needed.start("helper", tmp_path, "sh", "-c", f"{script}; read end", "sh", "serve", *urls, "--json")
    assert await child.line() == "serve --json redis://u:secret@h/0 etcd://u:secret@h"
    assert b"secret" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    await child.end()


async def test_one_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    child = await started(tmp_path, "echo no room left >&2; exit 3")
    with pytest.raises(Unavailable, match="helper ended with code 3: no room left"):
        await child.line()


async def test_one_that_says_nothing_is_waited_for_in_bounds(tmp_path: Path) -> None:
    child = await started(tmp_path, "exec cat")
    with pytest.raises(Unavailable, match=r"helper said nothing within 0\.01 s: it said nothing"):
        await child.line(0.01)
    assert await child.end() == -signal.SIGTERM


async def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    child = await started(tmp_path, "trap '' TERM; echo deaf; while read word; do :; done")
    assert await child.line() == "deaf"
    assert await child.end(0.01) == -signal.SIGKILL


async def test_a_signal_leaves_the_exit_code_to_those_who_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(process: subprocess.Popen[bytes], number: int) -> None:
        raise AssertionError(f"signal {number} would take the exit code of {process.pid} from the thread that waits")

    child = await started(tmp_path, "echo here; exec cat")
    assert await child.line() == "here"
    monkeypatch.setattr(subprocess.Popen, "send_signal", taken)
    assert await child.end() == -signal.SIGTERM


async def test_what_the_environment_says_of_brokers_is_not_meant_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIMELINE_STORE", "nonsense://")
    child = await started(tmp_path, "echo ${TIMELINE_STORE:-none}")
    assert await child.line() == "none"
    assert await child.end() in (0, -signal.SIGTERM)
    assert Child.trouble is TimelineError
