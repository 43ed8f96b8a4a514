"""Calls that are repeated under an operation id of the caller's own, as after a crash, change nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import timeline
from timeline import Status


async def version_of(tl: timeline.Timeline, id: str) -> int:
    message = await tl.get("t", id)
    assert message is not None
    return message.version


async def test_a_put_is_made_once(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        first, again = [await p.produce(b"x", id="a", in_="1h", birth=7) for _ in range(2)]
        assert first == again and first.status is Status.OK
        assert (await p.produce(b"x", id="a", in_="1h", birth=8)).status is Status.DUPLICATE
        assert await version_of(tl, "a") == 1
        with pytest.raises(timeline.Exists):
            await p.produce(b"y", id="a", in_="1h", birth=8)


async def test_another_payload_under_an_id_and_its_birth_is_dropped(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        first = await p.produce(b"x", id="a", in_="1h", birth=7)
        assert await p.produce(b"y", id="a", in_="1h", birth=7) == first
        message = await tl.get("t", "a")
        assert message is not None and message.payload == b"x"


async def test_a_birth_needs_an_id(tl: timeline.Timeline) -> None:
    """Without one each call makes another id, and so stores another message."""
    named, unnamed = timeline.Message(b"x", in_="1h", id="a"), timeline.Message(b"x", in_="1h")
    async with tl.producer("t") as p:
        with pytest.raises(timeline.Invalid, match="birth= needs id="):
            await p.produce(b"x", in_="1h", birth=7)
        for batch in (timeline.Batch([b"x"] * 2, in_="1h"), timeline.Batch.of([named, unnamed])):
            batch.births = [7, 8]
            with pytest.raises(timeline.Invalid, match="births need ids"):
                await p.produce_many(batch)
        assert [message async for message in tl.scan("t")] == []


def test_a_birth_needs_an_id_in_the_blocking_driver(served: str) -> None:
    with timeline.connect_sync(served) as tl:
        tl.create_topic("t")
        with tl.producer("t") as p:
            with pytest.raises(timeline.Invalid, match="birth= needs id="):
                p.produce(b"x", in_="1h", birth=7)
            assert p.produce(b"x", id="a", in_="1h", birth=7) == p.produce(b"x", id="a", in_="1h", birth=7)


async def test_a_move_is_made_once(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce(b"x", id="a", in_="1h")
        first = await p.move("a", in_="2h", if_version=1, operation_id=7)
        assert await p.move("a", in_="2h", if_version=1, operation_id=7) == first
        assert await version_of(tl, "a") == 2
        assert (await p.move("a", in_="2h", operation_id=8)).version == 3


def test_a_move_is_made_once_by_another_client(served: str) -> None:
    told = []
    for number in range(2):
        with timeline.connect_sync(served) as tl:
            if number == 0:
                tl.create_topic("t")
            with tl.producer("t") as p:
                if number == 0:
                    p.produce(b"x", id="a", in_="1h")
                told.append(p.move("a", in_="2h", operation_id=2**64 - 1))
    assert told[0] == told[1] and told[0].version == 2


async def test_a_cancel_is_known_while_its_topic_remembers(tl: timeline.Timeline) -> None:
    await tl.update_topic("t", remember="1h")
    async with tl.producer("t") as p:
        await p.produce(b"x", id="a", in_="1h")
        for _ in range(2):
            assert (await p.cancel("a", operation_id=7)).status is Status.OK
        with pytest.raises(timeline.NotFound):
            await p.cancel("a", operation_id=8)


async def test_a_tag_is_shifted_once(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        for id in "abc":
            await p.produce(b"x", id=id, in_="1h", tag="red")
        for _ in range(2):
            told = await p.move_tag("red", by="30m", operation_id=7)
            assert told.counts == {Status.OK: 3}
        assert [await version_of(tl, id) for id in "abc"] == [2, 2, 2]
        dry = await p.cancel_tag("red", dry_run=True, operation_id=9)
        assert dry.changed == 3


async def test_releases_and_revivals_are_made_once(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce_many(timeline.Batch([b"x", b"y"], ids=["a", "b"], in_=0))
        taken: list[Any] = []
        while len(taken) < 2:
            taken += await tl.take("t")
        receipts = [d.receipt for d in taken]
        for _ in range(2):
            told = await tl.settle(receipts, "release", in_=0, operation_ids=[7, 8])
            assert told.counts == {Status.OK: 2}
        taken = []
        while len(taken) < 2:
            taken += await tl.take("t")
        await tl.settle([d.receipt for d in taken], "bury", reason="bad")
        for _ in range(2):
            assert (await p.revive(["a", "b"], in_="1h", operation_ids=[9, 10])).counts == {Status.OK: 2}
        assert {await version_of(tl, id) for id in "ab"} == {5}


@pytest.mark.parametrize("wrong", [0, -1, 2**64, pytest.param(10**5_000, id="huge"), 1.5, "7", True])
async def test_an_id_that_cannot_be_is_refused(tl: timeline.Timeline, wrong: Any) -> None:
    async with tl.producer("t") as p:
        with pytest.raises(timeline.Invalid, match="birth must be an int of 64 bits"):
            await p.produce(b"x", id="a", in_="2h", birth=wrong)
        with pytest.raises(timeline.Invalid, match="births must be 1 ints of 64 bits"):
            timeline.Batch([b"x"], ids=["a"], in_="2h").births = [wrong]
        with pytest.raises(timeline.Invalid, match="operation_id must be an int of 64 bits"):
            await p.move("a", in_="2h", operation_id=wrong)
        with pytest.raises(timeline.Invalid, match="operation_id must be an int of 64 bits"):
            await p.move_tag("red", in_="2h", operation_id=wrong)
        with pytest.raises(timeline.Invalid, match="operation_ids must be 1 ints of 64 bits"):
            await p.revive(["a"], in_="2h", operation_ids=[wrong])


HUGE: Any = 10**5_000
"""Python does not write it: it has more digits than it may."""


async def test_a_number_too_long_to_show_is_refused_like_any_other(tl: timeline.Timeline) -> None:
    async def handler(_: timeline.Delivery) -> None: ...

    async with tl.producer("t") as p, tl.consumer("t") as c:
        calls: list[Callable[[], Any]] = [
            lambda: p.produce(HUGE, in_="1h"),
            lambda: p.produce(b"x", in_="1h", id=HUGE),
            lambda: p.produce(b"x", in_="1h", tag=HUGE),
            lambda: p.produce(b"x", in_="1h", expires=HUGE),
            lambda: p.produce(b"x", in_="1h", if_exists=HUGE),
            lambda: p.produce(b"x", in_=HUGE),
            lambda: p.produce(b"x", at=HUGE),
            lambda: p.produce_many(timeline.Batch([b"x"], in_="1h", ids=HUGE)),
            lambda: p.produce_many(timeline.Batch([b"x"], in_="1h", headers=HUGE)),
            lambda: p.move("a", in_="1h", if_version=HUGE),
            lambda: p.cancel_tag("red", dry_run=HUGE),
            lambda: p.move_tag("red", by="1h", resume=HUGE),
            lambda: c.run(HUGE),
            lambda: c.run(handler, concurrency=HUGE),
            lambda: c.run(handler, backoff=HUGE),
            lambda: tl.take("t", max=HUGE),
            lambda: tl.settle([], HUGE),
            lambda: tl.update_topic("t", paused=HUGE),
            lambda: tl.update_topic("t", max_deliveries=HUGE),
            lambda: tl.update_topic("t", redelivery_factor=HUGE),
            lambda: tl.scan("t", state=HUGE).__anext__(),
            lambda: tl.scan("t", payload=HUGE).__anext__(),
            lambda: tl.scan_pages("t", buckets=(HUGE, HUGE)).__anext__(),
        ]
        for call in calls:
            with pytest.raises(timeline.Invalid):
                await call()
    for name in ("credit", "credit_bytes"):
        with pytest.raises(timeline.Invalid, match=f"{name} must be .* not a number of 16610 bits"):
            tl.consumer("t", **{name: HUGE})
    with pytest.raises(timeline.Invalid):
        timeline.connect(HUGE)
