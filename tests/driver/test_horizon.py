"""The horizon of a topic: a due of exactly so far ahead is allowed, however it is asked for, and no later one."""

from __future__ import annotations

import pytest

import timeline

HORIZON = "3600000ms"
BEYOND = "3600001ms"


@pytest.mark.slow
async def test_exactly_the_horizon_is_allowed_and_more_is_not(tl: timeline.Timeline) -> None:
    await tl.create_topic("h", horizon=HORIZON)
    async with tl.producer("h") as p, tl.consumer("h") as c:
        with pytest.raises(timeline.Invalid, match="horizon"):
            await p.produce(b"", in_=BEYOND)
        assert (await p.produce(b"", in_=HORIZON, id="m", tag="g")).ok
        with pytest.raises(timeline.Invalid, match="horizon"):
            await p.move("m", in_=BEYOND)
        assert (await p.move("m", in_=HORIZON)).ok
        with pytest.raises(timeline.Invalid, match="horizon"):
            await p.move_tag("g", in_=BEYOND)
        assert (await p.move_tag("g", in_=HORIZON)).counts == {timeline.Status.OK: 1}
        await p.produce(b"", in_=0, id="now")
        d = await c.take()
        assert d is not None
        with pytest.raises(timeline.Invalid, match="horizon"):
            await d.release(in_=BEYOND)
        await d.release(in_=HORIZON)
