"""S12 by the store's side: what dealing rounds leave lying, and what nobody looks for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.history.scene import LEASE_MS, START_MS, StoreScene
from timeline.model import PULL_PREFIX


@pytest.fixture
def scene() -> StoreScene:
    """A message that was put, due now, on a topic whose settings are known."""
    made = StoreScene()
    made.did("topic", name="", settings={"buckets": 1, "redelivery_backoff_ms": 100})
    made.put()
    made.commit("put", 1, at=made.at - 1, size=10)
    made.row()
    return made


def _round(scene: StoreScene, **more: Any) -> None:
    asked = {"asked": scene.at, "now_ms": scene.now_ms, "overdue_ms": 0, "buckets": None}
    dealt = more.pop("dealt", [0, 0])
    holder = more.pop("holder", "c1")
    granted = {holder: more.pop("granted", [5, 100])}
    scene.did("deal", topic="", **{"broker": "b", **asked, **more}, granted=granted, dealt={holder: dealt}, largest=0)


def test_s12_a_round_with_credit_left_passes_over_what_is_due(scene: StoreScene) -> None:
    _round(scene)
    assert scene.broken() == {"S12"}


@pytest.mark.parametrize(
    "why",
    [
        {"granted": [0, 100]},
        {"granted": [5, 9]},
        {"granted": [5, 29], "dealt": [1, 20]},
        {"granted": [1, 100], "dealt": [1, 10]},
        {"buckets": [1]},
        {"overdue_ms": 2_000},
        {"now_ms": START_MS - 1},
    ],
)
def test_what_a_round_may_leave(scene: StoreScene, why: dict[str, Any]) -> None:
    _round(scene, **why)
    assert scene.broken() == set()


def test_what_changed_while_a_round_went_on_may_have_been_there_or_not(scene: StoreScene) -> None:
    _round(scene, asked=0.0)
    assert scene.broken() == set()
    scene.rows.clear()
    scene.did("cancel", id="a", group="g")
    scene.commit("cancel", 1, op=4, at=scene.at - 1)
    scene.events[-3].returned = scene.at
    assert scene.broken() == set()


def test_a_lease_that_ran_out_rests_for_the_backoff(scene: StoreScene) -> None:
    scene.commit("lease", 2, due=scene.at + LEASE_MS, at=scene.at)
    scene.receive(until=scene.at + LEASE_MS)
    scene.wait(LEASE_MS + 50)
    scene.rows[0].update(version=2, due_ms=scene.events[-1].arguments["lease_until_ms"], holder="c1")
    _round(scene)
    assert scene.broken() == set()
    scene.wait(50)
    _round(scene)
    assert scene.broken() == {"S12"}


def test_what_has_expired_is_not_leased(scene: StoreScene) -> None:
    for event in scene.events[1:3]:
        event.arguments["expires_ms"] = scene.now_ms
    scene.wait(5)
    _round(scene)
    assert "S12" not in scene.broken()


def test_s12_nobody_looks_for_what_comes_due(scene: StoreScene) -> None:
    scene.did("move", id="a", group="g", due_ms=int(START_MS + 300), result={"status": "OK", "version": 2})
    scene.commit("move", 2, due=300, op=5, at=scene.at - 1)
    scene.rows[0].update(version=2, due_ms=int(START_MS + 300), scheduled_ms=int(START_MS + 300))
    _round(scene)
    assert scene.broken() == set()
    scene.wait(900)
    scene.did("healed")
    assert scene.broken() == {"S12"}


@pytest.mark.parametrize(
    "why", ["no credit", "a take's credit", "another broker's", "a round", "a fault", "paused", "a lease ran out"]
)
def test_why_nobody_may_look(scene: StoreScene, why: str) -> None:
    scene.did("move", id="a", group="g", due_ms=int(START_MS + 300), result={"status": "OK", "version": 2})
    scene.commit("move", 2, due=300, op=5, at=scene.at - 1)
    scene.rows[0].update(version=2, due_ms=int(START_MS + 300), scheduled_ms=int(START_MS + 300))
    holder = f"{PULL_PREFIX}b:1" if why == "a take's credit" else "c1"  # which goes when the take is answered
    _round(scene, granted=[0, 100] if why == "no credit" else [5, 100], holder=holder)
    if why == "another broker's":  # dealt its bucket before this one did, or does now
        _round(scene, granted=[0, 100], broker="a")
        _round(scene)
    if why == "a fault":
        scene.did("fault", what="pause broker")
    elif why == "paused":
        scene.did("topic", name="", settings={"paused": True})
    elif why == "a lease ran out":
        for kind, version in (("put", 1), ("lease", 2), ("lease", 3)):
            scene.commit(kind, version, id="b")
    scene.at = 350.0
    if why == "a round":
        _round(scene, granted=[0, 100])
    scene.wait(900)
    scene.did("healed")
    assert "S12" not in scene.broken()
