"""The checker finds each broken promise in a hand-made history, and believes what may have been."""

from __future__ import annotations

import pytest

from tests.history.scene import LEASE_MS, START_MS, Scene


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_plain_life_holds_and_is_counted(scene: Scene) -> None:
    scene.put(due=100)
    scene.wait(100)
    scene.receive(due=100)
    scene.settle("ack")
    verdict = scene.judge()
    assert verdict.holds, verdict.summary()
    assert verdict.counts["put"] == verdict.counts["delivered"] == verdict.counts["acked"] == 1
    assert verdict.counts["early"] == verdict.counts["lost"] == verdict.counts["doubled"] == 0
    assert verdict.statuses["put", "OK"] == 1


def test_s1_delivered_before_its_due(scene: Scene) -> None:
    scene.put(due=100)
    scene.receive(due=100)
    scene.settle("ack")
    verdict = scene.judge()
    assert {violation.invariant for violation in verdict.violations} == {"S1"}
    assert verdict.counts["early"] == 1
    assert scene.broken(clock_bound_ms=200) == set()


def test_s1_a_due_rounded_down(scene: Scene) -> None:
    scene.put(due=1_500)
    scene.wait(1_200)
    scene.receive(due=1_000)
    scene.settle("ack")
    assert scene.broken() == {"S1"}


def test_s1_relative_due_is_counted_from_the_call(scene: Scene) -> None:
    scene.put(in_ms=500, due_ms=None)
    scene.wait(450)
    scene.receive(due=400)
    scene.settle("ack")
    assert scene.broken() == {"S1"}


def test_s2_one_version_handed_to_code_twice(scene: Scene) -> None:
    scene.put()
    scene.receive(consumer="c1")
    scene.wait(2 * LEASE_MS)
    scene.receive(consumer="c2")
    scene.settle("ack", consumer="c2")
    verdict = scene.judge()
    assert "S2" in {violation.invariant for violation in verdict.violations}
    assert verdict.counts["doubled"] >= 1


def test_s2_versions_run_backwards(scene: Scene) -> None:
    scene.put()
    scene.did("move", id="a", group="g", due_ms=int(START_MS), result={"status": "OK", "version": 9})
    scene.wait(10)
    scene.did("move", id="a", group="g", due_ms=int(START_MS), result={"status": "OK", "version": 5})
    scene.row(version=9)
    assert scene.broken() == {"S2"}


def test_s3_two_moves_make_one_version(scene: Scene) -> None:
    scene.put()
    for _ in range(2):
        scene.did("move", id="a", group="g", due_ms=int(START_MS), result={"status": "OK", "version": 2})
    scene.row(version=2)
    assert scene.broken() == {"S3"}


def test_s3_stored_over_a_message_that_was_there(scene: Scene) -> None:
    scene.put()
    scene.put(sum=8)
    scene.row(sum=8, read_sum=8, birth=12)
    assert scene.broken() == {"S3"}


def test_s4_a_stale_token_worked(scene: Scene) -> None:
    scene.put()
    scene.receive(version=2)
    scene.wait(2 * LEASE_MS)
    scene.receive(version=3, consumer="c2")
    scene.wait(10)
    scene.settle("ack", version=2)
    assert "S4" in scene.broken()


def test_s5_fenced_though_nobody_touched_it(scene: Scene) -> None:
    scene.put()
    scene.receive(version=2)
    scene.wait(2 * LEASE_MS)
    scene.settle("ack", outcome="fail", result={"status": "FENCED"})
    scene.row(version=2, holder="c1")
    assert scene.broken() == {"S5"}


def test_s5_fenced_then_accepted(scene: Scene) -> None:
    scene.put()
    scene.receive(version=2)
    scene.settle("extend", outcome="fail", result={"status": "FENCED"})
    scene.settle("ack")
    assert scene.broken() == {"S5"}


def test_a_late_ack_is_right_while_nobody_touched_it(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.wait(5 * LEASE_MS)
    scene.settle("ack", result={"status": "OK", "late": True})
    verdict = scene.judge()
    assert verdict.holds and verdict.counts["late"] == 1


def test_s6_delivered_after_its_ack_counted(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.settle("ack")
    scene.wait(2 * LEASE_MS)
    scene.receive(version=3)
    assert scene.broken() == {"S6"}


def test_s6_delivered_after_its_cancel(scene: Scene) -> None:
    scene.put(due=100)
    scene.did("cancel", id="a", group="g")
    scene.wait(200)
    scene.receive(due=100)
    assert scene.broken() == {"S6"}


def test_s6_cancelled_with_leases_spares_what_was_under_way(scene: Scene) -> None:
    scene.put()
    scene.did("cancel", id="a", group="g", leased=True)
    scene.receive()
    scene.settle("ack", outcome="fail", result={"status": "NOT_FOUND"})
    assert scene.broken() == set()


def test_s6_the_store_still_has_what_was_acknowledged(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.settle("ack")
    scene.row(version=2, holder="c1")
    assert scene.broken() == {"S6"}


def test_s6_delivered_though_buried(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.settle("bury")
    scene.wait(2 * LEASE_MS)
    scene.receive(version=3)
    scene.row(version=3, holder="c1")
    assert scene.broken() == {"S6"}


def test_s6_handed_out_after_its_lease_ended(scene: Scene) -> None:
    scene.put()
    scene.wait(500)
    scene.receive(until=100)
    scene.row(version=2, holder="c1", scheduled=0)
    assert scene.broken(transit_bound_ms=50) == {"S6"}
    assert scene.broken(transit_bound_ms=405) == set()


def test_s7_delivered_at_the_old_due_after_a_move(scene: Scene) -> None:
    scene.put(due=100)
    scene.did("move", id="a", group="g", due_ms=int(START_MS + 5_000), result={"status": "OK", "version": 2})
    scene.wait(200)
    scene.receive(version=3, due=100)
    scene.settle("ack", version=3)
    assert scene.broken() == {"S7"}


def test_s7_an_unknown_move_may_have_happened_or_not(scene: Scene) -> None:
    scene.put(due=100)
    scene.did("move", outcome="unknown", id="a", group="g", due_ms=int(START_MS + 150))
    scene.wait(300)
    scene.receive(version=2, due=100)
    scene.settle("ack", version=2)
    assert scene.broken() == set()
    scene.events[2].arguments["scheduled_ms"] = int(START_MS + 150)
    assert scene.broken() == set()
    scene.events[2].arguments["scheduled_ms"] = int(START_MS + 120)
    assert scene.broken() == {"S7"}


@pytest.mark.parametrize(("beside", "broken"), [(True, set()), (False, {"S7"})])
def test_s7_a_move_repeated_on_its_way_may_stand_after_one_that_was_under_way_beside_it(
    scene: Scene, beside: bool, broken: set[str]
) -> None:
    scene.put(due=100)
    first = scene.did("move", id="a", group="g", due_ms=int(START_MS + 5_000), result={"status": "OK", "version": 2})
    second = scene.did("move", id="a", group="g", due_ms=int(START_MS + 300), result={"status": "OK", "version": 3})
    if beside:
        second.invoked = first.invoked
    scene.row(version=4, due=5_000, scheduled=5_000)
    assert scene.broken() == broken


@pytest.mark.parametrize(
    ("took", "consumer", "broken"),
    [(50, "c1", {"S11"}), (150, "c1", set()), (150, "c2", {"S11"})],
)
def test_s11_what_a_consumer_gave_up_before_its_extension_was_answered_may_come_to_it_again(
    scene: Scene, took: float, consumer: str, broken: set[str]
) -> None:
    scene.put()
    scene.receive(until=scene.at + 100)
    later = {"status": "OK", "lease_until_ms": int(START_MS + 5_000)}
    scene.did("extend", took=took, process="c1", id="a", consumer="c1", birth=11, version=2, result=later)
    scene.wait(200)
    scene.receive(version=3, consumer=consumer)
    scene.settle("ack", version=3, consumer=consumer)
    assert scene.broken() == broken


def test_s8_put_and_never_seen_again(scene: Scene) -> None:
    scene.put(due=100)
    verdict = scene.judge()
    assert [violation.invariant for violation in verdict.violations] == ["S8"]
    assert verdict.counts["lost"] == 1
    assert "put was acknowledged" in verdict.summary() and '"operation":"put"' in verdict.summary()


def test_s8_a_late_failure_does_not_excuse(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.settle("ack", outcome="fail", result={"status": "FENCED"})
    assert scene.broken() == {"S8"}


def test_s8_found_missing_while_nothing_had_ended_it(scene: Scene) -> None:
    scene.put(due=100)
    scene.did("move", "fail", id="a", group="g", due_ms=int(START_MS + 9), result={"status": "NOT_FOUND"})
    scene.row(due=100)
    assert scene.broken() == {"S8"}


@pytest.mark.parametrize(
    ("operation", "outcome"), [("cancel", "ok"), ("cancel", "unknown"), ("purge", "ok"), ("ack", "unknown")]
)
def test_s8_is_content_with_whatever_may_have_ended_it(scene: Scene, operation: str, outcome: str) -> None:
    scene.put()
    if operation == "ack":
        scene.receive()
        scene.settle("ack", outcome=outcome)
    else:
        scene.did(operation, outcome, id="a", group="g")
    assert scene.broken() == set()


def test_s8_expiry_ends_a_message_at_its_time_and_not_before(scene: Scene) -> None:
    scene.put(due=100, expires_ms=int(START_MS + 200))
    scene.wait(50)
    assert scene.broken() == {"S8"}
    scene.wait(500)
    assert scene.broken() == set()


def test_s8_what_ended_it_may_have_drifted_from_the_clock_of_its_put(scene: Scene) -> None:
    scene.put()
    scene.wait(500)
    scene.receive()
    end_wall_ms = scene.events[-1].wall_ms - 5  # the dump's clock runs 5 ms behind the producer's by now
    scene.settle("ack")
    assert scene.broken(end_wall_ms=end_wall_ms) == set()


def test_s8_a_store_that_declares_no_durability_may_lose_in_a_crash_only(scene: Scene) -> None:
    scene.put(due=100)
    assert scene.broken(durable=False) == {"S8"}
    scene.did("fault", what="crash")
    assert scene.broken(durable=False) == set()
    assert scene.broken() == {"S8"}


def test_s9_delivered_and_never_put(scene: Scene) -> None:
    scene.receive()
    scene.settle("ack")
    assert scene.broken() == {"S9"}


def test_s9_delivered_though_the_put_failed(scene: Scene) -> None:
    scene.put(outcome="fail", result={"status": "INVALID"})
    scene.receive()
    scene.settle("ack")
    assert scene.broken() == {"S9"}


def test_s9_another_payload(scene: Scene) -> None:
    scene.put()
    scene.receive(sum=99)
    scene.settle("ack")
    assert "S9" in scene.broken()


def test_s9_one_put_under_two_births(scene: Scene) -> None:
    scene.put()
    scene.receive()
    scene.settle("ack")
    scene.wait(5)
    scene.receive(birth=12)
    scene.settle("ack", birth=12)
    assert scene.broken() == {"S9"}


def test_s9_an_unanswered_put_may_have_stored(scene: Scene) -> None:
    scene.put(outcome="unknown")
    scene.receive()
    scene.settle("ack")
    assert scene.broken() == set()


def test_s13_a_payload_that_is_not_the_one_put(scene: Scene) -> None:
    scene.put(due=10)
    scene.row(due=10, read_sum=8)
    assert scene.broken() == {"S13"}


def test_the_documented_doubling_is_no_violation_unless_the_topic_remembers(scene: Scene) -> None:
    scene.put(outcome="unknown")
    for _ in range(2):
        scene.receive()
        scene.settle("ack")
        scene.wait(5)
    assert scene.broken() == set()
    scene.did("topic", name="", settings={"remember_ms": 60_000})
    assert "S2" in scene.broken()
