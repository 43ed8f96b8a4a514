"""How the documentation site is built: `make docs`, from the repository's root, warnings being errors.

The root is Sphinx's source folder, so that README, the pages here, the design documents and the examples link to each
other by the very paths that work in the repository. `{help}` blocks show what a command's `--help` says.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ["COLUMNS"] = "110"

import click  # noqa: E402
from docutils import nodes  # noqa: E402
from pygments.lexers.special import TextLexer  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402
from sphinx.util.docutils import SphinxDirective  # noqa: E402

import timeline  # noqa: E402
from timeline.cli.app import cli  # noqa: E402

project = "Timeline"
copyright = "the Timeline maintainers; Apache-2.0"
try:
    release = installed_version("timeline")
except PackageNotFoundError:
    release = "0"
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = [
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**", "design-docs/**", "examples/README.md",
]  # fmt: skip
exclude_patterns = [".venv", ".git", ".fuzz", "build", "dist", "tests", "timeline", "**/__pycache__"]

nitpicky = True
# What stands in signatures and is documented elsewhere: Python's own, numpy's, inner names that only hints say.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(bytes|bytearray|memoryview|datetime|date|time|timedelta|zoneinfo|ZoneInfo|collections|contextlib|asyncio)(\..*)?",
    ),
    ("py:.*", r"(np|npt|numpy|typing|Self|Any|TypeAlias|Indexes|Int64|UInt8|UInt32|Bools)(\..*)?"),
    ("py:.*", r"(enum|IntEnum|StrEnum|T|Callable|Link|Load|Run|Background|Closing)(\..*)?"),
    ("py:.*", r"timeline\.(clock|wire|columns|driver)\..*"),
    ("py:.*", r"optional|ScanPage|Rows|Answers|Clock|Randomness|os.PathLike|TransportFactory|Protocol"),
]
suppress_warnings = ["myst.header"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
python_display_short_literal_types = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"Timeline {release}"
html_baseurl = ""
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}


def publicly(app: Sphinx, env: Any, node: Any, text: nodes.TextElement) -> nodes.Element | None:
    """Signatures name a class by where it lives; it is documented by its public name, `timeline.Name`."""
    target = node.get("reftarget", "")
    name = target.rpartition(".")[2]
    if node.get("refdomain") != "py" or not target.startswith("timeline.") or name not in timeline.__all__:
        return None
    found: nodes.Element | None = env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, "obj", f"timeline.{name}", node, text
    )
    return found


def examples_as_code(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Indented blocks of docstrings are Python, as everywhere here; reStructuredText wants to be told."""
    told: list[str] = []
    in_code = False
    for at, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and not in_code and (at == 0 or not lines[at - 1].strip()):
            told += [".. code-block:: python", ""]
            in_code = True
        elif line.strip() and not indented:
            in_code = False
        told.append(line)
    lines[:] = told


def links_to_folders(app: Sphinx, docname: str, source: list[str]) -> None:
    """A link to a folder of the repository leads somewhere in the repository only: here its text stays."""
    here = (ROOT / docname).parent

    def plain(link: re.Match[str]) -> str:
        return link[1] if (here / link[2]).is_dir() else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]\n]*)\]\(([^)#:\s]+)\)", plain, source[0])


class Help(SphinxDirective):
    """A block of one line, `timeline … --help`: shows what that prints."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        words = " ".join(self.content).split()
        if words[:1] != ["timeline"] or words[-1:] != ["--help"]:
            raise self.error(f"a help block says 'timeline COMMAND --help', not {' '.join(words)!r}")
        text = help_of(words[1:-1])
        block = nodes.literal_block(text, text, language="text")
        return [block]


def help_of(words: list[str]) -> str:
    """What `timeline WORDS --help` prints."""
    command: click.Command = cli
    context = click.Context(cli, info_name="timeline", max_content_width=110, terminal_width=110)
    for word in words:
        assert isinstance(command, click.Group), f"{command.name} has no commands"
        found = command.get_command(context, word)
        assert found is not None, f"there is no command {word}"
        command = found
        context = click.Context(command, info_name=word, parent=context, max_content_width=110, terminal_width=110)
    return command.get_help(context)


def front_door(app: Sphinx, error: Exception | None) -> None:
    """build/docs/index.html leads to the first page."""
    if error is None and app.builder.format == "html":
        door = Path(app.outdir) / "index.html"
        door.write_text('<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n', "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """What Sphinx calls first."""
    app.connect("missing-reference", publicly)
    app.connect("autodoc-process-docstring", examples_as_code)
    app.connect("source-read", links_to_folders)
    app.connect("build-finished", front_door)
    app.add_lexer("mermaid", TextLexer)  # a picture on code hosts, its text here
    app.add_directive("help", Help)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
