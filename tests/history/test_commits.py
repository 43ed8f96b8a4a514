"""What the store's own side of a history shows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.history.scene import START_MS, StoreScene


@pytest.fixture
def scene() -> StoreScene:
    made = StoreScene()
    made.put()
    made.commit("put", 1, at=made.at - 1)
    return made


def test_a_life_by_the_rules(scene: StoreScene) -> None:
    scene.did("move", id="a", group="g", due_ms=int(START_MS + 100), result={"status": "OK", "version": 2})
    scene.commit("move", 2, due=100, op=5, at=scene.at - 1)
    scene.wait(200)
    scene.commit("lease", 3, due=1_200)
    scene.receive(version=3, due=100)
    scene.commit("extend", 3, due=2_000)
    scene.settle("release", 3, due_ms=int(START_MS + 2_000))
    scene.commit("release", 4, due=2_000, op=6, at=scene.at - 1)
    scene.wait(3_000)
    scene.commit("lease", 5, due=4_200)
    scene.receive(version=5, due=2_000)
    scene.settle("ack", 5)
    scene.commit("ack", 5, at=scene.at - 1)
    assert scene.judge().holds, scene.judge().summary()


def test_a_message_that_another_replaced_is_accounted_for(scene: StoreScene) -> None:
    scene.put(birth=12, sum=8, replace=True)
    scene.commit("replace", 1, op=12, at=scene.at - 1)
    scene.commit("put", 1, birth=12, sum=8, at=scene.at - 1)
    scene.wait(10)
    scene.commit("lease", 2, due=1_000, birth=12)
    scene.receive(version=2, birth=12, sum=8)
    scene.settle("ack", 2, birth=12)
    scene.commit("ack", 2, birth=12, at=scene.at - 1)
    assert scene.judge().holds, scene.judge().summary()


@pytest.mark.parametrize(("at", "holds"), [(500, False), (1_500, True)])
def test_a_put_that_was_long_on_its_way_may_find_gone_what_expired_meanwhile(at: float, holds: bool) -> None:
    scene = StoreScene()
    scene.commit("put", 1, due=100, expires_ms=int(START_MS + 1_000))
    now_ms = scene.now_ms
    scene.wait(at)
    scene.commit("put", 1, due=3_000, birth=12, now_ms=now_ms)
    assert ("stored over" in scene.judge().summary()) != holds


@pytest.mark.parametrize(
    ("story", "broken"),
    [
        ([("lease", 2, 1_000, {}), ("lease", 3, 2_000, {})], "S11"),
        ([("lease", 2, 1_000, {}), ("extend", 2, 5_000, {}), ("lease", 3, 2_000, {"now_ms": START_MS + 2_000})], "S11"),
        ([("move", 2, 5_000, {"op": 5}), ("lease", 3, 6_000, {})], "S7"),
        ([("move", 2, 5_000, {"op": 5}), ("move", 3, 5_000, {"op": 5})], "S16"),
        ([("lease", 2, 1_000, {}), ("ack", 2, 0, {}), ("lease", 3, 2_000, {})], "S6"),
        ([("cancel", 1, 0, {}), ("lease", 2, 1_000, {})], "S6"),
        ([("lease", 3, 1_000, {})], "S3"),
        ([("lease", 2, 1_000, {}), ("release", 3, 0, {}), ("lease", 4, 1_000, {}), ("ack", 2, 0, {})], "S4"),
        ([("lease", 2, 1_000, {"birth": 12})], "S4"),
        ([("put", 1, 0, {"birth": 12})], "S3"),
        ([("put", 1, 0, {"birth": 12, "expires_ms": START_MS + 9_000}), ("put", 1, 0, {"birth": 13})], "S3"),
        ([("lease", 2, 1_000, {"was_due_ms": START_MS + 1})], "S3"),
        ([("lease", 2, 1_000, {}), ("ack", 2, 0, {"holder": "c2"})], "S4"),
        ([("lease", 2, 1_000, {}), ("bury", 2, 0, {}), ("lease", 3, 4_000, {"now_ms": START_MS + 3_000})], "S6"),
        ([("lease", 2, 1_000, {}), ("extend", 2, 500, {})], "S11"),
        ([("lease", 2, 1_000, {}), ("move", 3, 5_000, {"op": 5})], "S3"),
        ([("lease", 2, 1_000, {}), ("cancel", 2, 0, {"op": 5, "leased": False})], "S3"),
        ([("lease", 2, 1_000, {}), ("bury", 2, 0, {"holder": "c2"})], "S4"),
        ([("revive", 2, 0, {"op": 5})], "S3"),
        ([("purge", 1, 0, {"op": 5})], "S3"),
        ([("lease", 2, 1_000, {}), ("replace", 2, 0, {"op": 12}), ("put", 1, 0, {"birth": 12})], "S3"),
        ([("lease", 2, 1_000, {}), ("bury", 2, 0, {}), ("replace", 2, 0, {"op": 12})], "S6"),
        ([("replace", 1, 0, {"op": 12}), ("lease", 2, 1_000, {})], "S6"),
        ([("replace", 1, 0, {"op": 12}), ("put", 1, 0, {"birth": 12})], "S9"),
    ],
)
def test_each_broken_rule_is_named(
    scene: StoreScene, story: list[tuple[str, int, float, dict[str, Any]]], broken: str
) -> None:
    for kind, version, due, more in story:
        scene.commit(kind, version, due=due, **more)
    assert broken in scene.broken()


def test_ahead_of_its_time_within_the_window_only(scene: StoreScene) -> None:
    scene.commit("move", 2, due=100, op=5)
    scene.commit("lease", 3, due=1_100, due_before_ms=int(START_MS + 100))
    assert "S7" not in scene.broken()
    topic = scene.did("topic", name="", settings={"lease_ahead_ms": 100})
    assert "S7" not in scene.broken()
    topic.arguments["settings"]["lease_ahead_ms"] = 50
    assert "S7" in scene.broken()


def test_cancelled_under_a_lease_where_that_was_asked(scene: StoreScene) -> None:
    scene.commit("lease", 2, 1_000)
    scene.commit("cancel", 2, op=5, leased=True)
    assert "S3" not in scene.broken()
