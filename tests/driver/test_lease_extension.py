"""What handlers hold for long: their leases are extended in time, however many they are."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import timeline
from timeline import Batch
from timeline.driver.consume.settler import Settler, _framed
from timeline.driver.consumer import Consumer
from timeline.driver.produce.request_queue import RequestBatch
from timeline.model import Operation

HANDLERS = 300


class Sent:
    """What went out: frames of settles by what they ask, and the messages in them. `look` is called after each."""

    def __init__(self) -> None:
        self.frames: Counter[Operation] = Counter()
        self.messages: Counter[Operation] = Counter()
        self.look: Callable[[], object] = lambda: None

    def note(self, batch: RequestBatch) -> None:
        operation = Operation(int(batch.columns["operation"][0]))
        self.frames[operation] += 1
        self.messages[operation] += len(batch)
        self.look()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    noted, frame = Sent(), Settler.frame

    def noting(self: Settler, request: int, batch: RequestBatch) -> Any:
        noted.note(batch)
        return frame(self, request, batch)

    monkeypatch.setattr(Settler, "frame", noting)
    return noted


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
async def test_what_hundreds_of_handlers_hold_is_extended_in_few_frames(
    tl: timeline.Timeline, sent: Sent, together: bool
) -> None:
    """Also where each message came in a load of its own. One frame each, they would wait for each other's answers
    longer than a short lease lasts."""
    done = asyncio.Event()

    def look() -> None:
        if c.stats.delivered >= HANDLERS <= sent.messages[Operation.EXTEND]:
            done.set()

    async def handler(d: timeline.Delivery) -> None:
        await done.wait()
        c.stop_taking()

    sent.look = look
    async with tl.producer("t") as p, tl.consumer("t", lease="6s") as c:
        if together:
            await p.produce_many(Batch([b""] * HANDLERS, in_=0))
        running = asyncio.ensure_future(c.run(handler, concurrency=HANDLERS))
        for _ in range(0 if together else HANDLERS):
            await p.produce(b"", in_=0)
        await running
    assert sent.messages[Operation.ACK] == HANDLERS
    assert sent.frames[Operation.EXTEND] * 10 <= sent.messages[Operation.EXTEND]
    assert sent.frames[Operation.ACK] * 10 <= HANDLERS


@pytest.mark.slow
async def test_what_waits_in_hundreds_of_loads_is_extended_in_few_frames(tl: timeline.Timeline, sent: Sent) -> None:
    done = asyncio.Event()
    async with tl.producer("t") as p, tl.consumer("t", lease="6s", credit=HANDLERS) as c:
        sent.look = lambda: done.set() if sent.messages[Operation.EXTEND] >= HANDLERS else None
        c.open()
        for _ in range(HANDLERS):
            await p.produce(b"", in_=0)
        await done.wait()
    assert sent.frames[Operation.EXTEND] * 10 <= sent.messages[Operation.EXTEND]


def test_a_frame_takes_no_more_than_a_broker_does() -> None:
    def frame(count: int) -> tuple[Any, Any]:
        return None, np.arange(count)

    parts = _framed([frame(9_999), frame(1), frame(1), frame(10_000), frame(10_000), frame(5)])
    assert [[len(at) for _, at in part] for part in parts] == [[9_999, 1], [1], [10_000], [10_000], [5]]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("left_ms", "rests_ms"), [(30_000, 10_000), (25_000, 10_000), (6_000, 3_000), (-1_000, 0)])
def test_a_lease_of_which_little_is_left_is_extended_sooner(left_ms: float, rests_ms: float, exact: bool) -> None:
    """That of a message which waited in the buffer during an outage; whatever is left to others of its load."""
    consumer: Any = SimpleNamespace(lease_ms=30_000.0, monotonic_ms=lambda: 5_000.0)
    end_ms = 5_000.0 + left_ms
    frame = SimpleNamespace(end_ms=[end_ms], earliest_ms=end_ms if exact else min(end_ms, 4_000.0))
    delivery: Any = SimpleNamespace(_frame=frame, _index=0)
    assert Consumer.extend_at_ms(consumer, delivery) - 5_000.0 == pytest.approx(rests_ms)
