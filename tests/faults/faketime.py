"""A wall clock of its own for a process under test, by libfaketime: what a file says, at once, the monotonic clock left
alone."""

from __future__ import annotations

import os
from pathlib import Path

LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
"""Debian's, made for processes with threads."""


class WallClock:
    """What the process takes for the wall clock: `set("+3600")` an hour ahead of true time, `set("+0 x1.01")` one that
    goes fast by a hundredth since the process began."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "faketime"
        self.set("+0")

    def set(self, text: str) -> None:
        """From the next look on. Put in place as a whole: no look sees half of it."""
        written = self._file.with_suffix(".new")
        written.write_text(text + "\n", encoding="ascii")
        written.replace(self._file)

    @property
    def environment(self) -> dict[str, str]:
        """What the process is to be started with."""
        assert LIBRARY is not None
        return {
            **os.environ,
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
