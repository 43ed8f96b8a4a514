"""The registry of checks and the runner. Knows nothing of pytest; a test suite runs `run_check` for each name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from timeline.errors import Invalid
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import MakeStore, Trial, Violation
from timeline.storage_plugins.contract import Capabilities

CHECK_TIMEOUT_S = 300.0
"""A check that takes longer has hung."""

Run = Callable[[Trial], Awaitable[None]]
Needs = Callable[[Capabilities], bool]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold of a store. `needs`: for which capabilities it is asked."""

    name: str
    sentence: str
    run: Run
    needs: Needs


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a check. `sentence`: what must hold; `found`: what was seen instead, or why it was skipped."""

    name: str
    outcome: Outcome
    sentence: str
    found: str = ""

    def raise_failed(self) -> None:
        """Raises Violation when the check failed."""
        if self.outcome is Outcome.FAILED:
            raise Violation(f"{self.name}: {self.sentence}\n{self.found}")


@dataclass(slots=True)
class Report:
    """The results of a run, in order."""

    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    @property
    def ok(self) -> bool:
        """At least one check passed and none failed."""
        return not self.failed and any(result.outcome is Outcome.PASSED for result in self.results)

    def counts(self) -> dict[str, int]:
        """How many of each outcome."""
        return {outcome.value: sum(result.outcome is outcome for result in self.results) for outcome in Outcome}


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run."""


def check(needs: Needs = lambda _: True) -> Callable[[Run], Run]:
    """Registers a check: `async def check_…(trial)` whose docstring says what must hold."""

    def register(run: Run) -> Run:
        name = getattr(run, "__name__", "").removeprefix("check_")
        sentence = " ".join((run.__doc__ or "").split())
        if not name or not sentence or name in CHECKS:
            raise Invalid(f"a check needs a name of its own and a docstring: {name!r}")
        CHECKS[name] = Check(name, sentence, run, needs)
        return run

    return register


NOT_ASKED = "the store declares that this does not apply to it"


async def run_check(name: str, make: MakeStore, timeout_s: float = CHECK_TIMEOUT_S) -> Result:
    """Runs one check on stores that `make` makes, each opened and closed by the check."""
    found = CHECKS[name]
    trial = Trial(make)
    try:
        async with asyncio.timeout(timeout_s), trial:
            # Asked once it is open: a plugin declares what its server's settings promise.
            if not found.needs(trial.store.capabilities):
                return Result(name, Outcome.SKIPPED, found.sentence, NOT_ASKED)
            await found.run(trial)
    except TimeoutError:
        return Result(name, Outcome.FAILED, found.sentence, f"not done after {timeout_s:g} s")
    except Violation as violation:
        return Result(name, Outcome.FAILED, found.sentence, _told(str(violation), violation))
    except Exception as error:  # whatever a stranger's plugin raises is a finding, and the other checks go on
        return Result(name, Outcome.FAILED, found.sentence, _told(f"raised {type(error).__name__}: {error}", error))
    return Result(name, Outcome.PASSED, found.sentence)


def _told(text: str, error: BaseException) -> str:
    return "\n".join((text, *getattr(error, "__notes__", ())))


async def run_suite(
    target: str | MakeStore,
    only: Iterable[str] | None = None,
    report: Callable[[Result], None] | None = None,
    timeout_s: float = CHECK_TIMEOUT_S,
) -> Report:
    """Runs all checks, or those named in `only`, one after the other, each on fresh topics of its own.

    `target`: a store's URL, or a callable that makes a store that is not open yet, each time on the same data.
    `report` is told each result as it comes. Raises Invalid for a name in `only` that is no check, StoreRefused for a
    URL that names no store.
    """
    names = list(CHECKS) if only is None else list(only)
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise Invalid(f"no such check: {', '.join(unknown)}. Checks: {', '.join(CHECKS)}")
    make = _maker(target) if isinstance(target, str) else target
    done = Report()
    for name in names:
        result = await run_check(name, make, timeout_s)
        done.results.append(result)
        if report is not None:
            report(result)
    return done


def _maker(url: str) -> MakeStore:
    return lambda: make_store(url)
