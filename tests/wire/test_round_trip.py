"""What is encoded is what is decoded, for every kind of frame."""

from __future__ import annotations

import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.sameness import same
from tests.wire.strategies import FRAMES
from timeline.columns import Ragged
from timeline.errors import TooLarge
from timeline.model import MAX_REASON_BYTES, Answers, LeavingReason
from timeline.wire import (
    MAX_FRAME_BYTES,
    Beat,
    Deliver,
    Leaving,
    Ping,
    Produce,
    Settled,
    Topics,
    WireError,
    decode,
    decode_as,
    encode,
    frames,
    validate_mutate,
    validate_produce,
    validate_settle,
)

JUDGES = {frames.Produce: validate_produce, frames.Mutate: validate_mutate, frames.Settle: validate_settle}


def test_every_frame_has_a_strategy() -> None:
    assert set(FRAMES) == set(typing.get_args(frames.Frame))


@pytest.mark.slow
@pytest.mark.parametrize("kind", FRAMES, ids=lambda kind: kind.__name__)
def test_frames_come_back_as_they_were(kind: type) -> None:
    @given(FRAMES[kind])
    @settings(max_examples=40)
    def round_trip(frame: typing.Any) -> None:
        data = encode(frame)
        back = decode_as(data, kind)
        assert same(back, frame)
        assert not JUDGES.get(kind, lambda _: {})(back)
        assert encode(back) == data
        assert same(decode(bytearray(data)), frame)

    round_trip()


def produce_of(payloads: list[bytes]) -> Produce:
    count = len(payloads)
    return Produce(
        request=1,
        topic="departures",
        group="ops",
        ids=Ragged.of([b"%016d" % index for index in range(count)]),
        birth=np.arange(1, count + 1, dtype=np.uint64),
        time_ms=np.full(count, 1_700_000_000_000, np.int64),
        flags=np.zeros(count, np.uint8),
        payloads=Ragged.of(payloads),
    )


@given(st.sampled_from([1000, 4097]), st.sampled_from([0, 1, 100]))
@settings(max_examples=6)
def test_large_batches_come_back_as_they_were(count: int, size: int) -> None:
    frame = produce_of([b"%0*d" % (size, index) if size else b"" for index in range(count)])
    back = decode_as(encode(frame), Produce)
    assert same(back, frame)
    assert validate_produce(back) == {}


def test_columns_are_views_of_the_frame() -> None:
    data = encode(produce_of([b"one", b"two"]))
    back = decode_as(data, Produce)
    whole = np.frombuffer(data, np.uint8)
    for column in (back.birth, back.time_ms, back.flags, back.ids.offsets, np.frombuffer(back.payloads.data, np.uint8)):
        assert np.shares_memory(column, whole)
        assert not column.flags.writeable


def test_payloads_of_every_buffer_are_taken() -> None:
    for made in (bytes, bytearray, memoryview):
        frame = produce_of([b"ab", b"c"])
        frame.payloads = Ragged(made(b"abc"), np.array([0, 2, 3]))
        assert decode_as(encode(frame), Produce).payloads.tolist() == [b"ab", b"c"]


def test_an_unexpected_kind_is_refused() -> None:
    with pytest.raises(WireError, match="Beat frame came where a Ping was expected"):
        decode_as(encode(Beat(1)), Ping)


def test_long_sentences_are_cut_at_whole_characters() -> None:
    answers = Answers.blank(2)
    answers.details = {1: "é" * 600}
    back = decode_as(encode(Settled(1, answers, 2)), Settled)
    assert back.answers.details == {1: "é" * (MAX_REASON_BYTES // 2)}
    assert len(decode_as(encode(Leaving(LeavingReason.STALLED, "x" * 5000)), Leaving).text) == MAX_REASON_BYTES


def test_what_is_too_large_is_not_encoded() -> None:
    with pytest.raises(TooLarge, match=str(MAX_FRAME_BYTES)):
        encode(produce_of([bytes(MAX_FRAME_BYTES)]))


def test_the_largest_payload_fits() -> None:
    frame = produce_of([bytes(64 * 1024 * 1024)])
    assert decode_as(encode(frame), Produce).payloads.nbytes == 64 * 1024 * 1024


@pytest.mark.parametrize(
    "frame",
    [
        Beat(2**63),
        Beat(0, -1),
        Ping("soon"),
        Leaving(LeavingReason.STALLED, "\ud800"),
        Topics(0, "t", {"x": 1.5}),
        "no",
    ],
    ids=lambda frame: type(frame).__name__,
)
def test_values_that_do_not_fit_are_not_encoded(frame: typing.Any) -> None:
    with pytest.raises(WireError):
        encode(frame)


def test_delivers_without_optional_columns_say_so() -> None:
    count = 3
    numbers = np.ones(count, np.int64)
    frame = Deliver(
        1, 2, Ragged.of([b"a", b"b", b"c"]), np.ones(count, np.uint64), numbers, numbers, numbers, numbers,
        np.ones(count, np.uint32), np.ones(count, np.uint64), Ragged.repeat(b"", count),
    )  # fmt: skip
    back = decode_as(encode(frame), Deliver)
    assert back.headers is None
    assert back.tags is None
    assert same(back, frame)
