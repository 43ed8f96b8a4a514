"""All scenarios in one invocation: what `timeline bench` alone runs, with the peer and the bare store beside.

`FULL` is what the targets ask for, ten million pending messages and runs of a minute included; `QUICK` the same
scenarios so small that they are over in some minutes, for a first look.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from timeline.bench.figures import BenchReport, Target
from timeline.bench.load import Told
from timeline.bench.peers.bare import run_bare
from timeline.bench.peers.bare_push import run_bare_push
from timeline.bench.peers.beanstalkd import KINDS, run_beanstalkd
from timeline.bench.peers.databases import run_peer
from timeline.bench.profile import Profile
from timeline.bench.scenario import Scenario
from timeline.bench.scenarios.burst import BurstScenario
from timeline.bench.scenarios.cancel_tag import CancelTagScenario
from timeline.bench.scenarios.cycle import CycleScenario
from timeline.bench.scenarios.lateness import LatenessScenario
from timeline.bench.scenarios.loop import LoopScenario
from timeline.bench.scenarios.memory import MemoryScenario
from timeline.bench.scenarios.payload import PayloadScenario
from timeline.bench.scenarios.produce import ProduceScenario
from timeline.bench.scenarios.restart import RestartScenario
from timeline.bench.topic import scheme

SQLITE = "sqlite://"
BEANSTALKD = "beanstalkd"
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
class SuiteEntry:
    """One scenario of the suite: its settings, and what runs beside it."""

    asked: Scenario
    bare: bool = False
    peer: str = ""

    @property
    def title(self) -> str:
        """What it is, in a few words."""
        asked, words = self.asked, [self.asked.name.replace("-", "")]
        words.append("memory" if asked.store.startswith("memory") else "SQLite")
        if isinstance(asked, CycleScenario) and asked.api != "batch":
            words.append(asked.api)
        if isinstance(asked, LatenessScenario):
            words += ["in_=0"] * asked.in_zero + ["no lease ahead"] * (asked.lease_ahead == "off")
        if pending := getattr(asked, "pending", 0):
            words.append(f"{pending:,} pending")
        return ", ".join(words)


def entries(millions: float, seconds: float, runs: int, messages: int) -> tuple[SuiteEntry, ...]:
    """The suite at a size: `millions` of messages pending at most, `messages` in a cycle."""
    most = int(millions * MILLION)
    lateness = LatenessScenario(seconds=seconds, runs=runs)
    return (
        SuiteEntry(CycleScenario(messages=messages), bare=True, peer=BEANSTALKD),
        SuiteEntry(CycleScenario(api="object", messages=messages // 2)),
        SuiteEntry(CycleScenario(api="handlers", messages=messages // 5)),
        SuiteEntry(CycleScenario(store=SQLITE, messages=messages // 2), bare=True),
        SuiteEntry(CycleScenario(store=SQLITE, messages=messages // 5, pending=most // 10), bare=True),
        SuiteEntry(ProduceScenario(messages=messages // 5)),
        SuiteEntry(ProduceScenario(store=SQLITE, messages=messages // 5)),
        SuiteEntry(lateness, bare=True),
        SuiteEntry(replace(lateness, pending=most // 10)),
        SuiteEntry(replace(lateness, pending=most)),
        SuiteEntry(replace(lateness, in_zero=True)),
        SuiteEntry(replace(lateness, lease_ahead="off")),
        SuiteEntry(LoopScenario(messages=messages // 300, many=messages // 30)),
        SuiteEntry(LoopScenario("memory://", messages=messages // 300, many=messages // 30)),
        SuiteEntry(BurstScenario()),
        SuiteEntry(BurstScenario(store=SQLITE)),
        SuiteEntry(PayloadScenario()),
        SuiteEntry(CancelTagScenario(pending=most, tagged=most // 10)),
        SuiteEntry(RestartScenario(pending=most)),
        SuiteEntry(MemoryScenario(pending=max(1, most // 10))),
    )


FULL = entries(10, 60.0, 3, MILLION)
QUICK = entries(0.1, 5.0, 1, 200_000)


async def measure(
    asked: Scenario,
    folder: Path,
    told: Told | None = None,
    *,
    bare: bool = False,
    peer: str = "",
    journal: bool = False,
    profiled: bool = False,
) -> BenchReport:
    """Measure a scenario, and what is to stand beside it: `bare`, the store or gRPC alone; a `peer`; `journal`, what
    the event journal costs. Raises CannotMeasure."""
    given, profile = asked.store, Profile(folder) if profiled else None
    asked = replace(asked, store=fresh(given, folder))
    report = await asked.run(folder, told, profile)
    if bare and isinstance(asked, LatenessScenario):
        report.beside.append(await run_bare_push(asked, folder))
    elif isinstance(asked, CycleScenario):
        if bare:
            report.beside.append(await run_bare(replace(asked, store=fresh(given, folder, "bare")), told))
        if journal:
            from timeline.bench.scenarios.journal import run_journalled

            journalled = replace(asked, store=fresh(given, folder, "journalled"))
            report.beside.append(await run_journalled(journalled, folder))
        if peer == BEANSTALKD:
            report.beside += [await run_beanstalkd(asked, kind, folder) for kind in KINDS]
        elif peer:
            report.beside.append(await run_peer(asked, peer, folder))
    compare(report)
    if profile is not None:
        report.notes += profile.lines()
    return report


async def run_entry(entry: SuiteEntry, folder: Path, told: Told | None = None) -> BenchReport:
    """Measure an entry of the suite. Raises CannotMeasure."""
    report = await measure(entry.asked, folder, told, bare=entry.bare, peer=entry.peer)
    report.scenario = entry.title
    return report


def compare(report: BenchReport) -> None:
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


def compare_pending(reports: list[BenchReport]) -> None:
    """Adds to each lateness with others pending how many times as late it was as the one with none."""
    plain = {"in_zero": False, "lease_ahead": "auto"}
    steady = [one for one in reports if plain.items() <= one.settings.items()]
    none = next((one for one in steady if not one.settings["pending"]), None)
    for one in steady:
        if none is not None and one is not none:
            one.figures |= {f"times_none_{name}": one.figures[name] / none.figures[name] for name in COMPARED}
            wanted = tuple(Target(f"times_none_{name}", TIMES_OF_NONE) for name in COMPARED[:2])
            one.targets = (*(target for target in one.targets if target not in wanted), *wanted)
