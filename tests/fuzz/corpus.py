"""The corpus that tests replay: inputs that long hunts found, each with a step through the decoder of its own.

`python -m tests.fuzz.corpus .fuzz/corpus` picks it again.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tests.wire.examination import judged

CORPUS = Path(__file__).with_name("corpus.txt.gz")
"""One input per line, as hexadecimal digits."""
DECODER = "/timeline/wire/"


def inputs() -> Iterator[bytes]:
    """Yield the inputs of the corpus."""
    with gzip.open(CORPUS, "rt", encoding="ascii") as lines:
        for line in lines:
            yield bytes.fromhex(line)


def edges_of(data: bytes) -> set[tuple[object, int, int]]:
    """Return the steps from line to line that the decoder takes with `data`."""
    edges: set[tuple[object, int, int]] = set()
    last: dict[int, int] = {}

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        before = last.get(id(frame), 0) if event == "line" else -1
        edges.add((frame.f_code, before, frame.f_lineno))
        last[id(frame)] = frame.f_lineno
        return step

    sys.settrace(lambda frame, event, argument: step if DECODER in frame.f_code.co_filename else None)
    try:
        judged(data)
    finally:
        sys.settrace(None)
    return edges


def pick(folder: Path) -> list[bytes]:
    """Return the inputs in `folder` that add a step to those before them. It has a folder for each kind of frame."""
    picked = []
    for kind in sorted(folder.iterdir()):
        seen: set[tuple[object, int, int]] = set()
        for data in sorted((file.read_bytes() for file in kind.iterdir()), key=lambda data: (len(data), data)):
            edges = edges_of(data)
            if not edges <= seen:
                seen |= edges
                picked.append(data)
    return picked


if __name__ == "__main__":
    text = "".join(data.hex() + "\n" for data in pick(Path(sys.argv[1])))
    CORPUS.write_bytes(gzip.compress(text.encode("ascii"), mtime=0))
