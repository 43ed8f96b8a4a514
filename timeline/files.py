"""Files: read whole up to a bound or refused with a reason, written whole or not at all, and compared with before."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from timeline.errors import Invalid

T = TypeVar("T")


def read_file(file: str | Path, what: str, most_bytes: int, once: bool = False) -> bytes:
    """Return the content of `file`. `once`: it is not read again, so that a pipe is allowed, and waited for. Raise
    Invalid, which names `what` the file is, when it cannot be read or is larger."""
    content, _ = read_with_mode(file, what, most_bytes, once)
    return content


def read_with_mode(file: str | Path, what: str, most_bytes: int, once: bool = False) -> tuple[bytes, int]:
    """Return the content, and the mode (`st_mode`) of the very file that was read. Raise Invalid."""
    about = f"the {what} {str(file)!r:.200}"
    try:
        with open(file, "rb", opener=None if once else _at_once) as opened:
            mode = os.fstat(opened.fileno()).st_mode
            plain = once or stat.S_ISREG(mode)
            content = opened.read(most_bytes + 1) if plain else b""
    except OSError as cannot:
        raise Invalid(f"{about} cannot be read: {cannot.strerror}") from cannot
    except ValueError as cannot:
        raise Invalid(f"{about} cannot be read: no file has such a name") from cannot
    if not plain:
        raise Invalid(f"{about} must be a plain file: it is read more than once, which a pipe or device is not")
    if len(content) > most_bytes:
        raise Invalid(f"{about} has more than {most_bytes} bytes")
    return content, mode


def _at_once(file: str, flags: int) -> int:
    """Open without waiting: a pipe without a writer would hold up a broker that reads its files again."""
    return os.open(file, flags | os.O_NONBLOCK)


def stamp_of(file: str | Path) -> object:
    """Return a value that changes when the file does; None while there is none."""
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_ino, found.st_dev, found.st_size


class Reloaded(Generic[T]):
    """The contents of `files`, which `load` reads. `look` reads them again when they change. Invalid files are logged
    once to `log`, as `what`, and ignored. Raise what `load` raises the first time."""

    def __init__(self, what: str, files: Sequence[str | Path], load: Callable[[], T], log: logging.Logger) -> None:
        self._what, self._files, self._load, self._log = what, files, load, log
        self._stamps = self._stamped()
        self._bad: object = None
        """The stamps of files that could not be used."""
        self.value = load()
        self._trouble = ""

    def _stamped(self) -> object:
        return tuple(stamp_of(file) for file in self._files)

    def look(self) -> bool:
        """Read the files if they have changed. Return whether `value` is new."""
        stamps = self._stamped()
        if stamps in (self._stamps, self._bad):
            return False
        try:
            value = self._load()
        except Invalid as bad:
            if self._stamped() == stamps:
                self._bad = stamps
            if bad.reason != self._trouble:
                self._log.error("%s: %s", self._what, bad.reason)
            self._trouble = bad.reason
            return False
        if self._stamped() != stamps:
            return False  # being replaced at this moment
        self.value, self._stamps, self._trouble = value, stamps, ""
        return True


def write_whole(file: str, content: bytes | memoryview) -> None:
    """Write `file` whole or not at all. It is on disk when this returns. A missing folder is made. Raise OSError."""
    folder, name = os.path.split(file)
    os.makedirs(folder, exist_ok=True)
    part = os.path.join(folder, f"_{name}.{os.urandom(4).hex()}.part")
    try:
        with open(part, "wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(part, file)
    except OSError:
        with contextlib.suppress(OSError):  # what is half written would keep a full disk full
            os.remove(part)
        raise


def no_filesystem(url: str, cannot: Exception) -> str:
    """Return why fsspec has no filesystem for `url`, and what it may be. `cannot`: its error. Of the URL only the
    scheme is repeated: the rest may hold a password."""
    scheme = url.partition("://")[0]
    if isinstance(cannot, ImportError):
        return f"{scheme}:// needs a package that is not installed: {cannot}"
    return (
        f"no files can be kept at {scheme}://. Give a folder, such as file:///var/lib/timeline/files, or an object "
        "store, such as s3://bucket/folder"
    )
