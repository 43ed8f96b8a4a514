"""Single messages of a sound frame are judged one by one; a good column is judged as a whole, with the same result."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.wire.samples import NOW_MS, SAMPLES, full_produce, full_settle, longs, produce, settle, ubytes, ulongs
from timeline.columns import Ragged, Text
from timeline.model import (
    ID_TEXT,
    MAX_DURATION_MS,
    MAX_HEADERS_BYTES,
    MAX_TIME_MS,
    REASON_TEXT,
    TAG_TEXT,
    Operation,
    Status,
    encode_headers,
)
from timeline.wire import (
    Mutate,
    Produce,
    Settle,
    decode_as,
    encode,
    validate_headers,
    validate_mutate,
    validate_produce,
    validate_settle,
)
from timeline.wire.validate import validate_texts, within


def naive(items: list[bytes], least: int, most: int, nul: bool) -> set[int]:
    """The rule, said plainly."""

    def good(item: bytes) -> bool:
        try:
            item.decode("utf-8")
        except UnicodeDecodeError:
            return False
        return least <= len(item) <= most and (nul or 0 not in item)

    return {index for index, item in enumerate(items) if not good(item)}


pieces = st.sampled_from([b"", b"a", b"\0", "é".encode(), "é".encode()[:1], "é".encode()[1:], b"\xff", "😀".encode()])
items = st.lists(st.lists(pieces, max_size=4).map(b"".join), max_size=70)


@pytest.mark.slow
@given(items, st.integers(0, 2), st.integers(2, 12), st.booleans())
@example(["é".encode()[:1], "é".encode()[1:]], 0, 9, True)
@example(["é".encode()] * 40 + [b"\xc3", b"\xa9"], 0, 9, True)
@example([b"a", b"", "é".encode()], 0, 9, True)
def test_columns_are_judged_as_their_items_are(listed: list[bytes], least: int, most: int, nul: bool) -> None:
    whole = Ragged.of([b"\xa9", *listed, b"\xa9"])[1 : len(listed) + 1]
    for column in (Ragged.of(listed), whole):
        assert validate_texts(column, Text("an item", least, most, nul)).keys() == naive(listed, least, most, nul)


@pytest.mark.slow
@given(st.lists(st.integers(-5, 5), max_size=40))
def test_within_says_what_min_and_max_say(values: list[int]) -> None:
    assert within(np.array(values, np.int64), -2, 2) == all(-2 <= value <= 2 for value in values)


def test_sentences_say_what_is_allowed() -> None:
    assert validate_texts(Ragged.of([b"", b"ok", b"x" * 256, b"a\0", b"\xff"]), ID_TEXT) == {
        0: "an id takes 1 to 255 bytes, not 0",
        2: "an id takes 1 to 255 bytes, not 256",
        3: "an id must not contain a NUL character",
        4: "an id must be UTF-8",
    }
    assert validate_texts(Ragged.of([b"", b"t" * 65]), TAG_TEXT) == {1: "a tag takes 0 to 64 bytes, not 65"}
    reasons = Ragged.of([b"r" * 1024, b"r" * 1025])
    assert validate_texts(reasons, REASON_TEXT) == {1: "a reason takes 0 to 1024 bytes, not 1025"}
    assert validate_texts(None, TAG_TEXT) == validate_headers(None) == {}


def test_headers_must_be_as_encoded() -> None:
    good = encode_headers({"a": "1", "b": "2"})
    pair = encode_headers({"a": "1"})
    listed = [b"", good, pair + pair, encode_headers({"b": "2"}) + pair, good[:-1], pair[:3], b"\1", b"\1\0\xff\0\0"]
    assert validate_headers(Ragged.of(listed)) == {
        2: "headers must be sorted by key, each key once",
        3: "headers must be sorted by key, each key once",
        4: "headers end in the middle of a string",
        5: "headers have a key without a value",
        6: "headers end in the middle of a string",
        7: "headers are not UTF-8",
    }
    assert validate_headers(Ragged.of([bytes(MAX_HEADERS_BYTES + 1)])) == {0: "headers may take 8192 bytes, not 8193"}


INVALID, TOO_LARGE = Status.INVALID, Status.TOO_LARGE
PUTS: list[tuple[dict[str, Any], dict[int, Status]]] = [
    ({"ids": Ragged.of([b"", b"a", b"\xff"])}, {0: INVALID, 2: INVALID}),
    ({"birth": ulongs(1, 0, 3)}, {1: INVALID}),
    ({"time_ms": longs(-1, NOW_MS, MAX_TIME_MS + 1)}, {0: INVALID, 2: INVALID}),
    ({"time_ms": longs(MAX_TIME_MS, -(2**63), 2**63 - 1), "flags": ubytes(0, 1, 1)}, {1: INVALID, 2: INVALID}),
    ({"time_ms": longs(MAX_DURATION_MS, MAX_DURATION_MS + 1, 0), "flags": ubytes(1, 1, 1)}, {1: INVALID}),
    ({"time_ms": longs(MAX_TIME_MS, MAX_DURATION_MS + 1, 0), "flags": ubytes(0, 0, 0)}, {}),
    ({"expires_ms": longs(-1, 0, MAX_TIME_MS + 1), "flags": ubytes(0, 0, 0)}, {0: INVALID, 2: INVALID}),
    ({"expires_ms": longs(1, MAX_DURATION_MS + 1, 0), "flags": ubytes(2, 2, 2)}, {1: INVALID}),
    ({"flags": ubytes(4, 8, 12), "time_ms": longs(NOW_MS, NOW_MS, NOW_MS)}, {2: INVALID}),
    ({"tags": Ragged.of([b"t" * 65, b"\xff", b""])}, {0: INVALID, 1: INVALID}),
    ({"headers": Ragged.of([b"\1", b"h" * 9000, b""])}, {0: INVALID, 1: TOO_LARGE}),
    ({"payloads": Ragged.of([b"p" * 11, b"p" * 10, b""])}, {0: TOO_LARGE}),
    ({"payloads": Ragged.of([b"p" * 11, b"p" * 10, b""]), "ids": Ragged.of([b"", b"b", b"c"])}, {0: INVALID}),
]


@pytest.mark.parametrize(("change", "refused"), PUTS)
def test_puts_are_refused_one_by_one(change: dict[str, Any], refused: dict[int, Status]) -> None:
    bare = dataclasses.replace(produce(), payloads=Ragged.of([b"x", b"y", b"z"]), flags=ubytes(0, 0, 0))
    read = decode_as(encode(dataclasses.replace(bare, **change)), Produce)
    judged = validate_produce(read, max_payload_bytes=10)
    assert {index: status for index, (status, _) in judged.items()} == refused
    assert all(sentence for _, sentence in judged.values())


def mutate(operation: Operation) -> Mutate:
    two = Ragged.of([b"a", b"b"])
    return Mutate("t", "g", operation, two, longs(NOW_MS, 5), ubytes(0, 1), longs(0, 1), ulongs(1, 2))


@pytest.mark.parametrize("operation", [Operation.MOVE, Operation.CANCEL, Operation.REVIVE, Operation.PURGE])
@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({}, set()),
        ({"ids": Ragged.of([b"a" * 256, b"b"])}, {0}),
        ({"time_ms": longs(-1, 5)}, {0}),
        ({"time_ms": longs(MAX_TIME_MS, MAX_DURATION_MS + 1)}, {1}),
        ({"if_version": longs(0, -1)}, {1}),
    ],
)
def test_mutations_are_refused_one_by_one(operation: Operation, change: dict[str, Any], refused: set[int]) -> None:
    read = decode_as(encode(dataclasses.replace(mutate(operation), **change)), Mutate)
    assert validate_mutate(read).keys() == refused


def test_only_what_needs_an_operation_id_is_refused_without() -> None:
    for operation in (Operation.MOVE, Operation.REVIVE):
        assert validate_mutate(dataclasses.replace(mutate(operation), op=ulongs(1, 0))).keys() == {1}
    for operation in (Operation.CANCEL, Operation.PURGE):
        assert not validate_mutate(dataclasses.replace(mutate(operation), op=ulongs(1, 0)))
    kinds = ubytes(Operation.ACK, Operation.RELEASE, Operation.EXTEND)
    assert validate_settle(dataclasses.replace(settle(), operation=kinds, op=ulongs(0, 0, 0))).keys() == {1}


RELEASE, EXTEND, BURY = int(Operation.RELEASE), int(Operation.EXTEND), int(Operation.BURY)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"ids": Ragged.of([b"", b"a", b"b"])}, {0}),
        ({"reasons": Ragged.of([b"\xff", b"r" * 1025, b""])}, {0, 1}),
        ({"time_ms": longs(-1, 0, 5), "operation": ubytes(EXTEND, RELEASE, BURY)}, {0}),
        (
            {"time_ms": longs(NOW_MS, MAX_TIME_MS, -1), "operation": ubytes(*[RELEASE] * 3), "flags": ubytes(0, 0, 2)},
            {1, 2},
        ),
        ({"time_ms": longs(MAX_TIME_MS, MAX_TIME_MS + 1, -(2**63)), "flags": ubytes(1, 1, 1)}, {0, 1, 2}),
        (
            {
                "time_ms": longs(MAX_TIME_MS, MAX_TIME_MS + 1, -1),
                "operation": ubytes(*[RELEASE] * 3),
                "flags": ubytes(1, 1, 1),
            },
            {1, 2},
        ),
    ],
)
def test_settles_are_refused_one_by_one(change: dict[str, Any], refused: set[int]) -> None:
    read = decode_as(encode(dataclasses.replace(full_settle(), **change)), Settle)
    assert validate_settle(read).keys() == refused


def test_the_samples_have_nothing_to_blame() -> None:
    assert full_produce().headers is not None
    for frame in SAMPLES:
        judged = {Produce: validate_produce, Mutate: validate_mutate, Settle: validate_settle}.get(type(frame))
        assert judged is None or judged(frame) == {}  # type: ignore[operator]
