"""What a consumer that has nothing to do says to its broker, in virtual time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.broker.machines import Town, town
from tests.simulation.wire import ClientEnd
from timeline.broker.limits import Limits
from timeline.wire import Credit, decode

HEARTBEAT_MS = 60
HEARTBEATS = 9


@pytest.mark.slow
def test_an_idle_consumer_beats_once_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    beats_ms: list[float] = []
    send = ClientEnd.send

    async def watched(end: ClientEnd, frame: bytes) -> None:
        if isinstance(decode(frame), Credit):
            beats_ms.append(1_000.0 * made.gone_s)
        await send(end, frame)

    async def story(made: Town) -> None:
        await made.broker("b1")
        await made.create_topic()
        made.consume("idle")
        await made.until(lambda: len(beats_ms) > HEARTBEATS, within_s=60.0)

    monkeypatch.setattr(ClientEnd, "send", watched)
    with town(limits=Limits(heartbeat_ms=HEARTBEAT_MS)) as made:
        made.run(story(made))
    gaps_ms = [after - before for before, after in pairwise(beats_ms)]
    assert len(gaps_ms) >= HEARTBEATS
    assert all(0.7 * HEARTBEAT_MS <= gap_ms <= HEARTBEAT_MS for gap_ms in gaps_ms), gaps_ms
