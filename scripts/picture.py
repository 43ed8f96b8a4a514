"""Write docs/demo.svg: the demo's board as a terminal shows it, from a run of the demo while a gate is down.

Run it by hand after a change of the board. Use a quiet machine, because the picture shows its lateness.

    .venv/bin/python scripts/picture.py
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import sys
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import TerminalTheme

from timeline.demo.board import draw
from timeline.demo.conductor import DemoOptions, Viewer, conduct
from timeline.demo.flights import DEFAULT_DAY
from timeline.demo.picture import DayPicture
from timeline.demo.plan import DEFAULT_SPEED

OUT = Path(__file__).resolve().parent.parent / "docs" / "demo.svg"
COLUMNS, LINES = 120, 34
FROM_SHARE = 0.4
"""The picture shows the first crash after this share of the day's flights."""

THEME = TerminalTheme(
    (16, 18, 24),
    (216, 218, 224),
    [(40, 42, 54), (224, 82, 82), (76, 175, 80), (230, 180, 60), (80, 140, 220), (190, 110, 200), (70, 180, 190),
     (200, 202, 208)],
    [(98, 100, 112), (240, 100, 100), (110, 200, 110), (245, 205, 90), (110, 165, 240), (210, 140, 220),
     (110, 205, 215), (245, 246, 248)],
)  # fmt: skip

FONTS = 'ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre'
SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
SVG = re.sub(r"<!--.*?-->\s*", "", SVG).replace("Fira Code, monospace", FONTS)
SVG = SVG.replace('<g class="{unique_id}-matrix">', '<g class="{unique_id}-matrix" xml:space="preserve">')
"""Rich's frame without fonts from other hosts, so that the picture loads nothing."""


class Photographer(Viewer):
    """Take the picture at the first crash after `FROM_SHARE`, or the last one if there is no crash."""

    def __init__(self) -> None:
        self.svg = ""
        self._taken = False

    def say(self, text: str) -> None:
        print(text, file=sys.stderr)

    def watch(self, picture: DayPicture, now_ms: float) -> None:
        if self._taken:
            return
        far = picture.settled >= FROM_SHARE * len(picture.departures)
        down = any(not gate.up and gate.boarding for gate in picture.gates.values())
        if far:
            self.svg = drawn(picture, now_ms)
            self._taken = down


def drawn(picture: DayPicture, now_ms: float) -> str:
    """Return the board as SVG."""
    console = Console(
        record=True, width=COLUMNS, height=LINES, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(draw(picture, now_ms, (COLUMNS, LINES)), height=LINES)
    return console.export_svg(title="timeline demo", theme=THEME, code_format=SVG, unique_id="board")


def main() -> int:
    """Play a day and write the picture, unless the day failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", type=float, default=DEFAULT_SPEED)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    photographer = Photographer()
    played = asyncio.run(conduct(DemoOptions(day=DEFAULT_DAY, speed=asked.speed), photographer))
    if not played.summary.well or not photographer.svg:
        print(f"no picture: {played.summary.off or 'no moment to take it'}", file=sys.stderr)
        return 1
    asked.out.write_text("\n".join(line.rstrip() for line in photographer.svg.splitlines()) + "\n", encoding="utf-8")
    print(f"{asked.out}: lateness p50 {played.summary.lateness.p50:.1f}, p99 {played.summary.lateness.p99:.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
