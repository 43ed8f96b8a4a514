"""What the store's own side of a history shows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.history.scene import START_MS, Scene


class StoreScene(Scene):
    """A scene told by the store alone."""

    def commit(self, kind: str, version: int, due: float = 0, **more: Any) -> None:
        values = {"birth": 11, "now_ms": self.now_ms, "holder": "c1", "op": 0, **more}
        self.did("commit", id="a", kind=kind, version=version, due_ms=int(START_MS + due), **values)


@pytest.fixture
def scene() -> StoreScene:
    made = StoreScene()
    made.put()
    made.commit("put", 1)
    return made


def test_a_life_by_the_rules(scene: StoreScene) -> None:
    scene.commit("move", 2, due=100, op=5)
    scene.wait(200)
    scene.commit("lease", 3, due=1_200)
    scene.commit("extend", 3, due=2_000)
    scene.commit("release", 4, due=2_000, op=6)
    scene.wait(3_000)
    scene.commit("lease", 5, due=4_200)
    scene.commit("ack", 5)
    assert scene.broken() == {"S8"}  # for no ack is in the consumer's own history
    scene.events[-1].operation = "ack"
    assert "S8" not in scene.broken()


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
