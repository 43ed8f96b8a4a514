"""S14 and S15 in hand-made histories: credit in messages and bytes, equal shares, bounded queues."""

from __future__ import annotations

import pytest

from tests.history.scene import START_MS, Scene
from timeline.history import Event


@pytest.fixture
def scene() -> Scene:
    return Scene()


def _received(scene: Scene, *sizes: int) -> None:
    for at, size in enumerate(sizes):
        scene.put(id=f"m{at}")
        scene.receive(id=f"m{at}", birth=100 + at, size=size)
        scene.row(version=2, id=f"m{at}", birth=100 + at, holder="c1")


def test_more_bytes_in_flight_than_credit(scene: Scene) -> None:
    scene.did("consume", consumer="c1", session=1, credit=9, credit_bytes=10, process="c1")
    _received(scene, 6, 5)
    assert scene.broken() == {"S14"}
    scene.events[0].arguments["credit_bytes"] = 11
    assert scene.broken() == set()


def test_a_message_larger_than_the_credit_in_bytes_goes_alone(scene: Scene) -> None:
    scene.did("consume", consumer="c1", session=1, credit=9, credit_bytes=10, process="c1")
    _received(scene, 60)
    assert scene.broken() == set()
    _received(scene, 60, 1)
    assert "S14" in scene.broken()


def test_more_in_the_drivers_hand_than_credit(scene: Scene) -> None:
    scene.did("consume", consumer="c1", session=1, credit=2, credit_bytes=10, process="c1")
    _received(scene, 1)
    received = scene.events[-1].arguments
    for in_hand in ([2, 10], [1, 60]):
        received["in_hand"] = in_hand
        assert scene.broken() == set()
    for in_hand in ([3, 3], [2, 11]):
        received["in_hand"] = in_hand
        assert scene.broken() == {"S14"}


def _deal(scene: Scene, one: int, other: int, credit: int = 9, broker: str = "b1", nbytes: int = 1_000) -> None:
    granted = {"c1": [9, 1_000], "c2": [credit, nbytes]}
    dealt = {"c1": [one, 10 * one], "c2": [other, 10 * other]}
    scene.did("deal", topic="t", broker=broker, granted=granted, dealt=dealt, largest=10)


def test_a_round_that_favours_one(scene: Scene) -> None:
    _deal(scene, 3, 2)
    assert scene.broken() == set()
    _deal(scene, 4, 2)
    assert scene.broken() == {"S14"}


@pytest.mark.parametrize("limit", [{"credit": 2}, {"nbytes": 25}])
def test_who_has_no_credit_left_gets_less(scene: Scene, limit: dict[str, int]) -> None:
    _deal(scene, 6, 2, **limit)
    assert scene.broken() == set()


def test_rounds_that_favour_one_between_them(scene: Scene) -> None:
    for one, other in ((1, 0), (0, 1), (1, 0)):
        _deal(scene, one, other)
    assert scene.broken() == set()
    _deal(scene, 1, 0)
    assert scene.broken() == {"S14"}


@pytest.mark.parametrize("between", ["another broker", "used up", "others"])
def test_what_begins_the_count_of_rounds_anew(scene: Scene, between: str) -> None:
    _deal(scene, 1, 0)
    if between == "used up":
        _deal(scene, 1, 1, credit=1)
    elif between == "others":
        scene.did("deal", topic="t", broker="b1", granted={"c1": [9, 90]}, dealt={"c1": [1, 10]}, largest=10)
    _deal(scene, 1, 0, broker="b2" if between == "another broker" else "b1")
    assert scene.broken() == set()


def test_a_round_that_passes_over_who_has_nothing_in_flight(scene: Scene) -> None:
    scene.did("consume", consumer="c3", topic="t", session=1, process="c3")
    _deal(scene, 1, 1)  # it may not be connected yet
    scene.wait(1_000)
    assert scene.broken() == set()
    _deal(scene, 1, 1)
    assert scene.broken() == {"S14"}
    scene.events.insert(1, Event("faults", "fault", {"what": "crash"}, 1, 1, START_MS, "ok"))
    assert scene.broken() == set()


@pytest.mark.parametrize("why", ["in flight", "a lease ran out", "gone", "another topic", "settled"])
def test_who_may_be_passed_over(scene: Scene, why: str) -> None:
    topic = "other" if why == "another topic" else "t"
    scene.did("consume", consumer="c3", topic=topic, session=1, process="c3")
    scene.wait(1_000)
    token = {"id": "x", "birth": 1, "version": 2}
    if why in ("in flight", "a lease ran out", "settled"):
        _leased_to(scene, "c3", 2)
    if why == "a lease ran out":
        _leased_to(scene, "c1", 3)
    elif why == "settled":
        scene.did("release", "fail", consumer="c3", **token, result={"status": "FENCED"})
    elif why == "gone":
        scene.did("parted", consumer="c3", session=1)
    _deal(scene, 1, 1)
    assert ("S14" in scene.broken()) == (why == "settled")


def _leased_to(scene: Scene, holder: str, version: int) -> None:
    values = {"id": "x", "birth": 1, "version": version, "due_ms": 0, "now_ms": 0, "holder": holder}
    scene.did("commit", took=0.0, kind="lease", **values)


def test_s15_a_queue_past_its_bound(scene: Scene) -> None:
    scene.did("queue", what="calls", most=4, bound=4)
    assert scene.broken() == set()
    scene.did("queue", what="calls", most=5, bound=4)
    assert scene.broken() == {"S15"}
