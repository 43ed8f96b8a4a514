"""Names of the store contract that were renamed: plugins by others go on for one version, with a warning."""

from __future__ import annotations

from types import ModuleType

import pytest

from timeline.storage_plugins import conformance, contract
from timeline.storage_plugins.reference import ReferenceStore


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (contract, "Leased", contract.LeasedRows),
        (conformance, "Report", conformance.SuiteReport),
        (conformance, "Violation", conformance.StoreViolation),
    ],
)
def test_an_old_name_still_works_and_warns(module: ModuleType, old: str, new: type) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is called {new.__name__} now"):
        assert getattr(module, old) is new


def test_a_store_that_says_in_turn_learns_the_new_name() -> None:
    with pytest.warns(DeprecationWarning, match="in_turn is called tells_commit_seq"):

        class Numbered(ReferenceStore):
            in_turn = True

    assert not Numbered.tells_commit_seq
