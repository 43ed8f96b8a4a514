"""Check that every relative link in Markdown leads to a file, and to a heading if it names one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def documents() -> list[Path]:
    """Return every Markdown file that is in the repository, or would be added to it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return sorted(ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def anchors(text: str) -> set[str]:
    """Return the fragments of a Markdown text's headings, as code hosts make them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        slug = plain.replace(" ", "-")
        number = 0
        unique = slug
        while unique in found:
            number += 1
            unique = f"{slug}-{number}"
        found.add(unique)
    return found


def broken_links(document: Path) -> list[str]:
    """Return a sentence per broken link of `document`. Links with a scheme are not followed."""
    text = _CODE.sub("", _FENCE.sub("", document.read_text(encoding="utf-8")))
    problems = []
    for target in _LINK.findall(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, fragment = target.partition("#")
        where = document if not path else (document.parent / path).resolve()
        if not where.exists():
            problems.append(f"{document.relative_to(ROOT)}: {target}: there is no such file")
        elif fragment and where.suffix == ".md" and fragment not in anchors(where.read_text(encoding="utf-8")):
            problems.append(f"{document.relative_to(ROOT)}: {target}: there is no such heading")
    return problems


def main() -> int:
    checked = documents()
    problems = [problem for document in checked for problem in broken_links(document)]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(checked)} documents, {len(problems)} broken links")
    return 1 if problems or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
