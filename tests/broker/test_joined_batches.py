"""Batches that wait for one consumer are joined, since a frame for each would make them later; large ones are cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.broker.columns import make_consumer, make_leased
from timeline.broker.api.consume import deliver
from timeline.broker.dispatch.leased_batch import JOINED_BYTES, JOINED_MESSAGES, LeasedBatch
from timeline.broker.dispatch.roster import ConnectedConsumer
from timeline.model import TopicSettings
from timeline.wire.frames import AIM_BYTES, Beat


def at(leased_ms: int, *due_ms: int, bytes_: int = 1) -> LeasedBatch:
    """A batch of one round, told apart by when its lease call returned."""
    return replace(make_leased(list(due_ms), [b"x" * bytes_] * len(due_ms)), leased_ms=leased_ms)


async def sent(consumer: ConnectedConsumer) -> list[list[int] | Beat]:
    """What is sent, one after the other: the dues of each batch, and frames."""
    consumer.finish()
    found = []
    while (item := await consumer.next()) is not None:
        found.append(item.was_due_ms.tolist() if isinstance(item, LeasedBatch) else item)
    assert consumer.outbox_bytes == consumer.outboxes.bytes == 0
    return found


async def test_batches_of_one_round_that_wait_behind_each_other_go_together():
    consumer, beat = make_consumer("c"), Beat(1, 2)
    for item in (at(5, 10, 11), at(5, 12), at(6, 13), beat, at(6, 14), at(6, 15)):
        consumer.push(item)
    assert await sent(consumer) == [[10, 11, 12], [13], beat, [14, 15]]


async def test_all_columns_of_what_goes_together_are_there():
    consumer = make_consumer("c")
    parts = [at(5, 10, 11), replace(at(5, 12), again=at(5, 12).again | True)]
    for part in parts:
        consumer.push(part)
    joined = await consumer.next()
    assert isinstance(joined, LeasedBatch) and len(joined) == 3 and joined.leased_ms == 5
    settings = TopicSettings(max_deliveries=3)
    frame, alone = deliver(joined, 7, settings), [deliver(part, 7, settings) for part in parts]
    for name in ("ids", "birth", "version", "due_ms", "scheduled_ms", "lease_until_ms", "payload_sum", "payloads"):
        assert list(getattr(frame, name)) == [value for one in alone for value in getattr(one, name)], name
    assert joined.again.tolist() == [False, False, True]


async def test_what_a_sweep_found_goes_by_itself():
    consumer = make_consumer("c")
    consumer.push(at(5, 10))
    consumer.push(replace(at(5, 11), stranded=True))
    assert await sent(consumer) == [[10], [11]]


async def test_no_more_than_is_worth_a_copy_goes_together():
    consumer = make_consumer("c")
    for due_ms in range(JOINED_MESSAGES + 5):
        consumer.push(at(5, due_ms))
    assert [len(one) for one in await sent(consumer)] == [JOINED_MESSAGES, 5]
    consumer = make_consumer("d")
    for due_ms in range(3):
        consumer.push(at(5, due_ms, bytes_=JOINED_BYTES // 2 - 200))
    assert await sent(consumer) == [[0, 1], [2]]


@pytest.mark.slow
@given(st.lists(st.integers(0, 700_000), min_size=1, max_size=12), st.integers(1, 5))
def test_a_leased_batch_is_cut_into_frames_of_bounded_size(sizes, most):
    batch = make_leased([0] * len(sizes), [b"x" * size for size in sizes])
    parts = list(batch.frames(most, AIM_BYTES))
    assert [id for part in parts for id in part.rows.ids.tolist()] == batch.rows.ids.tolist()
    for part in parts:
        assert 1 <= len(part) <= most
        assert len(part) == 1 or int(part.sizes.sum()) <= AIM_BYTES
