"""Each planted bug is found, by the promise that it breaks, within a stated number of seeds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation import planted
from tests.simulation.world import Pieces, World

# In 80 seeds each was found in so many of them, and never were more than so many in a row blind to it:
# no fence 57, 4 · cursor skip 26, 8 · rounding down 80, 1 · answer before commit 7, 32 · resurrect after cancel 79, 2 ·
# extend ignored 66, 3 · a repeat applied twice 37, 11.


@pytest.mark.parametrize(
    ("pieces", "broken", "within"),
    [
        pytest.param({"store": planted.NoFence}, {"S4"}, 10, id="no fence"),
        pytest.param({"store": planted.CursorSkip}, {"L1", "S12"}, 20, id="cursor skip"),
        pytest.param({"store": planted.RoundsDown}, {"S1"}, 3, id="rounding down"),
        pytest.param({"node": planted.EagerNode}, {"S8"}, 50, id="answer before commit"),
        pytest.param({"store": planted.Resurrects}, {"S6"}, 5, id="resurrect after cancel"),
        pytest.param({"store": planted.IgnoresExtends}, {"S11"}, 10, id="extend ignored by a lease"),
        pytest.param({"store": planted.ForgetsCalls}, {"S16"}, 30, id="a repeat applied twice"),
    ],
)
def test_planted_bug_is_found(pieces: dict[str, Any], broken: set[str], within: int) -> None:
    for seed in range(within):
        found = {violation.invariant for violation in World(seed, Pieces(**pieces)).run().verdict.violations}
        if found & broken:
            return
    pytest.fail(f"not found within {within} seeds")
