"""`timeline` and `python -m timeline`: the command line, or what to install for it."""

from __future__ import annotations

import io
import os
import sys
import traceback
from types import TracebackType

NEEDED = ("click", "rich")


INTERRUPTED = 130


def main() -> int:
    """Run the command line and return its exit code: 130 after Ctrl-C. Without click or rich, print which extra has
    them, and return 2."""
    _open_standard_streams()
    sys.excepthook = _show
    try:
        return _main()
    except KeyboardInterrupt:  # while the first modules are imported
        print("\ntimeline: interrupted before it began: nothing was done", file=sys.stderr)
        return INTERRUPTED


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback, printable: an error may repeat what somebody else wrote."""
    from timeline.wording import printable

    for line in "".join(traceback.format_exception(kind, error, trace)).splitlines():
        print(printable(line), file=sys.stderr)


def _open_standard_streams() -> None:
    """Replace closed standard streams (`<&-`) by the null device. Otherwise the next file or connection would get the
    number, and texts for standard error. sys.stdin stays None, as Python has it. Standard output escapes characters
    that the terminal's encoding lacks, as standard error does: ids of other people are in any script."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if number and getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _main() -> int:
    try:
        from timeline.cli.app import run
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in NEEDED:
            raise
        from timeline.wording import install_command

        print(
            f"timeline: the command line needs {missing.name}, which is not installed; "
            f"{install_command('cli')} for the client commands, {install_command('server')} to serve and for the demo",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
