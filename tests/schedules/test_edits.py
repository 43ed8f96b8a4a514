"""Edits of schedules by example: what stays, what is cancelled, and what occurrences are called afterwards."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from tests.schedules.samples import spec
from tests.schedules.world import BEGIN_MS, World
from timeline.errors import Invalid, Throttled
from timeline.schedules.edits import MOST_BACKFILLED, backfill, created, edited, shown, triggered, upcoming
from timeline.schedules.looks import NAMED_MS, YEAR_MS, due_of, plan
from timeline.schedules.record import ScheduleRecord, occurrence_id

MINUTE = 60_000
FIRST_MS = BEGIN_MS + 20_000
"""The first whole minute."""


def minute(at: int) -> int:
    return FIRST_MS + at * MINUTE


def world(work_ms: int = 0, minutes: int = 10, **fields: Any) -> World:
    """A world that has run until half a minute after a minute."""
    made = World(random.Random(1), work_ms)
    made.begin(spec(**{"name": "each", "cron": "* * * * *", "payload": b"old {sequence}"} | fields))
    made.run_until(minute(minutes) + 30_000)
    return made


def newest(here: World) -> ScheduleRecord:
    record = here.newest()
    assert record is not None
    return record


def times(here: World) -> list[int]:
    return [(one.at_ms - FIRST_MS) // MINUTE for one in here.delivered]


def rest(here: World, minutes: int = 5) -> list[tuple[str, int, bytes]]:
    """What is delivered from now on: whole ids but for the schedule's name and the date, minutes, payloads."""
    before = len(here.delivered)
    here.run_until(here.now_ms + minutes * MINUTE)
    found = []
    for one in here.delivered[before:]:
        suffix = one.id.partition("Z")[2]
        assert one.when_ms == one.due_ms
        found.append((suffix, (one.at_ms - FIRST_MS) // MINUTE, one.payload))
    return found


def test_a_new_template_takes_the_place_of_the_old_one() -> None:
    here = world()
    here.update(payload=b"new {sequence}")
    assert rest(here) == [("", at, b"new %d" % (at + 1)) for at in range(11, 16)]
    record = newest(here)
    assert record.revision == 2
    assert record.produced == record.sequence


@pytest.mark.parametrize("fields", [{"payload": b"new {sequence}"}, {"cron": ("* * * * *", "30 * * * * *")}])
def test_an_outage_right_after_an_edit_misses_nothing_that_was_delivered(fields: dict[str, Any]) -> None:
    here = world(catch_up="none")
    pending = {one.message.at_ms for one in here.topic.values()}
    assert pending
    here.update(**fields)
    while here.actors:
        here.step()
    here.outage(10 * MINUTE)
    here.run_until(here.now_ms + 5 * MINUTE)
    delivered = [one.at_ms for one in here.delivered]
    assert pending <= set(delivered)
    assert len(delivered) == len(set(delivered))
    record = newest(here)
    assert record.sequence == record.missed + record.produced
    assert record.produced == len(delivered) + len(here.topic)


@pytest.mark.slow
def test_a_pause_is_no_part_of_a_queue() -> None:
    here = world(work_ms=60 * MINUTE, overlap="queue")
    here.update(paused=True, keep=True)
    here.run_until(minute(20) + 30_000)
    here.update(paused=False)
    here.run_until(minute(30) + 30_000)
    here.work_ms = 0
    here.run_until(minute(80) + 30_000)
    assert times(here) == [*range(11), *range(21, 81)]


def test_new_times_cancel_the_old_ones() -> None:
    here = world()
    here.update(cron="45 * * * * *")
    found = rest(here)
    assert all((one.at_ms - FIRST_MS) % MINUTE == 45_000 for one in here.delivered[-len(found) :])
    assert len(found) == 5
    assert newest(here).produced == newest(here).sequence


def test_what_is_kept_stays_and_the_new_times_follow() -> None:
    here = world()
    pending = {one.message.at_ms for one in here.topic.values()}
    assert pending
    here.update(keep=True, cron="30 * * * * *", payload=b"new {sequence}")
    rest(here)
    after = [one for one in here.delivered if one.when_ms > minute(10) + 30_000]
    assert {one.at_ms for one in after if one.payload.startswith(b"old")} == pending
    assert min(one.at_ms for one in after if one.payload.startswith(b"new")) > max(pending)


@pytest.mark.parametrize("group", ["default", "others"])
def test_what_was_kept_is_replaced_or_cancelled_by_the_edit_after(group: str) -> None:
    here = world()
    here.update(keep=True, cron="30 * * * * *", group=group)
    here.run_until(here.now_ms + 100)
    assert newest(here).kept
    here.update(cron="*/2 * * * *", payload=b"new {sequence}")
    edited_ms = here.now_ms
    found = rest(here)
    assert [at for _, at, _ in found] == [11, 13, 15]
    assert [one.payload for one in here.delivered if one.when_ms > edited_ms] == [payload for _, _, payload in found]
    assert all(payload.startswith(b"new") for _, _, payload in found)
    assert not newest(here).kept
    assert newest(here).produced == newest(here).sequence


def test_what_was_kept_twice_goes_with_the_schedule() -> None:
    here = world()
    for cron in ("30 * * * * *", "45 * * * * *"):
        here.update(keep=True, cron=cron)
        here.run_until(here.now_ms + 100)
    here.delete()
    assert rest(here) == []
    assert not here.topic


def test_what_was_kept_and_waits_for_its_jitter_goes_with_the_schedule() -> None:
    here = world(jitter_ms=10 * MINUTE)
    assert any(one.message.at_ms < here.now_ms for one in here.topic.values())
    here.update(keep=True, cron="30 * * * * *")
    here.run_until(here.now_ms + 100)
    here.delete()
    assert rest(here, 15) == []
    assert not here.topic


@pytest.mark.parametrize("apart_ms", [100, 30_000])
def test_a_count_goes_on_after_what_was_kept(apart_ms: int) -> None:
    here = world()
    here.update(keep=True, cron="*/10 * * * * *", start_ms=minute(8), count=60, payload=b"new {sequence}")
    here.run_until(here.now_ms + apart_ms)
    here.update(payload=b"newest {sequence}")
    rest(here, 20)
    found = [one for one in here.delivered if one.payload.startswith(b"new")]
    assert [one.payload.split()[1] for one in found] == [
        b"%d" % ((one.at_ms - minute(8)) // 10_000 + 1) for one in found
    ]
    assert found[-1].at_ms == minute(8) + 590_000


def test_a_paused_schedule_produces_nothing_and_misses_nothing() -> None:
    here = world()
    here.update(paused=True)
    assert rest(here, 30) == []
    assert min(held.due_ms for held in here.records.values()) > here.now_ms + YEAR_MS - 60 * MINUTE
    assert upcoming(newest(here), here.now_ms, 3) == []
    here.update(paused=False)
    assert [at for _, at, _ in rest(here)] == list(range(41, 46))
    assert newest(here).missed == 0
    assert newest(here).sequence == newest(here).produced


def test_an_occurrence_that_was_cancelled_comes_again_under_another_id() -> None:
    here = world()
    here.update(paused=True)
    here.run_until(here.now_ms + 5_000)
    number = newest(here).revised
    here.update(paused=False)
    found = rest(here)
    assert [at for _, at, _ in found] == list(range(11, 16))
    assert (found[0][0], found[-1][0]) == (f".{number}", "")
    here.update(paused=True)
    here.run_until(here.now_ms + 100)
    here.update(paused=False)
    assert [at for _, at, _ in rest(here)] == list(range(16, 21))


def test_a_name_is_forgotten_when_nobody_can_ask_for_it() -> None:
    here = world(window_ms=MINUTE)
    here.update(paused=True)
    here.run_until(here.now_ms + 100)
    here.update(paused=False)
    rest(here)
    rest(here, 15)
    record = newest(here)
    assert record.renamed  # a backfill needs it while the topic remembers
    successor = plan(record, here.now_ms + NAMED_MS + MINUTE).successor
    assert successor is not None and not successor.renamed


def test_another_group_gets_messages_of_its_own() -> None:
    here = world()
    here.update(group="other")
    found = rest(here)
    assert [at for _, at, _ in found] == list(range(11, 16))
    assert found[0][0]
    assert {one.group for one in here.topic.values()} == {"other"}


def test_jitter_does_not_save_what_is_cancelled() -> None:
    here = world(jitter_ms=20 * MINUTE)
    said = newest(here).specification
    late = [at for at in range(10) if due_of(said, minute(at)) > here.now_ms]
    assert late
    here.update(payload=b"new {sequence}")
    here.run_until(here.now_ms + 100)
    put = {one.message.at_ms: one.message for one in here.topic.values()}
    assert {put[minute(at)].payload for at in late} == {b"new %d" % (at + 1) for at in late}
    here.update(paused=True)
    assert rest(here, 40) == []


def test_jitter_leaves_what_was_delivered_between_its_name() -> None:
    here = world(jitter_ms=20 * MINUTE)
    delivered = {one.at_ms for one in here.delivered}
    pending = {one.message.at_ms for one in here.topic.values()}
    assert min(pending) < max(delivered)
    here.update(paused=True)
    here.run_until(here.now_ms + 100)
    assert {at_ms for at_ms in delivered if "Z." in newest(here).occurrence_id(at_ms)} == set()
    assert {at_ms for at_ms in pending if "Z." in newest(here).occurrence_id(at_ms)} == pending


def test_a_queue_goes_on_after_an_edit_and_ends_with_a_pause() -> None:
    here = world(work_ms=60 * MINUTE, overlap="queue")
    waiting = newest(here).queue
    assert sum(span.length for span in waiting) == 10
    here.update(payload=b"new {sequence}")
    here.run_until(here.now_ms + 100)
    assert newest(here).queue == waiting
    here.update(keep=True, cron="30 * * * * *")
    here.run_until(here.now_ms + 100)
    assert [span.from_ms for span in newest(here).queue][:10] == [minute(at) for at in range(1, 11)]
    here.update(paused=True)
    here.run_until(here.now_ms + 100)
    assert newest(here).queue == ()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["allow", "skip"])
def test_a_queue_that_was_kept_is_produced_under_another_overlap(overlap: str) -> None:
    here = world(work_ms=60 * MINUTE, overlap="queue")
    here.update(keep=True, overlap=overlap)
    here.work_ms = 0
    here.run_until(here.now_ms + 70 * MINUTE)
    at = times(here)
    assert set(range(11)) <= set(at)
    assert len(at) == len(set(at))


def test_overlap_that_is_no_longer_allowed_does_not_see_what_it_replaces() -> None:
    here = world()
    here.update(overlap="skip")
    assert [at for _, at, _ in rest(here)] == list(range(11, 16))
    here.update(payload=b"new")
    assert [at for _, at, _ in rest(here)] == list(range(16, 21))
    assert newest(here).skipped == 0


def test_count_goes_on_across_edits_and_begins_again_with_another_start() -> None:
    here = world(start_ms=FIRST_MS, count=13)
    here.update(cron="*/2 * * * *")  # eleven are over, and two are left
    assert [at for _, at, _ in rest(here, 30)] == [11, 13]
    assert newest(here).ended
    here.update(count=15)
    assert len(rest(here, 30)) == 2
    here.update(start_ms=here.now_ms, count=3)
    assert [payload for _, _, payload in rest(here, 30)] == [b"old 1", b"old 2", b"old 3"]
    here.update(count=0)
    assert len(rest(here, 30)) == 15


def test_count_that_is_new_counts_from_the_start() -> None:
    here = world(start_ms=FIRST_MS)
    here.update(count=13)
    assert [at for _, at, _ in rest(here, 30)] == [11, 12]


def test_an_end_that_moves_revives_it() -> None:
    here = world(end_ms=minute(8))
    assert newest(here).ended
    here.update(end_ms=minute(13))
    assert [at for _, at, _ in rest(here)] == [11, 12]


def test_a_deleted_schedule_leaves_nothing() -> None:
    here = world()
    here.delete()
    assert rest(here) == []
    assert not here.records
    assert not here.topic


def test_a_deleted_schedule_leaves_what_is_kept() -> None:
    here = world()
    pending = [(one.message.at_ms - FIRST_MS) // MINUTE for one in here.topic.values()]
    here.delete(keep=True)
    assert [at for _, at, _ in rest(here)] == sorted(pending)
    assert not here.records


def test_a_schedule_that_is_created_again_produces_at_once() -> None:
    here = world()
    here.delete()
    here.run_until(here.now_ms + 1_000)
    number = max(here.ended) + 1
    here.begin(spec(name="each", cron="* * * * *"), number)
    found = rest(here)
    assert [at for _, at, _ in found] == list(range(11, 16))
    assert found[0][0] == f".{number}"


def test_a_clock_that_was_set_back_does_not_let_an_edit_repeat_hours() -> None:
    here = world(minutes=200)
    record = newest(here)
    back_ms = here.now_ms - 180 * MINUTE
    paused = edited(record, back_ms, record.specification.changed(paused=True)).record
    resumed = edited(paused, back_ms, paused.specification.changed(paused=False)).record
    assert resumed.position_ms >= record.last_ms - 4 * MINUTE


@pytest.mark.slow
def test_edits_without_looks_have_bounds() -> None:
    record = created(spec(cron="* * * * * *"), BEGIN_MS).record
    record = dataclasses.replace(record, position_ms=BEGIN_MS + 120_000, sequence=120)
    with pytest.raises(Throttled, match="edits of this schedule come faster than brokers carry them out"):
        for _ in range(100):
            for paused in (True, False):
                record = edited(record, BEGIN_MS, record.specification.changed(paused=paused)).record
    assert record.revision > 30
    assert len(record.renamed) <= 500
    assert len(record.encode()) < 500_000


def test_trigger_puts_one_now() -> None:
    record = created(spec(payload=b"{sequence} {occurrence}", expires_ms=5_000, jitter_ms=9_000), BEGIN_MS).record
    # The caller's clock is a minute behind.
    message = triggered(record, BEGIN_MS + 7, BEGIN_MS + 60_000)
    assert message.id == "monthly@2026-11-18T11:06:40.007Z.trigger"
    assert (message.due_ms, message.expires_ms) == (BEGIN_MS + 60_000, BEGIN_MS + 65_000)
    assert message.payload == b"0 2026-11-18T11:06:40.007Z"
    assert triggered(record, BEGIN_MS + 8, BEGIN_MS + 60_000).birth != message.birth


def test_backfill_puts_a_range_under_the_ids_that_it_had() -> None:
    here = world()
    found = backfill(newest(here), minute(-3), minute(2), here.now_ms)
    assert [one.id for one in found] == [occurrence_id("each", minute(at)) for at in range(-3, 2)]
    assert [here.put(one, "default").value for one in found] == ["OK"] * 3 + ["DUPLICATE"] * 2
    assert all(one.stands and not one.replace for one in found)
    assert [one.at_ms for one in backfill(newest(here), minute(9), minute(99), here.now_ms)] == [minute(9), minute(10)]


def test_backfill_knows_names_and_counts() -> None:
    here = world(start_ms=FIRST_MS, count=5)
    assert len(backfill(newest(here), minute(0), here.now_ms, here.now_ms)) == 5
    assert len(backfill(newest(here), minute(3), here.now_ms, here.now_ms)) == 2
    assert backfill(newest(here), minute(-9), minute(0), here.now_ms) == ()
    here = world()
    here.update(paused=True)
    here.run_until(here.now_ms + 100)
    number = newest(here).revised
    here.update(paused=False)
    here.run_until(here.now_ms + 3 * MINUTE)
    found = backfill(newest(here), minute(11), minute(12), here.now_ms)
    assert [one.id for one in found] == [occurrence_id("each", minute(11), str(number))]


@pytest.mark.slow
def test_backfill_refuses_too_many_and_nothing() -> None:
    record = created(spec(cron="* * * * * *", expires_ms=5_000), BEGIN_MS).record
    with pytest.raises(Invalid, match="more than 10000 occurrences lie in this range: backfill it in parts"):
        backfill(record, BEGIN_MS - 10_001_000, BEGIN_MS, BEGIN_MS)
    found = backfill(record, BEGIN_MS - 10_000_000, BEGIN_MS, BEGIN_MS)
    assert len(found) == MOST_BACKFILLED
    assert {one.expires_ms for one in found} == {BEGIN_MS + 5_000}
    with pytest.raises(Invalid, match="give a to that is after from"):
        backfill(record, BEGIN_MS, BEGIN_MS, BEGIN_MS)


def test_what_comes_is_known_whether_it_is_put_or_not() -> None:
    here = world(start_ms=FIRST_MS, count=15)
    assert upcoming(newest(here), here.now_ms, 10) == [minute(at) for at in range(11, 15)]
    assert upcoming(newest(here), here.now_ms, 2) == [minute(11), minute(12)]
    assert upcoming(newest(here), here.now_ms + 3 * MINUTE, 10) == [minute(14)]
    assert upcoming(newest(here), here.now_ms, 0) == []
    here = world()
    assert upcoming(newest(here), here.now_ms, 2) == [minute(11), minute(12)]


def test_it_is_shown_with_its_state_and_what_comes() -> None:
    here = world()
    said = shown(newest(here), here.now_ms)
    assert (said["name"], said["revision"], said["next_ms"]) == ("each", 1, minute(11))
    assert said["payload"]
    assert said["state"]["produced"] == newest(here).produced
    said = shown(newest(here), here.now_ms, template=False)
    assert "payload" not in said
    assert "headers" not in said


@pytest.mark.parametrize(("change", "missed"), [({"paused": True}, 9), ({"cron": "30 * * * *"}, 9), ({"tag": "x"}, 0)])
@pytest.mark.parametrize("keep", [False, True])
def test_what_an_outage_cost_before_an_edit_counts_as_missed(change: dict[str, Any], missed: int, keep: bool) -> None:
    here = world()
    here.outage(10 * MINUTE)  # the one of the next minute was put before
    record = newest(here)
    assert edited(record, here.now_ms, record.specification.changed(**change), keep).record.missed == missed
