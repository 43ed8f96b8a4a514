"""The conformance suite: the promises of every store, shipped so that plugins by others can prove themselves.

`run_suite(url)` runs it, as does `timeline check-store URL`. `CHECKS` names each check with its promise.
`run_check(name, make)` runs one check, so that a test suite can make each of them a test:

    @pytest.mark.parametrize("name", CHECKS)
    async def test_store(name):
        (await run_check(name, lambda: make_store("scheme://…"))).raise_failed()

`trial.py` has the tools of checks, `suite.py` the registry and the runner; the other modules hold the checks, one group
each. `against_rules.py` compares a store with the reference store, `storage_plugins.reference`.
"""

from timeline.storage_plugins.conformance import (
    against_rules,
    leasing,
    limits,
    mutating,
    putting,
    races,
    settling,
    topics,
    walking,
)
from timeline.storage_plugins.conformance.suite import (
    CHECKS,
    CallWatch,
    Check,
    Outcome,
    Result,
    SuiteReport,
    named_checks,
    run_check,
    run_suite,
)
from timeline.storage_plugins.conformance.trial import MakeStore, StoreViolation, Trial
from timeline.storage_plugins.contract import warn_renamed

GROUPS = (topics, putting, leasing, settling, mutating, walking, limits, races, against_rules)
"""The modules that hold checks, easy ones first: plugin authors meet the simple before the random."""

_PLACES = {group.__name__: place for place, group in enumerate(GROUPS)}
for _check in sorted(CHECKS.values(), key=lambda check: _PLACES[check.run.__module__]):
    CHECKS[_check.name] = CHECKS.pop(_check.name)

_RENAMED = {"Report": SuiteReport, "Violation": StoreViolation}


def __getattr__(name: str) -> type:
    if name in _RENAMED:
        warn_renamed(f"conformance.{name}", _RENAMED[name].__name__)
        return _RENAMED[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CHECKS",
    "GROUPS",
    "CallWatch",
    "Check",
    "MakeStore",
    "Outcome",
    "Result",
    "StoreViolation",
    "SuiteReport",
    "Trial",
    "named_checks",
    "run_check",
    "run_suite",
]
