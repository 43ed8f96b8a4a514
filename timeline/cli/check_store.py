"""`timeline check-store`: proves a store against the storage contract."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
from rich.text import Text

from timeline.cli.app import DONE, SOME_FAILED, awaited, say
from timeline.cli.output import console, print_fields, print_json
from timeline.cli.values import shown_bytes
from timeline.errors import Invalid
from timeline.storage_plugins import open_store, shown
from timeline.storage_plugins.conformance import CHECKS, Outcome, Report, Result, run_suite
from timeline.storage_plugins.contract import Opened
from timeline.wording import shown_duration

_SIGNS = {Outcome.PASSED: ("✓", "green"), Outcome.FAILED: ("✕", "bold red"), Outcome.SKIPPED: ("–", "grey58")}


@click.command()
@click.argument("url", required=False)
@click.option("--only", multiple=True, metavar="CHECK", help="Run this check; may be repeated.  [all]")
@click.option("--list", "listing", is_flag=True, help="Name the checks and run none.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object for each check, and one with the counts.")
def check_store(url: str | None, only: tuple[str, ...], listing: bool, as_json: bool) -> int:
    """Run the conformance suite on the store at URL: does it keep what the storage contract promises?

    The suite works on topics of its own and drops them; still, point it at a store that nobody uses. Exit code 1 when a
    check failed.

    \b
    Example:
      timeline check-store sqlite:////tmp/check.db
      timeline check-store memory:// --only lease_is_never_early
    """
    if listing:
        for check in CHECKS.values():
            _told(Result(check.name, Outcome.SKIPPED, check.sentence), as_json, listing)
        return DONE
    if url is None:
        raise Invalid("give the store's URL, such as sqlite:////tmp/check.db, or --list")

    async def work() -> int:
        # One that cannot be opened at all is told once, not by every check.
        store = await open_store(url)
        opened, declared = await store.open(), dataclasses.asdict(store.capabilities)
        await store.close()
        report = await run_suite(url, only or None, lambda result: _told(result, as_json, False))
        _summed_up(url, report, opened, declared, as_json)
        return DONE if report.ok else SOME_FAILED

    return awaited(work())


def _told(result: Result, as_json: bool, listing: bool) -> None:
    if as_json:
        told = {"check": result.name, "sentence": result.sentence}
        print_json(told if listing else {**told, "outcome": str(result.outcome), "found": result.found})
        return
    sign, style = ("·", "") if listing else _SIGNS[result.outcome]
    screen = console()
    screen.print(Text.assemble((sign, style), f" {result.name}  ", (result.sentence, "grey58")), soft_wrap=True)
    if result.found and not listing:
        screen.print(Text(f"    {result.found}", style=style), soft_wrap=True)


def _declared(opened: Opened, declared: dict[str, Any]) -> None:
    """What the store says of itself: the checks hold it to that."""
    fields: dict[str, object] = {"store": opened.server}
    for name, value in declared.items():
        if isinstance(value, bool):
            shown_value = "yes" if value else "no"
        else:
            shown_value = shown_duration(value) if name.endswith("_ms") else shown_bytes(value)
        fields[name.removesuffix("_bytes").removesuffix("_ms").replace("_", " ")] = shown_value
    print_fields(fields)
    for warning in opened.warnings:
        console().print(Text(f"! {warning}", style="yellow"), soft_wrap=True)


def _summed_up(url: str, report: Report, opened: Opened, declared: dict[str, Any], as_json: bool) -> None:
    counts = report.counts()
    if as_json:
        of = {"server": opened.server, "declares": declared, "warnings": list(opened.warnings)}
        print_json({"url": shown(url), "ok": report.ok, **counts, **of})
        return
    _declared(opened, declared)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    verdict = "keeps the storage contract" if report.ok else "does NOT keep the storage contract"
    say(f"{shown(url)} {verdict}: {said}")
