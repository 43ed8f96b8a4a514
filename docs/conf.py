"""Build the documentation site: `make docs`, from the repository's root. Warnings are errors.

The root is Sphinx's source folder. So links between README, these pages, the design documents and the examples are the
paths that work in the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

import timeline

ROOT = Path(__file__).resolve().parent.parent

project = "Timeline"
copyright = "the Timeline maintainers; Apache-2.0"
version = release = timeline.__version__

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = [
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**", "design-docs/**", "examples/README.md",
]  # fmt: skip
exclude_patterns = [".venv", ".git", ".fuzz", "build", "dist", "tests", "timeline", "**/__pycache__"]

suppress_warnings = ["myst.header"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = f"Timeline {release}"
html_baseurl = ""
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def links_to_folders(app: Sphinx, docname: str, source: list[str]) -> None:
    """A link to a folder of the repository leads somewhere in the repository only: here its text stays."""
    here = (ROOT / docname).parent

    def plain(link: re.Match[str]) -> str:
        return link[1] if (here / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]\n]*)\]\(([^)#:\s]+)\)", plain, source[0])


def front_door(app: Sphinx, error: Exception | None) -> None:
    """build/docs/index.html leads to the first page."""
    if error is None and app.builder.format == "html":
        door = Path(app.outdir) / "index.html"
        door.write_text('<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n', "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx, which calls this first."""
    app.connect("source-read", links_to_folders)
    app.connect("build-finished", front_door)
    app.add_lexer("mermaid", TextLexer)  # a picture on code hosts, its text here
    return {"parallel_read_safe": True, "parallel_write_safe": True}
