"""How a command answers: tables for people, JSON for machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from operator import attrgetter
from typing import IO, Any

import click
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from timeline.cli.app import REFUSED, USAGE, Failed, say
from timeline.cli.options.values import iso
from timeline.wording import printable, printable_json

PAYLOAD_SHOWN_CHARS = 60
ROWS_LAID_OUT = 500
"""A longer table is not fitted to the terminal."""
NOBODY = "nobody answers here, so nothing was done: --yes does it without asking"


def confirm(question: str) -> None:
    """Asks a person before what cannot be undone; not from within an event loop, where Ctrl-C would not be heard.
    Raises Failed unless the answer is yes."""
    if sys.stdin is None:
        raise Failed(USAGE, NOBODY)
    try:
        agreed = click.confirm(printable(question), err=True)
    except click.Abort as ended:
        # Click says the same of Ctrl-C, and of an input that has ended: then nobody is there to answer.
        if not isinstance(ended.__context__, EOFError):
            raise
        click.echo(err=True)
        raise Failed(USAGE, NOBODY) from None
    if not agreed:
        raise Failed(REFUSED, "nothing was done")


_Plan = list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]]
_PLANS: dict[tuple[type, tuple[str, ...]], _Plan] = {}
"""By type and names: how each attribute is got, and told. Many messages are printed in a row."""


def picked(one: object, *names: str) -> dict[str, Any]:
    """Return attributes of `one` for machines: a time `due` of one that has `due_ms` as ISO 8601, an empty text as
    null, a name of an enumeration in lower case. `name=attribute` gives an attribute another name."""
    plan = _PLANS.get((type(one), names))
    if plan is None:
        plan = _PLANS[type(one), names] = [_planned(one, name) for name in names]
    return {name: told(get(one)) for name, get, told in plan}


def _planned(one: object, name: str) -> tuple[str, Callable[[Any], Any], Callable[[Any], Any]]:
    name, _, attribute = name.partition("=")
    attribute = attribute or name
    if hasattr(one, f"{attribute}_ms") and not isinstance(getattr(one, attribute, None), str):
        return name, attrgetter(f"{attribute}_ms"), iso
    return name, attrgetter(attribute), _plain


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return str(value) if isinstance(value, str) else value.name.lower()
    return None if value == "" else value


def print_json(value: Mapping[str, Any]) -> None:
    """One object on a line of its own, at once. Where the output's encoding lacks a character of it, JSON's own escapes
    stand in: those of standard output are none of JSON's."""
    text = printable_json(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, separators=(",", ":"))
    say(text)
    sys.stdout.flush()


class Screen(Console):
    """A console that shows every text as it is, printable: no markup, no emoji codes, no orders to the terminal. Texts
    have one line each."""

    def __init__(self, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(file=file, width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render what is shown, texts made printable first."""
        if isinstance(renderable, str):
            renderable = Text(printable(renderable))
        elif isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = renderable.blank_copy(printable(renderable.plain))
        return super().render(renderable, options)


def console() -> Screen:
    """Where tables go: as wide as they must be when nobody sees them on a terminal."""
    return Screen() if sys.stdout.isatty() else Screen(width=400)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[str] = (), *, empty: str
) -> None:
    """A table without lines; the columns named in `right` are set flush right. Without rows, the sentence `empty`."""
    if not rows:
        say(empty)
        return
    if not sys.stdout.isatty() or len(rows) > ROWS_LAID_OUT:
        _print_plain(columns, [[printable(str(cell)) for cell in row] for row in rows], right)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold", no_wrap=False)
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    console().print(table)


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    """The table without colours: ten thousand rows take a tenth of a second, and rich takes a quarter of a minute."""
    lines = [columns, *rows]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    flush = [column in right for column in columns]
    shown: list[str] = []
    for line in lines:
        cells = (
            " " * (width - cell_len(cell)) + cell if pushed else cell + " " * (width - cell_len(cell))
            for cell, width, pushed in zip(line, widths, flush, strict=True)
        )
        shown.append("  ".join(cells).rstrip())
    say(*shown)


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values, one a line."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        say(f"{name:<{width}}  {value}")


def payload_text(payload: bytes) -> str | None:
    """The payload as text, None when it is none."""
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def shown_payload(payload: bytes, most: int = PAYLOAD_SHOWN_CHARS) -> str:
    """A payload for a table: text cut short and printable, or what it is."""
    text = payload_text(payload)
    if text is None:
        return f"<{len(payload)} bytes>"
    plain = "".join(char if char.isprintable() else "·" for char in text[: most + 1])
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def payload_fields(payload: bytes) -> dict[str, Any]:
    """A payload for JSON: `payload` when it is text, else `payload_base64`."""
    import base64

    text = payload_text(payload)
    if text is not None:
        return {"payload": text}
    return {"payload_base64": base64.b64encode(payload).decode()}
