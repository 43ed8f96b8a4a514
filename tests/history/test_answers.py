"""What was answered, handed out and dumped, held against the store's side."""

from __future__ import annotations

from typing import Any

import pytest

from tests.history.scene import LEASE_MS, START_MS, StoreScene


@pytest.fixture
def scene() -> StoreScene:
    """A message that was put and stored, due now."""
    made = StoreScene()
    made.put()
    made.commit("put", 1, at=made.at - 1)
    return made


def _put_again(scene: StoreScene) -> None:
    """The put, sent again, stores a second life of the same birth."""
    scene.commit("put", 1)
    scene.events[0].returned = scene.at
    scene.events[0].result["repeated"] = True


def _leased(scene: StoreScene, version: int = 2, **more: Any) -> None:
    scene.commit("lease", version, due=scene.at + LEASE_MS)
    scene.receive(version=version, until=scene.at + LEASE_MS, **more)


@pytest.mark.parametrize("operation", ["ack", "release", "extend", "bury"])
def test_s8_a_settle_answered_and_not_done(scene: StoreScene, operation: str) -> None:
    _leased(scene)
    scene.settle(operation, due_ms=int(START_MS))
    assert "S8" in scene.broken()


@pytest.mark.parametrize("operation", ["move", "cancel", "revive", "purge"])
def test_s8_a_mutation_answered_and_not_done(scene: StoreScene, operation: str) -> None:
    scene.did(operation, id="a", group="g", due_ms=int(START_MS), result={"status": "OK"})
    assert "S8" in scene.broken()


def test_s8_a_put_answered_before_it_was_stored() -> None:
    scene = StoreScene()
    scene.put(due=1_000)
    scene.row(due=1_000)
    scene.commit("put", 1, due=1_000)
    assert "S8" in scene.broken()


def test_s8_an_ack_that_found_nothing_is_done_only_where_it_was_sent_again(scene: StoreScene) -> None:
    _leased(scene)
    scene.did("cancel", id="a", group="g", leased=True)
    scene.commit("cancel", 2, at=scene.at - 1, op=4)
    ack = scene.settle("ack")
    assert scene.broken() == {"S8"}
    ack.result["repeated"] = True
    assert scene.broken() == set()


@pytest.mark.parametrize(
    ("operation", "status", "broken"),
    [
        ("ack", "NOT_FOUND", "S8"),
        ("ack", "FENCED", "S5"),
        ("release", "DEAD", "S4"),
        ("move", "NOT_FOUND", "S8"),
        ("move", "DEAD", "S3"),
        ("cancel", "FORBIDDEN", "S3"),
        ("purge", "LEASED", "S3"),
        ("get", "NOT_FOUND", "S8"),
    ],
)
def test_a_refusal_that_nothing_explains(scene: StoreScene, operation: str, status: str, broken: str) -> None:
    leased = operation in ("ack", "release")
    if leased:
        _leased(scene)
        scene.settle(operation, outcome="fail", result={"status": status}, due_ms=int(START_MS))
    else:
        asked = {"due_ms": int(START_MS)} if operation == "move" else {}
        scene.did(operation, "fail", id="a", group="g", result={"status": status}, **asked)
    due = scene.events[-2].arguments["lease_until_ms"] - START_MS if leased else 0
    scene.row(version=2 if leased else 1, due=due, scheduled=0, holder="c1" if leased else "")
    assert broken in scene.broken()


@pytest.mark.parametrize(
    ("operation", "asked", "status"),
    [
        ("purge", {"group": "other"}, "EXISTS"),
        ("move", {"group": "other", "if_version": 9}, "FENCED"),
        ("revive", {"group": "g", "if_version": 9}, "EXISTS"),
    ],
)
def test_a_refusal_that_another_comes_before(
    scene: StoreScene, operation: str, asked: dict[str, Any], status: str
) -> None:
    scene.did(operation, "fail", id="a", due_ms=int(START_MS), **asked, result={"status": status})
    scene.row()
    assert scene.broken() & {"S3", "S5"}


def test_s4_what_has_become_of_it_is_not_told_to_a_stale_token(scene: StoreScene) -> None:
    _leased(scene)
    scene.settle("bury")
    scene.commit("bury", 2, at=scene.at - 1)
    scene.settle("ack", version=1, outcome="fail", result={"status": "DEAD"})
    scene.row(version=2, due=scene.events[2].arguments["due_ms"] - START_MS, died_ms=1, holder="c1")
    assert "S4" in scene.broken()


def test_refusals_that_are_explained(scene: StoreScene) -> None:
    asked = {"id": "a", "group": "g"}
    scene.did("move", "fail", id="a", group="other", due_ms=int(START_MS), result={"status": "FORBIDDEN"})
    scene.did("move", "fail", **asked, due_ms=int(START_MS), if_version=7, result={"status": "FENCED"})
    scene.did("purge", "fail", **asked, result={"status": "EXISTS"})
    scene.put(sum=8, outcome="fail", result={"status": "EXISTS"})
    scene.put(result={"status": "DUPLICATE", "version": 1})
    _leased(scene)
    scene.did("cancel", "fail", **asked, result={"status": "LEASED"})
    scene.settle("ack", version=1, outcome="fail", result={"status": "FENCED"})
    scene.settle("bury")
    scene.commit("bury", 2, at=scene.at - 1)
    scene.did("cancel", "fail", **asked, result={"status": "DEAD"})
    scene.did("purge", **asked)
    scene.commit("purge", 2, at=scene.at - 1, op=9)
    scene.did("get", "fail", id="a", result={"status": "NOT_FOUND"})
    scene.settle("ack", outcome="fail", result={"status": "NOT_FOUND"})
    assert scene.judge().holds, scene.judge().summary()


def test_s3_a_move_with_a_version_met_another(scene: StoreScene) -> None:
    asked = {"id": "a", "group": "g", "due_ms": int(START_MS)}
    for version in (2, 3):
        scene.did("move", **asked, if_version=1, result={"status": "OK"})
        scene.commit("move", version, op=version, at=scene.at - 1)
    scene.row(version=3)
    assert scene.broken() == {"S3"}


@pytest.mark.parametrize(("if_version", "broken"), [(1, set()), (2, {"S3"})])
def test_s3_a_cancel_with_a_version_met_another(scene: StoreScene, if_version: int, broken: set[str]) -> None:
    scene.did("cancel", id="a", group="g", if_version=if_version)
    scene.commit("cancel", 0, op=4, at=scene.at - 1)
    assert scene.broken() == broken


def test_s9_a_change_that_nobody_asked_for(scene: StoreScene) -> None:
    scene.commit("move", 2, op=5)
    scene.row(version=2)
    assert scene.broken() == {"S9"}


def test_s16_one_call_under_two_operation_ids(scene: StoreScene) -> None:
    scene.did("move", id="a", group="g", due_ms=int(START_MS), took=10, result={"status": "OK", "repeated": True})
    scene.commit("move", 2, op=5, at=scene.at - 8)
    scene.row(version=2)
    assert scene.broken() == set()
    scene.commit("move", 3, op=6, at=scene.at - 5)
    scene.rows[0]["version"] = 3
    assert scene.broken() == {"S16"}


def test_s16_each_bulk_shift_has_one_operation_id(scene: StoreScene) -> None:
    scene.events[0].arguments["tag"] = "spring"
    scene.did("move_tag", tag="spring", group="g", by_ms=500, took=10, result={})
    scene.commit("move", 2, due=500, op=5, at=scene.at - 8)
    scene.commit("move", 3, due=1_000, op=6, at=scene.at - 5)
    scene.row(version=3, due=1_000)
    assert "S16" in scene.broken()


def test_s9_a_put_that_met_its_like_stored_nothing(scene: StoreScene) -> None:
    scene.did("cancel", id="a", group="g")
    scene.commit("cancel", 1, op=4, at=scene.at - 1)
    again = scene.put(result={"status": "DUPLICATE", "version": 1})
    scene.commit("put", 1, birth=12, at=scene.at - 1)
    scene.row(birth=12)
    assert "S9" in scene.broken()
    again.result["repeated"] = True
    assert scene.broken() == set()


def test_s9_an_id_that_its_topic_remembers_is_not_stored_again(scene: StoreScene) -> None:
    _leased(scene)
    scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    scene.put(sum=8)
    scene.commit("put", 1, birth=12, sum=8, at=scene.at - 1)
    scene.row(birth=12, sum=8, read_sum=8)
    assert scene.broken() == set()
    scene.did("topic", name="", settings={"remember_ms": 60_000})
    assert scene.broken() == {"S9"}


def test_s9_handed_out_without_a_lease(scene: StoreScene) -> None:
    scene.receive()
    scene.row()
    assert "S9" in scene.broken()


@pytest.mark.parametrize("kind", ["release", "ack", "bury"])
def test_s6_handed_out_though_its_lease_was_over(scene: StoreScene, kind: str) -> None:
    due = scene.at + LEASE_MS
    scene.commit("lease", 2, due=due)
    scene.commit(kind, 3 if kind == "release" else 2, due=due, unseen=True)
    scene.receive(until=due)
    if kind != "ack":
        dead = {"died_ms": 1, "holder": "c1"} if kind == "bury" else {}
        scene.row(version=3 if kind == "release" else 2, due=due, scheduled=0, **dead)
    assert "S6" in scene.broken()
    scene.events[-1].invoked = scene.events[-3].invoked + 0.5
    assert not any("its lease was over" in one.sentence for one in scene.judge().violations)


def test_handed_out_under_the_lease_of_a_second_life_with_the_same_token(scene: StoreScene) -> None:
    _leased(scene)
    scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    _put_again(scene)
    _leased(scene)
    scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    assert scene.broken() == set()


def test_s9_a_put_that_nobody_sent_again_lives_twice(scene: StoreScene) -> None:
    _leased(scene)
    scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    scene.commit("put", 1)
    scene.events[0].returned = scene.at
    scene.row()
    assert scene.broken() == {"S9"}
    scene.events[0].result["repeated"] = True
    assert scene.broken() == set()


def test_s7_handed_out_under_another_schedule(scene: StoreScene) -> None:
    _leased(scene, scheduled=-100)
    scene.row(version=2, due=scene.at - 1 + LEASE_MS, scheduled=0, holder="c1")
    assert "S7" in scene.broken()


@pytest.mark.parametrize(
    ("row", "broken"), [(None, "S8"), ({"version": 4}, "S3"), ({"due": 50}, "S3"), ({"died_ms": 9}, "S3")]
)
def test_the_dump_is_where_the_changes_led(scene: StoreScene, row: dict[str, Any] | None, broken: str) -> None:
    if row is not None:
        scene.row(**row)
    assert broken in scene.broken()


def test_s6_the_dump_has_what_the_changes_ended(scene: StoreScene) -> None:
    scene.did("cancel", "unknown", id="a", group="g")
    scene.commit("cancel", 1, op=4)
    scene.row()
    assert "S6" in scene.broken()


def test_a_life_lived_twice_is_known_from_the_store(scene: StoreScene) -> None:
    """Without the store's side a put that nobody answered might have stored again after any end: here it did not."""
    scene.events[0].outcome, scene.events[0].result = "unknown", {}
    _leased(scene)
    _leased(scene)
    scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    assert "S2" in scene.broken()


def test_two_lives_of_one_birth_are_each_acknowledged(scene: StoreScene) -> None:
    """The documented doubling: a put sent again after its message was settled."""
    _leased(scene)
    scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    _put_again(scene)
    _leased(scene)
    scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    assert scene.broken() == set()


def test_an_ack_sent_again_may_meet_the_second_life_of_its_birth(scene: StoreScene) -> None:
    _leased(scene)
    ack = scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    _put_again(scene)
    _leased(scene)
    scene.commit("ack", 2)
    ack.returned = scene.at
    assert scene.broken() == {"S16"}
    ack.result["repeated"] = True
    assert scene.broken() == set()


def test_a_delivery_under_way_may_meet_the_first_lifes_ack_sent_again(scene: StoreScene) -> None:
    """Both lives have one token: what ended the second one's lease is nothing that whoever hands it out could know."""
    _leased(scene)
    ack = scene.settle("ack")
    scene.commit("ack", 2, at=scene.at - 1)
    _put_again(scene)
    due = scene.at + LEASE_MS
    scene.commit("lease", 2, due=due)
    scene.commit("ack", 2)
    ack.returned, ack.result["repeated"] = scene.at, True
    scene.receive(until=due)
    assert scene.broken() == set()
