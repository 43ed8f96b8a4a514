"""Output for terminals: tables, JSON, receipts, pictures of numbers, and the progress of long work."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import tzinfo
from enum import Enum
from operator import attrgetter
from types import TracebackType
from typing import IO, Any, TextIO, TypeVar

import click
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

import timeline
from timeline.cli.app import DONE, REFUSED, SOME_FAILED, USAGE, Failed, complain, exit_code_of, say
from timeline.clock import Clock
from timeline.driver.times import as_datetime, iso_or_none, shown_time
from timeline.errors import Forbidden, TimelineError, explain
from timeline.model import Operation, Status
from timeline.wording import folded, printable, printable_json, shown_lateness

PAYLOAD_SHOWN_CHARS = 60
LEAST_WIDTH = 12
"""Columns of a table are not folded or cut to less than this."""
QUIET = "grey58"
NOBODY = "there is no terminal to ask, so nothing was done: --yes does it without asking"
EIGHTHS = " ▁▂▃▄▅▆▇█"
NICE_STEPS_MS = (
    100, 200, 500, 1_000, 2_000, 5_000, 10_000, 15_000, 30_000, 60_000, 120_000, 300_000, 600_000, 900_000, 1_800_000,
    3_600_000, 7_200_000, 10_800_000, 21_600_000, 43_200_000, 86_400_000, 172_800_000, 604_800_000, 2_592_000_000,
    7_776_000_000, 31_536_000_000,
)  # fmt: skip
EVERY_MS = 200.0
RATE_OVER_MS = 5_000.0
"""The time left is estimated from the rate of the last few seconds."""

T = TypeVar("T")


def confirm(question: str) -> None:
    """Ask a person before what cannot be undone. Raises Failed unless they agree. Not for use within an event loop,
    which would not hear Ctrl-C."""
    if sys.stdin is None:
        raise Failed(USAGE, NOBODY)
    try:
        agreed = click.confirm(printable(question), err=True)
    except click.Abort as ended:
        # Click raises the same for Ctrl-C and for the end of the input. At the end, nobody is there to answer.
        if not isinstance(ended.__context__, EOFError):
            raise
        click.echo(err=True)
        raise Failed(USAGE, NOBODY) from None
    if not agreed:
        raise Failed(REFUSED, "nothing was done")


_Plan = list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]]
_PLANS: dict[tuple[type, tuple[str, ...]], _Plan] = {}
"""By type and names: how each attribute is read and converted. Many messages are printed in a row."""


def picked(one: object, *names: str) -> dict[str, Any]:
    """Return attributes of `one` for machines. A time `due` of one that has `due_ms` becomes ISO 8601, an empty text
    null, a member of an enumeration its name in lower case. `name=attribute` renames an attribute."""
    plan = _PLANS.get((type(one), names))
    if plan is None:
        plan = _PLANS[type(one), names] = [_planned(one, name) for name in names]
    return {name: convert(get(one)) for name, get, convert in plan}


def _planned(one: object, name: str) -> tuple[str, Callable[[Any], Any], Callable[[Any], Any]]:
    name, _, attribute = name.partition("=")
    attribute = attribute or name
    if hasattr(one, f"{attribute}_ms") and not isinstance(getattr(one, attribute, None), str):
        return name, attrgetter(f"{attribute}_ms"), iso_or_none
    return name, attrgetter(attribute), _plain


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return str(value) if isinstance(value, str) else value.name.lower()
    return None if value == "" else value


def print_json(value: Mapping[str, Any] | Sequence[str]) -> None:
    """Print one value on a line of its own, and flush. Characters that the output's encoding lacks become JSON's
    escapes; those of standard output are not JSON."""
    text = printable_json(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, separators=(",", ":"))
    say(text)
    sys.stdout.flush()


class Screen(Console):
    """A console that shows every text as it is, printable: no markup, no emoji codes, no control sequences. A text has
    one line."""

    def __init__(self, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(file=file, width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render what is shown, with printable texts."""
        if isinstance(renderable, str):
            renderable = Text(printable(renderable))
        elif isinstance(renderable, Text) and not renderable.plain.isprintable():
            renderable = renderable.blank_copy(printable(renderable.plain))
        return super().render(renderable, options)


def console() -> Screen:
    """Return the console of standard output. It is wide enough for everything when it is no terminal."""
    return Screen() if sys.stdout.isatty() else Screen(width=400)


def print_folded(screen: Screen, line: str, indent: int, style: str = "", mark: str = "") -> None:
    """Print a line in `style`, its first character in `mark`. A terminal gets it folded between words, further lines
    indented."""
    shown = printable(line)
    first, *others = (folded(shown, screen.width, indent) if screen.is_terminal else shown).splitlines()
    screen.print(Text.assemble((first[:1], mark), (first[1:], "")), style=style, soft_wrap=True)
    for other in others:
        screen.print(Text(other), style=style, soft_wrap=True)


class Shortened(str):
    """A cell of a table that has a `short` form for narrow terminals."""

    short: str

    def __new__(cls, text: str, short: str) -> Shortened:
        made = super().__new__(cls, text)
        made.short = short
        return made


_GENERATED = re.compile(r"[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}")


def id_cell(id: str) -> str:
    """Return an id for a table. A generated one, a UUID, is shortened to its ends."""
    return Shortened(id, f"{id[:8]}…{id[-4:]}") if _GENERATED.fullmatch(id) else id


def time_cell(at_ms: int, zone: tzinfo | None = None) -> str:
    """Return a time for a table. Its short form has the time first, then the date unless that is today."""
    when, now = (as_datetime(ms).astimezone(zone) for ms in (at_ms, Clock().now_ms()))
    date = "" if when.date() == now.date() else " %d %b" if when.year == now.year else " %Y-%m-%d"
    return Shortened(shown_time(at_ms, zone), when.strftime(f"%H:%M:%S{date}"))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    right: Sequence[str] = (),
    *,
    empty: str,
    spare: Sequence[str] = (),
) -> None:
    """Print a table without lines, or the sentence `empty` when there are no rows. The columns in `right` are set
    flush right.

    A terminal that is too narrow gets, in this order and as far as needed: short cells, no columns of `spare` (the
    first goes first), folded cells. Elsewhere nothing is left out.
    """
    if not rows:
        say(empty)
        return
    screen = console()
    texts, widths = fitted(columns, rows, spare, screen.width if screen.is_terminal else sys.maxsize)
    heads, *lines = (
        line
        for cells in zip(*(texts[head] for head in widths), strict=True)
        for line in _lines(cells, widths, right, screen)
    )
    screen.print(Text(heads, style="bold"), soft_wrap=True)
    say(*lines)


def fitted(
    columns: Sequence[str], rows: Sequence[Sequence[object]], spare: Sequence[str], room: int
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Return the cells of each column, its head first, and the widths of the columns that stay, so that a line fits
    into `room`. The order in which columns shrink: see `print_table`."""
    fields = {head: [head, *cells] for head, cells in zip(columns, zip(*rows, strict=True), strict=True)}
    texts = {head: [printable(str(cell)) for cell in cells] for head, cells in fields.items()}
    widths = {head: max(map(cell_len, cells)) for head, cells in texts.items()}

    def excess() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - room

    if excess() <= 0:
        return texts, widths
    shorter = {head: [printable(str(getattr(cell, "short", cell))) for cell in cells] for head, cells in fields.items()}
    saved = {head: widths[head] - max(map(cell_len, cells)) for head, cells in shorter.items()}
    for head in sorted(saved, key=lambda one: -saved[one]):
        if excess() > 0:
            texts[head], widths[head] = shorter[head], widths[head] - saved[head]
    for head in spare:
        if excess() > 0:
            widths.pop(head, None)
    while excess() > 0 and max(widths.values()) > LEAST_WIDTH:
        widths[max(widths, key=lambda one: widths[one])] -= 1
    return texts, widths


def _lines(cells: Sequence[str], widths: Mapping[str, int], right: Sequence[str], screen: Screen) -> list[str]:
    """Return the lines of a row: one, or as many as its highest folded cell."""
    folded = [
        [cell] if cell_len(cell) <= width else [part.plain for part in Text(cell).wrap(screen, width)]
        for cell, width in zip(cells, widths.values(), strict=True)
    ]
    lines = []
    for at in range(max(map(len, folded))):
        parts = []
        for (head, width), cell in zip(widths.items(), folded, strict=True):
            part = cell[at] if at < len(cell) else ""
            space = " " * (width - cell_len(part))
            parts.append(space + part if head in right else part + space)
        lines.append("  ".join(parts).rstrip())
    return lines


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    width: int,
    right: Sequence[str] = (),
    *,
    empty: str = "",
    spare: Sequence[str] = (),
) -> Table:
    """Return a table without lines, for a picture of `width`. Cells may be Texts with a style. It fits as with
    `print_table`, but long cells are cut: a picture has one line per row."""
    rows = rows or [[Text(empty, QUIET), *[""] * (len(columns) - 1)]]
    texts, widths = fitted(columns, rows, spare, width)
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for head, most in widths.items():
        justify: JustifyMethod = "right" if head in right else "left"
        made.add_column(head, justify=justify, no_wrap=True, overflow="ellipsis", width=most)
    for at, row in enumerate(rows, 1):
        styles = {head: getattr(cell, "style", "") for head, cell in zip(columns, row, strict=True)}
        made.add_row(*(Text(texts[head][at], styles[head]) for head in widths))
    return made


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values, one pair on a line."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        say(f"{name:<{width}}  {value}")


def payload_text(payload: bytes) -> str | None:
    """Return the payload as text, None when it is not UTF-8."""
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def shown_payload(payload: bytes, most: int = PAYLOAD_SHOWN_CHARS) -> str:
    """Return a payload for people: printable text of at most `most` characters, or its size."""
    text = payload_text(payload)
    if text is None:
        return f"<{len(payload)} bytes>"
    plain = "".join(char if char.isprintable() else "·" for char in text[: most + 1])
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def payload_fields(payload: bytes) -> dict[str, Any]:
    """Return a payload for JSON: `payload` when it is text, else `payload_base64`."""
    import base64

    text = payload_text(payload)
    return {"payload_base64": base64.b64encode(payload).decode()} if text is None else {"payload": text}


def nice_step_ms(window_ms: int, most: int) -> int:
    """Return a round step that cuts `window_ms` into at most `most` steps."""
    for step_ms in NICE_STEPS_MS:
        if -(-window_ms // step_ms) <= most:
            return step_ms
    return -(-window_ms // most)


def bars(counts: Sequence[float], height: int, top: float | None = None) -> list[str]:
    """Return `counts` drawn as columns, one character each, `height` lines high, the highest line first. `top` fills a
    column. Default: the largest count. A count above 0 fills at least an eighth of a character."""
    top = max(counts, default=0) if top is None else top
    eighths = [0 if count <= 0 or not top else max(1, round(min(count / top, 1) * height * 8)) for count in counts]
    return [
        "".join(EIGHTHS[min(8, max(0, filled - 8 * line))] for filled in eighths) for line in reversed(range(height))
    ]


def widened(counts: Sequence[float], width: int) -> list[float]:
    """Return `counts` repeated to fill `width` characters, as far as whole repeats go. Too many are summed."""
    if not counts:
        return []
    if len(counts) <= width:
        times = max(1, width // len(counts))
        return [float(count) for count in counts for _ in range(times)]
    per = math.ceil(len(counts) / width)
    return [float(sum(counts[at : at + per])) for at in range(0, len(counts), per)]


class Progress:
    """A line that counts what is done, drawn over itself on a terminal. Elsewhere nothing is written.

    `screen`: default standard error. `total`: how many there will be. None: not known, unless `add` gets the part that
    is done.
    """

    def __init__(
        self, what: str, total: int | None = None, *, screen: TextIO | None = None, clock: Clock | None = None
    ) -> None:
        self._what, self.total = what, total
        self._screen = screen or sys.stderr
        self._clock = clock or Clock()
        self._start_ms = self._drawn_ms = self._clock.monotonic_ms()
        self._marks: list[tuple[float, float]] = [(self._start_ms, 0.0)]
        self.watched = self._screen.isatty()
        self.done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def _draw(self, line: str) -> None:
        if self.watched:
            self._screen.write(f"\r\033[K{printable(line)}")
            self._screen.flush()

    def name(self, what: str) -> None:
        """Name what is under way, at once."""
        self._draw(f"{what} …")

    def clear(self) -> None:
        """Remove the line, so that something else can be printed there."""
        self._draw("")

    @property
    def rate_per_s(self) -> float:
        """How many per second, from the start."""
        elapsed_s = (self._clock.monotonic_ms() - self._start_ms) / 1000
        return self.done / elapsed_s if elapsed_s > 0 else 0.0

    def add(self, count: int = 1, part: float | None = None) -> None:
        """Count `count` more. In all, `part` of the whole (0 to 1) is done."""
        self.done += count
        now_ms = self._clock.monotonic_ms()
        if not self.watched or now_ms - self._drawn_ms < EVERY_MS:
            return
        self._drawn_ms = now_ms
        if part is None and self.total:
            part = self.done / self.total
        of = f" of {self.total:,}" if self.total else ""
        left = "" if part is None else self._left(part, now_ms)
        self._draw(f"{self._what} {self.done:,}{of}  {self.rate_per_s:,.0f}/s{left}")

    def _left(self, part: float, now_ms: float) -> str:
        """Return how far the work is, and how long it still takes at its recent pace."""
        self._marks.append((now_ms, part))
        while len(self._marks) > 2 and now_ms - self._marks[1][0] >= RATE_OVER_MS:
            del self._marks[0]
        then_ms, then = self._marks[0]
        percent = f"  {min(part, 1):.0%}"
        if part <= then or now_ms <= then_ms:
            return percent
        left_ms = max(0.0, 1 - part) * (now_ms - then_ms) / (part - then)
        return f"{percent}, {shown_lateness(max(1, round(left_ms / 1000)) * 1000)} left"


async def counted(entries: AsyncIterator[T], progress: Progress) -> AsyncIterator[T]:
    """Yield `entries` as they come, and count each."""
    async for entry in entries:
        progress.add()
        yield entry


NO_WORDS: Mapping[str, str] = {}
_REFUSALS_BY_TAG: Mapping[Status, str] = {
    Status.FORBIDDEN: "these belong to another producer group: act for that one (--group NAME)",
    Status.INVALID: "these would come due beyond the topic's horizon ('timeline topic show' says how far that is), or "
    "not before they expire",
    Status.UNKNOWN: "these are gone, and an answer was lost: they were cancelled, or delivered first",
}
"""The meaning of a status in the counts of a call by tag."""


@contextmanager
def speaking(words: Mapping[str, str]) -> Iterator[None]:
    """Give a refusal of one message advice about this command's options. `words`: what to do, by status."""
    try:
        yield
    except TimelineError as error:
        if error.id is not None:
            error.advice = words.get(error.code, error.advice)
        raise


def receipt_json(receipt: timeline.Receipt) -> dict[str, Any]:
    """Return a receipt for machines."""
    moved = ("moved",) if receipt.operation is Operation.PUT else ()
    detail = ("detail",) if receipt.detail else ()
    return picked(receipt, "id", "status", "version", "due", "due_ms", "settled", *moved, *detail)


def judged(receipts: Iterable[timeline.Receipt]) -> Iterator[tuple[timeline.Receipt, TimelineError | None]]:
    """Yield the receipts of one call, each with its error, or None when it is OK. A broker sends the reason of
    FORBIDDEN once; here every FORBIDDEN gets it."""
    denied = ""
    for receipt in receipts:
        found: TimelineError | None = None
        try:
            receipt.raise_failed()
        except TimelineError as error:
            found = error
            if isinstance(error, Forbidden):
                denied = error.reason = error.reason or denied
        yield receipt, found


def tell_receipts(
    receipts: Iterable[timeline.Receipt], as_json: bool, done: str, words: Mapping[str, str] = NO_WORDS
) -> int:
    """Print a line for each receipt: what was `done`, or on standard error why it was refused. Return 0, or 1 when
    some of several were refused, or the exit code of the only one's error. `words`: what to say of a status here."""
    failed, count, code = 0, 0, DONE
    for receipt, error in judged(receipts):
        count += 1
        if as_json:
            print_json(receipt_json(receipt))
        if error is not None:
            said = words.get(receipt.status)
            complain(explain(error) if said is None else f"{error.code} {receipt.id!r}: {said}")
            failed, code = failed + 1, exit_code_of(error)
        elif not as_json:
            due = f", due {shown_time(receipt.due_ms)}" if receipt.due_ms else ""
            if receipt.status is not Status.DUPLICATE:
                say(f"{receipt.id} {done}{due}")
            elif receipt.settled:
                say(f"{receipt.id} not {done} again: it was delivered or cancelled before, and the topic remembers")
            else:
                say(f"{receipt.id} not {done} again: it is there already, and stays as it is{due}")
    return code if count == 1 or not failed else SOME_FAILED


def counts_json(told: timeline.TagProgress, dry_run: bool) -> dict[str, Any]:
    """Return the progress of a call by tag for machines. `resume`: the token that continues it, null at the end."""
    return {
        "matched": told.done,
        "dry_run": dry_run,
        "counts": {str(status): n for status, n in told.counts.items()},
        **picked(told, "changed", "finished"),
        "resume": None if told.finished else told.resume,
    }


def tell_counts(told: timeline.TagProgress, as_json: bool, tag: str, done: str, dry_run: bool) -> int:
    """Print the counts of a call by `tag`. Return 1 when some were refused."""
    counts, total = told.counts, told.done
    if as_json:
        print_json(counts_json(told, dry_run))
    elif not total:
        say(f"no message on the timeline has the tag {tag!r}: nothing {done}")
    else:
        would = "would be " if dry_run else ""
        others = ", ".join(f"{n} {status}" for status, n in counts.items() if status is not Status.OK)
        say(f"{told.changed} of {total} {would}{done}{'; ' + others if others else ''}")
        for status, why in _REFUSALS_BY_TAG.items():
            if status in counts:
                complain(f"{status}: {why}")
    return DONE if told.changed == total else SOME_FAILED
