"""A broker that asks for tokens, met as an attacker would, through real gRPC."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import numpy as np
import pytest

import timeline
from tests.security.guarded import Guarded, Tokens
from timeline.broker.api import gateway as gateway_module
from timeline.broker.server.calls import GrpcPeerChannel
from timeline.columns import Ragged
from timeline.credentials import Credentials
from timeline.driver.transport.grpc_transport import GrpcTransport
from timeline.errors import Forbidden, NotFound
from timeline.wire import (
    METHODS,
    SERVICE,
    Credit,
    Deliver,
    Hello,
    Hint,
    Hinted,
    Ping,
    TransportError,
    Welcome,
    decode,
    decode_as,
    encode,
)


@pytest.fixture
async def admin(guarded: Guarded, tokens: Tokens) -> Any:
    """A client that may do everything, on a broker with the topics `orders` and `payments`."""
    token = tokens.add("root", "produce", "consume", "admin", "operator")
    guarded.look()
    async with timeline.connect(guarded.address, timeout="20s", token=token) as tl:
        for topic in ("orders", "payments"):
            await tl.create_topic(topic, lease="30s")
        yield tl


def client(guarded: Guarded, token: str | None, **more: Any) -> timeline.Timeline:
    return timeline.connect(guarded.address, timeout="20s", token=token, **more)


def hello(topic: str, consumer: str, session: int, credit: int = 10) -> bytes:
    none = np.zeros(0, dtype=np.uint64)
    return encode(Hello(topic, consumer, session, 0, credit, 1 << 20, Ragged.of([]), none, none.astype(np.int64)))


@pytest.mark.parametrize("token", [None, "timeline_000000000000_" + "0" * 64])
async def test_without_a_good_token_nothing_can_be_asked(guarded: Guarded, admin: Any, token: str | None) -> None:
    async with client(guarded, token) as tl, tl.producer("orders") as p:
        calls = [
            tl.ping(), tl.topics(), tl.standing(), tl.late(), tl.create_topic("x"), tl.get("orders", "1"),
            tl.forecast("orders"), p.produce(b"x", in_="1h"), p.cancel("1"), p.cancel_tag("spring"),
            anext(tl.scan("orders")), anext(aiter(tl.consumer("orders", id="c"))),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(Forbidden) as refused:
                await call
            assert "token" in str(refused.value)
            assert not refused.value.retryable


@pytest.mark.slow
async def test_a_flood_without_tokens_costs_no_frame_no_stream_and_no_store_call(
    guarded: Guarded, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded work before the token is looked at, by count: 64 MiB frames are not even received."""
    assert guarded.node is not None
    decoded: list[int] = []
    monkeypatch.setattr(gateway_module, "decode", lambda data: decoded.append(len(data)))
    calls_before = guarded.metrics.registry.get_sample_value(
        "timeline_store_calls_total", {"call": "topics", "outcome": "ok"}
    )
    before = guarded.counted("timeline_access_refused_total", "no token")
    frame = encode(Ping(1.0))
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        unary = [channel.unary_unary(f"/{SERVICE}/{name}") for name, kind in METHODS.items() if kind == "unary_unary"]
        streamed = [channel.stream_stream(f"/{SERVICE}/{name}") for name in ("Produce", "Consume")]

        async def one(number: int) -> None:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                if number % 2:
                    await unary[number % len(unary)](frame + bytes(1 << 16))
                else:
                    call = streamed[number // 2 % 2]()
                    await call.read()
                    raise grpc.aio.AioRpcError(await call.code(), None, None)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED

        await asyncio.gather(*(one(number) for number in range(300)))
    assert guarded.counted("timeline_access_refused_total", "no token") == before + 300
    assert decoded == []
    assert len(guarded.node.service.streams) == 0
    assert (
        guarded.metrics.registry.get_sample_value("timeline_store_calls_total", {"call": "topics", "outcome": "ok"})
        == calls_before
    )
    assert not guarded.gate._guests


async def test_rights_hold_for_topics_and_groups(guarded: Guarded, tokens: Tokens, admin: Any) -> None:
    web = tokens.add("web", "produce", topics=("orders*",), groups=("web",))
    worker = tokens.add("worker", "consume", topics=("orders",))
    guarded.look()
    async with admin.producer("orders", group="ops") as p:
        await p.produce(b"theirs", in_="1h", id="theirs")
    async with client(guarded, web) as tl:
        async with tl.producer("orders", group="web") as p:
            assert (await p.produce(b"x", in_="1h", id="mine")).status == "OK"
            receipts = await p.move_many(["mine", "theirs", "none"], in_="2h")
            assert [receipt.status for receipt in receipts] == ["OK", "FORBIDDEN", "NOT_FOUND"]
        async with tl.producer("orders", group="ops") as p:  # another's group: not even a look
            receipts = await p.cancel_many(["theirs", "none"])
            assert [receipt.status for receipt in receipts] == ["FORBIDDEN", "FORBIDDEN"]
            with pytest.raises(Forbidden, match="its groups are web"):
                await p.produce(b"x", in_="1h", id="forged")
            with pytest.raises(Forbidden, match="its groups are web"):
                await p.cancel_tag("spring")
            bad = await p.produce_many([timeline.Message(b"x", in_="1h", id="ok"), timeline.Message(b"x", in_="1h")])
            assert {receipt.status for receipt in bad} == {"FORBIDDEN"}
        async with tl.producer("payments", group="web") as p:
            with pytest.raises(Forbidden, match=r"its topics are orders\*"):
                await p.produce(b"x", in_="1h")
        for refused in (
            tl.create_topic("orders-2"),
            tl.drop_topic("orders"),
            tl.pause_topic("orders"),
            tl.get("orders", "theirs"),
            anext(aiter(tl.consumer("orders", id="thief"))),
        ):
            with pytest.raises(Forbidden, match="token 'web' may not"):
                await refused
        assert sorted([one.id async for one in tl.scan("orders")]) == ["mine", "theirs"]
    async with client(guarded, worker) as tl:
        found = await tl.get("orders", "theirs")
        assert found is not None and found.payload == b"theirs"
        async with tl.producer("orders") as p:
            with pytest.raises(Forbidden, match="needs the right produce"):
                await p.produce(b"x", in_="1h")


async def test_what_is_not_ones_own_is_neither_seen_nor_told_from_what_is_not_there(
    guarded: Guarded, tokens: Tokens, admin: Any
) -> None:
    web = tokens.add("web", "produce", "consume", "admin", topics=("orders",))
    guarded.look()
    async with client(guarded, web) as tl:
        assert [topic.name for topic in await tl.topics()] == ["orders"]
        (stands,) = (await tl.standing()).brokers
        assert [load.topic for load in stands.topics] == ["orders"]
        told = []
        for topic in ("payments", "no-such-topic"):
            for call in (
                tl.get(topic, "1"),
                tl.forecast(topic),
                tl.drop_topic(topic),
                tl.late(topic=topic),
                tl.producer(topic).cancel("1"),
                tl.producer(topic).produce(b"x", in_="1h"),
                anext(aiter(tl.consumer(topic, id="c"))),
            ):
                with pytest.raises(Forbidden) as refused:
                    await call
                told.append(refused.value.reason.replace(topic, "TOPIC"))
        assert told[: len(told) // 2] == told[len(told) // 2 :]
        async with tl.producer("orders") as p:
            with pytest.raises(NotFound):
                await p.cancel("none")


async def test_only_an_admin_sets_where_webhooks_go_and_sees_their_secrets(
    guarded: Guarded, tokens: Tokens, admin: Any
) -> None:
    (secret,) = await _pushed(admin)
    other = tokens.add("web", "produce", "consume", "operator")
    elsewhere = tokens.add("aside", "admin", topics=("payments",))
    guarded.look()
    for token in (other, elsewhere):
        async with client(guarded, token) as tl:
            for call in (
                tl.update_topic("orders", push_url="http://example.org/"),
                tl.topic_secrets("orders"),
                tl.topic_secrets("orders", rotate=True),
            ):
                with pytest.raises(Forbidden) as refused:
                    await call
                assert secret not in str(refused.value)
    assert await admin.topic_secrets("orders") == (secret,)


async def _pushed(admin: Any) -> tuple[str, ...]:
    await admin.update_topic("orders", push_url="https://example.com/hook")
    secrets: tuple[str, ...] = await admin.topic_secrets("orders")
    return secrets


async def test_an_operator_acts_for_whoever_owns_a_message_and_the_log_says_so(
    guarded: Guarded, tokens: Tokens, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ops, web = tokens.add("ops", "operator", groups=("ops",)), tokens.add("web", "produce", groups=("web",))
    guarded.look()
    async with client(guarded, web) as tl, tl.producer("orders", group="web") as p:
        await p.produce(b"1", in_="1h", id="a")
        await p.produce(b"2", in_="1h", id="b")
    async with admin.producer("orders", group="app") as p:
        await p.produce(b"3", in_="1h", id="c")
    async with client(guarded, ops) as tl, tl.producer("orders") as p:
        with pytest.raises(Forbidden, match="needs the right produce"):
            await p.cancel("a")
    with caplog.at_level(logging.WARNING, "timeline.broker"):
        async with client(guarded, ops, as_operator=True) as tl, tl.producer("orders") as p:
            receipts = await p.move_many(["a", "c", "none"], in_="2h")
            assert [receipt.status for receipt in receipts] == ["OK", "OK", "NOT_FOUND"]
            assert (await p.cancel("b")).status == "OK"
            with pytest.raises(Forbidden):
                await p.produce(b"x", in_="1h")  # it acts on messages, it puts none
    told = [record for record in caplog.records if "as an operator" in record.getMessage()]
    assert [record.getMessage() for record in told] == [
        "as an operator: move of 'a', 'c', 'none' on 'orders'",
        "as an operator: cancel of 'b' on 'orders'",
    ]
    assert {record.identity for record in told} == {"ops"}  # type: ignore[attr-defined]
    async with client(guarded, web, as_operator=True) as tl:
        with pytest.raises(Forbidden, match="has not the right operator"):
            await tl.ping()


async def test_a_session_shown_with_another_token_takes_nothing_over(
    guarded: Guarded, tokens: Tokens, admin: Any
) -> None:
    """The id and the session of a connected consumer, replayed: the thief is refused, the owner stays."""
    owner, thief = tokens.add("worker", "consume"), tokens.add("thief", "consume")
    renewed = tokens.add("worker", "consume")
    guarded.look()
    streams = []

    async def open(token: str) -> Any:
        transport = GrpcTransport(guarded.address, Credentials(token=token))
        stream = await transport.stream("Consume", 20)
        streams.append((transport, stream))
        await stream.send(hello("orders", "worker-1", session=77))
        return stream

    mine = await open(owner)
    assert isinstance(decode(await mine.receive() or b""), Welcome)
    stolen = await open(thief)
    with pytest.raises(timeline.TimelineError, match="is connected with another token"):
        await stolen.receive()
    async with admin.producer("orders") as p:
        await p.produce(b"secret", in_=0, id="m")
    deliver = decode_as(await mine.receive() or b"", Deliver)
    assert deliver.ids.tolist() == [b"m"]
    await mine.send(encode(Credit(echo=5)))
    assert await mine.receive()  # it is still served
    again = await open(renewed)  # another token of the same name is its own
    assert isinstance(decode(await again.receive() or b""), Welcome)
    for transport, stream in streams:
        stream.cancel()
        await transport.close()


async def test_a_revoked_token_ends_what_it_opened(guarded: Guarded, tokens: Tokens, admin: Any) -> None:
    token = tokens.add("worker", "produce", "consume")
    guarded.look()
    async with client(guarded, token) as tl, tl.producer("orders") as p:
        consumer = tl.consumer("orders", id="worker-1")
        await p.produce(b"x", in_=0, id="m")
        delivery = await anext(aiter(consumer))
        await delivery.ack()
        assert guarded.node is not None
        assert len(guarded.node.service.streams) == 2
        taking = asyncio.create_task(anext(aiter(consumer)))
        tokens.revoke("worker")
        guarded.look()
        with pytest.raises(Forbidden, match="never created, or has been revoked"):
            await asyncio.wait_for(taking, 60)
        with pytest.raises(Forbidden):
            await p.produce(b"x", in_="1h")
        with pytest.raises(Forbidden):
            await tl.ping()
    while len(guarded.node.service.streams):
        await guarded.node.service.streams.ended(1.0)


async def test_a_revoked_token_ends_a_take_that_waits(guarded: Guarded, tokens: Tokens, admin: Any) -> None:
    token = tokens.add("worker", "consume")
    guarded.look()
    assert guarded.node is not None
    streams = guarded.node.service.streams
    async with client(guarded, token) as tl:
        taking = asyncio.create_task(tl.take("orders", wait="60s"))
        while not len(streams):
            await asyncio.sleep(0)
        tokens.revoke("worker")
        guarded.look()
        with pytest.raises(Forbidden, match="never created, or has been revoked"):
            await asyncio.wait_for(taking, 60)
    assert not len(streams)


async def test_takes_and_settles_need_the_right_to_consume(guarded: Guarded, tokens: Tokens, admin: Any) -> None:
    given = {
        "web": tokens.add("web", "produce"),
        "worker": tokens.add("worker", "consume"),
        "stranger": tokens.add("stranger", "consume", topics=["other*"]),
    }
    guarded.look()
    async with client(guarded, given["web"]) as web, client(guarded, given["worker"]) as worker:
        async with web.producer("orders") as p:
            await p.produce(b"x", in_=0, id="m")
        with pytest.raises(Forbidden, match="needs the right consume"):
            await web.take("orders", wait=0)
        (d,) = await worker.take("orders")
        async with client(guarded, given["stranger"]) as stranger:
            for other in (web, stranger):
                (refused,) = await other.settle(d.receipt, "ack")
                assert refused.status == "FORBIDDEN"
            with pytest.raises(Forbidden, match="its topics are"):
                await stranger.take("orders", wait=0)
        assert (await worker.settle(d.receipt, "ack"))[0].ok


async def test_a_renewed_token_in_its_file_needs_no_restart(guarded: Guarded, tokens: Tokens, admin: Any) -> None:
    file = tokens.path.with_name("worker.token")
    file.write_text(tokens.add("worker", "produce", "consume") + "\n")
    guarded.look()
    async with timeline.connect(guarded.address, timeout="20s", token=file) as tl, tl.producer("orders") as p:
        consumer = tl.consumer("orders", id="worker-1")
        taking = asyncio.create_task(anext(aiter(consumer)))
        assert (await p.produce(b"x", in_="1h")).status == "OK"
        renewed = tokens.add("new", "produce", "consume")
        file.write_text(renewed)
        tokens.revoke("worker")
        guarded.look()
        await p.produce(b"x", in_=0, id="after")
        assert (await asyncio.wait_for(taking, 60)).id == "after"


async def test_the_token_stands_in_no_error_log_metric_or_repr(
    guarded: Guarded, tokens: Tokens, admin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    web = tokens.add("web", "produce", topics=("orders",))
    secret = web.rpartition("_")[2]
    guarded.look()
    said: list[str] = []
    with caplog.at_level(logging.DEBUG):
        async with client(guarded, web) as tl:
            for call in (tl.get("payments", "1"), tl.create_topic("x"), anext(aiter(tl.consumer("orders", id="c")))):
                with pytest.raises(Forbidden) as refused:
                    await call
                error: BaseException | None = refused.value
                while error is not None:
                    said += [str(error), repr(error)]
                    error = error.__cause__ or error.__context__
            said += [repr(tl), repr(tl._context.channel), repr(Credentials(token=web))]
        tokens.revoke("web")
        guarded.look()
    from prometheus_client import generate_latest

    said += [generate_latest(guarded.metrics.registry).decode(), *(record.getMessage() for record in caplog.records)]
    assert not [text for text in said if secret in text]


async def test_what_is_given_as_a_token_and_is_none_is_not_repeated(guarded: Guarded) -> None:
    for wrong in ("hunter2-password", "timeline_short"):
        with pytest.raises(timeline.Invalid, match="this is no token") as refused:
            timeline.connect("localhost:9000", token=wrong)
        assert wrong not in str(refused.value)


async def test_a_stolen_header_too_long_is_refused_by_grpc_itself(guarded: Guarded, admin: Any) -> None:
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Ping")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(encode(Ping(1.0)), metadata=(("authorization", "Bearer " + "x" * 100_000),))
        assert refused.value.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED)


async def test_what_brokers_ask_each_other_takes_the_right_of_a_broker(
    guarded: Guarded, tokens: Tokens, admin: Any
) -> None:
    everything = tokens.add("app", "produce", "consume", "admin", "operator")
    file = tokens.path.with_name("peer.token")
    file.write_text(tokens.add("peers", "broker"))
    guarded.look()
    hint = encode(Hint("b2", np.array([1], dtype=np.int64), np.array([5], dtype=np.int64)))
    for credentials, why in (
        (Credentials(), "wants a token"),
        (Credentials(token=everything), "needs the right broker"),
        (Credentials(token_file=str(file)), ""),
    ):
        peer = GrpcPeerChannel(guarded.address, credentials)
        if why:
            with pytest.raises(timeline.TimelineError, match=why):
                await peer.unary("Hint", hint, 20.0)
        else:
            assert decode_as(await peer.unary("Hint", hint, 20.0), Hinted)
        await peer.close()
    async with client(guarded, file.read_text()) as tl:
        assert (await tl.ping()).broker == "guarded"
        assert await tl.topics() == []
        with pytest.raises(Forbidden, match="may not see what is there"):
            await tl.forecast("orders")


async def test_a_broker_whose_own_token_is_gone_says_so_like_any_other_trouble_of_a_call(
    guarded: Guarded, tokens: Tokens
) -> None:
    file = tokens.path.with_name("peer.token")
    file.write_text(tokens.add("peers", "broker"))
    guarded.look()
    hint = encode(Hint("b2", np.array([1], dtype=np.int64), np.array([5], dtype=np.int64)))
    credentials = Credentials(token_file=str(file)).check()
    for content, why in ((None, "cannot be read"), ("", "is empty"), ("hunter2", "this is no token")):
        file.unlink() if content is None else file.write_text(content)
        peer = GrpcPeerChannel(guarded.address, credentials)
        with pytest.raises(TransportError, match=why):
            await peer.unary("Hint", hint, 20.0)
        await peer.close()
