"""`timeline check-store` as the author of a half-written plugin meets it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Done, start
from tests.storage_plugins.half_written import Incomplete
from timeline.storage_plugins.conformance import CHECKS, GROUPS

ROOT = Path(__file__).resolve().parents[2]
Check = Callable[..., Done]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Runs check-store, as a process, on a plugin that is installed beside the package: `check("Hangs")`."""
    installed = tmp_path / "half_written-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: half-written\nVersion: 1\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def run(plugin: str, *flags: str) -> Done:
        point = f"[timeline.storage_plugins]\nhalf = tests.storage_plugins.{plugin}\n"
        (installed / "entry_points.txt").write_text(point)
        debug, rest = [flag for flag in flags if flag == "--debug"], [flag for flag in flags if flag != "--debug"]
        started = start(*debug, "check-store", "half://x", *rest)
        out, err = started.communicate(timeout=60)
        return Done(started.returncode, out.decode(), err.decode())

    return run


PATIENCE = "2s"
"""The bound of a call that is cancelled. On a busy machine the event loop may be late by half of it, not by more."""


@pytest.mark.processes
def test_an_incomplete_class_gets_a_sentence_for_each_method(check: Check) -> None:
    done = check("half_written:Incomplete")
    assert (done.code, done.out) == (4, "")
    lines = done.err.splitlines()
    assert len(lines) == len(Incomplete.__abstractmethods__)
    assert all(re.fullmatch(r"timeline: .*Incomplete lacks '\w+', which has to do this: .+\.", line) for line in lines)
    assert "'put', which has to do this: Store each message whose id is absent: OK with version 1." in done.err
    assert "TypeError" not in done.err and "Traceback" not in done.err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("half_written:nothing", "returned None, not a Store"),
        ("half_written:leaves", "made no store: SystemExit: 0. --debug"),
        ("half_written:mistaken", "made no store: KeyError: 'half://x'"),
        ("half_written:Absent", "cannot be imported: AttributeError"),
    ],
)
def test_what_makes_no_store_is_told_in_a_line(check: Check, plugin: str, said: str) -> None:
    done = check(plugin)
    assert (done.code, done.out, done.err.count("\n")) == (4, "", 1)
    assert said in done.err
    assert "Traceback (most recent call last)" in check("half_written:mistaken", "--debug").err


@pytest.mark.processes
def test_a_call_that_hangs_is_reported_and_ends_the_run(check: Check) -> None:
    done = check("half_written:Hangs", "--timeout", PATIENCE)
    assert done.code == 1
    assert "    put did not return within 2 s" in done.out
    assert done.out.count("✕") == 1
    assert re.search(r"\d\d checks were not run, since a call did not return", done.err)


@pytest.mark.processes
def test_a_call_that_blocks_the_loop_is_reported_all_the_same(check: Check) -> None:
    done = check("half_written:Blocks", "--timeout", "200ms")
    assert done.code == 1
    assert "    put did not return within 0.2 s. It blocks the event loop" in done.out
    assert "No other check can be run" in done.err


@pytest.mark.processes
def test_a_store_that_does_not_open_is_told_once(check: Check) -> None:
    done = check("half_written:OpensNever", "--timeout", PATIENCE)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("timeline: the store cannot be opened: open did not return within 2 s")


@pytest.mark.processes
def test_a_store_that_does_not_close_is_told_as_such(check: Check) -> None:
    done = check("half_written:ClosesNever", "--timeout", PATIENCE)
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("timeline: the store cannot be closed: close did not return within 2 s")


@pytest.mark.processes
def test_a_plugin_that_ends_the_program_has_not_passed(check: Check) -> None:
    done = check("half_written:Leaves")
    assert (done.code, done.out) == (1, "")
    assert "cannot be opened: open raised SystemExit(0), which ends the program. --debug shows where." in done.err


@pytest.mark.processes
def test_an_error_names_the_method_and_with_debug_its_line(check: Check) -> None:
    flags = ("half_written:Raises", "--only", "creating_a_topic_twice")
    done = check(*flags)
    assert done.code == 1
    assert "    raised NotImplementedError: to do: drop\n    The plugin's drop_topic raised it.\n" in done.out
    assert "Traceback" not in done.out + done.err
    debugged = check(*flags, "--debug")
    assert "Traceback (most recent call last)" in debugged.out
    assert re.search(r'half_written\.py", line \d+, in drop_topic', debugged.out)


@pytest.mark.processes
def test_a_cancellation_that_nobody_asked_for_is_no_interruption(check: Check) -> None:
    done = check("half_written:Cancels", "--only", "creating_a_topic_twice")
    assert done.code == 1
    assert "drop_topic raised CancelledError, though nobody cancelled it" in done.out


@pytest.mark.processes
def test_a_method_that_is_no_coroutine_function_is_named(check: Check) -> None:
    done = check("half_written:Plain", "--only", "next_due")
    assert "next_due is no coroutine function: write 'async def next_due'" in done.out


def test_easy_checks_come_before_random_ones() -> None:
    groups = [check.run.__module__ for check in CHECKS.values()]
    assert list(dict.fromkeys(groups)) == [group.__name__ for group in GROUPS]
    assert groups[0].endswith(".topics") and groups[-1].endswith(".against_rules")
