"""Print the files and functions of Timeline that one warm `await p.produce()` passes, and their number.

Run it as `python scripts/way.py`. The way leads from driver to memory store and back. Driver and broker run in one
process and in virtual time, over the simulation's network instead of gRPC. The first puts warm everything up; the next
is recorded. Background work, such as heartbeats, is not recorded: virtual time does not pass unless all tasks wait.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.simulation.test_cluster import Scene  # noqa: E402

PACKAGE = str(ROOT / "timeline") + "/"
WARM_PUTS = 20
NOTES = "history/"
"""The simulation records the calls of its store, which no broker does."""
GAUGES = str(ROOT / "tests" / "simulation" / "gauges.py")
"""The simulation looks how full everything is, which no broker does either."""
INNER = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")


async def passed(work: Callable[[], Awaitable[Any]]) -> dict[str, list[str]]:
    """Return the functions of Timeline that run until `work` is done, by file, in the order of their first call."""
    seen: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        by = frame.f_back
        if event == "call" and (by is None or by.f_code.co_filename != GAUGES):
            seen.setdefault(frame.f_code)

    sys.setprofile(note)
    try:
        await work()
    finally:
        sys.setprofile(None)
    found: dict[str, list[str]] = {}
    for code in seen:
        file = code.co_filename.removeprefix(PACKAGE)
        if code.co_filename.startswith(PACKAGE) and code.co_name not in INNER and not file.startswith(NOTES):
            found.setdefault(file, []).append(code.co_qualname)
    return found


def way() -> dict[str, list[str]]:
    """Return the files and functions of one warm put."""
    scene = Scene(brokers=1)

    async def play(scene: Scene) -> dict[str, list[str]]:
        async with scene.client("p", 1) as client:
            await client.create_topic("t")
            async with client.producer("t") as producer:
                for number in range(WARM_PUTS):
                    await producer.produce(b"x", in_="1h", id=f"warm{number}")
                return await passed(lambda: producer.produce(b"x", in_="1h", id="recorded"))

    return scene.play(play)


def counts(found: dict[str, list[str]]) -> tuple[int, int]:
    """Return how many files and functions there are."""
    return len(found), sum(map(len, found.values()))


def main() -> None:
    found = way()
    for file, functions in found.items():
        print(f"{file}\n    {', '.join(functions)}")
    print("{} files, {} functions".format(*counts(found)))


if __name__ == "__main__":
    main()
