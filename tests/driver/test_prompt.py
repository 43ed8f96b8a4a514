"""What a person sees at Python's prompt: short values, and completion of what they may call."""

from __future__ import annotations

import timeline
from timeline.driver.consumer import OF_USERS


async def test_values_are_short(served: str) -> None:
    at_ms = 1_893_456_000_123
    async with timeline.connect(served) as tl:
        assert repr(tl) == f"Timeline({served})"
        assert repr(await tl.create_topic("prompt", remember="1d")) == "Topic('prompt', remember_ms=86400000)"
        p = tl.producer("prompt", group="ops")
        assert repr(p) == "Producer('prompt', group 'ops')"
        due = "due 2030-01-01 00:00:00.123Z"
        assert repr(await p.produce(b"x", at=at_ms, id="water", tag="a")) == f"Receipt('water', OK, {due})"
        assert repr(await p.produce(b"x", at=at_ms, id="water")) == f"Receipt('water', DUPLICATE, {due})"
        assert repr(await tl.get("prompt", "water")) == f"StoredMessage('water', waiting, {due}, tag 'a')"
        assert repr(await p.cancel_tag("a")) == "TagProgress(1 OK, finished)"
        (missing,) = await p.cancel_many(["water"])
        assert repr(missing).startswith("Receipt('water', NOT_FOUND, ") and missing.detail in repr(missing)
        (settled,) = await p.produce_many([timeline.Message(b"x", in_=0, id="water")])
        assert repr(settled) == "Receipt('water', DUPLICATE, settled)"


async def test_completion_of_a_consumer_offers_what_users_call(served: str) -> None:
    async with timeline.connect(served) as tl:
        c = tl.consumer("prompt", id="w1")
        assert repr(c) == "Consumer('prompt', id 'w1')"
        assert set(dir(c)) == {*OF_USERS, "id", "on_settle_error", "topic"}
        assert all(hasattr(c, name) for name in dir(c))


def test_the_synchronous_driver_is_named(served: str) -> None:
    with timeline.connect_sync(served) as tl:
        assert repr(tl) == f"SyncTimeline({served})"
        assert repr(tl.producer("prompt")) == "SyncProducer('prompt', group 'default')"
