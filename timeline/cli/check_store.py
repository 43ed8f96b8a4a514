"""`timeline check-store`: prove a store against the storage contract."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import click
from rich.text import Text

from timeline.cli.app import DONE, REFUSED, SOME_FAILED, Failed, awaited, complain, debugs, say
from timeline.cli.options import DURATION, Url, json_option, shown_bytes
from timeline.cli.output import Progress, console, print_fields, print_json
from timeline.driver.times import duration_ms
from timeline.errors import Invalid, TimelineError
from timeline.storage_plugins import PluginRefused, make_store, shown
from timeline.storage_plugins.conformance import (
    CHECKS,
    CallWatch,
    Outcome,
    Result,
    StoreViolation,
    SuiteReport,
    named_checks,
    run_suite,
)
from timeline.storage_plugins.contract import Opened
from timeline.wording import shown_duration

_SIGNS = {Outcome.PASSED: ("✓", "green"), Outcome.FAILED: ("✕", "bold red"), Outcome.SKIPPED: ("–", "grey58")}


@click.command()
@click.argument("url", required=False, type=Url())
@click.option("--only", multiple=True, metavar="CHECK", help="Check to run; repeatable. Default: all.")
@click.option("--list", "listing", is_flag=True, help="List the checks and run none.")
@click.option("--timeout", default="60s", type=DURATION, help="Longest time of one call to the store.")
@json_option
def check_store(url: str | None, only: tuple[str, ...], listing: bool, timeout: str, as_json: bool) -> int:
    """Run the conformance suite on the store at URL: check the promises of the storage contract.

    The suite creates topics and drops them. Use a store that nobody else uses. Easy checks come first. A call that does
    not return within --timeout is reported, and ends the run. 'timeline --debug check-store' shows tracebacks of the
    plugin. Exit code 1 when a check failed.

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
    names = named_checks(only or CHECKS)

    watch = CallWatch(duration_ms(timeout, "--timeout", least_ms=1) / 1000)
    with Progress("") as progress:
        run = _Run(url, watch, progress, as_json)
        with watch.telling(run.stuck):
            return awaited(run.all(names))


class _Run:
    """One run of the suite, reported as it goes."""

    def __init__(self, url: str, watch: CallWatch, progress: Progress, as_json: bool) -> None:
        self._url, self._watch, self._progress, self._as_json = url, watch, progress, as_json
        self._running = ""

    async def all(self, names: list[str]) -> int:
        """Open the store, run the checks and sum up. Return the exit code."""
        opened, declared = await self._look()
        report = await run_suite(self._url, names, self._ended, begun=self._begun, watch=self._watch)
        _summed_up(self._url, report, opened, declared, self._as_json)
        if len(report.results) < len(names):
            complain(f"{len(names) - len(report.results)} checks were not run, since a call did not return")
        return DONE if report.ok else SOME_FAILED

    async def _look(self) -> tuple[Opened, dict[str, Any]]:
        """Open the store once, so that a failure to open is reported once, not by every check."""
        self._begun("open")
        at = "opened"
        try:
            store = self._watch.bounding(make_store(self._url))
            try:
                found = await store.open(), dataclasses.asdict(store.capabilities)
                at = "closed"
                return found
            finally:
                await store.close()
        except PluginRefused as refused:
            *before, last = refused.sentences
            for sentence in before:
                complain(sentence)
            raise Failed(REFUSED, last) from refused
        except (TimelineError, OSError):
            raise
        except Exception as error:  # a plugin may raise anything
            said = str(error) if isinstance(error, StoreViolation) else f"{type(error).__name__}: {error}"
            told = " ".join((said, *getattr(error, "__notes__", ()))).rstrip(".")
            raise Failed(SOME_FAILED, f"the store cannot be {at}: {told}. --debug shows where.") from error
        finally:
            self._progress.clear()

    def stuck(self, found: str) -> None:
        """End the process: nothing else ends a call that blocks it."""
        if self._running in CHECKS:
            self._ended(Result(self._running, Outcome.FAILED, CHECKS[self._running].sentence, found, hung=True))
        complain(f"{found}. No other check can be run")
        sys.stdout.flush()
        os._exit(SOME_FAILED)

    def _begun(self, name: str) -> None:
        self._running = name
        self._progress.name(name)

    def _ended(self, result: Result) -> None:
        self._progress.clear()
        _told(result, self._as_json, False)


def _told(result: Result, as_json: bool, listing: bool) -> None:
    if as_json:
        told = {"check": result.name, "sentence": result.sentence}
        trace = {"traceback": result.trace} if debugs() and result.trace else {}
        print_json(told if listing else {**told, "outcome": str(result.outcome), "found": result.found, **trace})
        return
    sign, style = ("·", "") if listing else _SIGNS[result.outcome]
    screen = console()
    screen.print(Text.assemble((sign, style), f" {result.name}  ", (result.sentence, "grey58")), soft_wrap=True)
    shown_lines = [] if listing else result.found.splitlines()
    if debugs():
        shown_lines += result.trace.splitlines()
    for line in shown_lines:
        screen.print(Text(f"    {line}", style=style), soft_wrap=True)


def _declared(opened: Opened, declared: dict[str, Any]) -> None:
    """Print what the store declares. The checks compare it with that."""
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


def _summed_up(url: str, report: SuiteReport, opened: Opened, declared: dict[str, Any], as_json: bool) -> None:
    counts = report.counts()
    if as_json:
        of = {"server": opened.server, "declares": declared, "warnings": list(opened.warnings)}
        print_json({"url": shown(url), "ok": report.ok, **counts, **of})
        return
    _declared(opened, declared)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    verdict = "keeps the storage contract" if report.ok else "does NOT keep the storage contract"
    say(f"{shown(url)} {verdict}: {said}")
