"""Traces that go on when a message comes due, held against OpenTelemetry's own SDK; and nothing where nobody traces."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

import timeline
from tests.driver.broker import Broker
from timeline import Batch, Message, tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Told:
    """The spans that ended. `tracer`: the program's own."""

    def __init__(self, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
        self.tracer = provider.get_tracer("shop")
        self._exporter = exporter

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """A program that traces: its provider would be the whole process's, so it is put in place for this test alone."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield Told(provider, exporter)
    provider.shutdown()


async def take(c: timeline.Consumer) -> timeline.Delivery:
    delivery = await c.take()
    assert delivery is not None
    return delivery


def traced(span: ReadableSpan) -> tuple[int, int | None]:
    """The trace that it is part of, and the span that it follows."""
    return span.context.trace_id, span.parent.span_id if span.parent else None


async def test_a_message_carries_its_trace_from_the_producer_to_the_handler(tl: timeline.Timeline, told: Told) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        with told.tracer.start_as_current_span("order"):
            receipt = await p.produce(b"x", in_=0, headers={"color": "red"})
        d = await take(c)
        assert d.headers["color"] == "red"
        with d.span(), told.tracer.start_as_current_span("inside"):
            await d.ack()
    order, send, process = (told.one(name) for name in ("order", "send t", "process t"))
    assert traced(send) == (order.context.trace_id, order.context.span_id)
    assert traced(process) == (order.context.trace_id, send.context.span_id)
    assert traced(told.one("inside")) == (order.context.trace_id, process.context.span_id)
    assert send.kind is trace.SpanKind.PRODUCER and process.kind is trace.SpanKind.CONSUMER
    assert process.attributes is not None and process.attributes["messaging.message.id"] == receipt.id
    assert process.attributes["messaging.destination.name"] == "t" and process.attributes["timeline.deliveries"] == 1


async def test_the_broker_tells_of_storing_and_of_how_late_a_delivery_was(tl: timeline.Timeline, told: Told) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"x", in_=0)
        await (await take(c)).ack()
    send, store, deliver = (told.one(name) for name in ("send t", "store t", "deliver t"))
    for span in (store, deliver):
        assert traced(span) == (send.context.trace_id, send.context.span_id)
        assert span.attributes is not None and span.attributes["timeline.broker"] == "b1"
        assert span.start_time is not None and span.end_time is not None and span.start_time <= span.end_time
    assert store.attributes is not None and store.attributes["timeline.status"] == "OK"
    assert deliver.attributes is not None and deliver.attributes["timeline.lateness_ms"] >= 0


async def test_a_batch_is_one_span_and_every_message_of_it_carries_it(tl: timeline.Timeline, told: Told) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        (await p.produce_many(Batch([b"a", b"b"], in_=0))).raise_failed()
        mixed = [
            Message(b"c", in_=0, headers={"traceparent": PARENT}),
            Message(b"d", in_=0),
            Message(b"e", in_=0, id="own"),
        ]
        (await p.produce_many(mixed)).raise_failed()
        found = {}
        for _ in range(5):
            d = await take(c)
            found[d.payload] = d.headers.get("traceparent", "")
            await d.ack()
    first, second = told.named("send t")
    assert first.attributes is not None and first.attributes["messaging.batch.message_count"] == 2
    assert f"{first.context.span_id:016x}" in found[b"a"] and found[b"a"] == found[b"b"]
    assert found[b"c"] == PARENT, "one that a person gave is left alone"
    assert f"{second.context.span_id:016x}" in found[b"d"] and found[b"e"] == ""


async def test_what_is_put_again_in_another_trace_is_the_same_message(tl: timeline.Timeline, told: Told) -> None:
    async with tl.producer("t") as p:
        receipts = []
        for name in ("first", "second"):
            with told.tracer.start_as_current_span(name):
                receipts.append(await p.produce(b"x", in_="1h", id="one", headers={"color": "red"}))
        assert [receipt.status for receipt in receipts] == ["OK", "DUPLICATE"]
        with pytest.raises(timeline.Exists):
            await p.produce(b"x", in_="1h", id="one", headers={"color": "blue"})
        again = [Message(b"x", in_="1h", id=id, headers={"color": "red"}) for id in ("one", "two")]
        for statuses in (["DUPLICATE", "OK"], ["DUPLICATE", "DUPLICATE"]):
            assert [receipt.status for receipt in await p.produce_many(again)] == statuses
        one = Batch([b"y"], in_="1h", ids=["three"])
        assert [[receipt.status for receipt in await p.produce_many(one)] for _ in range(2)] == [["OK"], ["DUPLICATE"]]


async def test_a_batch_sent_again_is_the_same_messages_in_whatever_trace(tl: timeline.Timeline, told: Told) -> None:
    headers: list[dict[str, str] | None]
    for headers in ([None, None], [{"color": "red"}, None]):
        batch = Batch([b"a", b"b"], in_="1h", headers=headers)
        async with tl.producer("t") as p:
            with told.tracer.start_as_current_span("first"):
                first = await p.produce_many(batch)
            with told.tracer.start_as_current_span("second"):
                second = await p.produce_many(batch)
        assert [receipt.status for receipt in first] == ["OK", "OK"]
        assert [receipt.status for receipt in second] == ["DUPLICATE", "DUPLICATE"]


@pytest.mark.slow
async def test_what_ended_unknown_is_put_again_by_its_id_in_whatever_trace(
    broker: Broker, tl: timeline.Timeline, told: Told
) -> None:
    async with tl.producer("t") as p:
        await p.produce(b"", in_="1h")
        held = broker.hold()
        with pytest.raises(timeline.Unknown) as unknown:
            await p.produce(b"x", in_="1h", headers={"color": "red"}, timeout="500ms")
        held.set()
        again = await p.produce(b"x", in_="1h", headers={"color": "red"}, id=unknown.value.id)
        assert again.status == "DUPLICATE"


async def test_messages_as_they_come_carry_their_trace(tl: timeline.Timeline, told: Told) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        coming = [Message(b"x", in_=0), Message(b"x", in_=0, id="own")]
        ids = [receipt.id async for receipt in p.produce_iter(coming)]
        found = {d.id: d.headers for d in [await take(c), await take(c)]}
    assert [bool(found[id]) for id in ids] == [True, False]


async def test_headers_that_have_no_room_for_a_trace_go_as_they_are(tl: timeline.Timeline, told: Told) -> None:
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        full = {"k": "v" * (8 * 1024 - 5)}
        await p.produce(b"x", in_=0, headers=full)
        assert (await take(c)).headers == full


@pytest.mark.parametrize("threaded", [False, True])
async def test_handlers_run_within_their_messages_trace(tl: timeline.Timeline, told: Told, threaded: bool) -> None:
    done, loop = asyncio.Event(), asyncio.get_running_loop()

    def work(d: Any) -> None:
        told.tracer.start_span("work").end()
        if d.deliveries == 1:
            raise ValueError("no")
        if d.deliveries == 2:
            raise timeline.Retry(in_=0)
        loop.call_soon_threadsafe(done.set)

    async def handler(d: timeline.Delivery) -> None:
        work(d)

    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"x", in_=0)
        running = asyncio.ensure_future(c.run(work if threaded else handler, backoff=timeline.Backoff(first="1ms")))
        await done.wait()
        c.stop_taking()
        await running
    send, processed = told.one("send t"), told.named("process t")
    assert [traced(span) for span in processed] == [(send.context.trace_id, send.context.span_id)] * 3
    assert [traced(span)[1] for span in told.named("work")] == [span.context.span_id for span in processed]
    failed, again, well = processed
    assert not failed.status.is_ok and failed.events[0].name == "exception"
    assert not again.events and not well.events, "an answer is no error"


def test_a_synchronous_client_stays_in_the_trace_of_its_thread(served: str, told: Told) -> None:
    with timeline.connect_sync(served, timeout="10s") as tl:
        tl.create_topic("s")
        with tl.producer("s") as p, told.tracer.start_as_current_span("order"):
            p.produce(b"x", in_="1h")
    order, send = told.one("order"), told.one("send s")
    assert traced(send) == (order.context.trace_id, order.context.span_id)
    assert threading.current_thread() is threading.main_thread()


async def test_a_trace_that_nobody_records_costs_the_broker_no_span(
    tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"x", in_=0)
        d = await take(c)
        assert int(d.headers["traceparent"][-2:], 16) & 1 == 0
        with d.span():
            await d.ack()
    assert exporter.get_finished_spans() == ()
    provider.shutdown()


async def test_where_nobody_traces_nothing_is_added(tl: timeline.Timeline) -> None:
    assert tracing.tracer() is None, "OpenTelemetry is imported here, and no provider is set up"
    async with tl.producer("t") as p, tl.consumer("t", id="w") as c:
        await p.produce(b"x", in_=0)
        (await p.produce_many([Message(b"y", in_=0)])).raise_failed()
        for _ in range(2):
            d = await take(c)
            assert d.headers == {}
            with d.span() as span:
                assert span is None
            await d.ack()


@pytest.mark.slow
def test_opentelemetry_is_not_imported_on_our_account() -> None:
    program = (
        "import asyncio, sys, timeline, timeline.broker.node\n"
        "from timeline import tracing\n"
        "assert tracing.tracer() is None\n"
        "sys.exit(any(name.partition('.')[0] == 'opentelemetry' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
