"""Moves and cancels by tag that break off: what their errors tell, and how they go on, each message changed once."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import traceback
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import timeline
from tests.driver.broker import Broker
from timeline.driver.batch import Batch
from timeline.driver.blocking.client import SyncTimeline
from timeline.driver.client import Timeline
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.model import Status
from timeline.wire import Fault, MutateTag, TransportError, decode

COUNT, CHUNK = 95, 10
START_MS = 1_900_000_000_000
BACK_MS = START_MS - 1_700_000_000_000
HOUR_MS = 3_600_000


class _Wire(GrpcTransport):
    """To a real broker. `loses`: of which chunks that change something, counted from 1, the answer is lost; from
    `dead_from` on nothing is answered any more."""

    changes = 0
    loses: ClassVar[set[int]] = set()
    dead_from = 0

    async def unary(self, method: str, frame: bytes, timeout_s: float) -> bytes:
        answer = await super().unary(method, frame, timeout_s)
        asked = decode(frame)
        if isinstance(asked, MutateTag) and not asked.dry_run:
            _Wire.changes += 1
            if _Wire.changes in _Wire.loses or (_Wire.dead_from and _Wire.changes >= _Wire.dead_from):
                raise TransportError(Fault.BROKEN, "the answer was lost")
        return answer


@pytest.fixture
async def walked(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[timeline.Producer]:
    """A producer of 95 messages of a tag, ten of which are met by a chunk, on a wire that can lose answers."""
    monkeypatch.setattr("timeline.broker.api.mutate.MAX_TAG_CHUNK", CHUNK)
    monkeypatch.setattr(_Wire, "changes", 0)
    monkeypatch.setattr(_Wire, "loses", set())
    monkeypatch.setattr(_Wire, "dead_from", 0)
    async with Timeline(broker.address, "300ms", transport_factory=_Wire) as tl:
        await tl.create_topic("t")
        p = tl.producer("t")
        ids = [f"m{n:03}" for n in range(COUNT)]
        (await p.produce_many(Batch([b""] * COUNT, at=START_MS, ids=ids, tags="spring"), timeout="10s")).raise_failed()
        yield p


async def dues(producer: timeline.Producer) -> list[int]:
    """When the messages are due."""
    async with timeline.connect(producer._context.channel.addresses[0]) as tl:
        return sorted([m.due_ms async for m in tl.scan("t", tag="spring")])


@pytest.mark.slow
async def test_an_error_carries_its_progress_and_the_call_goes_on(walked: timeline.Producer) -> None:
    _Wire.dead_from = 4
    with pytest.raises(timeline.Unknown, match="broke off after 30 messages") as broke:
        await walked.move_tag("spring", by="1h")
    told = broke.value.progress
    assert (told.done, told.changed, told.finished) == (30, 30, False) and told.counts == {Status.OK: 30}
    assert "resume=error.progress" in broke.value.advice
    again = pickle.loads(pickle.dumps(broke.value))
    assert again.progress == told and str(again) == str(broke.value)
    _Wire.dead_from = 0
    # By its token, as another process would; by the object; and once more when all is done.
    done = await walked.move_tag("spring", by="1h", resume=told.resume, timeout="10s")
    again = await walked.move_tag("spring", by="1h", resume=told, timeout="10s")
    over = await walked.move_tag("spring", by="1h", resume=done.resume, timeout="10s")
    assert done.counts == again.counts == over.counts == {Status.OK: COUNT} and done.finished
    assert told.done == 30, "what was given is not changed"
    assert await dues(walked) == [START_MS + HOUR_MS] * COUNT


@pytest.mark.slow
async def test_an_error_that_nobody_catches_shows_its_token(walked: timeline.Producer) -> None:
    """The program ends with a traceback. What it shows continues the call; the same call again would shift twice."""
    for dead_from, done in ((4, 30), (1, 0)):
        _Wire.dead_from = dead_from
        with pytest.raises(timeline.Unknown) as broke:
            await walked.move_tag("spring", by="1h")
        assert broke.value.progress.done == done
        shown = traceback.format_exception(broke.value)[-1]
        token = shown.partition("repeat the same call with resume='")[2].partition("'")[0]
        _Wire.dead_from = 0
        before = await dues(walked)
        told = await walked.move_tag("spring", by="1h", resume=token, timeout="10s")
        assert told.counts == {Status.OK: COUNT} and await dues(walked) == [before[0] + HOUR_MS] * COUNT, "not twice"
        assert shown.endswith(". Without it, messages may be changed twice\n")


async def test_the_token_of_the_start_is_as_good(walked: timeline.Producer) -> None:
    """Interrupted before any answer: the walk begins again, and shifts nothing twice; nor what was put since."""
    tokens: list[str] = []
    await walked.move_tag("spring", by="1h", progress=lambda told: tokens.append(told.resume))
    await walked.produce(b"", at=START_MS, id="later", tag="spring")
    again = await walked.move_tag("spring", by="1h", resume=tokens[0])
    assert again.counts == {Status.OK: COUNT} and len(tokens) == 11
    assert await dues(walked) == [START_MS, *[START_MS + HOUR_MS] * COUNT]


@pytest.mark.slow
async def test_a_relative_due_stays_what_it_was(walked: timeline.Producer) -> None:
    _Wire.dead_from = 3
    with pytest.raises(timeline.Unknown) as broke:
        await walked.move_tag("spring", in_="1h")
    _Wire.dead_from = 0
    await walked.move_tag("spring", in_="1h", resume=broke.value.progress.resume, timeout="10s")
    assert await dues(walked) == [broke.value.progress.at_ms] * COUNT


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by itself", "resumed"])
async def test_what_a_lost_answer_cancelled_is_unknown(walked: timeline.Producer, how: str) -> None:
    seen: list[timeline.TagProgress] = []
    if how == "by itself":
        _Wire.loses = {3}
        told = await walked.cancel_tag("spring", progress=seen.append)
        assert (seen[0].done, seen[0].total) == (0, 10) and seen[9].total == COUNT, "counted before anything is changed"
    else:
        _Wire.dead_from = 3
        with pytest.raises(timeline.Unknown) as broke:
            await walked.cancel_tag("spring")
        assert broke.value.progress.counts == {Status.OK: 20}
        _Wire.dead_from = 0
        told = await walked.cancel_tag("spring", resume=broke.value.progress.resume, timeout="10s")
        again = await walked.cancel_tag("spring", resume=broke.value.progress.resume, timeout="10s")
        assert again.counts == {Status.OK: 20, Status.UNKNOWN: COUNT - 20}
    lost = told.counts[Status.UNKNOWN]
    assert lost >= CHUNK and lost % CHUNK == 0 and told.counts == {Status.OK: COUNT - lost, Status.UNKNOWN: lost}
    assert (told.done, told.changed, told.finished) == (COUNT, COUNT - lost, True)
    assert await dues(walked) == []


async def test_nothing_is_unknown_where_no_answer_was_lost(walked: timeline.Producer) -> None:
    """What others cancel or take meanwhile is not met."""
    others = walked

    def meanwhile(told: timeline.TagProgress) -> None:
        if told.done == 50:
            tasks.append(asyncio.ensure_future(others.cancel_many([f"m{n:03}" for n in range(COUNT)], timeout="10s")))

    tasks: list[asyncio.Future[Any]] = []
    told = await others.cancel_tag("spring", progress=meanwhile)
    await asyncio.gather(*tasks)
    assert Status.UNKNOWN not in told.counts and told.finished


async def test_a_token_of_another_call_is_refused(walked: timeline.Producer) -> None:
    seen: list[timeline.TagProgress] = []
    await walked.move_tag("spring", by="1h", progress=seen.append)
    token = seen[3].resume
    other = walked._context
    for call, differs in (
        (walked.move_tag("spring", by="2h", resume=token), "by was 3600000 there, and is 7200000 here"),
        (walked.move_tag("spring", in_="2h", resume=token), "in_ was"),
        (walked.move_tag("summer", by="1h", resume=seen[3]), "tag was 'spring' there, and is 'summer' here"),
        (walked.cancel_tag("spring", resume=token), "the operation was 'move' there, and is 'cancel' here"),
        (walked.move_tag("spring", by="1h", dry_run=True, resume=token), "dry_run was False"),
        (timeline.Producer(other, "u", "default").move_tag("spring", by="1h", resume=token), "topic was 't'"),
        (timeline.Producer(other, "t", "ops").move_tag("spring", by="1h", resume=token), "group was 'default'"),
        (walked.move_tag("spring", by="1h", resume=timeline.TagProgress()), "belongs to another call"),
    ):
        with pytest.raises(timeline.Invalid, match=differs):
            await call
    for bad in (token[:-9], token[:40] + "A" + token[41:], "", "é", "eJwDAAAAAAE", "M" + token):
        with pytest.raises(timeline.Invalid, match="no resume token"):
            await walked.move_tag("spring", by="1h", resume=bad)
    with pytest.raises(timeline.Invalid, match="resume= takes a TagProgress or its token"):
        await walked.move_tag("spring", by="1h", resume=5)  # type: ignore[arg-type]


def packed(text: bytes) -> str:
    """`text` in the form of a resume token."""
    return base64.urlsafe_b64encode(zlib.compress(text, 9)).decode().rstrip("=")


FORGED = {
    "asked": [],
    "counts": {"OK": -1},
    "finished": "no",
    "op": 2**64,
    "cursor": 5,
    "started_ms": -1,
    "at_ms": 1.5,
    "total": None,
}


async def test_a_forged_token_is_refused(walked: timeline.Producer) -> None:
    seen: list[timeline.TagProgress] = []
    await walked.move_tag("spring", by="1h", progress=seen.append)
    token = seen[3].resume
    good = json.loads(zlib.decompress(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))))
    forged = [packed(json.dumps({**good, name: value}).encode()) for name, value in FORGED.items()]
    forged += [packed(json.dumps({**good, "counts": {"OK": "5"}}).encode()), packed(b"[" * 60_000)]
    for bad in forged:
        with pytest.raises(timeline.Invalid, match="no resume token"):
            await walked.move_tag("spring", by="1h", resume=bad)


@pytest.mark.slow
async def test_a_token_that_unpacks_to_very_much_is_refused_at_once(walked: timeline.Producer) -> None:
    for bad in (packed(b" " * 64_000_000), "A" * 10_000_000):
        tracemalloc.start()
        try:
            with pytest.raises(timeline.Invalid, match="no resume token"):
                await walked.move_tag("spring", by="1h", resume=bad)
            assert tracemalloc.get_traced_memory()[1] < 32_000_000
        finally:
            tracemalloc.stop()


async def test_a_topic_made_anew_is_another(walked: timeline.Producer) -> None:
    seen: list[timeline.TagProgress] = []
    await walked.move_tag("spring", by="1h", progress=seen.append)
    async with timeline.connect(walked._context.channel.addresses[0]) as tl:
        await tl.drop_topic("t")
        await tl.create_topic("t")
        await tl.producer("t").produce(b"", at=START_MS, id="m001", tag="spring")
        with pytest.raises(timeline.Invalid, match="dropped and created again") as refused:
            await tl.producer("t").move_tag("spring", by="1h", resume=seen[3])
        assert refused.value.progress.done == 30
        start = await tl.producer("t").move_tag("spring", by="1h", resume=seen[0])
        assert start.done == 0, "nothing of it was there at the start"
    assert await dues(walked) == [START_MS]


@pytest.mark.slow
async def test_another_broker_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same store, at another address."""
    monkeypatch.setattr("timeline.broker.api.mutate.MAX_TAG_CHUNK", CHUNK)
    store, seen = f"sqlite:///{tmp_path}/s.db", list[timeline.TagProgress]()
    async with Broker(store) as first, timeline.connect(first.address, timeout="10s") as tl:
        await tl.create_topic("t")
        p = tl.producer("t")
        await p.produce_many(Batch([b""] * COUNT, at=START_MS, tags="spring"))
        await p.move_tag("spring", by="1h", progress=seen.append)
    async with Broker(store, "b2") as second, timeline.connect(second.address, timeout="10s") as tl:
        p = tl.producer("t")
        assert (await p.move_tag("spring", by="1h", resume=seen[4].resume)).counts == {Status.OK: COUNT}
        assert await dues(p) == [START_MS + HOUR_MS] * COUNT


@pytest.mark.slow
def test_without_await(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeline.broker.api.mutate.MAX_TAG_CHUNK", CHUNK)
    monkeypatch.setattr(_Wire, "changes", 0)
    monkeypatch.setattr(_Wire, "dead_from", 3)
    with SyncTimeline(served, "300ms", transport_factory=_Wire) as tl:
        tl.create_topic("t")
        p = tl.producer("t")
        p.produce_many(Batch([b""] * COUNT, at=START_MS, tags="spring"), timeout="10s").raise_failed()
        with pytest.raises(timeline.Unknown) as broke:
            p.move_tag("spring", by="1h")
        assert broke.value.progress.changed == 20
        _Wire.dead_from = 0
        done = p.move_tag("spring", by="1h", resume=broke.value.progress.resume, timeout="10s")
        assert done.counts == {Status.OK: COUNT}
        assert {m.due_ms for m in tl.scan("t")} == {START_MS + HOUR_MS}


@pytest.mark.slow
async def test_nothing_happened_where_no_broker_is(broker: Broker, walked: timeline.Producer) -> None:
    await broker.stop()
    for call in (walked.move_tag("spring", by="1h"), walked.cancel_tag("spring")):
        with pytest.raises(timeline.Unavailable) as refused:
            await call
        assert refused.value.progress.done == 0 and refused.value.advice == timeline.Unavailable.advice
        assert "resume" not in str(refused.value)


@pytest.mark.slow
async def test_what_is_asked_for_meanwhile_stays(walked: timeline.Producer) -> None:
    """A chunk's answer is lost; before it goes on, a consumer releases one of its messages, and another is moved."""
    _Wire.dead_from = 1
    with pytest.raises(timeline.Unknown) as broke:
        await walked.move_tag("spring", by=f"-{BACK_MS}ms")  # they are due at once
    assert broke.value.progress.done == 0
    _Wire.dead_from = 0
    async with timeline.connect(walked._context.channel.addresses[0]) as tl:
        shifted = [m.id async for m in tl.scan("t", state="available")]
        assert len(shifted) == CHUNK
        async with tl.consumer("t", credit=1) as c:
            d = await c.take()
            assert d is not None
            await d.release(at=START_MS + 5)
        await tl.producer("t").move(next(id for id in shifted if id != d.id), at=START_MS + 7, timeout="10s")
        await walked.move_tag("spring", by=f"-{BACK_MS}ms", resume=broke.value.progress.resume, timeout="10s")
    left = [due_ms for due_ms in await dues(walked) if due_ms >= START_MS]
    assert left == [START_MS + 5, START_MS + 7]


async def test_a_shift_to_before_1970_is_refused(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p:
        await p.produce(b"", in_="1h", id="a", tag="spring")
        for dry_run in (False, True):
            with pytest.raises(timeline.Invalid, match="shorter than the time since 1970"):
                await p.move_tag("spring", by="-36000d", dry_run=dry_run)
        assert (await tl.get("t", "a")).version == 1  # type: ignore[union-attr]
        await p.move_tag("spring", by="-2h")
        assert (await tl.get("t", "a")).state == "available"  # type: ignore[union-attr]
