"""`python -m tests.simulation --seeds 2000`: runs seeds on all cores, prints how often everything occurred, and fails
when a seed breaks a promise or something that can be reached never was. `--seed 17` runs one alone and shows it."""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.coverage import missing, table
from tests.simulation.world import World, pullers_of, size_of

CHUNK = 10


@dataclass(slots=True)
class Report:
    """What some seeds came to."""

    seeds: int = 0
    operations: int = 0
    least_operations: int = 0
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    occurred: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Report) -> None:
        self.least_operations = min(self.least_operations or other.least_operations, other.least_operations)
        self.seeds += other.seeds
        self.operations += other.operations
        self.statuses += other.statuses
        self.occurred += other.occurred
        self.failures += other.failures


def run_seed(seed: int) -> Report:
    """One seed, judged."""
    world = World(seed, size=size_of(seed), pullers=pullers_of(seed))
    outcome = world.run()
    report = Report(1, outcome.operations, outcome.operations, outcome.verdict.statuses, outcome.occurred)
    if not outcome.holds:
        report.failures.append((seed, outcome.verdict.summary()))
    return report


def run_seeds(seeds: list[int]) -> Report:
    """Some seeds, one after the other. What they leave behind is collected once, after the last of them: that costs
    about as much for one as for all."""
    logging.disable(logging.CRITICAL)
    gc.disable()
    whole = Report()
    for seed in seeds:
        try:
            whole.add(run_seed(seed))
        except Exception as stumbled:
            whole.add(Report(1, failures=[(seed, f"{type(stumbled).__name__}: {stumbled}")]))
    gc.collect()
    return whole


def spread(first: int, seeds: int, processes: int) -> Report:
    """Seeds first … first + seeds − 1 over so many processes."""
    numbers = list(range(first, first + seeds))
    whole = Report()
    # What was imported is never garbage: a collection after each seed need not look at it.
    gc.collect()
    gc.freeze()
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=10) as pool:
        for report in pool.imap_unordered(run_seeds, _chunks(numbers)):
            whole.add(report)
            for seed, _ in report.failures:
                print(f"seed {seed} fails: python -m tests.simulation --seed {seed}", flush=True)
    whole.failures.sort()
    return whole


def _chunks(numbers: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(numbers), CHUNK):
        yield numbers[start : start + CHUNK]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2_000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="one seed alone; prints what broke, with the lines that show it")
    parser.add_argument("--history", help="with --seed: write its history into this file")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.seed is not None:
        return _alone(asked.seed, asked.history)
    started_s = time.monotonic()
    report = spread(asked.first, asked.seeds, asked.processes)
    took_s = time.monotonic() - started_s
    print(table(report.statuses, report.occurred))
    print(
        f"{report.seeds} seeds, {report.operations} operations (least {report.least_operations} a seed), "
        f"{took_s:.1f} s, {took_s / max(1, report.seeds):.3f} s a seed; {len(report.failures)} failed"
    )
    for seed, text in report.failures[:3]:
        print(f"\nseed {seed}:\n{text[:4_000]}")
    never = missing(report.statuses, report.occurred, report.seeds)
    for what in never:
        print(f"never occurred: {what}")
    return 1 if report.failures or never else 0


def _alone(seed: int, into: str | None) -> int:
    logging.disable(logging.CRITICAL)
    world = World(seed, size=size_of(seed), pullers=pullers_of(seed))
    outcome = world.run()
    if into:
        with open(into, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in world.history())
    print(table(outcome.verdict.statuses, outcome.occurred))
    print(f"seed {seed}: {outcome.operations} operations, {world.loop.steps} steps")
    print(outcome.verdict.summary())
    return 0 if outcome.holds else 1


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets is part of a seed.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
