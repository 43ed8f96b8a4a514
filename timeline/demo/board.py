"""The demo on a terminal: a board over the whole screen, or plain lines. It only reads the picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from rich.align import Align
from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from timeline.demo.flights import AIRLINES, MINUTE_MS, city
from timeline.demo.picture import DayPicture, Departure, FlightStage, GateView, Happening
from timeline.demo.plan import Inspections

LINE_EVERY_MS = 5_000
RARE = ("crash", "back", "up", "trouble")
"""Happenings that plain lines show, and that stay longer on the board."""

FRAME = "grey37"
AMBER = "bold #ffc20e"
LEAST_COLUMNS, LEAST_LINES = 76, 20
"""A smaller terminal gets plain lines."""
WIDE_COLUMNS, SIDE_COLUMNS, AIRLINE_COLUMNS = 104, 46, 70
GONE_FOR_MS = 1_200
"""How long a flight that has left stays on the board (real)."""
LOAD_STEP_MIN, LOAD_STEPS = 20, 18
BLOCKS = " ▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"

_STAGES = {
    FlightStage.PLANNED: ("—", "grey50"),
    FlightStage.ON_TIME: ("ON TIME", "green"),
    FlightStage.DELAYED: ("DELAYED", "yellow"),
    FlightStage.CANCELLED: ("CANCELLED", "bold red"),
    FlightStage.BOARDING: ("BOARDING", "bold bright_white"),
    FlightStage.DEPARTED: ("DEPARTED", "grey58"),
}
_KINDS = {
    "delay": ("▲", "yellow"),
    "cancel": ("✕", "red"),
    "crash": ("✹", "bold white on red"),
    "back": ("↺", "bold cyan"),
    "up": ("●", "green"),
    "inspect": ("↻", "cyan"),
    "trouble": ("!", "bold red"),
}


def fits(console: Console) -> bool:
    """Return whether the terminal can be drawn on and is large enough."""
    width, height = console.size
    return console.is_terminal and width >= LEAST_COLUMNS and height >= LEAST_LINES


def draw(picture: DayPicture, now_ms: float, size: tuple[int, int]) -> RenderableType:
    """Return the whole board for a terminal of `size` (columns, lines)."""
    width, height = size
    layout = Layout()
    layout.split_column(
        Layout(_head(picture, now_ms, width >= WIDE_COLUMNS), size=3),
        Layout(name="body"),
        Layout(_progress(picture), size=1),
    )
    (_wide if width >= WIDE_COLUMNS else _narrow)(layout["body"], picture, now_ms, height - 4, width)
    return layout


def _wide(body: Layout, picture: DayPicture, now_ms: float, lines: int, columns: int) -> None:
    """Show departures and events on the left; gates, lateness and load on the right."""
    gates_lines = _gates_lines(picture)
    events_lines = min(max(5, lines // 4), 9)
    body.split_row(Layout(name="left"), Layout(name="side", size=SIDE_COLUMNS))
    body["left"].split_column(
        Layout(_departures(picture, now_ms, lines - events_lines - 3, columns - SIDE_COLUMNS >= AIRLINE_COLUMNS)),
        Layout(_events(picture, events_lines - 2), size=events_lines),
    )
    body["side"].split_column(
        Layout(_gates(picture), size=gates_lines),
        Layout(_lateness(picture), size=7),
        Layout(_load(picture, now_ms, max(1, lines - gates_lines - 7 - 2))),
    )


def _narrow(body: Layout, picture: DayPicture, now_ms: float, lines: int, columns: int) -> None:
    """Show departures above, events and gates below, lateness and load as a line."""
    gates_lines = _gates_lines(picture)
    body.split_column(
        Layout(_departures(picture, now_ms, lines - gates_lines - 4, columns >= AIRLINE_COLUMNS)),
        Layout(name="below", size=gates_lines),
        Layout(_measures(picture, now_ms), size=1),
    )
    body["below"].split_row(Layout(_events(picture, gates_lines - 2)), Layout(_gates(picture), size=38))


def _panel(content: RenderableType, title: str) -> Panel:
    return Panel(content, title=f"[bold]{title}[/]", title_align="left", border_style=FRAME, padding=(0, 1))


def _grid(*columns: str, apart: int = 0) -> Table:
    """Return a grid over the whole width of `left`, `center` or `right` columns; `wide` ones share the rest."""
    grid = Table.grid(expand=True, padding=(0, apart))
    for column in columns:
        side, _, wide = column.partition(" ")
        grid.add_column(justify=side, ratio=1 if wide else None, no_wrap=True)  # type: ignore[arg-type]
    return grid


def _head(picture: DayPicture, now_ms: float, wide: bool) -> RenderableType:
    clock = picture.plan.clock
    row = _grid("left wide", "center", "right wide")
    console = f" · http://{picture.plan.webhook.gateway}/" if wide and picture.plan.webhook else ""
    row.add_row(
        Text.assemble(("✈  DEPARTURES ", AMBER), (f"New York{console}", "grey70")),
        Text(f" {clock.text(clock.day(now_ms), seconds=clock.speed <= 60)} ", style="bold black on #ffc20e"),
        Text.assemble(
            (f"{picture.plan.day:%a %d %b %Y}", "bold"),
            (f" · {clock.speed:g}×" + (" real time" if wide else ""), "grey70"),
        ),
    )
    return Panel(row, border_style=FRAME, padding=(0, 1))


def shown(picture: DayPicture, now_ms: float, lines: int) -> list[Departure]:
    """Return the flights on a board of `lines` lines: those that just left, those boarding, then the next ones."""
    clock = picture.plan.clock
    since_ms = now_ms - GONE_FOR_MS
    gone: list[Departure] = []
    here: list[Departure] = []
    for departure in picture.departures.values():
        if departure.stage is FlightStage.DEPARTED:
            if departure.changed_ms >= since_ms:
                gone.append(departure)
        elif departure.stage is not FlightStage.CANCELLED or (
            clock.real(departure.filing.flight.scheduled_ms) >= since_ms
        ):
            here.append(departure)
    gone.sort(key=lambda one: one.changed_ms)
    here.sort(key=lambda one: (one.due_ms, one.filing.flight.id))
    return [*gone[-max(2, lines // 4) :], *here][:lines]


def _departures(picture: DayPicture, now_ms: float, lines: int, airlines: bool = False) -> RenderableType:
    clock = picture.plan.clock
    table = Table(expand=True, box=None, padding=(0, 1, 0, 0), header_style="grey58")
    for name in ("TIME", "FLIGHT", *(["AIRLINE"] if airlines else []), "DESTINATION", "FROM", "NEW", "STATUS"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if name == "DESTINATION" else None)
    for departure in shown(picture, now_ms, lines):
        flight = departure.filing.flight
        delayed = departure.due_ms > departure.filing.due_ms
        style = AMBER if departure.stage not in (FlightStage.DEPARTED, FlightStage.PLANNED) else "grey50"
        table.add_row(
            Text(clock.text(flight.scheduled_ms), style=style),
            Text(flight.number, style=style),
            *([Text(AIRLINES.get(flight.carrier, ""), style="grey70")] if airlines else []),
            Text(city(flight.dest), style=style),
            Text(flight.origin, style="grey62"),
            Text(clock.text(flight.leaves_ms) if delayed else "", style="yellow"),
            _status(picture, departure),
        )
    return _panel(table, "Next departures")


def _status(picture: DayPicture, departure: Departure) -> Text:
    word, style = _STAGES[departure.stage]
    if departure.stage is not FlightStage.BOARDING:
        return Text(word, style=style)
    gate = picture.gates[departure.gate]
    if not gate.up or departure.filing.flight.number not in gate.boarding:
        # Its gate crashed with it in flight. No other gate may have it until the lease has run out.
        return Text("LEASE RUNS OUT", style="bold cyan")
    again = " AGAIN" if departure.deliveries > 1 else ""
    return Text(gate.title.upper() + again, style="bold cyan" if again else style)


def _gates_lines(picture: DayPicture) -> int:
    return max(len(picture.gates), 4) + (picture.plan.inspections is not None) + 2


def _gates(picture: DayPicture) -> RenderableType:
    table = _grid("left", "left wide", "right", apart=1)
    for _, gate in sorted(picture.gates.items()):
        table.add_row(*_gate(gate))
    if not picture.gates:
        table.add_row(Text("opening …", style="grey50"))
    if picture.plan.inspections is not None:
        table.add_row(*_runway(picture, picture.plan.inspections))
    return _panel(table, "Gates")


def _runway(picture: DayPicture, planned: Inspections) -> tuple[Text, Text, Text]:
    """Show the last inspection of the runway, or the first one to come."""
    clock, done = picture.plan.clock, bool(picture.inspected)
    at_ms = max(picture.inspected) if done else planned.first_ms
    said = f"{'inspected' if done else 'next'} {clock.text(clock.day(at_ms))}"
    count = Text.assemble((f"{len(picture.inspected)}", "bold"), (f" of {planned.count}", "grey58"))
    return Text.assemble(("↻ ", "cyan"), "Runway"), Text(said, style="grey50"), count


def _gate(gate: GateView) -> tuple[Text, Text, Text]:
    name = Text.assemble(("● ", "green" if gate.up else "bold red"), gate.title)
    if not gate.up:
        doing = Text(f"CRASHED, holds {len(gate.boarding)}", style="bold white on red")
    elif gate.boarding:
        more = f" +{len(gate.boarding) - 1}" if len(gate.boarding) > 1 else ""
        doing = Text(f"boarding {gate.boarding[0]}{more}", style="bright_white")
    else:
        doing = Text(f"last {gate.last}" if gate.last else "waiting", style="grey50")
    left = Text.assemble((f"{gate.departed}", "bold"), (" left", "grey58"))
    return name, doing, left


def _lateness(picture: DayPicture) -> RenderableType:
    now = picture.lateness()
    row = _grid("center wide", "center wide", "center wide")
    row.add_row(*(Text(name, style="grey58") for name in ("p50", "p99", "max")))
    row.add_row(*(Text(f"{value:.1f} ms", style="bold green") for value in (now.p50, now.p99, now.max)))
    bars = _histogram(picture.lateness_ms[-300:], (1, 2, 3, 5, 10, 20, 50))
    return _panel(Group(row, Text(), *bars), "Lateness: due to gate, real time")


def _histogram(values: Sequence[float], edges: Sequence[float]) -> list[RenderableType]:
    """Return two lines that show how the values spread over the edges (ms)."""
    counts = Counter(sum(value >= edge for edge in edges) for value in values)
    most = max(counts.values(), default=1)
    names = [f"<{edges[0]:g}", *(f"{edge:g}+" for edge in edges)]
    cells = [f"{BLOCKS[-(-counts[at] * 8 // most)] * 3:^5}" for at in range(len(names))]
    return [
        Align.center(Text("".join(cells), style="green")),
        Align.center(Text("".join(f"{name:^5}" for name in names), style="grey50")),
    ]


def _measures(picture: DayPicture, now_ms: float) -> RenderableType:
    """Show lateness and load ahead in one line."""
    late = picture.lateness()
    loads = picture.load_ahead(now_ms, LOAD_STEP_MIN * MINUTE_MS / picture.plan.clock.speed, LOAD_STEPS)
    most = max(*loads, 10)
    return Text.assemble(
        (" late ", "grey58"),
        (f"p50 {late.p50:.1f}  p99 {late.p99:.1f}  max {late.max:.1f} ms", "bold green"),
        (f"   load ahead, {LOAD_STEPS * LOAD_STEP_MIN // 60} h ", "grey58"),
        ("".join(BLOCKS[-(-load * 8 // most)] for load in loads), "#ffc20e"),
        (f" {sum(loads)}", "bold"),
    )


def _load(picture: DayPicture, now_ms: float, lines: int) -> RenderableType:
    clock = picture.plan.clock
    step_ms = LOAD_STEP_MIN * MINUTE_MS / clock.speed
    loads = picture.load_ahead(now_ms, step_ms, min(lines, LOAD_STEPS))
    most = max(*loads, 10)
    table = _grid("left", "left wide", "right", apart=1)
    for step, load in enumerate(loads):
        table.add_row(
            Text(clock.text(clock.day(now_ms + step * step_ms)), style="grey62"),
            Text(_bar(load / most, SIDE_COLUMNS - 16), style="#ffc20e" if load == most else "#d08700"),
            Text(str(load) if load else "·", style="bold" if load else "grey50"),
        )
    return _panel(table, f"Load ahead: departures per {LOAD_STEP_MIN} min")


def _bar(share: float, columns: int) -> str:
    """Return a bar that fills `share` of the columns, to an eighth of one."""
    eighths = round(share * columns * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _events(picture: DayPicture, lines: int) -> RenderableType:
    recent = list(picture.happenings)
    # A crash and its consequences are rare and worth reading, so they stay a little among the many delays.
    rare = [one for one in recent[-60:] if one.kind in RARE][-max(1, lines // 2) :]
    often = [one for one in recent if one not in rare][-(lines - len(rare)) :] if lines > len(rare) else []
    ordered = sorted([*rare, *often], key=lambda one: one.real_ms)
    return _panel(Group(*(_event(picture, one) for one in ordered)), "What happens")


def _event(picture: DayPicture, happening: Happening) -> Text:
    sign, style = _KINDS[happening.kind]
    clock = picture.plan.clock
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{clock.text(clock.day(happening.real_ms))} ", style="grey50")
    line.append(sign, style=style)
    line.append(f" {happening.text}", style=style if happening.kind in ("crash", "back", "trouble") else "")
    return line


def _progress(picture: DayPicture) -> RenderableType:
    counts, total = picture.counts, len(picture.departures)
    said = Text.assemble(
        (f" put {counts['put']}", ""),
        (f"  moved {counts['moved']}", "yellow"),
        (f"  cancelled {counts['cancelled']}", "red"),
        (f"  departed {counts['departed']}", "green"),
        (f"  leases back {counts['leases_back']}", "cyan"),
        (f"  of {total} ", "grey58"),
    )
    bar = ProgressBar(total=total, completed=picture.settled)
    row = _grid("left", "left wide", "right")
    row.add_row(said, bar, Text(f" {100 * picture.settled // total} % "))
    return row


class BoardWatcher:
    """Draws the board over the whole terminal. Its context leaves the terminal as it was."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)

    def __enter__(self) -> BoardWatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.stop()  # the board would hide it; it comes back with the next picture
        self._console.print(Text(text, style="grey58"))

    def watch(self, picture: DayPicture, now_ms: float) -> None:
        self._live.start()
        self._live.update(draw(picture, now_ms, self._console.size), refresh=True)


class LineWatcher:
    """Writes a line every few seconds, and one for each rare happening. `write` takes a line."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._said_ms = 0.0
        self._happened = 0

    def say(self, text: str) -> None:
        self._write(text)

    def watch(self, picture: DayPicture, now_ms: float) -> None:
        clock, counts = picture.plan.clock, picture.counts
        new = min(picture.happened - self._happened, len(picture.happenings))
        self._happened = picture.happened
        for happening in list(picture.happenings)[-new:] if new else []:
            if happening.kind in RARE:
                self._write(f"{clock.text(clock.day(happening.real_ms))}  {happening.text}")
        if now_ms - self._said_ms >= LINE_EVERY_MS or picture.done:
            self._said_ms = now_ms
            late = picture.lateness()
            self._write(
                f"{clock.text(clock.day(now_ms))}  put {counts['put']}, moved {counts['moved']}, cancelled "
                f"{counts['cancelled']}, departed {counts['departed']} of {len(picture.departures)}; "
                f"runway inspected {len(picture.inspected)} times; "
                f"late by p50 {late.p50:.1f}, p99 {late.p99:.1f}, max {late.max:.1f} ms"
            )


def watcher(
    board: bool, console: Console, write: Callable[[str], None]
) -> AbstractContextManager[BoardWatcher | LineWatcher]:
    """Return the context of the board if it is wanted and the terminal has room for it, else of plain lines."""
    return BoardWatcher(console) if board and fits(console) else nullcontext(LineWatcher(write))
