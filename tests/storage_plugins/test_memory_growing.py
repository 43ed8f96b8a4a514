"""Columns and an index that grow in small steps: nothing is lost on the way, and no step is a large one."""

from __future__ import annotations

import errno
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeline.model import Operation, Status
from timeline.storage_plugins.conformance import run_check
from timeline.storage_plugins.conformance.trial import Trial, named, statuses
from timeline.storage_plugins.memory import MemoryStore, rows
from timeline.storage_plugins.memory.rows import GrowingColumn, Index, grow_objects, objects

SMALL = 20


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that happens at a hundred thousand happens at twenty."""
    monkeypatch.setattr(rows, "YOUNG", SMALL)
    monkeypatch.setattr(rows, "MOVED_AT_ONCE", 3)
    monkeypatch.setattr(rows, "MAPPED_ABOVE_BYTES", 1)


def _id(number: int) -> bytes:
    return b"m%d" % number


_STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "take", "take_and_put_back"]), st.lists(st.integers(0, 120), max_size=30)),
    max_size=40,
)


@pytest.mark.slow
@given(_STEPS)
def test_index_is_a_dictionary(steps: list[tuple[str, list[int]]]) -> None:
    index, model, next_slot = Index(), dict[bytes, int](), 0
    for step, numbers in steps:
        ids = [_id(number) for number in numbers]
        if step == "add":
            slots = list(range(next_slot, next_slot + len(ids)))
            next_slot += len(ids)
            fits = len(set(ids)) == len(ids) and model.keys().isdisjoint(ids)
            assert index.add(ids, slots) == fits
            if fits:
                model.update(zip(ids, slots, strict=True))
        else:
            taken = index.take(ids)
            assert taken == [model.pop(id, -1) for id in ids]
            if step == "take_and_put_back":
                index.put_back(ids, taken)
                model.update((id, slot) for id, slot in zip(ids, taken, strict=True) if slot >= 0)
        assert len(index) == len(model)
    every = [_id(number) for number in range(121)]
    assert index.find(every) == [index.get(id) for id in every] == [model.get(id, -1) for id in every]
    assert [id in index for id in every] == [id in model for id in every]


def test_no_dictionary_of_an_index_becomes_large() -> None:
    index, count = Index(), 40 * SMALL
    for start in range(0, count, 5):
        assert index.add([_id(start + at) for at in range(5)], list(range(start, start + 5)))
    assert len(index) == count
    assert len(index._young) <= SMALL + 5
    assert max(map(len, index._parts)) < count / 10
    assert index.take([_id(number) for number in range(count)]) == list(range(count))
    assert len(index) == 0 and not index._parts


@pytest.mark.parametrize("width", [0, 3])
def test_numbers_keep_what_they_hold_and_are_zero_beyond(width: int) -> None:
    column = GrowingColumn(np.int64, 4, width)
    for capacity in (4, 1_000, 50_000, 50_001):
        written = len(column.array)
        column.array[:] = 7
        column.grow(capacity)
        assert column.array.shape == ((capacity, width) if width else (capacity,))
        assert (column.array[:written] == 7).all() and not column.array[written:].any()


def test_numbers_grow_where_they_are_unless_a_view_is_about() -> None:
    column = GrowingColumn(np.uint8, 10_000)
    column.grow(20_000)
    memory = column._memory
    column.grow(30_000)
    assert column._memory is memory
    column.array[:] = 1
    view = column.array[:5]
    column.grow(40_000)
    assert column._memory is not memory
    column.array[0] = 9
    assert view.tolist() == [1] * 5, "who kept a view still has what it showed"
    assert column.array[:2].tolist() == [9, 1] and column.array[:30_000].sum() == 30_008


class OutOfMemory(mmap.mmap):
    """A mapping for which the machine has no more room."""

    def resize(self, newsize: int) -> None:
        raise OSError(errno.ENOMEM, f"no room for {newsize} bytes")


async def test_a_store_for_which_memory_runs_out_still_has_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Trial(MemoryStore) as trial:
        topic = await trial.topic()
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", OutOfMemory)
            await trial.stored(topic, named(1_500))
            before = await trial.everything(topic)
            for _ in range(2):
                with pytest.raises(OSError, match="no room"):
                    await trial.put(topic, named(5_000, "more"))
        assert await trial.everything(topic) == before
        leased = await trial.lease(topic)
        assert sorted(leased.rows.ids.tolist()) == named(1_500)
        acked = await trial.settle(topic, Operation.ACK, leased.rows)
        assert set(statuses(acked)) == {Status.OK}


def test_objects_keep_what_they_hold() -> None:
    column = objects(2)
    column[:] = [b"a", b"b"]
    grow_objects(column, 5_000)
    assert len(column) == 5_000 and column[:2].tolist() == [b"a", b"b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", ["rules_on_a_topic_that_remembers", "racing_everything", "large_batches", "id_twice_in_a_put", "fencing"]
)
async def test_a_store_of_a_split_index_keeps_the_rules(check: str) -> None:
    (await run_check(check, MemoryStore)).raise_failed()
