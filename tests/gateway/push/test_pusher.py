"""Messages go from a real broker to a real receiver, and each answer does to the message what it should."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from standardwebhooks.webhooks import Webhook

import timeline
from tests.gateway.processes import TIMELINE, gateway
from tests.gateway.processes import broker as served
from tests.gateway.push.receiver import Answering, Receiver, always, hang_up
from timeline.child import free_ports
from timeline.errors import Invalid
from timeline.gateway.metrics import GatewayMetrics
from timeline.gateway.push import circuit as circuit_module
from timeline.gateway.push import pusher as pusher_module
from timeline.gateway.push.addresses import AddressGuard, host_of
from timeline.gateway.push.circuit import Circuit
from timeline.gateway.push.pusher import Pusher

LOCAL = AddressGuard(["127.0.0.0/8"])


@contextlib.asynccontextmanager
async def pushing(
    tl: timeline.Timeline, guard: AddressGuard = LOCAL, metrics: GatewayMetrics | None = None, grace_s: float = 5.0
) -> AsyncIterator[Pusher]:
    pusher = Pusher(tl, guard, lambda: 0.0, metrics or GatewayMetrics())
    task = asyncio.create_task(pusher.run(grace_s))
    await pusher.looked.wait()
    yield pusher
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def produce(tl: timeline.Timeline, *ids: str, **more: Any) -> None:
    async with tl.producer("t") as p:
        for id in ids:
            await p.produce(b'{"id": "%s"}' % id.encode(), id=id, **({"in_": 0} | more))


async def state_of(tl: timeline.Timeline, id: str, *until: str) -> Any:
    """The message as soon as it is in one of these states; None for one that is gone."""
    while True:
        found = await tl.get("t", id)
        if ("gone" if found is None else str(found.state)) in until:
            return found


def holding(gate: asyncio.Event, id: str = "") -> Answering:
    """A receiver that answers once the gate is open. `id`: only this message waits for it."""

    async def held(request: web.Request, body: bytes) -> web.StreamResponse:
        if id in ("", request.headers["Timeline-Id"]):
            await gate.wait()
        return web.Response()

    return held


@pytest.mark.slow
async def test_a_message_is_sent_signed_and_acknowledged(tl: timeline.Timeline, receiver: Receiver) -> None:
    await tl.create_topic("t", push_url=receiver.url)
    (secret,) = await tl.topic_secrets("t")
    metrics = GatewayMetrics()
    async with pushing(tl, metrics=metrics):
        await produce(tl, "a", headers={"k": "v\r\nx: y", "content-type": "application/json"})
        request, body = (await receiver.received(1))[0]
        assert Webhook(secret).verify(body, dict(request.headers)) == {"id": "a"}
        assert request.method == "POST" and request.path_qs == "/hook?a=%2F"
        assert request.headers["Host"] == f"127.0.0.1:{receiver.port}"
        assert request.headers["Content-Type"] == "application/json"
        assert (request.headers["Timeline-Id"], request.headers["Timeline-Topic"]) == ("a", "t")
        assert request.headers["Timeline-Header-k"] == "v%0D%0Ax: y" and "x" not in request.headers
        assert request.headers["Timeline-Deliveries"] == "1"
        await state_of(tl, "a", "gone")
    assert len(receiver.requests) == 1
    told = metrics.text().decode()
    assert 'timeline_gateway_webhooks_total{effect="ack",topic="t"} 1.0' in told
    assert (
        'timeline_gateway_webhook_seconds_count{topic="t"} 1.0' in told and "timeline_gateway_circuits_open 0.0" in told
    )


@pytest.mark.slow
async def test_a_message_takes_its_trace_along(tl: timeline.Timeline, receiver: Receiver) -> None:
    traced = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl):
        await produce(tl, "a", headers=traced)
        request, _ = (await receiver.received(1))[0]
    assert {name: request.headers[name] for name in traced} == traced


@pytest.mark.slow
async def test_a_topics_rate_is_kept(tl: timeline.Timeline, receiver: Receiver) -> None:
    """A second's worth may go at once. Then each waits for its turn."""
    rate, count = 20, 40
    came_s: list[float] = []

    async def noted(request: web.Request, body: bytes) -> web.StreamResponse:
        came_s.append(asyncio.get_running_loop().time())
        return web.Response()

    receiver.answer = noted
    await tl.create_topic("t", push_url=receiver.url, push_rate=rate)
    await produce(tl, *(f"m{number}" for number in range(count)))
    async with pushing(tl):
        await receiver.received(count)
    slack = 6  # the first may have been held up on its way
    early = [at for at in range(count) if came_s[at] - came_s[0] < (at - rate - slack) / rate]
    assert not early, came_s


@pytest.mark.slow
async def test_both_secrets_sign_during_a_rotation(tl: timeline.Timeline, receiver: Receiver) -> None:
    await tl.create_topic("t", push_url=receiver.url)
    (old,) = await tl.topic_secrets("t")
    new, _ = await tl.topic_secrets("t", rotate=True)
    async with pushing(tl):
        await produce(tl, "a")
        request, body = (await receiver.received(1))[0]
    for secret in (old, new):
        Webhook(secret).verify(body, dict(request.headers))


@pytest.mark.slow
async def test_failures_are_released_with_the_topics_backoff_and_buried_at_last(
    tl: timeline.Timeline, receiver: Receiver
) -> None:
    receiver.answer = always(418, "a teapot")
    await tl.create_topic("t", push_url=receiver.url, retry_first="1ms", retry_cap="2ms", max_deliveries=3)
    async with pushing(tl):
        await produce(tl, "a")
        dead = await state_of(tl, "a", "dead")
    assert dead.dead == "max_deliveries: 418: a teapot"
    assert [request.headers["Timeline-Deliveries"] for request, _ in receiver.requests] == ["1", "2", "3"]
    assert len({request.headers["webhook-id"] for request, _ in receiver.requests}) == 1


@pytest.mark.slow
async def test_retry_after_and_410(tl: timeline.Timeline, receiver: Receiver) -> None:
    receiver.answer = always(429, "slower", Retry_After="7200")
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl):
        async with tl.producer("t") as p:
            put = await p.produce(b"", id="a", in_=0)
        await receiver.received(1)
        waiting = await state_of(tl, "a", "waiting")
        assert put.due is not None and 2 <= (waiting.due - put.due).total_seconds() / 3600 < 3
        receiver.answer = always(410, "gone for good")
        async with tl.producer("t") as p:
            await p.move("a", in_=0)
        assert (await state_of(tl, "a", "dead")).dead == "410: gone for good"


@pytest.mark.slow
@pytest.mark.parametrize("retry_after", [{"Retry_After": "7200"}, {}])
async def test_no_wait_goes_beyond_the_topics_horizon(
    tl: timeline.Timeline, receiver: Receiver, retry_after: dict[str, str]
) -> None:
    """Or the release would be refused, and the message sent again as soon as its lease ends."""
    receiver.answer = always(503, "later", **retry_after)
    waits = {"retry_first": "50m", "retry_cap": "1h", "retry_jitter": 0.5}
    await tl.create_topic("t", push_url=receiver.url, horizon="10m", **waits)
    async with pushing(tl):
        async with tl.producer("t") as p:
            put = await p.produce(b"", id="a", in_=0)
        await receiver.received(1)
        waiting = await state_of(tl, "a", "waiting")
    assert put.due is not None and 150 < (waiting.due - put.due).total_seconds() < 700


@pytest.mark.slow
async def test_a_receiver_may_keep_the_lease_and_settle_later(tl: timeline.Timeline, receiver: Receiver) -> None:
    receiver.answer = always(202, Timeline_Lease="2h")
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl):
        await produce(tl, "a")
        request, _ = (await receiver.received(1))[0]
        while (kept := await tl.get("t", "a")) is None or (kept.due - kept.scheduled).total_seconds() < 3600:
            pass
        assert str(kept.state) == "leased"
    (await tl.settle(request.headers["Timeline-Receipt"], "ack")).raise_failed()
    assert await tl.get("t", "a") is None


@pytest.mark.slow
async def test_redirects_are_not_followed(tl: timeline.Timeline, receiver: Receiver) -> None:
    other = Receiver(always(204))
    await other.start()
    receiver.answer = always(302, Location=other.url)
    await tl.create_topic("t", push_url=receiver.url, max_deliveries=1)
    async with pushing(tl):
        await produce(tl, "a")
        dead = await state_of(tl, "a", "dead")
    assert dead.dead.startswith("max_deliveries: 302: redirects are not followed") and other.requests == []
    await other.stop()


@pytest.mark.slow
async def test_a_private_address_gets_nothing_unless_it_is_allowed(tl: timeline.Timeline, receiver: Receiver) -> None:
    await tl.create_topic("t", push_url=receiver.url.replace("127.0.0.1", "0x7f.1"), max_deliveries=1)
    async with pushing(tl, AddressGuard()):
        await produce(tl, "a")
        dead = await state_of(tl, "a", "dead")
    assert "127.0.0.1 is loopback" in dead.dead and receiver.requests == []


@pytest.mark.slow
async def test_a_proxy_from_the_environment_is_not_used(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Receiver(always(500))
    await proxy.start()
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl):
        await produce(tl, "a")
        await state_of(tl, "a", "gone")
    assert proxy.requests == []
    await proxy.stop()


@pytest.mark.slow
async def test_no_more_requests_at_a_time_than_the_topic_says(tl: timeline.Timeline, receiver: Receiver) -> None:
    gate = asyncio.Event()

    receiver.answer = holding(gate)
    await tl.create_topic("t", push_url=receiver.url, push_concurrency=3)
    await produce(tl, *map(str, range(9)))
    async with pushing(tl):
        await receiver.received(3)
        assert (await tl.count("t")).leased == 3
        gate.set()
        await receiver.received(9)
        for id in range(9):
            await state_of(tl, str(id), "gone")
    assert receiver.most_at_once == 3


@pytest.mark.slow
async def test_several_takes_wait_while_messages_come_and_one_when_none_does(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One take at a time had one message leased ahead. The next one waited for its answer, and for a lease call."""
    monkeypatch.setattr(pusher_module, "TAKE_WAIT", "50ms")
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl) as pusher:
        topic_pusher, _ = pusher._running["t"]
        sent = 0
        while topic_pusher._takers < pusher_module.TAKES:
            await produce(tl, str(sent))
            sent += 1
        while topic_pusher._takers > 1:
            await asyncio.sleep(0)
        await receiver.received(sent)
        assert topic_pusher._asked <= topic_pusher.topic.settings.push_concurrency // pusher_module.TAKES


@pytest.mark.slow
async def test_a_dead_receiver_costs_few_deliveries_and_gets_all_when_it_is_back(
    tl: timeline.Timeline, receiver: Receiver
) -> None:
    await receiver.stop()
    await tl.create_topic("t", push_url=receiver.url, push_concurrency=2, retry_first="1ms", retry_cap="1ms")
    ids = [str(number) for number in range(20)]
    await produce(tl, *ids)
    async with pushing(tl) as pusher:
        (host,) = pusher._hosts.values()
        circuit = host.circuit
        while not circuit.open:
            await asyncio.sleep(0)
        before = sum([m.deliveries async for m in tl.scan("t")])
        assert before <= 8
        await receiver.start()
        for id in ids:
            await state_of(tl, id, "gone")
    assert len(receiver.requests) == 20 and not circuit.open


async def two_topics(tl: timeline.Timeline, receiver: Receiver) -> None:
    """Of one host."""
    for name in ("t", "u"):
        await tl.create_topic(name, push_url=receiver.url, retry_first="1ms", retry_cap="1ms", max_deliveries=0)


async def opened(pusher: Pusher) -> Circuit:
    (host,) = pusher._hosts.values()
    while not host.circuit.open:
        await asyncio.sleep(0)
    return host.circuit


@pytest.mark.slow
async def test_what_a_take_from_before_gets_while_the_circuit_is_open_goes_back_unseen(
    tl: timeline.Timeline, receiver: Receiver
) -> None:
    await two_topics(tl, receiver)
    await receiver.stop()
    async with pushing(tl) as pusher:
        other = pusher._running["u"][0]
        while not other._asked:  # its take waits, and will go on waiting
            await asyncio.sleep(0)
        await produce(tl, "a")
        await opened(pusher)
        async with tl.producer("u") as p:
            await p.produce(b"", id="b", in_=0)
        while other._asked or other._under_way:
            await asyncio.sleep(0)
        kept = await tl.get("u", "b")
        assert kept is not None and (str(kept.state), kept.deliveries) == ("available", 0)
        await receiver.start()
        while await tl.get("u", "b") is not None:
            pass


@pytest.mark.slow
@pytest.mark.parametrize("fails", [always(500), hang_up], ids=["5xx", "no answer"])
async def test_errors_of_one_topic_hold_up_no_other_of_its_host(
    tl: timeline.Timeline,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    fails: Answering,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "timeline.gateway.push")
    monkeypatch.setattr(pusher_module, "LOOK_MS", 20.0)
    monkeypatch.setattr(circuit_module, "FIRST_MS", 20.0)

    async def one_broken(request: web.Request, body: bytes) -> web.StreamResponse:
        return await fails(request, body) if request.headers["Timeline-Topic"] == "t" else web.Response(status=204)

    await two_topics(tl, receiver)
    receiver.answer = one_broken
    async with pushing(tl) as pusher:
        await produce(tl, "a")
        broken, well = pusher._running["t"][0].receiver, pusher._running["u"][0].receiver
        while not broken.open:
            await asyncio.sleep(0)
        assert not well.open and pusher._open_circuits() == 1
        async with tl.producer("u") as p:
            await p.produce(b"", id="b", in_=0)
        while await tl.get("u", "b") is not None:
            pass
        assert "webhooks of topic 't' wait: the receiver fails" in caplog.text
        receiver.answer = always(204)
        while await tl.get("t", "a") is not None:
            pass
        assert not pusher._open_circuits()
        assert "webhooks of topic 't' go again" in caplog.text and "'u' wait" not in caplog.text


@pytest.mark.slow
async def test_a_dropped_topic_has_no_open_circuit(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher_module, "LOOK_MS", 20.0)
    receiver.answer = always(500)
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl) as pusher:
        await produce(tl, "a")
        while not pusher._open_circuits():
            await asyncio.sleep(0)
        await tl.drop_topic("t")
        while pusher._open_circuits():
            await asyncio.sleep(0)


@pytest.mark.slow
async def test_a_changed_setting_waits_for_no_request_under_way(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher_module, "LOOK_MS", 20.0)
    gate = asyncio.Event()

    receiver.answer = holding(gate, "slow")
    await tl.create_topic("t", push_url=receiver.url, push_timeout="10m")
    async with pushing(tl) as pusher:
        await produce(tl, "slow")
        await receiver.received(1)
        await tl.update_topic("t", remember="1h", push_rate=1_000)
        while pusher._running["t"][0].topic.settings.push_rate != 1_000:
            await asyncio.sleep(0)
        await produce(tl, "quick")
        await state_of(tl, "quick", "gone")
        gate.set()
        await state_of(tl, "slow", "gone")


@pytest.mark.slow
async def test_a_topic_goes_on_after_the_probe_of_another_one_of_its_host(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for the probe's end, of which it was not told, for good."""
    monkeypatch.setattr(pusher_module, "TAKE_WAIT", "20ms")
    gate = asyncio.Event()

    await two_topics(tl, receiver)
    receiver.answer = holding(gate)
    await receiver.stop()
    async with pushing(tl) as pusher:
        await produce(tl, "a")
        circuit = await opened(pusher)
        await receiver.start()
        while not circuit._probing:
            await asyncio.sleep(0)
        other = pusher._running["u"][0]
        while other._asked:
            await asyncio.sleep(0)
        async with tl.producer("u") as p:
            await p.produce(b"", id="b", in_=0)
        gate.set()
        while await tl.get("u", "b") is not None:
            pass
    assert not circuit.open


def hanging(status: int = 0) -> Answering:
    """A receiver that does not end its answer. `status`: it begins with this one; 0: it says nothing."""

    async def hang(request: web.Request, body: bytes) -> web.StreamResponse:
        if status:
            response = web.StreamResponse(status=status, headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b"x")
        await asyncio.Event().wait()
        raise AssertionError

    return hang


@pytest.mark.slow
async def test_a_receiver_that_hangs_is_given_up_in_time(tl: timeline.Timeline, receiver: Receiver) -> None:
    receiver.answer = hanging()
    await tl.create_topic("t", push_url=receiver.url, push_timeout="20ms", max_deliveries=1)
    async with pushing(tl):
        await produce(tl, "a")
        assert (await state_of(tl, "a", "dead")).dead == "max_deliveries: no answer within 20ms"


@pytest.mark.slow
async def test_a_receiver_that_is_not_there_is_named(tl: timeline.Timeline) -> None:
    (port,) = free_ports(1)
    await tl.create_topic("t", push_url=f"http://127.0.0.1:{port}/", max_deliveries=1)
    async with pushing(tl):
        await produce(tl, "a")
        dead = f"max_deliveries: cannot connect to 127.0.0.1:{port}: connection refused"
        assert (await state_of(tl, "a", "dead")).dead == dead


@pytest.mark.slow
async def test_an_endless_answer_is_cut_off(tl: timeline.Timeline, receiver: Receiver) -> None:
    async def endless(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(status=200)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * 65_536)
        return response

    receiver.answer = endless
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl):
        await produce(tl, "a")
        await state_of(tl, "a", "gone")


@pytest.mark.slow
@pytest.mark.parametrize(("status", "becomes"), [(200, "gone"), (410, "dead")])
async def test_a_status_decides_though_the_body_never_ends(
    tl: timeline.Timeline, receiver: Receiver, status: int, becomes: str
) -> None:
    receiver.answer = hanging(status)
    await tl.create_topic("t", push_url=receiver.url, push_timeout="200ms", max_deliveries=2)
    async with pushing(tl):
        await produce(tl, "a")
        await state_of(tl, "a", becomes)
    assert len(receiver.requests) == 1


@pytest.mark.slow
async def test_an_answer_that_cannot_be_recorded_at_once_is_recorded_later(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers are away for a while, and their answer to the ack is lost. The message does not come again."""
    monkeypatch.setattr(pusher_module, "PAUSE_MS", 1.0)
    settle, troubles = tl.settle, [timeline.Unknown("the answer was lost"), timeline.Unavailable("nobody listens")]

    async def shaken(*given: Any, **more: Any) -> Any:
        if troubles:
            trouble = troubles.pop()
            if isinstance(trouble, timeline.Unknown):
                await settle(*given, **more)
            raise trouble
        return await settle(*given, **more)

    monkeypatch.setattr(tl, "settle", shaken)
    await tl.create_topic("t", push_url=receiver.url)
    metrics = GatewayMetrics()
    async with pushing(tl, metrics=metrics):
        await produce(tl, "a")
        await state_of(tl, "a", "gone")
    assert not troubles and len(receiver.requests) == 1
    exposed = metrics.text().decode()
    assert 'effect="ack",topic="t"} 1.0' in exposed and 'effect="unsettled"' not in exposed


@pytest.mark.slow
async def test_a_release_whose_answer_was_lost_counts_as_done(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has another version by then: only by the id of the operation is the repeat known."""
    monkeypatch.setattr(pusher_module, "PAUSE_MS", 1.0)
    settle, lost = tl.settle, [timeline.Unknown("the answer was lost")]

    async def shaken(*given: Any, **more: Any) -> Any:
        told = await settle(*given, **more)
        if lost:
            raise lost.pop()
        return told

    monkeypatch.setattr(tl, "settle", shaken)
    receiver.answer = always(429, Retry_After="3600")
    await tl.create_topic("t", push_url=receiver.url)
    metrics = GatewayMetrics()
    async with pushing(tl, metrics=metrics):
        await produce(tl, "a")
        await state_of(tl, "a", "waiting")
    exposed = metrics.text().decode()
    assert not lost and 'effect="release",topic="t"} 1.0' in exposed and 'effect="unsettled"' not in exposed


@pytest.mark.slow
@pytest.mark.parametrize("gone", [timeline.Expired("it has expired"), timeline.NotFound("it is gone")])
async def test_a_failure_of_a_message_that_is_gone_is_no_failure_to_settle(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, gone: timeline.TimelineError
) -> None:
    """It has expired, say, while its receiver was asked."""
    told = asyncio.Event()

    async def settle(*given: Any, **more: Any) -> Any:
        told.set()
        raise gone

    monkeypatch.setattr(tl, "settle", settle)
    receiver.answer = always(500)
    await tl.create_topic("t", push_url=receiver.url)
    metrics = GatewayMetrics()
    async with pushing(tl, metrics=metrics):
        await produce(tl, "a")
        await told.wait()
    exposed = metrics.text().decode()
    assert 'effect="release",topic="t"} 1.0' in exposed and 'effect="unsettled"' not in exposed


async def test_a_fault_of_ours_leaves_no_webhook_waiting_for_its_ack(
    tl: timeline.Timeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*given: Any, **more: Any) -> Any:
        await asyncio.sleep(0)  # others come meanwhile
        raise MemoryError

    monkeypatch.setattr(tl, "settle", broken)
    acks = pusher_module.Acks(tl)
    for _ in range(2):
        ended = await asyncio.gather(*(acks.ack("a receipt") for _ in range(3)), return_exceptions=True)
        assert [*map(type, ended)] == [MemoryError] * 3


@pytest.mark.slow
async def test_payloads_under_way_have_a_bound_and_no_topic_takes_all_of_it(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher_module, "PAYLOAD_BYTES", 2_000_000)
    gate, count = asyncio.Event(), 12

    async def held(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.headers["Timeline-Topic"] == "t":
            await gate.wait()
        return web.Response(status=204)

    receiver.answer = held
    for name in ("t", "u"):
        await tl.create_topic(name, push_url=receiver.url)
        async with tl.producer(name) as p:
            for at in range(count):
                await p.produce(bytes(600_000), id=f"{name}{at}", in_=0)
    async with pushing(tl) as pusher:
        for at in range(count):
            while await tl.get("u", f"u{at}", payload=False) is not None:
                pass
        held_up = pusher._running["t"][0]
        assert 0 < len(held_up._under_way) < count
        gate.set()
        for at in range(count):
            while await tl.get("t", f"t{at}", payload=False) is not None:
                pass
        while held_up._under_way:
            await asyncio.sleep(0)
        assert held_up._bytes == 0 and pusher._payloads._left == 2_000_000


async def test_what_is_on_its_way_when_the_gateway_ends_goes_back_unseen(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A take that is cancelled while its answer comes would keep its messages until their lease ends."""
    monkeypatch.setattr(pusher_module, "ENDING_WAIT_S", 3600.0)
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl) as pusher:
        topic_pusher, task = pusher._running["t"]
        while not topic_pusher._asked:
            await asyncio.sleep(0)
        pusher.rest()
        await produce(tl, "a")
        await asyncio.wait([task])
        kept = await state_of(tl, "a", "available")
    assert kept.deliveries == 0 and kept.version > 1 and receiver.requests == []


async def test_the_end_waits_no_longer_than_its_grace_for_a_former_receiver(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pusher_module, "LOOK_MS", 20.0)
    receiver.answer = holding(asyncio.Event())
    await tl.create_topic("t", push_url=receiver.url, push_timeout="1h")
    async with pushing(tl, grace_s=0.1) as pusher:
        await produce(tl, "a")
        await receiver.received(1)
        await tl.update_topic("t", push_url="")
        while "t" in pusher._running:
            await asyncio.sleep(0)
        assert pusher._ending
    assert not pusher._ending, "an hour has not passed"


async def test_an_end_without_grace_cancels_what_is_under_way(tl: timeline.Timeline, receiver: Receiver) -> None:
    receiver.answer = holding(asyncio.Event())
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl, grace_s=0.0) as pusher:
        await produce(tl, "a")
        await receiver.received(1)
        topic_pusher, _ = pusher._running["t"]
    assert not topic_pusher._under_way and topic_pusher._sender._session.closed


@pytest.mark.slow
async def test_a_drain_waits_for_the_requests_under_way(tl: timeline.Timeline, receiver: Receiver) -> None:
    gate = asyncio.Event()

    receiver.answer = holding(gate)
    await tl.create_topic("t", push_url=receiver.url)
    await produce(tl, "a")
    async with pushing(tl):
        await receiver.received(1)
        asyncio.get_running_loop().call_soon(gate.set)
    assert await tl.get("t", "a") is None


@pytest.mark.slow
async def test_a_topic_with_a_slow_receiver_holds_up_no_look_at_the_others(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings change while a request is under way. Another topic begins meanwhile, and it goes on thereafter."""
    monkeypatch.setattr(pusher_module, "LOOK_MS", 20.0)
    gate = asyncio.Event()

    receiver.answer = holding(gate, "slow")
    await tl.create_topic("t", push_url=receiver.url, push_timeout="10m")
    async with pushing(tl):
        await produce(tl, "slow")
        await receiver.received(1)
        await tl.update_topic("t", push_concurrency=2)
        await tl.create_topic("u", push_url=receiver.url)
        async with tl.producer("u") as p:
            await p.produce(b"", id="b", in_=0)
        async with asyncio.timeout(30):
            while await tl.get("u", "b") is not None:
                pass
        gate.set()
        await state_of(tl, "slow", "gone")
        await produce(tl, "after")
        await state_of(tl, "after", "gone")


@pytest.mark.slow
async def test_a_new_url_waits_for_no_receiver_that_hangs(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former receiver keeps the message that it has. What comes now goes to the new one."""
    monkeypatch.setattr(pusher_module, "LOOK_MS", 20.0)
    gate = asyncio.Event()

    receiver.answer, well = holding(gate), Receiver(always(204))
    await well.start()
    await tl.create_topic("t", push_url=receiver.url, push_timeout="1h")
    try:
        async with pushing(tl) as pusher:
            await produce(tl, "a")
            await receiver.received(1)
            await tl.update_topic("t", push_url=well.url)
            while pusher._running["t"][0].topic.settings.push_url != well.url:
                await asyncio.sleep(0)
            await produce(tl, "b")
            await state_of(tl, "b", "gone")
            await tl.update_topic("t", push_url="")
            while "t" in pusher._running:
                await asyncio.sleep(0)
            gate.set()
            await state_of(tl, "a", "gone")
    finally:
        await well.stop()


@pytest.mark.slow
async def test_a_url_of_older_rules_stops_no_other_topic(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stricter(url: str) -> tuple[str, int]:
        if "older" in url:
            raise Invalid("push_url has a host that is no name")
        return host_of(url)

    monkeypatch.setattr(pusher_module, "host_of", stricter)
    await tl.create_topic("older", push_url="http://older.example/")
    await tl.create_topic("t", push_url=receiver.url)
    async with pushing(tl):
        await produce(tl, "a")
        await state_of(tl, "a", "gone")


@pytest.mark.slow
async def test_a_mistake_of_ours_in_one_look_ends_no_webhooks(
    tl: timeline.Timeline, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pusher_module, "LOOK_MS", 20.0)

    def broken(url: str) -> tuple[str, int]:
        raise ZeroDivisionError

    await tl.create_topic("t", push_url=receiver.url)
    with monkeypatch.context() as planted:
        planted.setattr("timeline.gateway.push.pusher.host_of", broken)
        looking = contextlib.AsyncExitStack()
        await looking.enter_async_context(pushing(tl))
    async with looking:
        await produce(tl, "a")
        await state_of(tl, "a", "gone")
    assert "a look at the topics to push failed" in caplog.text


@pytest.mark.prove
@pytest.mark.processes
async def test_the_gateways_process_pushes_and_drains(receiver: Receiver, tmp_path: Path) -> None:
    with served(tmp_path) as broker:
        async with timeline.connect(broker["listen"]) as tl:
            await tl.create_topic("t", push_url=receiver.url)
            with gateway(tmp_path, broker["listen"], "--push-allow", "127.0.0.0/8") as running:
                await produce(tl, *map(str, range(200)))
                await receiver.received(200)
                for id in range(200):
                    await state_of(tl, str(id), "gone")
                log_ = Path(running["log"]).read_text()
            (secret,) = await tl.topic_secrets("t")
            with gateway(tmp_path, broker["listen"], "--no-push"):
                await produce(tl, "kept")
                assert await tl.get("t", "kept") is not None
    assert len(receiver.requests) == 200
    assert "is pushed" in log_ and secret not in Path(running["log"]).read_text()


@pytest.mark.processes
async def test_push_test_sends_one_signed_example(receiver: Receiver, tmp_path: Path) -> None:
    receiver.answer = always(200, "thanks")
    with served(tmp_path) as broker:
        async with timeline.connect(broker["listen"]) as tl:
            await tl.create_topic("t", push_url=receiver.url)
            (secret,) = await tl.topic_secrets("t")
            await tl.create_topic("u")
            asked = ("push", "test", "t", "--address", broker["listen"])
            refused = await _told(*asked)
            assert refused[0] != 0 and "--push-allow" in refused[2] and receiver.requests == []
            code, out, _ = await _told(*asked, "--push-allow", "127.0.0.0/8", "--json")
            assert code == 0 and json.loads(out)["body"] == "thanks" and json.loads(out)["would"] == "ack"
            request, body = receiver.requests[0]
            assert Webhook(secret).verify(body, dict(request.headers)) == {"example": True}
            code, out, _ = await _told(*asked, "--push-allow", "127.0.0.0/8")
            assert code == 0 and "> webhook-signature: v1," in out and secret not in out
            code, _, error = await _told("push", "test", "u", "--address", broker["listen"])
            assert code != 0 and "has no push_url" in error
            receiver.answer = always(500)
            assert (await _told(*asked, "--push-allow", "127.0.0.0/8"))[0] == 1
            assert refused[0] == 4 and refused[2].startswith(f"timeline: {receiver.url} did not answer: webhooks must")
            # A receiver that is away is not a broker that is away, and is not told as one.
            await tl.update_topic("u", push_url="http://name.invalid/hook")
            code, _, error = await _told("push", "test", "u", "--address", broker["listen"])
            assert (code, error.partition(": the name name.invalid is not known here")[0]) == (
                3, "timeline: http://name.invalid/hook did not answer"
            )  # fmt: skip


async def _told(*arguments: str) -> tuple[int, str, str]:
    told = await asyncio.create_subprocess_exec(
        *TIMELINE, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, error = await told.communicate()
    assert told.returncode is not None
    return told.returncode, out.decode(), error.decode()
