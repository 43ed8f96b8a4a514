"""One bad item among many is refused alone, with a sentence; a refusal in the driver carries its message's id."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import timeline
from timeline.columns import Ragged
from timeline.model import MAX_PAYLOAD_BYTES, Status

LATER = 1_900_000_000_000
NAIVE = datetime(2030, 1, 1)

INVALID, NOT_FOUND, OK = Status.INVALID, Status.NOT_FOUND, Status.OK
IDS: tuple[tuple[Any, list[str]], ...] = (
    (["a", "", "b"], ["a", "", "b"]),
    (["a", "x" * 256, "b"], ["a", "x" * 256, "b"]),
    (["a", None, "b"], ["a", "None", "b"]),
    (["a", "\ud800", "b"], ["a", "?", "b"]),
    ([b"a", b"\xff", b"b"], ["a", "\ufffd", "b"]),
    (Ragged.of([b"a", b"", b"b"]), ["a", "", "b"]),
    (np.array(["a", 7, "b"], dtype=object), ["a", "7", "b"]),
    (pa.array(["a", None, "b"]), ["a", "", "b"]),
    (pa.chunked_array([["a"], [None, "b"]]), ["a", "", "b"]),
    ((one for one in ("a", "n\0", "b")), ["a", "n\0", "b"]),
)


@pytest.mark.parametrize(("ids", "shown"), IDS)
async def test_a_bad_id_among_many(tl: timeline.Timeline, ids: Any, shown: list[str]) -> None:
    p = tl.producer("t")
    given = list(ids) if not hasattr(ids, "__len__") else ids
    for id in ("a", "b"):
        await p.produce(b"", at=LATER, id=id)
    for status, receipts in (
        (OK, await p.move_many(given, at=LATER + 1)),
        (Status.EXISTS, await p.revive(given, in_=0)),
        (Status.EXISTS, await p.purge(given)),
        (OK, await p.cancel_many(given)),
    ):
        assert [receipt.status for receipt in receipts] == [status, INVALID, status]
        assert [receipt.id for receipt in receipts] == shown
        assert receipts[1].detail.startswith("ids[1]")
        with pytest.raises(timeline.Invalid) as refused:
            receipts[1].raise_failed()
        assert refused.value.id == shown[1]


async def test_a_bad_time_among_many(tl: timeline.Timeline) -> None:
    p = tl.producer("t")
    for at in ([LATER, 5, NAIVE, LATER], np.array([LATER, 5, 2**62, LATER]), pa.array([LATER, 5, None, LATER])):
        receipts = await p.move_many(["a", "b", "c", ""], at=at)
        assert [receipt.status for receipt in receipts] == [NOT_FOUND, INVALID, INVALID, INVALID]
    for in_ in (["1h", "soon", -1, "1h"], np.array([1.0, -1.0, np.nan, 2.0])):
        receipts = await p.move_many(["a", "b", "c", "d"], in_=in_)
        assert [receipt.status for receipt in receipts] == [NOT_FOUND, INVALID, INVALID, NOT_FOUND]


BATCHES: dict[str, Callable[[], Any]] = {
    "payload": lambda: timeline.Batch([b"", "text", b""], at=LATER, ids=["a", "b", "c"]),
    "null payload": lambda: timeline.Batch(pa.array([b"", None, b""]), at=LATER, ids=["a", "b", "c"]),
    "id": lambda: timeline.Batch([b""] * 3, at=LATER, ids=["a", "", "c"]),
    "bytes of an id": lambda: timeline.Batch([b""] * 3, at=LATER, ids=[b"a", b"\xff", b"c"]),
    "tag": lambda: timeline.Batch([b""] * 3, at=LATER, ids=["a", "b", "c"], tags=["", "x" * 65, ""]),
    "tags as a column": lambda: timeline.Batch([b""] * 3, at=LATER, ids=["a", "b", "c"], tags=pa.array(["", "\0", ""])),
    "headers": lambda: timeline.Batch([b""] * 3, at=LATER, ids=["a", "b", "c"], headers=[None, {"k": 5}, None]),  # type: ignore[dict-item]
    "at": lambda: timeline.Batch([b""] * 3, at=[LATER, NAIVE, LATER], ids=["a", "b", "c"]),
    "in_": lambda: timeline.Batch([b""] * 3, in_=["1h", "x", "1h"], ids=["a", "b", "c"]),
    "expires": lambda: timeline.Batch([b""] * 3, in_="1h", ids=["a", "b", "c"], expires=[None, 5, "2h"]),
    "message": lambda: [timeline.Message(b"", LATER, id="a"), "b", timeline.Message(b"", LATER, id="c")],
}


@pytest.mark.parametrize("what", BATCHES)
async def test_a_bad_message_among_many(tl: timeline.Timeline, what: str) -> None:
    receipts = await tl.producer("t").produce_many(BATCHES[what]())
    assert [receipt.status for receipt in receipts] == [OK, INVALID, OK]
    assert receipts.failed[0].detail and (receipts[0].id, receipts[2].id) == ("a", "c")
    assert {m.id async for m in tl.scan("t")} == {"a", "c"}
    with pytest.raises(timeline.Invalid):
        receipts.raise_failed()


async def test_a_payload_beyond_every_topic(tl: timeline.Timeline) -> None:
    batch = timeline.Batch([b"", b"x" * (MAX_PAYLOAD_BYTES + 1), "no", b""], at=LATER)
    receipts = await tl.producer("t").produce_many(batch)
    assert [receipt.status for receipt in receipts] == [OK, Status.TOO_LARGE, INVALID, OK]
    # Those that were sent have ids, and sent again they are the same messages.
    again = await tl.producer("t").produce_many(batch)
    assert again.counts == {Status.DUPLICATE: 2, Status.TOO_LARGE: 1, INVALID: 1}
    assert len({receipt.id for receipt in receipts}) == 4


@pytest.mark.slow
async def test_many_across_frames(tl: timeline.Timeline) -> None:
    """Answers come back to where the messages stood."""
    ids: list[Any] = [f"m{n:05}" for n in range(25_000)]
    for place in range(0, 25_000, 7):
        ids[place] = ""
    receipts = await tl.producer("t").produce_many(timeline.Batch([b""] * 25_000, at=LATER, ids=ids))
    assert [receipt.ok for receipt in receipts] == [place % 7 != 0 for place in range(25_000)]
    gone = await tl.producer("t").cancel_many([*ids, "nobody"])
    assert gone.status_codes[:-1].tolist() == receipts.status_codes.tolist() and gone[-1].status is NOT_FOUND


async def test_bad_items_alone_need_no_broker_and_hide_none() -> None:
    async with timeline.connect("127.0.0.1:1", timeout="100ms") as tl:
        p = tl.producer("t")
        assert (await p.cancel_many(["", 5])).counts == {INVALID: 2}  # type: ignore[list-item]
        assert (await p.produce_many([b"bytes"])).counts == {INVALID: 1}  # type: ignore[list-item]
        with pytest.raises(timeline.Unavailable):
            await p.cancel_many(["", "a"])


async def test_a_mistake_that_concerns_all_still_raises(tl: timeline.Timeline) -> None:
    p = tl.producer("t")
    for call in (
        p.cancel_many("ab"),
        p.cancel_many(5),  # type: ignore[arg-type]
        p.move_many(["a", "b"], at=NAIVE),
        p.move_many(["a", "b"], at=[LATER]),
        p.move_many(["a", "b"], at=np.array([1.5, 2.5])),
        p.move_many(["a", "b"]),
        p.produce_many(5),  # type: ignore[arg-type]
    ):
        with pytest.raises(timeline.Invalid):
            await call


def test_without_await(served: str) -> None:
    with timeline.connect_sync(served) as tl:
        tl.create_topic("t")
        p = tl.producer("t")
        for what, batch in BATCHES.items():
            assert INVALID in p.produce_many(batch()).counts, what
        assert [receipt.status for receipt in p.cancel_many(["a", "", "x"])] == [OK, INVALID, NOT_FOUND]
        assert p.move_many(["c", ""], at=LATER).counts == {OK: 1, INVALID: 1}
        assert p.revive(["c", ""], in_=0).counts == {Status.EXISTS: 1, INVALID: 1}
        assert p.purge(["c", ""]).counts == {Status.EXISTS: 1, INVALID: 1}
        with pytest.raises(timeline.Invalid) as refused:
            p.cancel("c", if_version=0)
        assert refused.value.id == "c"


async def test_a_refusal_in_the_driver_carries_the_id(tl: timeline.Timeline) -> None:
    p = tl.producer("t")
    for call, id in (
        (p.produce("text", in_=0, id="m"), "m"),  # type: ignore[arg-type]
        (p.produce(b"", id="m"), "m"),
        (p.produce(b"", at=NAIVE, id="m"), "m"),
        (p.produce(b"", in_=0, id="m", tag="x" * 65), "m"),
        (p.produce(b"", in_=0, id="m", if_exists="perhaps"), "m"),
        (p.produce(b"", in_=0, id="m", timeout="0s"), "m"),
        (p.produce(b"", in_=0, id=""), ""),
        (p.produce(b"", in_=0, id="\ud800"), "\ud800"),
        (p.move("m", at=NAIVE), "m"),
        (p.move("m", in_=0, if_version=0), "m"),
        (p.cancel("m", if_version=-1), "m"),
        (p.cancel("m", timeout=0), "m"),
        (p.cancel("x" * 256), "x" * 256),
        (tl.get("t", ""), ""),
    ):
        with pytest.raises(timeline.Invalid) as refused:
            await call
        assert refused.value.id == id
    with pytest.raises(timeline.TooLarge) as large:
        timeline.Message(bytes(MAX_PAYLOAD_BYTES + 1), in_=0, id="m")
    assert large.value.id == "m" and "no setting raises this limit" in large.value.advice
    await p.produce(b"", in_=0, id="due")
    async with tl.consumer("t") as c:
        d = await c.take()
        assert d is not None
        for settle in (d.extend("soon"), d.release(in_=-1), d.release(in_=0, reason=5), d.bury(5)):  # type: ignore[arg-type]
            with pytest.raises(timeline.Invalid) as refused:
                await settle
            assert refused.value.id == "due"
        await d.ack()


@pytest.mark.parametrize("kind", [bytes, str])
def test_a_list_of_ids_may_change_once_it_is_given(kind: type) -> None:
    """It is sent later, and perhaps twice."""
    ids = ["a", "b"] if kind is str else [b"a", b"b"]
    batch = timeline.Batch([b"", b""], in_=0, ids=ids)
    ids[:] = ["c"] if kind is str else [b"c"]
    assert batch.ids is not None and batch.ids.take(np.array([0, 1])).tolist() == [b"a", b"b"]
