"""gRPC's C library keeps its log lines to itself, unless a person asks for them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, timeline, grpc.aio

async def main():
    taken = grpc.aio.server()
    port = taken.add_insecure_port("127.0.0.1:0")
    await taken.start()
    try:
        grpc.aio.server(options=[("grpc.so_reuseport", 0)]).add_insecure_port(f"127.0.0.1:{port}")
    except RuntimeError:
        print("refused")
    await taken.stop(None)

asyncio.run(main())
"""


def _told(**environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={**inherited, **environment}
    )


@pytest.mark.slow
def test_grpc_is_silent_by_default_and_talks_when_asked() -> None:
    silent, asked = _told(), _told(GRPC_VERBOSITY="ERROR")
    assert (silent.stdout, silent.stderr) == ("refused\n", "")
    assert "refused" in asked.stdout and asked.stderr
