"""The program of minor version 2, from this repository's own history, as driver and as broker of today's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from timeline.child import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
OLDER = "fc6451269f578400477153b2697aab0d611c74ad"
"""The last commit before minor version 3, which has single calls for put, take and settle."""
DRIVE = """
import asyncio, sys, timeline

async def main():
    async with timeline.connect(sys.argv[1], timeout="20s") as tl:
        await tl.create_topic("t")
        async with tl.producer("t") as producer:
            for id in ("moved", "cancelled", "kept", "dead"):
                await producer.produce(id.encode(), in_="1h", id=id)
            await producer.move("moved", in_=0)
            await producer.cancel("cancelled")
            async with tl.consumer("t") as consumer:
                async for d in consumer:
                    assert d.payload == d.id.encode()
                    if d.id == "dead":
                        await d.bury("no such address")
                        break
                    await d.extend("5m")
                    await d.ack()
                    await producer.move("dead", in_=0)
        print([one.id async for one in tl.dead("t")], [one.id async for one in tl.scan("t")])

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the older program."""
    folder: Path = tmp_path_factory.mktemp("older")
    packed = subprocess.run(["git", "archive", OLDER, "timeline"], cwd=ROOT, capture_output=True)
    if packed.returncode:
        pytest.skip("this copy of the repository has no history")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    assert "MINOR = 2\n" in (folder / "timeline" / "wire" / "frames.py").read_text()
    return folder


def environment(program: Path) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TIMELINE_STORE"} | {
        "PYTHONPATH": str(program)
    }


@pytest.fixture
def address(request: pytest.FixtureRequest, older: Path, tmp_path: Path) -> Iterator[str]:
    """A broker of the program that the test asks for."""
    program, more = (older, ()) if request.param == "older" else (ROOT, ("--http", "off"))
    (port,) = free_ports(1)
    broker = subprocess.Popen(
        [sys.executable, "-m", "timeline", "serve", "--listen", f"127.0.0.1:{port}", "--metrics", "off",
         "--store", "memory://", *more],
        cwd=tmp_path, env=environment(program), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert broker.stdout is not None and f"127.0.0.1:{port}" in broker.stdout.readline()
        yield f"127.0.0.1:{port}"
    finally:
        broker.terminate()
        broker.wait()


@pytest.mark.parametrize(("address", "driver"), [("older", "today's"), ("today's", "older")], indirect=["address"])
def test_driver_and_broker_of_two_versions_understand_each_other(
    address: str, driver: str, older: Path, tmp_path: Path
) -> None:
    program = older if driver == "older" else ROOT
    done = subprocess.run(
        [sys.executable, "-c", DRIVE, address],
        cwd=tmp_path, env=environment(program), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "['dead'] ['kept']\n"), done.stderr
