"""Write docs/reference/api.md and commands.md from docstrings and from the commands' own help.

`make docs` runs it. A test compares the pages with the code.
"""

from __future__ import annotations

import enum
import inspect
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
os.environ["COLUMNS"] = "100"

import click  # noqa: E402

import timeline  # noqa: E402
from timeline.cli.app import COMMANDS, EXIT_CODES, SETTINGS, cli  # noqa: E402
from timeline.cli.options import connection_page  # noqa: E402
from timeline.columns import Ragged  # noqa: E402
from timeline.driver.consume.in_flight import Stats  # noqa: E402
from timeline.driver.consumer import OF_USERS  # noqa: E402
from timeline.driver.delivery import LeaseHolder  # noqa: E402
from timeline.driver.message import Headers  # noqa: E402
from timeline.driver.queries import OutlookStep, PingAnswer  # noqa: E402

FOLDER = ROOT / "docs" / "reference"
WIDTH = 100
WRITTEN = "<!-- Written by scripts/reference_pages.py: change the docstrings or the commands instead. -->\n"


@dataclass(frozen=True)
class Part:
    """A heading, a sentence, and what stands below it. `only`: the members to show of a class, all without it."""

    title: str
    says: str
    names: tuple[Any, ...]


API_HEAD = """# Python API

Everything that a program needs is in the package `timeline`. Do not import from its sub-packages. The asynchronous and
the synchronous client have the same methods: `await` those of the first, and leave out `await` with the second.

| type in signatures | accepts |
|---|---|
| `When` | An aware datetime, or an integer of *milliseconds* since 1970 UTC. |
| `Duration` | A `timedelta`, a number of *seconds*, or text: `"250ms"`, `"30s"`, `"15m"`, `"2h"`, `"10d"`, `"1h30m"`. |
| `Expiry` | A `When`; or a `timedelta` or a text, counted from now. A number of seconds is refused. |
| `Texts` | One text, or several. |
| `Handler` | An async function of a `Delivery`, or a plain one of a `SyncDelivery`, run in a thread. |

Parts of a millisecond round up, so that no message is early. A time in the past means now. Naive datetimes, seconds
instead of milliseconds, and times before 1970 are refused. `timeline.__version__` is the version of the package."""

ERRORS = sorted(
    (kind for kind in vars(timeline).values() if isinstance(kind, type) and issubclass(kind, timeline.TimelineError)),
    key=lambda kind: (kind is not timeline.TimelineError, kind.__name__),
)
PARTS = (
    Part("Connect", "", (timeline.connect, timeline.connect_sync)),
    Part("Client", "", (timeline.Timeline,)),
    Part(
        "Produce",
        "",
        (
            timeline.Producer,
            timeline.Message,
            timeline.Batch,
            timeline.Receipt,
            timeline.Receipts,
            timeline.TagProgress,
        ),
    ),
    Part(
        "Consume",
        "",
        (
            timeline.Consumer,
            Stats,
            timeline.Delivery,
            timeline.DeliveryBatch,
            timeline.PulledDelivery,
            timeline.Backoff,
            timeline.Retry,
            timeline.Bury,
        ),
    ),
    Part(
        "Read",
        "",
        (
            timeline.StoredMessage,
            timeline.Outlook,
            OutlookStep,
            timeline.Counts,
            timeline.Why,
            timeline.LateDelivery,
            timeline.LateReport,
            timeline.Cause,
            PingAnswer,
        ),
    ),
    Part(
        "Recurring schedules",
        "",
        (
            timeline.Schedule,
            timeline.ScheduleState,
            timeline.Backfill,
            timeline.Specification,
            timeline.CatchUp,
            timeline.Overlap,
            timeline.GapPolicy,
            timeline.FoldPolicy,
        ),
    ),
    Part("Local time", "", (timeline.local,)),
    Part(
        "Topics, states, statuses",
        "[Topic settings](topic-settings.md) and [statuses and errors](statuses.md) explain each value.",
        (timeline.Topic, timeline.TopicSettings, timeline.State, timeline.Status),
    ),
    Part(
        "Without asyncio",
        "These classes are for programs without an event loop. Each method does what its namesake above does.",
        (
            timeline.SyncTimeline,
            timeline.SyncProducer,
            timeline.SyncConsumer,
            timeline.SyncSchedule,
            timeline.SyncDelivery,
            timeline.SyncDeliveryBatch,
        ),
    ),
    Part("Errors", "[Statuses and errors](statuses.md) says when each one is raised.", tuple(ERRORS)),
    Part("Columns", "", (Ragged, Headers)),
)
_EXITS = "\n".join(f"| {code} | {': '.join(filter(None, told))} |" for code, told in EXIT_CODES.items())
NOT_FOR_USERS = {
    "Message": ("encoded",),
    "Batch": ("of",),
    "TagProgress": ("of", "copy", "check"),
    "Schedule": ("occurrences",),
    "SyncSchedule": ("occurrences",),
}
"""Public members of these classes that only the driver calls."""
COMMANDS_HEAD = f"""# Commands

`timeline COMMAND --help` prints the same in a terminal. Commands that call a broker take the
[connection options](#help), too. `--json` prints one object per line on standard output. Progress goes to
standard error. `timeline completion bash|zsh|fish` prints completions for your shell.

| exit code | meaning |
|---|---|
{_EXITS}

The exit code is also 1 if the output cannot be written, such as into a closed pipe (`| head`) or on a full disk. The
work itself may be done then, so look before you repeat it. Output that was closed on purpose (`>&-`) is no error.

A *time* is `2026-03-29T09:00+02:00`, `now`, `now+15m`, a local `2026-03-29 09:00` with `--tz Europe/Berlin`, or
milliseconds since 1970 UTC (1774767600000). A *duration* is `250ms`, `30s`, `15m`, `2h`, `10d` or `1h30m`. A number
without a unit is seconds."""


class _Words(str):
    """An annotation that prints as it stands in the source."""

    def __repr__(self) -> str:
        return str(self)


def _annotation(given: Any) -> Any:
    return _Words(given) if isinstance(given, str) else given


def _default(given: Any) -> Any:
    plain = given is inspect.Parameter.empty or isinstance(given, (bool, int, float, str, bytes, tuple, type(None)))
    return given if plain and not isinstance(given, enum.Enum) else _Words("...")


def signature(name: str, call: Any) -> str:
    """Return the stub of a function: valid Python, one line or one parameter per line."""
    taken = inspect.signature(call)
    parameters = [
        one.replace(annotation=_annotation(one.annotation), default=_default(one.default))
        for one in taken.parameters.values()
        if one.name != "self"
    ]
    shown = taken.replace(parameters=parameters, return_annotation=_annotation(taken.return_annotation))
    word = "async def" if inspect.iscoroutinefunction(call) else "def"
    line = f"{word} {name}{shown}: ..."
    if len(line) <= WIDTH:
        return line
    head, _, _ = line.partition("(")
    inside = [str(one) for one in parameters]
    kinds = [one.kind for one in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        inside.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returns = "" if shown.return_annotation is inspect.Signature.empty else f" -> {shown.return_annotation}"
    return f"{head}(\n" + "".join(f"    {one},\n" for one in inside) + f"){returns}: ..."


def prose(text: str | None) -> str:
    """Return a docstring as Markdown: indented examples become blocks of Python."""
    lines: list[str] = []
    code: list[str] = []

    def end_of_code() -> None:
        if code:
            shown = "\n".join(code).rstrip()
            body = "\n    ..." if shown.endswith(":") else ""
            lines.append(f"<!-- compiled only: an example -->\n```python\n{shown}{body}\n```\n")
            code.clear()

    for line in inspect.cleandoc(text or "").splitlines():
        if line.startswith("    ") and (code or not lines or not lines[-1]):
            code.append(line[4:])
        elif code and not line:
            code.append("")
        else:
            end_of_code()
            lines.append(line)
    end_of_code()
    return "\n".join(lines).strip()


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members that `kind` and its bases in this package document, in the order of the source."""
    seen = set(NOT_FOR_USERS.get(kind.__name__, ()))
    if kind is timeline.Consumer:
        seen |= {name for name in vars(LeaseHolder) if name not in OF_USERS} | {"put_back"}
    for base in kind.__mro__:
        if not base.__module__.startswith("timeline"):
            continue
        for name, value in vars(base).items():
            documented = getattr(value, "__doc__", None) and not isinstance(value, type)
            callable_or_property = isinstance(value, (property, cached_property)) or callable(value)
            made = isinstance(value, (classmethod, staticmethod))
            if not name.startswith("_") and name not in seen and (callable_or_property or made) and documented:
                seen.add(name)
                yield name, value


def _fields(kind: type) -> list[str]:
    if issubclass(kind, enum.Enum):
        return [f"`{one.name}`" for one in kind]
    if is_dataclass(kind):
        return [f"`{one.name}: {one.type}`" for one in fields(kind) if not one.name.startswith("_")]
    return [f"`{name}`" for name in getattr(kind, "_fields", ())]


def entry(what: Any) -> str:
    """Return what the page says of one class or function."""
    name = what.__name__
    if not isinstance(what, type):
        return f"### {name}\n\n```python\n{signature(name, what)}\n```\n\n{prose(what.__doc__)}"
    parts = [f"### {name}"]
    if issubclass(what, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in what.__bases__)
        parts.append(f"An error, {bases}." if what is not timeline.TimelineError else "")
    elif "__init__" in vars(what) and name in ("Message", "Batch", "Backoff"):
        parts.append(f"```python\n{signature(name, what)}\n```")
    parts.append(prose(what.__doc__))
    if own := _fields(what):
        parts.append("Fields: " + ", ".join(own) + ".")
    for member, value in members(what):
        if isinstance(value, (property, cached_property)):
            getter = value.fget if isinstance(value, property) else value.func
            returned = inspect.signature(getter).return_annotation if getter is not None else ""
            parts.append(f"#### {name}.{member}\n\n`{member}: {returned}`\n\n{prose(value.__doc__)}")
        else:
            call = getattr(what, member)
            parts.append(f"#### {name}.{member}\n\n```python\n{signature(member, call)}\n```\n\n{prose(value.__doc__)}")
    return "\n\n".join(part for part in parts if part)


def api() -> str:
    """Return the page of the Python API."""
    sections = ["\n\n".join(filter(None, [f"## {part.title}", part.says, *map(entry, part.names)])) for part in PARTS]
    return "\n\n".join([WRITTEN + API_HEAD.rstrip(), *sections]) + "\n"


def _helps(command: click.Command, context: click.Context, depth: int) -> Iterator[str]:
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield f"{'#' * depth} {context.command_path.removeprefix('timeline ')}\n\n```text\n{text}\n```"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _helps(inner, _context(inner, name, context), depth + 1)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    # The root's own settings: a command keeps the names of its help option from its first context.
    settings = SETTINGS | {"max_content_width": WIDTH, "terminal_width": WIDTH}
    return click.Context(command, info_name=name, parent=parent, **settings)


def commands() -> str:
    """Return the page of all commands."""
    top = _context(cli, "timeline", None)
    rows = ["| command | does |", "|---|---|"]
    parts = []
    for name in COMMANDS:
        command = cli.get_command(top, name)
        assert command is not None
        rows.append(f"| [`{name}`](#{name}) | {command.get_short_help_str(limit=100)} |")
        parts += _helps(command, _context(command, name, top), 2)
    parts.append(f"Connection options:\n\n```text\n{connection_page(WIDTH)}\n```")
    return "\n\n".join([WRITTEN + COMMANDS_HEAD.rstrip(), "\n".join(rows), *parts]) + "\n"


PAGES = {FOLDER / "api.md": api, FOLDER / "commands.md": commands}


def written(page: Path) -> str:
    """Return what `page` should say now."""
    return re.sub(r"\n{3,}", "\n\n", PAGES[page]())


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
