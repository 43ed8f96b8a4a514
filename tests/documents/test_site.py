"""The documentation site is built from these documents and the docstrings, as `make docs` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.pages import PAGES, REFERENCE, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    command = "-m sphinx -q -n -W --keep-going -c docs -d {} . {}"
    assert command.format("build/doctrees", "build/docs") in recipe
    done = subprocess.run(
        [sys.executable, *command.format(folder / "doctrees", folder / "html").split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_the_site_has_every_page_and_a_front_door(site: Path) -> None:
    pages = [*PAGES, *REFERENCE.glob("*.md"), ROOT / "README.md"]
    assert not [page for page in pages if not (site / page.relative_to(ROOT).with_suffix(".html")).is_file()]
    assert "docs/index.html" in (site / "index.html").read_text(encoding="utf-8")
