"""A hunt: each kind of frame is fuzzed for its share of the time, a few kinds at once, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fuzz import target
from tests.wire.mutants import good_frames
from timeline.wire.generated import layout
from timeline.wire.verify import find_body

KINDS: tuple[str, ...] = tuple(layout.BODIES.values())
GOLDEN = sorted((Path(__file__).parent.parent / "wire").glob("golden_*.txt"))
HANG_S = 20
"""libFuzzer ends a process whose input takes as long; what only takes too much processor time is told by the target."""
RSS_MB = 2_048
SHOWN_LINES = 25


@dataclass(frozen=True, slots=True)
class Catch:
    """What fuzzing one kind came to. `inputs`: files that fail."""

    kind: str
    executions: int
    coverage: int
    failed: bool
    inputs: tuple[Path, ...]
    said: str

    def __str__(self) -> str:
        told = f"{self.kind:12} {self.executions:>10,} inputs, coverage {self.coverage}"
        return f"{told}: {'FAILED' if self.failed else 'ok'}"


def seeds_of(kind: str) -> list[bytes]:
    """Good frames of a kind: the golden ones, and the samples of today."""
    golden = [line.split() for file in GOLDEN for line in file.read_text(encoding="utf-8").splitlines()]
    frames = [bytes.fromhex(data) for name, data in golden if name == kind]
    return [*dict.fromkeys([*frames, *(data for data in good_frames() if find_body(data).name == kind)])]


def hunt(atheris: Any, kinds: Sequence[str], seconds: int, workers: int, folder: Path) -> list[Catch]:
    """Fuzzes `kinds` for `seconds` in all, `workers` at once, and tells each catch as it comes. `folder` keeps inputs
    that reach something new, for the next hunt, and inputs that fail."""
    each_s = max(1, seconds * workers // len(kinds))
    waiting, running, catches = deque(kinds), dict[int, str](), list[Catch]()
    while waiting or running:
        while waiting and len(running) < workers:
            kind = waiting.popleft()
            running[_start(atheris, kind, each_s, folder)] = kind
        ended, status = os.wait()
        catches.append(catch_of(running.pop(ended), os.waitstatus_to_exitcode(status), folder))
        print(catches[-1], flush=True)
    return catches


def _start(atheris: Any, kind: str, seconds: int, folder: Path) -> int:
    """A process that fuzzes `kind`; its id. Forked, for what is instrumented once serves all."""
    corpus, seeds, failing = (folder / what / kind for what in ("corpus", "seeds", "failing"))
    for each in (corpus, seeds, failing):
        each.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(seeds_of(kind)):
        (seeds / str(number)).write_bytes(data)
    arguments = [
        "fuzz",
        f"-max_total_time={seconds}",
        f"-timeout={HANG_S}",
        f"-rss_limit_mb={RSS_MB}",
        f"-artifact_prefix={failing}{os.sep}",
        "-print_final_stats=1",
        str(corpus),
        str(seeds),
    ]
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    try:
        log = os.open(_log(kind, folder), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        target.fuzz(atheris, arguments, failing)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # libFuzzer exits by itself: only trouble before it leads here


def _log(kind: str, folder: Path) -> Path:
    return folder / f"{kind}.log"


def catch_of(kind: str, code: int, folder: Path) -> Catch:
    """What a process that fuzzed `kind` and ended with `code` came to, by its log."""
    said = _log(kind, folder).read_text(encoding="utf-8", errors="replace")
    executions = re.findall(r"^#(\d+)\b|^stat::number_of_executed_units: (\d+)", said, re.MULTILINE)
    coverage = re.findall(r"\bcov: (\d+)", said)
    inputs = tuple(Path(name) for name in re.findall(r"Test unit written to (\S+)", said))
    if code and inputs and all(map(_was_paused, inputs)):
        code, inputs = 0, ()
    shown = "" if not code else "\n".join(said.splitlines()[-SHOWN_LINES:])
    return Catch(
        kind,
        max((int(running or whole) for running, whole in executions), default=0),
        int(coverage[-1]) if coverage else 0,
        code != 0 or not executions,
        inputs,
        shown,
    )


def _was_paused(path: Path) -> bool:
    """Whether an input that libFuzzer's clock found too slow is none: a machine that stood still looks the same, but
    then the input, tried alone, costs little processor time."""
    if not path.name.startswith("timeout-"):
        return False
    try:
        tried = subprocess.run([sys.executable, "-m", "tests.fuzz", "--input", path], capture_output=True, timeout=60)
    except subprocess.TimeoutExpired:
        return False
    return tried.returncode == 0
