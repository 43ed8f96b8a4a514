"""A small disk of a test's own, that fills up and grows."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services import require_service


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A folder, made here, that holds no more than `size` (`8m`). Whoever still has a file of it open does not keep
    it: it is gone once he is."""
    require_service("tmpfs")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0755", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        folder.rmdir()


def remount(disk: Path, option: str) -> None:
    """Changes a small disk while it is used: `size=64m` gives it room, `ro` lets nobody write."""
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)
