"""An HTML page that opens anywhere: one file with plots as SVG, without scripts, which loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, LETTER = 860, 240, 64, 34, 7
LABELS = 8
INK, SOFT, LINE = "#1f2933", "#7b8794", "#d9e2ec"
COLOURS = ("#2f6f9f", "#d97706", "#7c3aed", "#b91c1c", "#0f766e")
Axis = Callable[[float], str]
_STYLE = f"""
body {{ font: 15px/1.5 system-ui, sans-serif; color: {INK}; max-width: 920px; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .2rem; }} h2 {{ font-size: 1.1rem; margin: 2rem 0 .4rem; }}
p {{ margin: .3rem 0; }} .soft {{ color: {SOFT}; }}
.bad {{ color: #b91c1c; font-weight: 600; }} .good {{ color: #0f766e; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; margin: .4rem 0; }}
th, td {{ text-align: right; padding: .2rem .6rem; border-bottom: 1px solid {LINE}; }}
th:first-child, td:first-child {{ text-align: left; overflow-wrap: anywhere; }}
th {{ font-weight: 600; color: {SOFT}; }} details {{ margin: .2rem 0; }} summary {{ cursor: pointer; }}
svg {{ width: 100%; height: auto; }} svg text {{ font: 12px system-ui, sans-serif; fill: {SOFT}; }}
.tiles {{ display: flex; flex-wrap: wrap; gap: .8rem 2rem; margin: 1rem 0; }}
.tiles b {{ display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }}
"""


def page(title: str, under: str, parts: Sequence[str]) -> str:
    """Return the whole page. `parts`: HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join(parts)
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>'
        f'<p class="soft">{escape(under)}</p>\n{body}\n</body></html>\n'
    )


def section(title: str, *parts: str) -> str:
    """Return a heading and its parts."""
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def paragraph(text: str, kind: str = "") -> str:
    """Return a sentence. `kind`: soft, good or bad."""
    return f'<p class="{kind}">{escape(text)}</p>'


def tiles(values: Sequence[tuple[str, str]]) -> str:
    """Return large figures. `values`: (name, value)."""
    return '<div class="tiles">' + "".join(f"<div><b>{escape(v)}</b>{escape(n)}</div>" for n, v in values) + "</div>"


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table. Its numbers have separators of thousands."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(_said(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def folded(title: str, inside: str) -> str:
    """Return a part that is folded until a click."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def _said(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}" if isinstance(value, float) else str(value)


def _frame(top: float, label: str, marks: Sequence[tuple[float, str]], inside: str, axis: Axis) -> str:
    """Return a plot: axes around `inside`. `top`: the largest value. `marks`: (x from 0 to 1, text), without those that
    would overlap. `axis`: formats a value."""
    lines = ""
    for step in range(5):
        y = HEIGHT - BOTTOM - step / 4 * (HEIGHT - BOTTOM - 10)
        lines += f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>'
        lines += f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{escape(axis(top * step / 4))}</text>'
    free = 0.0
    for at, text in marks:
        anchor, share = ("start", 0.0) if at < 0.03 else ("end", 1.0) if at > 0.97 else ("middle", 0.5)
        begins = _x(at) - share * len(text) * LETTER
        if begins < free:
            continue
        free = begins + (len(text) + 2) * LETTER
        lines += f'<text x="{_x(at):.1f}" y="{HEIGHT - 12}" text-anchor="{anchor}">{escape(text)}</text>'
    title = f"<title>{escape(label)}</title>"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{title}{lines}{inside}</svg>'


def _x(at: float) -> float:
    return LEFT + at * (WIDTH - LEFT)


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - min(1.0, max(0.0, share)) * (HEIGHT - BOTTOM - 10)


def short(value: float) -> str:
    """Return a number with three digits and its unit prefix."""
    for size, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{mark}"
    return f"{value:.3g}"


def bars(label: str, values: Sequence[tuple[str, float]], shown: int = 12) -> str:
    """Return a plot of bars in order. About `shown` of them have their name below."""
    if not values:
        return paragraph("nothing to draw", "soft")
    top = max(value for _, value in values) or 1
    width = 1 / len(values)
    inside = ""
    for at, (name, value) in enumerate(values):
        y = _y(value / top)
        size = width * (WIDTH - LEFT) * 0.84
        inside += (
            f'<rect x="{_x(at * width) + size * 0.09:.1f}" y="{y:.1f}" width="{size:.1f}" '
            f'height="{HEIGHT - BOTTOM - y:.1f}" fill="{COLOURS[0]}">'
            f"<title>{escape(name)}: {escape(_said(value))}</title></rect>"
        )
    every = max(1, -(-len(values) // shown))
    marks = [((at + 0.5) * width, name) for at, (name, _) in enumerate(values) if at % every == 0]
    return _frame(top, label, marks, inside, short)


def lines(
    label: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    band: tuple[Sequence[float], Sequence[float]] | None = None,
    axis: Axis = short,
) -> str:
    """Return a plot of lines over the same steps. `band`: (low, high), drawn behind. `axis`: formats a value."""
    count = len(names)
    if not count:
        return paragraph("nothing to draw", "soft")
    highest = [max(values, default=0) for values in series.values()] + ([max(band[1], default=0)] if band else [])
    top = max(highest) or 1
    place = [0.5] if count == 1 else [at / (count - 1) for at in range(count)]
    inside = ""
    if band:
        high = [f"{_x(at):.1f},{_y(value / top):.1f}" for at, value in zip(place, band[1], strict=True)]
        low = [f"{_x(at):.1f},{_y(value / top):.1f}" for at, value in zip(place, band[0], strict=True)]
        inside += f'<polygon points="{" ".join(high + low[::-1])}" fill="{COLOURS[0]}" opacity="0.18"/>'
    legend = ""
    for number, (name, values) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{_x(at):.1f},{_y(value / top):.1f}" for at, value in zip(place, values, strict=True))
        inside += f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        if count == 1:
            inside += f'<circle cx="{_x(0.5):.1f}" cy="{_y(values[0] / top):.1f}" r="3" fill="{colour}"/>'
        legend += f'<span style="color:{colour}">■</span> {escape(name)} &nbsp; '
    every = max(1, -(-count // LABELS))
    marks = [(place[at], names[at]) for at in range(0, count, every)]
    return _frame(top, label, marks, inside, axis) + f'<p class="soft">{legend}</p>'
