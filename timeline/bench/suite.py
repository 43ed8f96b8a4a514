"""All scenarios in one invocation: what `timeline bench` alone runs, with the peer and the bare store beside.

`FULL` is what the targets ask for, ten million pending messages and runs of a minute included; `QUICK` the same
scenarios so small that they are over in some minutes, for a first look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from timeline.bench.figures import Report, Target
from timeline.bench.load import Told
from timeline.bench.peers.bare import run_bare
from timeline.bench.peers.bare_push import run_bare_push
from timeline.bench.peers.beanstalkd import KINDS, run_beanstalkd
from timeline.bench.scenarios.burst import Burst, run_burst
from timeline.bench.scenarios.cancel_tag import CancelTag, run_cancel_tag
from timeline.bench.scenarios.cluster import Cluster, run_cluster
from timeline.bench.scenarios.cycle import Cycle, run_cycle
from timeline.bench.scenarios.lateness import Lateness, run_lateness
from timeline.bench.scenarios.loop import Loop, run_loop
from timeline.bench.scenarios.memory import Memory, run_memory
from timeline.bench.scenarios.payload import Payload, run_payload
from timeline.bench.scenarios.produce import Produce, run_produce
from timeline.bench.scenarios.restart import Restart, run_restart
from timeline.bench.scenarios.scale import Scale, run_scale
from timeline.bench.topic import scheme

SQLITE = "sqlite://"
MILLION = 1_000_000
COMPARED = ("lateness_p50_ms", "lateness_p99_ms", "lateness_p99_9_ms")
TIMES_OF_NONE = 1.25
LIKE_PEER = {"api": "batch", "pending": 0}
BARE = "bare store"
TIMES_OF = {
    ("beanstalkd memory", "memory"): 6.0,
    ("pgqueuer", "postgresql"): 2.0,
    (BARE, "postgresql"): 0.7,
    (BARE, "cassandra"): 0.7,
}
"""How many times as fast a cycle on this kind of store is to be as what ran beside it; as a peer, in batches alone."""


def fresh(store: str, folder: Path, name: str = "bench") -> str:
    """`sqlite://` alone as the URL of a new file in `folder`; any other URL as it is."""
    return f"sqlite:///{folder / name}.db" if store in ("sqlite:", SQLITE, "sqlite:///") else store


@dataclass(frozen=True, slots=True)
class Entry:
    """One scenario of the suite: its settings, and what runs beside it."""

    asked: Any
    bare: bool = False
    peer: bool = False

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        asked, words = self.asked, [type(self.asked).__name__.lower()]
        words.append("memory" if asked.store.startswith("memory") else "SQLite")
        if isinstance(asked, Cycle) and asked.api != "batch":
            words.append(asked.api)
        if isinstance(asked, Lateness):
            words += ["in_=0"] * asked.in_zero + ["no lease ahead"] * (asked.lease_ahead == "off")
        if pending := getattr(asked, "pending", 0):
            words.append(f"{pending:,} pending")
        return ", ".join(words)


def entries(millions: float, seconds: float, runs: int, messages: int) -> tuple[Entry, ...]:
    """The suite at a size: `millions` of messages pending at most, `messages` in a cycle."""
    most = int(millions * MILLION)
    lateness = Lateness(seconds=seconds, runs=runs)
    return (
        Entry(Cycle(messages=messages), bare=True, peer=True),
        Entry(Cycle(api="object", messages=messages // 2)),
        Entry(Cycle(api="handlers", messages=messages // 5)),
        Entry(Cycle(store=SQLITE, messages=messages // 2), bare=True),
        Entry(Cycle(store=SQLITE, messages=messages // 5, pending=most // 10), bare=True),
        Entry(Produce(messages=messages // 5)),
        Entry(Produce(store=SQLITE, messages=messages // 5)),
        Entry(lateness, bare=True),
        Entry(replace(lateness, pending=most // 10)),
        Entry(replace(lateness, pending=most)),
        Entry(replace(lateness, in_zero=True)),
        Entry(replace(lateness, lease_ahead="off")),
        Entry(Loop(messages=messages // 300, many=messages // 30)),
        Entry(Loop("memory://", messages=messages // 300, many=messages // 30)),
        Entry(Burst()),
        Entry(Burst(store=SQLITE)),
        Entry(Payload()),
        Entry(CancelTag(pending=most, tagged=most // 10)),
        Entry(Restart(pending=most)),
        Entry(Memory(pending=max(1, most // 10))),
    )


FULL = entries(10, 60.0, 3, MILLION)
QUICK = entries(0.1, 5.0, 1, 200_000)


async def run_entry(entry: Entry, folder: Path, told: Told | None = None) -> Report:
    """Measures one of them, with what is to stand beside it. Raises CannotMeasure."""
    asked = replace(entry.asked, store=fresh(entry.asked.store, folder))
    report: Report = await RUN[type(asked)](asked, folder, told)
    if entry.bare and isinstance(asked, Lateness):
        report.beside.append(await run_bare_push(asked, folder))
    elif entry.bare:
        report.beside.append(await run_bare(replace(asked, store=fresh(entry.asked.store, folder, "bare")), told))
    if entry.peer:
        report.beside += [await run_beanstalkd(asked, kind, folder) for kind in KINDS]
    compare(report)
    report.scenario = entry.title
    return report


RUN: dict[type, Callable[..., Any]] = {
    Cycle: run_cycle,
    Produce: lambda asked, folder, _: run_produce(asked, folder),
    Lateness: run_lateness,
    Loop: lambda asked, folder, _: run_loop(asked, folder),
    Burst: lambda asked, folder, _: run_burst(asked, folder),
    Payload: lambda asked, folder, _: run_payload(asked, folder),
    CancelTag: run_cancel_tag,
    Restart: run_restart,
    Cluster: lambda asked, folder, _: run_cluster(asked, folder),
    Memory: run_memory,
    Scale: run_scale,
}
"""A scenario's settings → what runs it, given settings, a folder, and who is told of pending messages."""


def compare(report: Report) -> None:
    """Adds how many times as fast, or as late, it was as each of what ran beside it, and what of that is a target."""
    for other in report.beside:
        if "rate_per_s" not in other.figures:
            both = {name: (report.figures[name], other.figures[name]) for name in COMPARED}
            words = other.scenario.replace(" ", "_")
            report.figures |= {f"times_{words}_{name}": ours / theirs for name, (ours, theirs) in both.items()}
            continue
        name = f"times_{other.scenario.replace(' ', '_')}"
        report.figures[name] = report.figures["rate_per_s"] / other.figures["rate_per_s"]
        wanted = TIMES_OF.get((other.scenario, scheme(report.settings["store"])))
        like_peer = report.settings == report.settings | LIKE_PEER
        if wanted is not None and (like_peer or other.scenario == BARE):
            report.targets = (*report.targets, Target(name, wanted, least=True))


def compare_pending(reports: list[Report]) -> None:
    """Adds to each lateness with others pending how many times as late it was as the one with none."""
    plain = {"in_zero": False, "lease_ahead": "auto"}
    steady = [one for one in reports if plain.items() <= one.settings.items()]
    none = next((one for one in steady if not one.settings["pending"]), None)
    for one in steady:
        if none is not None and one is not none:
            one.figures |= {f"times_none_{name}": one.figures[name] / none.figures[name] for name in COMPARED}
            wanted = tuple(Target(f"times_none_{name}", TIMES_OF_NONE) for name in COMPARED[:2])
            one.targets = (*(target for target in one.targets if target not in wanted), *wanted)
