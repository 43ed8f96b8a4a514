"""`timeline pipeline year` and `measure`: the whole pipeline tried out with brokers of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import click

from timeline.cli.app import DONE, SOME_FAILED, say
from timeline.cli.data.spark import pipeline_command, running, watched
from timeline.cli.options.values import DURATION, Url
from timeline.cli.terminal.output import print_fields, print_json, print_table
from timeline.driver.times import duration_ms


@click.command()
@click.argument("data")
@click.option("--into", metavar="FOLDER", help="Leave journal, backup and pages here.  [nowhere]")
@click.option("--begins-in", default="90s", show_default=True, type=DURATION, help="Until the first departure.")
@click.option("--lasts", default="60s", show_default=True, type=DURATION, help="From the first to the last.")
@pipeline_command
def year(
    data: str, into: str | None, begins_in: str, lasts: str, address: str, master: str, settings: tuple[str, ...],
    as_json: bool,
) -> int:  # fmt: skip
    """Account for a year of departures: DATA (flights_2013.parquet) through brokers of its own and all of the pipeline.

    \b
    Example:
      timeline pipeline year flights_2013.parquet --into year
    """
    spans = duration_ms(begins_in, "--begins-in"), duration_ms(lasts, "--lasts", least_ms=1)
    with tempfile.TemporaryDirectory(prefix="timeline-year-") as scratch, running("year", master, settings) as spark:
        from timeline.pipeline.jobs.year import year as run

        folder = Path(into or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with watched() as watch:
            account = asyncio.run(run(spark, data, folder, watch, *spans))
    if as_json:
        sheet = [{"what": what, "found": found, "wanted": wanted} for what, found, wanted in account.sheet]
        print_json({"balanced": account.balanced, "seconds": account.seconds, "sheet": sheet})
    else:
        rows = [(what, f"{found:,}", f"{wanted:,}") for what, found, wanted in account.sheet]
        print_table(("of the year's departures", "found", "must be"), rows, ("found", "must be"), empty="")
        print_fields({step: f"{seconds:.1f} s" for step, seconds in account.seconds.items()})
        say("every departure is accounted for" if account.balanced else "the account does not balance")
    return DONE if account.balanced else SOME_FAILED


@click.command()
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True, help="How many are loaded.")
@click.option("--payload-bytes", type=click.IntRange(1, 1 << 20), default=100, show_default=True, help="Of each row.")
@click.option("--store", default="memory://", show_default=True, type=Url(), help="Where rows are loaded.")
@click.option("--restore-into", default="memory://", show_default=True, type=Url(), help="Where they are restored.")
@click.option(
    "--parallel",
    "degrees",
    type=click.IntRange(1, 1024),
    multiple=True,
    metavar="N",
    help="Tasks at a time; repeatable.  [2]",
)
@pipeline_command
def measure(
    rows: int, payload_bytes: int, store: str, restore_into: str, degrees: tuple[int, ...], address: str, master: str,
    settings: tuple[str, ...], as_json: bool,
) -> int:  # fmt: skip
    """Measure load, scan, backup and restore in rows a second, beside the same rows written as Parquet.

    It starts brokers of its own, on --store `sqlite://` in a file of its own. Per row: the processor time of Spark's
    engine, of its Python workers and of the broker.

    \b
    Example:
      timeline pipeline measure --parallel 1 --parallel 2 --parallel 4
      timeline pipeline measure --rows 10000000 --store sqlite:// --set spark.driver.memory=1g --json
    """
    found = []
    for parallel in degrees or (2,):
        with (
            tempfile.TemporaryDirectory(prefix="timeline-measure-") as scratch,
            running("measure", master or f"local[{parallel}]", settings) as spark,
        ):
            from timeline.bench.suite import fresh
            from timeline.pipeline.jobs.measure import measure as run

            folder = Path(scratch)
            stores = fresh(store, folder, "one"), fresh(restore_into, folder, "two")
            found.append(asyncio.run(run(spark, folder, *stores, rows, payload_bytes, parallel)))
    if as_json:
        print_json({"runs": [dataclasses.asdict(one) for one in found]})
    for one in found if not as_json else ():
        _tell(one)
    return SOME_FAILED if any(one.wrong for one in found) else DONE


def _tell(figures: Any) -> None:
    print_fields(
        {
            "rows": f"{figures.rows:,}",
            "tasks at a time": figures.parallel,
            "store": figures.store,
            "of the load, looking": f"{figures.looked_s:.1f} s",
            "broker after the load": f"{figures.broker_mib:,} MiB",
        }
    )
    numbers = ("seconds", "rows/s", "engine", "workers", "broker", "engine MiB", "driver MiB", "a worker MiB")
    rows = [
        (
            name, f"{step.seconds:.1f}", f"{step.rows_per_s:,.0f}", f"{step.engine_us:.1f}", f"{step.workers_us:.1f}",
            f"{step.brokers_us:.1f}", _span(step.engine_mib), _span(step.driver_mib), f"{step.workers_mib}",
        )
        for name, step in figures.steps.items()
    ]  # fmt: skip
    print_table(("step, processor time in µs a row", *numbers), rows, numbers, empty="")
    for wrong in figures.wrong:
        say(f"WRONG: {wrong}")


def _span(points: list[int]) -> str:
    return f"{points[0]} → {points[-1]}, most {max(points)}" if points else ""
