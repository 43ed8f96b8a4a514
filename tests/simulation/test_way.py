"""How long the way of one put is: how many files and functions a reader passes. See `scripts/way.py`."""

from __future__ import annotations

from importlib import util
from pathlib import Path

MOST_FILES = 31
MOST_FUNCTIONS = 186
"""What it is; the goal is 25 and 120. Lower them as the way gets shorter."""


def test_a_put_passes_few_files_and_functions() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "way.py"
    spec = util.spec_from_file_location("way", script)
    assert spec is not None and spec.loader is not None
    way = util.module_from_spec(spec)
    spec.loader.exec_module(way)
    files, functions = way.counts(way.way())
    found = f"{files} files and {functions} functions: shorten the way, or raise the numbers above and say why"
    assert 10 < files <= MOST_FILES and 50 < functions <= MOST_FUNCTIONS, found
