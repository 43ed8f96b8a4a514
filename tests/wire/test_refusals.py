"""A frame whose structure or values are out of range is refused as a whole, with the field and what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.wire import samples
from tests.wire.samples import SAMPLES, longs, ubytes, uints, ulongs
from timeline.columns import Ragged
from timeline.errors import Invalid, TimelineError
from timeline.model import MAX_BATCH, MAX_DURATION_MS, MAX_TIME_MS, Answers, Operation, TopicSettings
from timeline.wire import MAX_FRAME_BYTES, Forecast, Frame, Late, Ping, Pong, Topics, WireError, decode, encode, frames

A = Ragged.of([b"a"])
FULL: dict[type, Any] = {type(frame): frame for frame in reversed(SAMPLES)}
"""The first, fullest sample of each kind."""


def answers(**change: Any) -> Answers:
    return dataclasses.replace(samples.answers(), **change)


def rows(**change: Any) -> Any:
    return dataclasses.replace(samples.rows(True), **change)


def part(field: str, **change: Any) -> Any:
    return dataclasses.replace(getattr(samples.standing(), field), **change)


def ragged(data: bytes, *offsets: int) -> Ragged:
    """Offsets as said, sound or not."""
    return Ragged(data, np.array(offsets, np.uint32))


LATER = MAX_TIME_MS + 1
LONGER = MAX_DURATION_MS + 1

REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (frames.Produce, {"topic": ""}, "topic is no topic's name.*1 to 255 printable"),
    (frames.Produce, {"topic": "a\nb"}, "printable"),
    (frames.Produce, {"topic": "x" * 256}, "1 to 255"),
    (frames.Produce, {"group": ""}, "group is 1 to 255 bytes"),
    (frames.Produce, {"group": "é" * 128}, "group is 1 to 255 bytes"),
    (frames.Produce, {"group": "a\0b"}, "without NUL"),
    (frames.Produce, {"timeout_ms": -1}, f"timeout_ms is -1; allowed are 0 to {MAX_DURATION_MS}"),
    (frames.Produce, {"birth": ulongs(1, 2)}, "birth has 2 items where 3 are expected"),
    (frames.Produce, {"time_ms": longs()}, "time_ms has 0 items where 3"),
    (frames.Produce, {"flags": ubytes(1, 2, 3, 4)}, "flags has 4 items where 3"),
    (frames.Produce, {"payloads": A}, "payloads has 1 items where 3"),
    (frames.Produce, {"headers": A}, "headers has 1 items where 3"),
    (frames.Produce, {"expires_ms": longs(1)}, "expires_ms has 1 items"),
    (frames.Produce, {"flags": ubytes(0, 16, 0)}, "flags has a value of 16"),
    (frames.Mutate, {"operation": Operation.ACK}, "operation is 3; allowed are 6, 7, 8, 9"),
    (frames.Mutate, {"op": ulongs(1)}, "op has 1 items where 2"),
    (frames.Mutate, {"flags": ubytes(4, 0)}, "flags has a value of 4"),
    (frames.MutateTag, {"operation": Operation.PURGE}, "allowed are 6, 7"),
    (frames.MutateTag, {"tag": b""}, "tag is 1 to 64 bytes"),
    (frames.MutateTag, {"tag": b"\xff"}, "tag is 1 to 64 bytes of UTF-8"),
    (frames.MutateTag, {"tag": b"t" * 65}, "takes up to 64 bytes, not 65"),
    (frames.MutateTag, {"at_ms": LATER}, "at_ms is"),
    (frames.MutateTag, {"in_ms": -2}, "in_ms is -2"),
    (frames.MutateTag, {"by_ms": -LONGER}, "by_ms is"),
    (frames.MutateTag, {"leased": 2}, "leased is neither 0 nor 1"),
    (frames.MutateTag, {"limit": 0}, "limit is 0; allowed are 1 to 100000"),
    (frames.MutateTag, {"cursor": bytes(4097)}, "cursor takes up to 4096"),
    (frames.Mutated, {"answers": answers(version=longs(-1, 0, 0))}, "version has a value outside"),
    (frames.Mutated, {"answers": answers(due_ms=longs(0, 0, LATER))}, "due_ms has a value outside"),
    (frames.Mutated, {"answers": answers(due_ms=longs(0, 0))}, "due_ms has 2 items where 3"),
    (frames.Mutated, {"answers": answers(details={3: "x"})}, "detail_at must ascend below 3"),
    (frames.Mutated, {"answers": answers(late=ubytes(1, 4, 1))}, "marks has a value"),
    (frames.Mutated, {"retry_after_ms": -1}, "retry_after_ms is -1"),
    (frames.TagMutated, {"started_ms": LATER}, "started_ms"),
    (frames.Hello, {"consumer": ""}, "consumer is 1 to 255"),
    (frames.Hello, {"credit_messages": -1}, "credit_messages is -1"),
    (frames.Hello, {"version": longs(1, 0)}, "version has a value outside 1"),
    (frames.Hello, {"ids": Ragged.of([b"", b"a"])}, "ids is bad at 0: an id takes 1"),
    (frames.Hello, {"ids": Ragged.of([b"\xc3", b"\xa9"])}, "ids is bad at 0: an id must be UTF-8"),
    (frames.Credit, {"bytes": 2**53}, "bytes is 9007199254740992"),
    (frames.Settle, {"operation": ubytes(3, 4, 6)}, "operation has a value of 6; allowed are 2, 3, 4, 5"),
    (frames.Settle, {"version": longs(1, 1, 0)}, "version has a value outside 1"),
    (frames.Settle, {"credit_bytes": -5}, "credit_bytes is -5"),
    (frames.Welcome, {"brokers": ("b:1", "")}, "brokers is bad at 1"),
    (frames.Welcome, {"max_payload_bytes": 2**40}, "max_payload_bytes is"),
    (frames.Deliver, {"ids": Ragged.of([b"a", b"b\0"])}, "ids is bad at 1: an id must not contain a NUL"),
    (frames.Deliver, {"headers": Ragged.of([b"\1", b""])}, "headers is bad at 0"),
    (frames.Deliver, {"headers": Ragged.of([b"h" * 8193, b""])}, "headers is bad at 0: headers may take 8192"),
    (frames.Deliver, {"tags": Ragged.of([b"", b"\xff"])}, "tags is bad at 1"),
    (frames.Deliver, {"lease_until_ms": longs(1, -1)}, "lease_until_ms has a value outside"),
    (frames.Deliver, {"deliveries": uints(1)}, "deliveries has 1 items where 2"),
    (frames.Beat, {"now_ms": -1}, "now_ms is -1"),
    (frames.Leaving, {"reason": 0}, "reason is 0; allowed are 1, 2, 3, 4, 5"),
    (frames.Scan, {"due_to_ms": LATER}, "due_to_ms is"),
    (frames.Scan, {"limit": -1}, "limit is -1"),
    (frames.Scan, {"bucket_to": 4097}, "bucket_to is 4097; allowed are 0 to 4096"),
    (frames.Scan, {"holder": "h" * 256}, "holder is 1 to 255 bytes"),
    (frames.Scan, {"ids": Ragged.of([b""])}, "ids is bad at 0"),
    (frames.Scan, {"tag": b"\xff"}, "tag is 0 to 64"),
    (frames.ScanPage, {"rows": rows(version=longs(1, 0))}, "Rows.version has a value outside 1"),
    (frames.ScanPage, {"rows": rows(groups=Ragged.of([b"g", b""]))}, "groups is bad at 1"),
    (frames.ScanPage, {"rows": rows(dead=Ragged.of([b"", b"d" * 1025]))}, "dead is bad at 1: a reason takes 0 to 1024"),
    (frames.ScanPage, {"rows": rows(payload_bytes=uints(1, 2**31))}, "payload_bytes has a value outside"),
    (frames.ScanPage, {"rows": rows(put_ms=longs(1, LATER))}, "put_ms has a value outside"),
    (frames.Forecast, {"window_ms": 10_001, "step_ms": 1}, "more than 10000 steps"),
    (frames.Forecast, {"step_ms": 0}, "step_ms is 0; allowed are 1"),
    (frames.Forecasted, {"edges_ms": longs(1, 2)}, "counts has 2 items where 1"),
    (frames.Forecasted, {"edges_ms": longs(1, 3, 2)}, "do not decrease"),
    (frames.Forecasted, {"edges_ms": longs(), "counts": longs()}, "1 to 10001 times"),
    (frames.Forecasted, {"counts": longs(1, -1)}, "counts has a value outside 0"),
    (frames.Topics, {"action": 9}, "action is 9"),
    (frames.Topics, {"name": "\t"}, "name is no topic's name"),
    (frames.Topics, {"revision": -1}, "revision is -1"),
    (frames.Topics, {"settings": {"": 1}}, "settings is bad at 0"),
    (frames.Topics, {"settings": {f"s{n}": n for n in range(257)}}, "settings are up to 256"),
    (frames.TopicList, {"status": 256}, "cannot carry"),
    (frames.Late, {"topic": "\n"}, "topic is no topic's name"),
    (frames.Late, {"id": b"\0"}, "id an id must not contain"),
    (frames.Late, {"limit": MAX_BATCH + 1}, "limit is 100001"),
    (frames.LateList, {"cause": ubytes(11)}, "cause has a value above 10"),
    (frames.LateList, {"dropped": -1}, "dropped is -1"),
    (frames.LateList, {"ids": Ragged.of([])}, "ids has 0 items where 1"),
    (frames.Ping, {"sent_ms": float("nan")}, "sent_ms is nan; a clock reads 0"),
    (frames.Ping, {"sent_ms": float("inf")}, "sent_ms is inf"),
    (frames.Pong, {"answered_ms": -0.5}, "answered_ms is -0.5"),
    (frames.StatusRequest, {"topic": "\n"}, "topic is no topic's name"),
    (frames.StatusRequest, {"limit": 0}, "limit is 0; allowed are 1"),
    (frames.BrokerStatus, {"store_ms": float("inf")}, "store_ms is inf"),
    (frames.BrokerStatus, {"started_ms": -1}, "started_ms is -1"),
    (frames.BrokerStatus, {"topics": part("topics", credit=longs(1))}, r"TopicLoads\.credit has 1 items where 2"),
    (frames.BrokerStatus, {"topics": part("topics", waiting=longs(1, -1))}, "waiting has a value outside 0"),
    (frames.BrokerStatus, {"topics": part("topics", delivered=longs(0, 2**53))}, "delivered has a value outside 0"),
    (frames.BrokerStatus, {"topics": part("topics", next_due_ms=longs(0, LATER))}, "next_due_ms has a value outside"),
    (frames.BrokerStatus, {"lateness": part("lateness", topics=Ragged.of([b"t", b""]))}, "topics is bad at 1"),
    (frames.BrokerStatus, {"lateness": part("lateness", counts=longs(0, -5))}, "counts has a value outside"),
    (frames.BrokerStatus, {"consumers": part("consumers", health=ubytes(0, 4))}, "health has a value above 3"),
    (frames.BrokerStatus, {"consumers": part("consumers", consumers=Ragged.of([b"a", b""]))}, "consumers is bad at 1"),
    (
        frames.BrokerStatus,
        {"consumers": part("consumers", credit_bytes=longs(1, -1))},
        "credit_bytes has a value outside",
    ),
    (frames.BrokerStatus, {"lateness": None}, "lateness is missing"),
    (frames.Hint, {"topic_uid": longs(-1, 5)}, "topic_uid has a value outside 0"),
    (frames.Hint, {"due_ms": longs(0)}, "due_ms has 1 items where 2"),
    (frames.Hint, {"due_ms": longs(0, LATER)}, "due_ms has a value outside 0"),
    (frames.Hinted, {"known": -1}, "known is -1"),
    (frames.Take, {"topic": ""}, "topic is no topic's name"),
    (frames.Take, {"max_messages": 1_001}, "max_messages is 1001"),
    (frames.Take, {"max_bytes": 0}, "max_bytes is 0"),
    (frames.Take, {"wait_ms": 60_001}, "wait_ms is 60001"),
    (frames.Take, {"lease_ms": -1}, "lease_ms is -1"),
    (frames.Settle, {"holder": "a\0b"}, "holder is 1 to 255 bytes"),
    (frames.ScheduleCall, {"action": 9}, "action is 9"),
    (frames.ScheduleCall, {"topic": "\n"}, "topic is no topic's name"),
    (frames.ScheduleCall, {"revision": -1}, "revision is -1"),
    (frames.ScheduleCall, {"to_ms": LATER}, "to_ms is"),
    (frames.ScheduleCall, {"limit": 1_001}, "limit is 1001"),
    (frames.ScheduleAnswer, {"counts": {"": 1}}, "counts is bad at 0"),
    (frames.ScheduleAnswer, {"counts": {"produced": -1}}, "counted has a value outside 0"),
    (frames.Deliver, {"holder": "x" * 256}, "holder is 1 to 255 bytes"),
    (frames.Pong, {"step_ms": float("nan")}, "step_ms is nan; clocks are apart"),
    (frames.Credit, {"ahead_ms": -float("inf")}, "ahead_ms is -inf"),
    (frames.Credit, {"error_ms": 1e300}, "error_ms is 1e[+]300"),
    (frames.Pong, {"brokers": ("b1:9000", "")}, "brokers is bad at 1"),
    (frames.BrokerStatus, {"topics": part("topics", dealt=longs(1))}, r"TopicLoads\.dealt has 1 items where 2"),
    (frames.BrokerStatus, {"topics": part("topics", buckets=longs(1, -1))}, "buckets has a value outside 0"),
]


@pytest.mark.parametrize(
    ("kind", "change", "sentence"),
    REFUSED,
    ids=[f"{kind.__name__}-{next(iter(change))}" for kind, change, _ in REFUSED],
)
def test_frames_out_of_range_are_refused(kind: type, change: dict[str, Any], sentence: str) -> None:
    sound = FULL[kind]
    assert decode(encode(sound)) is not None
    with pytest.raises(WireError, match=sentence) as refused:
        decode(encode(dataclasses.replace(sound, **change)))
    assert isinstance(refused.value, Invalid | TimelineError)
    assert refused.value.code == "INVALID"
    assert not refused.value.retryable


@pytest.mark.parametrize(
    "ids",
    [ragged(b"abc", 1, 2, 3), ragged(b"abc", 0, 1, 2), ragged(b"abc", 0, 1, 4), ragged(b"abc", 0, 2, 1, 3)],
    ids=["starts late", "ends early", "ends outside", "decreases"],
)
def test_offsets_that_mislead_are_refused(ids: Ragged) -> None:
    frame = samples.deliver()
    data = encode(frame)
    # Written over by hand: the encoder mends offsets that start late, and cuts what lies past the last.
    at = data.index(uints(0, 1, 3).tobytes())
    count = data[at - 4 : at]
    offsets = ids.offsets.astype(np.uint32).tobytes()[:12]
    with pytest.raises(WireError, match=r"Deliver\.ids has offsets that do not lead"):
        decode(data[: at - 4] + count + offsets + data[at + 12 :])


def test_offsets_of_long_columns_are_checked_too() -> None:
    frame = samples.produce(100)
    data = bytearray(encode(frame))
    offsets = frame.ids.offsets.astype(np.uint32).tobytes()
    at = data.index(offsets)
    for value in (0, 10_000, 2**32 - 1):
        data[at + 200 : at + 204] = value.to_bytes(4, "little")
        with pytest.raises(WireError, match=r"Produce\.ids has offsets"):
            decode(bytes(data))


def test_more_messages_than_a_batch_may_have_are_refused() -> None:
    most = frames.Mutated(Answers.blank(MAX_BATCH))
    assert decode(encode(most)) is not None
    with pytest.raises(WireError, match="has 100001 items; a frame carries up to 100000"):
        decode(encode(frames.Mutated(Answers.blank(MAX_BATCH + 1))))


def test_answers_and_settings_named_twice_are_refused() -> None:
    answer = samples.answers()
    data = bytearray(encode(frames.Mutated(answer)))
    at = bytes(data).index(uints(2, 0, 2).tobytes())
    data[at + 8] = 0
    with pytest.raises(WireError, match="detail_at must ascend"):
        decode(bytes(data))
    twice = encode(frames.Topics(frames.TopicAction.LIST, "", {"ab": 1, "aa": 2})).replace(b"abaa", b"aaaa")
    with pytest.raises(WireError, match="each once"):
        decode(twice)
    states = encode(frames.TagMutated({1: 2, 3: 4}, b"", 0)).replace(b"\2\0\0\0\1\3", b"\2\0\0\0\3\3")
    with pytest.raises(WireError, match="names a status twice"):
        decode(states)


def test_a_topic_record_out_of_range_is_refused() -> None:
    bad = TopicSettings(buckets=5000)
    listed = samples.topic_list()
    broken = dataclasses.replace(listed, topics=(dataclasses.replace(listed.topics[0], settings=bad),))
    with pytest.raises(WireError, match="buckets must be a whole number from 1 to 4096"):
        decode(encode(broken))


@pytest.mark.parametrize("data", [b"", b"TLN1", bytes(12), b"\0\0\0\0TLN2" + bytes(20), b"x" * 100])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="do not carry 'TLN1'"):
        decode(data)


def test_a_frame_above_the_cap_is_refused_unread() -> None:
    with pytest.raises(WireError, match=f"a frame may take {MAX_FRAME_BYTES} bytes"):
        decode(encode(Ping(1.0)) + bytes(MAX_FRAME_BYTES))


@pytest.mark.slow
@pytest.mark.parametrize("frame", SAMPLES, ids=lambda frame: type(frame).__name__)
def test_every_truncation_is_refused_or_still_sound(frame: Frame) -> None:
    """Only bytes that nothing refers to, the padding at the end, may be missing."""
    data = encode(frame)
    for size in range(len(data) - 1):
        with pytest.raises(WireError):
            decode(data[:size])


def test_the_sentence_reaches_who_reads_it() -> None:
    for frame in (Forecast("t", 1, 0), Late(limit=0), Pong(-1.0, 0, 0, "", ""), Topics(frames.TopicAction.DROP)):
        with pytest.raises(WireError, match=f"^INVALID: {type(frame).__name__}\\."):
            decode(encode(frame))
