"""The conformance suite: what must hold of every store, shipped so that a stranger's plugin can prove itself.

`run_suite(url)` runs it (so does `timeline check-store URL`); `CHECKS` names each check with the sentence that must
hold; `run_check(name, make)` runs one, which is how a test suite makes each check a test of its own:

    @pytest.mark.parametrize("name", CHECKS)
    async def test_store(name):
        (await run_check(name, lambda: make_store("scheme://…"))).raise_failed()

`trial.py` is what checks work with, `suite.py` registry and runner; the other modules hold the checks, one a group.
`against_rules.py` compares a store with the reference store, `storage_plugins.reference`.
"""

from timeline.storage_plugins.conformance import (
    against_rules,
    leasing,
    limits,
    mutating,
    putting,
    races,
    settling,
    sweeping,
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
    run_check,
    run_suite,
)
from timeline.storage_plugins.conformance.trial import MakeStore, StoreViolation, Trial

GROUPS = (topics, putting, leasing, settling, mutating, walking, sweeping, limits, races, against_rules)
"""The modules that hold checks, easy ones first: who writes a plugin meets what is simple before what is random."""

_PLACES = {group.__name__: place for place, group in enumerate(GROUPS)}
for _check in sorted(CHECKS.values(), key=lambda check: _PLACES[check.run.__module__]):
    CHECKS[_check.name] = CHECKS.pop(_check.name)

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
    "run_check",
    "run_suite",
]
