"""The demo's broker: `timeline serve`, which drains and ends when the conductor is gone (its standard input ends)."""

from __future__ import annotations

import os
import runpy
import signal
import threading

STDIN = 0


def _end_with_the_conductor() -> None:
    # Not through sys.stdin: its lock, held here, would hinder the interpreter's end.
    while os.read(STDIN, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_conductor, daemon=True).start()
    runpy.run_module("timeline", run_name="__main__")
