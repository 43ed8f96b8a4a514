"""`tl.why` and `tl.late`: what `timeline why` and `timeline late` say, as values."""

from __future__ import annotations

from datetime import UTC, timedelta

import pytest

import timeline
from tests.driver.broker import Broker
from timeline import Cause, State, wire
from timeline.driver.late import ADVICE, HAPPENED, KEEPS, NEVER_LATE, RETRIED

LONG_AGO_MS = 1_700_000_000_000


def test_a_users_causes_are_those_of_the_wire() -> None:
    assert [cause.name for cause in Cause] == [cause.name for cause in wire.LateCause] == list(Cause)
    assert HAPPENED.keys() == ADVICE.keys() == KEEPS.keys() == set(Cause)


async def test_why_says_what_keeps_a_message_then_how_late_it_was(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        await p.produce(b"", at=LONG_AGO_MS, id="a")
        why = await tl.why("t", "a")
        assert why.kept is not None and why.message is not None and why.late == () and why.unreachable == ()
        assert why.message.state is State.AVAILABLE and why.cause is why.kept.cause
        assert (why.kept.due_ms, why.kept.consumer) == (LONG_AGO_MS, "")
        assert f"and no consumer has it: {KEEPS[why.kept.cause]}" in str(why) and f"→ {why.kept.advice}" in str(why)
        assert repr(why) == f"Why('a', available, {why.cause})"

        (d,) = await c.take(max=1)
        await d.ack()
        why = await tl.why("t", "a")
        (late,) = why.late
        assert (why.kept, why.message, why.cause) == (None, None, Cause.PRODUCED_LATE)
        assert (late.topic, late.id, late.consumer, late.cause) == ("t", "a", "w1", "PRODUCED_LATE")
        assert late.due == d.scheduled and late.due.tzinfo is UTC and late.delivered > late.due
        assert late.lateness == timedelta(milliseconds=late.delivered_ms - late.due_ms)
        assert (late.why, late.advice) == (HAPPENED[late.cause], ADVICE[late.cause])
        assert repr(late).startswith("LateDelivery('a', PRODUCED_LATE, ") and len(repr(late)) < 80
        assert "delivered to w1, " in why.lines(UTC)[0] and "now  no longer on t: " in str(why)

        report = await tl.late(since="1h", topic="t")
        assert report.deliveries == (late,) and report.causes == {Cause.PRODUCED_LATE: 1}
        assert repr(report) == "LateReport(1 late, PRODUCED_LATE 1)"


async def test_why_names_the_take_where_no_take_waits(tl: timeline.Timeline) -> None:
    p = tl.producer("t")
    await p.produce(b"", in_=0)
    assert len(await tl.take("t", max=1)) == 1
    await p.produce(b"", in_=0, id="b")
    while (why := await tl.why("t", "b")).cause is not Cause.NO_CREDIT:
        pass  # the dealer may be about to see that
    assert "no consumer has it: no take waits, and every consumer is full" in str(why)
    assert "→ where take is used, call again sooner" in str(why)


async def test_why_of_what_is_not_late_tells_how_it_stands(tl: timeline.Timeline) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
        await p.produce(b"", in_="2h", id="later")
        why = await tl.why("t", "later")
        assert (why.cause, why.kept, why.late) == (None, None, ()) and repr(why) == "Why('later', waiting)"
        waiting, never = why.lines(UTC)
        assert never == "no late delivery of this message is recorded" and waiting.startswith(
            "now  waiting: due in 2h 0m, at 20"
        )
        await p.produce(b"", in_=0, id="d")
        (d,) = await c.take(max=1)
        leased, never = (await tl.why("t", "d")).lines(UTC)
        assert never == NEVER_LATE and leased.startswith("now  w1 has it until ")
        await d.release(in_="1h")
        waiting, told, never = (await tl.why("t", "d")).lines(UTC)
        assert never == NEVER_LATE + RETRIED
        assert waiting.startswith("now  waiting, after 1 delivery: due in ")
        assert told == "     the reason of a release is in the log of its consumer or gateway"
        await tl.producer("t").move("d", in_=0)
        (d,) = await c.take(max=1)
        await d.bury("no\x1b[2Jsuch recipient")
        assert r"(no\x1b[2Jsuch recipient): 'timeline dead revive t d'" in str(await tl.why("t", "d"))
        assert (await tl.why("t", "d")).lines(UTC)[-1] == NEVER_LATE + RETRIED
        await p.produce(b"", in_=0, id="at once")
        (d,) = await c.take(max=1)
        await d.bury("no such recipient")
        assert (await tl.why("t", "at once")).lines(UTC)[-1] == NEVER_LATE


async def test_why_of_nothing_is_not_found(tl: timeline.Timeline) -> None:
    with pytest.raises(timeline.NotFound, match="no message 'x' is on t, and no late delivery") as absent:
        await tl.why("t", "x")
    assert absent.value.id == "x"
    with pytest.raises(timeline.NotFound):
        await tl.why("nowhere", "x")


async def test_brokers_that_do_not_answer_are_named(broker: Broker, tl: timeline.Timeline) -> None:
    await tl.producer("t").produce(b"", at=LONG_AGO_MS, id="a")
    async with timeline.connect(f"{broker.address},127.0.0.1:1", timeout="5s") as both:
        assert (await both.why("t", "a")).unreachable == ("127.0.0.1:1",)
        with pytest.raises(timeline.NotFound, match=r"\(127.0.0.1:1 did not answer\)"):
            await both.why("t", "x")


def test_the_same_without_await(served: str) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("t")
        with tl.producer("t") as p, tl.consumer("t", id="w1") as c:
            p.produce(b"", at=LONG_AGO_MS, id="a")
            assert tl.why("t", "a").kept is not None
            (d,) = c.take(max=1)
            d.ack()
            assert [one.id for one in tl.why("t", "a").late] == ["a"]
            assert tl.late(since="1h").causes == {Cause.PRODUCED_LATE: 1}
