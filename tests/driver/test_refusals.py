"""What a refusal advises: it fits the call that was refused."""

from __future__ import annotations

import pickle

import pytest

import timeline
from tests.driver.broker import Broker
from timeline.errors import Exists, Fenced, Leased


async def test_a_producer_is_told_what_a_producer_can_do(broker: Broker, tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"", in_="1h", id="m")
        for call in (p.move("m", in_="2h", if_version=9), p.cancel("m", if_version=9)):
            with pytest.raises(Fenced, match="read again, decide again") as fenced:
                await call
            assert "delivery" not in str(fenced.value)
        (refused,) = await p.revive("m", in_=0)
        with pytest.raises(Exists, match="it is no dead letter"):
            refused.raise_failed()
        await p.move("m", in_=0)
        assert await c.take() is not None
        with pytest.raises(Leased, match=r"wait until it settles$"):
            await p.move("m", in_="2h")
        with pytest.raises(Leased, match="leased=True"):
            (await p.cancel_many(["m"])).raise_failed()
        with pytest.raises(Leased, match="leased=True") as leased:
            await p.cancel("m")
        again = pickle.loads(pickle.dumps(leased.value))
        assert (str(again), again.advice) == (str(leased.value), leased.value.advice)


async def test_one_who_finds_nothing_is_told_all_that_may_have_happened(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        with pytest.raises(
            timeline.NotFound, match="never produced, or it was acknowledged, cancelled, purged or expired"
        ):
            await p.cancel("absent")
