"""A driver-only install: gRPC, numpy, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NEEDED = ("grpcio", "numpy")

USER = """
import asyncio, pathlib, sys, sysconfig, timeline

async def main():
    async with timeline.connect(sys.argv[1], timeout="20s") as tl:
        await tl.create_topic("t", lease="30s")
        async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
            await p.produce(b"hello", in_="1ms", id="m")
            async for d in c:
                assert d.payload == b"hello"
                await d.ack()
                break
        await tl.schedule("t", "hourly", every="1h", paused=True)
        hourly = await tl.get_schedule("t", "hourly")
        await hourly.resume()
        await hourly.refresh()
        assert len(hourly.next(3)) == 3
        await hourly.delete()

asyncio.run(main())
with timeline.connect_sync(sys.argv[1], timeout="20s") as tl:
    assert list(tl.scan("t")) == []
site = pathlib.Path(sysconfig.get_paths()["purelib"])
assert site in pathlib.Path(timeline.__file__).parents, timeline.__file__
used = set()
for module in list(sys.modules.values()):
    where = getattr(module, "__file__", None)
    if where and site in pathlib.Path(where).parents:
        used.add(pathlib.Path(where).relative_to(site).parts[0].partition(".")[0])
print(" ".join(sorted(used)))
"""


def _run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in NEEDED]


@pytest.mark.prove
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_driver_only_install_goes_round_with_two_packages(served: str, tmp_path: Path) -> None:
    pins = _pins()
    assert len(pins) == len(NEEDED)
    wheels, home = tmp_path / "wheels", tmp_path / "empty"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    _run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheels, ".")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (wheel,) = wheels.glob("timeline_scheduler-*.whl")
    _run(*pip, "--python", python, "install", "--no-deps", wheel)
    _run(*pip, "--python", python, "install", "-c", ROOT / "constraints.txt", *pins)
    _run(*pip, "--python", python, "check")
    used = _run(python, "-I", "-c", USER, served, cwd=tmp_path).split()
    # typing_extensions is what grpcio itself requires.
    assert {"timeline", "grpc", "numpy"} <= set(used) <= {"timeline", "grpc", "numpy", "typing_extensions"}
