"""`timeline produce --lines` that breaks off: what is stored, what is not, and what may be."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.cli.conftest import start


@pytest.mark.processes
def test_lines_that_nobody_answered_for(tmp_path: Path) -> None:
    """Their ids are made anew when they are given again: what is to be known is which of them to look for."""
    broker = start(
        "serve", "--listen", "127.0.0.1:0", "--metrics", "off", "--json", "--store", "memory://", cwd=tmp_path
    )
    try:
        assert broker.stdout is not None
        address = json.loads(broker.stdout.readline())["listen"]
        start("topic", "create", "t", address=address).communicate(timeout=30)
        options = ("--lines", "--in", "1h", "--tag", "x y", "--json", "--timeout", "3s")
        putting = start("produce", "t", *options, address=address)
        assert putting.stdin is not None and putting.stdout is not None
        putting.stdin.write(b"a\nb\n")
        putting.stdin.flush()
        assert all(b'"OK"' in putting.stdout.readline() for _ in range(2))
        broker.send_signal(signal.SIGSTOP)  # from here on it takes what is sent, and says nothing
        _, errors = putting.communicate(b"c\nd\ne\n", timeout=30)
    finally:
        broker.kill()
        broker.communicate()
    first, second = errors.decode().splitlines()
    assert putting.returncode == 3
    assert first == "timeline: broke off after 2 lines, of which 2 are known to be stored"
    assert second.startswith("timeline: UNKNOWN: ") and "same id" not in second
    assert "lines 3 to 5 are in doubt" in second and "no line after 5 was sent" in second
    assert second.endswith(": timeline ls t --tag 'x y' --all --payload")
