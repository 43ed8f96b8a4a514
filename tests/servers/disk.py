"""Where servers of tests keep their data: in memory, or on a small disk that fills up and grows."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services import require_service

_MEMORY = Path("/dev/shm")
_MEMORY_BYTES = 3 << 30


def in_memory() -> Path | None:
    """Return a folder in memory where there is enough of it: what a kill leaves does not depend on the disk."""
    return _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MEMORY_BYTES else None


@contextmanager
def server_folder() -> Iterator[Path]:
    """A folder for servers, in memory if possible. Other users may pass through it, which servers that refuse root
    need, and its name is short, as sockets in it need."""
    with tempfile.TemporaryDirectory(prefix="timeline-", dir=in_memory()) as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


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
