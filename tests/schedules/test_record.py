"""Records of schedules as payloads, and the ids of records and occurrences."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.schedules.samples import FULL, spec
from timeline.errors import Invalid
from timeline.model import bucket_of
from timeline.schedules.record import (
    BUCKETS,
    DecidedOccurrence,
    KeptOccurrence,
    OccurrenceKey,
    QueuedSpan,
    RenamedSpan,
    ScheduleRecord,
    birth_of,
    number_of,
    occurrence_id,
    record_id,
    schedule_of,
    tag_of,
)

AT_MS = 1_793_511_000_000
RECORD = ScheduleRecord(
    FULL,
    number=17,
    revision=3,
    revised=12,
    created_ms=1,
    edited_ms=2,
    position_ms=AT_MS,
    sequence=4,
    decided=(DecidedOccurrence(AT_MS, 4), DecidedOccurrence(AT_MS + 1, 5, True)),
    cancelling=(OccurrenceKey("monthly@2026-11-01T05:30:00Z", "billing"),),
    queue=(QueuedSpan(1, 2, 3, 4),),
    renamed=(RenamedSpan(AT_MS, AT_MS + 1, 9),),
    kept=(KeptOccurrence("monthly@2026-11-01T05:30:00Z", "billing", AT_MS + 2),),
    recounted=True,
    standing_until_ms=5,
    replacing=True,
    produced=6,
    last_ms=7,
    last_id="monthly@1970-01-01T00:00:00.007Z",
    ended=True,
)


def test_a_record_is_read_as_it_was_written() -> None:
    for one in (RECORD, ScheduleRecord(spec())):
        assert ScheduleRecord.decode(one.encode()) == one
        assert ScheduleRecord.decode(memoryview(one.encode())) == one
    assert RECORD.id.startswith("invoices/monthly#17.")
    assert RECORD.tag == "invoices/monthly"


def _said(**changes: Any) -> bytes:
    said = json.loads(RECORD.encode())
    for name, value in changes.items():
        said["state" if name in said["state"] else name] |= {name: value} if name in said["state"] else value
    return json.dumps(said).encode()


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\xff", "must be JSON"),
        (b"[]", "must have the fields number, revision, specification, state"),
        (b"{}", "must have the fields"),
        (_said(state={"later": 5}), "has no field 'later': a newer broker may have written it"),
        (_said(position_ms="x"), "position_ms of a schedule's record must be a whole number from 0, not 'x'"),
        (_said(ended=1), "ended of a schedule's record must be true or false, not 1"),
        (_said(last_id=1), "last_id of a schedule's record must be text, not 1"),
        (_said(cancelling=[[1]]), "cancelling of a schedule's record must have lists of id, group, not [1]"),
        (_said(decided=[["x"]]), "decided of a schedule's record must have lists of at_ms, sequence"),
        (_said(decided=[[1]]), "decided of a schedule's record must have lists of at_ms, sequence, caught_up, not [1]"),
        (_said(specification={"zone": "Mars"}), "no time zone 'Mars'"),
    ],
)
def test_another_payload_is_refused(payload: bytes, why: str) -> None:
    with pytest.raises(Invalid) as refused:
        ScheduleRecord.decode(payload)
    assert why in str(refused.value)


def test_ids_of_occurrences_name_schedule_and_time() -> None:
    assert occurrence_id("monthly", AT_MS) == "monthly@2026-11-01T05:30:00Z"
    assert occurrence_id("a.b-c", AT_MS + 250) == "a.b-c@2026-11-01T05:30:00.250Z"
    assert RECORD.occurrence_id(AT_MS) == "monthly@2026-11-01T05:30:00Z.9"
    assert RECORD.occurrence_id(AT_MS + 1) == "monthly@2026-11-01T05:30:00.001Z"
    twice = replace(RECORD, renamed=(*RECORD.renamed, RenamedSpan(AT_MS, AT_MS + 9, 15)))
    assert twice.occurrence_id(AT_MS) == "monthly@2026-11-01T05:30:00Z.15"
    for suffix in ("", "9", "trigger"):
        for at_ms in (0, AT_MS, AT_MS + 250, 253_370_764_799_999):
            assert schedule_of(occurrence_id("a.b-c", at_ms, suffix)) == ("a.b-c", at_ms)


@pytest.mark.parametrize(
    "id",
    [
        "monthly",
        "@2026-11-01T05:30:00Z",
        "monthly@2026-13-01T05:30:00Z",
        "monthly@2026-11-01T05:30:00",
        "monthly@2026-11-01T05:30:00Z.x",
        "monthly@1926-11-01T05:30:00Z",
        "a/b@2026-11-01T05:30:00Z",
    ],
)
def test_other_ids_are_of_no_schedule(id: str) -> None:
    assert schedule_of(id) is None


def test_records_of_a_schedule_are_in_one_bucket_by_number() -> None:
    for name in ("monthly", "n" * 100, "s.1"):
        ids = [record_id("invoices", name, 1_790_000_000_000 + number) for number in range(200)]
        assert len({bucket_of(id.encode(), BUCKETS) for id in ids}) == 1
        assert sorted(ids) == ids
        assert [number_of(id, "invoices", name) for id in ids] == [1_790_000_000_000 + n for n in range(200)]
        assert {number_of(id, "invoice", name) for id in ids} == {0}
    assert number_of("invoices/monthly#17", "invoices", "monthly") == 0


def test_ids_and_tags_of_records_fit() -> None:
    topic, name = "t" * 129, "n" * 100
    spec(topic=topic, name=name)
    assert len(record_id(topic, name, 2**63 - 1).encode()) <= 255
    assert len(tag_of(topic, name).encode()) <= 64
    assert tag_of(topic, name) != tag_of(topic, name[1:] + "m")
    assert tag_of("t" * 31, "n" * 32) == f"{'t' * 31}/{'n' * 32}"
    assert tag_of("#" + "t" * 31, "n").startswith("#") and "/" not in tag_of("#" + "t" * 31, "n")


def test_births_differ_by_id_and_revision() -> None:
    births = {birth_of(f"day@{n}", number) for n in range(100) for number in range(1, 11)}
    assert len(births) == 1_000
    assert all(0 < birth < 2**64 for birth in births)
    assert birth_of("day@1", 1) == birth_of("day@1", 1)


def test_an_occurrence_that_was_delivered_keeps_its_id_for_later_edits() -> None:
    record = replace(RECORD, renamed=(RenamedSpan(10, 40, 7), RenamedSpan(20, 30, 9)))
    assert [record.keeping(20, "monthly@1970-01-01T00:00:00.020Z").occurrence_id(at) for at in (20, 21, 15)] == [
        "monthly@1970-01-01T00:00:00.020Z",
        "monthly@1970-01-01T00:00:00.021Z.9",
        "monthly@1970-01-01T00:00:00.015Z.7",
    ]
    id = "monthly@1970-01-01T00:00:00.020Z.7"
    assert record.keeping(20, id).occurrence_id(20) == id


def test_a_name_with_what_ends_a_time_changes_nothing() -> None:
    named = replace(RECORD.specification, name="JAZZ.nightly")
    record = replace(RECORD, specification=named, renamed=(RenamedSpan(10, 40, 7), RenamedSpan(20, 30, 9)))
    for suffix in ("", ".7", ".9"):
        id = f"JAZZ.nightly@1970-01-01T00:00:00.020Z{suffix}"
        assert record.keeping(20, id).occurrence_id(20) == id
