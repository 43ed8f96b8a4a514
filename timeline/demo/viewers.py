"""Who watches a demo: a person at a terminal with a board, or whoever reads plain lines; and the words at the end."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from timeline.demo.board import draw, fits
from timeline.demo.conductor import Played
from timeline.demo.picture import DayPicture, Happening
from timeline.demo.summary import Spread, Summary, data_of

LINE_EVERY_MS = 5_000
RARE = ("crash", "back", "up", "trouble")
"""What plain lines tell one by one; delays and cancellations only as counts."""


class BoardWatcher:
    """Draws the board over the whole terminal while the day goes by. A context manager: the terminal is itself again
    when it ends, whatever happened."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._started = False

    def __enter__(self) -> BoardWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(Text(text, style="grey58"))

    def watch(self, picture: DayPicture, now_ms: float) -> None:
        if not self._started:
            self._started = True
            self._live.start()
        self._live.update(draw(picture, now_ms, self._console.size), refresh=True)


class LineWatcher:
    """Says now and then how far the day is, and what is rare at once. `write` takes a line."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._said_ms = 0.0
        self._happened = 0

    def __enter__(self) -> LineWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing of it stays."""

    def say(self, text: str) -> None:
        self._write(text)

    def watch(self, picture: DayPicture, now_ms: float) -> None:
        new = min(picture.happened - self._happened, len(picture.happenings))
        self._happened = picture.happened
        for happening in list(picture.happenings)[-new:] if new else []:
            if happening.kind in RARE:
                self._write(_happening_line(picture, happening))
        if now_ms - self._said_ms >= LINE_EVERY_MS or picture.done:
            self._said_ms = now_ms
            self._write(_state_line(picture, now_ms))


def _happening_line(picture: DayPicture, happening: Happening) -> str:
    clock = picture.plan.clock
    return f"{clock.text(clock.day(happening.real_ms))}  {happening.text}"


def _state_line(picture: DayPicture, now_ms: float) -> str:
    counts, clock, late = picture.counts, picture.plan.clock, picture.lateness()
    return (
        f"{clock.text(clock.day(now_ms))}  put {counts['put']}, moved {counts['moved']}, cancelled "
        f"{counts['cancelled']}, departed {counts['departed']} of {len(picture.departures)}; "
        f"late by p50 {late['p50']:.1f}, p99 {late['p99']:.1f}, max {late['max']:.1f} ms"
    )


def watcher(board: bool, console: Console, write: Callable[[str], None]) -> BoardWatcher | LineWatcher:
    """The board where one is wanted and the terminal has room for it, else plain lines."""
    return BoardWatcher(console) if board and fits(console) else LineWatcher(write)


def tell(played: Played, console: Console) -> None:
    """The summary for people."""
    summary, plan = played.summary, played.plan
    console.print(
        Text.assemble(
            ("New York's departures of ", "bold"),
            (f"{plan.day:%A %d %B %Y}", "bold"),
            (f" at {plan.clock.speed:g}× real time, from the processes' histories and a last scan", "grey58"),
        ),
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="grey58")
    for name, justify in (("", "left"), ("went", "right"), ("data", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, asked in data_of(plan).items():
        table.add_row(name, *_went(getattr(summary, name), asked))
    console.print(table)
    console.print(f"lateness   {_spread(summary.lateness)}, {summary.lateness.count} first deliveries", soft_wrap=True)
    console.print(_crash_line(summary), soft_wrap=True)
    if played.killed:
        console.print(f"cluster    {played.killed} was killed half-way, the other one went on", soft_wrap=True)
    for sentence in summary.off:
        console.print(Text(f"off: {sentence}", style="bold red"), soft_wrap=True)
    for violation in summary.violations[:5]:
        console.print(Text(violation, style="red"), soft_wrap=True)
    if played.folder is not None:
        console.print(Text(f"histories, logs and store are kept in {played.folder}", style="grey58"), soft_wrap=True)


def _went(found: int, asked: int) -> tuple[str, str, Text]:
    return str(found), str(asked), Text("✓", style="green") if found == asked else Text("✕", style="bold red")


def _spread(spread: Spread) -> str:
    return f"p50 {spread.p50:.1f} ms, p99 {spread.p99:.1f} ms, max {spread.max:.1f} ms"


def _crash_line(summary: Summary) -> str:
    back = summary.redelivery_lateness
    came = f"{summary.leases_back} leases ran out and came back"
    late = f", handed out again {_spread(back)} after their time" if back.count else ""
    return f"crashes    {summary.crashes} gates crashed, {came}{late}"
