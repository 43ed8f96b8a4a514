"""Write docs/stores.md: which store to pick. Declarations come from the plugins' code, words and figures from
docs/stores.toml.

Usage: stores_page.py, from any folder.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from timeline.storage_plugins.contract import Capabilities  # noqa: E402

PAGE = ROOT / "docs" / "stores.md"
DATA = ROOT / "docs" / "stores.toml"
MIB = 1 << 20
UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Told:
    """A store's table of docs/stores.toml. Figures that were not measured are None."""

    pick: str
    loses: str
    limits: str
    tested: str
    settings: str
    bound: str
    cycle_per_s: int | None = None
    cycle_pending_per_s: int | None = None
    cycle_pending_times: float | None = None
    lateness_p50_ms: float | None = None
    lateness_p99_ms: float | None = None
    pending_bytes: int | None = None
    page: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One store: its scheme, its plugin's declaration without a server, and its table of docs/stores.toml."""

    scheme: str
    declared: Capabilities
    told: Told

    @property
    def name(self) -> str:
        return f"`{self.scheme}://`"


def told() -> dict[str, Told]:
    """Return the tables of docs/stores.toml, by scheme."""
    return {scheme: Told(**table) for scheme, table in tomllib.loads(DATA.read_text(encoding="utf-8")).items()}


def plugins() -> dict[str, Capabilities]:
    """Return the declarations of this package's plugins by scheme, in the order of docs/stores.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared: dict[str, Capabilities] = {}
    for scheme, entry in project["entry-points"]["timeline.storage_plugins"].items():
        module, _, name = entry.partition(":")
        declared[scheme] = getattr(import_module(module), name).capabilities
    order = list(told())
    return dict(sorted(declared.items(), key=lambda item: order.index(item[0])))


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(head)]
    lines += [["---"] * len(lines[0]), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _yes(declared: bool) -> str:
    return "yes" if declared else "no"


def _figure(number: float | None, shown: Callable[[float], str]) -> str:
    return UNKNOWN if number is None else shown(number)


def _declared(row: Row) -> list[str]:
    mine = row.declared
    limit = f"{mine.payload_limit_bytes // MIB} MiB"
    clock = "the server's, too" if mine.own_clock else "the broker's"
    brokers = "several" if mine.shared else "one"
    counts = "exact" if mine.exact_counts else "estimated"
    return [row.name, _yes(mine.durable), _yes(mine.survives_failover), brokers, limit, counts, clock]


def _figures(row: Row) -> list[str]:
    mine = row.told
    lateness = UNKNOWN
    if mine.lateness_p50_ms is not None and mine.lateness_p99_ms is not None:
        lateness = f"{mine.lateness_p50_ms:g} / {mine.lateness_p99_ms:g} ms"
    pending = _figure(mine.cycle_pending_per_s, lambda rate: f"{rate:,.0f}/s")
    if mine.cycle_pending_per_s is None and mine.cycle_pending_times is not None:
        pending = f"{mine.cycle_pending_times:g} of the cycle, on another machine"
    return [
        row.name,
        _figure(mine.cycle_per_s, lambda rate: f"{rate:,.0f}/s"),
        pending,
        lateness,
        _figure(mine.pending_bytes, lambda size: f"{size:,.0f}"),
        mine.settings,
        mine.bound,
    ]


def page() -> str:
    """Return the page, from today's code and data."""
    words = told()
    rows = [Row(scheme, declared, words[scheme]) for scheme, declared in plugins().items()]
    more = [f"[{row.scheme}]({row.told.page})" for row in rows if row.told.page]
    laptop = [row for row in rows if row.told.url]
    parts = [
        "<!-- Written by scripts/stores_page.py from docs/stores.toml and what plugins declare: change those. -->\n"
        "# Pick a store",
        "Take the database that you already operate and back up. Every call means the same on each store. One suite "
        "proves it, which `timeline check-store` runs. This page lists the differences.",
        table(("store", "use it if"), ([row.name, row.told.pick] for row in rows)),
        f"More of each: {' · '.join(more)}. Any of them can [offload](payloads.md) large "
        "payloads. [`timeline copy`](operate.md#move-to-another-store) copies topics from one to another.",
        "## Declared properties",
        "This is for a server that is set up as recommended. If a server's settings promise less, the store declares "
        "less, and `timeline serve` warns.",
        table(
            (
                "store",
                "survives kill -9",
                "survives the loss of a server",
                "brokers",
                "payloads up to",
                "counts",
                "clock",
            ),
            map(_declared, rows),
        ),
        "## What may be lost",
        table(("store", "of what was acknowledged"), ([row.name, row.told.loses] for row in rows)),
        "## How fast, and how large",
        "Producer, broker, store and consumer share two cores. Payloads have 100 bytes, ids 16 random bytes. "
        "`timeline bench` measures the same on your machine. *Cycle*: produced, due, leased, pushed, acknowledged. "
        "*Lateness*: from the due time to the consumer's code, at 1,000/s. *Bytes*: of a pending message, beside its "
        "payload, headers and id. A quicker machine measured these than those of "
        "[performance](../design-docs/performance.md): compare rows with each other. Redis with `everysec` may lose "
        "its last second.",
        table(
            ("store", "cycle", "with 1 M pending", "lateness p50 / p99", "bytes", "settings", "what bounds it"),
            map(_figures, rows),
        ),
        "## Limits and tested versions",
        table(("store", "to know", "tested on"), ([row.name, row.told.limits, row.told.tested] for row in rows)),
    ]
    if laptop:
        parts += [
            "## Try it on a laptop",
            "`compose.yaml` in the repository starts each one on loopback, set up as recommended:",
            "<!-- not run: it needs a container engine -->\n```sh\n"
            + "\n".join(
                f"docker compose --profile {row.scheme} up -d --wait\nTIMELINE_STORE='{row.told.url}' timeline serve"
                for row in laptop
            )
            + "\n```",
        ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
