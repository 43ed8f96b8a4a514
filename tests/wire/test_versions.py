"""A newer minor is read, another major is refused with a sentence, whoever made the frame."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from subprocess import run

import flatbuffers
import numpy as np
import pytest

import timeline
from tests.wire.examination import examine
from tests.wire.generated import accessors
from tests.wire.sameness import same
from tests.wire.samples import answers, late_list, produce, settle, standing, topic_list
from timeline.driver.receipts import error_of
from timeline.model import LateCause, LeavingReason, Status
from timeline.wire import (
    MAJOR,
    MINOR,
    Beat,
    BrokerStatus,
    Credit,
    Health,
    LateList,
    Leaving,
    Mutated,
    Produce,
    Settle,
    TopicList,
    UnknownFrame,
    WireError,
    WireVersionError,
    decode,
    decode_as,
    encode,
)
from timeline.wire.generated import layout
from timeline.wire.verify import minor_of

SCHEMA = Path(__file__).resolve().parents[2] / "schemas" / "fbs" / "timeline.fbs"
MAJOR_AT, MINOR_AT = 28, 30
"""Where our own encoder writes the version."""


def of_version(data: bytes, major: int, minor: int) -> bytes:
    return data[:MAJOR_AT] + major.to_bytes(2, "little") + minor.to_bytes(2, "little") + data[MINOR_AT + 2 :]


def built(kind: int, minor: int, body: Callable[[flatbuffers.Builder], int]) -> bytes:
    """A frame by FlatBuffers' own builder."""
    builder = flatbuffers.Builder(64)
    inner = body(builder)
    accessors.FrameStart(builder)
    accessors.FrameAddMajor(builder, MAJOR)
    accessors.FrameAddMinor(builder, minor)
    accessors.FrameAddBodyType(builder, kind)
    accessors.FrameAddBody(builder, inner)
    builder.Finish(accessors.FrameEnd(builder), layout.IDENTIFIER)
    return bytes(builder.Output())


def credit_with_more(builder: flatbuffers.Builder) -> int:
    """A Credit that has a number, a text and a vector after the fields of today."""
    text = builder.CreateString("more")
    vector = builder.CreateNumpyVector(np.arange(5, dtype=np.int64))
    builder.StartObject(9)
    builder.PrependUint64Slot(2, 9, 0)
    builder.PrependUint8Slot(6, 1, 0)
    builder.PrependUOffsetTRelativeSlot(7, text, 0)
    builder.PrependUOffsetTRelativeSlot(8, vector, 0)
    builder.PrependInt64Slot(0, 5, 0)
    made: int = builder.EndObject()
    return made


def test_unknown_fields_are_passed_over() -> None:
    assert decode(built(accessors.Body.Credit, MINOR + 1, credit_with_more)) == Credit(5, 0, 9)


def test_an_unknown_kind_of_a_newer_minor_is_told_apart() -> None:
    newer = built(len(layout.BODIES) + 1, MINOR + 1, credit_with_more)
    with pytest.raises(UnknownFrame, match=f"{MAJOR}.{MINOR} does not know"):
        decode(newer)
    with pytest.raises(WireError, match="no frame of kind") as refused:
        decode(built(len(layout.BODIES) + 1, MINOR, credit_with_more))
    assert not isinstance(refused.value, UnknownFrame)
    with pytest.raises(WireError, match="no body"):
        decode(_without_body())


def _without_body() -> bytes:
    builder = flatbuffers.Builder(64)
    accessors.FrameStart(builder)
    accessors.FrameAddMajor(builder, MAJOR)
    accessors.FrameAddBodyType(builder, 1)
    builder.Finish(accessors.FrameEnd(builder), layout.IDENTIFIER)
    return bytes(builder.Output())


@pytest.mark.parametrize(("major", "who"), [(0, "the peer"), (2, "this side"), (65535, "this side")])
def test_another_major_is_refused_with_who_should_upgrade(major: int, who: str) -> None:
    sentence = f"this side speaks version {MAJOR}.{MINOR} of the wire, the peer {major}.3: upgrade {who}"
    with pytest.raises(WireVersionError, match=sentence):
        decode(of_version(encode(Beat(1)), major, 3))
    with pytest.raises(WireVersionError):
        decode_as(of_version(encode(Beat(1)), major, 3), Credit)


def test_unknown_flags_are_masked_in_a_newer_minor_and_refused_in_this_one() -> None:
    put, settles = produce(), settle()
    put.flags = np.array([0x81, 0x02, 0x40], np.uint8)
    settles.flags = np.array([0xFF, 4, 1], np.uint8)
    for frame, masked in ((put, [1, 2, 0]), (settles, [3, 0, 1])):
        read = decode(of_version(encode(frame), MAJOR, MINOR + 1))
        assert isinstance(read, Produce | Settle)
        assert read.flags.tolist() == masked
        with pytest.raises(WireError, match="flags has a value of"):
            decode(encode(frame))


def test_a_frame_says_which_minor_its_sender_speaks() -> None:
    assert minor_of(encode(Beat(1))) == MINOR
    assert minor_of(of_version(encode(Beat(1)), MAJOR, MINOR + 4)) == MINOR + 4
    with pytest.raises(WireError):
        minor_of(b"")


def test_unknown_values_of_a_newer_minor_have_a_reading() -> None:
    strange = Leaving(99, "why")  # type: ignore[arg-type]
    assert decode(of_version(encode(strange), MAJOR, MINOR + 7)) == Leaving(LeavingReason.DRAINING, "why")
    with pytest.raises(WireError, match=r"Leaving\.reason is 99"):
        decode(encode(strange))

    late = late_list()
    late.cause = np.array([200], np.uint8)
    read = decode_as(of_version(encode(late), MAJOR, MINOR + 1), LateList)
    assert read.cause.tolist() == [LateCause.UNEXPLAINED]
    with pytest.raises(WireError, match="cause has a value above"):
        decode(encode(late))

    listed = topic_list()
    mailbox = dataclasses.replace(
        listed.topics[0], settings=dataclasses.replace(listed.topics[0].settings, kind="mailbox")
    )
    listed.topics = (mailbox, *listed.topics[1:])
    assert decode_as(of_version(encode(listed), MAJOR, MINOR + 1), TopicList).topics == listed.topics
    assert examine(of_version(encode(listed), MAJOR, MINOR + 1))
    with pytest.raises(WireError, match="kind must be 'timeline'"):
        decode(encode(listed))

    stands = standing()
    stands.consumers.health = np.array([77, 0], np.uint8)
    stood = decode_as(of_version(encode(stands), MAJOR, MINOR + 1), BrokerStatus)
    assert stood.consumers.health.tolist() == [Health.SILENT, Health.HEALTHY]
    with pytest.raises(WireError, match="health has a value above"):
        decode(encode(stands))


def test_a_schema_that_grew_is_read(require_service: Callable[[str], None], tmp_path: Path) -> None:
    """The next minor as its authors would write it: fields, a table, a flag and a body more."""
    require_service("flatc")
    grown = SCHEMA.read_text(encoding="utf-8")
    for old, new in (
        (
            "  room_messages:long;\n}",
            "  room_messages:long;\n  urgent:bool;\n  notes:[string];\n}\ntable Nudge { why:string; }",
        ),
        ("ScheduleCall, ScheduleAnswer\n", "ScheduleCall, ScheduleAnswer, Nudge\n"),
        ("{ IN, EXPIRES_IN, MOVE, REPLACE }", "{ IN, EXPIRES_IN, MOVE, REPLACE, QUIET }"),
    ):
        assert old in grown
        grown = grown.replace(old, new, 1)
    (tmp_path / "grown.fbs").write_text(grown, encoding="utf-8")
    (tmp_path / "credit.json").write_text(
        f'{{"major": {MAJOR}, "minor": {MINOR + 1}, "body_type": "Credit", '
        '"body": {"messages": 3, "urgent": true, "notes": ["a", "b"]}}'
    )
    (tmp_path / "nudge.json").write_text(
        f'{{"major": {MAJOR}, "minor": {MINOR + 1}, "body_type": "Nudge", "body": {{"why": "x"}}}}'
    )
    run(["flatc", "--binary", "grown.fbs", "credit.json", "nudge.json"], cwd=tmp_path, check=True)
    assert same(decode((tmp_path / "credit.tln").read_bytes()), Credit(3))
    with pytest.raises(UnknownFrame):
        decode((tmp_path / "nudge.tln").read_bytes())


@pytest.mark.parametrize("minor", [MINOR, MINOR + 1])
def test_a_status_beyond_the_known_ones_reads_as_unknown_at_any_minor(minor: int) -> None:
    answered = answers()
    answered.status = np.array([0, len(Status), 255], np.uint8)
    read = decode_as(of_version(encode(Mutated(answered)), MAJOR, minor), Mutated).answers
    assert [Status.of(code) for code in read.status.tolist()] == [Status.OK, Status.UNKNOWN, Status.UNKNOWN]
    assert read.status.tolist() == [0, Status.UNKNOWN.code, Status.UNKNOWN.code]
    assert isinstance(error_of(len(Status), "m"), timeline.Unknown)
