"""Columns of byte strings, against lists of bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timeline.columns import Bools, ColumnBatch, Form, Int64, Ragged, Range, Text, UInt32, UInt64, fields_of

uneven = st.lists(st.binary(max_size=6), max_size=12)
even = st.integers(0, 5).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=12))
items = st.one_of(uneven, even)
KINDS = st.sampled_from((bytes, bytearray, lambda data: memoryview(bytes(data))))
OFFSETS = st.sampled_from((np.uint32, np.int64, np.int32))


@st.composite
def columns(draw: st.DrawFn) -> tuple[Ragged, list[bytes]]:
    """A column and the list it stands for: made of items, or lying inside a larger frame, as a slice, or joined."""
    listed = draw(items)
    if draw(st.booleans()):
        column = Ragged.of(list(listed))
    else:
        before, after = draw(st.binary(max_size=4)), draw(st.binary(max_size=4))
        marks = np.cumsum([len(before), *map(len, listed)]).astype(draw(OFFSETS))
        column = Ragged(draw(KINDS)(before + b"".join(listed) + after), marks)
    match draw(st.sampled_from(("as it is", "slice", "joined", "read"))):
        case "slice":
            low, high = draw(st.integers(-14, 14)), draw(st.integers(-14, 14))
            column, listed = column[low:high], listed[low:high]
        case "joined":
            column, listed = Ragged.concat([column, Ragged.of([b"x"]), column]), [*listed, b"x", *listed]
        case "read":
            column.tolist()
    return column, listed


@pytest.mark.slow
@given(columns())
def test_a_column_reads_as_its_list(told: tuple[Ragged, list[bytes]]) -> None:
    column, listed = told
    assert len(column) == len(listed)
    assert [column[index] for index in range(len(listed))] == listed
    assert [column[index - len(listed)] for index in range(len(listed))] == listed
    assert [bytes(column.view(index)) for index in range(len(listed))] == listed
    assert column.tolist() == list(column) == listed
    assert all(type(item) is bytes for item in column.tolist())
    assert column.sizes.tolist() == [len(item) for item in listed]
    assert column.sizes.dtype == np.int64
    assert column.nbytes == sum(map(len, listed))
    assert column == Ragged.of(listed)
    assert (b"x" in column) == (b"x" in listed)
    assert repr(column) == f"Ragged({len(listed)} items, {column.nbytes} bytes)"


@pytest.mark.slow
@given(columns(), st.one_of(st.none(), st.integers(-14, 14)), st.one_of(st.none(), st.integers(-14, 14)))
def test_slices(told: tuple[Ragged, list[bytes]], low: int | None, high: int | None) -> None:
    column, listed = told
    for step in (None, 1, 2, -1, -3):
        assert column[low:high:step].tolist() == listed[low:high:step]
    part = column[low:high]
    assert [bytes(part.view(index)) for index in range(len(part))] == listed[low:high]


@pytest.mark.slow
@given(columns(), st.data())
def test_take(told: tuple[Ragged, list[bytes]], data: st.DataObject) -> None:
    column, listed = told
    where = data.draw(st.lists(st.integers(-len(listed), len(listed) - 1), max_size=9) if listed else st.just([]))
    assert column.take(where).tolist() == [listed[index] for index in where]
    assert column.take(np.array(where, dtype=np.intp)) == column.take(where)
    mask = data.draw(st.lists(st.booleans(), min_size=len(listed), max_size=len(listed)))
    assert column.take(np.array(mask, dtype=bool)).tolist() == [
        item for item, chosen in zip(listed, mask, strict=True) if chosen
    ]


@pytest.mark.slow
@given(columns())
@example((Ragged(memoryview(b"__abc"), np.array([2, 3, 5])), [b"a", b"bc"]))
def test_compact_is_cut_loose(told: tuple[Ragged, list[bytes]]) -> None:
    column, listed = told
    packed = column.compact()
    assert packed.tolist() == listed
    assert isinstance(packed.data, bytes)
    assert int(packed.offsets[0]) == 0 and len(packed.data) == int(packed.offsets[-1]) == packed.nbytes
    assert packed.compact() is packed


@pytest.mark.slow
@given(st.lists(columns(), max_size=4))
def test_concat(told: list[tuple[Ragged, list[bytes]]]) -> None:
    joined = Ragged.concat([column for column, _ in told])
    assert joined.tolist() == [item for _, listed in told for item in listed]
    assert [joined[index] for index in range(len(joined))] == joined.tolist()
    fresh = Ragged(joined.data, joined.offsets)
    assert fresh == joined


def test_repeat_says_it_again() -> None:
    assert Ragged.repeat(b"ab", 3).tolist() == [b"ab"] * 3
    assert Ragged.repeat(b"", 2).tolist() == [b"", b""]
    assert Ragged.repeat(b"ab", 0).tolist() == []


def test_the_list_that_made_it_is_the_list_that_it_answers() -> None:
    listed = [b"a", b"bc"]
    assert Ragged.of(listed).tolist() is listed


@pytest.mark.parametrize("index", [2, -3, 99])
@pytest.mark.parametrize("read", [False, True])
def test_an_index_beyond_the_end(index: int, read: bool) -> None:
    column = Ragged(b"abc", np.array([0, 1, 3]))
    if read:
        column.tolist()
    with pytest.raises(IndexError):
        column[index]


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(IndexError, match="a mask of 1 for 2 items"):
        Ragged.of([b"a", b"b"]).take(np.array([True]))


def test_columns_compare_by_what_they_hold_and_are_no_keys() -> None:
    assert Ragged.of([b"ab", b"c"]) != Ragged.of([b"a", b"bc"])
    assert (Ragged.of([b"a"]) == [b"a"]) is False
    with pytest.raises(TypeError):
        hash(Ragged.of([]))


# ── batches ──


@dataclass(slots=True)
class Inner(ColumnBatch):
    texts: Ragged
    counts: UInt32


@dataclass(slots=True)
class Outer(ColumnBatch):
    """One field of each kind."""

    name: str
    inner: Inner
    numbers: Annotated[Int64, Range(1, 9)]
    marks: Bools
    words: Annotated[Ragged, Text("a word", 0, 9)]
    maybe: UInt64 | None = None
    perhaps: Ragged | None = None
    notes: dict[int, str] = field(default_factory=dict)
    made: int = field(init=False, default=-1)


def _outer(count: int, whole: bool = True) -> Outer:
    inner = Inner(Ragged.of([b"%d" % at for at in range(count)]), np.arange(count, dtype=np.uint32))
    numbers = np.arange(count, dtype=np.int64)
    batch = Outer("it", inner, numbers, numbers % 2 == 0, Ragged.of([b"w%d" % at for at in range(count)]))
    if whole:
        batch.maybe, batch.perhaps = numbers.astype(np.uint64), batch.words
    batch.notes = {at: f"note {at}" for at in range(0, count, 3)}
    return batch


def _seen(batch: Outer) -> list[tuple[object, ...]]:
    """Each message of a batch."""
    count = len(batch)
    columns = (batch.inner.texts, batch.inner.counts, batch.numbers, batch.marks, batch.words, batch.maybe)
    lists = [[None] * count if column is None else column.tolist() for column in (*columns, batch.perhaps)]
    return list(zip(*lists, [batch.notes.get(at) for at in range(count)], strict=True))


def test_a_batch_knows_its_fields() -> None:
    told = [(each.name, each.kind, each.dtype, each.optional) for each in Outer.columns]
    assert told == [
        ("name", "whole", None, False),
        ("inner", "batch", None, False),
        ("numbers", "numbers", np.int64, False),
        ("marks", "numbers", np.bool_, False),
        ("words", "strings", None, False),
        ("maybe", "numbers", np.uint64, True),
        ("perhaps", "strings", None, True),
        ("notes", "notes", None, False),
    ]
    assert [each.limit for each in Outer.columns if each.limit] == [Range(1, 9), Text("a word", 0, 9)]


def test_a_field_has_one_limit() -> None:
    @dataclass
    class Twice:
        numbers: Annotated[Annotated[Int64, Range(1, 9)] | None, Form("zeros")]

    with pytest.raises(TypeError, match="numbers has 2 limits"):
        fields_of(Twice)


@pytest.mark.slow
@given(st.integers(0, 7), st.booleans(), st.data())
def test_a_batch_taken_and_cut(count: int, whole: bool, data: st.DataObject) -> None:
    batch = _outer(count, whole)
    batch.made = 7
    seen = _seen(batch)
    where = data.draw(st.lists(st.integers(0, count - 1), max_size=6) if count else st.just([]))
    taken = batch.take(np.array(where, dtype=np.intp))
    assert _seen(taken) == [seen[at] for at in where]
    assert (taken.name, taken.made) == ("it", -1)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=bool)
    assert _seen(batch.take(mask)) == [seen[at] for at in np.flatnonzero(mask)]
    start, stop = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 8))
    assert _seen(batch.slice(start, stop)) == seen[start:stop]
    assert batch.slice(0, count) is batch
    with pytest.raises(IndexError):
        batch.take(np.ones(count + 1, dtype=bool))


@given(st.lists(st.integers(0, 4), max_size=4), st.booleans())
def test_batches_one_after_the_other(counts: list[int], whole: bool) -> None:
    parts = [_outer(count, whole) for count in counts]
    if parts:
        joined = Outer.concat(parts)
        assert _seen(joined) == [each for part in parts for each in _seen(part)]


def test_what_is_in_some_batches_only_is_not_lost() -> None:
    assert _seen(Outer.concat([_outer(0, whole=False), _outer(2)])) == _seen(_outer(2))
    with pytest.raises(ValueError, match="maybe"):
        Outer.concat([_outer(1), _outer(1, whole=False)])


def test_messages_in_the_place_of_others() -> None:
    batch, other = _outer(5), _outer(2)
    seen = _seen(batch)
    batch.assign(np.array([1, 3]), other)
    seen[1], seen[3] = _seen(other)
    assert _seen(batch) == seen


def test_a_blank_batch() -> None:
    batch = Inner.blank(2)
    assert (batch.texts.tolist(), batch.counts.tolist(), batch.counts.dtype) == ([b"", b""], [0, 0], np.uint32)


def test_a_batch_about_the_messages_of_another() -> None:
    source = _outer(3)
    made = Inner.of(source, texts=b"same", counts=7)
    assert (made.texts.tolist(), made.counts.tolist(), made.counts.dtype) == ([b"same"] * 3, [7] * 3, np.uint32)
    again = Outer.of(source, inner=made, maybe=None)
    assert (again.numbers is source.numbers, again.maybe, again.perhaps is source.perhaps) == (True, None, True)
    assert Inner.of(source).counts.tolist() == [0, 0, 0]
