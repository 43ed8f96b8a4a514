"""The registry of checks and the runner. It does not need pytest; a test suite calls `run_check` for each name."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import itertools
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast

from timeline.clock import Clock
from timeline.errors import Invalid
from timeline.storage_plugins import make_store
from timeline.storage_plugins.conformance.trial import MakeStore, StoreViolation, Trial
from timeline.storage_plugins.contract import Capabilities, Store

CHECK_TIMEOUT_S = 300.0
"""A check that takes longer has hung."""
CALL_TIMEOUT_S = 60.0
"""A call of the plugin that takes longer has hung."""

Run = Callable[[Trial], Awaitable[None]]
Needs = Callable[[Capabilities], bool]


@dataclass(frozen=True, slots=True)
class Check:
    """One promise of a store. `needs`: for which capabilities it is asked."""

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
    """The result of a check. `sentence`: the promise. `found`: what was seen instead, or why it was skipped. `trace`:
    the traceback of the plugin's error. `hung`: a call did not return, so that no other check was run."""

    name: str
    outcome: Outcome
    sentence: str
    found: str = ""
    trace: str = ""
    hung: bool = False

    def raise_failed(self) -> None:
        """Raise StoreViolation when the check failed."""
        if self.outcome is Outcome.FAILED:
            raise StoreViolation(f"{self.name}: {self.sentence}\n{self.found}")


@dataclass(slots=True)
class SuiteReport:
    """The results of a run, in order."""

    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> list[Result]:
        return [result for result in self.results if result.outcome is Outcome.FAILED]

    @property
    def ok(self) -> bool:
        """Whether at least one check passed and none failed."""
        return not self.failed and any(result.outcome is Outcome.PASSED for result in self.results)

    def counts(self) -> dict[str, int]:
        """Return how many there are of each outcome."""
        return {outcome.value: sum(result.outcome is outcome for result in self.results) for outcome in Outcome}


class Hung(StoreViolation):
    """A call of the plugin did not return."""


class CallWatch:
    """Bounds each call of the stores that it wraps to `most_s`."""

    def __init__(self, most_s: float = CALL_TIMEOUT_S) -> None:
        self.most_s = most_s
        self._clock = Clock()
        self._numbers = itertools.count()
        self._under_way: dict[int, tuple[str, float]] = {}

    def bounding(self, store: Store) -> Store:
        """Return `store`, whose calls raise Hung when they do not return in time."""
        return cast(Store, _Bounded(store, self))

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Note that a call of that name runs within it."""
        number = next(self._numbers)
        self._under_way[number] = name, self._clock.monotonic_ms()
        try:
            yield
        finally:
            del self._under_way[number]

    @contextmanager
    def telling(self, stuck: Callable[[str], None]) -> Iterator[None]:
        """Within it, report a call that blocks the event loop, or that goes on though it was cancelled. `stuck` is
        called on another thread with a sentence. Nothing else can be done about such a call from within the process."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(self.most_s / 4):
                late_ms = self._clock.monotonic_ms() - 1.5 * self.most_s * 1000
                names = [name for name, since_ms in list(self._under_way.values()) if since_ms < late_ms]
                if names:
                    stuck(f"{hung(names[0], self.most_s)}. It blocks the event loop, or goes on though it is cancelled")
                    return

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()


def hung(name: str, most_s: float) -> str:
    """Return the sentence for a call that does not return."""
    return f"{name} did not return within {most_s:g} s"


class _Bounded:
    """A store whose calls are bounded, and named in what they raise."""

    def __init__(self, store: Store, watch: CallWatch) -> None:
        self._store, self._watch = store, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not inspect.isroutine(found) or not inspect.iscoroutinefunction(getattr(Store, name, None)):
            return found

        async def bounded(*given: Any, **named: Any) -> Any:
            watch = self._watch
            with watch.call(name):
                try:
                    async with asyncio.timeout(watch.most_s) as within:
                        answer = found(*given, **named)
                        if not inspect.isawaitable(answer):
                            raise StoreViolation(f"{name} is no coroutine function: write 'async def {name}'")
                        return await answer
                except TimeoutError as late:
                    if not within.expired():
                        raise
                    raise Hung(hung(name, watch.most_s)) from late
                except Exception as error:
                    error.add_note(f"The plugin's {name} raised it.")
                    raise
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    raise StoreViolation(f"{name} raised CancelledError, though nobody cancelled it") from error
                except SystemExit as error:  # it would end the run, with the exit code of a success perhaps
                    raise StoreViolation(f"{name} raised {error!r:.80}, which ends the program") from error

        return bounded


CHECKS: dict[str, Check] = {}
"""All checks by name, in the order in which they run."""


def check(needs: Needs = lambda _: True) -> Callable[[Run], Run]:
    """Register a check: `async def check_…(trial)` whose docstring is the promise."""

    def register(run: Run) -> Run:
        name = getattr(run, "__name__", "").removeprefix("check_")
        sentence = " ".join((run.__doc__ or "").split())
        if not name or not sentence or name in CHECKS:
            raise Invalid(f"a check needs a name of its own and a docstring: {name!r}")
        CHECKS[name] = Check(name, sentence, run, needs)
        return run

    return register


NOT_ASKED = "the store declares that this does not apply to it"


async def run_check(
    name: str, make: MakeStore, timeout_s: float = CHECK_TIMEOUT_S, watch: CallWatch | None = None
) -> Result:
    """Run one check on stores that `make` makes, each opened and closed by the check. `watch`: bounds their calls."""
    found = CHECKS[name]
    calls = watch or CallWatch()
    trial = Trial(lambda: calls.bounding(make()))
    try:
        async with asyncio.timeout(timeout_s), trial:
            # Asked once it is open: a plugin declares what its server's settings promise.
            if not found.needs(trial.store.capabilities):
                return Result(name, Outcome.SKIPPED, found.sentence, NOT_ASKED)
            await found.run(trial)
    except TimeoutError:
        return Result(name, Outcome.FAILED, found.sentence, f"not done after {timeout_s:g} s")
    except StoreViolation as violation:
        told = _told(str(violation), violation)
        return Result(name, Outcome.FAILED, found.sentence, told, hung=isinstance(violation, Hung))
    except Exception as error:  # whatever a stranger's plugin raises is a finding, and the other checks go on
        trace = "".join(traceback.format_exception(error))
        told = _told(f"raised {type(error).__name__}: {error}", error)
        return Result(name, Outcome.FAILED, found.sentence, told, trace)
    return Result(name, Outcome.PASSED, found.sentence)


def _told(text: str, error: BaseException) -> str:
    return "\n".join((text, *getattr(error, "__notes__", ())))


def named_checks(names: Iterable[str]) -> list[str]:
    """Return `names`. Raise Invalid, with the nearest names, for one that is no check."""
    wanted = list(names)
    for name in wanted:
        if name not in CHECKS:
            near = difflib.get_close_matches(name.lower(), CHECKS, n=3) or [
                one for one in CHECKS if name.lower() in one
            ]
            hint = f"Did you mean {' or '.join(near[:3])}? " if name and near else ""
            listed = f"'timeline check-store --list' lists all {len(CHECKS)}"
            raise Invalid(f"no such check: {name!r:.80}. {hint}{listed}")
    return wanted


async def run_suite(
    target: str | MakeStore,
    only: Iterable[str] | None = None,
    report: Callable[[Result], None] | None = None,
    timeout_s: float = CHECK_TIMEOUT_S,
    *,
    begun: Callable[[str], None] | None = None,
    watch: CallWatch | None = None,
) -> SuiteReport:
    """Run all checks, or those named in `only`, one after the other, each on fresh topics. A call that does not return
    ends the run: later checks would wait for it too.

    `target`: a store's URL, or a callable that makes a store that is not open yet, each time on the same data. `begun`
    is called with the name of each check before it runs, `report` with each result. `watch`: bounds the plugin's calls.
    Raise Invalid for a name in `only` that is no check, StoreRefused for a URL that names no store.
    """
    names = named_checks(CHECKS if only is None else only)
    make = _maker(target) if isinstance(target, str) else target
    done = SuiteReport()
    for name in names:
        if begun is not None:
            begun(name)
        result = await run_check(name, make, timeout_s, watch)
        done.results.append(result)
        if report is not None:
            report(result)
        if result.hung:
            break
    return done


def _maker(url: str) -> MakeStore:
    return lambda: make_store(url)
