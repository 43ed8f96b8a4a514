"""All scenarios in one invocation: what `timeline bench` runs, with the peer and the bare store beside.

`FULL` is what the targets ask for: ten million pending messages, and runs of a minute. `QUICK` has the same scenarios
at a size that takes some minutes, for a first look.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from timeline.bench.figures import BenchReport, Target
from timeline.bench.load import Told
from timeline.bench.peers.bare import run_bare, run_bare_push
from timeline.bench.peers.beanstalkd import BEANSTALKD
from timeline.bench.peers.databases import run_peer
from timeline.bench.peers.nats import NATS
from timeline.bench.peers.own_servers import run_own_server
from timeline.bench.peers.trials import LATE_APART_MS, LATE_COUNT
from timeline.bench.processes import Profile
from timeline.bench.scenario import Scenario
from timeline.bench.scenarios.holding import MemoryScenario, PayloadScenario, RestartScenario
from timeline.bench.scenarios.http import HttpScenario, WebhookScenario
from timeline.bench.scenarios.lateness import BurstScenario, CancelTagScenario, LatenessScenario
from timeline.bench.scenarios.schedules import SchedulesScenario
from timeline.bench.scenarios.throughput import CycleScenario, LoopScenario, ProduceScenario, run_journalled
from timeline.bench.stores import scheme

SQLITE = "sqlite://"
LATE = LatenessScenario(rate=1000.0 / LATE_APART_MS, seconds=LATE_COUNT * LATE_APART_MS / 1000, runs=1)
"""The lateness that stands beside that of peers."""
OWN_SERVERS = {server.name: server for server in (BEANSTALKD, NATS)}
MILLION = 1_000_000
COMPARED = ("lateness_p50_ms", "lateness_p99_ms", "lateness_p99_9_ms")
TIMES_OF_NONE = 1.25
LIKE_PEER = {"api": "list", "pending": 0}
BARE = "bare store"
TIMES_OF = {
    ("beanstalkd memory", "memory"): 5.0,
    ("beanstalkd fsync", "sqlite"): 20.0,
    ("pgqueuer", "postgresql"): 4.0,
    (BARE, "postgresql"): 0.7,
    (BARE, "cassandra"): 0.7,
}
"""Targets for a cycle's rate relative to what ran beside it, by kind of store. Those of peers apply to lists only."""
TIMES_OF_BACKLOG = 4.0
"""The same for a backlog in memory beside beanstalkd."""


def fresh(store: str, folder: Path, name: str = "bench") -> str:
    """Return the URL of a new file in `folder` for `sqlite://`, and any other URL unchanged."""
    return f"sqlite:///{folder / name}.db" if store in ("sqlite:", SQLITE, "sqlite:///") else store


@dataclass(frozen=True, slots=True)
class SuiteEntry:
    """One scenario of the suite: its settings, and what runs beside it."""

    asked: Scenario
    bare: bool = False
    peer: str = ""

    @property
    def title(self) -> str:
        """Return what it is, in a few words."""
        asked, words = self.asked, [self.asked.name.replace("-", "")]
        words.append("memory" if asked.store.startswith("memory") else "SQLite")
        if isinstance(asked, CycleScenario):
            words += [{"batch": "columns"}.get(asked.api, asked.api)] * (asked.api != "list")
            words += ["backlog"] * asked.backlog
        if isinstance(asked, LatenessScenario):
            words += ["in_=0"] * asked.in_zero + ["no lease ahead"] * (asked.lease_ahead == "off")
        if pending := getattr(asked, "pending", 0):
            words.append(f"{pending:,} pending")
        return ", ".join(words)


def entries(millions: float, seconds: float, runs: int, messages: int) -> tuple[SuiteEntry, ...]:
    """Return the suite with at most `millions` of messages pending, and `messages` in a cycle."""
    most = int(millions * MILLION)
    lateness = LatenessScenario(seconds=seconds, runs=runs)
    return (
        SuiteEntry(CycleScenario(store=SQLITE, messages=messages // 2), bare=True, peer=BEANSTALKD.name),
        SuiteEntry(CycleScenario(store=SQLITE, messages=messages // 2, backlog=True), peer=BEANSTALKD.name),
        SuiteEntry(CycleScenario(messages=messages), bare=True, peer=BEANSTALKD.name),
        SuiteEntry(CycleScenario(messages=messages, backlog=True), peer=BEANSTALKD.name),
        SuiteEntry(CycleScenario(api="batch", messages=messages)),
        SuiteEntry(CycleScenario(api="object", messages=messages // 2)),
        SuiteEntry(CycleScenario(api="handlers", messages=messages // 5)),
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
        SuiteEntry(
            SchedulesScenario(
                store=SQLITE,
                schedules=max(1, most // 100),
                seconds=max(1, int(seconds * 1.5)),
                moment=messages // 100,
                rest_seconds=seconds / 2,
            )
        ),
        SuiteEntry(HttpScenario(messages=messages // 50, batched=messages // 5, seconds=seconds / 3)),
        SuiteEntry(WebhookScenario(backlog=messages // 50, seconds=seconds / 3)),
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
    """Measure a scenario, and beside it what is asked for. Raises CannotMeasure.

    `bare`: the store or gRPC alone. `peer`: another system. `journal`: the cost of the event journal.
    """
    given, profile = asked.store, Profile(folder) if profiled else None
    asked = replace(asked, store=fresh(given, folder))
    report = await asked.run(folder, told, profile)
    if bare and isinstance(asked, LatenessScenario):
        report.beside.append(await run_bare_push(asked, folder))
    elif isinstance(asked, CycleScenario):
        if bare:
            report.beside.append(await run_bare(replace(asked, store=fresh(given, folder, "bare")), told))
        if journal:
            journalled = replace(asked, store=fresh(given, folder, "journalled"))
            report.beside.append(await run_journalled(journalled, folder))
        if server := OWN_SERVERS.get(peer):
            kinds = server.kinds if scheme(asked.store) == "memory" else (server.synced,)
            report.beside += [await run_own_server(server, asked, kind, folder) for kind in kinds]
        elif peer:
            report.beside.append(await run_peer(asked, peer, folder))
        if peer:
            late = await replace(LATE, store=asked.store).run(folder)
            report.figures |= {name: late.figures[name] for name in COMPARED}
            report.wrong += late.wrong
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
    """Add the ratios to what ran beside it, and the targets of these."""
    for other in report.beside:
        words = f"times_{other.scenario.replace(' ', '_')}"
        if "rate_per_s" not in other.figures:
            ratios = {name: report.figures[name] / other.figures[name] for name in COMPARED}
            report.figures |= {f"{words}_{name}": ratio for name, ratio in ratios.items()}
            continue
        report.figures[words] = report.figures["rate_per_s"] / other.figures["rate_per_s"]
        wanted = TIMES_OF.get((other.scenario, scheme(report.settings["store"])))
        like_peer = report.settings == report.settings | LIKE_PEER
        if wanted is not None and report.settings.get("backlog") and scheme(report.settings["store"]) == "memory":
            wanted = TIMES_OF_BACKLOG
        if wanted is not None and (like_peer or other.scenario == BARE):
            report.targets = (*report.targets, Target(words, wanted, least=True))


def compare_pending(reports: list[BenchReport]) -> None:
    """Add to each lateness with others pending the ratios to the one with none."""
    plain = {"in_zero": False, "lease_ahead": "auto"}
    steady = [one for one in reports if plain.items() <= one.settings.items()]
    none = next((one for one in steady if not one.settings["pending"]), None)
    for one in steady:
        if none is not None and one is not none:
            one.figures |= {f"times_none_{name}": one.figures[name] / none.figures[name] for name in COMPARED}
            wanted = tuple(Target(f"times_none_{name}", TIMES_OF_NONE) for name in COMPARED[:2])
            one.targets = (*(target for target in one.targets if target not in wanted), *wanted)
