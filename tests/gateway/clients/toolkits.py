"""The generators and libraries of other languages, which scripts/services.sh puts into build/clients."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.services import CLIENTS

HERE = Path(__file__).parent
BUILT = CLIENTS


def run(folder: Path, *command: str | Path, said: str = "") -> str:
    """Run a command that must end well. Return what it printed. `said`: what it reads."""
    done = subprocess.run(list(map(str, command)), cwd=folder, input=said, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def go_module(folder: Path) -> Path:
    """Return a copy of our Go module, to generate into and to build."""
    return Path(shutil.copytree(HERE / "go", folder / "go"))


def typescript_package(folder: Path) -> Path:
    """Return a copy of our TypeScript package, with what it depends on."""
    copied = Path(shutil.copytree(HERE / "typescript", folder / "typescript"))
    (copied / "node_modules").symlink_to(BUILT / "typescript" / "node_modules")
    return copied
