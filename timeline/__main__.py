"""`timeline` and `python -m timeline`: the command line, or what to install for it."""

from __future__ import annotations

import sys

NEEDED = ("click", "rich")


INTERRUPTED = 130


def main() -> int:
    """Runs the command line; its exit code, 130 after Ctrl-C. Without click or rich, 2 and a sentence that
    says which extra has them."""
    try:
        return _main()
    except KeyboardInterrupt:  # while the first modules are imported
        print("\ntimeline: interrupted", file=sys.stderr)
        return INTERRUPTED


def _main() -> int:
    try:
        from timeline.cli.app import run
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] not in NEEDED:
            raise
        print(
            f"timeline: the command line needs {missing.name}, which is not installed; "
            "pip install 'timeline[cli]' for the client commands, 'timeline[server]' to serve and for the demo",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
