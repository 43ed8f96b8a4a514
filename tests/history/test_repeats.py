"""The checker on what comes again, comes late, or comes too much: S10 to S16, L1, and lives that follow each other."""

from __future__ import annotations

import pytest

from tests.history.scene import LEASE_MS, START_MS, Scene
from timeline.history import Event


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_s10_delivered_again_while_its_lease_ran(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.wait(10)
    scene.receive(version=3, consumer="c2")
    scene.settle("ack", version=3, consumer="c2")
    verdict = scene.judge()
    assert {violation.invariant for violation in verdict.violations} == {"S10"}
    assert verdict.counts["doubled"] == 1 and verdict.counts["redelivered"] == 1


@pytest.mark.parametrize("why", ["ran out", "released", "release unanswered", "another session", "buried and revived"])
def test_s10_redeliveries_that_are_explained(scene: Scene, why: str) -> None:
    scene.put()
    scene.receive()
    version, session, due = 3, 1, 0.0
    if why == "ran out":
        scene.wait(LEASE_MS)
    elif why == "released":
        scene.settle("release", in_ms=0, result={"status": "OK", "version": 3})
        version, due = 4, scene.at - 2
    elif why == "release unanswered":
        scene.settle("release", outcome="unknown", in_ms=0)
        version, due = 4, scene.at - 2
    elif why == "another session":
        session = 2
    else:
        scene.settle("bury")
        scene.did("revive", id="a", group="g", due_ms=int(START_MS), result={"status": "OK", "version": 3})
        version = 4
    scene.receive(version=version, session=session, due=due)
    scene.settle("ack", version=version)
    assert scene.judge().holds, scene.judge().summary()


def test_s10_another_session_took_over_in_between_unseen(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.wait(20)
    scene.receive(version=4)
    scene.settle("ack", version=4)
    assert scene.broken() == {"S10"}
    scene.events.append(_session_line("consume", 2, 10))
    assert scene.broken() == set()


def test_s10_another_session_gave_it_back_unseen(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.wait(20)
    scene.receive(version=5, consumer="c2")
    scene.settle("ack", version=5, consumer="c2")
    assert scene.broken() == {"S10"}
    scene.events.append(_session_line("consume", 2, 10))
    assert scene.broken() == set()


def test_s10_a_session_that_came_later_or_was_over_before_explains_nothing(scene: Scene) -> None:
    scene.did("consume", consumer="c1", session=2)
    scene.did("parted", consumer="c1", session=2)
    scene.did("consume", consumer="c1", session=1)
    scene.put()
    scene.receive()
    scene.wait(20)
    scene.receive(version=4)
    scene.settle("ack", version=4)
    scene.did("consume", consumer="c1", session=3)
    scene.did("consume", consumer="c2", session=4)
    assert scene.broken() == {"S10"}


def _session_line(operation: str, session: int, at: float) -> Event:
    return Event("c1", operation, {"consumer": "c1", "session": session}, at, at, START_MS + at, "ok")


def test_s11_leased_again_before_the_end_it_was_extended_to(scene: Scene) -> None:
    scene.put()
    scene.receive()
    until = int(START_MS + 10 * LEASE_MS)
    scene.settle("extend", more_ms=10 * LEASE_MS, result={"status": "OK", "lease_until_ms": until})
    scene.wait(2 * LEASE_MS)
    scene.receive(version=3, consumer="c2")
    scene.settle("ack", version=3, consumer="c2")
    assert scene.broken() == {"S11"}


def test_s16_a_bulk_shift_applied_twice(scene: Scene) -> None:
    scene.put(due=10_000, tag="spring")
    scene.did("move_tag", tag="spring", group="g", by_ms=500, result={})
    scene.row(version=2, due=10_500)
    assert scene.broken() == set()
    scene.rows[0].update(version=3, due_ms=int(START_MS + 11_000), scheduled_ms=int(START_MS + 11_000))
    assert scene.broken() == {"S16"}


def test_s16_a_shift_that_another_call_overlapped_may_be_new_to_the_message_when_repeated(scene: Scene) -> None:
    scene.put(due=10_000, tag="spring")
    scene.did("move_tag", tag="spring", group="g", by_ms=500, result={}, took=50)
    scene.at -= 20
    scene.did("move_tag", tag="spring", group="g", by_ms=100, result={})
    scene.row(version=4, due=11_100)
    assert scene.broken() == set()


def test_a_bulk_cancel_explains_what_is_gone(scene: Scene) -> None:
    scene.put(due=10_000, tag="spring")
    scene.did("cancel_tag", tag="other", group="g", result={})
    assert scene.broken() == {"S8"}
    scene.did("cancel_tag", tag="spring", group="g", result={}, dry_run=True)
    assert scene.broken() == {"S8"}
    scene.did("cancel_tag", tag="spring", group="g", result={})
    assert scene.broken() == set()


def test_l1_what_is_due_and_left_lying(scene: Scene) -> None:
    scene.put(due=100)
    scene.row(due=100)
    scene.wait(1_000)
    assert scene.broken(liveness_bound_ms=2_000) == set()
    scene.wait(5_000)
    assert scene.broken(liveness_bound_ms=2_000) == {"L1"}


def test_s12_delivered_too_late_once_all_was_healed(scene: Scene) -> None:
    scene.put(due=100)
    scene.wait(5_000)
    scene.did("healed")
    scene.wait(1_000)
    scene.receive(due=100)
    scene.settle("ack")
    assert scene.broken(liveness_bound_ms=2_000) == set()
    assert scene.broken(liveness_bound_ms=900) == {"S12"}


def test_l1_what_is_leased_again_and_again_and_reaches_nobody(scene: Scene) -> None:
    scene.put(due=100)
    scene.did("healed")
    scene.row(version=9, due=10_000, scheduled=100, holder="c1")
    scene.wait(5_000)
    assert scene.broken(liveness_bound_ms=6_000) == set()
    assert scene.broken(liveness_bound_ms=4_000) == {"L1"}
    scene.at = 1_000.0
    scene.receive(version=8, due=100)
    assert scene.broken(liveness_bound_ms=4_000, end_wall_ms=START_MS + 5_000) == set()


def test_s12_handed_out_at_last_after_leases_that_reached_nobody(scene: Scene) -> None:
    scene.put(due=100)
    scene.did("healed")
    scene.wait(5_000)
    scene.receive(version=9, due=4_900, scheduled=100)
    scene.settle("ack", version=9)
    assert scene.broken(liveness_bound_ms=6_000) == set()
    assert scene.broken(liveness_bound_ms=4_000) == {"S12"}


def test_s10_a_revival_before_the_first_delivery_explains_nothing(scene: Scene) -> None:
    scene.put()
    scene.did("revive", id="a", group="g", due_ms=int(START_MS), result={"status": "OK", "version": 2})
    scene.wait(1)
    scene.receive(version=3)
    scene.wait(10)
    scene.receive(version=4, consumer="c2")
    scene.settle("ack", version=4, consumer="c2")
    assert scene.broken() == {"S10"}


def test_s14_more_in_flight_than_credit(scene: Scene) -> None:
    scene.did("consume", consumer="c1", session=1, credit=1, process="c1")
    for birth, id in ((11, "a"), (12, "b")):
        scene.put(id=id)
        scene.receive(id=id, birth=birth)
    scene.settle("ack")
    scene.settle("ack", id="b", birth=12)
    assert scene.broken() == {"S14"}
    scene.events[0].arguments["credit"] = 2
    assert scene.broken() == set()


def test_an_id_put_again_after_it_was_acknowledged_is_another_life(scene: Scene) -> None:
    for birth in (11, 12):
        scene.put(sum=birth)
        scene.wait(1)
        scene.receive(birth=birth, sum=birth)
        scene.settle("ack", birth=birth)
        scene.wait(1)
    assert scene.judge().holds, scene.judge().summary()


def test_a_purged_id_is_not_remembered_and_may_be_stored_again_by_its_own_put(scene: Scene) -> None:
    scene.did("topic", name="", settings={"remember_ms": 60_000})
    scene.put(outcome="unknown")
    scene.receive()
    scene.settle("bury")
    scene.did("purge", id="a", group="g")
    scene.receive()
    scene.settle("ack")
    assert scene.broken() == set()
    scene.events[4].operation = "get"
    assert "S2" in scene.broken()


def test_a_repeated_put_that_met_itself_counts_as_stored(scene: Scene) -> None:
    scene.put(result={"status": "DUPLICATE", "version": 1})
    assert scene.broken() == {"S8"}
    scene.receive()
    scene.settle("ack")
    assert scene.broken() == set()


def test_at_most_so_many_violations_of_a_kind_are_kept(scene: Scene) -> None:
    for number in range(50):
        scene.put(id=f"id{number}")
    verdict = scene.judge(most=3)
    assert len(verdict.violations) == 3 and verdict.counts["lost"] == 50


def test_a_verdict_tells_all_that_was_done_with_the_first_ids_it_names(scene: Scene) -> None:
    scene.put()
    scene.did("move", id="a", group="g", in_ms=1_000, outcome="fail", result={"status": "UNAVAILABLE"})
    scene.did("fault", what="crash", process="store")
    scene.put(id="whole")
    scene.receive(id="whole")
    scene.settle("ack", id="whole")
    scene.receive()
    for number in range(5):
        scene.put(id=f"id{number}")
    verdict = scene.judge()
    assert next(iter(verdict.told)) == "/a" and len(verdict.told) == 3
    told = verdict.summary().partition("all of /a:")[2].partition("all of")[0].strip().split("\n")
    for line, word in zip(told, ("put", "UNAVAILABLE", "fault", "receive"), strict=True):
        assert word in line


def test_a_long_story_is_told_by_its_ends(scene: Scene) -> None:
    scene.put()
    for number in range(500):
        scene.did("get", id="a", result={"status": "OK", "at": number})
    (told,) = scene.judge().told.values()
    assert len(told) == 61 and told[30] == "… and 441 more" and '"operation":"put"' in told[0]
