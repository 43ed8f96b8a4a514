"""The hunter is hunted: bugs planted in the decoder are found, and what bounds an input holds it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import target
from tests.fuzz.hunt import KINDS, catch_of, seeds_of
from tests.wire.examination import allowed_bytes
from tests.wire.mutants import good_frames
from timeline.wire.verify import find_body

pytestmark = pytest.mark.slow

PLANTED = """
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["timeline"], enable_loader_override=False):
    from tests.fuzz.hunt import hunt
from tests.wire import examination

sound = examination.decode

def decode(data):
    frame = sound(data)
    if getattr(frame, "credit_messages", getattr(frame, "messages", 0)) > 1_000_000:
        raise KeyError("planted")
    return frame

catches = hunt(atheris, ["Beat"], 2, 1, Path(sys.argv[1]))
examination.decode = decode
catches += hunt(atheris, ["Credit"], 60, 1, Path(sys.argv[1]))
for catch in catches:
    print("caught", catch.kind, catch.failed, "KeyError: 'planted'" in catch.said, *catch.inputs)
"""


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TIMELINE_")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment | variables)


@pytest.mark.slow
@pytest.mark.prove
def test_a_planted_bug_is_found_and_nothing_else_is(tmp_path: Path, require_service: Callable[[str], None]) -> None:
    require_service("atheris")
    done = python("-c", PLANTED, str(tmp_path))
    caught = dict(line.split()[1:3] for line in done.stdout.splitlines() if line.startswith("caught"))
    assert caught == {"Beat": "False", "Credit": "True"}, done.stdout + done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("caught Credit")]
    told, failing = line.split()[3:]
    assert told == "True"
    assert find_body(Path(failing).read_bytes()).name == "Credit"


def test_every_kind_has_good_frames_to_start_from() -> None:
    for kind in KINDS:
        frames = seeds_of(kind)
        assert frames
        assert {find_body(frame).name for frame in frames} == {kind}


def test_inputs_are_changed_within_their_bound_both_by_those_who_know_and_blindly() -> None:
    data = good_frames()[0]
    blind = [target.changed(data, 90, seed, lambda same, most: b"blind") for seed in range(200)]
    assert 50 < blind.count(b"blind") < 150
    assert max(map(len, blind)) == 90
    assert len(set(blind)) > 40
    assert target.changed(b"short", 90, 1, lambda same, most: b"blind") == b"blind"


def traced(size: int) -> bytes:
    """Bytes whose memory is counted."""
    chance = random.Random(size)
    return next(
        data for data in iter(lambda: chance.randbytes(size), b"") if not zlib.crc32(data) % target.TRACED_SHARE
    )


def test_an_input_that_allocates_too_much_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    data = traced(40)
    target.examine_bounded(data)
    monkeypatch.setattr(target, "judged", lambda data: bytearray(allowed_bytes(data) + 1) and None)
    with pytest.raises(target.Unbounded, match="allocated"):
        target.examine_bounded(data)


def test_an_input_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([10.0, 11.5])
    monkeypatch.setattr(time, "thread_time", lambda: next(readings))
    with pytest.raises(target.Unbounded, match=r"took 1\.50 s"):
        target.examine_bounded(b"")


def test_without_atheris_it_says_so_and_fails_where_it_is_required() -> None:
    script = "import sys, runpy; sys.modules['atheris'] = None; runpy.run_module('tests.fuzz', run_name='__main__')"
    done = python("-c", script)
    assert (done.returncode, done.stdout) == (0, "")
    assert "SKIPPED, nothing was fuzzed: atheris is not installed" in done.stderr
    assert python("-c", script, TIMELINE_REQUIRE_SERVICES="all").returncode == 1


def test_a_machine_that_stood_still_is_no_finding(tmp_path: Path) -> None:
    for name, written, failed in (("timeout-sound", True, False), ("timeout-gone", False, True), ("oom-x", True, True)):
        kept = tmp_path / name
        if written:
            kept.write_bytes(good_frames()[0])
        (tmp_path / "Produce.log").write_text(f"#17 NEW cov: 9\nTest unit written to {kept}\n")
        catch = catch_of("Produce", 70, tmp_path)
        assert (catch.failed, catch.executions, catch.inputs) == (failed, 17, (kept,) if failed else ())


def test_one_input_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_bytes(good_frames()[0])
    done = python("-m", "tests.fuzz", "--input", str(file))
    assert (done.returncode, "Produce(" in done.stdout) == (0, True), done.stderr
    file.write_bytes(b"noise")
    assert python("-m", "tests.fuzz", "--input", str(file)).stdout == "refused\n"
