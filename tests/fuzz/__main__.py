"""`python -m tests.fuzz --seconds 3600`: fuzzes the decoder with atheris, every kind of frame for its share of the
time, and exits 1 when an input crashed it, hung it, or came out as values out of range. `--input FILE` tries one input
again."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import sys
from pathlib import Path

from tests import services


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=3_600, help="how long in all (at least 1 for each kind)")
    parser.add_argument("--kind", action="append", help="a kind of frame, such as Produce, or several; default: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="how many processes at once")
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"), help="keeps the corpus and what fails")
    parser.add_argument("--input", type=Path, help="tries this one input and says what comes of it")
    asked = parser.parse_args()
    if asked.input is not None:
        return _try(asked.input)
    missing = services.why_missing("atheris")
    if missing is not None:
        print(f"fuzz: SKIPPED, nothing was fuzzed: {missing}", file=sys.stderr)
        return 1 if "atheris" in services.required(os.environ.get(services.VARIABLE)) else 0
    atheris = importlib.import_module("atheris")
    # What is imported in here is instrumented: it tells libFuzzer which ways an input took.
    quiet = contextlib.redirect_stderr(io.StringIO())  # atheris names every module
    with quiet, atheris.instrument_imports(include=["timeline"], enable_loader_override=False):
        hunting = importlib.import_module("tests.fuzz.hunt")
    unknown = [kind for kind in asked.kind or () if kind not in hunting.KINDS]
    if unknown:
        parser.error(f"no kind of frame: {', '.join(unknown)}; there are {', '.join(hunting.KINDS)}")
    catches = hunting.hunt(atheris, asked.kind or hunting.KINDS, asked.seconds, max(1, asked.workers), asked.folder)
    print(f"{sum(catch.executions for catch in catches):,} inputs in all")
    failed = [catch for catch in catches if catch.failed]
    for catch in failed:
        print(f"\n{catch.kind}:\n{catch.said}")
        for path in catch.inputs:
            print(f"input: {path.read_bytes().hex()}\nagain: python -m tests.fuzz --input {path}")
    return 1 if failed else 0


def _try(path: Path) -> int:
    from tests.fuzz.target import examine_bounded
    from tests.wire.examination import judged

    data = path.read_bytes()
    print(judged(data) or "refused")
    examine_bounded(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
