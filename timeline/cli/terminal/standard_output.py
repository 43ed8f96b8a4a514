"""Standard output, told apart from all other files when it cannot be written: an OSError does not say whether a disk is
full that the command works on, or the one that its report goes to, for which much may have been done already."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard


class Unwritten(OSError):
    """Standard output could not be written."""


class _Named(io.FileIO):
    """A file whose failures say that it was this one. That nobody reads any more (`| head`) is told as ever."""

    def write(self, data: Any, /) -> int:
        try:
            written = super().write(data)
        except BrokenPipeError:
            raise
        except OSError as cannot:
            raise Unwritten(cannot.errno, cannot.strerror) from cannot
        if written is None:  # a pipe that does not wait, and is full
            raise Unwritten(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return written


@contextmanager
def told_apart() -> Iterator[None]:
    """Within it, standard output raises Unwritten where it cannot be written, at its end for what is left."""
    plain = sys.stdout
    if not _is_a_file(plain):  # what took its place is for whoever put it there
        yield
        return
    sys.stdout = named = _named(plain)
    try:
        yield
        named.flush()
    except Unwritten:
        # What is left in it goes nowhere: Python would try once more as it ends, and complain in words of its own.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, named.fileno())
        os.close(null)
        raise
    finally:
        if sys.stdout is named:  # else click has put one there that forgives a pipe that nobody reads
            sys.stdout = plain


def _is_a_file(stream: object) -> TypeGuard[io.TextIOWrapper]:
    """Whether it is as Python begins with it: text over bytes over a file, or, unbuffered, over the file itself."""
    if type(stream) is not io.TextIOWrapper:
        return False
    return isinstance(getattr(stream.buffer, "raw", stream.buffer), io.FileIO)


def _named(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same output, with a lowest layer that is ours: whoever goes past the others (`buffer`) meets it as well."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Named(stream.fileno(), "w", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )
