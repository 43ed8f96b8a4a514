"""The crowd itself: it keeps its promises on a sound store though outcomes are unknown, and sees what goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from timeline.model import Answers, Topic
from timeline.storage_plugins.conformance.crowd import Crowd
from timeline.storage_plugins.conformance.trial import StoreViolation, Trial
from timeline.storage_plugins.contract import Puts, StoreUnavailable, StoreUnknown
from timeline.storage_plugins.memory import MemoryStore

CHANGING = ("put", "lease_due", "settle", "mutate")


class Unsure(MemoryStore):
    """Each so many-th changing call is done and its answer lost, or not done at all."""

    every = 3
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        for name in CHANGING:
            setattr(self, name, self._troubled(getattr(self, name)))

    def _troubled(self, call: Any) -> Any:
        async def troubled(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            kind = self.calls // self.every % 3 if self.calls % self.every == 0 else -1
            if kind == 0:
                raise StoreUnavailable("nothing of it happened")
            if kind == 1:
                raise StoreUnknown("the request was lost")
            answers = await call(*arguments, **named)
            if kind == 2:
                raise StoreUnknown("the answer was lost")
            return answers

        return troubled


@pytest.mark.slow
@pytest.mark.parametrize("remember_ms", [0, 1_000_000_000])
@pytest.mark.parametrize("every", [2, 3, 7])
async def test_repeats_settle_what_was_unknown(every: int, remember_ms: int) -> None:
    async with Trial(Unsure) as trial:
        assert isinstance(trial.store, Unsure)
        trial.store.every = every
        topic = await trial.topic(buckets=4, max_deliveries=0, remember_ms=remember_ms)
        crowd = Crowd(trial, topic, [trial.store] * 3, seed=every)
        await crowd.run(30)
        await crowd.settle_all()
        await crowd.expect_kept(("put", "OK"), ("ack", "OK"), ("move", "OK"), ("cancel", "OK"))
        assert crowd.unknown > 20 and crowd.unavailable > 10


class Loses(MemoryStore):
    """Says that it has stored what it has not, once."""

    lost = False

    async def put(self, topic: Topic, now_ms: int, puts_: Puts) -> Answers:
        answers = await super().put(topic, now_ms, puts_)
        rows, new = self._rows[topic.uid], np.flatnonzero((answers.status == 0) & (answers.version == 1))
        if len(new) and not self.lost:
            self.lost = True
            rows.remove(np.array([rows.index.get(puts_.ids[int(new[0])])], dtype=np.intp), now_ms, False)
        return answers


@pytest.mark.slow
async def test_a_lost_message_is_seen() -> None:
    async with Trial(Loses) as trial:
        crowd = Crowd(trial, await trial.topic(buckets=4, max_deliveries=0), [trial.store] * 3)
        await crowd.run(30)
        await crowd.settle_all()
        with pytest.raises(StoreViolation, match="S8"):
            await crowd.expect_kept()


async def test_what_never_came_is_named() -> None:
    async with Trial(MemoryStore) as trial:
        crowd = Crowd(trial, await trial.topic(), [trial.store])
        with pytest.raises(StoreViolation, match=r"never answered.*'ack', 'OK'"):
            await crowd.expect_kept(("ack", "OK"))
