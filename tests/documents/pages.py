"""The documents as tests read them: their blocks of code, and what a comment before a block says about it.

A comment of its own line directly above a block, `<!-- … -->`, may say:

- `runs until it prints TEXT`: the block takes deliveries for ever; once it has printed TEXT it is told to take no more.
- `for example`, of output: what one run printed, not held against another.
- `compiled only: WHY`, of Python; `not run: WHY`, of shell: read and checked, not executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = sorted(DOCS.glob("*.md"))
REFERENCE = DOCS / "reference"
NEEDLESS = {"text", "toctree", "mermaid"}
"""Languages of blocks that are nothing to run: output, and what the generator itself checks."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<said>[^\n]*?) -->\n)?^```\{?(?P<language>[\w-]*)\}?[^\n]*\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code. `line`: of its first line in the page. `said`: its comment, empty without one."""

    page: Path
    line: int
    language: str
    body: str
    said: str

    @property
    def until(self) -> str | None:
        """The text after whose printing the block is told to stop."""
        return (
            self.said.removeprefix("runs until it prints ") if self.said.startswith("runs until it prints ") else None
        )

    @property
    def runs(self) -> bool:
        """Whether the block is to be executed."""
        return not self.said.startswith(("compiled only: ", "not run: "))

    @property
    def place(self) -> str:
        """Where it stands: page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of `page`, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: found.start("body")].count("\n") + 1, found["language"], found["body"], found["said"] or "")
        for found in _BLOCK.finditer(text)
    ]


def table_names(page: Path, column: int = 0) -> set[str]:
    """What stands in backticks in a column of the tables of `page`."""
    names: set[str] = set()
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            cells = line.strip("|").split("|")
            if column < len(cells):
                names |= set(re.findall(r"`([^`]+)`", cells[column]))
    return names


def first_words(page: Path) -> set[str]:
    """The first cell of each row of the tables of `page`, as it stands."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return {line.strip("|").split("|")[0].strip() for line in lines if line.startswith("| ")}
