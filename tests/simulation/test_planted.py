"""Each planted bug is found, by the promise that it breaks, within a stated number of seeds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation import planted
from tests.simulation.world import Pieces, World

WITHIN = 20


@pytest.mark.parametrize(
    ("pieces", "broken"),
    [
        pytest.param({"store": planted.NoFence}, {"S4", "S3", "S16"}, id="no fence"),
        pytest.param({"store": planted.CursorSkip}, {"L1", "S12"}, id="cursor skip"),
        pytest.param({"store": planted.RoundsDown}, {"S1"}, id="rounding down"),
        pytest.param({"node": planted.EagerNode}, {"S8"}, id="answer before commit"),
        pytest.param({"store": planted.Resurrects}, {"S6"}, id="resurrect after cancel"),
        pytest.param({"store": planted.IgnoresExtends}, {"S11"}, id="extend ignored by a lease"),
        pytest.param({"store": planted.ForgetsCalls}, {"S16"}, id="a repeat applied twice"),
    ],
)
def test_planted_bug_is_found(pieces: dict[str, Any], broken: set[str], record_property: Any) -> None:
    for seed in range(WITHIN):
        found = {violation.invariant for violation in World(seed, Pieces(**pieces)).run().verdict.violations}
        if found & broken:
            record_property("seeds", seed + 1)
            return
    pytest.fail(f"not found within {WITHIN} seeds")
